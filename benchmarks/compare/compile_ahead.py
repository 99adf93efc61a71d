"""Compiles what attention.py and versus_fa4.py run, all cases at once, into jax's persistent
cache.

    export JAX_COMPILATION_CACHE_DIR=DIR
    python benchmarks/compare/compile_ahead.py [--cases board,odd,NAME] [--peers cudnn,fa3]

On a lent GPU most of a case's time is XLA's compiler, on one core of many. This program compiles
with a thread a core; the benchmark, under the same variable and XLA_FLAGS, then finds its programs
there. What fails to compile is left to the benchmark, which says so.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from lib import reference
from lib.cases import Case, select
from lib.implementations import (
    JAX_PEERS,
    LOOP,
    Compiled,
    not_tried,
    packax_attention,
    random_inputs,
)
from lib.output import first_line


def compile_pass(compiled: Compiled, name: str) -> None:
    for lowered in compiled.lowered(name):
        lowered.compile()


def compile_head_gradients(case: Case, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> None:
    query, key, value, cotangent = shapes
    group = case.heads // case.kv_heads
    parts = [
        jax.ShapeDtypeStruct((case.seq, *grouped, x.shape[3]), x.dtype)
        for x, grouped in ((query, [group]), (key, []), (value, []), (cotangent, [group]))
    ]
    ids = jax.ShapeDtypeStruct((case.seq,), jnp.int32)
    reference.head_gradients.lower(*parts, ids, scale=case.head_dim**-0.5).compile()


def programs(
    case: Case, peers: tuple[str, ...], loops: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(what it is, a function that lowers and compiles it) of every program of a case."""
    shapes = jax.eval_shape(lambda: random_inputs(case))
    ids = jax.ShapeDtypeStruct((case.batch, case.seq), jnp.int32)
    rows = jax.ShapeDtypeStruct((min(reference.ROWS, case.seq),), jnp.int32)
    yield "sampled rows", lambda: reference.sampled_rows.lower(*shapes, ids, rows).compile()
    if case.seq <= reference.WHOLE_ROW:  # else over a document, which the reference chooses
        yield "gradients of a head", functools.partial(compile_head_gradients, case, shapes)
    items = [packax_attention(case)]
    items += [JAX_PEERS[name](case) for name in peers if case.peers]
    for item in items:
        skipped = not_tried(item.name, case)
        if "fwd" in skipped:
            continue
        compiled = Compiled(item, shapes)
        names = ["fwd"] if "bwd" in skipped else ["fwd", "both", "bwd"]
        if loops > 1:
            names += ["fwd loop"] if "bwd" in skipped else ["fwd loop", "bwd loop"]
        for name in names:
            yield f"{item.name} {name}", functools.partial(compile_pass, compiled, name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", help="names and groups of cases.py (default: board, dims, large)"
    )
    parser.add_argument("--peers", default="cudnn", help="cudnn, fa3 (default: cudnn)")
    arguments = parser.parse_args()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        parser.error("JAX_COMPILATION_CACHE_DIR is not set: there would be nothing to find")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    start = time.perf_counter()
    peers = tuple(name for name in arguments.peers.split(",") if name)
    work = {
        f"{case.name} {name}": compile_
        for case in select(arguments.cases)
        for name, compile_ in programs(case, peers, LOOP if case.group == "odd" else 1)
    }
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {pool.submit(compile_): name for name, compile_ in work.items()}
        for future in concurrent.futures.as_completed(futures):
            if error := future.exception():
                print(f"{futures[future]}: {first_line(error)}", flush=True)
    print(f"compiled {len(work)} programs in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
