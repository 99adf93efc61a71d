"""packax.kvax over meshes of fake CPU devices equals one device, for every combination of axes.

Guards against what kvax gets wrong silently (key/value heads of another group under tensor
parallelism), keys in another order than their ids, and a mesh taken from the wrong source.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import packax.kvax as kvax
import pytest
from context import assert_same, mesh_of
from jax.sharding import PartitionSpec as P
from packax.kvax.ops import create_attention_mask, flash_attention
from packax.kvax.utils import (
    attention_specs,
    permute_tokens_context_parallelism,
    unpermute_tokens_context_parallelism,
)
from paths import EXAMPLES
from tiers import some

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 4, 96, 8, 4, 8
BATCH_AXES = ("data", "fsdp")
CONTEXT = ((BATCH_AXES, "context", None, None), (BATCH_AXES, None, None, None))
BOTH = ((BATCH_AXES, "context", "tensor", None), (BATCH_AXES, None, "tensor", None))
REPLICATED_HEADS = (("data", None, "tensor", None), ("data", None, None, None))
WIDE_CONTEXT = ((None, ("fsdp", "context"), "tensor", None), (None,) * 4)

IDS = np.sort(np.random.default_rng(0).integers(0, 3, (BATCH, LENGTH)), axis=1)
IDS[1, 40:47] = IDS[2, -9:] = -1
IDS[3] = np.repeat([4, 9, 4, -3], 24)  # an id that reappears
POSITIONS = np.broadcast_to(np.arange(LENGTH), IDS.shape)
TOKENS = (POSITIONS, IDS, POSITIONS, IDS)


def tensors(kv_heads=KV_HEADS, heads=HEADS):
    rng = np.random.default_rng(1)
    shapes = [(BATCH, LENGTH, n, DIM) for n in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def forward(query, key, value, *, permute=False, sequential=False, mesh=None):
    """The output, in sequence order."""
    tokens = TOKENS
    if permute:
        query, key, value, positions, ids = permute_tokens_context_parallelism(
            (query, key, value, *TOKENS[:2]), mesh=mesh
        )
        tokens = (positions, ids, *TOKENS[2:])
    mask = create_attention_mask(*tokens, calc_bwd_mask=True, mesh=mesh)
    out = flash_attention(
        query, key, value, *tokens, mask, scale=0.3, mesh=mesh,
        permute_tokens_for_load_balance=permute, assume_sequential_positions=sequential,
    )  # fmt: skip
    return unpermute_tokens_context_parallelism(out, mesh=mesh) if permute else out


def results(query, key, value, dout, **settings):
    """Output and gradients."""
    attention = functools.partial(forward, **settings)
    out, transpose = jax.vjp(attention, query, key, value)
    return out, *transpose(dout)


@functools.cache
def one_device(kv_heads=KV_HEADS, heads=HEADS):
    with attention_specs((None,) * 4, (None,) * 4):
        return jax.jit(results)(*tensors(kv_heads, heads))


def check(got, **heads):
    got, expected = ([x[0], np.ones(1), *x[1:]] for x in (got, one_device(**heads)))
    assert_same(got, expected)  # which also compares a log-sum-exp


@pytest.mark.parametrize(
    "sizes,specs,settings",
    some(
        [
            ((2, 1, 4, 1), CONTEXT, {"permute": True}),
            ((1, 1, 4, 1), CONTEXT, {"permute": True, "sequential": True}),
            ((1, 1, 4, 1), CONTEXT, {"sequential": True}),
            ((1, 2, 2, 2), BOTH, {"permute": True}),
            ((1, 2, 2, 2), WIDE_CONTEXT, {"permute": True}),
            ((2, 1, 1, 1), CONTEXT, {"permute": True}),  # a context axis with one rank
        ],
        3,
    ),
)
def test_equals_one_device(sizes, specs, settings):
    with jax.set_mesh(mesh_of(*sizes)), attention_specs(*specs):
        if "sequential" in settings:  # other rows of the mask, the same gradient rule
            function = jax.jit(functools.partial(forward, **settings))
            out = jax.block_until_ready(function(*tensors()[:3]))
            np.testing.assert_allclose(out, one_device()[0], atol=1e-5)
        else:
            function = jax.jit(functools.partial(results, **settings))
            check(jax.block_until_ready(function(*tensors())))


@pytest.mark.parametrize("heads,kv_heads", some([(8, 2), (12, 3)], 1))
def test_tensor_parallel_with_replicated_keys_reads_the_right_heads(heads, kv_heads):
    """kvax pairs local query head i with key/value head i

    (local heads / all key/value heads).
    """
    with jax.set_mesh(mesh_of(1, 1, 1, 4)), attention_specs(*REPLICATED_HEADS):
        got = jax.block_until_ready(jax.jit(results)(*tensors(kv_heads, heads)))
    check(got, kv_heads=kv_heads, heads=heads)


@contextlib.contextmanager
def entered(mesh):
    """`with mesh:`, as programs for kvax do, without JAX's deprecation warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield


