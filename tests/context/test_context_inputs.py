"""shard_batch shards a batch with its mask; check_plan finds a plan that only one of them used."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from context import LENGTH, mesh_of, run_to_end
from jax.sharding import PartitionSpec as P
from packings import ids_of, positions_of
from tiers import once_each, some

AXES = ("data", "context", "tensor")
SPEC = P("data", "context", "tensor")
SHARDING = packax.AttentionSharding(SPEC, SPEC)
# In every row, a rank's first chunk begins inside a document.
IDS = np.stack(
    [
        ids_of((0, 800), (1, 224)),
        ids_of((3, 100), (1, 20), (-1, 9), (2, 700), (-1, 195)),
        ids_of((5, 90), (6, 200), (5, 334), (-2, 400)),
        ids_of((9, 600), (8, 424)),
    ]
)
POSITIONS = np.stack([positions_of(row) for row in IDS])
EXPRESSION = packax.causal() & packax.documents(IDS)


def test_eager_arrays_of_numpy_are_placed():
    with jax.set_mesh(mesh_of(2, 2, 2, axes=AXES)):
        batch, mask, plan = packax.context.shard_batch(
            {"ids": IDS, "positions": POSITIONS}, EXPRESSION, sharding=SHARDING
        )
        np.testing.assert_array_equal(batch["ids"], mask.q_ids)
        np.testing.assert_array_equal(batch["positions"], plan.permute(POSITIONS))
        assert batch["ids"].sharding.spec == P("data", "context")


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_in_the_sharding_alone(kind):
    mesh = mesh_of(2, 2, 2, kind=kind, axes=AXES)
    sharding = packax.AttentionSharding(SPEC, SPEC, mesh=mesh)
    call = functools.partial(packax.context.shard_batch, sharding=sharding)
    for run in call, jax.jit(lambda x, y: call(x, y)):
        batch, mask, plan = run({"ids": IDS}, EXPRESSION)
        np.testing.assert_array_equal(batch["ids"], mask.q_ids)
        np.testing.assert_array_equal(batch["ids"], plan.permute(IDS))
        assert batch["ids"].sharding.spec[:2] == ("data", "context")


@pytest.mark.parametrize("mesh", ["given", "set"])
def test_a_mesh_of_one_rank(mesh):
    """Any length works, without a copy, so a program for four devices also runs on one."""
    made = mesh_of(1, 1, 1, axes=AXES)
    sharding = packax.AttentionSharding(SPEC, SPEC, mesh=made if mesh == "given" else None)
    x = np.arange(200).reshape(2, 100)
    with jax.set_mesh(made):
        batch, mask, plan = packax.context.shard_batch(x, packax.causal(), sharding=sharding)
    np.testing.assert_array_equal(batch, x)
    assert mask.kv_plan is None and plan.ranks == 1
    np.testing.assert_array_equal(plan.unpermute(x), x)


# --- A plan used by only the batch or only the mask.

NOT_PERMUTED = "the batch was not permuted, but the mask was built with a plan"
NO_PLAN = "the batch was permuted, but the mask was built without a plan"
TWICE = "the ids in the mask's expression were already permuted by the plan"


def half_used(case, plan):
    """The mask and the batch's ids and positions, with the given mistake."""
    ids, positions = plan.permute((jnp.asarray(IDS), jnp.asarray(POSITIONS)))
    build = functools.partial(packax.create_attention_mask, sharding=SHARDING)
    causal = packax.causal()
    if case == "right":
        return build(EXPRESSION, plan=plan), ids, positions
    if case == "no plan at all":
        return build(EXPRESSION), jnp.asarray(IDS), jnp.asarray(POSITIONS)
    if case == "not permuted":
        return build(EXPRESSION, plan=plan), jnp.asarray(IDS), jnp.asarray(POSITIONS)
    if case == "no plan":
        return build(EXPRESSION), ids, positions

    @jax.jit  # where values and the array are not known
    def mask_of(ids, plan):
        return build(causal & packax.documents(ids), plan=plan)

    with packax.context.debug_checks(False):
        return mask_of(ids + 0, plan), ids, positions


CASES = {
    "right": None,
    "no plan at all": None,
    "not permuted": NOT_PERMUTED,
    "no plan": NO_PLAN,
    "ids permuted": TWICE,
}


@pytest.mark.parametrize(
    "case,jit,kind", once_each(CASES, [False, True], ["balanced", "zigzag"]), ids=str
)
def test_which_half_is_missing(case, jit, kind):
    def check():
        plan = packax.context_plan(EXPRESSION, sharding=SHARDING, kind=kind)
        mask, ids, positions = half_used(case, plan)
        packax.context.check_plan(mask, segment_ids=ids, positions=positions)
        return ids

    with jax.set_mesh(mesh_of(2, 2, 2, axes=AXES)):
        if jit:
            check = jax.jit(check)
        run_to_end(check)  # the check is off
        with packax.context.debug_checks():
            if CASES[case] is None:
                run_to_end(check)
                return
            with pytest.raises(ValueError, match=CASES[case]):
                run_to_end(check)


