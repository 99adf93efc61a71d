"""`packax.explain`: the path of each pass, why no faster one, the blocks visited, the workspace.

Guards against an explanation that differs from what runs. The extension module selects the kernels
with the code that launches them. The tests need its kernels for 8.0 and 9.0, bfloat16, head dim
128.
"""

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax._src.ops import ffi

ext = pytest.importorskip("packax._ext")
LENGTH = 4096
X = jax.ShapeDtypeStruct((1, LENGTH, 8, 128), jnp.bfloat16)
CAUSAL = packax.causal()
FUSED = ("backward_preprocess", "backward_sm90", "backward_postprocess")


@pytest.fixture(autouse=True)
def kernels():
    for kernel, cc in (("forward_sm90", 90), ("backward_sm80", 80)):
        if ext.find(kernel, cc, "bf16", 128, 128) is None:
            pytest.skip("this build has no kernels for 8.0 and 9.0")


def like(x, **sizes):
    names = ("batch", "length", "heads", "dim")
    shape = [sizes.get(name, n) for name, n in zip(names, x.shape, strict=True)]
    return jax.ShapeDtypeStruct(shape, sizes.get("dtype", x.dtype))


def test_a_plain_call():
    found = packax.explain(X, X, X, CAUSAL, gpu="H100")
    assert [x.name for x in found.passes] == ["forward", "backward"]
    assert found["forward"].kernels == ("forward_sm90",) and found["backward"].kernels == FUSED
    assert not found["forward"].why and not found["backward"].why
    # 32 tiles of 128 rows visit 2, 4, ... 64 blocks of 64 keys.
    assert (found.visited, found.blocks) == (32 * 33, 32 * 64)
    # delta, LSE and the sum of dQ for each head; the row ranges
    assert found["backward"].workspace == 4 * (8 * (2 + 128) * LENGTH + 2 * LENGTH)
    text = str(found)
    assert text.startswith("device: compute capability 9.0\nforward: forward_sm90\n")
    assert "blocks visited: 1,056 of 2,048 (51.6 %)" in text
    assert len(packax.explain(X, X, X, CAUSAL, gpu=9.0, gradients=False).passes) == 1


def test_packed_documents_at_head_dim_64():
    if ext.find("forward_sm90_short", 90, "bf16", 64, 64) is None:
        pytest.skip("this build has no kernels of head dim 64")
    ids = np.zeros((1, LENGTH), np.int32)
    x = like(X, dim=64)
    found = packax.explain(x, x, x, packax.causal() & packax.documents(ids), gpu="H100")
    assert found["forward"].kernels == ("forward_sm90_short", "forward_sm90")
    assert "forward: forward_sm90_short or forward_sm90\n" in str(found)


@pytest.mark.parametrize("gpu", ["A100", "8.0", 8.0, 80, "sm_80", "NVIDIA A100"])
def test_names_of_gpus(gpu):
    found = packax.explain(X, X, X, CAUSAL, gpu=gpu)
    assert found.device == "compute capability 8.0"
    assert found["forward"].kernels == ("forward",)
    assert "backward_sm80" in found["backward"].kernels


@pytest.mark.parametrize("gpu", ["K80 TI", 3, True, None])
def test_other_gpus(gpu):
    if gpu is not None:
        with pytest.raises(ValueError, match=r"gpu must be a compute capability, such as 9\.0"):
            packax.explain(X, X, X, CAUSAL, gpu=gpu)
        return
    if ffi.local_capabilities():
        pytest.skip("there is a GPU")
    forward = packax.explain(X, X, X, CAUSAL)["forward"]
    assert forward.path == "XLA" and "pass gpu=" in forward.why[0]
    refused = packax.explain(X, X, X, CAUSAL, implementation="cuda")["forward"]
    assert refused.path == "error" and "needs a CUDA device" in refused.why[0]


