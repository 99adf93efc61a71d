"""Times rows that share a bias, with its gradient: structure predictors, and windows of Swin.

    python benchmarks/pair_biases.py [--cases NAME,NAME] [--rounds 5] [--out DIR]

Compared with packax: jax.nn with cuDNN and with XLA, and cuEquivariance if it is installed. Tensors
are bfloat16, the bias (1, H, S, S) of a sample is float32 or bfloat16, and all rows of a sample
share it. Two samples are mapped with vmap. Every output and gradient is first compared with a
float32 reference; wrong implementations are not timed, and the exit status is 1 if packax is wrong.
The backward pass is timed alone. Writes pair_biases.json into --out (default: $OUT, else
benchmarks/results).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for cuDNN

import jax
import jax.numpy as jnp
import packax
from lib.machine import machine
from lib.output import Report, arguments_of, picked, require_gpu
from lib.passes import time_passes
from lib.reference import relative, wrong
from lib.turns import PASSES, bad_cases, launches_of, table

ORDER = ("packax", "cudnn", "cueq", "xla")


@dataclasses.dataclass(frozen=True)
class PairCase:
    rows: int
    seq: int
    heads: int
    head_dim: int
    dtype: str
    samples: int = 1

    @property
    def name(self) -> str:
        kind = {"float32": "f32", "bfloat16": "bf16"}[self.dtype]
        samples = f"{self.samples}x" if self.samples > 1 else ""
        return f"{samples}{self.rows}x{self.seq}_h{self.heads}_d{self.head_dim}_{kind}"

    def flops(self, what: str) -> float:
        pairs = self.samples * self.rows * self.seq**2 * self.heads
        return {"fwd": 4.0, "bwd": 10.0}[what] * pairs * self.head_dim

    def inputs(self) -> tuple[jax.Array, ...]:
        """query, key, value, bias and the cotangent, each with a first axis of samples."""
        keys = jax.random.split(jax.random.key(0), 5)
        shape = (self.samples, self.rows, self.seq, self.heads, self.head_dim)
        q, k, v, dout = (jax.random.normal(x, shape, jnp.bfloat16) for x in keys[:4])
        of_bias = (self.samples, 1, self.heads, self.seq, self.seq)
        return q, k, v, jax.random.normal(keys[4], of_bias, jnp.dtype(self.dtype)), dout


# Rows of any length; and the windows of Swin, 64 images: the first stage of Swin-B with windows of
# 7 x 7, and of 12 x 12.
SIZES = ((384, 384, 4, 32), (512, 512, 4, 32), (768, 768, 4, 32), (384, 384, 8, 64),
    (383, 383, 4, 32), (4096, 49, 4, 32), (4096, 144, 4, 32))  # fmt: skip
CASES = (
    *(PairCase(*sizes, dtype) for sizes in SIZES for dtype in ("float32", "bfloat16")),
    *(PairCase(256, 256, 4, 32, dtype, 2) for dtype in ("float32", "bfloat16")),
)

Function = Callable[..., jax.Array]


def over_samples(function: Function) -> Function:
    """`function` of one sample, mapped over samples if there are several."""

    def run(*operands: jax.Array) -> jax.Array:
        if operands[0].shape[0] == 1:
            return function(*(x[0] for x in operands))[None]
        return jax.vmap(function)(*operands)

    return run


def packax_function(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
    return packax.flash_attention(q, k, v, packax.full(), bias=bias)


def jax_function(implementation: str) -> Function:
    def run(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, bias, implementation=implementation)

    return run


def cueq_function(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
    """cuEquivariance's function, whose tensors are (B, N, H, S, D)."""
    from cuequivariance_jax import triangle_attention

    return triangle_attention(q, k, v, bias, None, scale=q.shape[-1] ** -0.5)[0]


