"""`jax_enable_x64` changes nothing for arrays of 32 bits and fewer.

With x64 on, a Python number becomes a 64-bit array where no other array is involved; one such place
would promote attention's sums, or fail. So every option and mask kind runs both ways.
"""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import score_oracle
from tiers import some

MASKS = [
    "full",
    "causal_tall",
    "window_of_any_positions",
    "spans_of_positions",
    "batch_of_three",
    "documents_odd",
    "padding",
    "positions_reappear",
    "ranges_random",
    "moba",
]
OPTIONS = {
    "scale": {"scale": 0.3},
    "an array's scale": {"scale": np.float32(0.3)},
    "soft cap and sinks": {"soft_cap": 3.0, "sinks": np.float32([0.5, -1, 2, 0])},
    "slopes": {"bias": packax.alibi(np.float32([0.5, 0.25, 0.1, 0.05]))},
    "a bias": {"bias": np.float32(np.random.default_rng(8).standard_normal((1, 4, 409, 409)))},
    "dropout": {"dropout_rate": 0.25, "dropout_key": 7},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
}


def results(case, dtype="float32", **options):
    rng = np.random.default_rng(5)

    def tensor(length, heads):
        array = rng.standard_normal((case.batch, length, heads, 8)).astype(np.float32)
        return jnp.asarray(array, dtype)

    operands = tensor(case.q_len, 4), tensor(case.kv_len, 2), tensor(case.kv_len, 2)
    if "dropout_key" in options:
        options["dropout_key"] = jax.random.key(options["dropout_key"])
    mask = packax.create_attention_mask(case.expression(), q_len=case.q_len, kv_len=case.kv_len)

    def total(*operands):
        out, lse = packax.flash_attention(*operands, mask, return_lse=True, **options)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(finite), (out, lse)

    (_, got), gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*operands)
    return [*got, *gradients]


@pytest.mark.parametrize(
    "name,options",
    [
        *some((name, {}) for name in MASKS),
        *some((("padding", options) for options in OPTIONS.values()), 5),
    ],
    ids=[*MASKS, *OPTIONS],
)
def test_results_are_the_same(name, options):
    case = cases.BY_NAME[name]
    expected = results(case, **options)
    with score_oracle.x64(True):
        got = results(case, **options)
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
