"""A training step of a model with windows in five of six layers, its row sharded over all GPUs.

    python benchmarks/train_windows.py [--length 131072] [--window 512] [--documents 12]
        [--layers 6] [--rounds 5] [--tiny] [--out DIR]

64 query and 8 key/value heads of 128, width 4096, remat of every layer, AdamW in float32 with its
state sharded over the same GPUs (FSDP), one zigzag plan for all layers. `halo` fetches for a layer
with a window only the keys that the window reaches; `gather` states the same windows as ranges of
keys, so that all keys are fetched; `global` has no windows. All start from the same state, and the
moments of the attention's matrices after one step must agree between `halo` and `gather`. They take
turns, one step each. Writes train_windows.json into --out (default: $OUT, else
benchmarks/results).
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import packax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lib import llama
from lib.cases import Case
from lib.machine import machine
from lib.output import default_out, say, write_json
from lib.turns import as_row, in_turns
from train_step import (
    LIMIT,
    TINY,
    batch_of,
    differences,
    gradients_of_attention,
)

WAYS = ("halo", "gather", "global")
GLOBAL_EVERY = 6  # layers


def window_as_ranges(case: Case) -> Any:
    """The windows as the first and last key of each query."""
    starts = np.repeat(np.cumsum([0, *case.lengths[:-1]]), case.lengths)
    rows = np.arange(case.seq)
    return packax.masks.ranges(np.maximum(starts, rows + 1 - case.window), rows + 1)


def masks_of(name: str, case: Case, sharding: Any, plan: Any) -> tuple[Any, Any]:
    """The masks of a layer with a window and of one without."""
    documents = packax.documents(case.segment_ids())
    windows = {
        "halo": packax.sliding_window(case.window - 1) & documents,
        "gather": window_as_ranges(case),
        "global": packax.causal() & documents,
    }
    build = functools.partial(
        packax.create_attention_mask, kv_len=case.seq, sharding=sharding, plan=plan
    )
    return build(windows[name]), build(packax.causal() & documents)


def step(state: Any, batch: Any, masks: Any, config: llama.Config) -> tuple[Any, jax.Array]:
    window, whole = (functools.partial(packax.flash_attention, mask=mask) for mask in masks)
    attentions = (window,) * (GLOBAL_EVERY - 1) + (whole,)
    value, gradients = jax.value_and_grad(llama.loss)(
        state["parameters"], batch, attentions, None, config
    )
    return llama.updated(state, gradients), value


def placed(mesh: Any, state: Any) -> Any:
    """Shardings of the state: the last axis of matrices, if the GPUs divide it."""

    def sharding(x: Any) -> NamedSharding:
        split = x.ndim > 1 and x.shape[-1] % mesh.size == 0
        return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "context") if split else P())

    return jax.tree.map(sharding, state)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--layers", type=int, default=GLOBAL_EVERY)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try it on a CPU")
    parser.add_argument("--out", type=Path, default=default_out())
    arguments = parser.parse_args()
    mesh = jax.make_mesh((len(jax.devices()),), ("context",), (jax.sharding.AxisType.Auto,))
    shapes: dict[str, Any] = {"heads": 64, "vocabulary": 32768}
    if arguments.tiny:
        shapes = TINY | {"chunk": 64}
    config = llama.Config(arguments.layers, shards=mesh.size, **shapes)
    case = Case(
        "windows", 1, arguments.length, config.heads, config.kv_heads, config.head_dim,
        arguments.documents, window=arguments.window,
    )  # fmt: skip
    rows = P(None, "context")
    sharding = packax.AttentionSharding(query=rows, key_value=rows, mesh=mesh)
    plan = packax.context_plan(
        packax.causal() & packax.documents(case.segment_ids()), ranks=mesh.size, kind="zigzag"
    )
    batch = jax.device_put(plan.permute(batch_of(case, config)), NamedSharding(mesh, rows))
    initialize = functools.partial(llama.initialize, config)
    shardings = placed(mesh, jax.eval_shape(initialize, jax.random.key(0)))
    start = jax.jit(initialize, out_shardings=shardings)

    report: dict[str, Any] = {
        "machine": machine(),
        "commit": os.environ.get("PACKAX_COMMIT", "unknown"),
        "arguments": {k: v for k, v in vars(arguments).items() if k != "out"},
        "ways": {},
    }
    program = jax.jit(functools.partial(step, config=config), donate_argnums=0)
    with jax.set_mesh(mesh):
        masks = {name: masks_of(name, case, sharding, plan) for name in WAYS}
        found = {}
        for name in WAYS:
            began = time.perf_counter()
            state, value = program(start(jax.random.key(0)), batch, masks[name])
            row = {"loss": float(value), "fetched": [mask.fetched for mask in masks[name]]}
            found[name] = jax.device_get(gradients_of_attention(state, config))
            say(f"{name}: first step {time.perf_counter() - began:.1f} s, {row}")
            report["ways"][name] = row
        measured = jax.tree.map(float, differences(found["halo"], found["gather"]))
        report["differences"] = measured
        bad = [x for x, error in measured.items() if not error <= LIMIT]

        def milliseconds(name: str) -> float:
            nonlocal state
            began = time.perf_counter()
            state, value = program(state, batch, masks[name])
            jax.block_until_ready(value)
            return (time.perf_counter() - began) * 1e3

        bursts = {name: functools.partial(milliseconds, name) for name in WAYS}
        for burst in bursts.values():
            burst()
        for name, took in in_turns(bursts, arguments.rounds).items():
            row = report["ways"][name] | as_row(took, 1.0)
            row.pop("tflops", None)
            report["ways"][name] = row | {"tokens_per_s": round(case.seq / row["ms"] * 1e3)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "train_windows.json", report)
    print(f"\n{'':<10}{'ms':>10}{'tokens/s':>10}  keys fetched by a layer with a window, without")
    for name, row in report["ways"].items():
        fetched = ", ".join(map(str, row["fetched"]))
        print(f"{name:<10}{row['ms']:>10.1f}{row['tokens_per_s']:>10}  {fetched}")
    print(f"differences of gradients: {measured}" + (f"; WRONG: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