def reference(*operands: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """The output and the gradients in float32, a row at a time."""

    def attention(q, k, v, bias):
        logits = jnp.einsum("ihd,jhd->hij", q, k, precision="highest") * q.shape[-1] ** -0.5
        p = jax.nn.softmax(logits + bias)
        return jnp.einsum("hij,jhd->ihd", p, v, precision="highest")

    def of_sample(operands):
        q, k, v, bias, dout = operands
        bias = bias[0].astype(jnp.float32)

        def step(total, row):
            *tensors, dout = (x.astype(jnp.float32) for x in row)
            out, back = jax.vjp(attention, *tensors, bias)
            *gradients, dbias = back(dout)
            return total + dbias, (out, *(x.astype(jnp.bfloat16) for x in gradients))

        total, (out, *gradients) = jax.lax.scan(step, jnp.zeros_like(bias), (q, k, v, dout))
        return out.astype(jnp.bfloat16), [*gradients, total[None]]

    return jax.lax.map(of_sample, operands)


def prepared(
    name: str, function: Function, inputs: tuple[jax.Array, ...], expected: Any
) -> dict[str, Any]:
    """The row of one implementation, as lib.passes.usable makes it."""
    heads_first = name == "cueq"
    *operands, dout = inputs
    if heads_first:  # outside the times
        turned = [jnp.swapaxes(x, 2, 3) for x in (*operands[:3], dout)]
        operands, dout = [*turned[:3], operands[3]], turned[3]
    run = function if heads_first else over_samples(function)
    errors: dict[str, float] = {}
    row: dict[str, Any] = {
        "errors": errors, "failed": {}, "wrong": [], "passes": {}, "launches": {},
    }  # fmt: skip
    try:
        forward = jax.jit(run).lower(*operands).compile()
        pullback = jax.jit(lambda *x: jax.vjp(run, *x)[1])(*operands)
        backward = jax.jit(lambda back, x: back(x)).lower(pullback, dout).compile()
        row["passes"] = {
            "fwd": lambda: forward(*operands),
            "bwd": lambda: backward(pullback, dout),
        }
        out, gradients = forward(*operands), list(backward(pullback, dout))
        if heads_first:
            out = jnp.swapaxes(out, 2, 3)
            gradients[:3] = [jnp.swapaxes(x, 2, 3) for x in gradients[:3]]
        names = ("out", "dq", "dk", "dv", "dbias")
        for what, x, y in zip(names, (out, *gradients), (expected[0], *expected[1]), strict=True):
            errors[what] = float(relative(x, y))
        row["wrong"] = wrong(errors)
    except Exception as error:  # the other implementations must still run
        row["failed"] = dict.fromkeys(PASSES, f"{type(error).__name__}: {error}"[:200])
    if row["wrong"] or row["failed"]:
        row["passes"] = {}
    row["launches"] = {
        what: launches_of(f, jax.block_until_ready, 40.0) for what, f in row["passes"].items()
    }
    return row


def run_case(case: PairCase, rounds: int) -> dict[str, Any]:
    inputs = case.inputs()
    expected = jax.jit(reference)(*inputs)
    functions = {
        "packax": packax_function,
        "cudnn": jax_function("cudnn"),
        "cueq": cueq_function,
        "xla": jax_function("xla"),
    }
    rows = {name: prepared(name, f, inputs, expected) for name, f in functions.items()}
    time_passes(rows, {what: case.flops(what) for what in PASSES}, rounds)
    return rows


def short(results: dict[str, Any]) -> str:
    """A line per case: ms forward / backward of each implementation, and packax's dbias error."""
    lines = [f"{'case':<24}" + "".join(f"{who:>18}" for who in ORDER) + f"{'dbias error':>13}"]
    for name, rows in results.items():
        line = f"{name:<24}"
        for who in ORDER:
            times = rows.get(who, {}).get("times", {})
            both = [f"{times[what]['ms']:.3f}" if what in times else "-" for what in PASSES]
            line += f"{' / '.join(both):>18}"
        error = rows.get("packax", {}).get("errors", {}).get("dbias")
        lines.append(line + (f"{error:>13.1e}" if error is not None else ""))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    options = arguments_of(__doc__, "comma-separated names", rounds=5).parse_args(arguments)
    cases = picked(CASES, options.cases, lambda case: "")
    require_gpu()
    report = Report(options.out, "pair_biases", options.rounds, machine=machine())
    results = report.run(
        cases, lambda case: run_case(case, options.rounds), lambda found: table(found, ORDER)
    )
    print(f"ms forward / backward\n{short(results)}")
    return report.end(bad_cases(results, ORDER[:1]))


if __name__ == "__main__":
    sys.exit(main())
