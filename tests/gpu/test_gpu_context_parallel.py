"""Context parallelism with the cubins and NCCL, on 2 and 4 GPUs of one host. `pytest -m gpu`.

tests/context/test_context_parallel.py tests the combinations. These tests cover what fake devices
cannot show: kernels inside shard_map on every GPU, real collectives, and XLA's GPU compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import numpy as np
import oracle
import packax
import pytest
from context import results
from gpu_runs import packed, tensors
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from local_plans import greedy

pytestmark = pytest.mark.gpu
LENGTH = 2048
IDS = np.stack(
    [packed(700, 5, -100, 600, 64, 300, -279), packed(1500, 30, 30, 30, 30, 30, 30, 368)]
)
EXPRESSION = packax.causal() & packax.documents(IDS)
EVERY = packax.AttentionSharding(
    query=P("data", "context", "tensor"), key_value=P("data", "context", "tensor")
)
HEADS_REPLICATED = dataclasses.replace(EVERY, key_value=P("data", "context"))
CONTEXT = packax.AttentionSharding(query=P(None, "context"), key_value=P(None, "context"))


def mesh_of(*sizes: int, kind: str = "Auto"):
    """A mesh with the axes data, context and tensor."""
    count = int(np.prod(sizes))
    devices = jax.devices("cuda")
    if len(devices) < count:
        pytest.skip(f"needs {count} GPUs, and there are {len(devices)}")
    types = (getattr(AxisType, kind),) * 3
    return jax.make_mesh(
        sizes, ("data", "context", "tensor"), devices=devices[:count], axis_types=types
    )


@functools.cache
def truth(dim: int, dtype: str):
    x = tensors(2, LENGTH, LENGTH, 4, 2, dim, dtype)
    allowed = np.asarray(EXPRESSION.as_array(LENGTH, LENGTH))
    arguments = (*x[:3], allowed, dim**-0.5, *x[3:])
    return x, oracle.exact(*arguments), oracle.plain(*arguments)


def run(mesh, sharding, plan, dim=128, dtype="bfloat16", **keywords):
    """out, lse and gradients from the cubins, in sequence order."""
    x, true, plain = truth(dim, dtype)
    ranks = mesh.shape["context"]
    if plan == "local":
        plan = greedy(IDS, ranks)
    elif plan is not None:
        plan = packax.context_plan(EXPRESSION, ranks=ranks, kind=plan)
    moved = x
    if plan is not None:
        moved = [plan.permute(y, 2 if n == 4 else 1) for n, y in enumerate(x)]
    batch, rows, heads = [*sharding.query, None, None][:3]
    specs = [sharding.query, *[sharding.key_value] * 2, sharding.query, P(batch, heads, rows)]
    moved = [
        jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip(moved, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(EXPRESSION, sharding=sharding, plan=plan)
        function = functools.partial(results, implementation="cuda", **keywords)
        got = jax.block_until_ready(jax.jit(function)(*moved, mask))
    got = [np.asarray(y) for y in got]
    if plan is not None:
        got = [plan.unpermute(y, 2 if n == 1 else 1) for n, y in enumerate(got)]
    lse = np.where(np.isfinite(true.lse), got[1], -np.inf)  # results(): 0 in empty rows
    return oracle.Results(got[0], lse, *got[2:]), true, plain


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("plan", [None, "zigzag", "balanced", "local"])
@pytest.mark.parametrize("dim,groups", [(128, 1), (128, 2), (64, None)])
def test_context(count, plan, dim, groups):
    oracle.check(*run(mesh_of(1, count, 1), CONTEXT, plan, dim, gather_head_groups=groups))


def test_passes_of_one_row_alone_with_a_local_plan():
    """The update of shared rows ends each program and is contiguous, so XLA may fuse it with the
    kernel."""
    x = tensors(1, LENGTH, LENGTH, 4, 2, 128, "bfloat16")[:4]
    expression = packax.causal() & packax.documents(IDS[:1])
    plan = greedy(IDS[:1], 2, shared=64)
    one = packax.create_attention_mask(expression)
    moved = [jax.device_put(plan.permute(y), NamedSharding(mesh_of(1, 2, 1), CONTEXT.query))
             for y in x]  # fmt: skip
    with jax.set_mesh(mesh_of(1, 2, 1)):
        mask = packax.create_attention_mask(expression, sharding=CONTEXT, plan=plan)
        passes = [(moved, mask, plan.unpermute), (x, one, lambda y: y)]
        found = []
        for (*inputs, dout), of, in_order in passes:
            attend = jax.jit(packax.flash_attention)
            pull = jax.jit(
                lambda *y, of=of: jax.vjp(lambda *z: packax.flash_attention(*z, of), *y)[1]
            )
            back = jax.jit(lambda pullback, dout: pullback(dout))
            returned = attend(*inputs, of), *back(pull(*inputs), dout)
            found.append([np.asarray(in_order(np.asarray(y)), np.float32) for y in returned])
    for name, got, wanted in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        size = np.abs(wanted).max()
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2.0**-7 * size, err_msg=name)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "sizes,sharding",
    [
        ((1, 2, 1), EVERY),
        ((2, 2, 1), EVERY),
        ((1, 2, 2), EVERY),
        ((1, 2, 2), HEADS_REPLICATED),
        ((1, 1, 4), HEADS_REPLICATED),
    ],
)
def test_combined_with_data_and_tensor(sizes, sharding, kind):
    plan = "balanced" if sizes[1] > 1 else None
    oracle.check(*run(mesh_of(*sizes, kind=kind), sharding, plan, gather_head_groups=1))


def test_float16_and_deterministic():
    """Two runs give the same bits: all sums, also those between GPUs, have a fixed order."""
    mesh = mesh_of(1, 2, 1)
    first, true, plain = run(mesh, CONTEXT, "balanced", dtype="float16", deterministic=True)
    oracle.check(first, true, plain)
    again, *_ = run(mesh, CONTEXT, "balanced", dtype="float16", deterministic=True)
    for name, x, y in zip(first._fields, first, again, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


def collective_shapes(text, name):
    """dtype[shape] of every result of one kind of collective; XLA may combine several into one
    operation."""
    found = []
    # The result types follow the operand types.
    for types in re.findall(rf" = \(.*?\), (.*?) {name}-start\(", text):
        found += re.findall(r"\w+\[[\d,]+\]", types)
    return found + re.findall(rf" = (\w+\[[\d,]+\])\S* {name}\(", text)


def test_the_compiled_collectives():
    """Forward and backward gather keys and values, gradients are reduce-scattered in their dtype,
    and nothing is all-reduced."""
    mesh = mesh_of(1, 2, 1)
    x = tensors(2, LENGTH, LENGTH, 4, 2, 128, "bfloat16")
    specs = [CONTEXT.query] * 4 + [P(None, None, "context")]
    placed = [
        jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip(x, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(EXPRESSION, sharding=CONTEXT)
        function = jax.jit(results)
        text = function.lower(*placed, mask).compile().as_text()
    assert not re.findall(r" all-reduce(-start)?\(", text)
    lines = [
        line.strip()[:200] for line in text.splitlines() if "scatter" in line or "gather" in line
    ]
    scattered = collective_shapes(text, "reduce-scatter")
    assert len(scattered) == 2 and {x[:5] for x in scattered} == {"bf16["}, lines
    gathered = collective_shapes(text, "all-gather")
    elements = [np.prod([int(n) for n in x[5:-1].split(",")]) for x in gathered if x[:5] == "bf16["]
    assert elements == [2 * LENGTH * 2 * 128] * 4, lines
