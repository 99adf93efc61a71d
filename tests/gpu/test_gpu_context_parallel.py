"""Context parallelism with the cubins and NCCL, on 2 and 4 GPUs of one host. `pytest -m gpu`.

tests/table tests the combinations. These tests cover what fake devices cannot show: kernels inside
shard_map on every GPU, real collectives, and XLA's GPU compiler.
"""

from __future__ import annotations

import math
import re

import dense
import jax
import numpy as np
import packax
import pytest
from gpu_runs import of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from local_plans import greedy
from properties.values import unequal
from ranks import RANKS, OverRanks

pytestmark = pytest.mark.gpu
TEXT = "interval=causal,selector=packed,lengths=1024x1024"
CONTEXT = packax.AttentionSharding(query=P(None, "context"), key_value=P(None, "context"))


def over_ranks(ranks: str, kind: str | None, text: str) -> OverRanks:
    count = math.prod(RANKS[ranks].mesh.values())
    if len(jax.devices("cuda")) < count:
        pytest.skip(f"needs {count} GPUs, and there are {len(jax.devices('cuda'))}")
    return OverRanks(of(f"{TEXT},dtype=bfloat16,{text},ranks={ranks}"), kind)


def check(program: OverRanks, got: dict[str, np.ndarray]) -> None:
    """Each rank rounds its part of the gradients of keys."""
    true, plain = program.call.references(program.arrays)
    keys = {"dkey": got["dkey"]}
    others = {name: x for name, x in got.items() if name not in keys}
    wrong = dense.close(others, true, plain) + dense.close(keys, true, plain, 4)
    assert not wrong, wrong


@pytest.mark.parametrize("kind", [None, "zigzag", "balanced", "local"])
@pytest.mark.parametrize("ranks", ["two", "4"])
@pytest.mark.parametrize("dims", ["128x128", "64x64"])
def test_context(ranks, kind, dims):
    """On 4 GPUs, the keys of one head are gathered at a time."""
    program = over_ranks(ranks, kind, f"dims={dims}")
    check(program, program.results())


@pytest.mark.parametrize(
    "ranks", ["2", "data", "keys of all heads", "explicit", "shard_map", "vmap", "levels"]
)
def test_combined_with_data_and_tensor(ranks):
    program = over_ranks(ranks, "balanced", "dims=128x128")
    check(program, program.results())


def test_float16_and_deterministic():
    """Two runs give the same bits: all sums, also those between GPUs, have a fixed order."""
    program = over_ranks("two", "balanced", "dims=128x128,dtype=float16,order=deterministic")
    first = program.results()
    check(program, first)
    assert not unequal(program.results(), first, "bits: ")


def one_row(count: int):
    """The operands of a call of one row, and a mesh."""
    devices = jax.devices("cuda")
    if len(devices) < count:
        pytest.skip(f"needs {count} GPUs, and there are {len(devices)}")
    mesh = jax.make_mesh((count,), ("context",), devices=devices[:count],
                         axis_types=(AxisType.Auto,))  # fmt: skip
    call = of(f"{TEXT},dims=128x128,dtype=bfloat16,batch=1")
    return call, call.arrays(1), mesh


def test_passes_of_one_row_alone_with_a_local_plan():
    """The update of shared rows ends each program and is contiguous, so XLA may fuse it with the
    kernel."""
    call, a, mesh = one_row(2)
    expression = call.expression(a)
    plan = greedy(a["ids"], 2, shared=64)
    one = packax.create_attention_mask(expression)
    x = [a[name] for name in ("query", "key", "value", "dout")]
    moved = [jax.device_put(plan.permute(y), NamedSharding(mesh, CONTEXT.query)) for y in x]
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(expression, sharding=CONTEXT, plan=plan)
        passes = [(moved, mask, plan.unpermute), (x, one, lambda y: y)]
        found = []
        for (*inputs, dout), of_call, in_order in passes:
            attend = jax.jit(packax.flash_attention)
            pull = jax.jit(
                lambda *y, m=of_call: jax.vjp(lambda *z: packax.flash_attention(*z, m), *y)[1]
            )
            back = jax.jit(lambda pullback, dout: pullback(dout))
            returned = attend(*inputs, of_call), *back(pull(*inputs), dout)
            found.append([np.asarray(in_order(np.asarray(y)), np.float32) for y in returned])
    for name, got, wanted in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        size = np.abs(wanted).max()
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2.0**-7 * size, err_msg=name)


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
    call, a, mesh = one_row(2)
    names = ("query", "key", "value", "dout", "dlse")
    of_name = {name: P(None, "context") for name in names} | {"dlse": P(None, None, "context")}
    placed = {n: jax.device_put(a[n], NamedSharding(mesh, of_name[n])) for n in names}
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(call.expression(a), sharding=CONTEXT)
        step = jax.jit(lambda x, mask: call.step(x, lambda x: call.attend(x, mask)))
        text = step.lower(placed, mask).compile().as_text()
    assert not re.findall(r" all-reduce(-start)?\(", text)
    lines = [
        line.strip()[:200] for line in text.splitlines() if "scatter" in line or "gather" in line
    ]
    scattered = collective_shapes(text, "reduce-scatter")
    assert len(scattered) == 2 and {x[:5] for x in scattered} == {"bf16["}, lines
    gathered = collective_shapes(text, "all-gather")
    elements = [np.prod([int(n) for n in x[5:-1].split(",")]) for x in gathered if x[:5] == "bf16["]
    assert elements == [1024 * 2 * 128] * 4, lines
