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

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax


def problem():
    """(query, key, value, ids): two sequences of 512 tokens, three documents and padding each."""
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, 512, 4, 16))
    key, value = (jax.random.normal(k, (2, 512, 2, 16)) for k in keys[1:])
    ids = np.repeat(np.array([0, 1, 2, -1], np.int32), [200, 150, 130, 32])
    return query, key, value, jnp.stack([ids, np.roll(ids, 7)])


def expression(ids):
    return packax.causal() & packax.documents(ids)


def attend(query, key, value, ids):
    return packax.flash_attention(query, key, value, expression(ids))


def dense(query, key, value, ids):
    allowed = expression(ids).as_array(query.shape[1], query.shape[1])[:, None]
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") / 4
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e30)) * allowed
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value, precision="highest")


def check(got, want) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=2e-5)


def imports() -> None:
    assert packax.__version__


def forward_and_backward() -> None:
    *tensors, ids = problem()
    results = []
    for function in (attend, dense):
        out, pull = jax.vjp(lambda *x, f=function: f(*x, ids), *tensors)
        results.append((out, *pull(jnp.sin(tensors[0]))))
    check(*results)


def vmap() -> None:
    batch = [x[:, None] for x in problem()]
    check(jax.vmap(attend)(*batch)[:, 0], attend(*problem()))


def export(batch=2, length=512) -> None:
    arguments = problem()
    shapes = [jax.ShapeDtypeStruct((batch, length, *x.shape[2:]), x.dtype) for x in arguments]
    exported = jax.export.export(
        jax.jit(attend), platforms=["cpu", "cuda"], disabled_checks=packax.export_checks()
    )(*shapes)
    check(jax.export.deserialize(exported.serialize()).call(*arguments), attend(*arguments))


def symbolic_export() -> None:
    export(*jax.export.symbolic_shape("b, s"))


def context_parallelism() -> None:
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


def decoding() -> None:
    query, key, value, _ = problem()
    ids = jnp.zeros(query.shape[:2], jnp.int32)
    out = packax.decode_attention(query[:, 80:81], key, value, jnp.array([81, 81]))
    check(out, dense(query, key, value, ids)[:, 80:81])


def drop_in() -> None:
    import packax.kvax.ops
    import packax.kvax.utils

    query, key, value, _ = problem()
    check(
        packax.dot_product_attention(query, key, value, is_causal=True),
        jax.nn.dot_product_attention(query, key, value, is_causal=True),
    )


STEPS = {
    function.__name__: function
    for function in (
        *(imports, forward_and_backward, vmap, export, symbolic_export),
        *(context_parallelism, decoding, drop_in),
    )
}


def main(chosen: list[str]) -> int:
    passed = 0
    for name in chosen:
        try:
            STEPS[name]()
            passed += 1
            print(f"  {name}: ok")
        except Exception:
            traceback.print_exc()
            print(f"  {name}: FAILED")
    versions = f"jax {jax.__version__}, numpy {np.__version__}"
    what = f"Python {platform.python_version()}, {versions}"
    print(f"{what}: {passed} of {len(chosen)} steps passed")
    return 0 if passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(STEPS)))
