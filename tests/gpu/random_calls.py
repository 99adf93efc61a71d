"""Checks random calls of flash_attention on a GPU, forward and backward, against float64:

    python tests/gpu/random_calls.py [--seconds 300] [--seed 0] [--workers 1]

A case draws a `Call` (tests/support/calls.py) from a seed, which its line prints: dtype, head dims,
heads, lengths, a mask, and options. Memory for the results is filled with NaN first. The accepted
error is four times that of plain attention in the same dtype, or eight times in float32: among
thousands of draws, some exceed twice the error by chance, and exp2 on a GPU has an error of two
ulp. Prints wrong cases and a count; exit status 1: a case was wrong. `--seed S --seconds 0` runs
one seed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "table"))
import additive_masks
import dense
import jax
import jax.numpy as jnp
from calls import BIASES, INTERVALS, SELECTORS, Call
from properties.values import Program

LENGTHS = (1, 5, 63, 64, 65, 127, 128, 130, 200, 257, 333, 500, 700)
DIMS = (8, 16, 24, 40, 64, 64, 72, 80, 96, 128, 128, 128, 136, 192, 200, 256, 264, 320, 512)
IMPLEMENTATION = "cuda"


def draw_mask(rng: Any) -> dict[str, str]:
    """Every mask of the table, and more sizes of windows, chunks and blocks."""
    left, right = (int(rng.choice([0, 1, 17, 64, 200])) for _ in "12")
    sizes = [int(2 ** rng.integers(0, 10)) for _ in "12"]
    intervals = [*INTERVALS, *["causal"] * 6, *[f"window {left} {right}"] * 3]
    intervals += [f"chunked {rng.choice([1, 16, 100, 128])}"]
    selectors = [*SELECTORS, *["packed"] * 6, *["documents"] * 4, *["none"] * 4]
    kinds = "block mask", "blocks and documents", "blocks and positions"
    selectors += [f"{rng.choice(kinds)} {sizes[0]} {sizes[1]}"]
    return {"interval": str(rng.choice(intervals)), "selector": str(rng.choice(selectors))}


def draw(seed: int) -> Call:
    rng = np.random.default_rng(seed)
    while True:
        dtype = str(rng.choice(["bfloat16", "bfloat16", "float16", "float32"]))
        qk_dim, v_dim = (int(x) for x in rng.choice([x for x in DIMS if not over(x, dtype)], 2))
        if rng.random() < 0.75:
            v_dim = qk_dim
        q_len, kv_len = (int(x) for x in rng.choice(LENGTHS, 2))
        if rng.random() < 0.7:
            kv_len = q_len
        fields: dict[str, Any] = {"dtype": dtype, "dims": f"{qk_dim}x{v_dim}"}
        fields |= {"lengths": f"{q_len}x{kv_len}", "heads": ("4/2", "3/3", "4/1")[rng.integers(3)]}
        fields |= draw_mask(rng)
        scales = "default", "default", f"{-0.5 * qk_dim**-0.5:.3g}", "0.0", "array"
        fields["scale"] = str(rng.choice(scales, p=(0.6, 0.1, 0.1, 0.1, 0.1)))
        if rng.random() < 0.2:
            fields["cap"] = str(rng.choice(["0.5", "5", "50"]))
        if rng.random() < 0.2:
            fields["sinks"] = "sinks"
        widest = 128 if dtype == "float32" else 256  # limit with a bias array or dropout
        small = max(qk_dim, v_dim) <= widest
        if rng.random() < 0.15:
            fields |= {"bias": "alibi", "frozen": str(rng.choice(["", "slopes"]))}
        elif rng.random() < 0.25 and small:
            fields |= {"bias": str(rng.choice([*BIASES])), "frozen": str(rng.choice(["", "bias"]))}
            fields["bias_dtype"] = str(rng.choice(["", "float32"]))
        if rng.random() < 0.15 and small:
            fields["dropout"] = "dropout"
        if rng.random() < 0.3:
            fields["order"] = "deterministic"
        fields["results"] = str(rng.choice(["out+lse", "out+lse", "out+lse+top"]))
        call = Call(**fields, implementation=IMPLEMENTATION)
        if not call.invalid():
            return call


def over(dim: int, dtype: str) -> bool:
    return dtype == "float32" and dim > 256


def check(call: Call, seed: int) -> None:
    a = call.arrays(seed)
    rng = np.random.default_rng(seed)
    if "bias" in a:
        least = str(rng.choice(["-inf", "least", "-1e4"]))
        least = additive_masks.values_of(a["query"].dtype)[least]
        hidden = rng.random(a["bias"].shape) < rng.choice([0, 0.3, 0.9])
        a["bias"] = np.where(hidden, least, a["bias"]).astype(a["bias"].dtype)
    close, references = dense.close, call.references
    if "bias" in a:
        close, references = additive_masks.close, functools.partial(additive_masks.references, call)
    true, plain = references(a)
    if (call.allowed(a).sum(-1) == 1).any():
        allow_rounding(call, a, true, plain)
    with jax.default_matmul_precision("highest" if call.dtype == "float32" else None):
        got = {name: np.asarray(x) for name, x in Program(call)(a).items()}
    wrong = close(got, true, plain, 8 if call.dtype == "float32" else 4)
    assert not wrong, "; ".join(wrong)


def allow_rounding(call: Call, a: Any, true: Any, plain: Any) -> None:
    """Adds rounding error to the allowed error for queries with one key, whose gradients are 0. The
    kernels compute them as the difference of two products (numerics.md), one of which uses the
    rounded output; plain attention subtracts a number from itself."""
    longest = [np.linalg.norm(a[name].astype(float), axis=-1).max() for name in ("dout", "value")]
    error = float(jnp.finfo(call.dtype).eps) * longest[0] * longest[1]
    query, key = (float(np.abs(a[name].astype(float)).max()) for name in ("query", "key"))
    scale, rows = abs(float(a.get("scale", call.number))), np.size(true["lse"]) ** 0.5
    factors = {"bias": rows, "query": scale * key, "key": scale * query * rows, "slopes": rows}
    factors["scale"] = rows * a["query"].shape[-1] ** 0.5 * query * key
    for name, factor in factors.items():
        if (of := "d" + name) in true:
            exact, near = (np.asarray(x[of], np.float64) for x in (true, plain))
            plain[of] = exact + np.maximum(np.abs(near - exact), error * factor)


def run_seeds(first: int, step: int, seconds: float) -> int:
    deadline, wrong, dtypes = time.monotonic() + seconds, 0, Counter[str]()
    for seed in itertools.count(first, step):
        call = draw(seed)
        try:
            check(call, seed)
        except Exception as error:
            wrong += 1
            shown = f"{type(error).__name__}: {str(error)[:600]}"
            print(f"WRONG seed {seed}: {call}: {shown}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-4)
        dtypes[call.dtype] += 1
        if time.monotonic() > deadline:
            break
    print(f"CASES {json.dumps({'wrong': wrong} | dtypes)}", flush=True)
    return wrong


def run_workers(asked: argparse.Namespace) -> Counter[str]:
    """The sum of the workers' counts. Worker n uses GPU n modulo the number of GPUs."""
    gpus = len(subprocess.check_output(["nvidia-smi", "-L"], text=True).splitlines())
    started = []
    for n in range(asked.workers):
        command = [sys.executable, __file__, "--seed", str(asked.seed + n)]
        command += ["--step", str(asked.workers), "--seconds", str(asked.seconds)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(n % gpus)}
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    total = Counter[str]()
    for worker in started:
        lines = worker.communicate()[0].splitlines()
        counts = [line for line in lines if line.startswith("CASES ")]
        total.update(json.loads(counts[0][6:]) if counts else {"wrong": 1})
        print(*(line for line in lines if line not in counts), sep="\n", end="", flush=True)
        if not counts:
            print(f"WRONG: a worker ended with status {worker.returncode}", flush=True)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, default=1, help="from one seed to the next")
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args()
    if asked.workers == 1:
        return int(run_seeds(asked.seed, asked.step, asked.seconds) > 0)
    total = run_workers(asked)
    print("random calls:", ", ".join(f"{n} {name}" for name, n in sorted(total.items())))
    return int(total["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
