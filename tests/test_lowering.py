"""What the compiler gets, with no GPU: targets, attributes, operands; and which platform gets what.

Guards against an operand or attribute out of the order of docs/design.md, which C++ would read as
another, and against an implementation that is not the one asked for.
"""

import itertools
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import AxisType
from packax import lowering, primitives

DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


class Extension:
    """packax._ext as far as lowering asks it, whatever the build at hand has."""

    @staticmethod
    def variants():
        plain = ("forward", "backward_delta", "backward_dkdv", "backward_dq")
        kernels = (*plain, *(f"{name}_general" for name in plain))
        chip = {"cc": 80, "exact": False}
        return [
            {"kernel": kernel, "dtype": dtype, "qk_dim": qk_dim, "v_dim": v_dim, **chip}
            for kernel in kernels
            for dtype in (("bf16", "f16") if kernel in plain else ("bf16", "f16", "f32", "tf32"))
            for qk_dim, v_dim in DIMS
        ] + [{"kernel": "documents_init", "dtype": "any", "qk_dim": 0, "v_dim": 0, **chip}]


PORTABLE = Extension.variants()


def with_hopper(cc=90, exact=True, dims=DIMS[:3], kernels=("backward_hopper",)):
    """The rows of a build with kernels for Hopper, of bf16."""
    hopper = {"dtype": "bf16", "cc": cc, "exact": exact}
    made = itertools.product(kernels, dims)
    return [*PORTABLE, *({**hopper, "kernel": k, "qk_dim": qk, "v_dim": v} for k, (qk, v) in made)]


@pytest.fixture(autouse=True)
def extension(monkeypatch):
    monkeypatch.setattr(lowering, "_ext", Extension)


def abstract(dtype=jnp.bfloat16, dim=64, v_dim=64, q_len=300, kv_len=300, batch=2):
    return (
        jax.ShapeDtypeStruct((batch, q_len, 8, dim), dtype),
        jax.ShapeDtypeStruct((batch, kv_len, 2, dim), dtype),
        jax.ShapeDtypeStruct((batch, kv_len, 2, v_dim), dtype),
    )


def text_of(function, *args, platforms=("cuda",)):
    return jax.jit(function).trace(*args).lower(lowering_platforms=platforms).as_text()


def calls(text):
    """[(target, {attribute: text}, [operand type], [result type])] of the FFI calls."""
    found = []
    for line in text.splitlines():
        call = re.search(r"custom_call @(packax\w+)\((.*?)\) \{(.*)\} : \((.*)\) -> (.*)$", line)
        if call:
            target, operands, body, types, results = call.groups()
            attributes = re.search(r"mhlo.backend_config = \{(.*?)\}", body)
            pairs = re.findall(r"(\w+) = ([^,}]+)", attributes.group(1))
            kinds = re.findall(r"tensor<([^>]+)>", types)
            assert len(operands.split(",")) == len(kinds)
            found.append((target, dict(pairs), kinds, re.findall(r"tensor<([^>]+)>", results)))
    return found


def step(query, key, value, mask, **kwargs):
    return packax.flash_attention(query, key, value, mask, **kwargs)


def loss(query, key, value, mask, **kwargs):
    return step(query, key, value, mask, **kwargs).astype(jnp.float32).sum()


