"""Caches sharded along the sequence, and sharded pages: each device attends to its keys.

Guards against a gather of the cache, and against lengths, starts and windows counted in a device's
keys instead of those of the sequence. tests/table has the same over two axes of type Explicit.
"""

import functools

import decode_calls
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from decode_calls import DecodeCall
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plain_jit import mesh_of, partitioner
from tiers import marked, once_each

ALL = "decode,rows=3,window=both,starts=of sequences,sinks=sinks"


def attend(call, a, mesh, kind):
    """Keys, and those in each page, over the axis "context". The batch, pages and heads over axes
    of these names. No device may have a whole cache."""
    axes = {"b": "data", "p": "data", "s": "data", "h": "tensor", "k": "context", "o": "context"}
    axes = {at: name for at, name in axes.items() if name in mesh.axis_names}
    axes["g"] = axes.get("h") if int(call.heads.split("/")[1]) > 1 else None
    if kind == "two axes":
        axes = {"k": ("context", "data"), "p": "context", "o": "data"}
    specs = {n: P(*map(axes.get, labels)) for n, labels in call.labels().items()}
    whole = ("starts", "sinks", "key_scale", "value_scale")
    specs |= {name: P() for name in specs if name in whole}
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in a.items()}
        compiled = jax.jit(call.step).lower(placed).compile()
        results = compiled(placed)
    assert f"[{','.join(map(str, a['key'].shape))}]" not in compiled.as_text()
    return results


ROWS = [
    (ALL, (2, 2, 2), "Auto"),
    ("decode,numbers=float8 scales of rows,dtype=bfloat16,heads=4/1", (4,), "Explicit"),
    (ALL, (4,), "Auto"),
    (ALL, (4,), "Explicit"),
    (f"{ALL},heads=4/1", (2, 2, 2), "Explicit"),
    (f"{ALL},dtype=bfloat16", (4,), "gspmd"),
    (ALL, (2, 2), "two axes"),
    ("decode,starts=of rows,rows=3,cap=soft cap", (2,), "Auto"),
    ("decode,window=left,numbers=float8 scales of heads", (2, 2, 2), "Auto"),
    (f"{ALL},cache=pages", (2, 2, 2), "Auto"),
    ("ragged,window=left,starts=of rows,sinks=sinks", (2, 2), "two axes"),
    ("ragged,cache=dense,mix=chunk,window=both", (2, 2, 2), "Auto"),
    ("ragged,numbers=float8 scales of rows,dtype=bfloat16,heads=4/1", (2, 2, 2), "Explicit"),
    ("ragged,mix=chunk", (4,), "gspmd"),
    ("decode,cache=prefix of pairs,numbers=float8", (2, 2), "two axes"),
    ("decode,rows=3,drafts=trees", (2, 2, 2), "Auto"),
    ("decode,rows=3,drafts=trees,cache=pages,numbers=float8 scales of rows", (2, 2), "two axes"),
    ("ragged,drafts=trees,window=left,sinks=sinks", (2, 2), "two axes"),
    ("ragged,cache=dense,mix=chunk,drafts=one tree,starts=of rows", (2, 2, 2), "Explicit"),
]
NAMES = {1: ("context",), 2: ("data", "context"), 3: ("data", "context", "tensor")}


@pytest.mark.parametrize(
    "text,sizes,kind", [marked(row, n in (0, 1, 9, 10)) for n, row in enumerate(ROWS)], ids=str
)
def test_equals_the_reference(text, sizes, kind):
    call = decode_calls.parse(text)
    a = call.arrays(1)
    mesh = mesh_of("Explicit" if kind == "Explicit" else "Auto", sizes, NAMES[len(sizes)])
    with partitioner("gspmd" if kind == "gspmd" else "shardy"):
        got = attend(call, a, mesh, kind)
    assert not call.wrong(got, a)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cache", ["dense", "pages"])
def test_a_length_behind_the_cache_is_nan_in_its_row_alone(cache):
    call = DecodeCall(rows="3", cache=cache)
    a = call.arrays(lengths=np.int32([37, 36, 9, 2]))
    lost = np.arange(12).reshape(4, 3) == 2
    got = attend(call, a, mesh_of("Auto", (4,), ("context",)), "")
    assert not call.wrong(got, a, lost=lost)


