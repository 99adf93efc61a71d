"""A small forward and backward of every dtype and head dim, to run under compute-sanitizer:

    python tests/gpu/hazards.py memcheck | racecheck | synccheck

hazards.py runs this program under the tool and counts its reports.

`--dims 128x128`: only these head dims. `--small`, for slow tools: only bfloat16 and few cases; they
still let every ring of buffers wrap.

Every buffer gets a separate allocation, so that an access past its end is an error instead of
reaching a neighbour in jax's pool. Lengths are odd, ids reappear, padding is in the middle, and one
case has Sq != Skv. The LSE has no cotangent. Results are compared with numpy in float64.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
flags = "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import dense  # noqa: E402
import jax  # noqa: E402
from calls import Call  # noqa: E402
from decode_calls import parse  # noqa: E402
from packax import _ext  # noqa: E402

# 700 rows: more blocks than any ring has stages, both masked and unmasked; two query heads per
# key/value head.
LONG = "interval=causal,selector=packed,batch=1,heads=2/1,lengths=700x700"
PACKED = "interval=causal,selector=packed,batch=3,heads=4/2,lengths=213x213"
TESTED = "interval=causal,selector=any positions,batch=1,heads=2/2,lengths=137x137"
# The number of keys is a multiple of 8, which Hopper's bias kernels need.
EIGHTS = "interval=causal,selector=packed,batch=1,heads=2/1,lengths=272x272"
SMALL = [
    LONG,
    f"{LONG},order=deterministic",
    TESTED,
    f"{LONG},cap=3",  # scores above half of the cap, and below
    f"{LONG},cap=50",
    f"{PACKED},cap=3,order=deterministic",
    f"{LONG},bias=alibi",
    # At head dim 64, calls with few tiles use another forward kernel than calls with many.
    f"{LONG},heads=48/12",
    "interval=causal,selector=block mask 1 64,batch=1,heads=2/1,lengths=700x700",
]
BIASES = [f"{TESTED},bias=shared", f"{TESTED},bias=shared,bias_dtype=float32"]
BIASES += [f"{EIGHTS},bias=shared"]
MORE = [PACKED, "interval=causal,heads=8/1,lengths=129x65"]


def decoding(cache: str) -> list[str]:
    """Both query tiles, and packed rows with a chunk. Invalid entries of the block table follow the
    pages in use."""
    calls = "decode,rows=1,heads=6/2", "decode,rows=7,heads=20/2", "ragged,mix=chunk,heads=20/2"
    return [f"{call},batch=4,cache={cache}" for call in calls]


def cases(dims: tuple[int, int], small: bool) -> Iterator[str]:
    for text in [
        *SMALL,
        *(BIASES if max(dims) <= 256 else []),
        *decoding("pages,page=16,blocks=13"),
    ]:
        yield f"{text},dims={dims[0]}x{dims[1]},dtype=bfloat16"
    if small:
        return
    for text in decoding("dense,blocks=50"):
        yield f"{text},dims={dims[0]}x{dims[1]},dtype=float16"
    for text in decoding("pages,page=3,blocks=67"):
        yield f"{text},dims={dims[0] - 8}x{dims[1] - 24},dtype=bfloat16"
    yield f"{PACKED},order=deterministic,dims={dims[0]}x{dims[1]},dtype=bfloat16"
    for dtype in ("bfloat16", "float16") if max(dims) <= 128 else ("float16",):
        yield from (f"{text},dims={dims[0]}x{dims[1]},dtype={dtype}" for text in MORE)
    if max(dims) <= 256:
        for text in (PACKED, *decoding("pages,page=16,blocks=13")):
            yield f"{text},dims={dims[0]}x{dims[1]}"


def run(text: str, precision: str | None = None) -> bool:
    call = parse(text if "," in text.split("=")[0] else f"implementation=cuda,results=out,{text}")
    a, tf32 = call.arrays(), precision == "tensorfloat32"
    with jax.default_matmul_precision(precision):
        got = jax.jit(call.step)(a)
    if isinstance(call, Call):
        a["dlse"][:] = 0
        dtype = "float16" if tf32 else call.dtype  # as exact as TF32
        pairs = call.operands(a), call.allowed(a), dtype
        wrong = call.wrong(got, a, dense.true_and_plain(*pairs, **call.options(a)))
    else:
        wrong = call.wrong(got, a, tf32=tf32)
    print(f"{text} {precision or ''}: {'; '.join(wrong) or 'ok'}", flush=True)
    return not wrong


def head_dims() -> list[tuple[int, int]]:
    """The (query/key, value) head dims for which this build has 16-bit kernels."""
    kernels = ("forward", "forward_sm90")
    found = (r for r in _ext.variants() if r["kernel"] in kernels and r["dtype"] in ("bf16", "f16"))
    return sorted({(r["qk_dim"], r["v_dim"]) for r in found})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--dims", nargs="+", help="pairs such as 192x128 (default: all)")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit(f"sanitize.py needs a GPU; jax runs on {jax.default_backend()}")
    pairs = {"x".join(map(str, dims)): dims for dims in head_dims()}
    if unknown := set(arguments.dims or ()) - set(pairs):
        raise SystemExit(f"--dims {' '.join(sorted(unknown))}: of {', '.join(pairs)}")
    good = True
    for name in arguments.dims or pairs:
        for text in cases(pairs[name], arguments.small):
            for precision in (None,) if "dtype=" in text else ("tensorfloat32", "highest"):
                good &= run(text, precision)
    print("sanitize.py: ok" if good else "sanitize.py: WRONG results")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
