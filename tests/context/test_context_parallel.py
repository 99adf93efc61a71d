"""On fake CPU devices, by every combination of axes: forward and gradients equal one device's.

Guards against silent failures: a transpose hull of other rows, a key/value head of another group, a
gradient that misses the sum over an axis, a gradient summed in the wrong order of ranks.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import packax
import pytest
from context import (
    AXES,
    BATCH,
    KV_HEADS,
    LENGTH,
    ROWS,
    assert_same,
    expression_of,
    mesh_of,
    of_ids_alone,
    one_device,
    results,
    tensors,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from packax._src.core.sharding import layout_of

BATCH_AXES = ("data", "fsdp")
CONTEXT = packax.AttentionSharding(query=P(None, "context"), key_value=P(None, "context"))
FULL = packax.AttentionSharding(
    query=P(BATCH_AXES, "context", "tensor", None),
    key_value=P(BATCH_AXES, "context", "tensor", None),
)
TENSOR_REPLICATED = dataclasses.replace(FULL, key_value=P(BATCH_AXES, "context", None, None))
KEYS_REPLICATED = dataclasses.replace(FULL, key_value=P(BATCH_AXES, None, "tensor", None))
ALL_REPLICATED = dataclasses.replace(FULL, key_value=P(BATCH_AXES))


def plan_of(kind, shards, ids=ROWS):
    return kind and packax.context_plan(
        packax.causal() & packax.documents(ids), ranks=shards, kind=kind
    )


def sharded(mesh, sharding, kind, plan=None, *, inputs=None, explicit=False, groups=1):
    """Results in the order of the sequence; rows are permuted by the plan on the way.

    One group of heads compiles fastest; test_head_groups has more.
    """
    inputs = tensors() if inputs is None else inputs
    order = (lambda x, _: x) if plan is None else (lambda x, axis: plan.permute(x, axis))
    query, key, value, dout = (order(x, 1) for x in inputs[:4])
    dlse = order(inputs[4], 2)
    lse_spec = P(sharding.query[0], *reversed([*sharding.query, None, None][1:3]))
    specs = (sharding.query, sharding.key_value, sharding.key_value, sharding.query, lse_spec)
    if explicit:
        query, key, value, dout, dlse = (
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((query, key, value, dout, dlse), specs, strict=True)
        )

    @jax.jit
    def run(plan, *tensors):
        mask = packax.create_attention_mask(
            expression_of(kind), q_len=LENGTH, kv_len=LENGTH, sharding=sharding, plan=plan
        )
        return results(*tensors, mask, gather_head_groups=groups)  # the mask says the sharding

    with jax.set_mesh(mesh):
        # Fake devices wait for each other in one pool of threads: one program at a time.
        got = jax.block_until_ready(run(plan, query, key, value, dout, dlse))
    if explicit:
        for x, spec in zip(got, (specs[0], lse_spec, *specs[:3]), strict=True):
            full = [*spec, *[None] * (x.ndim - len(spec))]
            assert [*jax.typeof(x).sharding.spec] == full
    if plan is None:
        return got
    with jax.set_mesh(mesh):
        return tuple(plan.unpermute(x, 2 if n == 1 else 1) for n, x in enumerate(got))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_numbers_in_expressions(kind):
    """Offsets and lengths without a batch: every rank has its rows of what one device makes."""
    expression = packax.sliding_window(300, 2, offset=7) & packax.prefix(jnp.asarray(90))
    mask = packax.create_attention_mask(expression, q_len=LENGTH, kv_len=LENGTH)
    plan = plan_of("balanced", 2)
    with jax.set_mesh(mesh_of(2, 1, 2, 1, kind=kind)):
        for sharding in (CONTEXT, FULL):
            got = jax.jit(
                functools.partial(
                    packax.create_attention_mask,
                    q_len=LENGTH,
                    kv_len=LENGTH,
                    sharding=sharding,
                    plan=plan,
                )
            )(expression)
            for x, y in ((got.q_lo, mask.q_lo), (got.q_hi, mask.q_hi)):
                y = plan.permute(jnp.broadcast_to(y, x.shape))
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize(
    "sizes,sharding,kind,plan",
    [
        ((1, 1, 8, 1), CONTEXT, "causal", None),
        ((1, 1, 4, 1), CONTEXT, "full", "zigzag"),
        ((1, 1, 8, 1), CONTEXT, "documents", "balanced"),
        ((2, 2, 2, 1), FULL, "positions", "balanced"),
        ((1, 2, 2, 2), FULL, "documents", "balanced"),
        ((1, 2, 2, 2), FULL, "one mask for all", "balanced"),
        ((2, 1, 2, 2), FULL, "ranges", "zigzag"),
        ((1, 1, 2, 4), FULL, "both ways", "balanced"),
        ((1, 2, 4, 1), FULL, "spans", "balanced"),
        ((2, 2, 2, 1), FULL, "spans of positions", "balanced"),
        ((1, 1, 4, 1), CONTEXT, "spans of positions", "zigzag"),
        ((2, 1, 2, 1), FULL, "offsets", "balanced"),
        ((2, 2, 1, 2), FULL, "documents", None),
        ((1, 2, 2, 2), TENSOR_REPLICATED, "documents", "balanced"),
        ((1, 1, 1, 8), TENSOR_REPLICATED, "positions", None),
        ((1, 1, 2, 4), KEYS_REPLICATED, "one mask for all", "zigzag"),
        ((1, 2, 2, 2), ALL_REPLICATED, "documents", "balanced"),
    ],
)
def test_equals_one_device(sizes, sharding, kind, plan):
    plan = plan_of(plan, sizes[2])
    assert_same(sharded(mesh_of(*sizes), sharding, kind, plan), one_device(kind))


@pytest.mark.parametrize("sharding", [FULL, TENSOR_REPLICATED], ids=["sharded", "replicated"])
def test_explicit_axis_types(sharding):
    mesh = mesh_of(1, 2, 2, 2, kind="Explicit")
    kind = "documents" if sharding is TENSOR_REPLICATED else "spans of positions"
    got = sharded(mesh, sharding, kind, plan_of("balanced", 2), explicit=True)
    assert_same(got, one_device(kind))


@pytest.mark.parametrize("heads,kv_heads,tensor", [(8, 1, 4), (8, 2, 4), (12, 2, 4)])
def test_key_value_heads_replicated_under_query_heads(heads, kv_heads, tensor):
    """One head for all, a head for two ranks, a rank with parts of two heads."""
    mesh = mesh_of(1, 1, 2, tensor)
    inputs = tensors(heads=heads, kv_heads=kv_heads)
    got = sharded(mesh, TENSOR_REPLICATED, "documents", inputs=inputs, groups=None)
    assert_same(got, one_device("documents", kv_heads, heads))


@pytest.mark.parametrize(
    "groups,heads,plan",
    [
        ((1, 3, 2), (12, 6), "balanced"),
        ((1, 3, 2), (12, 6), None),
        (2, (8, 2), "balanced"),
        (None, (8, 4), None),
        (None, (12, 12), "balanced"),
    ],
)
def test_head_groups(groups, heads, plan):
    """More than two, of which one waits for another; equal ones; those of the default for four
    ranks."""
    mesh = mesh_of(4, axes=("context",))
    inputs = tensors(heads=heads[0], kv_heads=heads[1])
    got = sharded(mesh, CONTEXT, "documents", plan_of(plan, 4), inputs=inputs, groups=groups)
    assert_same(got, one_device("documents", heads[1], heads[0]))


def test_context_over_two_axes():
    """Their order is major first, as in a PartitionSpec; a wrong one scrambles the keys."""
    spec = P("tensor", ("fsdp", "context"))
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    got = sharded(mesh_of(1, 2, 2, 2), sharding, "documents", plan_of("balanced", 4))
    assert_same(got, one_device("documents"))


def test_bfloat16_meets_the_rule_of_the_oracle():
    """Gradients are summed over eight ranks in bfloat16: still twice plain attention's error."""
    inputs = tensors(jnp.bfloat16, batch=1)
    mesh = mesh_of(8, axes=("context",))
    got = sharded(mesh, CONTEXT, "causal", plan_of("balanced", 8, ROWS[:1]), inputs=inputs)
    query, key, value, dout, dlse = inputs
    allowed = packax.causal().as_array(LENGTH, LENGTH)
    scale = query.shape[3] ** -0.5
    true = oracle.exact(query, key, value, allowed, scale, dout, dlse)
    plain = oracle.plain(query, key, value, allowed, scale, dout, dlse)
    oracle.check(oracle.Results(*got), true, plain)


