"""Costs other than kernels: the first call of a process, masks, host time in handlers."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packax
from packax import _ext

from lib.cases import Case, document_lengths
from lib.implementations import random_inputs
from lib.turns import burst, launches_of


def first_call() -> dict[str, Any]:
    """Time of the process's first packax call, forward and backward, after GPU initialization."""
    start = time.perf_counter()
    x = jax.jit(lambda x: x @ x)(jnp.ones((256, 256), jnp.bfloat16))
    jax.block_until_ready(x)
    backend = time.perf_counter() - start

    case = Case("first", 1, 8192, 8, 2, 128, 5)
    query, key, value, cotangent = jax.block_until_ready(random_inputs(case))
    ids = jnp.asarray(case.segment_ids())

    @jax.jit
    def step(query, key, value, cotangent, ids):
        mask = packax.create_attention_mask(packax.causal() & packax.documents(ids))
        _, pullback = jax.vjp(lambda *x: packax.flash_attention(*x, mask), query, key, value)
        return pullback(cotangent)

    start = time.perf_counter()
    compiled = step.lower(query, key, value, cotangent, ids).compile()
    xla = time.perf_counter() - start
    start = time.perf_counter()
    jax.block_until_ready(compiled(query, key, value, cotangent, ids))
    first = time.perf_counter() - start
    start = time.perf_counter()
    jax.block_until_ready(compiled(query, key, value, cotangent, ids))
    second = time.perf_counter() - start
    return {
        "backend_s": round(backend, 3),
        "trace_and_xla_compile_s": round(xla, 3),
        "first_run_ms": round(first * 1e3, 3),
        "second_run_ms": round(second * 1e3, 3),
        "triton_imported": "triton" in sys.modules,
    }


def mask_building(tokens: int = 131072, documents: int = 12) -> dict[str, Any]:
    """Milliseconds to build one row's mask: launched from Python, and inside a jitted loop."""
    ids = jnp.asarray(
        np.repeat(np.arange(1, documents + 1), document_lengths(tokens, documents)).astype(np.int32)
    )[None]
    positions = jnp.asarray(
        np.concatenate([np.arange(n) for n in document_lengths(tokens, documents)]).astype(np.int32)
    )[None]

    def by_ids(ids: jax.Array) -> Any:
        return packax.create_attention_mask(packax.causal() & packax.documents(ids))

    def by_positions(ids: jax.Array) -> Any:
        return packax.create_attention_mask(
            packax.causal() & packax.documents(ids, positions=positions)
        )

    iterations = 200
    result: dict[str, Any] = {"tokens": tokens, "documents": documents}
    for name, build in (("ids", by_ids), ("ids_positions", by_positions)):

        @jax.jit
        def loop(ids: jax.Array, build: Any = build) -> Any:
            def body(
                _: Any, mask: Any
            ) -> Any:  # the ids depend on the previous mask, so that nothing is hoisted
                return build(ids + jnp.minimum(jax.tree.leaves(mask)[0].ravel()[0], 0))

            return jax.lax.fori_loop(0, iterations, body, build(ids))

        single = jax.jit(build)
        finish = jax.block_until_ready
        loops, once = (functools.partial(f, ids) for f in (loop, single))
        looped = statistics.median(burst(loops, finish, 1) / (iterations + 1) for _ in range(5))
        launches = launches_of(once, finish, 40)
        launched = statistics.median(burst(once, finish, launches) for _ in range(5))
        result[name] = {"in_jit_ms": round(looped, 4), "launched_ms": round(launched, 4)}
    result["bytes_a_token"] = round(sum(x.nbytes for x in jax.tree.leaves(by_ids(ids))) / tokens, 2)
    return result


def handler_time(calls: int = 300) -> dict[str, Any]:
    """Host microseconds in the C++ handlers, as the extension counted them over small launches."""
    case = Case("handlers", 1, 2048, 8, 2, 128, 5)
    query, key, value, cotangent = random_inputs(case)
    ids = jnp.asarray(case.segment_ids())
    build = jax.jit(
        lambda ids: packax.create_attention_mask(packax.causal() & packax.documents(ids))
    )
    mask = build(ids)
    forward = jax.jit(lambda q, k, v, mask: packax.flash_attention(q, k, v, mask))
    pullback = jax.jit(
        lambda q, k, v, mask: jax.vjp(lambda *x: packax.flash_attention(*x, mask), q, k, v)[1]
    )(query, key, value, mask)
    backward = jax.jit(lambda pullback, cotangent: pullback(cotangent))

    def run(count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(
                (build(ids), forward(query, key, value, mask), backward(pullback, cotangent))
            )

    run(20)
    _ext.reset_host_times()
    run(calls)
    return {
        target: {"calls": count, "microseconds": round(nanoseconds / max(count, 1) / 1e3, 2)}
        for target, (count, nanoseconds) in _ext.host_times().items()
    }
