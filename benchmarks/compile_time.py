"""Times compilation of the gradients of a scan over layers on a mesh, for packax and jax.nn.

    python benchmarks/compile_time.py            # eight fake CPU devices, no GPU needed

Plain jit, with the batch sharded over data and heads over tensor. Times are CPU time of all threads
of the process. Both take turns in every round. The table has medians, and the ratio is the median
of the rounds' ratios, because other work on the machine changes single rounds by a tenth.
"""

from __future__ import annotations

import os
import statistics
import time

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import packax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lib.output import arguments_of, say, write_json

BATCH, LENGTH, HEADS, KV_HEADS, DIM, LAYERS = 8, 512, 8, 4, 64, 24
WIDTH = HEADS * DIM


def with_packax(ids):
    mask = packax.create_attention_mask(packax.causal() & packax.documents(ids))
    return lambda query, key, value: packax.flash_attention(query, key, value, mask)


def with_jax_nn(ids):
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    return lambda query, key, value: jax.nn.dot_product_attention(
        query, key, value, mask=same, is_causal=True
    )


def loss(weights, x, ids, attention_of):
    attention = attention_of(ids)

    def layer(x, w):
        both = jnp.split(x @ w["in"], [WIDTH, WIDTH + KV_HEADS * DIM], axis=-1)
        heads = (y.reshape(*x.shape[:2], -1, DIM) for y in both)
        return x + attention(*heads).reshape(x.shape) @ w["out"], None

    return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)


def seconds(attention_of, layers: int, mesh) -> dict[str, float]:
    """CPU seconds to trace and lower, and to compile."""
    jax.clear_caches()

    def shape(*sizes, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))

    weights = {
        "in": shape(layers, WIDTH, WIDTH + 2 * KV_HEADS * DIM, spec=(None, "data", "tensor")),
        "out": shape(layers, WIDTH, WIDTH, spec=(None, "tensor", "data")),
    }
    x = shape(BATCH, LENGTH, WIDTH, spec=("data",))
    ids = shape(BATCH, LENGTH, spec=("data",), dtype=jnp.int32)
    start = time.process_time()
    step = jax.jit(jax.value_and_grad(loss), static_argnums=3)
    lowered = step.lower(weights, x, ids, attention_of)
    middle = time.process_time()
    lowered.compile()
    return {"trace": middle - start, "compile": time.process_time() - middle}


def main() -> None:
    parser = arguments_of(__doc__, rounds=24)
    arguments = parser.parse_args()
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    ways = {"jax.nn": with_jax_nn, "packax": with_packax}
    for way in ways.values():  # warm-up: imports, XLA's first compilation
        seconds(way, 1, mesh)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            rounds[name].append(seconds(way, LAYERS, mesh))
    median = {
        name: {part: statistics.median(x[part] for x in taken) for part in ("trace", "compile")}
        for name, taken in rounds.items()
    }
    for name, x in median.items():
        say(f"{name:8} trace {x['trace']:6.3f} s, compile {x['compile']:6.3f} s of CPU")
    ratios = sorted(
        sum(ours.values()) / sum(theirs.values())
        for ours, theirs in zip(rounds["packax"], rounds["jax.nn"], strict=True)
    )
    ratio = round(statistics.median(ratios), 3)
    quartiles = [round(ratios[n * len(ratios) // 4], 3) for n in (1, 3)]
    say(f"packax over jax.nn: {ratio} (limit 1.2), half of the rounds {quartiles}")
    report = {
        "jax": jax.__version__,
        "layers": LAYERS,
        "devices": mesh.size,
        "rounds": arguments.rounds,
        "seconds_of_cpu": {
            name: {part: round(t, 3) for part, t in x.items()} for name, x in median.items()
        },
        "ratio": ratio,
        "quartiles": quartiles,
    }
    write_json(arguments.out / "compile_time.json", report)


if __name__ == "__main__":
    main()
