"""Local plans with every mask kind and every option: results and gradients equal one device's.

Each case has one mask kind, one mesh and all score options at once. Options that exclude each other
alternate between cases; a test checks that every combination occurs with each kind of mesh.
test_local.py has cases without options. Guards against an option that one part of the keys ignores
or counts twice.
"""

import collections
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import BATCH, DIM, LENGTH, mesh_of
from jax.sharding import PartitionSpec as P
from local_cases import KINDS, ROWS, expression_of
from local_plans import check_local, greedy
from tiers import some

HEADS = 8
PLACES = np.stack([np.arange(LENGTH) * n % 700 for n in (1, 3, 5, 9)]).astype(np.int32)


class Mesh(NamedTuple):
    """Axis sizes by name, the context axes, and the head axes."""

    sizes: dict[str, int]
    context: tuple[str, ...]
    heads: tuple[str | None, str | None] = (None, None)  # of query; of key and value

    @property
    def sharding(self):
        batch = tuple(x for x in ("data", "fsdp") if x in self.sizes) or None
        query, key_value = (P(batch, self.context, x, None) for x in self.heads)
        return packax.AttentionSharding(query=query, key_value=key_value)


MESHES = {
    "4 ranks": Mesh({"context": 4}, ("context",)),
    "8 ranks": Mesh({"context": 8}, ("context",)),
    "fsdp, tensor": Mesh({"fsdp": 2, "context": 2, "tensor": 2}, ("context",), ("tensor",) * 2),
    "data, heads of all": Mesh(
        {"data": 2, "context": 2, "tensor": 2}, ("context",), ("tensor", None)
    ),
    "hosts": Mesh({"host": 2, "gpu": 4}, ("host", "gpu")),
    "hosts, tensor": Mesh({"host": 2, "gpu": 2, "tensor": 2}, ("host", "gpu"), ("tensor",) * 2),
    "hosts, fsdp": Mesh({"fsdp": 2, "host": 2, "gpu": 2}, ("host", "gpu")),
    "three levels": Mesh({"host": 2, "switch": 2, "gpu": 2}, ("host", "switch", "gpu")),
}
KEEP = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)
BLOCKS = np.random.default_rng(4).random((8, 8)) < 0.6
OTHERS = {  # expressions for which all keys are gathered
    "causal": packax.causal,
    "full": packax.full,
    "blocks": lambda: (
        packax.masks.block_sparse(BLOCKS, 128) & packax.causal() & packax.documents(ROWS)
    ),
}


class Case(NamedTuple):
    kind: str
    mesh: str
    kv_heads: int
    groups: Any
    turns: str = ""  # which of "deterministic remat vmap" are on
    plan: str | None = "local"  # with other plans halos are fetched


CASES = [
    Case("documents", "4 ranks", 4, (1, 3)),
    Case("both ways", "8 ranks", 2, 1, "remat vmap"),
    Case("of ids alone", "4 ranks", 8, 1, "deterministic vmap"),
    Case("spans of positions", "8 ranks", 4, 1, "deterministic remat"),
    Case("window", "fsdp, tensor", 4, 1),
    Case("window of positions", "fsdp, tensor", 8, 1, "remat vmap"),
    Case("ranges", "data, heads of all", 4, 1, "deterministic vmap"),
    Case("prefix", "data, heads of all", 1, None, "deterministic remat"),
    Case("chunked", "hosts", 4, 2),
    Case("union", "hosts", 4, 1, "remat vmap"),
    Case("positions", "hosts, tensor", 8, 1, "deterministic vmap"),
    Case("one mask for all", "hosts, tensor", 4, None, "deterministic remat"),
    Case("spans", "hosts, fsdp", 2, 1, "vmap"),
    Case("offsets", "three levels", 4, 1, "remat"),
    Case("causal", "hosts, fsdp", 4, 1, "deterministic"),
    Case("full", "4 ranks", 8, 1, "remat"),
    Case("blocks", "hosts", 2, 1, "vmap"),
    Case("window", "4 ranks", 4, 2, "deterministic vmap", plan=None),
    Case("chunked", "fsdp, tensor", 4, None, "remat", plan="zigzag"),
    Case("union", "data, heads of all", 2, None, "remat vmap", plan="balanced"),
    Case("window", "hosts, fsdp", 2, None, "", plan="zigzag"),
]


def test_the_cases_cover_kinds_and_pairs():
    """All on/off pairs of the turns, on meshes with one axis, with other axes, and with levels."""
    assert {case.kind for case in CASES} == {*KINDS, *OTHERS}
    assert {case.mesh for case in CASES} == {*MESHES}
    of_meshes = collections.defaultdict(set)
    for case in CASES:
        if case.kind not in OTHERS and case.plan == "local":
            mesh = MESHES[case.mesh]
            name = "levels" if len(mesh.context) > 1 else "axes" if len(mesh.sizes) > 1 else "one"
            on = [(x, x in case.turns.split()) for x in ("deterministic", "remat", "vmap")]
            of_meshes[name] |= {*itertools.combinations(on, 2)}
    assert {name: len(pairs) for name, pairs in of_meshes.items()} == dict.fromkeys(of_meshes, 12)


