"""Groups of heads on one GPU, one after the other into one output: `pytest -m gpu`.

Guards against a group that writes or reads another's heads, or rows at another distance, and
against copies of the output between two groups.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from gpu_kinds import THREE_ROWS, causal_documents
from gpu_runs import assert_identical, build, poison, tensors
from packax._src.core.spec import AttentionSpec
from packax._src.ops import head_groups as some_heads
from primitive_calls import ALL, arrays_of, backward, forward, of_pass

pytest_plugins = ("gpu_fixtures",)
pytestmark = pytest.mark.gpu

GROUPS = (range(4), range(4, 16), range(16, 24))  # of 24 query heads, four to a key/value head
NAMES = ("out", "lse", "dq", "dk", "dv")


@functools.partial(jax.jit, static_argnames=("groups", "deterministic"))
def results(x, mask, groups, deterministic):
    """Of groups of heads, or, without any, of all at once by the plain primitives."""
    spec = AttentionSpec(
        scale=0.125,
        mask_mode=mask.mask_mode,
        implementation="cuda",
        deterministic=deterministic,
        needs_grad=ALL,
    )
    operands = arrays_of(mask)
    if not groups:
        out, lse = forward(*x[:3], operands, spec)
        return out, lse, *backward((*x[:3], out, lse, x.dout, x.dlse), operands, spec)
    out, lses = None, []
    for own in groups:
        keys, values = (y[:, :, own.start // 4 : own.stop // 4] for y in (x.key, x.value))
        tensors = {"query": x.query, "key": keys, "value": values, "init": out}
        out, lse = some_heads.run("forward", own, spec, of_pass("forward", operands, **tensors))
        lses.append(lse)
    lse = jnp.concatenate(lses, 1)
    dq, parts = None, []
    for own in groups:
        keys, values = (y[:, :, own.start // 4 : own.stop // 4] for y in (x.key, x.value))
        own_lse, own_dlse = (y[:, own.start : own.stop] for y in (lse, x.dlse))
        tensors = {"query": x.query, "key": keys, "value": values, "init": dq}
        tensors |= {"out": out, "lse": own_lse, "dout": x.dout, "dlse": own_dlse}
        dq, *part = some_heads.run("backward", own, spec, of_pass("backward", operands, **tensors))
        parts.append(part)
    return out, lse, dq, *(jnp.concatenate(y, 2) for y in zip(*parts, strict=True))


def test_groups_are_the_whole(kind, deterministic):
    """Bit by bit but for dq, where its sum comes in any order; of rows of padding, too."""
    dtype, dims = kind
    x = tensors(3, 500, 500, 24, 6, dims, dtype)
    mask = build(causal_documents(THREE_ROWS), x)
    whole = jax.block_until_ready(results(x, mask, (), deterministic))
    poison(x)
    groups = jax.block_until_ready(results(x, mask, GROUPS, deterministic))
    for name, got, want in zip(NAMES, groups, whole, strict=True):
        if name == "dq" and not deterministic:
            a, b = (np.asarray(y, np.float64) for y in (got, want))
            assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)
        else:
            assert_identical((got,), (want,), name)


def test_one_output():
    """No copy of the output or of dq between two groups, none of query or dout into slices."""
    x = tensors(1, 1024, 1024, 24, 6, 128, jnp.bfloat16)
    mask = packax.create_attention_mask(packax.causal(), q_len=1024, kv_len=1024)
    text = results.lower(x, mask, GROUPS, False).compile().as_text()
    assert len(re.findall(r'custom_call_target="packax_forward_v1"', text)) == 3
    assert len(re.findall(r'custom_call_target="packax_backward_v1"', text)) == 3
    rows = [f"bf16[1,1024,{n},128]" for n in (24, 12, 8, 4)]
    copied = re.findall(r"= (\S+?)(?:\{\S*)? (?:copy|slice|concatenate|fusion)\(", text)
    assert not [y for y in copied if y in rows], copied
