"""Times forward mode: the forward pass, its jvp, and gradients of losses that hold a jvp.

    python benchmarks/forward_mode.py [--cases NAME,NAME] [--rounds 5] [--out DIR]
        [--check-only | --time-only]

First compares the tangents of small calls, and the gradients of a loss that holds them, with
float64. An error above twice that of dense attention in the same dtype is a failure. Then times,
in turns: the forward pass; its gradient; jvp along query, key and value; the gradient of a loss
with the tangent under stop_gradient (MeanFlow); and the gradient through the tangent. jax.nn is
dense attention in XLA, where its scores fit. Writes forward_mode.json into --out (default: $OUT,
else benchmarks/results).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packax
from lib.cases import document_lengths
from lib.machine import machine
from lib.output import Report, arguments_of, first_line, picked, require_gpu, say
from lib.turns import as_row, interleaved

Arrays = tuple[jax.Array, ...]
Attention = Callable[..., jax.Array]
DENSE_BYTES = 2 << 30  # of float32 scores, at most, for which dense attention is timed
x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


@dataclasses.dataclass(frozen=True)
class ModeCase:
    name: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    documents: int = 1
    v_dim: int = 0
    dtype: str = "bfloat16"
    soft_cap: float | None = None
    along: tuple[int, ...] = (0, 1, 2)  # which of query, key and value have a tangent

    def ids(self) -> np.ndarray:
        lengths = document_lengths(self.seq, self.documents)
        return np.repeat(np.arange(self.documents, dtype=np.int32), lengths)[None]

    def expression(self) -> Any:
        mask = packax.causal() if self.causal else packax.full()
        return mask & packax.documents(self.ids()) if self.documents > 1 else mask

    def arrays(self) -> tuple[Arrays, Arrays, jax.Array]:
        """query, key and value, their tangents, and a cotangent of the output."""
        keys = jax.random.split(jax.random.key(0), 7)
        v_dim = self.v_dim or self.head_dim
        sizes = ((self.heads, self.head_dim), (self.kv_heads, self.head_dim))
        sizes = (*sizes, (self.kv_heads, v_dim), (self.heads, v_dim))

        def draw(n: int) -> jax.Array:
            shape = (self.batch, self.seq, *sizes[3 if n == 6 else n % 3])
            return jax.random.normal(keys[n], shape, jnp.dtype(self.dtype))

        drawn = [draw(n) for n in range(7)]
        return tuple(drawn[:3]), tuple(drawn[n + 3] for n in self.along), drawn[6]


TIMED = (
    ModeCase("full_4x1k_d64", 4, 1024, 16, 16, 64),
    ModeCase("full_4k_d64", 1, 4096, 16, 16, 64),
    ModeCase("full_4k_d128", 1, 4096, 16, 16, 128),
    ModeCase("causal_8k_d128", 1, 8192, 16, 16, 128, causal=True),
    ModeCase("causal_16k_d128", 1, 16384, 16, 16, 128, causal=True),
    ModeCase("docs12_32k_d128", 1, 32768, 16, 16, 128, causal=True, documents=12),
    ModeCase("docs12_32k_d64", 1, 32768, 16, 16, 64, causal=True, documents=12),
)
CHECKED = (
    ModeCase("full d64", 2, 320, 4, 4, 64),
    ModeCase("causal d128, GQA", 1, 384, 4, 2, 128, causal=True),
    ModeCase("documents d64", 1, 512, 4, 2, 64, causal=True, documents=4),
    ModeCase("documents d128 float16", 1, 512, 4, 2, 128, documents=4, dtype="float16"),
    ModeCase("only query d64", 1, 320, 4, 4, 64, along=(0,)),
    ModeCase("key and value d128", 1, 320, 4, 1, 128, causal=True, along=(1, 2)),
    ModeCase("d256", 1, 320, 2, 2, 256, causal=True),
    ModeCase("d192/128", 1, 320, 2, 2, 192, v_dim=128),
    ModeCase("d80", 1, 320, 2, 2, 80, causal=True),
    ModeCase("soft cap d128", 1, 320, 4, 2, 128, causal=True, soft_cap=5.0),
    ModeCase("float32 d64", 1, 320, 2, 2, 64, causal=True, dtype="float32"),
)


def packax_attention(case: ModeCase) -> Attention:
    mask = packax.create_attention_mask(case.expression(), q_len=case.seq, kv_len=case.seq)
    more = {} if case.dtype != "float32" else {"precision": jax.lax.Precision.HIGHEST}
    return functools.partial(_packax, mask=mask, soft_cap=case.soft_cap, **more)


def _packax(query, key, value, mask, **options):
    return packax.flash_attention(query, key, value, mask, **options)


def dense_attention(case: ModeCase) -> Attention:
    """In the operands' dtype, with float32 scores as in jax.nn (float64 for float64)."""
    allowed = (
        None if case.documents == 1 else jnp.asarray(case.expression().as_array(*[case.seq] * 2))
    )

    def attend(query, key, value):
        if case.soft_cap is None and not case.v_dim and query.dtype != jnp.float64:
            mask = None if allowed is None else allowed.reshape(-1, 1, case.seq, case.seq)
            return jax.nn.dot_product_attention(
                query, key, value, mask=mask, is_causal=case.causal, implementation="xla"
            )
        real = jnp.promote_types(query.dtype, jnp.float32)
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], 2) for x in (key, value))
        s = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=real)
        s = s * query.shape[3] ** -0.5
        s = s if case.soft_cap is None else case.soft_cap * jnp.tanh(s / case.soft_cap)
        inside = jnp.asarray(case.expression().as_array(*[case.seq] * 2))
        s = jnp.where(inside.reshape(-1, 1, case.seq, case.seq), s, -jnp.inf)
        p = jax.nn.softmax(s, axis=-1).astype(query.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", p, value)

    return attend


def programs(case: ModeCase, attention: Attention) -> dict[str, Callable[..., Any]]:
    """By name, functions of (tensors, tangents, cotangent)."""

    def tangent(x: Arrays, u: Arrays) -> tuple[jax.Array, jax.Array]:
        def of_some(*some: jax.Array) -> jax.Array:
            by_index = dict(zip(case.along, some, strict=True))
            return attention(*(by_index.get(n, y) for n, y in enumerate(x)))

        return jax.jvp(of_some, tuple(x[n] for n in case.along), u)

    def loss(x: Arrays, u: Arrays, dout: jax.Array, stopped: bool) -> jax.Array:
        out, tout = tangent(x, u)
        target = jax.lax.stop_gradient(tout) if stopped else tout
        return jnp.sum((out * dout + out * target).astype(jnp.promote_types(out.dtype, "float32")))

    def plain(x: Arrays, u: Arrays, dout: jax.Array) -> Any:
        return jax.grad(lambda x: jnp.sum((attention(*x) * dout).astype(jnp.float32)))(x)

    return {
        "forward": lambda x, u, dout: attention(*x),
        "gradient": plain,
        "jvp": lambda x, u, dout: tangent(x, u),
        "stopped": lambda x, u, dout: jax.grad(loss)(x, u, dout, True),
        "through": lambda x, u, dout: jax.grad(loss)(x, u, dout, False),
    }


def check(case: ModeCase) -> dict[str, float]:
    """The ratios of packax's errors to those of dense attention in the same dtype, against float64.
    An error is the root mean square."""
    arrays = case.arrays()
    with x64(True):
        doubles = jax.tree.map(lambda y: jnp.asarray(np.asarray(y, np.float64)), arrays)
        true = {
            name: jax.tree.map(np.asarray, jax.jit(function)(*doubles))
            for name, function in programs(case, dense_attention(case)).items()
        }
    found = {}
    for who, attention in (("packax", packax_attention(case)), ("dense", dense_attention(case))):
        for name, function in programs(case, attention).items():
            results = jax.tree.leaves(jax.jit(function)(*arrays))
            pairs = zip(results, jax.tree.leaves(true[name]), strict=True)
            found[who, name] = [
                float(np.sqrt(np.mean((np.asarray(a, np.float64) - b) ** 2))) for a, b in pairs
            ]
    return {
        name: round(max(a / max(b, 1e-30) for a, b in zip(
            found["packax", name], found["dense", name], strict=True)), 3)
        for name in true
    }  # fmt: skip


def run_case(case: ModeCase, rounds: int) -> dict[str, Any]:
    arrays = case.arrays()
    attentions = {"packax": packax_attention(case)}
    if case.documents == 1 and 4 * case.batch * case.heads * case.seq**2 <= DENSE_BYTES:
        attentions["jax.nn"] = dense_attention(case)
    lowered = {
        f"{who} {name}": jax.jit(function).lower(*arrays)
        for who, attention in attentions.items()
        for name, function in programs(case, attention).items()
    }
    functions, failed = {}, {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = {name: pool.submit(x.compile) for name, x in lowered.items()}
    for name, program in compiled.items():
        try:
            functions[name] = functools.partial(program.result(), *arrays)
            jax.block_until_ready(functions[name]())
        except Exception as error:
            functions.pop(name, None)
            failed[name] = first_line(error)
    took = interleaved(functions, jax.block_until_ready, rounds)
    rows: dict[str, Any] = {name: as_row(times) for name, times in took.items()}
    return rows | ({"failed": failed} if failed else {})


NAMES = ("forward", "gradient", "jvp", "stopped", "through")


def table(results: dict[str, Any]) -> str:
    """Milliseconds, and jvp and the stopped gradient relative to the forward pass and gradient."""
    head = f"{'case':<18}" + "".join(f"{name:>10}" for name in NAMES)
    lines = [f"{head}{'jvp/fwd':>9}{'stop/(jvp+grad-fwd)':>21}  jax.nn, in the same order"]
    for case, rows in results.items():
        ours, theirs = (
            {name: rows.get(f"{who} {name}", {}).get("ms") for name in NAMES}
            for who in ("packax", "jax.nn")
        )
        line = f"{case:<18}" + "".join(
            f"{ours[n]:>10.3f}" if ours[n] else f"{'-':>10}" for n in NAMES
        )
        if all(ours[n] for n in NAMES[:4]):
            rest = ours["jvp"] + ours["gradient"] - ours["forward"]
            line += f"{ours['jvp'] / ours['forward']:>9.2f}{ours['stopped'] / rest:>21.2f}"
        lines.append(line + "  " + " ".join(f"{x:.3f}" for x in theirs.values() if x))
        lines += [f"  {name}: {text}" for name, text in rows.get("failed", {}).items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = arguments_of(__doc__, "comma-separated names", rounds=5)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check-only", action="store_true", help="compare, but time nothing")
    only.add_argument("--time-only", action="store_true", help="compare nothing")
    options = parser.parse_args(arguments)
    cases = picked(TIMED, options.cases, lambda case: "")
    if not options.check_only:
        require_gpu()
    report = Report(options.out, "forward_mode", options.rounds, machine=machine(), checks={})
    bad = []
    with concurrent.futures.ThreadPoolExecutor() as pool:  # most of the time is compilation
        compared = () if options.time_only else CHECKED
        checked = {case.name: pool.submit(check, case) for case in compared}
    for case, result in checked.items():
        try:
            ratios: Any = result.result()
            bad += [f"{case}: {name}" for name, ratio in ratios.items() if not ratio <= 2.0]
        except Exception as error:
            ratios = first_line(error)
            bad.append(case)
        say(f"{case}: {ratios}")
        report["checks"][case] = ratios
    if not options.check_only:
        report.run(cases, lambda case: run_case(case, options.rounds), table)
    for name, ratios in report["checks"].items():
        print(f"error relative to dense, {name}: {ratios}")
    return report.end(bad)


if __name__ == "__main__":
    sys.exit(main())
