"""Decoding, compared with cuDNN and with the memory bandwidth of a copy on the same card.

    python benchmarks/decode.py [--out DIR] [--cases 1x128k ...] [--dtype bfloat16] [--rounds 11]

Bytes are those of the attended keys and values, once. Results are compared with blockwise XLA in
float32 before anything is timed; a wrong one is not timed, and the run fails. A pass runs LOOP
times inside one jitted call, because a dispatch can take longer than a pass. cuDNN is
jax.nn.dot_product_attention with key_value_seq_lengths; it has no pages. If it cannot run a case,
the reason is listed. The same cache in float8_e4m3fn, with a scale of each page or sequence, is
compared with XLA over the same bytes. All implementations of a case take turns in one process.
Prints a table and writes decode.json into --out (default: $OUT, else benchmarks/results). Products
of float32 are TF32, or float32 with JAX_DEFAULT_MATMUL_PRECISION=highest.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packax
from lib.implementations import LOOP, touched
from lib.machine import machine
from lib.output import arguments_of, write_json
from lib.turns import as_row, interleaved

LIMIT = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-3}  # ‖x - y‖ / ‖y‖; float32: TF32's
COPIED = 1 << 30  # bytes
FP8 = "float8_e4m3fn"
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    q_len: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 0

    @property
    def room(self) -> int:
        return max(self.lengths)

    def bytes(self, dtype: str) -> int:
        """Of the keys and values that some row attends, of a cache in that dtype."""
        return 2 * SIZES[dtype] * sum(self.lengths) * self.kv_heads * self.dim


K = 1024
CASES = (
    Case("1x128k", (128 * K,)),
    Case("8x32k", (32 * K,) * 8),
    Case("64x8k", (8 * K,) * 64),
    Case("8x32k, pages of 16", (32 * K,) * 8, page_size=16),
    Case("8x32k, pages of 256", (32 * K,) * 8, page_size=256),
    Case("8x32k, 4 rows", (32 * K,) * 8, q_len=4),
    Case("8x32k, 16 rows", (32 * K,) * 8, q_len=16),
    Case("1x128k and 31x1k", (128 * K, *(K,) * 31)),
    Case("8x32k, d64", (32 * K,) * 8, heads=64, dim=64),
    Case("8x32k, d512", (32 * K,) * 8, heads=16, kv_heads=2, dim=512),
    Case("8x32k, multi-query", (32 * K,) * 8, kv_heads=1),
)


def tensors(case: Case, dtype: str, seed: int = 0) -> dict[str, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    batch = len(case.lengths)

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key, shape):
        return jax.random.normal(key, shape, dtype)

    cache = (batch, case.room, case.kv_heads, case.dim)
    if case.page_size:
        cache = (batch * case.room // case.page_size, case.page_size, case.kv_heads, case.dim)
    arrays = {
        "query": draw(next(keys), (batch, case.q_len, case.heads, case.dim)),
        "key": draw(next(keys), cache),
        "value": draw(next(keys), cache),
        "kv_lengths": jnp.asarray(case.lengths, jnp.int32),
    }
    if case.page_size:
        order = jax.random.permutation(next(keys), cache[0]).astype(jnp.int32)
        arrays["block_table"] = order.reshape(batch, -1)
    return arrays


def in_fp8(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The operands with the caches in FP8, and a scale of each page or sequence and head."""

    @jax.jit
    def quantise(x):
        scale = jnp.abs(x).max((1, 3)).astype(jnp.float32) / 448
        return (x / scale[:, None, :, None]).astype(FP8), scale

    small = dict(arrays)
    for name in ("key", "value"):
        small[name], small[f"{name}_scale"] = quantise(arrays[name])
    return small


def cudnn(query, key, value, kv_lengths):
    rows = jnp.full_like(kv_lengths, query.shape[1])
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        query_seq_lengths=rows,
        key_value_seq_lengths=kv_lengths,
        implementation="cudnn",
    )