@pytest.mark.parametrize("way", ["with", "argument", "explicit"])
def test_where_the_mesh_comes_from(way):
    names = ("data", "context")
    mesh = mesh_of(2, 2, axes=names, kind="Explicit" if way == "explicit" else "Auto")
    around = {"with": entered, "explicit": jax.set_mesh}.get(way, contextlib.nullcontext)
    specs = (("data", "context", None, None), ("data", None, None, None))
    given = mesh if way == "argument" else None
    inputs = tensors()
    if way == "explicit":
        layouts = [P(*specs[0]), P(*specs[1]), P(*specs[1]), P(*specs[0])]
        inputs = [
            jax.device_put(x, jax.NamedSharding(mesh, spec))
            for x, spec in zip(inputs, layouts, strict=True)
        ]
    with around(mesh), attention_specs(*specs):
        if way == "explicit":
            program = jax.jit(functools.partial(results, permute=True))
            check(jax.block_until_ready(program(*inputs)))
        else:
            program = jax.jit(functools.partial(forward, permute=True, mesh=given))
            out = jax.block_until_ready(program(*inputs[:3]))
            np.testing.assert_allclose(out, one_device()[0], atol=1e-5)


def test_keys_of_another_length_stay_whole():
    """A cache that every rank has: queries are its last rows, in order."""
    mesh = mesh_of(1, 2, axes=("data", "context"))
    query, key, value, _ = tensors()
    tokens = (POSITIONS[:, -32:], IDS[:, -32:], POSITIONS, IDS)

    def attention(query, key, value):
        return flash_attention(
            query, key, value, *tokens, create_attention_mask(*tokens), scale=0.3,
            permute_tokens_for_load_balance=False,
        )  # fmt: skip

    specs = (("data", "context", None, None), ("data", None, None, None))
    with jax.set_mesh(mesh), attention_specs(*specs):
        got = jax.block_until_ready(jax.jit(attention)(query[:, -32:], key, value))
    np.testing.assert_allclose(got, one_device()[0][:, -32:], atol=1e-5)


def test_gathers_of_keys_and_scatters_of_gradients_overlap_with_attention():
    """The backward has no all-reduce of the gradients of all keys, which XLA inserts for replicated
    keys."""
    mesh = mesh_of(1, 1, 4, 1)
    place = jax.NamedSharding(mesh, P(None, "context"))
    inputs = [jax.device_put(x, place) for x in tensors()]
    with jax.set_mesh(mesh), attention_specs(*CONTEXT):
        program = jax.jit(results, out_shardings=(place,) * 4).lower(*inputs).compile().as_text()
    assert "reduce-scatter" in program
    assert " all-reduce(" not in program


def test_permutation():
    mesh = mesh_of(1, 4, axes=("data", "context"))
    x = jnp.arange(2 * 16 * 3).reshape(2, 16, 3)
    with attention_specs(("data", "context", None, None), ("data", None, None, None)):
        moved = permute_tokens_context_parallelism(x, mesh)
        order = [0, 7, 1, 6, 2, 5, 3, 4]
        np.testing.assert_array_equal(moved, x.reshape(2, 8, 2, 3)[:, order].reshape(x.shape))
        np.testing.assert_array_equal(unpermute_tokens_context_parallelism(moved, mesh), x)
        several = permute_tokens_context_parallelism((x, x[..., 0]), mesh)
        assert type(several) is list
        np.testing.assert_array_equal(several[1], moved[..., 0])
        assert isinstance(permute_tokens_context_parallelism(np.asarray(x), mesh), jax.Array)
    indices = kvax.utils.permutation.generate_shard_indices
    assert indices(8).tolist() == order
    assert indices(8, reverse=True)[indices(8)].tolist() == list(range(8))
    (back,) = kvax.utils.permutation.apply_permutation((moved,), 8, True)
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize(
    "axis,inputs,words",
    [
        ("context", jnp.zeros((2, 12)), ["must be a multiple of 8, twice the size", "12"]),
        ("context", (jnp.zeros((2, 16)), jnp.zeros((2, 8))), ["one batch size", "(2, 16), (2, 8)"]),
        ("context", jnp.zeros(16), ["must be an array (batch, length, ...)", "(16,)"]),
        ("context", (), ["must be an array"]),
        (None, jnp.zeros((2, 16)), ["no axis None", "'data', 'context'"]),
        ("sequence", jnp.zeros((2, 16)), ["no axis 'sequence'"]),
    ],
)
def test_errors_of_the_permutation(axis, inputs, words):
    mesh = mesh_of(1, 4, axes=("data", "context"))
    with attention_specs((None, axis, None, None), (None,) * 4), pytest.raises(ValueError) as error:
        permute_tokens_context_parallelism(inputs, mesh=mesh)
    assert all(word in str(error.value) for word in words), error.value