def test_any_length_without_a_plan():
    """100 rows a rank: no whole tiles anywhere; and more keys than rows."""
    mesh = mesh_of(4, axes=("context",))
    rng = np.random.default_rng(0)
    ids, kv_ids = (np.sort(rng.integers(0, 6, n)) for n in (400, 520))
    query, key, value, dout, dlse = tensors(batch=1, length=520)
    inputs = (query[:, :400], key, value, dout[:, :400], dlse[:, :, :400])
    expression = packax.documents(ids, kv_ids)
    expected = jax.jit(results)(*inputs, packax.create_attention_mask(expression))
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(expression, sharding=CONTEXT)
        got = jax.jit(functools.partial(results, gather_head_groups=1))(*inputs, mask)
    assert_same(got, expected)


def test_keys_in_the_order_of_the_sequence():
    """permuted_keys=False: only the queries were permuted."""
    mesh = mesh_of(4, axes=("context",))
    plan = plan_of("balanced", 4)
    query, key, value, dout, dlse = tensors()
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(
            expression_of("documents"), sharding=CONTEXT, plan=plan, permuted_keys=False
        )
        got = jax.jit(functools.partial(results, gather_head_groups=1))(
            plan.permute(query), key, value, plan.permute(dout), plan.permute(dlse, 2), mask
        )
    out, lse, dq, dk, dv = got
    got = plan.unpermute(out), plan.unpermute(lse, 2), plan.unpermute(dq), dk, dv
    assert_same(got, one_device("documents"))


