"""Times packed causal attention on a CPU, with packax and with jax.nn's masks of S x S booleans.

    python benchmarks/cpu.py [--rounds 5] [--out DIR]

One row of documents of equal length, in float32 with 8 heads of dim 64. Each implementation runs
once in every round; times are the smallest of all rounds, because other work on the machine only
adds time. Memory is what XLA allocates for intermediate arrays. Both passes means the gradients of
query, key and value. Results are first compared. Writes cpu.json into --out (default: $OUT, else
benchmarks/results).
"""

from __future__ import annotations

import os
import platform
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import packax
from lib.output import arguments_of, say, write_json

HEADS, DIM = 8, 64
CASES = ((512, 1), (1024, 4), (4096, 1), (4096, 16))  # tokens, documents


def with_packax(query: Any, key: Any, value: Any, ids: Any) -> jax.Array:
    mask = packax.create_attention_mask(packax.causal() & packax.documents(ids))
    return packax.flash_attention(query, key, value, mask)


def with_jax_nn(query: Any, key: Any, value: Any, ids: Any) -> jax.Array:
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(query, key, value, mask=same, is_causal=True)


def gradients(attention: Any) -> Any:
    return jax.grad(lambda *args: jnp.sum(attention(*args) ** 2), (0, 1, 2))


def measured(length: int, documents: int, rounds: int) -> dict[str, Any]:
    """Milliseconds and MiB of both implementations, and their ratios."""
    rng = np.random.default_rng(0)
    shape = (1, length, HEADS, DIM)
    tensors = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(3)]
    arguments = (*tensors, jnp.asarray(np.arange(length)[None] * documents // length))
    row: dict[str, Any] = {}
    for passes, transform in (("forward", lambda f: f), ("both passes", gradients)):
        found: dict[str, Any] = {}
        programs = {
            name: jax.jit(transform(f)).lower(*arguments).compile()
            for name, f in (("packax", with_packax), ("jax.nn", with_jax_nn))
        }
        results = [program(*arguments) for program in programs.values()]
        for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
        for name, program in programs.items():
            memory = program.memory_analysis()
            found[name] = {"ms": float("inf"), "MiB": memory.temp_size_in_bytes / 2**20}
        for _ in range(rounds):
            for name, program in programs.items():
                began = time.perf_counter()
                jax.block_until_ready(program(*arguments))
                took = 1e3 * (time.perf_counter() - began)
                found[name]["ms"] = min(found[name]["ms"], took)
        row[passes] = found | {
            f"jax.nn / packax, {unit}": found["jax.nn"][unit] / found["packax"][unit]
            for unit in ("ms", "MiB")
        }
    return row


def main() -> None:
    parser = arguments_of(__doc__, rounds=5)
    arguments = parser.parse_args()
    report = {"jax": jax.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
    report["cases"] = cases = {}
    for length, documents in CASES:
        name = f"{documents} documents in {length}" if documents > 1 else f"causal {length}"
        cases[name] = measured(length, documents, arguments.rounds)
        for passes, found in cases[name].items():
            ratios = [found[f"jax.nn / packax, {unit}"] for unit in ("ms", "MiB")]
            say(f"{name}, {passes}: time {ratios[0]:.2f}, memory {ratios[1]:.2f} of packax's")
    write_json(arguments.out / "cpu.json", report)


if __name__ == "__main__":
    main()
