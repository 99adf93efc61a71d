"""Costs of jax around the kernels: Python's part of a call, program size, time to compile.

    python benchmarks/overheads.py [--calls 500] [--out DIR]

Runs on any machine, without kernels: microseconds of Python for an eager and for a jitted call,
instructions of a program that builds a mask, and processor seconds to trace, lower and compile the
gradients of a model of 24 layers; also for jax.nn.dot_product_attention. Writes overheads.json into
--out (default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packax
from lib.output import arguments_of, write_json

LAYERS, LENGTH, HEADS, KV_HEADS, DIM = 24, 256, 8, 2, 32
Attention = Callable[..., jax.Array]


def attentions() -> dict[str, tuple[Attention, Callable[[jax.Array], Any]]]:
    """By name: attention(query, key, value, mask), and the mask of these ids."""

    def by_jax(query: jax.Array, key: jax.Array, value: jax.Array, _: Any) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    def of_documents(ids: jax.Array) -> Any:
        return packax.create_attention_mask(packax.causal() & packax.documents(ids))

    def causal(_: jax.Array) -> Any:
        return packax.create_attention_mask(packax.causal(), q_len=LENGTH, kv_len=LENGTH)

    return {
        "jax.nn": (by_jax, lambda _: None),
        "packax causal": (packax.flash_attention, causal),
        "packax documents": (packax.flash_attention, of_documents),
    }


def small_inputs() -> tuple[tuple[jax.Array, ...], jax.Array]:
    heads = (HEADS, KV_HEADS, KV_HEADS)
    ids = jnp.asarray(np.arange(LENGTH)[None] // 64).astype(jnp.int32)
    return tuple(jnp.ones((1, LENGTH, n, DIM)) for n in heads), ids


def microseconds(function: Callable[[], Any], calls: int) -> dict[str, float]:
    """Time until a call returns; each starts after the previous one has finished."""
    times = []
    for _ in range(calls + 5):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
        jax.block_until_ready(result)
    times = sorted(times[5:])
    return {
        "median_us": round(times[calls // 2] * 1e6, 1),
        "tenth_us": round(times[calls // 10] * 1e6, 1),
    }


def call_time(calls: int) -> dict[str, Any]:
    """Python's part of a call: eager, and dispatch of a compiled function that takes the mask."""
    tensors, ids = small_inputs()
    fewer = max(20, calls // 10)
    found: dict[str, Any] = {}
    for name, (attention, mask_of) in attentions().items():
        operands = (*tensors, mask_of(ids))
        found[name] = {
            "eager": microseconds(functools.partial(attention, *operands), fewer),
            "jitted": microseconds(functools.partial(jax.jit(attention), *operands), calls),
        }
        if operands[3] is not None:
            found[name]["mask, eager"] = microseconds(functools.partial(mask_of, ids), fewer)
    return found


def instructions(compiled: Any) -> int:
    """The number of instructions in a compiled program."""
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", compiled.as_text(), re.MULTILINE))


def mask_instructions() -> dict[str, int]:
    _, ids = small_inputs()
    return {
        name: instructions(jax.jit(mask_of).lower(ids).compile())
        for name, (_, mask_of) in attentions().items()
        if mask_of(ids) is not None
    }


def model(attention: Attention, mask_of: Callable[..., Any], scan: bool) -> Callable[..., Any]:
    """Gradients of a plain transformer: projections, attention, a residual."""

    def layer(x: jax.Array, weights: Any, mask: Any) -> jax.Array:
        query, key, value = (jnp.einsum("bse,ehd->bshd", x, w) for w in weights[:3])
        return x + jnp.einsum("bshd,hde->bse", attention(query, key, value, mask), weights[3])

    def loss(weights: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
        mask = mask_of(ids)
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w, mask), None), x, weights)
        else:
            for n in range(LAYERS):
                x = layer(x, jax.tree.map(lambda w, n=n: w[n], weights), mask)
        return jnp.sum(x * x)

    return jax.grad(loss)


def compile_time() -> dict[str, Any]:
    """Processor seconds of the process, over all threads."""
    width = HEADS * DIM
    shapes = [(LAYERS, width, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
    weights = [jnp.ones(shape) for shape in (*shapes, (LAYERS, HEADS, DIM, width))]
    x, ids = jnp.ones((1, LENGTH, width)), small_inputs()[1]
    found: dict[str, Any] = {}
    for name, (attention, mask_of) in attentions().items():
        for scan in (True, False):
            jax.clear_caches()
            function = jax.jit(model(attention, mask_of, scan))
            start = time.process_time()
            traced = function.trace(weights, x, ids)
            trace = time.process_time()
            lowered = traced.lower()
            lower = time.process_time()
            compiled = lowered.compile()
            end = time.process_time()
            found[f"{name}, {'scan' if scan else 'unrolled'}"] = {
                "trace_s": round(trace - start, 2),
                "lower_s": round(lower - trace, 2),
                "compile_s": round(end - lower, 2),
                "all_s": round(end - start, 2),
                "lines_of_stablehlo": lowered.as_text().count("\n"),
                "instructions": instructions(compiled),
            }
    return found


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--calls", type=int, default=500)
    arguments = parser.parse_args()
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {jax.default_backend()}",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "calls": call_time(arguments.calls),
        "mask_instructions": mask_instructions(),
        f"gradients_of_{LAYERS}_layers": compile_time(),
    }
    print(json.dumps(report, indent=1))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "overheads.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
