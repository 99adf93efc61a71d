"""Groups of heads on one GPU, computed one after another into one output: `pytest -m gpu`.

Guards against a group that reads or writes another's heads or uses a wrong row stride, and against
copies of the output between groups.
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
from packax._src.ops import head_groups
from primitive_calls import ALL, arrays_of, backward, forward, of_pass

pytest_plugins = ("gpu_fixtures",)
pytestmark = pytest.mark.gpu

GROUPS = (range(4), range(4, 16), range(16, 24))  # of 24 query heads, four per key/value head
NAMES = ("out", "lse", "dq", "dk", "dv")


@functools.partial(jax.jit, static_argnames=("groups", "deterministic"))
def results(x, mask, groups, deterministic):
    """Results by groups of heads; without groups, of all heads by the plain primitives."""
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
    for group in groups:
        keys, values = (y[:, :, group.start // 4 : group.stop // 4] for y in (x.key, x.value))
        tensors = {"query": x.query, "key": keys, "value": values, "init": out}
        out, lse = head_groups.run("forward", group, spec, of_pass("forward", operands, **tensors))
        lses.append(lse)
    lse = jnp.concatenate(lses, 1)
    dq, parts = None, []
    for group in groups:
        keys, values = (y[:, :, group.start // 4 : group.stop // 4] for y in (x.key, x.value))
        group_lse, group_dlse = (y[:, group.start : group.stop] for y in (lse, x.dlse))
        tensors = {"query": x.query, "key": keys, "value": values, "init": dq}
        tensors |= {"out": out, "lse": group_lse, "dout": x.dout, "dlse": group_dlse}
        dq, *part = head_groups.run(
            "backward", group, spec, of_pass("backward", operands, **tensors)
        )
        parts.append(part)
    return out, lse, dq, *(jnp.concatenate(y, 2) for y in zip(*parts, strict=True))


def test_groups_of_heads_equal_the_whole_call(kind, deterministic):
    """Bit for bit, also in padding, except for a dq that is summed in varying order."""
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


def test_groups_share_one_output_without_copies():
    """No copy of the output or of dq between groups, and no slices of query or dout."""
    x = tensors(1, 1024, 1024, 24, 6, 128, jnp.bfloat16)
    mask = packax.create_attention_mask(packax.causal(), q_len=1024, kv_len=1024)
    text = results.lower(x, mask, GROUPS, False).compile().as_text()
    assert len(re.findall(r'custom_call_target="packax_forward_v1"', text)) == 3
    assert len(re.findall(r'custom_call_target="packax_backward_v1"', text)) == 3
    rows = [f"bf16[1,1024,{n},128]" for n in (24, 12, 8, 4)]
    copied = re.findall(r"= (\S+?)(?:\{\S*)? (?:copy|slice|concatenate|fusion)\(", text)
    assert not [y for y in copied if y in rows], copied
