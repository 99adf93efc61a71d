"""Time to compile a scan over layers, forward and gradient, on a mesh: packax beside jax.nn.

    python benchmarks/compile_time.py            # eight fake CPU devices, no GPU needed

Plain jit, batch over data and heads over tensor. CPU time of the process, all threads together:
what else runs on the machine does not count. Rounds take turns; the table has the least of each.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import packax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lib.output import default_out, say

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 8, 512, 8, 4, 64
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
    """To trace and lower, and to compile."""
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one-device", action="store_true", help="what the mesh costs: without")
    parser.add_argument("--out", type=Path, help="folder of compile_time.json")
    arguments = parser.parse_args()
    sizes = (1, 1) if arguments.one_device else (4, 2)
    devices = jax.devices()[: sizes[0] * sizes[1]]
    mesh = jax.make_mesh(
        sizes, ("data", "tensor"), devices=devices, axis_types=(AxisType.Auto,) * 2
    )
    ways = {"jax.nn": with_jax_nn, "packax": with_packax}
    for way in ways.values():  # what a process does once: imports, XLA's first compilation
        seconds(way, 1, mesh)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            rounds[name].append(seconds(way, arguments.layers, mesh))
    least = {
        name: {part: round(min(x[part] for x in taken), 3) for part in ("trace", "compile")}
        for name, taken in rounds.items()
    }
    for name, x in least.items():
        say(f"{name:8} trace {x['trace']:6.3f} s, compile {x['compile']:6.3f} s of CPU")
    sums = {name: x["trace"] + x["compile"] for name, x in least.items()}
    ratio = round(sums["packax"] / sums["jax.nn"], 3)
    say(f"packax over jax.nn: {ratio} (limit 1.2)")
    report = {
        "jax": jax.__version__,
        "layers": arguments.layers,
        "devices": len(devices),
        "seconds_of_cpu": least,
        "ratio": ratio,
    }
    out = arguments.out or default_out()
    out.mkdir(parents=True, exist_ok=True)
    (out / "compile_time.json").write_text(json.dumps(report, indent=2) + "\n")
    say(f"wrote {out / 'compile_time.json'}")


if __name__ == "__main__":
    main()
