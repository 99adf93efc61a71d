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
from gpu_runs import DIMS, of, poison
from packax._src.core.spec import AttentionSpec
from packax._src.ops import head_groups
from primitive_calls import ALL, arrays_of, backward, forward, of_pass
from properties.values import unequal
from tiers import once_each

pytestmark = pytest.mark.gpu

GROUPS = (range(4), range(4, 16), range(16, 24))  # of 24 query heads, four per key/value head


@functools.partial(jax.jit, static_argnames=("groups", "deterministic"))
def results(a, mask, groups, deterministic):
    """Results by groups of heads; without groups, of all heads by the plain primitives."""
    spec = AttentionSpec(
        scale=0.125,
        mask_mode=mask.mask_mode,
        implementation="cuda",
        deterministic=deterministic,
        needs_grad=ALL,
    )
    operands, names = arrays_of(mask), ("out", "lse", "dquery", "dkey", "dvalue")
    query, key, value, dout, dlse = (a[x] for x in ("query", "key", "value", "dout", "dlse"))
    if not groups:
        out, lse = forward(query, key, value, operands, spec)
        found = backward((query, key, value, out, lse, dout, dlse), operands, spec)
        return dict(zip(names, (out, lse, *found), strict=True))
    out, lses = None, []
    for group in groups:
        keys, values = (y[:, :, group.start // 4 : group.stop // 4] for y in (key, value))
        tensors = {"query": query, "key": keys, "value": values, "init": out}
        out, lse = head_groups.run("forward", group, spec, of_pass("forward", operands, **tensors))
        lses.append(lse)
    lse = jnp.concatenate(lses, 1)
    dq, parts = None, []
    for group in groups:
        keys, values = (y[:, :, group.start // 4 : group.stop // 4] for y in (key, value))
        group_lse, group_dlse = (y[:, group.start : group.stop] for y in (lse, dlse))
        tensors = {"query": query, "key": keys, "value": values, "init": dq}
        tensors |= {"out": out, "lse": group_lse, "dout": dout, "dlse": group_dlse}
        dq, *part = head_groups.run(
            "backward", group, spec, of_pass("backward", operands, **tensors)
        )
        parts.append(part)
    found = out, lse, dq, *(jnp.concatenate(y, 2) for y in zip(*parts, strict=True))
    return dict(zip(names, found, strict=True))


def call_of(dims, length, dtype="bfloat16"):
    text = f"heads=24/6,dims={dims},dtype={dtype},lengths={length}x{length}"
    return of(f"interval=causal,selector=packed,{text}")


@pytest.mark.parametrize(
    "dims,dtype,deterministic",
    once_each(DIMS, ["bfloat16", "float16"], [False, True]),
    ids=lambda x: str(x),
)
def test_groups_of_heads_equal_the_whole_call(dims, dtype, deterministic):
    """Bit for bit, also in padding, except for a dq that is summed in varying order."""
    call = call_of("x".join(map(str, dims)), 500, dtype)
    a = call.arrays(1)
    mask = call.built(a)
    whole = dict(jax.block_until_ready(results(a, mask, (), deterministic)))
    poison(a)
    groups = dict(jax.block_until_ready(results(a, mask, GROUPS, deterministic)))
    if not deterministic:
        got, want = (np.asarray(x.pop("dquery"), np.float64) for x in (groups, whole))
        assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)
    assert not unequal(groups, whole, "")


def test_groups_share_one_output_without_copies():
    """No copy of the output or of dq between groups, and no slices of query or dout."""
    call = call_of("128x128", 1024)
    a = call.arrays(1)
    mask = packax.create_attention_mask(packax.causal(), q_len=1024, kv_len=1024)
    text = results.lower(a, mask, GROUPS, False).compile().as_text()
    assert len(re.findall(r'custom_call_target="packax_forward_v1"', text)) == 3
    assert len(re.findall(r'custom_call_target="packax_backward_v1"', text)) == 3
    rows = [f"bf16[2,1024,{n},128]" for n in (24, 12, 8, 4)]
    copied = re.findall(r"= (\S+?)(?:\{\S*)? (?:copy|slice|concatenate|fusion)\(", text)
    assert not [y for y in copied if y in rows], copied