def test_errors_over_a_mesh():
    mesh = mesh_of(1, 1, 4, 1)
    query, key, value, _ = tensors()

    def mask_of(*tokens, **settings):
        return create_attention_mask(*tokens, **settings)

    with attention_specs(*CONTEXT):
        with jax.set_mesh(mesh):
            with pytest.raises(ValueError, match=r"jax.set_mesh set one with .*'context': 4"):
                mask_of(*TOKENS, mesh=mesh_of(2, 2, 1, 1))
            odd = [x[:, :90] for x in TOKENS]
            with pytest.raises(ValueError, match="length of query_segment_ids, 90, must be a mul"):
                mask_of(*odd)
            uneven = [x[:, :92] for x in TOKENS]  # a multiple of 4 ranks, but not of 8 chunks
            mask = jax.jit(mask_of)(*uneven)
            for settings in ({}, {"assume_sequential_positions": True}):
                with pytest.raises(ValueError, match=r"multiple of (8, )?twice"):
                    flash_attention(
                        *(x[:, :92] for x in (query, key, value)), *uneven, mask, **settings
                    )
            mask = jax.jit(mask_of)(*TOKENS)
        with (
            jax.set_mesh(mesh_of(1, 1, 2, 1)),
            pytest.raises(ValueError, match="mask was built for queries in 4 pieces"),
        ):
            flash_attention(query, key, value, *TOKENS, mask)
        inside = jax.shard_map(
            lambda *tokens: mask_of(*tokens)[0].lower_bounds,
            mesh=mesh,
            in_specs=(P(None, "context"),) * 2 + (P(),) * 2,
            out_specs=P(),
        )
        with pytest.raises(NotImplementedError, match="inside a shard_map over the context axes"):
            inside(*(jnp.asarray(x) for x in TOKENS))


def test_shard_map_takes_tuples():
    mesh = mesh_of(2, 2, axes=("data", "context"))
    x = jnp.arange(16.0).reshape(4, 4)

    def function(x, y, nothing, tree):
        assert nothing is None
        return x * 2, (y + 1, tree["z"][:1])

    mapped = kvax.utils.sharding.shard_map(
        function,
        in_specs=(("data", "context"), (None, "data"), None, {"z": P(("data", "context"), None)}),
        out_specs=(("data", "context"), ((None, "data"), P(("data", "context"), None))),
        mesh=mesh,
    )
    doubled, (more, same) = mapped(x, x, None, {"z": x})
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(more, x + 1)
    np.testing.assert_array_equal(same, x)
    with attention_specs((None, ("data", "context"), None, None), (None,) * 4):
        names = kvax.utils.sharding.get_query_context_mesh_axis_name(mesh)
        assert names == ("data", "context")
        assert kvax.utils.sharding.get_query_context_mesh_axis_size(mesh) == 4


@pytest.mark.exhaustive
def test_a_program_for_kvax_trains(monkeypatch, capsys):
    """examples/from_kvax.py with its one import line changed back gives equal losses on one device
    and on four."""
    pytest.importorskip("optax")
    source = (EXAMPLES / "from_kvax.py").read_text()
    line = "\nimport packax.kvax as kvax\n"
    assert source.count(line) == 1 and source.count("packax.") == 2  # its docstring has the other
    monkeypatch.setitem(sys.modules, "kvax", kvax)
    program = {"__name__": "program"}
    devices_of = jax.devices
    monkeypatch.setattr(jax, "devices", lambda kind="cpu": devices_of(kind))
    exec(compile(source.replace(line, "\nimport kvax\n"), "from_kvax.py", "exec"), program)
    program["LAYERS"] = 1
    shown = []
    for devices in (1, 4):
        settings = ["--devices", str(devices), "--steps", "6", "--seq-len", "64"]
        monkeypatch.setattr(sys, "argv", ["from_kvax.py", *settings])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # `with mesh:`
            program["main"]()
        printed = capsys.readouterr().out
        assert f"on {devices} x cpu" in printed
        losses = [float(line.split()[-1]) for line in printed.splitlines() if "loss" in line]
        assert losses[-1] < losses[0] - 0.1
        shown.append(losses)
    np.testing.assert_allclose(*shown, rtol=2e-3)
