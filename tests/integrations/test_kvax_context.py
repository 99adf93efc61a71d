"""packax.kvax over meshes of fake CPU devices equals one device, for every combination of axes, and
with packax's plans, which keep short documents on one rank.

Guards against what kvax gets wrong silently (key/value heads of another group under tensor
parallelism), keys in another order than their ids, and a mesh taken from the wrong source.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import packax
import packax.kvax as kvax
import pytest
from context import assert_same, mesh_of
from jax.sharding import PartitionSpec as P
from kvax_cases import ALONE
from packax.kvax.ops import create_attention_mask, flash_attention
from packax.kvax.utils import (
    attention_specs,
    permute_tokens_context_parallelism,
    unpermute_tokens_context_parallelism,
)
from packings import positions_of
from paths import EXAMPLES
from tiers import some

BATCH, LENGTH, HEADS, KV_HEADS, DIM, RANKS = 4, 96, 8, 4, 8, 4
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


def tokens_of_plans():
    """Row 0: many short documents and padding; row 1: one for all ranks, and one for each rank.
    Positions restart in every document, and decrease inside one document of row 1."""
    lengths = [np.random.default_rng(6).integers(70, 120, 20), [1024, 256, 256, 256, 256]]
    ids = np.full((2, 2048), -1, np.int32)
    for row, sizes in zip(ids, lengths, strict=True):
        row[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.stack([positions_of(row) for row in ids])
    positions[1, 1400:1420] = positions[1, 1400:1420][::-1]
    return (positions, ids) * 2


PLANNED = tokens_of_plans()


def plan_of(kind, **more):
    expression = packax.causal() & packax.documents(PLANNED[1], positions=PLANNED[0])
    return packax.context_plan(expression, ranks=RANKS, kind=kind, **more)


def tensors(kv_heads=KV_HEADS, heads=HEADS, tokens=TOKENS):
    rng = np.random.default_rng(1)
    shapes = [(*tokens[0].shape, n, DIM) for n in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def forward(
    query, key, value, *, tokens=TOKENS, permute=False, sequential=False, mesh=None, plan=None,
    pad=True,
):  # fmt: skip
    """The output, in sequence order."""
    arrays = query, key, value, *tokens[:2]
    given = {"mesh": mesh, "plan": plan}
    if permute:
        arrays = permute_tokens_context_parallelism(arrays, **given)
    query, key, value, positions, ids = arrays
    tokens = (positions, ids, *tokens[2:])
    mask = create_attention_mask(*tokens, calc_bwd_mask=True, skip_pad_tokens=pad, **given)
    out = flash_attention(
        query, key, value, *tokens, mask, scale=0.3, mesh=mesh,
        permute_tokens_for_load_balance=permute, assume_sequential_positions=sequential,
    )  # fmt: skip
    return unpermute_tokens_context_parallelism(out, **given) if permute else out


def results(query, key, value, dout, **settings):
    """Output and gradients, with a stand-in for the log-sum-exp that `assert_same` compares."""
    out, transpose = jax.vjp(functools.partial(forward, **settings), query, key, value)
    return out, np.ones(1), *transpose(dout)


@functools.cache
def one_device(kv_heads=KV_HEADS, heads=HEADS, planned=False, **settings):
    tokens = PLANNED if planned else TOKENS
    with attention_specs(*ALONE):
        step = jax.jit(functools.partial(results, tokens=tokens, **settings))
        return step(*tensors(kv_heads, heads, tokens))


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
            assert_same(jax.block_until_ready(function(*tensors())), one_device())


@pytest.mark.parametrize(
    "kind,more,settings",
    some(
        [
            ("local", {"shared": 0.5}, {"pad": False}),
            ("local", {"shared": 0.5}, {}),
            ("local", {}, {"sequential": True}),
            ("balanced", {}, {}),
            ("balanced", {}, {"pad": False, "sequential": True}),
        ],
        0,
    ),
)
def test_plans_equal_one_device(kind, more, settings):
    plan = plan_of(kind, **more)
    with jax.set_mesh(mesh_of(1, 1, RANKS, 2)), attention_specs(*BOTH):
        step = functools.partial(results, plan=plan, permute=True, tokens=PLANNED, **settings)
        got = jax.block_until_ready(jax.jit(step)(*tensors(tokens=PLANNED)))
    assert_same(got, one_device(planned=True, **settings))


@pytest.mark.exhaustive
def test_a_local_plan_fetches_no_more_than_its_share():
    def gathered_rows(plan):
        """The most rows of keys in a gather of the compiled forward pass."""
        with jax.set_mesh(mesh_of(1, 1, RANKS, 1)), attention_specs(*BOTH):
            step = jax.jit(functools.partial(forward, plan=plan, permute=True, tokens=PLANNED))
            text = step.lower(*tensors(tokens=PLANNED)[:3]).compile().as_text()
        shapes = re.findall(r"= \(?f32\[([\d,]+)\][^=]*? all-gather\(", text)
        return max(int(n) for shape in shapes for n in shape.split(","))

    local, balanced = plan_of("local", shared=0.5), plan_of("balanced")
    assert 0 < local.shared < 2048 // RANKS
    assert gathered_rows(balanced) == 2048
    assert gathered_rows(local) == RANKS * local.shared


@pytest.mark.parametrize("heads,kv_heads", some([(8, 2), (12, 3)], 1))
def test_tensor_parallel_with_replicated_keys_reads_the_right_heads(heads, kv_heads):
    """kvax pairs local query head i with key/value head i * (local heads / all key/value heads)."""
    with jax.set_mesh(mesh_of(1, 1, 1, 4)), attention_specs(*REPLICATED_HEADS):
        got = jax.block_until_ready(jax.jit(results)(*tensors(kv_heads, heads)))
    assert_same(got, one_device(kv_heads, heads))


@contextlib.contextmanager
def entered(mesh):
    """`with mesh:`, as programs for kvax do, without JAX's deprecation warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield


@pytest.mark.parametrize("way", ["with", "argument", "explicit"])
def test_where_the_mesh_comes_from(way):
    explicit = way == "explicit"
    mesh = mesh_of(2, 2, axes=("data", "context"), kind="Explicit" if explicit else "Auto")
    around = {"with": entered, "explicit": jax.set_mesh}.get(way, contextlib.nullcontext)
    specs = (("data", "context", None, None), ("data", None, None, None))
    inputs = tensors()[:3]
    if explicit:
        layouts = [jax.NamedSharding(mesh, P(*specs[n > 0])) for n in range(3)]
        inputs = jax.device_put(inputs, layouts)
    with around(mesh), attention_specs(*specs):
        given = mesh if way == "argument" else None
        program = jax.jit(functools.partial(forward, permute=True, mesh=given))
        out = jax.block_until_ready(program(*inputs))
    np.testing.assert_allclose(out, one_device()[0], atol=1e-5)


@pytest.mark.exhaustive
def test_keys_of_another_length_stay_whole():
    """A cache that every rank has: queries are its last rows, in order."""
    query, key, value, _ = tensors()
    tokens = (POSITIONS[:, -32:], IDS[:, -32:], POSITIONS, IDS)
    specs = (("data", "context", None, None), ("data", None, None, None))
    with jax.set_mesh(mesh_of(1, 2, axes=("data", "context"))), attention_specs(*specs):
        attention = jax.jit(functools.partial(forward, tokens=tokens))
        got = jax.block_until_ready(attention(query[:, -32:], key, value))
    np.testing.assert_allclose(got, one_device()[0][:, -32:], atol=1e-5)


def test_gathers_of_keys_and_scatters_of_gradients_overlap_with_attention():
    """The backward has no all-reduce of the gradients of all keys, which XLA inserts for replicated
    keys."""
    mesh = mesh_of(1, 1, 4, 1)
    place = jax.NamedSharding(mesh, P(None, "context"))
    inputs = [jax.device_put(x, place) for x in tensors()]
    with jax.set_mesh(mesh), attention_specs(*CONTEXT):
        step = jax.jit(lambda *x: results(*x)[0::2], out_shardings=place)
        program = step.lower(*inputs).compile().as_text()
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
    for got, want in ((doubled, 2 * x), (more, x + 1), (same, x)):
        np.testing.assert_array_equal(got, want)
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