def test_a_plan_without_a_mesh():
    """One device, permuted rows: what one rank of a larger mesh would do, and a debugging aid."""
    plan = plan_of("balanced", 4)
    query, key, value, dout, dlse = tensors()
    mask = packax.create_attention_mask(expression_of("documents"), plan=plan)
    got = jax.jit(results)(*plan.permute((query, key, value, dout)), plan.permute(dlse, 2), mask)
    got = [plan.unpermute(x, 2 if n == 1 else 1) for n, x in enumerate(got)]
    assert_same(got, one_device("documents"))


def test_every_rank_has_the_hull_of_its_own_rows():
    """Built sharded, the bounds are those of a mask built from each rank's ranges alone."""
    plan = plan_of("balanced", 4)
    with jax.set_mesh(mesh_of(4, axes=("context",))):
        mask = packax.create_attention_mask(
            expression_of("one mask for all"), sharding=CONTEXT, plan=plan
        )
    own = LENGTH // 4
    for rank in range(4):
        rows = slice(rank * own, (rank + 1) * own)
        lo, hi = (np.asarray(x)[:, rows] for x in (mask.q_lo, mask.q_hi))
        alone = packax.create_attention_mask(packax.ranges(lo, hi), kv_len=LENGTH)
        for name in ("q_lo", "q_hi", "q_blocks", "kv_blocks", "q_order", "q_order_192", "kv_order"):
            mine = np.split(np.asarray(getattr(mask, name)), 4, axis=-1)[rank]
            np.testing.assert_array_equal(mine, getattr(alone, name), err_msg=f"{name} of {rank}")
    in_order = packax.create_attention_mask(expression_of("one mask for all"))
    in_order = np.broadcast_to(in_order.q_hi, (BATCH, LENGTH))
    np.testing.assert_array_equal(plan.unpermute(mask.q_hi), in_order)