def attend(case, mask, query, key, value, more, rows):
    """out, log-sum-exp and largest logits. rows: positions of query's rows, for ALiBi."""

    def one(query, key, value, sinks, slopes):
        return packax.flash_attention(
            query, key, value, mask, scale=more["scale"], sinks=sinks, soft_cap=5.0,
            bias=packax.alibi(slopes, positions=rows, kv_positions=PLACES),
            return_lse=True, return_max_logits=True,
            deterministic="deterministic" in case.turns, gather_head_groups=case.groups,
        )  # fmt: skip

    def of_halves(*x):  # two halves of the heads
        axes = (2, 2, 2, 0, 0)
        halves = [
            y.reshape(*y.shape[:n], 2, -1, *y.shape[n + 1 :]) for y, n in zip(x, axes, strict=True)
        ]
        out, lse, top = jax.vmap(one, in_axes=axes, out_axes=(2, 1, 1))(*halves)
        return out.reshape(x[0].shape), lse.reshape(BATCH, HEADS, -1), top.reshape(BATCH, HEADS)

    run = of_halves if "vmap" in case.turns else one
    run = jax.checkpoint(run, policy=KEEP) if "remat" in case.turns else run
    return run(query, key, value, more["sinks"], more["slopes"])


@functools.partial(jax.jit, static_argnames="case")
def results(case, mask, tensors, more, rows, dout, dlse):
    """Results of attention, and gradients by the name of the primal."""

    def function(tensors, more):
        out, lse, top = attend(case, mask, *tensors, more, rows)
        return (out, lse), top

    (out, lse), pullback, top = jax.vjp(function, tensors, more, has_aux=True)
    gradients, of_scores = pullback((dout, dlse))
    got = dict(zip(("dq", "dk", "dv"), gradients, strict=True)) | of_scores
    return got | {"out": out, "lse": jnp.where(jnp.isfinite(lse), lse, 0), "top": top}


def inputs(kv_heads):
    rng = np.random.default_rng(1)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    tensors = [normal(BATCH, LENGTH, heads, DIM) for heads in (HEADS, kv_heads, kv_heads)]
    more = {"scale": np.float32(0.4), "sinks": normal(HEADS), "slopes": rng.random(HEADS) / 30}
    more["slopes"] = more["slopes"].astype(np.float32)
    return tensors, more, normal(BATCH, LENGTH, HEADS, DIM), normal(BATCH, HEADS, LENGTH)


@pytest.mark.filterwarnings("ignore:prefix")
@pytest.mark.parametrize("case", some(CASES, 17), ids=lambda case: f"{case.kind}, {case.mesh}")
def test_equals_one_device(case):
    mesh = MESHES[case.mesh]
    expression = OTHERS[case.kind]() if case.kind in OTHERS else expression_of(case.kind)
    lengths = {"q_len": LENGTH, "kv_len": LENGTH}
    tensors, more, dout, dlse = inputs(case.kv_heads)
    ids = ROWS[1] if case.kind == "one mask for all" else ROWS
    levels = tuple(mesh.sizes[x] for x in mesh.context)
    if case.plan == "local":
        plan = greedy(ids, levels if len(levels) > 1 else levels[0])
        check_local(plan, ids)
    else:
        plan = case.plan and packax.context_plan(
            packax.causal() & packax.documents(ids),
            ranks=math.prod(levels),
            kind=case.plan,
            chunk=256 if case.plan == "balanced" else None,
        )
    moved = (lambda x, axis=1: x) if plan is None else plan.permute
    in_order = (lambda x, axis=1: x) if plan is None else plan.unpermute

    alone = case._replace(groups=None, turns="")
    mask = packax.create_attention_mask(expression, **lengths)
    expected = results(alone, mask, tensors, more, PLACES, dout, dlse)

    with jax.set_mesh(mesh_of(*mesh.sizes.values(), axes=(*mesh.sizes,))):
        rows = moved((tensors, PLACES, dout))

        @jax.jit
        def run(tensors, *more):
            mask = packax.create_attention_mask(
                expression, sharding=mesh.sharding, plan=plan, **lengths
            )
            assert (mask.private_part is None) == (case.kind in OTHERS)
            assert (mask.halo is None) == (case.plan == "local")
            return results(case, mask, tensors, *more)

        got = jax.block_until_ready(run(rows[0], more, *rows[1:], moved(dlse, 2)))
    got |= {name: in_order(got[name]) for name in ("out", "dq", "dk", "dv")}
    got["lse"] = in_order(got["lse"], 2)
    for name, x in expected.items():
        # Sums over all rows of terms of either sign have larger errors.
        most = (1e-4 if name in more else 1e-5) * np.abs(x).max()
        np.testing.assert_allclose(got[name], x, rtol=0, atol=most, err_msg=name)
