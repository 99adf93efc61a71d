"""Compare candidate tiles of one architecture: compile them here, time them on a machine that has nothing but numpy and a driver.

    python benchmarks/tune.py build DIR --arch 90a            (build machine: Triton, no GPU)
    python benchmarks/tune.py time DIR [--rounds 20]          (GPU machine: from DIR alone)

Candidates are CANDIDATES below. `time` checks every candidate's output against the first one's, and the first one's against a float64
softmax on sampled rows, prints one line per candidate and case, and writes DIR/tune.json. The winners go to csrc/aot/variants.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Iterator

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

# kernel -> head dim -> rows of TILES (BLOCK_M, BLOCK_N, STAGES, warps) or of HOPPER_TILES
CANDIDATES: dict[str, dict[int, list[tuple[int, ...]]]] = {
    "forward_hopper": {
        128: [(2, 128, 2, 240, 24)],
        64: [(3, 128, 2, 160, 32)],
    },
    "forward": {
        128: [
            (128, 128, 2, 8), (128, 128, 3, 8), (128, 64, 2, 8), (128, 64, 3, 8), (128, 64, 4, 8),
            (64, 128, 2, 4), (64, 64, 3, 4), (128, 64, 3, 4),
        ],
        64: [
            (128, 128, 2, 8), (128, 128, 3, 8), (128, 64, 3, 8), (128, 64, 4, 4), (128, 64, 3, 4),
            (64, 128, 3, 4), (64, 64, 3, 4),
        ],
    },
    "backward_dkdv": {
        128: [
            (64, 128, 2, 8), (64, 128, 3, 8), (32, 128, 3, 8), (64, 64, 2, 4), (64, 64, 3, 4),
            (32, 128, 2, 4), (128, 64, 2, 8), (128, 128, 2, 8),
        ],
        64: [
            (64, 128, 2, 8), (64, 128, 3, 8), (64, 128, 3, 4), (64, 64, 3, 4), (128, 128, 2, 8),
            (128, 64, 2, 4), (32, 128, 3, 4),
        ],
    },
    "backward_dq": {
        128: [
            (128, 64, 2, 8), (128, 64, 3, 8), (128, 128, 2, 8), (64, 64, 3, 4), (64, 128, 2, 4),
            (128, 32, 3, 8), (128, 32, 3, 4),
        ],
        64: [
            (128, 64, 3, 8), (128, 128, 2, 8), (128, 64, 3, 4), (64, 64, 3, 4), (64, 128, 3, 4),
            (128, 32, 3, 4),
        ],
    },
}  # fmt: skip

# name -> rows, head dim, documents; 32 query and 8 key/value heads
CASES = {
    128: {"causal_16k": (16384, 1), "docs12_128k": (131072, 12), "docs64_32k": (32768, 64)},
    64: {"causal_16k": (16384, 1), "docs12_32k": (32768, 12)},
}
HEADS, KV_HEADS = 32, 8


def build(folder: pathlib.Path, arch: str, jobs: int, kernels: list[str], assembler: str) -> None:
    sys.path.insert(0, str(ROOT / "csrc" / "aot"))
    import compile as aot
    import variants as table

    todo: list[tuple[table.Variant, pathlib.Path]] = []
    for kernel, dims in CANDIDATES.items():
        for dim, tiles in dims.items():
            for tile in tiles if kernel in kernels else ():
                if kernel in table.HOPPER_TILES:
                    names = table.HOPPER_TILES[kernel][dim]
                    table.HOPPER_TILES[kernel][dim] = dict(zip(names, tile, strict=True))
                    variant = table.hopper(kernel, table.ARCHS[arch], "bf16", dim, dim)
                else:
                    table.TILES[kernel][table.ARCHS[arch].tiles, dim] = tile
                    variant = table.tiled(kernel, table.ARCHS[arch], "bf16", dim, dim)
                variant = dataclasses.replace(variant, assembler=assembler)
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

        def put(heads: int) -> Buffer:
            drawn = rng.standard_normal((rows, heads, dim), np.float32)
            return new((rows, heads, dim)).set(bfloat16(drawn))

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
        self.q_order_192 = new((-(-rows // 192),), np.int32)
        self.q_blocks, self.kv_blocks = new((5 * blocks,), np.int32), new((4 * blocks,), np.int32)
        self.q_order, self.kv_order = new((tiles,), np.int32), new((tiles,), np.int32)
        self.zero = zero
        ids = np.repeat(np.arange(documents), self.docs).astype(np.int32)
        slots = max(1024, 2 << (rows - 1).bit_length())
        self.ids, self.pos = ints(ids), ints(np.arange(rows, dtype=np.int32) - lo)
        self.workspace = new((5 * slots + rows + -(-rows // 1024),), np.int32)
        self.ranges = [new((rows,), np.int32) for _ in range(3)]
        self.slots = slots
        for launch in self.mask_launches().values():
            launch()
        driver.synchronize()
        assert (self.ranges[0].get() == lo).all() and not self.ranges[2].get().any()

    def mask_launches(self) -> dict:  # type: ignore[type-arg]
        """The launches that build a mask, in order."""
        n, slots, shift = self.rows, self.slots, 32 - (self.slots.bit_length() - 1)
        grid = lambda kernel, size: (-(-size // kernel.meta["block"]),)  # noqa: E731
        k = self.common
        init, runs, rows = k["documents_init"], k["documents_runs"], k["documents_rows"]
        ids, work, ranges = self.ids, self.workspace, self.ranges
        tables = (self.q_blocks, self.kv_blocks)
        bounds, keys, order = k["blocks_rows"], k["blocks_keys"], k["blocks_order"]
        blocks, both = -(-n // 64), (shift, n.bit_length())
        orders = (self.q_order, self.q_order_192, self.kv_order)
        return {
            "init": init.bind(grid(init, n), ids, work, n, slots),
            "runs": runs.bind(grid(runs, n), ids, self.pos, work, 1, n, slots, shift),
            "rows": rows.bind(
                grid(rows, n), ids, ids, self.pos, self.pos, work, *ranges, 1, n, n, slots, *both
            ),
            "blocks": bounds.bind(
                grid(bounds, blocks), self.lo, self.hi, self.zero, self.q_blocks, n
            ),
            "keys": keys.bind(grid(keys, blocks), *tables, n, n),
            "order": order.bind(grid(order, self.tiles), *tables, *orders, n, n),
        }

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
        elif name == "forward_hopper":
            grid = (HEADS * -(-self.rows // block),)
            order = self.q_order_192 if block == 192 else self.q_order
            kernel(grid, *operands, self.out, self.lse, *mask, order, *scalars)
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
            "forward_hopper": [self.out],
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

        for b in [*vars(self).values(), *self.ranges]:
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
            took = {
                name: round(1e3 * driver.milliseconds(launch, rounds, 20), 1)
                for name, launch in work.mask_launches().items()
            }
            print(f"{case} mask, us: {took}, sum {sum(took.values()):.1f}", flush=True)
            for kernel, factor in (
                ("forward", 1.0),
                ("forward_hopper", 1.0),
                ("backward_dkdv", 4 / 2),
                ("backward_dq", 3 / 2),
            ):
                reference = None
                for label, record in candidates(folder, kernel, dim):
                    loaded = Kernel(driver, record)
                    work.poison()
                    if kernel.startswith("backward") and reference is None:
                        work.launch(Kernel(driver, next(candidates(folder, "forward", dim))[1]))
                        work.launch(work.common["backward_delta"])
                    work.launch(loaded)
                    driver.synchronize()
                    got = work.outputs(kernel)
                    if reference is None:
                        reference = got
                        if kernel.startswith("forward"):
                            print(
                                f"{case} d{dim} {kernel}: error against float64 {work.sampled_error(got[0]):.1e}",
                                flush=True,
                            )
                    worst = max(
                        float(np.linalg.norm(a - b) / np.linalg.norm(b))
                        for a, b in zip(got, reference, strict=True)
                    )
                    ms = driver.milliseconds(lambda: work.launch(loaded), rounds)  # noqa: B023
                    row = {
                        "case": case,
                        "dim": dim,
                        "kernel": kernel,
                        "tile": label,
                        "ms": round(ms, 4),
                        "tflops": round(factor * work.flops / ms / 1e9, 1),
                        "difference": worst,
                        **{k: loaded.meta[k] for k in ("registers", "stack", "shared")},
                    }
                    rows.append(row)
                    print(f"{case:12} d{dim:<3} {kernel:14} {label:14} {ms:8.3f} ms {row['tflops']:7.1f} TFLOP/s  "
                          f"diff {worst:.0e}  {row['registers']} reg {row['stack']} B stack", flush=True)  # fmt: skip
            work.free()
    out = pathlib.Path(os.environ.get("OUT", folder)) / "tune.json"
    out.write_text(
        json.dumps({"device": driver.name, "driver": driver.version, "rows": rows}, indent=1) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sub = parser.add_subparsers(dest="command", required=True)
    first = sub.add_parser("build", help="compile the candidates")
    first.add_argument("folder", type=pathlib.Path)
    first.add_argument("--arch", default="90a")
    first.add_argument("--kernels", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    first.add_argument("--assembler", default="12.9", help="12.9 or 13.4")
    first.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    second = sub.add_parser("time", help="time them")
    second.add_argument("folder", type=pathlib.Path)
    second.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if args.command == "build":
        build(args.folder, args.arch, args.jobs, args.kernels, args.assembler)
    else:
        time_candidates(args.folder, args.rounds)


if __name__ == "__main__":
    main()