@pytest.mark.parametrize(
    "kind", ["causal", "documents", "positions", "spans of positions", "one mask for all"]
)
@pytest.mark.parametrize("plan", ["balanced", "zigzag"])  # the second has one batch row
def test_the_specs_of_a_mask(kind, plan):
    """Kernels read block bounds and orders that XLA does not: each operand is cut as it was
    made."""
    sharding = dataclasses.replace(FULL, mesh=mesh_of(1, 2, 2, 2))
    mask = packax.create_attention_mask(
        expression_of(kind), q_len=LENGTH, kv_len=LENGTH, sharding=sharding, plan=plan_of(plan, 2)
    )
    layout = layout_of(sharding)
    specs = sharding.mask_specs(mask)
    of_layout = mask.specs(layout.spec, layout.batch, layout.context, layout.heads)
    assert jax.tree.leaves(specs) == jax.tree.leaves(of_layout)
    sizes = {None: 1, BATCH_AXES: 2, "context": 2}
    for x, spec in zip(jax.tree.leaves(mask), jax.tree.leaves(specs), strict=True):
        pieces = [sizes[axes] for axes in (*spec, *[None] * (x.ndim - len(spec)))]
        assert x.sharding.shard_shape(x.shape) == tuple(
            size // n for size, n in zip(x.shape, pieces, strict=True)
        )


def manual_attention(mask, query, key, value):
    if not isinstance(mask, packax.AttentionMask):
        mask = packax.create_attention_mask(of_ids_alone(mask), sharding=TENSOR_REPLICATED)
    out, lse = packax.flash_attention(
        query, key, value, mask, return_lse=True, gather_head_groups=1
    )
    return out, jnp.where(jnp.isfinite(lse), lse, 0)


PARTIAL_HANGS = pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="a shard_map inside another hangs on CPUs in jax 0.7"
)


@pytest.mark.parametrize(
    "names,inside,check_vma",
    [
        (AXES, False, True),
        (AXES, True, True),
        (AXES, False, False),
        pytest.param(("context",), True, True, marks=PARTIAL_HANGS),
        pytest.param(("data", "fsdp", "tensor"), False, True, marks=PARTIAL_HANGS),
    ],
)
def test_inside_a_shard_map(names, inside, check_vma):
    """All axes the user's, or some: the mask comes from outside, or is built inside from ids."""

    def kept(spec):
        def of(axes):
            axes = axes if isinstance(axes, tuple) else (axes,)
            left = tuple(axis for axis in axes if axis in names)
            return left if len(left) > 1 else left[0] if left else None

        return P(*map(of, spec))

    query, key, value, dout, dlse = tensors()
    q_spec, kv_spec = kept(TENSOR_REPLICATED.query), kept(TENSOR_REPLICATED.key_value)
    lse_spec = kept(P(BATCH_AXES, "tensor", "context"))
    with jax.set_mesh(mesh_of(1, 2, 2, 2)):
        if inside:
            mask, mask_spec = jnp.asarray(ROWS), kept(P(BATCH_AXES))
        else:
            mask = packax.create_attention_mask(
                expression_of("of ids alone"), sharding=TENSOR_REPLICATED
            )
            mask_spec = jax.tree.map(kept, TENSOR_REPLICATED.mask_specs(mask))
        mapped = jax.shard_map(
            manual_attention,
            in_specs=(mask_spec, q_spec, kv_spec, kv_spec),
            out_specs=(q_spec, lse_spec),
            axis_names=set(names),
            check_vma=check_vma,
        )

        @jax.jit
        def run(mask, *tensors):
            results, pullback = jax.vjp(functools.partial(mapped, mask), *tensors)
            return *results, *pullback((dout, dlse))

        got = jax.block_until_ready(run(mask, query, key, value))
    assert_same(got, one_device("of ids alone"))