def test_positions_of_ids_that_reappear():
    """They may count on, as `segments.positions` does, or restart, as for two documents."""
    ids = np.repeat([[0, 1, 0, -1, 0, 2, 3, -1]], LENGTH // 8, axis=1)
    on, restarting = packax.segments.positions(ids), positions_of(ids[0])[None]
    assert (on != restarting)[ids != -1].any()
    expression = packax.causal() & packax.documents(ids)
    plan = packax.context_plan(expression, ranks=4)
    mask = packax.create_attention_mask(expression, plan=plan)
    with packax.context.debug_checks():
        for positions in on, restarting:
            batch = plan.permute({"segment_ids": ids, "positions": positions})
            packax.context.check_plan(mask, **batch)
            with pytest.raises(ValueError, match=NOT_PERMUTED):
                packax.context.check_plan(mask, segment_ids=ids, positions=positions)


def test_no_documents():
    """Positions alone decide where all rows look alike."""
    index = np.arange(LENGTH)[None]
    plan = packax.context_plan(packax.causal(), ranks=4, kind="zigzag", length=LENGTH)
    of = functools.partial(packax.create_attention_mask, packax.causal(), q_len=LENGTH)
    with packax.context.debug_checks():
        packax.context.check_plan(of(kv_len=LENGTH, plan=plan), positions=plan.permute(index))
        packax.context.check_plan(of(kv_len=LENGTH), positions=index)
        with pytest.raises(ValueError, match=NOT_PERMUTED):
            packax.context.check_plan(of(kv_len=LENGTH, plan=plan), positions=index)
        with pytest.raises(ValueError, match=NO_PLAN):
            packax.context.check_plan(of(kv_len=LENGTH), positions=plan.permute(index))
        in_order = of(kv_len=LENGTH, plan=plan, permuted_keys=False)
        with pytest.raises(ValueError, match="pass plan=: a mask built with permuted_keys=False"):
            packax.context.check_plan(in_order, positions=index)
        packax.context.check_plan(in_order, positions=plan.permute(index), plan=plan)
        with pytest.raises(ValueError, match=NOT_PERMUTED):
            packax.context.check_plan(in_order, positions=index, plan=plan)


def test_it_costs_nothing_while_it_is_off():
    """The check adds no operation; turning it on recompiles a compiled function."""
    mask = packax.create_attention_mask(EXPRESSION)

    def step(mask, ids, check):
        if check:
            packax.context.check_plan(mask, segment_ids=ids)
        return ids + 1

    with_check = jax.jit(functools.partial(step, check=True))
    without = jax.jit(functools.partial(step, check=False))
    texts = [f.lower(mask, IDS).as_text() for f in (with_check, without)]
    assert texts[0] == texts[1]
    wrong = np.roll(IDS, 1, axis=1)
    with_check(mask, wrong)
    if hasattr(jax, "make_user_context"):
        errors = ValueError, jax.errors.JaxRuntimeError
        with packax.context.debug_checks(), pytest.raises(errors, match="check_plan"):
            run_to_end(lambda: with_check(mask, wrong))
        with packax.context.debug_checks(), packax.context.debug_checks(False):
            with_check(mask, wrong)


STEPS = """
import jax, jax.numpy as jnp, numpy as np, packax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(AxisType.{kind},) * 2)
rows = P("data", "context")
sharding = packax.AttentionSharding(query=rows, key_value=rows)
ids = np.repeat(np.sort(np.random.default_rng(0).integers(0, 6, (2, 64)), 1), 16, 1)
expression = packax.causal() & packax.documents(ids)
place = lambda x: jax.device_put(jnp.asarray(x), NamedSharding(mesh, rows))

@jax.jit
def step(query, ids, plan):
    mask = packax.create_attention_mask(expression, sharding=sharding, plan=plan)
    packax.context.check_plan(mask, segment_ids=ids)
    return jax.grad(lambda x: packax.flash_attention(x, x, x, mask).sum())(query)

with jax.set_mesh(mesh):
    plan = packax.context_plan(expression, sharding=sharding)
    query = place(np.ones((2, 1024, 2, 8), np.float32))
    for batch in (plan.permute(jnp.asarray(ids)), ids, plan.permute(jnp.asarray(ids))):
        try:
            jax.block_until_ready(step(query, place(batch), plan))
            jax.effects_barrier()
            print("passed")
        except ValueError as error:
            print(error)
"""


@pytest.mark.parametrize("kind", some(["Auto", "Explicit"], 0))
def test_a_step_on_several_devices_raises_and_goes_on(kind):
    """No device waits for one that raised, XLA does not abort the process, and nothing warns."""
    flags = "--xla_force_host_platform_device_count=4"
    environment = os.environ | {"PACKAX_DEBUG": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", STEPS.format(kind=kind)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, error, last = done.stdout.splitlines()
    assert first == last == "passed" and NOT_PERMUTED in error
    assert "Involuntary" not in done.stderr, done.stderr


@pytest.mark.parametrize("value,failed", some([("1", True), ("0", False), ("", False)], 0))
def test_the_environment_turns_it_on(value, failed):
    code = (
        "import packax, numpy as np\n"
        "mask = packax.create_attention_mask(packax.documents(np.arange(9)))\n"
        "packax.context.check_plan(mask, segment_ids=np.arange(9)[None, ::-1])"
    )
    environment = os.environ | {"PACKAX_DEBUG": value, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (NO_PLAN in shown.stderr) == failed == (shown.returncode != 0), shown.stderr
