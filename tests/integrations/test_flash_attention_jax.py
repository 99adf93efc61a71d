"""packax.integrations.flash_attention_jax against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from packax.integrations import flash_attention_jax as ours

SHAPES = {  # of q, k, v; v may have another last dimension
    "as there": ((2, 3, 37, 8), (2, 3, 37, 8), (2, 3, 37, 8)),
    "cross": ((2, 2, 5, 8), (2, 2, 70, 8), (2, 2, 70, 12)),
    "tall": ((1, 2, 33, 8), (1, 2, 9, 8), (1, 2, 9, 8)),
    "one head": ((2, 4, 21, 8), (2, 21, 8), (2, 21, 8)),
    "one of both": ((2, 4, 21, 8), (2, 1, 21, 8), (2, 21, 8)),
    "matrix": ((19, 8), (19, 8), (19, 8)),
    "heads alone": ((3, 19, 8), (3, 19, 8), (19, 8)),
    "leading": ((2, 1, 3, 2, 11, 8), (2, 1, 3, 2, 11, 8), (2, 1, 3, 11, 8)),
}


def tensors(shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return q, k, v, jnp.asarray(rng.standard_normal((*q.shape[:-1], v.shape[-1])), dtype)


def flat(x, batch, heads_of=None):
    """(*batch, heads, length, dim) as the oracle's (B, length, heads, dim); without a heads axis:
    one head."""
    if heads_of is not None and 2 <= x.ndim < heads_of:
        x = np.expand_dims(x, -3)
    if x.ndim == 2:
        x = x[None]
    return np.asarray(x, np.float64).reshape(batch, *x.shape[-3:]).swapaxes(1, 2)


def check(call, q, k, v, dout, allowed, scale):
    """Output and gradients within twice the error of plain attention in the same dtype."""
    batch = int(np.prod(q.shape[:-3]))

    def run(q, k, v):
        out, transpose = jax.vjp(call, q, k, v)
        return out, transpose(dout)

    out, gradients = jax.jit(run)(q, k, v)
    assert out.shape == dout.shape and out.dtype == q.dtype
    operands = [flat(x, batch, q.ndim) for x in (q, k, v)]
    dout = flat(dout, batch)
    kv_heads = max(x.shape[2] for x in operands[1:])
    operands[1:] = (np.repeat(x, kv_heads // x.shape[2], 2) for x in operands[1:])
    true = oracle.exact(*operands, allowed, scale, dout)
    plain = oracle.plain(
        *(jnp.asarray(x, q.dtype) for x in operands), allowed, scale, jnp.asarray(dout, q.dtype)
    )
    got = [flat(x, batch, q.ndim) for x in (out, *gradients)]

    def results(out, *gradients):
        """In the dtype of q, without an lse, with gradients summed over the heads that were
        repeated for the oracle."""
        wide = [np.asarray(x, np.float64) for x in gradients]
        for i, x in enumerate(got[1:]):
            wide[i] = wide[i].reshape(*x.shape[:3], -1, x.shape[3]).sum(3)
        return oracle.Results(*(x.astype(q.dtype) for x in (out, np.zeros(1), *wide)))

    (true, plain) = (results(x.out, x.dq, x.dk, x.dv) for x in (true, plain))
    oracle.check(results(*got), true, plain)


@pytest.mark.parametrize("name", ["cross", "one of both", "matrix", "heads alone", "leading"])
def test_flash_attention(name):
    q, k, v, dout = tensors(SHAPES[name])
    batch = q.shape[:-3]
    key_mask = np.random.default_rng(1).random((*batch, k.shape[-2])) < 0.6
    key_mask.reshape(-1, k.shape[-2])[-1] &= len(batch) == 0  # a batch row without keys
    allowed = np.broadcast_to(
        key_mask.reshape(-1, 1, k.shape[-2]), (int(np.prod(batch)), q.shape[-2], k.shape[-2])
    )
    check(
        lambda q, k, v: ours.flash_attention(q, k, v, key_mask),
        q, k, v, dout, allowed, 8**-0.5,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["tall", "one head", "leading"])
def test_causal_flash_attention(name):
    q, k, v, dout = tensors(SHAPES[name])
    q_len, k_len = q.shape[-2], k.shape[-2]
    allowed = np.tril(np.ones((q_len, k_len), bool), k_len - q_len)
    check(ours.causal_flash_attention, q, k, v, dout, allowed, 8**-0.5)


def test_key_masks_of_every_kind():
    q, k, v, _ = tensors(SHAPES["as there"])
    mask = np.random.default_rng(2).random((2, 37)) < 0.5
    out = ours.flash_attention(q, k, v, mask)
    for same in (mask.astype(np.int32), jnp.where(mask, 0.5, 0), mask.tolist()):
        np.testing.assert_array_equal(out, ours.flash_attention(q, k, v, same))
    one = ours.flash_attention(q, k, v, mask[0])
    np.testing.assert_array_equal(one[0], out[0])
    np.testing.assert_array_equal(one, ours.flash_attention(q, k, v, mask[:1]))
    assert np.abs(one[1] - out[1]).max() > 0.1


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_nothing_to_attend(sizes):
    batch, q_len, k_len = sizes
    q, k = jnp.ones((batch, 4, q_len, 8)), jnp.ones((batch, 4, k_len, 8))
    for out in (
        ours.flash_attention(q, k, k, jnp.ones((batch, k_len), bool)),
        ours.causal_flash_attention(q, k, k),
    ):
        assert out.shape == q.shape and not out.any()


@pytest.mark.parametrize(
    ("dtype", "dim", "kernels"),
    [
        ("bfloat16", 64, True),
        ("float16", 128, True),
        ("float32", 64, True),
        ("float32", 20, False),
        ("bfloat16", 600, False),
    ],
)
def test_kernels_where_there_are_and_xla_for_the_rest(extension, dtype, dim, kernels):
    """On every backend no request may fail because a kernel is missing."""
    x = jax.ShapeDtypeStruct((2, 3, 37, dim), dtype)
    traced = jax.jit(jax.grad(lambda *x: ours.causal_flash_attention(*x).sum())).trace(x, x, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("packax_forward" in text, "packax_backward" in text) == (kernels, kernels)