def test_scan_over_layers_and_remat():
    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)

    def network(query, key, value, dout, _, mask):
        def loss(query, key, value):
            @functools.partial(jax.checkpoint, policy=keep)
            def layer(x, _):
                return packax.flash_attention(x, key, value, mask), None

            return jnp.sum(jax.lax.scan(layer, query, None, length=2)[0] * dout)

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    expression = expression_of("documents")
    expected = jax.jit(network)(*tensors(), packax.create_attention_mask(expression))
    with jax.set_mesh(mesh_of(1, 2, 2, 2)):
        mask = packax.create_attention_mask(expression, sharding=FULL)
        function = jax.jit(network)
        got = function(*tensors(), mask)
        # the saved results spare the kernel in the backward pass
        text = str(jax.make_jaxpr(function)(*tensors(), mask))
        assert (text.count("packax_forward["), text.count("packax_backward[")) == (1, 1)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


def test_vmap_and_a_given_mesh():
    mesh = mesh_of(2, axes=("context",))
    sharding = dataclasses.replace(CONTEXT, mesh=mesh)
    mask = packax.create_attention_mask(expression_of("one mask for all"), sharding=sharding)
    query, key, value, *_ = tensors()
    one = lambda q, k, v: packax.flash_attention(  # noqa: E731
        q[None], k[None], v[None], mask
    )
    got = jax.jit(jax.vmap(one))(query, key, value)
    np.testing.assert_allclose(got[:, 0], one_device("one mask for all")[0], atol=1e-6)


def collectives(text):
    """(operation, elements of the result) of every collective in compiled HLO."""
    found = re.findall(
        r"= \(?\w+\[([\d,]*)\]\S* (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(",
        text,
    )
    return [(what, int(np.prod([int(n) for n in shape.split(",") if n]))) for shape, what in found]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_reduce_scattered_and_nothing_large_is_all_reduced(dtype):
    """The forward gathers, the backward gathers again, and scatters: each keys and values of one
    head."""
    mesh = mesh_of(2, axes=("context",))
    plan = plan_of("balanced", 2)
    inputs = tensors(dtype)
    specs = (
        CONTEXT.query,
        CONTEXT.key_value,
        CONTEXT.key_value,
        CONTEXT.query,
        P(None, None, "context"),
    )
    with jax.set_mesh(mesh):
        mask = packax.create_attention_mask(expression_of("documents"), sharding=CONTEXT, plan=plan)
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(inputs, specs, strict=True)
        ]
        function = functools.partial(results, gather_head_groups=KV_HEADS)
        lowered = jax.jit(function).lower(*placed, mask)
    text = lowered.as_text()
    name = "f32" if dtype == jnp.float32 else "bf16"
    own = f"{BATCH}x{LENGTH // 2}x16x{name}"
    assert len(re.findall(rf'"stablehlo.all_gather".*tensor<{own}>', text)) == 2 * KV_HEADS
    scattered = re.findall(r'"stablehlo.reduce_scatter".*?-> tensor<(\S+)>', text, re.DOTALL)
    assert scattered == [own] * KV_HEADS
    assert "stablehlo.all_reduce" not in text

    if dtype != jnp.float32:
        return  # CPUs have no bfloat16 collectives
    compiled = collectives(lowered.compile().as_text())
    whole = BATCH * LENGTH * KV_HEADS * 16
    assert not [x for x in compiled if x[0] in ("all-reduce", "all-to-all")], compiled
    assert sum(n for what, n in compiled if what == "reduce-scatter") == whole // 2
    # Not one gather shared by forward and backward, which would keep all keys in memory between.
    # The CPU compilers of older jax drop the barrier that keeps the two apart.
    if jax.__version_info__ >= (0, 11):
        assert sum(n for what, n in compiled if what == "all-gather" and n > 1000) == 2 * whole
