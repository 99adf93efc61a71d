"""decode_attention over caches sharded along the sequence: each device attends to its slice.

Guards against a gather of the cache, and against lengths, starts and windows counted from the start
of a slice. tests/table has the same over two axes of type Explicit.
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
from tiers import marked

ALL = "decode,rows=3,window=both,starts=of sequences,sinks=sinks"


def attend(call, a, mesh, kind):
    """The cache over the axis "context", and the batch and heads over axes of these names. No
    device may have a whole cache."""
    axes = {"b": "data", "h": "tensor", "k": "context"}
    axes = {at: name for at, name in axes.items() if name in mesh.axis_names}
    axes["g"] = axes.get("h") if int(call.heads.split("/")[1]) > 1 else None
    if kind == "two axes":
        axes = {"k": ("context", "data")}
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
]
NAMES = {1: ("context",), 2: ("data", "context"), 3: ("data", "context", "tensor")}


@pytest.mark.parametrize(
    "text,sizes,kind", [marked(row, n < 2) for n, row in enumerate(ROWS)], ids=str
)
def test_equals_the_reference(text, sizes, kind):
    call = decode_calls.parse(text)
    a = call.arrays(1)
    mesh = mesh_of("Explicit" if kind == "Explicit" else "Auto", sizes, NAMES[len(sizes)])
    with partitioner("gspmd" if kind == "gspmd" else "shardy"):
        got = attend(call, a, mesh, kind)
    assert not call.wrong(got, a)


@pytest.mark.exhaustive
def test_a_length_behind_the_cache_is_nan_in_its_row_alone():
    call = DecodeCall(rows="3")
    a = call.arrays(lengths=np.int32([37, 36, 9, 2]))
    lost = np.arange(12).reshape(4, 3) == 2
    got = attend(call, a, mesh_of("Auto", (4,), ("context",)), "")
    assert not call.wrong(got, a, lost=lost)


@pytest.mark.exhaustive
def test_pages_that_are_sharded_within_are_gathered_with_a_warning():
    """vmap over the lengths only shares one cache, through a table."""
    a = DecodeCall().arrays(1)
    mesh = mesh_of("Auto", (4,), ("context",))
    cache = NamedSharding(mesh, P(None, "context"))
    key, value = (jax.device_put(np.nan_to_num(a[n]), cache) for n in ("key", "value"))
    lengths = jnp.asarray([a["lengths"], a["lengths"] // 2])
    decode = jax.jit(jax.vmap(packax.decode_attention, (None, None, None, 0)))
    with pytest.warns(UserWarning, match="pages of key and value are sharded over 'context'"):
        got = decode(a["query"], key, value, lengths)
    want = decode(a["query"], np.asarray(key), np.asarray(value), lengths)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


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
