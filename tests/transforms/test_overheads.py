"""What is created once and not for every call or layer: traces, and lowered attention."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax._src.ops import primitives

LAYERS = 6
IDS = np.repeat(np.arange(4), 16)[None]


@pytest.fixture
def traces(monkeypatch):
    """Counts the traces of the forward and the backward pass."""
    counts = {"forward": 0, "backward": 0}
    for name in counts:

        def counted(name, traced, *operands):
            counts[name] += 1
            return traced(*operands)

        traced = getattr(primitives, f"{name}_pass")
        monkeypatch.setattr(primitives, f"{name}_pass", functools.partial(counted, name, traced))
    jax.clear_caches()
    yield counts
    jax.clear_caches()


def inputs(seed=0):
    return [jax.random.normal(jax.random.key(seed + n), (1, 64, 2, 8)) for n in range(3)]


def test_an_eager_call_is_traced_once(traces):
    mask = packax.create_attention_mask(packax.causal() & packax.documents(IDS))
    outs = [packax.flash_attention(*inputs(seed), mask) for seed in (0, 0, 7)]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert traces["forward"] == 1
    packax.flash_attention(*inputs(), mask, soft_cap=3.0)
    assert traces["forward"] == 2


def test_layers_share_traces_and_functions(traces):
    """Unrolled layers have different operands, but the same shapes and options."""
    mask = packax.create_attention_mask(packax.causal() & packax.documents(IDS))

    def loss(x, key, value):
        for _ in range(LAYERS):
            x = x + packax.flash_attention(x, key, value, mask)
        return jnp.sum(x)

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*inputs()).as_text()
    assert traces == {"forward": 1, "backward": 1}
    for name in ("xla_forward", "xla_backward"):
        assert len(re.findall(rf"call @{name}\(", text)) == LAYERS
        assert len(re.findall(rf"func.func private @{name}\(", text)) == 1
