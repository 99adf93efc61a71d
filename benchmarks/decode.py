"""Times decoding in packax and cuDNN, and compares it with the bandwidth of a copy on the same GPU.

    python benchmarks/decode.py [--out DIR] [--cases 1x128k ...] [--dtype bfloat16] [--rounds 11]

Bytes count attended keys and values once. Results are first compared with blockwise XLA in float32;
wrong results are not timed, and the run fails. A pass runs LOOP times in one jitted call, because a
dispatch can take longer than a pass. cuDNN is jax.nn.dot_product_attention with
key_value_seq_lengths; it does not support pages. If it cannot run a case, the reason is listed. The
same cache in float8_e4m3fn, with a scale per page or sequence, is compared with XLA on the same
bytes. All implementations of a case take turns in one process. Prints a table and writes
decode.json into --out (default: $OUT, else benchmarks/results). Products of float32 are in TF32, or
in float32 with JAX_DEFAULT_MATMUL_PRECISION=highest.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import packax
from lib.implementations import LOOP, Compiled, Implementation
from lib.machine import machine
from lib.output import Report, arguments_of, picked
from lib.passes import usable
from lib.reference import relative
from lib.turns import as_row, interleaved

LIMIT = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-3}  # ‖x - y‖ / ‖y‖; float32: for TF32
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
        """The bytes of all attended keys and values in a cache of this dtype."""
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
    Case("8x32k, d256", (32 * K,) * 8, heads=16, kv_heads=4, dim=256),
    Case("8x32k, d512", (32 * K,) * 8, heads=16, kv_heads=2, dim=512),
    Case("8x32k, multi-query", (32 * K,) * 8, kv_heads=1),
    Case("64x32k, multi-query", (32 * K,) * 64, kv_heads=1),
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
    """The operands with FP8 caches, and a scale per page or sequence, and head."""

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
    lengths = {"query_seq_lengths": rows, "key_value_seq_lengths": kv_lengths}
    return jax.nn.dot_product_attention(query, key, value, **lengths, implementation="cudnn")


def compiled_of(
    name: str, function: Callable[..., jax.Array], arrays: dict[str, jax.Array]
) -> Compiled:
    others = {name: x for name, x in arrays.items() if name != "query"}
    attention = Implementation(name, lambda query, x: function(query=query, **x), others)
    return Compiled(attention, (arrays["query"], None))  # no cotangent: there is no backward


def measure(case: Case, dtype: str, implementation: str, rounds: int) -> dict[str, Any]:
    arrays = tensors(case, dtype)
    ours = functools.partial(packax.decode_attention, implementation=implementation)
    xla = jax.jit(
        functools.partial(packax.decode_attention, implementation="xla", precision="highest")
    )
    candidates: dict[str, tuple[Callable[..., jax.Array], dict[str, jax.Array]]] = {
        "packax": (ours, arrays)
    }
    left_out: dict[str, str] = {}
    if case.page_size or case.q_len > 1:  # cuDNN's causal mask aligns row 0 with the first key
        left_out["cudnn"] = "no pages" if case.page_size else "no causal rows at the end"
    else:
        candidates["cudnn"] = cudnn, arrays
    if SIZES[dtype] == 2 and case.dim <= 256:
        candidates["fp8"] = ours, in_fp8(arrays)
    else:
        left_out["fp8"] = "no kernel"
    row: dict[str, Any] = {"dtype": dtype, "bytes": case.bytes(dtype), "left_out": left_out}
    row |= {"errors": {}, "times": {}}
    functions: dict[str, Callable[[], Any]] = {}
    exact = xla(**arrays)
    for name, (function, operands) in candidates.items():
        want = exact if operands is arrays else xla(**operands)
        if name == "fp8":
            row["fp8_from_16_bits"] = relative(want, exact, 0)
        found = usable(
            compiled_of(name, function, operands),
            lambda out, _, want=want: {"out": relative(out, want, 0)},
            passes=("fwd",), loops=LOOP, limit=LIMIT[dtype],
        )  # fmt: skip
        if found["errors"]:
            row["errors"][name] = error = found["errors"]["out"]
        if found["failed"]:
            left_out[name] = found["failed"]["fwd"]
        elif found["wrong"]:
            left_out[name] = f"wrong: {error:.1e} from XLA"
        else:
            functions[name] = found["passes"]["fwd"]
    x = jnp.zeros(COPIED // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    functions["copy"] = lambda: copy(x)
    bytes_of = {"copy": 2 * COPIED, "fp8": case.bytes(FP8)}
    for name, took in interleaved(functions, jax.block_until_ready, rounds).items():
        time = as_row([ms / (1 if name == "copy" else LOOP) for ms in took])
        rate = bytes_of.get(name, row["bytes"]) / time["ms"] / 1e6
        row["times"][name] = time | {"gb_per_s": round(rate, 1)}
    for time in row["times"].values():
        time["of_copy"] = round(time["gb_per_s"] / row["times"]["copy"]["gb_per_s"], 3)
    return row


def table(results: dict[str, Any]) -> str:
    lines = [
        "| case | packax us | GB/s | of the copy | FP8 us | GB/s | of the copy "
        "| cuDNN us | GB/s | of the copy | copy GB/s |"
    ]
    lines.append("|---" * 11 + "|")
    for case, row in results.items():
        cells = [case]
        for name in ("packax", "fp8", "cudnn") if row else ():
            t = row["times"].get(name)
            if t is None:
                cells += [row["left_out"][name], "", ""]
            else:
                cells += [f"{1e3 * t['ms']:.1f}", f"{t['gb_per_s']:.0f}", f"{t['of_copy']:.0%}"]
        cells.append(f"{row['times']['copy']['gb_per_s']:.0f}" if row else "did not run")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None, cases: tuple[Case, ...] = CASES) -> int:
    parser = arguments_of(__doc__, rounds=11)
    parser.add_argument("--cases", nargs="*", help="names; default: all")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(LIMIT))
    parser.add_argument("--implementation", default="cuda", choices=("cuda", "xla"))
    options = parser.parse_args(arguments)
    report = Report(options.out, "decode", options.rounds, machine=machine(), copied_bytes=COPIED)
    results = report.run(
        picked(cases, options.cases, lambda case: ""),
        lambda case: measure(case, options.dtype, options.implementation, options.rounds),
        table,
    )
    return report.end(
        [
            name
            for name, row in results.items()
            if not row
            or "packax" not in row["times"]
            or row["left_out"].get("fp8", "").startswith("wrong")
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