def test_why_not_faster():
    options = {"soft_cap": 30.0, "return_max_logits": True}
    found = packax.explain(X, X, X, CAUSAL, gpu=9.0, **options)
    assert found["forward"].kernels == ("forward_fallback",)
    without = "without return_max_logits, these kernels would run: forward_sm90_soft_cap"
    assert without in found["forward"].why
    assert found["backward"].kernels[1] == "backward_sm90_soft_cap"
    found = packax.explain(X, X, X, CAUSAL, gpu=9.0, deterministic=True)
    assert found["backward"].kernels[1:] == ("backward_dkdv_sm90", "backward_dq_sm90")
    assert f"without deterministic, these kernels would run: {', '.join(FUSED)}" in str(found)
    xla = packax.explain(X, X, X, CAUSAL, gpu=9.0, implementation="xla")
    assert xla["forward"].path == "XLA" and 'implementation="xla"' in xla["forward"].why[0]


def test_biases():
    bias = jax.ShapeDtypeStruct((1, 8, LENGTH, LENGTH), jnp.bfloat16)
    if not any(row["kernel"] == "forward_bias" for row in ext.variants()):
        pytest.skip("this build has no kernels for biases")
    found = packax.explain(X, X, X, CAUSAL, gpu=9.0, bias=bias)
    assert "bias" in found["forward"].kernels[0]
    backward = found["backward"]
    assert any("bias" in name for name in backward.kernels)
    if not any("sm90" in name for name in backward.kernels):
        assert backward.why[0].startswith("without bias, these kernels would run: ")


def test_rewrites():
    narrow = like(X, dim=80)
    found = packax.explain(narrow, narrow, narrow, CAUSAL, gpu=9.0)["forward"]
    assert found.kernels == ("forward_sm90",) and not found.changes
    rows = [row for row in ext.variants() if row["kernel"] == "forward" and row["cc"] == 80]
    dims = {(row["qk_dim"], row["v_dim"]) for row in rows}
    to = min((d for d in dims if min(d) >= 80), key=sum, default=None)
    if to is not None:  # a build may be for 9.0 alone
        found = packax.explain(narrow, narrow, narrow, CAUSAL, gpu=8.0)["forward"]
        change = f"head dims (query/value) are padded from 80/80 to {to[0]}/{to[1]}"
        assert found.changes == (change,)
    short = like(X, batch=256, length=16)
    found = packax.explain(short, short, short, CAUSAL, gpu=9.0)["forward"]
    assert found.changes == ("256 short rows are packed into one",)
    few = like(X, heads=1)
    found = packax.explain(X, few, few, CAUSAL, gpu=9.0)["backward"]
    assert found.changes == ("the query heads of each key/value head are divided into 8 parts",)


def test_calls_without_kernels():
    wide = like(X, dtype=jnp.float16, dim=1024)
    found = packax.explain(wide, wide, wide, CAUSAL, gpu=9.0)["forward"]
    assert found.path == "error" and "no forward kernel for float16" in found.why[0]
    found = packax.explain(X, X, X, CAUSAL, gpu=7.5)["forward"]
    assert found.path == "error" and "compute capability 7.5" in found.why[0]


