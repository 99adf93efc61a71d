"""Compare candidate tiles of one architecture: compile them here, time them on a machine that has nothing but numpy and a driver.

    python benchmarks/tune.py build DIR --arch 90a            (build machine: Triton, no GPU)
    python benchmarks/tune.py time DIR [--rounds 20]          (GPU machine: from DIR alone)

Candidates are CANDIDATES below. `time` checks every candidate's output against the first one's, and the first one's against a float64
softmax on sampled rows, prints one line per candidate and case, and writes DIR/tune.json. The winners go to csrc/aot/variants.py.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Iterator

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

# kernel -> head dim -> (BLOCK_M, BLOCK_N, STAGES, warps)
CANDIDATES: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {
    "forward": {
        128: [(128, 128, 2, 8), (128, 128, 3, 8), (128, 64, 2, 8), (128, 64, 3, 8), (128, 64, 4, 8), (64, 128, 2, 4), (64, 64, 3, 4), (128, 64, 3, 4)],
        64: [(128, 128, 2, 8), (128, 128, 3, 8), (128, 64, 3, 8), (128, 64, 4, 4), (128, 64, 3, 4), (64, 128, 3, 4), (64, 64, 3, 4)],
    },
    "backward_dkdv": {
        128: [(64, 128, 2, 8), (64, 128, 3, 8), (32, 128, 3, 8), (64, 64, 2, 4), (64, 64, 3, 4), (32, 128, 2, 4), (128, 64, 2, 8), (128, 128, 2, 8)],
        64: [(64, 128, 2, 8), (64, 128, 3, 8), (64, 128, 3, 4), (64, 64, 3, 4), (128, 128, 2, 8), (128, 64, 2, 4), (32, 128, 3, 4)],
    },
    "backward_dq": {
        128: [(128, 64, 2, 8), (128, 64, 3, 8), (128, 128, 2, 8), (64, 64, 3, 4), (64, 128, 2, 4), (128, 32, 3, 8), (128, 32, 3, 4)],
        64: [(128, 64, 3, 8), (128, 128, 2, 8), (128, 64, 3, 4), (64, 64, 3, 4), (64, 128, 3, 4), (128, 32, 3, 4)],
    },
}  # fmt: skip

# name -> rows, head dim, documents; 32 query and 8 key/value heads
CASES = {
    128: {"causal_16k": (16384, 1), "docs12_128k": (131072, 12), "docs64_32k": (32768, 64)},
    64: {"causal_16k": (16384, 1), "docs12_32k": (32768, 12)},
}
HEADS, KV_HEADS = 32, 8


def build(folder: pathlib.Path, arch: str, jobs: int) -> None:
    sys.path.insert(0, str(ROOT / "csrc" / "aot"))
    import compile as aot
    import variants as table

    todo: list[tuple[table.Variant, pathlib.Path]] = []
    for kernel, dims in CANDIDATES.items():
        for dim, tiles in dims.items():
            for tile in tiles:
                table.TILES[kernel][table.ARCHS[arch].tiles, dim] = tile
                variant = table.tiled(kernel, table.ARCHS[arch], "bf16", dim, dim)
                todo.append((variant, folder / f"{kernel}_{dim}_" / "x".join(map(str, tile))))
    rest = [v for v in table.variants((arch,), ("bf16",)) if v.kernel not in CANDIDATES]
    failed = aot.compile_table(rest, folder / "common", None, jobs)
    by_place: dict[str, list[table.Variant]] = {}
    for variant, out in todo:
        by_place.setdefault(str(out), []).append(variant)
    for i, (out, some) in enumerate(by_place.items()):
        print(
            f"{i + 1}/{len(by_place)} {pathlib.Path(out).parent.name}{pathlib.Path(out).name}",
            flush=True,
        )
        failed += aot.compile_table(some, pathlib.Path(out), None, jobs)
    print(f"{failed} candidates do not compile; they are left out")


def lengths(total: int, n: int) -> np.ndarray:
    """Document lengths of board.json: n - 1 distinct cuts at multiples of 64."""
    if n == 1:
        return np.array([total])
    cuts = (
        np.sort(np.random.RandomState(0).choice(np.arange(1, total // 64), n - 1, replace=False))
        * 64
    )
    return np.diff(np.concatenate([[0], cuts, [total]]))


def bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def float32(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


class Work:
    """One case on the device: inputs, mask arrays from the mask kernels, and launches as docs/design.md defines them."""

    def __init__(self, driver, folder: pathlib.Path, rows: int, dim: int, documents: int):  # type: ignore[no-untyped-def]
        from cubin import Buffer, Kernel

        self.driver, self.rows, self.dim = driver, rows, dim
        self.docs = lengths(rows, documents)
        self.flops = 4.0 * HEADS * dim * float(sum(n * (n + 1) // 2 for n in self.docs))
        self.common = {r["kernel"]: Kernel(driver, p) for p in sorted((folder / "common").glob("*.json"))
                       if (r := json.loads(p.read_text()))["qk_dim"] in (0, dim)}  # fmt: skip
        rng = np.random.default_rng(0)
        new = lambda shape, kind=np.uint16: Buffer(driver, shape, kind)  # noqa: E731
        put = lambda h: new((rows, h, dim)).set(
            bfloat16(rng.standard_normal((rows, h, dim), np.float32))
        )  # noqa: E731
        self.q, self.k, self.v, self.do = put(HEADS), put(KV_HEADS), put(KV_HEADS), put(HEADS)
        self.out, self.dq = new((rows, HEADS, dim)), new((rows, HEADS, dim))
        self.dk, self.dv = new((rows, KV_HEADS, dim)), new((rows, KV_HEADS, dim))
        self.lse, self.delta = new((HEADS, rows), np.float32), new((HEADS, rows), np.float32)
        lo = np.repeat(np.cumsum(self.docs) - self.docs, self.docs).astype(np.int32)
        self.lo_host = lo
        ints = lambda a: new(a.shape, np.int32).set(a)  # noqa: E731
        self.lo, self.hi = ints(lo), ints(np.arange(1, rows + 1, dtype=np.int32))
        zero = ints(np.zeros(rows, np.int32))
        blocks, tiles = -(-rows // 64), -(-rows // 128)
        self.tiles = tiles
        self.q_blocks, self.kv_blocks = new((5 * blocks,), np.int32), new((4 * blocks,), np.int32)
        self.q_order, self.kv_order = new((tiles,), np.int32), new((tiles,), np.int32)
        self.common["blocks_rows"]((-(-blocks // 16),), self.lo, self.hi, zero, self.q_blocks, rows)
        self.common["blocks_keys"]((-(-blocks // 16),), self.q_blocks, self.kv_blocks, rows, rows)
        self.common["blocks_order"](
            (-(-tiles // 128),),
            self.q_blocks,
            self.kv_blocks,
            self.q_order,
            self.kv_order,
            rows,
            rows,
        )
        driver.synchronize()

    def launch(self, kernel) -> None:  # type: ignore[no-untyped-def]
        name, block = kernel.meta["kernel"], kernel.meta["block"]
        mask = (self.lo, self.hi, self.lo, self.lo, self.lo, self.lo, self.q_blocks)
        scalars = (self.dim**-0.5, 0, 1, 1, self.rows, self.rows, HEADS, KV_HEADS)
        per_tile = self.tiles * (128 // block)
        operands = (self.q, self.k, self.v)
        if name == "forward":
            kernel(
                (HEADS * per_tile,), *operands, self.out, self.lse, *mask, self.q_order, *scalars
            )
        elif name == "backward_dkdv":
            outputs = (self.do, self.lse, self.delta, self.dk, self.dv)
            kernel(
                (KV_HEADS * per_tile,),
                *operands,
                *outputs,
                *mask,
                self.kv_blocks,
                self.kv_order,
                *scalars,
            )
        elif name == "backward_dq":
            outputs = (self.do, self.lse, self.delta, self.dq)
            kernel((HEADS * per_tile,), *operands, *outputs, *mask, self.q_order, *scalars)
        elif name == "backward_delta":
            grid = (-(-self.rows // block) * HEADS,)
            kernel(
                grid,
                self.out,
                self.do,
                self.lse,
                self.delta,
                self.lo,
                self.hi,
                0,
                1,
                1,
                self.rows,
                HEADS,
            )

    def outputs(self, kernel: str) -> list[np.ndarray]:
        buffers = {
            "forward": [self.out],
            "backward_dkdv": [self.dk, self.dv],
            "backward_dq": [self.dq],
        }[kernel]
        return [float32(b.get()) for b in buffers]

    def poison(self) -> None:
        for b in (self.out, self.dq, self.dk, self.dv):
            b.fill(0xFF)

    def sampled_error(self, out: np.ndarray) -> float:
        """Relative error of 8 random rows of every head against float64."""
        q, k, v = (float32(b.get()).astype(np.float64) for b in (self.q, self.k, self.v))
        worst = 0.0
        for i in np.random.default_rng(1).choice(self.rows, 8, replace=False):
            span = slice(self.lo_host[i], i + 1)
            for h in range(HEADS):
                s = k[span, h // 4] @ q[i, h] * self.dim**-0.5
                p = np.exp(s - s.max())
                o = p @ v[span, h // 4] / p.sum()
                worst = max(worst, float(np.linalg.norm(out[i, h] - o) / np.linalg.norm(o)))
        return worst

    def free(self) -> None:
        from cubin import Buffer

        for b in vars(self).values():
            if isinstance(b, Buffer):
                b.free()


def candidates(folder: pathlib.Path, kernel: str, dim: int) -> Iterator[tuple[str, pathlib.Path]]:
    for tile in CANDIDATES[kernel][dim]:
        label = "x".join(map(str, tile))
        for record in sorted((folder / f"{kernel}_{dim}_" / label).glob("*.json")):
            yield label, record


def time_candidates(folder: pathlib.Path, rounds: int) -> None:
    from cubin import Driver, Kernel

    driver = Driver()
    rows = []
    for dim, cases in CASES.items():
        for case, (length, documents) in cases.items():
            work = Work(driver, folder, length, dim, documents)
            for kernel, factor in (
                ("forward", 1.0),
                ("backward_dkdv", 4 / 2),
                ("backward_dq", 3 / 2),
            ):
                reference = None
                for label, record in candidates(folder, kernel, dim):
                    loaded = Kernel(driver, record)
                    work.poison()
                    if kernel != "forward" and reference is None:
                        work.launch(Kernel(driver, next(candidates(folder, "forward", dim))[1]))
                        work.launch(work.common["backward_delta"])
                    work.launch(loaded)
                    driver.synchronize()
                    got = work.outputs(kernel)
                    if reference is None:
                        reference = got
                        if kernel == "forward":
                            print(
                                f"{case} d{dim}: error against float64 {work.sampled_error(got[0]):.1e}",
                                flush=True,
                            )
                    worst = max(
                        float(np.linalg.norm(a - b) / np.linalg.norm(b))
                        for a, b in zip(got, reference, strict=True)
                    )
                    ms = driver.milliseconds(lambda: work.launch(loaded), rounds)  # noqa: B023
                    row = dict(case=case, dim=dim, kernel=kernel, tile=label, ms=round(ms, 4), difference=worst,
                               tflops=round(factor * work.flops / ms / 1e9, 1), registers=loaded.meta["registers"],
                               stack=loaded.meta["stack"], shared=loaded.meta["shared"])  # fmt: skip
                    rows.append(row)
                    print(f"{case:12} d{dim:<3} {kernel:14} {label:14} {ms:8.3f} ms {row['tflops']:7.1f} TFLOP/s  "
                          f"diff {worst:.0e}  {row['registers']} reg {row['stack']} B stack", flush=True)  # fmt: skip
            work.free()
    out = pathlib.Path(os.environ.get("OUT", folder)) / "tune.json"
    out.write_text(json.dumps({"device": driver.name, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sub = parser.add_subparsers(dest="command", required=True)
    first = sub.add_parser("build", help="compile the candidates")
    first.add_argument("folder", type=pathlib.Path)
    first.add_argument("--arch", default="90a")
    first.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    second = sub.add_parser("time", help="time them")
    second.add_argument("folder", type=pathlib.Path)
    second.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if args.command == "build":
        build(args.folder, args.arch, args.jobs)
    else:
        time_candidates(args.folder, args.rounds)


if __name__ == "__main__":
    main()
