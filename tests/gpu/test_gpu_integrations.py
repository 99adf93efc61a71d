"""The integrations with other projects on a GPU: calls reach the kernels, with right results."""

from __future__ import annotations

import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax.integrations import flash_attention_jax

pytestmark = pytest.mark.gpu
NAMES = ("out", "dquery", "dkey", "dvalue")
B, S, HEADS, KV_HEADS, DIM = 2, 300, 4, 2, 64
IDS = np.stack([np.repeat([3, 1, 2], [90, 100, 110]), np.repeat([0, 7, -1], [20, 200, 80])])
ALLOWED = (IDS[:, :, None] == IDS[:, None]) & (IDS != -1)[:, None] & np.tri(S, dtype=bool)


def tensors(dtype=jnp.bfloat16):
    rng = np.random.default_rng(3)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [rng.standard_normal((B, S, count, DIM)).astype(dtype) for count in heads]


def check(attention, allowed, scale=DIM**-0.5):
    """Output and gradients."""
    q, k, v, dout = tensors()

    @jax.jit
    def run(*x):
        out, back = jax.vjp(attention, *x)
        return dict(zip(NAMES, (out, *back(dout.astype(out.dtype))), strict=True))

    assert "packax_forward" in run.lower(q, k, v).as_text()
    compare(run(q, k, v), (q, k, v, dout), allowed, scale)


def compare(got, x, allowed, scale):
    operands = dict(zip(("query", "key", "value", "dout"), x, strict=True)) | {"scale": scale}
    references = dense.true_and_plain(operands, allowed, "bfloat16")
    wrong = dense.close({name: np.asarray(x) for name, x in got.items()}, *references)
    assert not wrong, wrong


def test_dot_product_attention():
    lengths = np.int32([300, 123])
    place = np.arange(S)
    allowed = (place <= place[:, None]) & (place > place[:, None] - 51)
    allowed = allowed & (place < np.asarray(lengths)[:, None, None])
    options = {"is_causal": True, "local_window_size": (50, 0), "key_value_seq_lengths": lengths}
    check(functools.partial(packax.dot_product_attention, **options), allowed)


def test_mask_of_keys():
    keys = np.random.default_rng(0).random((B, 1, 1, S)) < 0.5
    check(functools.partial(packax.dot_product_attention, mask=keys), keys[:, 0].repeat(S, 1))


def test_flax():
    flax = pytest.importorskip("packax.integrations.flax")
    mask = packax.create_attention_mask(packax.causal() & packax.documents(IDS))
    check(functools.partial(flax.dot_product_attention, mask=mask), ALLOWED)


def test_maxtext():
    pytest.importorskip("flax")
    from packax.integrations.maxtext import AttentionOp

    op = AttentionOp(attention_type="local_sliding", sliding_window_size=70)
    place = np.arange(S)
    window = place > place[:, None] - 70
    check(lambda q, k, v: op(q, k, v, IDS), ALLOWED & window, 1.0)


def test_maxtext_decoding():
    """A cache whose tokens are a ring buffer that wrapped, with a hole; other entries are NaN."""
    pytest.importorskip("flax")
    from packax.integrations.maxtext import AttentionOp

    op = AttentionOp(attention_type="local_sliding", sliding_window_size=200)
    ids = np.ones((B, S), int)
    ids[0, 100:170] = ids[1, 250] = 0
    q, k, v, _ = tensors()
    q, hidden = q[:, :1], (ids == 0)[..., None, None]
    cached = (*(np.where(hidden, np.nan, x).astype(x.dtype) for x in (k, v)), ids), None
    run = jax.jit(lambda q, cached: op(q, *[None] * 4, "autoregressive", cached))
    assert "packax_decode" in run.lower(q, cached).as_text()
    allowed = ((ids == 1) & (np.arange(S) >= S - 200))[:, None]
    compare({"out": run(q, cached)}, (q, k, v, np.zeros_like(q)), allowed, 1.0)


def test_flash_attention_jax():
    def attention(q, k, v):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return flash_attention_jax.causal_flash_attention(q, k, v).swapaxes(1, 2)

    check(attention, np.tril(np.ones((S, S), bool)))


def test_flash_attention_jax_in_float32():
    """With the kernels for float32 products, which the precision set here selects."""
    q, k, v, _ = (x.swapaxes(1, 2) for x in tensors(jnp.float32))
    with jax.default_matmul_precision("highest"):
        out = jax.jit(flash_attention_jax.causal_flash_attention)(q, k, v)
        k, v = (x.repeat(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[3] ** -0.5
        scores = jnp.where(np.tril(np.ones((S, S), bool)), scores, -jnp.inf)
        expected = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)
    np.testing.assert_allclose(out, expected, atol=2e-3)