def test_pages_that_do_not_exist_are_nan_in_their_rows():
    """Devices have different parts of a sequence, in any order, and nothing of the last."""
    rng = np.random.default_rng(0)
    mesh = mesh_of("Auto", (4,), ("data",))
    pages = rng.standard_normal((8, 4, 2, 8)).astype(np.float32)
    query = rng.standard_normal((6, 4, 8)).astype(np.float32)
    lens, cu = np.array([14, 11, 6, 0], np.int32), np.array([0, 2, 4, 5, 6], np.int32)
    table = np.array([[7, 0, 4, 1], [3, 2, 6, 8], [5, -1, 5, 5], [0, 0, 0, 0]], np.int32)
    step = jax.jit(lambda pages, table: packax.ragged_paged_attention(
        query, pages, pages, lens, table, cu, return_lse=True))  # fmt: skip
    with jax.set_mesh(mesh):
        placed = jax.device_put(pages, NamedSharding(mesh, P("data")))
        for entry in (8, -1, 2**31 - 1, -(2**31)):
            table[1, 2] = entry
            out, lse = step(placed, table)
            lost = np.array([False, False, True, True, True, False])
            np.testing.assert_array_equal(np.isnan(out).all((1, 2)), lost)
            np.testing.assert_array_equal(np.isnan(lse).all(0), lost)
    for got, want in zip((out, lse.T), step(pages, table), strict=True):
        want = want.T if want.ndim == 2 else want
        np.testing.assert_allclose(got[~lost], want[~lost], atol=1e-6)
    assert not out[5].any() and (lse[:, 5] == -np.inf).all()


@pytest.mark.exhaustive
def test_a_cache_that_mapped_calls_share():
    """vmap over the lengths only shares one cache, through a table."""
    a = DecodeCall().arrays(1)
    mesh = mesh_of("Auto", (4,), ("context",))
    cache = NamedSharding(mesh, P(None, "context"))
    key, value = (jax.device_put(np.nan_to_num(a[n]), cache) for n in ("key", "value"))
    lengths = jnp.asarray([a["lengths"], a["lengths"] // 2])
    decode = jax.jit(jax.vmap(packax.decode_attention, (None, None, None, 0)))
    compiled = decode.lower(a["query"], key, value, lengths).compile()
    assert f"[{','.join(map(str, key.shape))}]" not in compiled.as_text()
    want = decode(a["query"], np.asarray(key), np.asarray(value), lengths)
    got = compiled(a["query"], key, value, lengths)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind,more", once_each(["Auto", "Explicit"], ["", ",drafts=trees"]))
def test_a_step_of_each_device_by_vmap(kind, more):
    """Data parallelism without shard_map: devices have their own rows, sequences and pages, and no
    collective moves a cache."""
    call = decode_calls.parse(f"ragged,sinks=sinks{more}")
    each = [call.arrays(seed) for seed in range(4)]
    stacked = {name: np.stack([a[name] for a in each]) for name in each[0]}
    mesh = mesh_of(kind, (4,), ("data",))
    with jax.set_mesh(mesh):
        of = NamedSharding(mesh, P("data"))
        placed = {name: jax.device_put(x, of) for name, x in stacked.items()}
        compiled = jax.jit(jax.vmap(call.step)).lower(placed).compile()
        got = {name: np.asarray(x) for name, x in compiled(placed).items()}
    shape = stacked["key"].shape
    for whole in (shape, (shape[0] * shape[1], *shape[2:])):
        assert f"[{','.join(map(str, whole))}]" not in compiled.as_text()
    for n, a in enumerate(each):
        assert not call.wrong({name: x[n] for name, x in got.items()}, a)


REFUSED = {
    r"query is .*context.*: its sequence axis .* 'context', but .* all new queries": (
        (None, "context"), (), ()),
    r"key is .*: its sequence axis is sharded over 'data', but query is .* batch or heads": (
        ("data",), (None, "data"), ()),
    r"value is .*: its sequence axis .* 'data', but key is .*context.* has another": (
        (), (None, "context"), (None, "data")),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_types_that_disagree(message):
    mesh = mesh_of("Explicit", (2, 2), ("data", "context"))
    shapes = [(2, 4, 4, 8), (2, 32, 2, 8), (2, 32, 2, 8)]
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
        for shape, spec in zip(shapes, REFUSED[message], strict=True)
    ]
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(packax.decode_attention, *args, jax.ShapeDtypeStruct((2,), jnp.int32))


def test_a_shard_map_over_other_axes():
    mesh = mesh_of("Explicit", (2, 2), ("data", "context"))

    @functools.partial(jax.shard_map, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    def mapped(query, key, value, lengths):
        return packax.decode_attention(query, key, value, lengths)

    shapes = (2, 1, 4, 8), (2, 32, 2, 8), (2, 32, 2, 8), (2,)
    specs = P("data"), P("data", "context"), P("data", "context"), P("data")
    args = [
        jax.ShapeDtypeStruct(shape, np.int32 if len(shape) == 1 else np.float32,
            sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]  # fmt: skip
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"key is .*'context', but this is a"):
        jax.eval_shape(mapped, *args)
