"""Checks random calls of flash_attention on a GPU, forward and backward, against float64:

    python tests/gpu/random_calls.py [--seconds 300] [--seed 0] [--workers 1]

A case draws the dtype, head dims, heads, lengths, a mask (causal, windows, chunks, ranges, packed
documents with padding, ids that reappear, positions) and options (scale, soft cap, sinks, ALiBi, a
bias with -inf and finfo.min, dropout, determinism) from a seed, which its line prints. Memory for
the results is filled with NaN first. The accepted error is four times that of plain attention in
the same dtype, or eight times in float32: among thousands of draws, some exceed twice the error by
chance, and exp2 on a GPU has an error of two ulp. Prints wrong cases and a count; exit status 1: a
case was wrong. `--seed S --seconds 0` runs one seed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
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
import additive_masks
import gpu_runs
import jax
import jax.numpy as jnp
import packax
import philox
import score_oracle

LENGTHS = (1, 5, 63, 64, 65, 127, 128, 130, 200, 257, 333, 500, 700)
DIMS = (8, 16, 24, 40, 64, 64, 72, 80, 96, 128, 128, 128, 136, 192, 200, 256, 264, 320, 512)
IMPLEMENTATION = "cuda"
PADDED = (64, 128, 256, 512)  # head dims of the oracle: few, so that it compiles rarely


def draw_mask(rng: Any, batch: int, q_len: int, kv_len: int) -> tuple[Any, np.ndarray, str]:
    """An expression, the pairs it allows (batch, q_len, kv_len), and its name."""
    i, j = np.arange(q_len)[None, :, None], np.arange(kv_len)[None, None, :]
    expression, names = packax.full(), []
    allowed = np.ones((batch, q_len, kv_len), bool)
    fields: dict[str, Any] = {}
    if rng.random() < 0.7:
        names.append("documents")
        ids = draw_ids(rng, batch, max(q_len, kv_len))
        fields = {"segment_ids": ids[:, :q_len]}
        if q_len != kv_len:
            fields["kv_segment_ids"] = ids[:, :kv_len]
        rows, keys = ids[:, :q_len, None], ids[:, None, :kv_len]
        allowed &= (rows == keys) & (rows != -1)
        if rng.random() < 0.3:
            names.append("positions")
            places = np.cumsum(rng.integers(0, 3, ids.shape), 1).astype(np.int32)
            fields["positions"] = places[:, :q_len]
            if q_len != kv_len:
                fields["kv_positions"] = places[:, :kv_len]
            i, j = places[:, :q_len, None], places[:, None, :kv_len]
    kinds = {
        "causal": lambda: (packax.causal(), j <= i),
        "window": lambda: window(rng, i, j),
        "chunked": lambda: chunks(rng, i, j),
        "ranges": lambda: ranges(rng, batch, q_len, kv_len),
    }
    if "positions" in names:
        del kinds["ranges"]
    for name, weight in (("causal", 0.6), ("window", 0.25), ("chunked", 0.15), ("ranges", 0.15)):
        if name in kinds and rng.random() < weight:
            names.append(name)
            more, where = kinds[name]()
            expression, allowed = expression & more, allowed & where
    if fields:
        expression = expression & packax.documents(**fields)
    return expression, allowed, " & ".join(names) or "full"


def draw_ids(rng: Any, batch: int, length: int) -> np.ndarray:
    """Runs of ids; some reappear, some are padding (-1)."""
    values = np.array([-1, 0, 1, 2, 3, 7, 1024, 2**31 - 1, -(2**31)])
    longest = int(rng.choice([3, 40, 400]))
    rows = []
    for _ in range(batch):
        lengths = rng.integers(1, longest + 1, length)
        rows.append(np.repeat(rng.choice(values, length), lengths)[:length])
    return np.stack(rows).astype(np.int32)


def window(rng: Any, i: Any, j: Any) -> tuple[Any, Any]:
    left, right = (int(rng.choice([0, 1, 17, 64, 200])) for _ in "12")
    return packax.sliding_window(left, right), (j >= i - left) & (j <= i + right)


def chunks(rng: Any, i: Any, j: Any) -> tuple[Any, Any]:
    size = int(rng.choice([1, 16, 100, 128]))
    return packax.masks.chunked(size), i // size == j // size


def ranges(rng: Any, batch: int, q_len: int, kv_len: int) -> tuple[Any, Any]:
    lo, hi = rng.integers(-3, kv_len + 4, (2, batch, q_len))
    j = np.arange(kv_len)[None, None]
    return packax.masks.ranges(lo, hi), (lo[..., None] <= j) & (j < hi[..., None])


def draw_bias(rng: Any, batch: int, heads: int, q_len: int, kv_len: int, dtype: Any) -> jax.Array:
    shape = [n if rng.random() < 0.5 else 1 for n in (batch, heads, q_len)]
    bias = rng.standard_normal((*shape, kv_len))
    masked = rng.random(bias.shape) < rng.choice([0, 0.3, 0.9])
    least = rng.choice([-np.inf, float(jnp.finfo(dtype).min), -1e4])
    return jnp.asarray(np.where(masked, least, bias), dtype)


def draw(seed: int) -> tuple[str, str, Any]:
    """The name of a case, its dtype, and the function that runs and checks it."""
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(["bfloat16", "bfloat16", "float16", "float32"]))
    qk_dim, v_dim = (int(x) for x in rng.choice([x for x in DIMS if not over(x, dtype)], 2))
    if rng.random() < 0.75:
        v_dim = qk_dim
    heads, kv_heads = ((4, 2), (3, 3), (4, 1))[rng.integers(3)]
    batch, q_len, kv_len = 2, int(rng.choice(LENGTHS)), int(rng.choice(LENGTHS))
    if rng.random() < 0.7:
        kv_len = q_len
    expression, allowed, mask_name = draw_mask(rng, batch, q_len, kv_len)
    x = gpu_runs.tensors(batch, q_len, kv_len, heads, kv_heads, (qk_dim, v_dim), dtype, seed)
    arrays = {"query": x.query, "key": x.key, "value": x.value}
    options: dict[str, Any] = {"deterministic": bool(rng.random() < 0.3)}
    fixed = float(qk_dim**-0.5 * rng.choice([1, 1, 1, -0.5, 0]))
    if rng.random() < 0.15:
        arrays["scale"] = jnp.float32(fixed)
    if rng.random() < 0.2:
        options["soft_cap"] = float(rng.choice([0.5, 5, 50]))
    if rng.random() < 0.2:
        arrays["sinks"] = jnp.asarray(rng.standard_normal(heads), jnp.float32)
    widest = 128 if dtype == "float32" else 256  # limit with a bias array or dropout
    if rng.random() < 0.15:
        arrays["slopes"] = jnp.asarray(2.0 ** -rng.integers(1, 9, heads), jnp.float32)
    elif rng.random() < 0.25 and max(qk_dim, v_dim) <= widest:
        arrays["bias"] = draw_bias(rng, batch, heads, q_len, kv_len, dtype)
    if rng.random() < 0.15 and max(qk_dim, v_dim) <= widest:
        options |= {"dropout_rate": 0.25, "dropout_key": jax.random.key(seed)}
    extras = sorted({*arrays, *options} - {"query", "key", "value", "deterministic", "dropout_key"})
    extras += ["deterministic"] * options["deterministic"]
    name = (
        f"seed {seed}: {dtype} {q_len}x{kv_len} heads {heads}/{kv_heads} dims {qk_dim}x{v_dim} "
        f"{mask_name}; scale {fixed:.3g} {' '.join(extras)}"
    )
    return name, dtype, functools.partial(check, x, arrays, options, fixed, expression, allowed)


def over(dim: int, dtype: str) -> bool:
    return dtype == "float32" and dim > 256


def check(
    x: Any, arrays: dict[str, Any], options: Any, fixed: float, expression: Any, allowed: Any
) -> None:
    batch, q_len, heads, _ = x.query.shape
    kv_len = x.key.shape[1]
    mask = packax.create_attention_mask(expression, q_len=q_len, kv_len=kv_len)
    static = {"scale": fixed} if "scale" not in arrays else {}

    @jax.jit
    def run(arrays: Any) -> Any:
        def attention(arrays: Any) -> Any:
            arrays = dict(arrays)
            tensors = [arrays.pop(name) for name in ("query", "key", "value")]
            if "slopes" in arrays:
                arrays["bias"] = packax.alibi(arrays.pop("slopes"))
            return packax.flash_attention(
                *tensors,
                mask,
                return_lse=True,
                implementation=IMPLEMENTATION,
                **arrays,
                **options,
                **static,
            )

        return score_oracle.run(attention, arrays, x.dout, x.dlse)

    gpu_runs.poison(x)
    got = jax.block_until_ready(run(arrays))
    factors = None
    if "dropout_rate" in options:
        shape = (batch, heads, q_len, kv_len)
        factors = philox.factors(options["dropout_key"], options["dropout_rate"], shape)
    true, plain = reference(x, arrays, fixed, allowed, options.get("soft_cap"), factors)
    if (np.sum(allowed, -1) == 1).any():
        allow_rounding(x, arrays, fixed, true, plain)
    score_oracle.check(got, true, plain, factor=8 if x.query.dtype == jnp.float32 else 4)


def allow_rounding(x: Any, arrays: dict[str, Any], fixed: float, true: Any, plain: Any) -> None:
    """Adds rounding error to the allowed error for queries with one key, whose gradients are 0. The
    kernels compute them as the difference of two products (numerics.md), one of which uses the
    rounded output; plain attention subtracts a number from itself."""
    if x.query.dtype == jnp.float32:
        error = additive_masks.rounding_of_products(x.dout, x.value)
    else:
        longest = [np.linalg.norm(np.asarray(y, np.float32), axis=-1).max() for y in x[2:4]]
        error = float(jnp.finfo(x.query.dtype).eps * longest[0] * longest[1])
    query, key = (float(np.abs(np.asarray(y, np.float32)).max(initial=0)) for y in x[:2])
    rows = math.prod(x.query.shape[:3]) ** 0.5
    factors = {"bias": rows, "query": fixed * key, "key": fixed * query * rows}
    factors["scale"] = rows * x.query.shape[-1] ** 0.5 * query * key
    for name in {*factors} & {*arrays}:
        exact, near = (np.asarray(y.gradients[name], np.float64) for y in (true, plain))
        plain.gradients[name] = exact + np.maximum(np.abs(near - exact), error * abs(factors[name]))


def reference(
    x: Any, arrays: dict[str, Any], fixed: float, allowed: Any, soft_cap: Any, factors: Any
) -> Any:
    """True and plain results for operands that are padded with zeros to one of a few shapes."""
    q_len, kv_len = x.query.shape[1], x.key.shape[1]
    length = 128 if max(q_len, kv_len) <= 128 else 704
    dims = [next(n for n in PADDED if n >= y.shape[3]) for y in (x.query, x.value)]
    lengths = {"query": (length, dims[0]), "key": (length, dims[0]), "value": (length, dims[1])}
    padded = {"scale": jnp.float32(fixed)} | arrays
    for name, (rows, dim) in lengths.items():
        padded[name] = pad(arrays[name], {1: rows, 3: dim})
    shape = (2, x.query.shape[2], length, length)
    if "bias" in arrays:
        broadcast = np.broadcast_to(arrays["bias"], (*shape[:2], q_len, kv_len))
        padded["bias"] = pad(broadcast, {2: length, 3: length})
    if factors is not None:
        factors = pad(factors.astype(np.float32), {2: length, 3: length})
    true, plain, _ = score_oracle.true_and_plain(
        padded, np.asarray(pad(allowed, {1: length, 2: length})),
        np.asarray(pad(x.dout, {1: length, 3: dims[1]}), np.float32),
        pad(x.dlse, {2: length}), soft_cap=soft_cap, factors=factors,
        places=(np.arange(length)[None],) * 2,
    )  # fmt: skip
    return (cut(results, x, arrays) for results in (true, plain))


def cut(results: Any, x: Any, arrays: dict[str, Any]) -> Any:
    """Results without the padding, in the shapes of the arrays."""
    gradients = {}
    for name, array in arrays.items():
        gradient = results.gradients[name]
        if name == "bias":  # sum over the broadcast axes
            gradient = gradient[:, :, : x.query.shape[1], : x.key.shape[1]]
            axes = tuple(a for a in range(4) if array.shape[a] < gradient.shape[a])
            gradient = np.asarray(gradient, np.float64).sum(axes, keepdims=True)
        gradients[name] = gradient[tuple(slice(n) for n in np.shape(array))]
    out, lse = (
        y[tuple(slice(n) for n in z.shape)]
        for y, z in ((results.out, x.dout), (results.lse, x.dlse))
    )
    return score_oracle.Results(out, lse, gradients)


def pad(y: Any, lengths: dict[int, int]) -> jax.Array:
    widths = [(0, lengths.get(axis, n) - n) for axis, n in enumerate(np.shape(y))]
    return jnp.asarray(np.pad(np.asarray(y), widths))


def run_seeds(first: int, step: int, seconds: float) -> int:
    deadline, wrong, dtypes = time.monotonic() + seconds, 0, Counter[str]()
    for seed in itertools.count(first, step):
        name, dtype, checked = draw(seed)
        try:
            with jax.default_matmul_precision("highest" if dtype == "float32" else None):
                checked()
        except Exception as error:
            wrong += 1
            print(f"WRONG {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-4)
        dtypes[dtype] += 1
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