def difference(x: jax.Array, y: jax.Array) -> float:
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def copy_of(elements: int) -> Callable[[], Any]:
    """Reads and writes `elements` float32."""
    x = jnp.zeros(elements, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return lambda: copy(x)


def looped(function: Callable[..., Any], arrays: dict[str, jax.Array]) -> Callable[[], Any]:
    """LOOP passes in one call, one after the other."""

    @jax.jit
    def call(query, others):
        def step(_: Any, query: jax.Array) -> jax.Array:
            return touched(query, function(query=query, **others))

        return jax.lax.fori_loop(0, LOOP, step, query)

    others = {name: x for name, x in arrays.items() if name != "query"}
    return lambda: call(arrays["query"], others)


def measure(case: Case, dtype: str, implementation: str, rounds: int) -> dict[str, Any]:
    arrays = tensors(case, dtype)
    ours = jax.jit(functools.partial(packax.decode_attention, implementation=implementation))
    bare: dict[str, Callable[..., Any]] = {"packax": ours}
    xla = jax.jit(
        functools.partial(packax.decode_attention, implementation="xla", precision="highest")
    )
    functions: dict[str, Callable[[], Any]] = {"packax": lambda: ours(**arrays)}
    operands = {"packax": arrays, "cudnn": arrays}
    size = case.bytes(dtype)
    row: dict[str, Any] = {"case": case.name, "dtype": dtype, "bytes": size, "times": {}}
    row["left_out"] = left_out = {}
    if case.page_size or case.q_len > 1:  # cuDNN's causal mask begins at the first key
        left_out["cudnn"] = "no pages" if case.page_size else "no causal rows at the end"
    else:
        bare["cudnn"] = theirs = jax.jit(cudnn)
        functions["cudnn"] = lambda: theirs(**arrays)
    if SIZES[dtype] == 2 and case.dim <= 256:
        small = operands["fp8"] = in_fp8(arrays)
        bare["fp8"], functions["fp8"] = ours, lambda: ours(**small)
    else:
        left_out["fp8"] = "no kernel"
    references = {"packax": xla(**arrays)}
    references["cudnn"] = references["packax"]
    if "fp8" in functions:
        references["fp8"] = xla(**operands["fp8"])
        row["fp8_from_16_bits"] = difference(references["fp8"], references["packax"])
    for name in list(functions):
        try:
            error = difference(functions[name](), references[name])
        except Exception as failure:
            if name != "cudnn":
                raise
            left_out[name] = (str(failure).splitlines() or [type(failure).__name__])[0][:200]
            del functions[name]
            continue
        row.setdefault("errors", {})[name] = error
        if not error < LIMIT[dtype]:
            left_out[name] = f"wrong: {error:.1e} from XLA"
            del functions[name]
    del references
    elements = COPIED // 4
    functions = {name: looped(bare[name], operands[name]) for name in functions}
    functions["copy"] = copy_of(elements)
    bytes_of = {"copy": 2 * COPIED, "fp8": case.bytes(FP8)}
    times = {
        name: as_row([ms / (1 if name == "copy" else LOOP) for ms in took])
        for name, took in interleaved(functions, jax.block_until_ready, rounds).items()
    }
    rates = {name: bytes_of.get(name, size) / t["ms"] / 1e6 for name, t in times.items()}
    for name, t in times.items():
        row["times"][name] = {
            **t,
            "gb_per_s": round(rates[name], 1),
            "of_copy": round(rates[name] / rates["copy"], 3),
        }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| case | packax us | GB/s | of the copy | FP8 us | GB/s | of the copy "
        "| cuDNN us | GB/s | of the copy | copy GB/s |"
    ]
    lines.append("|---" * 11 + "|")
    for row in rows:
        cells = [row["case"]]
        for name in ("packax", "fp8", "cudnn"):
            t = row["times"].get(name)
            if t is None:
                cells += [row["left_out"][name], "", ""]
            else:
                cells += [f"{1e3 * t['ms']:.1f}", f"{t['gb_per_s']:.0f}", f"{t['of_copy']:.0%}"]
        cells.append(f"{row['times']['copy']['gb_per_s']:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None, cases: tuple[Case, ...] = CASES) -> int:
    parser = arguments_of(__doc__, rounds=11)
    parser.add_argument("--cases", nargs="*", help="names; default: all")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(LIMIT))
    parser.add_argument("--implementation", default="cuda", choices=("cuda", "xla"))
    options = parser.parse_args(arguments)
    unknown = set(options.cases or ()) - {case.name for case in cases}
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {[c.name for c in cases]}")
    rows = []
    for case in cases:
        if options.cases and case.name not in options.cases:
            continue
        rows.append(measure(case, options.dtype, options.implementation, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    result = {"machine": machine(), "copied_bytes": COPIED, "cases": rows}
    write_json(options.out / "decode.json", result)
    wrong = any(row["left_out"].get("fp8", "").startswith("wrong") for row in rows)
    return 0 if all("packax" in row["times"] for row in rows) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