IDS = np.stack([np.arange(300) // 70, np.arange(300) // 41]).astype(np.int32)


MASK = packax.create_attention_mask(packax.causal() & packax.documents(IDS))
MASK_BY_POSITION = packax.create_attention_mask(
    packax.causal() & packax.documents(IDS, positions=IDS)
)

ROWS, BLOCKS, ORDER, ORDER_192 = "2x300xi32", "2x5x5xi32", "2x3xi32", "2x2xi32"
QUERY, KEY = "2x300x8x64xbf16", "2x300x2x64xbf16"
SUMS = "2x8x300xf32"
PADDED = 320
SMALL = 2 * 8 * PADDED  # workspace of the backward, for the portable kernels
LARGE = 2 * SMALL + 2 * 2 * PADDED + 64 * SMALL  # for those of Hopper


def test_forward():
    ((target, attributes, operands, results),) = calls(
        text_of(lambda *x: step(*x, MASK, scale=0.125), *abstract())
    )
    assert target == "packax_forward_v1"
    assert attributes == {"scale": "1.250000e-01 : f32", "element_test": "1 : i32"}
    assert operands == [QUERY, KEY, KEY, *[ROWS] * 6, BLOCKS, ORDER, ORDER_192]
    assert results == [QUERY, SUMS, "1xi32"]  # the last is the counter, a workspace


def test_two_limits_of_positions():
    """An upper and a lower limit a row, wherever positions are compared."""
    expression = packax.sliding_window(9) & packax.documents(IDS, positions=IDS)
    made = calls(text_of(lambda *x: step(*x, expression), *abstract()))
    assert [target for target, *_ in made] == [
        f"packax_{x}_v1" for x in ("documents", "blocks", "forward")
    ]
    (_, documents, rows, _), _, (_, forward, operands, _) = made
    assert documents == {"compare_positions": "2 : i32"} and forward["element_test"] == "3 : i32"
    assert rows == [ROWS, ROWS, "2x2x300xi32", ROWS]
    assert operands[3:9] == [ROWS, ROWS, ROWS, ROWS, "2x2x300xi32", ROWS]


def general(function, *args):
    """Attributes beside the plain ones, extras and last results of the general calls."""
    found = []
    for target, attributes, operands, results in calls(text_of(function, *args)):
        assert target in ("packax_forward_general_v1", "packax_backward_general_v1")
        backward = "backward" in target
        attributes.pop("element_test"), attributes.pop("scale"), attributes.pop("has_dlse", None)
        assert len(operands) == (24 if backward else 17) and len(results) == (5 if backward else 3)
        found.append((attributes, operands[-4:], results[3 if backward else 2 :]))
    return found


NO_MAP = {"q_block": "0 : i32", "kv_block": "0 : i32"}


def test_general_forward():
    """A stand-in, the output, where an extra is not there."""
    flags = {"soft_cap": "0.000000e+00 : f32", "has_scales": "0 : i32", "has_bias": "0 : i32"}
    flags |= {"exact": "0 : i32"} | NO_MAP
    ((attributes, extras, results),) = general(
        lambda *x: step(*x, MASK, soft_cap=30.0), *abstract()
    )
    assert attributes == flags | {"soft_cap": "3.000000e+01 : f32"}
    assert extras == [ROWS] * 4 and results == [SUMS]
    ((attributes, extras, results),) = general(
        lambda *x: step(*x, MASK, return_max_logits=True)[1], *abstract()
    )
    assert attributes == flags and results == [SUMS]
    bias = packax.alibi(np.ones(8), positions=IDS)
    ((attributes, extras, results),) = general(lambda *x: step(*x, MASK, bias=bias), *abstract())
    assert attributes == flags | {"has_scales": "1 : i32", "has_bias": "1 : i32"}
    assert extras == ["1xf32", "2x8xf32", "2x300xi32", "2x300xi32"]


def test_general_backward():
    number = jax.ShapeDtypeStruct((), jnp.float32)
    gradient = jax.grad(lambda q, k, v, s: loss(q, k, v, MASK, scale=s), (0, 1, 2, 3))
    forward, (attributes, extras, results) = general(gradient, *abstract(), number)
    flags = {"soft_cap": "0.000000e+00 : f32", "has_scales": "1 : i32", "has_bias": "0 : i32"}
    flags |= {"exact": "0 : i32"} | NO_MAP
    assert attributes == flags | {"has_dnumbers": "1 : i32", "wanted": "3 : i32"}
    assert forward[0] == flags
    assert extras == ["1xf32", *[QUERY] * 3] and results == ["2x8x2x300xf32", SUMS]
    gradient = jax.grad(lambda *x: loss(*x, MASK, soft_cap=5.0))
    _, (attributes, _, results) = general(gradient, *abstract())
    assert attributes["has_dnumbers"] == "0 : i32" and results == ["1xf32", SUMS]
    assert attributes["wanted"] == "1 : i32"


@pytest.mark.parametrize("extra", [{}, {"bias": packax.alibi(np.ones(8), positions=IDS)}])
def test_block_sparse(extra):
    """The map's operands lie between the mask's and the extras; the keys' list only in the backward."""
    block_map = np.ones((2, 8, 100, 5), bool)
    mask = packax.create_attention_mask(
        packax.block_sparse(block_map, (3, 64)), q_len=300, kv_len=300
    )
    gradient = jax.grad(lambda *x: loss(*x, mask, **extra), (0, 1, 2))
    (_, forward, operands, _), (_, backward, others, _) = calls(text_of(gradient, *abstract()))
    bits, lists = "2x8x100x1xi32", "2x8x3x7xi32"
    stand_ins = ["1xf32", "2x8xf32", "2x300xi32", "2x300xi32"] if extra else []
    assert operands[10:] == [ORDER, bits, lists, *(stand_ins or [ROWS] * 4)]
    assert others[16:] == [ORDER, bits, lists, lists, *(stand_ins or [QUERY] * 4)]
    for attributes in (forward, backward):
        assert attributes["q_block"] == "3 : i32" and attributes["kv_block"] == "64 : i32"


def test_other_head_dims_take_the_general_kernels():
    """Whatever multiple of 8 a larger pair covers, without a copy."""
    for dims in ((8, 8), (96, 80), (64, 128), (256, 8)):
        query, key, value = abstract(dim=dims[0], v_dim=dims[1])
        found = calls(text_of(lambda *x: step(*x, MASK), query, key, value))
        assert [call[0] for call in found] == ["packax_forward_general_v1"]
        kinds = ["x".join(map(str, (*x.shape, "bf16"))) for x in (query, key, value)]
        assert found[0][2][:3] == kinds
    gradient = jax.grad(lambda *x: loss(*x, MASK))
    targets = [call[0] for call in calls(text_of(gradient, *abstract(dim=96, v_dim=80)))]
    assert targets == ["packax_forward_general_v1", "packax_backward_general_v1"]


def test_backward():
    text = text_of(jax.grad(lambda *x: loss(*x, MASK_BY_POSITION), (0, 1, 2)), *abstract())
    (forward, (target, attributes, operands, results)) = calls(text)
    assert forward[0] == "packax_forward_v1" and target == "packax_backward_v1"
    assert forward[1]["element_test"] == "2 : i32"
    assert attributes == {
        "scale": "1.250000e-01 : f32",
        "element_test": "2 : i32",
        "has_dlse": "0 : i32",
        "wanted": "3 : i32",
    }
    tensors = [QUERY, KEY, KEY, QUERY, SUMS, QUERY, SUMS]
    kv_blocks = "2x4x5xi32"
    assert operands == [*tensors, *[ROWS] * 6, BLOCKS, ORDER, kv_blocks, ORDER]
    assert results == [QUERY, KEY, KEY, f"{SMALL}xf32"]  # the last is the workspace


def backward_workspace(monkeypatch, rows, capabilities=None, tensors=None, mask=MASK, **kwargs):
    """Elements of the backward's float32 workspace, its last result; local devices made up."""
    monkeypatch.setattr(lowering._ext, "variants", staticmethod(lambda: rows))
    monkeypatch.setattr(lowering, "_local_capabilities", lambda: capabilities)
    text = text_of(
        jax.grad(lambda *x: loss(*x, mask, **kwargs), (0, 1, 2)), *(tensors or abstract())
    )
    (_, (target, attributes, _, results)) = calls(text)
    assert target == "packax_backward_v1" and len(results) == 4
    assert "deterministic" not in attributes  # the size says it
    (elements,) = re.fullmatch(r"(\d+)xf32", results[3]).groups()
    return int(elements)


@pytest.mark.parametrize(
    "capabilities,large",
    [(None, True), ({90}, True), ({80, 90}, True), ({80}, False), ({100, 120}, False)],
)
def test_workspace_by_device(monkeypatch, capabilities, large):
    """Without a local GPU, it may be compiled for any."""
    elements = backward_workspace(monkeypatch, with_hopper(), capabilities)
    assert elements == (LARGE if large else SMALL)


def test_workspace_by_request(monkeypatch):
    for flag, elements in ((True, SMALL), (False, LARGE), (np.bool_(True), SMALL)):
        assert backward_workspace(monkeypatch, with_hopper(), deterministic=flag) == elements


APART = ("backward_hopper", "backward_dkdv_hopper", "backward_dq_hopper")


@pytest.mark.parametrize("capability,large", [(90, True), (80, False)])
def test_workspace_of_kernels_apart(monkeypatch, capability, large):
    """For deterministic gradients, and for some of them; not for all head dims."""
    rows = with_hopper(dims=[(192, 128)]) + with_hopper(dims=[(64, 64)], kernels=APART)
    local = {capability}
    sums = 2 * SMALL + 2 * 2 * PADDED + 1 if large else SMALL
    assert backward_workspace(monkeypatch, rows, local, deterministic=True) == sums
    wide = abstract(dim=192, v_dim=128)
    assert backward_workspace(monkeypatch, rows, local, wide, deterministic=True) == SMALL
    text = text_of(jax.grad(lambda *x: loss(*x, MASK), (1, 2)), *abstract())
    (_, (_, attributes, _, results)) = calls(text)
    assert attributes["wanted"] == "2 : i32"
    assert results == ["0xbf16", KEY, KEY, f"{sums}xf32"]
    text = text_of(jax.grad(lambda *x: loss(*x, MASK)), *abstract())
    (_, (_, attributes, _, results)) = calls(text)
    assert attributes["wanted"] == "1 : i32"
    assert results == [QUERY, "0xbf16", "0xbf16", f"{sums}xf32"]


def test_workspace_by_build(monkeypatch):
    assert backward_workspace(monkeypatch, PORTABLE) == SMALL
    assert backward_workspace(monkeypatch, with_hopper(dims=[(128, 128)])) == SMALL
    assert backward_workspace(monkeypatch, with_hopper(), tensors=abstract(jnp.float16)) == SMALL
    large = backward_workspace(monkeypatch, with_hopper(), tensors=abstract(dim=128, v_dim=128))
    assert large == LARGE + 64 * SMALL
    large = backward_workspace(monkeypatch, with_hopper(), tensors=abstract(dim=192, v_dim=128))
    assert large == LARGE + 128 * SMALL  # dQ has the query's columns
    wide = abstract(dim=256, v_dim=256)
    assert backward_workspace(monkeypatch, with_hopper(), tensors=wide) == SMALL
    rows = with_hopper(cc=86, exact=False)  # another rule than sm_90a's: later minors too
    for capability, elements in ((86, LARGE), (89, LARGE), (80, SMALL), (90, SMALL)):
        assert backward_workspace(monkeypatch, rows, {capability}) == elements


def test_workspace_with_one_mask_for_all(monkeypatch):
    mask = packax.create_attention_mask(packax.causal(), q_len=300, kv_len=300)
    assert backward_workspace(monkeypatch, with_hopper(), mask=mask) == LARGE - 2 * PADDED


@pytest.mark.parametrize("length,large", [((1 << 22) - 64, True), (1 << 22, False)])
def test_workspace_up_to_32_bits(monkeypatch, length, large):
    """Rows of all heads: 64 * 8 * 2^22 = 2^31. Elements of the workspace may be more."""
    tensors = abstract(q_len=length, kv_len=64, batch=64)
    mask = packax.create_attention_mask(packax.full(), q_len=length, kv_len=64)
    rows = 64 * 8 * length
    elements = backward_workspace(monkeypatch, with_hopper(), tensors=tensors, mask=mask)
    assert elements == (2 * rows + 2 * length + 64 * rows if large else rows)


def test_capabilities_of_this_process(monkeypatch):
    class Device:
        def __init__(self, text):
            self.compute_capability = text

    assert lowering._local_capabilities() is None  # a test of the CPU suite
    for texts, found in ((["9.0", "8.6", "9.0"], {90, 86}), (["12.1"], {121}), ([], None)):
        devices = [Device(t) for t in texts]
        monkeypatch.setattr(jax, "local_devices", lambda *, backend, devices=devices: devices)
        assert lowering._local_capabilities() == found


@pytest.mark.parametrize("scale,attribute", [(-0.25, "2.5"), (0, "1.0"), (1e-39, "1.0")])
def test_scales_that_kernels_take(scale, attribute):
    """Above 0: a sign moves into the query, and 0 becomes a query of zeros."""
    found = calls(text_of(jax.grad(lambda *x: loss(*x, MASK, scale=scale), (0, 1, 2)), *abstract()))
    assert len(found) == 2
    for _, attributes, _, _ in found:
        assert attributes["scale"].startswith(attribute)


def test_dlse_is_used_only_where_the_lse_was_asked_for():
    def both(*tensors):
        out, lse = step(*tensors, MASK, return_lse=True)
        return out.astype(jnp.float32).sum() + lse.sum()

    backward = calls(text_of(jax.grad(both), *abstract()))[1]
    assert backward[1]["has_dlse"] == "1 : i32"


TENSORS = ["query", "key", "value"]
RANGES = ["q_lo", "q_hi", "q_ids", "kv_ids", "q_pos", "kv_pos", "q_blocks", "q_order"]


def test_the_order_of_mask_operands():
    """The mask is an argument here, so that its leaves have names in the text."""
    kv = np.zeros((2, 500), np.int32)
    mask = packax.create_attention_mask(
        packax.causal() & packax.documents(IDS, kv, positions=IDS, kv_positions=kv)
    )
    text = text_of(jax.grad(loss), *abstract(kv_len=500), mask)
    arguments = TENSORS + [path[-1].name for path, _ in jax.tree.leaves_with_path(mask)]

    def given(target):
        operands = re.search(rf"@{target}\((.*?)\)", text).group(1)
        return [arguments[int(n)] for n in re.findall(r"%arg(\d+)", operands)]

    assert given("packax_forward_v1") == [*TENSORS, *RANGES, "q_order_192"]
    # out, lse, dout and dlse are between them, and no arguments
    assert given("packax_backward_v1") == [*TENSORS, *RANGES, "kv_blocks", "kv_order"]


def test_missing_operands_are_the_row_starts():
    mask = packax.create_attention_mask(packax.causal(), q_len=300, kv_len=500)
    text = text_of(step, *abstract(kv_len=500), mask)
    ((_, attributes, operands, _),) = calls(text)
    assert attributes["element_test"] == "0 : i32"
    assert operands[3:9] == ["1x300xi32"] * 6  # also in the places of the keys' ids and positions
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
        text_of(lambda x: packax.create_attention_mask(packax.documents(x)).q_lo, ids)
    )[0]
    assert documents[3][3] == f"1x{5 * 8192 + 3000 + 3}xi32"


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


# Platforms


def test_elsewhere_there_is_no_call():
    assert not calls(text_of(loss, *abstract(), MASK, platforms=("cpu",)))
    assert not calls(text_of(loss, *abstract(), MASK, platforms=("tpu",)))


def test_xla_on_cuda_runs_no_attention_kernel():
    text = text_of(lambda *x: jax.grad(loss)(*x, MASK, implementation="xla"), *abstract())
    assert not calls(text)


def test_several_platforms_in_one_module():
    text = text_of(jax.grad(loss), *abstract(), MASK, platforms=("cpu", "cuda"))
    assert [call[0] for call in calls(text)] == ["packax_forward_v1", "packax_backward_v1"]
    assert text.count("stablehlo.while") > 0  # the CPU's branch


@pytest.mark.parametrize("direction", [step, jax.grad(loss)])
@pytest.mark.parametrize(
    "dtype,dim,v_dim,said",
    [
        (jnp.bfloat16, 84, 80, "bfloat16 with head dims 84/80"),
        (jnp.float16, 64, 264, "float16 with head dims 64/264"),
        (jnp.float32, 72, 20, "float32 with head dims 72/20"),
    ],
)
@pytest.mark.parametrize("implementation", [None, "cubin"])
def test_no_kernel(direction, dtype, dim, v_dim, said, implementation):
    args = abstract(dtype, dim, v_dim)
    with pytest.raises(NotImplementedError) as error:
        text_of(lambda *x: direction(*x, MASK, implementation=implementation), *args)
    text = str(error.value)
    assert said in text
    listed = [f"{dtype} {qk}/{v}" for qk, v in DIMS for dtype in ("bfloat16", "float16", "float32")]
    assert f"there are: {', '.join(listed)}, and all multiples of 8 up to them." in text
    assert 'implementation="xla" takes any head dim, and float64' in text
    text_of(lambda *x: direction(*x, MASK, implementation="xla"), *args)


def test_a_backward_kernel_may_be_missing_alone(monkeypatch):
    rows = [row for row in Extension.variants() if not row["kernel"].startswith("backward_dq")]
    monkeypatch.setattr(lowering._ext, "variants", staticmethod(lambda: rows))
    text_of(loss, *abstract(), MASK)
    with pytest.raises(NotImplementedError, match="no backward kernel"):
        text_of(jax.grad(loss), *abstract(), MASK)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dim,v_dim", DIMS)
def test_every_pair_of_head_dims(dim, v_dim, dtype):
    """out and dv are of the value's, dq and dk of the query's."""
    text = text_of(jax.grad(loss, (0, 1, 2)), *abstract(dtype, dim, v_dim), MASK)
    (_, _, _, (out, _, _)), (_, _, operands, (dq, dk, dv, _)) = calls(text)
    short = {jnp.bfloat16: "bf16", jnp.float16: "f16"}[dtype]
    rows, keys = (f"2x300x{heads}x%dx{short}" for heads in (8, 2))
    assert out == operands[3] == operands[5] == rows % v_dim
    assert (dq, dk, dv) == (rows % dim, keys % dim, keys % v_dim)


@pytest.mark.parametrize("platforms", [("cpu",), ("tpu",), ("cpu", "cuda")])
def test_cubin_elsewhere_is_an_error(platforms):
    with pytest.raises(NotImplementedError, match="needs a CUDA device, but"):
        text_of(lambda *x: step(*x, MASK, implementation="cubin"), *abstract(), platforms=platforms)
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        jax.jit(lambda *x: step(*x, MASK, implementation="cubin"))(
            *(jnp.zeros(x.shape, x.dtype) for x in abstract())
        )


def test_without_the_extension(monkeypatch):
    """A source tree: XLA does everything, the kernels are an error that says why."""
    monkeypatch.setattr(lowering, "_ext", None)
    monkeypatch.setattr(lowering, "_ext_error", "no such file", raising=False)

    def whole(ids, *tensors, **kwargs):
        mask = packax.create_attention_mask(packax.documents(ids))
        return packax.flash_attention(*tensors, mask, **kwargs)

    ids = jax.ShapeDtypeStruct((2, 300), jnp.int32)
    assert not calls(text_of(lambda *x: whole(*x, implementation="xla"), ids, *abstract()))
    with pytest.raises(NotImplementedError, match=r"packax\._ext.*no such file.*reinstall"):
        text_of(whole, ids, *abstract())


def test_the_extension_s_targets_are_those_called():
    """Of the real extension, if it is built: a name that differs would fail only on a GPU."""
    extension = pytest.importorskip("packax._ext")
    registered = set(extension.registrations())
    if not registered:
        pytest.skip("a stand-in without targets")
    assert registered == set(lowering.TARGETS)


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


def test_cases_lower_for_cuda():
    """Every case, forward and backward, at a head dim that has kernels."""
    for case in cases.CASES:
        *tensors, _ = case.tensors(jnp.bfloat16)
        mask = packax.create_attention_mask(case.expression(), q_len=case.q_len, kv_len=case.kv_len)
        found = calls(text_of(jax.grad(loss), *tensors[:3], mask))
        assert [call[0] for call in found] == ["packax_forward_v1", "packax_backward_v1"], case
