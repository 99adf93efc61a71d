"""Times attention on a CPU, with packax and with jax.nn (its masks are S x S booleans).

    python benchmarks/cpu.py [--rounds 5] [--out DIR]

Causal rows of documents of equal length, and short rows that attend to all of their tokens, in
float32 with heads of dim 64. Each implementation runs once in every round; times are the smallest
of all rounds, because other work on the machine only adds time. Memory is what XLA allocates for
intermediate arrays. The time to compile is processor time, from the call of `jit` to a program, the
smallest of three. Both passes means the gradients of query, key and value. Results are first
compared. Writes cpu.json into --out (default: $OUT, else benchmarks/results).
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

DIM = 64
CASES = {  # name: rows, tokens, heads, documents; 0 documents: full attention
    "causal 512": (1, 512, 8, 1),
    "4 documents in 1024": (1, 1024, 8, 4),
    "causal 4096": (1, 4096, 8, 1),
    "16 documents in 4096": (1, 4096, 8, 16),
    "8 rows of 197, ViT-B": (8, 197, 12, 0),
    "32 rows of 50, ViT-B/32": (32, 50, 12, 0),
    "64 rows of 128, BERT base": (64, 128, 12, 0),
    "16 rows of 16": (16, 16, 8, 0),
}
UNITS = "ms", "MiB", "s to compile"


def with_packax(query: Any, key: Any, value: Any, ids: Any) -> jax.Array:
    mask = packax.full() if ids is None else packax.causal() & packax.documents(ids)
    mask = packax.create_attention_mask(mask, q_len=query.shape[1], kv_len=key.shape[1])
    return packax.flash_attention(query, key, value, mask)


def with_jax_nn(query: Any, key: Any, value: Any, ids: Any) -> jax.Array:
    if ids is None:
        return jax.nn.dot_product_attention(query, key, value)
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(query, key, value, mask=same, is_causal=True)


def gradients(attention: Any) -> Any:
    return jax.grad(lambda *args: jnp.sum(attention(*args) ** 2), (0, 1, 2))


def compiled(function: Any, arguments: Any) -> tuple[Any, float]:
    """The program, and the processor time to compile it in seconds."""
    took = []
    for _ in range(3):
        jax.clear_caches()
        began = time.process_time()
        program = jax.jit(function).lower(*arguments).compile()
        took.append(time.process_time() - began)
    return program, min(took)


def measured(rows: int, length: int, heads: int, documents: int, rounds: int) -> dict[str, Any]:
    """What both implementations take, by unit, and their ratios."""
    rng = np.random.default_rng(0)
    shape = (rows, length, heads, DIM)
    tensors = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(3)]
    ids = jnp.asarray(np.arange(length)[None] * documents // length) if documents else None
    arguments = (*tensors, ids)
    row: dict[str, Any] = {}
    for passes, transform in (("forward", lambda f: f), ("both passes", gradients)):
        found: dict[str, Any] = {}
        programs = {}
        for name, f in (("packax", with_packax), ("jax.nn", with_jax_nn)):
            programs[name], took = compiled(transform(f), arguments)
            found[name] = {"ms": float("inf"), "s to compile": took}
        results = [program(*arguments) for program in programs.values()]
        for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
        for name, program in programs.items():
            found[name]["MiB"] = program.memory_analysis().temp_size_in_bytes / 2**20
        for _ in range(rounds):
            for name, program in programs.items():
                began = time.perf_counter()
                jax.block_until_ready(program(*arguments))
                took = 1e3 * (time.perf_counter() - began)
                found[name]["ms"] = min(found[name]["ms"], took)
        row[passes] = found | {
            f"jax.nn / packax, {unit}": found["jax.nn"][unit] / found["packax"][unit]
            for unit in UNITS
            if found["packax"][unit]
        }
    return row


def main() -> None:
    parser = arguments_of(__doc__, rounds=5)
    arguments = parser.parse_args()
    report = {"jax": jax.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
    report["cases"] = cases = {}
    for name, case in CASES.items():
        cases[name] = measured(*case, arguments.rounds)
        for passes, found in cases[name].items():
            ratios = (f"{found[f'jax.nn / packax, {unit}']:.2f} ({unit})" for unit in UNITS)
            say(f"{name}, {passes}: jax.nn / packax {', '.join(ratios)}")
    write_json(arguments.out / "cpu.json", report)


if __name__ == "__main__":
    main()
