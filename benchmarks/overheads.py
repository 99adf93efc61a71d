"""Times the overheads around the kernels: Python per call, tracing and compilation.

    python benchmarks/overheads.py [--calls 500] [--out DIR]

On any machine, without kernels: microseconds of Python per eager and per jitted call, and CPU
seconds to trace, lower and compile the gradients of a model with 24 layers, for rows of 256 and of
1,024 tokens; the same for jax.nn.dot_product_attention. On a GPU also: the first call of a process,
milliseconds to build a mask, and host time in the C++ handlers. Writes overheads.json into --out
(default: $OUT, else benchmarks/results).
"""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packax
from lib.cases import Case
from lib.implementations import Compiled, expression_of, packax_attention, random_inputs
from lib.output import arguments_of, write_json
from lib.turns import PASSES, interleaved

LAYERS, LENGTH, HEADS, KV_HEADS, DIM = 24, 256, 8, 2, 32
Attention = Callable[..., jax.Array]


def attentions() -> dict[str, tuple[Attention, Callable[[jax.Array], Any]]]:
    """By name: attention(query, key, value, mask), and a function from ids to the mask."""

    def by_jax(query: jax.Array, key: jax.Array, value: jax.Array, _: Any) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    def of_documents(ids: jax.Array) -> Any:
        return packax.create_attention_mask(packax.causal() & packax.documents(ids))

    def causal(ids: jax.Array) -> Any:
        length = ids.shape[1]
        return packax.create_attention_mask(packax.causal(), q_len=length, kv_len=length)

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
    """The time until a call returns. Each call starts after the previous one has finished."""
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
    """The Python time of an eager call, and of the dispatch of a jitted function with a mask."""
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


def model(attention: Attention, mask_of: Callable[..., Any], scan: bool) -> Callable[..., Any]:
    """The gradients of a model whose layers are projections, attention and a residual."""

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


def compile_time(length: int) -> dict[str, Any]:
    """CPU seconds of all threads to trace, lower and compile each model, for a row of tokens."""
    width = HEADS * DIM
    shapes = [(LAYERS, width, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
    weights = [jnp.ones(shape) for shape in (*shapes, (LAYERS, HEADS, DIM, width))]
    x, ids = jnp.ones((1, length, width)), jnp.arange(length, dtype=jnp.int32)[None] // 64
    found: dict[str, Any] = {}
    for name, (attention, mask_of) in attentions().items():
        for scan in (True, False):
            jax.clear_caches()
            function = jax.jit(model(attention, mask_of, scan))
            times = [time.process_time()]
            traced = function.trace(weights, x, ids)
            times.append(time.process_time())
            lowered = traced.lower()
            times.append(time.process_time())
            lowered.compile()
            times.append(time.process_time())
            trace, lower, compiling = np.diff(times).tolist()
            found[f"{name}, {'scan' if scan else 'unrolled'}"] = {
                "trace_s": round(trace, 2),
                "lower_s": round(lower, 2),
                "compile_s": round(compiling, 2),
                "all_s": round(times[-1] - times[0], 2),
                "lines_of_stablehlo": lowered.as_text().count("\n"),
            }
    return found


# --- On a GPU


def first_call() -> dict[str, Any]:
    """The time of the first packax call of the process, forward and backward, and of the second."""
    start = time.perf_counter()
    x = jax.jit(lambda x: x @ x)(jnp.ones((256, 256), jnp.bfloat16))
    jax.block_until_ready(x)
    backend = time.perf_counter() - start

    case = Case("first", 1, 8192, 8, 2, 128, 5)
    *inputs, ids = jax.block_until_ready((*random_inputs(case), jnp.asarray(case.segment_ids())))

    @jax.jit
    def step(query, key, value, cotangent, ids):
        mask = packax.create_attention_mask(expression_of(case, ids))
        _, pullback = jax.vjp(lambda *x: packax.flash_attention(*x, mask), query, key, value)
        return pullback(cotangent)

    start = time.perf_counter()
    compiled = step.lower(*inputs, ids).compile()
    times = [time.perf_counter() - start]
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*inputs, ids))
        times.append(time.perf_counter() - start)
    return {
        "backend_s": round(backend, 3),
        "trace_and_xla_compile_s": round(times[0], 3),
        "first_run_ms": round(times[1] * 1e3, 3),
        "second_run_ms": round(times[2] * 1e3, 3),
        "triton_imported": "triton" in sys.modules,
    }


def mask_building() -> dict[str, Any]:
    """Milliseconds to build the mask of one row: as a jitted call, and in a jitted loop."""
    case = Case("mask", 1, 131072, 8, 2, 128, 12)
    ids = jnp.asarray(case.segment_ids())
    positions = jnp.asarray(np.concatenate([np.arange(n) for n in case.lengths])[None], jnp.int32)
    builders = {
        "ids": lambda ids: packax.documents(ids),
        "ids_positions": lambda ids: packax.documents(ids, positions=positions),
    }
    iterations = 200
    result: dict[str, Any] = {"tokens": case.seq, "documents": case.documents}
    for name, documents in builders.items():

        def build(ids: jax.Array, documents: Any = documents) -> Any:
            return packax.create_attention_mask(packax.causal() & documents(ids))

        @jax.jit
        def loop(ids: jax.Array, build: Any = build) -> Any:
            def body(_: Any, mask: Any) -> Any:
                # The ids depend on the previous mask, so XLA cannot hoist the mask out of the loop.
                return build(ids + jnp.minimum(jax.tree.leaves(mask)[0].ravel()[0], 0))

            return jax.lax.fori_loop(0, iterations, body, build(ids))

        functions = {
            "in_jit_ms": functools.partial(loop, ids),
            "launched_ms": functools.partial(jax.jit(build), ids),
        }
        times = interleaved(functions, jax.block_until_ready, 5, 40)
        built = {"in_jit_ms": iterations + 1, "launched_ms": 1}  # masks of a call
        result[name] = {x: round(statistics.median(times[x]) / n, 4) for x, n in built.items()}
    mask = packax.create_attention_mask(expression_of(case, ids))
    result["bytes_a_token"] = round(sum(x.nbytes for x in jax.tree.leaves(mask)) / case.seq, 2)
    return result


def handler_time(calls: int = 300) -> dict[str, Any]:
    """Host microseconds per call in the C++ handlers, counted by the extension."""
    from packax import _ext

    case = Case("handlers", 1, 2048, 8, 2, 128, 5)
    ids = jnp.asarray(case.segment_ids())
    build = jax.jit(lambda ids: packax.create_attention_mask(expression_of(case, ids)))
    compiled = Compiled(packax_attention(case), random_inputs(case))
    functions = [functools.partial(build, ids), *(compiled.function(what) for what in PASSES)]

    def run(count: int) -> None:
        for _ in range(count):
            jax.block_until_ready([function() for function in functions])

    run(20)
    _ext.reset_host_times()
    run(calls)
    return {
        target: {"calls": count, "microseconds": round(nanoseconds / max(count, 1) / 1e3, 2)}
        for target, (count, nanoseconds) in _ext.host_times().items()
    }


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--calls", type=int, default=500)
    arguments = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    report: dict[str, Any] = {"first_call": first_call()} if on_gpu else {}
    report |= {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {jax.default_backend()}",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "calls": call_time(arguments.calls),
        f"gradients_of_{LAYERS}_layers": {
            f"{length} tokens": compile_time(length) for length in (LENGTH, 4 * LENGTH)
        },
    }
    if on_gpu:
        report |= {"mask_building": mask_building(), "handlers": handler_time()}
    print(json.dumps(report, indent=1))
    write_json(arguments.out / "overheads.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
