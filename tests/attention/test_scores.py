"""Options of flash_attention that change the scores, such as sinks, under the same error bounds as
without them.

Guards against a term that only the forward has, a gradient that misses a sum, and an empty row that
gets weight.
"""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
from score_checks import arrays_of, attention_of

CASE = cases.BY_NAME["batch_of_three"]  # groups of two heads; padding; a row of one document


def test_the_order_of_results():
    arrays, *_ = arrays_of(CASE, "bfloat16")
    mask = packax.create_attention_mask(CASE.expression())
    tensors = [arrays[name] for name in ("query", "key", "value")]
    out, lse, top = packax.flash_attention(*tensors, mask, return_lse=True, return_max_logits=True)
    assert (lse.shape, top.shape) == ((3, 4, 409), (3, 4)) and top.dtype == jnp.float32
    again, only = packax.flash_attention(*tensors, mask, return_max_logits=True)
    np.testing.assert_array_equal(only, top)
    np.testing.assert_array_equal(again, out)
    gradient = jax.grad(
        lambda q: packax.flash_attention(q, *tensors[1:], mask, return_max_logits=True)[1].sum()
    )(tensors[0])
    assert not np.any(gradient)  # documented as stop_gradient


def test_a_sink_of_minus_infinity_is_none():
    arrays, *_ = arrays_of(CASE, "float32")
    mask = packax.create_attention_mask(CASE.expression())
    without = attention_of(mask)(arrays)
    got = attention_of(mask)(arrays | {"sinks": jnp.full(CASE.heads, -jnp.inf)})
    for x, y in zip(got, without, strict=True):
        np.testing.assert_array_equal(x, y)


def test_an_infinite_sink_takes_all():
    """In the limit out is 0, lse is the sink and the tensors have no gradient; other heads are
    unchanged."""
    case = cases.BY_NAME["batch_of_three"]
    arrays, dout, dlse = arrays_of(case, "float32")
    attention = attention_of(packax.create_attention_mask(case.expression()))
    sinks = jnp.linspace(-1, 1, case.heads)
    group = (
        case.heads // case.kv_heads
    )  # the whole first group, so that one key/value head has no gradient

    def results(sinks):
        return jax.vjp(attention, arrays | {"sinks": sinks})

    (out, lse), back = results(sinks.at[:group].set(jnp.inf))
    (want_out, want_lse), want_back = results(sinks)
    attended = np.isfinite(want_lse)
    np.testing.assert_array_equal(out[:, :, group:], want_out[:, :, group:])
    np.testing.assert_array_equal(lse[:, group:], want_lse[:, group:])
    assert not np.any(out[:, :, :group])
    assert (np.asarray(lse)[:, :group] == np.where(attended, np.inf, -np.inf)[:, :group]).all()
    (got,), (want,) = back((dout, dlse)), want_back((dout, dlse))
    for name, first in (("query", group), ("key", 1), ("value", 1)):
        assert not np.any(got[name][:, :, :first]), name
        np.testing.assert_array_equal(got[name][:, :, first:], want[name][:, :, first:])
    limit = np.where(attended, dlse, 0).sum((0, 2))[:group]
    np.testing.assert_allclose(got["sinks"][:group], limit, rtol=1e-5)
    np.testing.assert_array_equal(got["sinks"][group:], want["sinks"][group:])
