"""Options of flash_attention that change the scores, such as sinks, under the same error bounds as
without them.

Guards against a term that only the forward has, a gradient that misses a sum, and an empty row that
gets weight.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import packax
from decode_calls import parse

# groups of two heads; documents and padding
CALL = parse("interval=causal,selector=packed,dims=16x16,lengths=409x409,batch=3")
SINKS = dataclasses.replace(CALL, sinks="sinks")


def test_the_order_of_results():
    a = dataclasses.replace(CALL, dtype="bfloat16").arrays()
    mask = CALL.expression(a)
    tensors = [a[name] for name in ("query", "key", "value")]
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
    a = CALL.arrays()
    without = CALL.attend(a)
    got = SINKS.attend(a | {"sinks": jnp.full(4, -jnp.inf)})
    for x, y in zip(got, without, strict=True):
        np.testing.assert_array_equal(x, y)


def test_an_infinite_sink_takes_all():
    """In the limit out is 0, lse is the sink and the tensors have no gradient; other heads are
    unchanged."""
    a, step = SINKS.arrays(), jax.jit(SINKS.step)
    sinks, group = np.linspace(-1, 1, 4, dtype=np.float32), 2  # all heads of a key/value head
    want = step(a | {"sinks": sinks})
    got = step(a | {"sinks": np.where(np.arange(4) < group, np.inf, sinks)})
    attended = np.isfinite(want["lse"])
    np.testing.assert_array_equal(got["out"][:, :, group:], want["out"][:, :, group:])
    np.testing.assert_array_equal(got["lse"][:, group:], want["lse"][:, group:])
    assert not np.any(got["out"][:, :, :group])
    limit = np.where(attended, np.inf, -np.inf)[:, :group]
    assert (np.asarray(got["lse"])[:, :group] == limit).all()
    for name, first in (("dquery", group), ("dkey", 1), ("dvalue", 1)):
        assert not np.any(got[name][:, :, :first]), name
        np.testing.assert_array_equal(got[name][:, :, first:], want[name][:, :, first:])
    limit = np.where(attended, a["dlse"], 0).sum((0, 2))[:group]
    np.testing.assert_allclose(got["dsinks"][:group], limit, rtol=1e-5)
    np.testing.assert_array_equal(got["dsinks"][group:], want["dsinks"][group:])
