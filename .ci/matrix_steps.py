"""Eight checks that must pass with every Python and every jax that packax supports.

    python .ci/matrix_steps.py                    all of them
    python .ci/matrix_steps.py imports drop_in    some

Run it with the Python of an environment that has packax installed. Needs no GPU. Prints a line per
step, and the errors.
"""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Callable

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

STEPS: list[Callable[[], None]] = []


def step(function: Callable[[], None]) -> Callable[[], None]:
    STEPS.append(function)
    return function


def problem():
    """(query, key, value, ids): two sequences of 512 tokens, three documents and padding each."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, 512, 4, 16))
    key, value = (jax.random.normal(k, (2, 512, 2, 16)) for k in keys[1:])
    ids = jnp.repeat(
        jnp.array([0, 1, 2, -1]), jnp.array([200, 150, 130, 32]), total_repeat_length=512
    )
    return query, key, value, jnp.stack([ids, jnp.roll(ids, 7)])


def expression(ids):
    import packax

    return packax.causal() & packax.documents(ids)


def dense(query, key, value, ids):
    import jax
    import jax.numpy as jnp

    length = query.shape[1]
    allowed = expression(ids).as_array(length, length)[:, None]
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") / 4
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e30)) * allowed
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value, precision="highest")


def check(got, want) -> None:
    import jax
    import numpy as np

    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=2e-5)


def attend(query, key, value, ids):
    import packax

    return packax.flash_attention(query, key, value, expression(ids))


@step
def imports() -> None:
    import importlib.metadata

    import packax

    assert importlib.metadata.version("jax") and packax.__version__


@step
def forward_and_backward() -> None:
    import jax

    *tensors, ids = problem()
    for function in (attend, dense):
        out, pull = jax.vjp(lambda q, k, v, f=function: f(q, k, v, ids), *tensors)
        got = (out, *pull(jax.numpy.sin(tensors[0])))
        if function is attend:
            mine = got
    check(mine, got)


@step
def vmap() -> None:
    import jax

    batch = [x[:, None] for x in problem()]
    check(jax.vmap(attend)(*batch)[:, 0], attend(*problem()))


def exported(shapes, *arguments) -> None:
    import jax
    import packax

    export = jax.export.export(
        jax.jit(attend), platforms=["cpu", "cuda"], disabled_checks=packax.export_checks()
    )(*shapes)
    blob = export.serialize()
    check(jax.export.deserialize(blob).call(*arguments), attend(*arguments))


@step
def export() -> None:
    exported(problem(), *problem())


@step
def symbolic_export() -> None:
    import jax

    batch, length = jax.export.symbolic_shape("b, s")
    arguments = problem()
    shapes = [jax.ShapeDtypeStruct((batch, length, *x.shape[2:]), x.dtype) for x in arguments]
    exported(shapes, *arguments)


@step
def context_parallelism() -> None:
    import jax
    import packax

    spec = jax.sharding.PartitionSpec(None, "context", None, None)
    mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = packax.AttentionSharding(query=spec, key_value=spec)

    def run(query, key, value, ids):
        rows, mask, plan = packax.context.shard_batch(
            (query, key, value), expression(ids), sharding=sharding
        )
        return plan.unpermute(packax.flash_attention(*rows, mask))

    with jax.set_mesh(mesh):
        out = jax.jit(run)(*problem())
    check(out, attend(*problem()))


@step
def decoding() -> None:
    import jax.numpy as jnp
    import packax

    query, key, value, _ = problem()
    ids = jnp.zeros(query.shape[:2], jnp.int32)
    out = packax.decode_attention(query[:, 80:81], key, value, jnp.array([81, 81]))
    check(out, dense(query, key, value, ids)[:, 80:81])


@step
def drop_in() -> None:
    import jax
    import packax
    import packax.kvax.ops
    import packax.kvax.utils

    query, key, value, _ = problem()
    check(
        packax.dot_product_attention(query, key, value, is_causal=True),
        jax.nn.dot_product_attention(query, key, value, is_causal=True),
    )


def main() -> int:
    import jax
    import jax.export
    import numpy

    what = f"Python {platform.python_version()}, jax {jax.__version__}, numpy {numpy.__version__}"
    known = {function.__name__: function for function in STEPS}
    for name in set(sys.argv[1:]) - set(known):
        raise SystemExit(f"no step named {name}; there are: {', '.join(known)}")
    chosen = [known[name] for name in sys.argv[1:]] or STEPS
    failed = []
    for function in chosen:
        try:
            function()
        except Exception:
            traceback.print_exc()
            failed.append(function.__name__)
        print(f"  {function.__name__}: {'FAILED' if function.__name__ in failed else 'ok'}")
    print(f"{what}: {len(chosen) - len(failed)} of {len(chosen)} steps passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