def test_decoding():
    query, cache = like(X, batch=4, length=1), like(X, batch=4, length=8192, heads=2)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)
    (found,) = packax.explain(query, cache, cache, kv_lengths=lengths, gpu=9.0).passes
    assert found.kernels == ("decode", "decode_combine")
    splits = 1024 // (4 * 2)  # so that 1,024 programs are busy
    assert found.workspace == 4 * min(splits, 8192 // 128) * 4 * 8 * (128 + 1)
    table = jax.ShapeDtypeStruct((4, 32), jnp.int32)
    pages = like(cache, batch=99, length=256)
    paged = packax.explain(query, pages, pages, kv_lengths=lengths, block_table=table, gpu=9.0)
    assert paged.passes == (found,)


def packed(tokens, *, sequences=8, pages=(256, 16), width=64, gpu=9.0, dtype=jnp.bfloat16, **more):
    """How a step with room for these tokens runs, with 8 and 2 heads of 128."""
    query = jax.ShapeDtypeStruct((tokens, 8, 128), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((*pages, 2, 128), dtype)
    integers = {"kv_lens": (sequences,), "cu_q_lens": (sequences + 1,)}
    integers |= {"page_indices": (sequences, width)} if width else {}
    options = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in integers.items()}
    options |= {} if width else {"page_indices": None}
    (found,) = packax.explain(query, cache, cache, gpu=gpu, **options, **more).passes
    return found


def test_packed_steps():
    """The kernel for chunks runs where C++ takes its call, and the tall one with room for tiles."""
    portable = ("decode_tall", "decode", "decode_combine")
    assert packed(8).kernels == ("decode", "decode_combine")  # one token for each sequence
    assert packed(100).kernels == portable  # less than a chunk
    assert packed(512).kernels == ("ragged_sm90", *portable)
    assert packed(512, num_seqs=3, window=(99, 0)).kernels == ("ragged_sm90", *portable)
    assert packed(512, pages=(8, 1000), width=0).kernels == ("ragged_sm90_large_pages", *portable)
    for size in (1, 8, 48):
        assert packed(512, pages=(256, size)).kernels == ("ragged_sm90_small_pages", *portable)
    assert packed(512, pages=(2**28, 8)).kernels == portable  # a cache of 2^31 tokens
    assert packed(512, pages=(2**28, 16)).kernels == ("ragged_sm90", *portable)
    drafts = {"draft_mask": np.tri(4, dtype=bool), "num_drafts": np.zeros(8, int)}
    assert packed(512, **drafts) == packed(512)
    for other in ({"soft_cap": 9.0}, {"scale": -1.0}):
        assert packed(512, **other).kernels == portable
    if any(row["cc"] == 80 for row in ext.variants()):
        assert packed(512, gpu=8.0).kernels == portable
    (tile, items), tokens = (16, 512 // 16 + 7 + 512), 512
    chunks = 8 * (1 + 7)  # tiles of at most 4 sequences
    wanted = items * tile * 8 * 129 + 3 * tokens + 8 * items + chunks + 1
    assert packed(512).workspace == 4 * wanted
    assert packed(512, implementation="xla").path == "XLA"
    assert "kv_lens" not in str(packed(512))
    with pytest.raises(TypeError, match="cu_q_lens"):
        packax.explain(X, X, X, gpu=9.0, kv_lens=jnp.zeros(3, int))


def test_blocks_of_masks():
    ids = np.repeat(np.arange(8), LENGTH // 8)
    expression = CAUSAL & packax.documents(ids)
    mask = packax.create_attention_mask(expression)
    found = packax.explain(X, X, X, mask, gpu=9.0)
    assert (found.visited, found.blocks) == (8 * (2 + 4 + 6 + 8), 32 * 64)
    assert packax.explain(X, X, X, expression, gpu=9.0) == found
    unknown = packax.explain(X, X, X, jax.eval_shape(lambda: mask), gpu=9.0)
    assert unknown.visited is None and "blocks visited: unknown" in str(unknown)
    assert unknown.passes == found.passes
    blocks = packax.masks.block_sparse(np.eye(32, dtype=bool), 128)
    found = packax.explain(X, X, X, blocks, gpu=9.0)
    assert (found.visited, found.blocks) == (64, 32 * 64)


def test_arrays_and_requests_that_are_wrong():
    x = jnp.zeros((1, 256, 2, 128), jnp.bfloat16)
    assert packax.explain(x, x, x, CAUSAL, gpu=9.0)["forward"].kernels
    with pytest.raises(TypeError, match=r"pass packax\.causal"):
        packax.explain(X, X, X, CAUSAL, gpu=9.0, is_causal=True)
    with pytest.raises(ValueError, match="key has batch size 2"):
        packax.explain(X, like(X, batch=2), like(X, batch=2), CAUSAL, gpu=9.0)
    with pytest.raises(ValueError, match=r"but is None: for no mask at all pass full\(\)"):
        packax.explain(X, X, X, gpu=9.0)
