"""What the compiler receives, without a GPU: targets, attributes, operands.

Guards against an operand or attribute out of the order of docs/internals/ffi.md, which C++ would
read as another one, and against an operand that is left out.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import AxisType
from lowered import (
    ABSENT,
    BLOCKS,
    IDS,
    KEY,
    MASK,
    ORDER,
    ORDER_192,
    QUERY,
    ROWS,
    SUMS,
    abstract,
    by_name,
    calls,
    loss,
    step,
    text_of,
)
from packax._src.core.schema import OPERAND_NAMES, SYMBOLS
from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import ffi, primitives

pytestmark = pytest.mark.usefixtures("extension")

MASK_BY_POSITION = packax.create_attention_mask(
    packax.causal() & packax.documents(IDS, positions=IDS)
)


NO_OPTION = {"soft_cap": "0.000000e+00 : f32", "dropout_threshold": "0 : i64"} | dict.fromkeys(
    ("q_block", "kv_block", "bias_of_indices", "float32_products", "first_head", "heads"), "0 : i32"
)


def test_forward():
    ((target, attributes, operands, results),) = calls(
        text_of(lambda *x: step(*x, MASK, scale=0.125), *abstract())
    )
    assert target == "packax_forward_v1"
    wanted = {"scale": "1.250000e-01 : f32", "mask_mode": "1 : i32", "row_keys": "0 : i32"}
    assert attributes == NO_OPTION | wanted
    mask = [*[ROWS] * 6, BLOCKS, ORDER]
    assert operands == [QUERY, KEY, KEY, *mask, *[ABSENT] * 9, ORDER_192, ABSENT, ABSENT]
    # No row_max; the last result is the counter, a workspace.
    assert results == [QUERY, SUMS, ABSENT, "1xi32"]


@pytest.mark.parametrize(
    "expression,keys",
    [
        (packax.sliding_window(127), 128),
        (packax.sliding_window(128) & packax.documents(IDS), 256),
        (packax.sliding_window(100, 27) & packax.chunked(100), 128),
        (packax.chunked(64) | packax.sliding_window(9), 128),
        (packax.chunked(5000) & packax.causal(), 0),
        (packax.sliding_window(None, 3), 0),
        (packax.prefix(np.array([7, 9])) | packax.sliding_window(9), 0),
    ],
)
def test_the_keys_of_a_row(expression, keys):
    """The bound that C++ chooses kernels by, also if the mask is an argument of the program."""
    query = jnp.zeros((2, 300, 8, 64), jnp.bfloat16)
    mask = packax.create_attention_mask(expression, q_len=300, kv_len=300)
    assert mask.row_keys == keys
    ((_, attributes, *_),) = calls(text_of(step, query, query, query, mask))
    assert attributes["row_keys"] == f"{keys} : i32"


ALIBI = ("scales", "slopes", "q_bias_pos", "kv_bias_pos")


DELTA = f"{2 * 8 * 320}xf32"  # workspace of the portable kernels, rows padded to 64
OF_BACKWARD = {"algorithm": '"portable"', "needs_grad": "3 : i32"}


@pytest.mark.parametrize(
    "of_indices,grads,arguments,numbers",
    [
        (1, ABSENT, (0, 1, 2), {}),
        (0, ABSENT, (0, 1, 2), {"scale": jax.ShapeDtypeStruct((), jnp.float32)}),
        (1, "2x8x2x300xf32", (0, 3), {"slopes": jax.ShapeDtypeStruct((8,), jnp.float32)}),
    ],
)
def test_a_bias_of_indices(of_indices, grads, arguments, numbers):
    """bias_of_indices tells the handler that Hopper's kernels may be used; the arrays stay for the
    fallback kernels. An array as scale turns it off."""

    def function(query, key, value, *given):
        more = {"scale": 0.25, "slopes": np.ones(8), **dict(zip(numbers, given, strict=True))}
        bias = packax.alibi(more.pop("slopes"))
        return loss(query, key, value, MASK, bias=bias, **more)

    found = calls(text_of(jax.grad(function, arguments), *abstract(), *numbers.values()))
    for call in found:
        operands = by_name(call)
        assert call[1]["bias_of_indices"] == f"{of_indices} : i32"
        assert [operands[name] for name in ALIBI] == ["1xf32", "1x8xf32", "1x300xi32", "1x300xi32"]
    assert found[1][3][3] == grads


def test_sinks_are_an_operand_of_the_kernels():
    """No other operation reads or writes an array as large as the query, so neither pass goes over
    the output again. The backward returns a number per row for their gradient."""
    sinks = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    without = jax.grad(lambda *x: loss(*x, MASK), (0, 1, 2))
    with_sinks = jax.grad(lambda sinks, *x: loss(*x, MASK, sinks=sinks), (0, 1, 2, 3))
    texts = [text_of(without, *abstract()), text_of(with_sinks, sinks, *abstract())]
    forward, backward = calls(texts[1])
    assert by_name(forward)["sinks"] == "1x8xf32" and forward[3][:2] == [QUERY, SUMS]
    assert backward[3][4] == SUMS
    large = [[x for x in y.splitlines() if "tensor<2x300x8x64x" in x] for y in texts]
    assert len(large[0]) == len(large[1])


def test_a_new_number_is_refused_until_kernels_take_it():
    new = [("offset", float, dataclasses.field(default=0.0))]
    spec = dataclasses.make_dataclass(
        "Spec", new, bases=(AttentionSpec,), frozen=True, kw_only=True
    )
    of = Operands(*abstract())
    for target in ("forward", "backward", "forward_tangent", "decode", "ragged"):
        assert ffi.unread(target, of, spec(scale=0.5, soft_cap=3.0)) == []
        assert ffi.unread(target, of, spec(offset=1.0)) == ["offset"]


def test_operands_that_no_kernel_reads(monkeypatch):
    """An option that is not passed on would give wrong numbers."""
    names = tuple(x for x in OPERAND_NAMES["forward"] if x != "slopes")
    monkeypatch.setitem(ffi.OPERAND_NAMES, "forward", names)
    bias = packax.alibi(np.ones(8))
    with pytest.raises(NotImplementedError, match="no forward kernel takes slopes: implementation"):
        text_of(lambda *x: step(*x, MASK, bias=bias), *abstract())


def test_other_head_dims():
    """Any multiple of 8 up to a compiled pair; where only the fallback kernels cover it, nothing is
    padded."""
    for name, dims in (
        *(("f32", dims) for dims in ((8, 8), (96, 80), (64, 128), (256, 8))),
        *(("bf16", dims) for dims in ((512, 512), (320, 264))),
    ):
        dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[name]
        query, key, value = abstract(dtype, dim=dims[0], v_dim=dims[1])
        found = calls(text_of(lambda *x: step(*x, MASK), query, key, value))
        assert [call[0] for call in found] == ["packax_forward_v1"]
        kinds = ["x".join(map(str, (*x.shape, name))) for x in (query, key, value)]
        assert found[0][2][:3] == kinds
    gradient = jax.grad(lambda *x: loss(*x, MASK))
    targets = [call[0] for call in calls(text_of(gradient, *abstract(dim=320, v_dim=264)))]
    assert targets == ["packax_forward_v1", "packax_backward_v1"]


def test_backward():
    text = text_of(jax.grad(lambda *x: loss(*x, MASK_BY_POSITION), (0, 1, 2)), *abstract())
    (forward, backward) = calls(text)
    target, attributes, _, results = backward
    assert forward[0] == "packax_forward_v1" and target == "packax_backward_v1"
    assert forward[1]["mask_mode"] == "2 : i32"
    assert attributes == NO_OPTION | OF_BACKWARD | {
        "scale": "1.250000e-01 : f32",
        "mask_mode": "2 : i32",
    }
    given = {name: x for name, x in by_name(backward).items() if x != ABSENT}
    assert given == {
        **dict(zip(TENSORS, [QUERY, KEY, KEY], strict=True)),
        **dict(zip(RANGES, [*[ROWS] * 6, BLOCKS, ORDER], strict=True)),
        "out": QUERY,
        "lse": SUMS,
        "dout": QUERY,
        "kv_blocks": "2x4x5xi32",
        "kv_order": ORDER,
    }
    assert results == [QUERY, KEY, KEY, *[ABSENT] * 3, DELTA]


@pytest.mark.parametrize("scale,attribute", [(-0.25, "2.5"), (0, "1.0"), (1e-39, "1.0")])
def test_scales_that_kernels_take(scale, attribute):
    """Kernels need a scale above 0: a sign moves into the query, and scale 0 becomes a query of
    zeros."""
    found = calls(text_of(jax.grad(lambda *x: loss(*x, MASK, scale=scale), (0, 1, 2)), *abstract()))
    assert len(found) == 2
    for _, attributes, _, _ in found:
        assert attributes["scale"].startswith(attribute)


def test_dlse_is_used_only_where_the_lse_was_asked_for():
    def both(*tensors):
        out, lse = step(*tensors, MASK, return_lse=True)
        return out.astype(jnp.float32).sum() + lse.sum()

    backward = calls(text_of(jax.grad(both), *abstract()))[1]
    assert by_name(backward)["dlse"] == SUMS


TENSORS = ["query", "key", "value"]
RANGES = ["kv_start", "kv_end", "q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks", "q_order"]


def test_the_order_of_mask_operands():
    """The mask is an argument, so that its leaves have names in the text."""
    kv = np.zeros((2, 500), np.int32)
    mask = packax.create_attention_mask(
        packax.causal() & packax.documents(IDS, kv_segment_ids=kv, positions=IDS, kv_positions=kv)
    )
    text = text_of(jax.grad(loss), *abstract(kv_len=500), mask)
    arguments = TENSORS + [path[-1].name for path, _ in jax.tree.leaves_with_path(mask)]

    def given(target):
        operands = re.search(rf"@{target}\((.*?)\)", text).group(1)
        return [arguments[int(n)] for n in re.findall(r"%arg(\d+)", operands)]

    assert given("packax_forward_v1") == [*TENSORS, *RANGES, "q_order_192"]
    # out, lse, dout and dlse are not arguments of the program.
    assert given("packax_backward_v1") == [*TENSORS, *RANGES, "kv_blocks", "kv_order"]


def test_missing_operands_are_the_row_starts():
    mask = packax.create_attention_mask(packax.causal(), q_len=300, kv_len=500)
    text = text_of(step, *abstract(kv_len=500), mask)
    ((_, attributes, operands, _),) = calls(text)
    assert attributes["mask_mode"] == "0 : i32"
    assert operands[3:9] == ["1x300xi32"] * 6  # also in the slots of the keys' ids and positions
    given = re.search(r"v1\((.*?)\)", text).group(1).split(", ")
    assert given[5:9] == [given[3]] * 4


@pytest.mark.parametrize("positions,compare", [({}, "0 : i32"), ({"positions": IDS}, "1 : i32")])
def test_mask_targets(positions, compare):
    def build(ids):
        return packax.create_attention_mask(packax.causal() & packax.documents(ids, **positions))

    documents, blocks = calls(text_of(build, jax.ShapeDtypeStruct((2, 300), jnp.int32)))
    workspace = 5 * 1024 + 300 + 1
    assert documents[0] == "packax_documents_v1"
    assert documents[1] == {"compare_positions": compare}
    assert documents[2] == [ROWS] * 4
    assert documents[3] == [ROWS, ROWS, ROWS, f"2x{workspace}xi32"]
    assert blocks[0] == "packax_blocks_v1" and blocks[1] == {"kv_len": "300 : i64"}
    assert blocks[2] == [ROWS] * 3
    assert blocks[3] == [BLOCKS, "2x4x5xi32", ORDER, ORDER_192, ORDER]


def test_workspace_of_documents_grows_with_the_tables():
    ids = jax.ShapeDtypeStruct((1, 3000), jnp.int32)
    documents = calls(
        text_of(lambda x: packax.create_attention_mask(packax.documents(x)).kv_start, ids)
    )[0]
    assert documents[3][3] == f"1x{5 * 8192 + 3000 + 3}xi32"


@pytest.mark.parametrize(
    "batch,keys,targets",
    [
        (1, 1 << 27, ["packax_documents_v1", "packax_blocks_v1"]),
        (1, (1 << 27) + 1, ["packax_blocks_v1"]),  # the tables would exceed 32-bit indices
        (65535, 100, ["packax_documents_v1", "packax_blocks_v1"]),
        (65536, 100, []),  # batch rows are the y dimension of a grid
    ],
)
def test_masks_too_large_for_the_kernels_are_made_by_xla(batch, keys, targets):
    def build(q_ids, kv_ids):
        return packax.create_attention_mask(packax.documents(q_ids, kv_segment_ids=kv_ids))

    ids = (jax.ShapeDtypeStruct((batch, n), jnp.int32) for n in (100, keys))
    assert [name for name, *_ in calls(text_of(build, *ids))] == targets


def test_vmap_is_one_call():
    tensors = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in abstract()]
    mapped = jax.vmap(lambda *x: step(*x, MASK))
    ((_, _, operands, results),) = calls(text_of(mapped, *tensors))
    assert operands[0] == "6x300x8x64xbf16" and operands[3] == "6x300xi32"
    assert results[0] == "6x300x8x64xbf16"


def test_inside_shard_map_the_call_is_local():
    mesh = jax.make_mesh(
        (2,), ("data",), devices=jax.devices("cpu")[:2], axis_types=(AxisType.Auto,)
    )
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(spec, spec, spec, spec), out_specs=spec, check_vma=True
    )
    sharding = jax.sharding.NamedSharding(mesh, spec)
    tensors, mask = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (abstract(), MASK)
    )
    ((_, _, operands, _),) = calls(text_of(mapped, *tensors, mask))
    assert operands[0] == "1x300x8x64xbf16" and operands[3] == "1x300xi32"


def test_the_extension_s_targets_are_those_called():
    """Checks the real extension if it is built: a mismatched name would otherwise fail only on a
    GPU."""
    extension = pytest.importorskip("packax._ext")
    registered = set(extension.registrations())
    if not registered:
        pytest.skip("a stand-in without targets")
    assert registered == set(SYMBOLS.values())


def test_primitives_are_named_as_documented():
    assert [
        p.name
        for p in (
            primitives.documents_p,
            primitives.blocks_p,
            primitives.forward_p,
            primitives.backward_p,
        )
    ] == ["packax_documents", "packax_blocks", "packax_forward", "packax_backward"]


@pytest.mark.parametrize("options", [{}, {"soft_cap": 30.0}], ids=["plain", "fallback"])
def test_only_a_barrier_reads_the_forward(extension, options):
    """Otherwise XLA runs the kernel twice: once for the results that scan saves and once for other
    uses."""
    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)

    def layers(query, key, value):
        @functools.partial(jax.checkpoint, policy=keep)
        def layer(x, _):
            return packax.flash_attention(x, key, value, MASK, **options), None

        return jax.lax.scan(layer, query, None, length=3)[0].astype(jnp.float32).sum()

    text = text_of(jax.grad(layers), *abstract())
    assert [target for target, *_ in calls(text)].count(forward_of(text)) == 1
    call = rf"(%\w+):\d+ = stablehlo.custom_call @{forward_of(text)}\("
    (body,) = [x for x in text.split("func.func") if re.search(call, x)]
    (made,) = re.findall(call, body)
    readers = [line for line in body.splitlines() if re.search(rf"{made}#[01]\b", line)]
    assert len(readers) == 1 and "optimization_barrier" in readers[0], readers


def forward_of(text):
    (target,) = {target for target, *_ in calls(text) if "forward" in target}
    return target
