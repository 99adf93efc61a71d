"""The table of all kernels in the wheel.

The build, the C++ lookup, tests, `packax info` and error messages read it. A variant is a kernel
for one architecture, dtype and pair of head dims, with its tile. CONTRIBUTING.md says how to add a
head dim or a GPU. These files only declare: they compile nothing and import only the standard
library.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from archs import ARCHS, ASSEMBLERS, Arch, find_arch, one_set, served_by
from archs import PROXIES as PROXIES
from archs import exact as exact
from arguments import FLOATS as FLOATS
from arguments import MULTIPLES as MULTIPLES
from arguments import POINTERS as POINTERS
from arguments import POINTERS_OF_KERNEL as POINTERS_OF_KERNEL
from arguments import TENSOR_MAPS as TENSOR_MAPS
from arguments import absent_arguments as absent_arguments
from spills import SERIALISED as SERIALISED
from spills import SPILLS
from tiles_bias import BIAS_ALONE_TILES, BIAS_DIMS, BIAS_TILES
from tiles_decode import (
    DECODE_SPLITS,
    DECODE_STEP,
    DECODE_TILES,
    FLOAT32_DECODE_TILES,
    FP8_DECODE_TILES,
    FP8_DIMS,
    NATIVE_FP8,
    value_parts,
)
from tiles_fallback import FALLBACK_TILES, FLOAT32_DIMS, FLOAT32_TILES
from tiles_portable import PORTABLE_TILES
from tiles_sm80 import BACKWARD as SM80_BACKWARD
from tiles_sm80 import DIMS as SM80_DIMS
from tiles_sm80 import FORWARD as SM80_FORWARD
from tiles_sm80 import SOFT_CAP_BACKWARD as SM80_SOFT_CAP_BACKWARD
from tiles_sm90 import (
    HOPPER_DIMS,
    LIKE_PLAIN,
    ONE_ASSEMBLER,
    SM90_TILES,
    TWO_ASSEMBLERS,
    UNDER_12_9,
    Dims,
    row_of,
)
from tiles_sm90 import PARTS as PARTS
from tiles_tangent import TANGENT_DIMS, TANGENT_TILES

DTYPES = ("bf16", "f16")
# float32, with two precisions of products: float32, and TF32 (11 significant bits per operand).
# Only the fallback, bias and decode kernels have them.
FLOAT32 = ("f32", "tf32")
FP8 = "e4m3"  # keys and values in a cache; the query has either 16-bit dtype
ALL_DTYPES = (*DTYPES, *FLOAT32, FP8)
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))  # (query and key, value)
ALL_DIMS = tuple(dict.fromkeys((*HEAD_DIMS, *SM80_DIMS, *HOPPER_DIMS)))

# kernel -> (kind of tile, larger head dim) -> BLOCK_M, BLOCK_N, STAGES of the mask-free loop, warps
TILES = PORTABLE_TILES | FALLBACK_TILES
# The same for kernels whose cubins serve all GPUs that can run them and have the same tile.
SHARED_TILES = BIAS_TILES | TANGENT_TILES

# Kernels that depend on neither dtype nor head dim: compile-time constants, rows or keys per
# program, warps.
MASK_KERNELS: dict[str, tuple[dict[str, int], int, int]] = {
    "documents_init": ({}, 1024, 4),
    "documents_runs": ({}, 1024, 4),
    "documents_rows": ({}, 1024, 4),
    "blocks_rows": ({"GROUP": 16}, 16, 4),
    "blocks_keys": ({"GROUP": 8, "STEP": 256}, 8, 4),
    "blocks_order": ({"GROUP": 8, "STEP": 256}, 8, 4),
}
DELTA_ROWS = 64
PREPROCESS_ROWS = 32

KERNELS = {  # kernel -> module in csrc/kernels
    "forward": "portable.fwd",
    "forward_sm90": "sm90.fwd",
    "backward_preprocess": "common.bwd_preprocess",
    "backward_sm90": "sm90.bwd",
    "backward_postprocess": "sm90.bwd_postprocess",
    "backward_dkdv_sm90": "sm90.bwd",
    "backward_dq_sm90": "sm90.bwd_dq",
    "forward_sm90_soft_cap": "sm90.fwd",
    "backward_sm90_soft_cap": "sm90.bwd",
    "backward_dkdv_sm90_soft_cap": "sm90.bwd",
    "backward_dq_sm90_soft_cap": "sm90.bwd_dq",
    "forward_sm90_alibi": "sm90.fwd",
    "forward_sm90_bias": "sm90.fwd",
    "forward_sm90_float32_bias": "sm90.fwd",
    "backward_preprocess_dbias": "common.bwd_preprocess",
    "backward_dkdv_sm90_bias": "sm90.bwd",
    "backward_dkdv_sm90_float32_bias": "sm90.bwd",
    "backward_dq_sm90_bias": "sm90.bwd_dq",
    "backward_dq_sm90_float32_bias": "sm90.bwd_dq",
    "backward_shared_dbias": "sm90.shared_dbias",
    "backward_shared_float32_dbias": "sm90.shared_dbias",
    "backward_sum_dbias": "portable.sum_dbias",
    "backward_dkdv_sm90_dbias": "sm90.bwd",
    "forward_sm90_max_logits": "sm90.fwd",
    "forward_sm90_low_occupancy": "sm90.fwd",
    "forward_sm90_short": "sm90.fwd",
    "backward_sm90_short": "sm90.bwd",
    "backward_sm90_pairs": "sm90.bwd",
    "backward_sm90_alibi": "sm90.bwd",
    "forward_sm90_dropout": "sm90.fwd",
    "backward_preprocess_dropout": "common.bwd_preprocess",
    "backward_sm90_dropout": "sm90.bwd",
    "backward_dkdv_sm90_dropout": "sm90.bwd",
    "backward_dq_sm90_dropout": "sm90.bwd_dq",
    "forward_sm90_block_lists": "sm90.fwd",
    "backward_dkdv_sm90_block_lists": "sm90.bwd",
    "backward_dq_sm90_block_lists": "sm90.bwd_dq",
    "backward_dkdv_sm90_parts": "sm90.bwd",
    "backward_dq_sm90_parts": "sm90.bwd_dq_parts",
    "backward_sm80": "sm80.bwd",
    "forward_sm80_soft_cap": "sm80.fwd",
    "backward_sm80_soft_cap": "sm80.bwd",
    "backward_postprocess_sm80": "sm80.bwd",
    "backward_delta": "portable.bwd",
    "backward_dkdv": "portable.bwd",
    "backward_dq": "portable.bwd_dq",
    "forward_fallback": "portable.fwd",
    "backward_delta_fallback": "portable.bwd",
    "backward_dkdv_fallback": "portable.bwd",
    "backward_dq_fallback": "portable.bwd_dq",
    "forward_bias": "portable.fwd",
    "backward_dkdv_bias": "portable.bwd",
    "backward_dq_bias": "portable.bwd_dq",
    "backward_dbias": "portable.bwd_dbias",
    "forward_bias_alone": "portable.fwd",
    "backward_dkdv_bias_alone": "portable.bwd",
    "backward_dq_bias_alone": "portable.bwd_dq",
    "backward_dbias_alone": "portable.bwd_dbias",
    "backward_dkdv_dbias_alone": "portable.bwd",
    "backward_dq_of_dbias_alone": "portable.dbias_of_pairs",
    "forward_tangent": "portable.tangent",
    "forward_tangent_sm90": "sm90.tangent",
    "forward_tangent_fallback": "portable.tangent",
    "documents_init": "mask.segments",
    "documents_runs": "mask.segments",
    "documents_rows": "mask.segments",
    "blocks_rows": "mask.block_bounds",
    "blocks_keys": "mask.block_bounds",
    "blocks_order": "mask.block_bounds",
    "decode": "portable.decode",
    "decode_tall": "portable.decode",
    "decode_fp8": "portable.decode",
    "decode_tall_fp8": "portable.decode",
    "decode_fp8_pages": "portable.decode",
    "decode_tall_fp8_pages": "portable.decode",
    "decode_combine": "portable.decode",
    "ragged_sm90": "sm90.ragged",
    "ragged_sm90_large_pages": "sm90.ragged",
    "ragged_sm90_small_pages": "sm90.ragged",
}

# module -> its functions. Modules that are not listed have a function for each kernel.
FUNCTIONS = {
    "common.bwd_preprocess": ("backward_preprocess",),
    "portable.fwd": ("forward",),
    "portable.bwd": ("backward_delta", "backward_dkdv"),
    "portable.bwd_dq": ("backward_dq",),
    "portable.bwd_dbias": ("backward_dbias",),
    "portable.sum_dbias": ("sum_dbias",),
    "portable.dbias_of_pairs": ("backward_dq_of_dbias",),
    "portable.tangent": ("forward_tangent",),
    "portable.decode": ("decode", "decode_combine"),
    "sm90.fwd": ("forward_sm90",),
    "sm90.bwd": ("backward_sm90",),
    "sm90.bwd_dq": ("backward_dq_sm90",),
    "sm90.bwd_postprocess": ("backward_postprocess",),
    "sm90.shared_dbias": ("backward_shared_dbias",),
    "sm90.ragged": ("ragged_sm90",),
    "sm80.fwd": ("forward",),
    "sm80.bwd": ("backward_sm80", "backward_postprocess_sm80"),
}


def function(kernel: str, module: str) -> str:
    """The name of a kernel's function in a module: the only one, or the longest that begins the
    kernel's name. Kernels with options use the plain kernel's function, with more arguments."""
    names = FUNCTIONS.get(module, (kernel,))
    return max(names, key=lambda x: len(x) if kernel.startswith(x) else 0)


# A kernel with a NaN constant of its dtype, and modules whose inline PTX depends on the 16-bit
# dtype.
OF_ONE_DTYPE = {"decode_combine", "sm90.bwd", "sm90.bwd_dq_parts"}

WITHOUT_PRODUCTS = ("backward_delta", "backward_delta_fallback", "decode_combine", *MASK_KERNELS)


@dataclasses.dataclass(frozen=True)
class Variant:
    kernel: str
    arch: Arch
    dtype: str  # "any" for mask kernels
    qk_dim: int  # 0 for mask kernels
    v_dim: int
    constants: tuple[tuple[str, int], ...]
    block: int  # rows or keys of one program
    warps: int
    assembler: str = ""  # "": the architecture's
    registers: int = 0  # maximum per thread; 0: the assembler's choice

    def __post_init__(self) -> None:
        if not self.assembler:
            object.__setattr__(self, "assembler", self.arch.assembler)

    @property
    def name(self) -> str:
        shape = "" if self.dtype == "any" else f"_{self.dtype}_{self.qk_dim}x{self.v_dim}"
        arch = self.arch.name.replace("_", "")
        return f"{self.kernel}{shape}_{arch}" + (
            "" if self.assembler == self.arch.assembler else "_cuda13"
        )

    @property
    def dim(self) -> int:
        return max(self.qk_dim, self.v_dim)

    @property
    def row(self) -> Dims:
        """The key for its head dims in tiles_sm90.py and spills.py."""
        return row_of(self.qk_dim, self.v_dim) if self.arch.tiles == "hopper" else self.dim

    @property
    def source(self) -> str:
        """The module in csrc/kernels."""
        if (self.arch.tiles, self.qk_dim, self.v_dim) in SM80_FORWARD.get(self.kernel, ()):
            return "sm80.fwd"
        return KERNELS[self.kernel]

    @property
    def spills(self) -> int:
        """Bytes of spills that SPILLS accepts."""
        key = (self.kernel, self.row)
        return SPILLS.get((*key, self.dtype) if self.dtype in FLOAT32 else key, 0)

    @property
    def shared(self) -> int:
        """Maximum bytes of shared memory per block on all GPUs that run it."""
        shared = (
            self.dtype in (*FLOAT32, FP8)
            or self.kernel in SHARED_TILES
            or only_fallback((self.qk_dim, self.v_dim))
        )
        served = served_by(self.arch) if shared else [self.arch]
        if self.dtype != FP8 and self.kernel in TILES | SHARED_TILES | DECODE_TILES:
            key = self.kernel, self.dtype, self.qk_dim, self.v_dim
            served = [arch for arch in served if tile_of(arch, *key) == tile_of(self.arch, *key)]
        return min(arch.shared for arch in served)

    @property
    def driver(self) -> int:
        """The oldest driver that loads it, in CUDA's numbering."""
        return max(ASSEMBLERS[self.assembler][1], self.arch.driver)

    @property
    def without_tcgen05(self) -> bool:
        """Whether it has no tcgen05 products, which only 10.x has and which need at least 64
        rows."""
        return self.kernel in WITHOUT_PRODUCTS or self.block < 64

    @property
    def ptx_arch(self) -> Arch:
        """The architecture whose PTX it is assembled from."""
        if self.dtype == "f32" and self.arch.cc in (100, 120):
            return exact(self.arch)  # from 8.0's PTX, it would spill 400 bytes
        if dict(self.constants).get("NATIVE_FP8"):
            return exact(self.arch)
        if self.arch.tiles == "blackwell" and self.without_tcgen05:
            return ARCHS["80"]
        return ARCHS[self.arch.ptx] if self.arch.ptx else self.arch

    @property
    def ptx_dtype(self) -> str:
        """The dtype whose PTX it is assembled from. float16 uses the PTX of bfloat16 with the name
        of the type replaced, unless more than the name differs (OF_ONE_DTYPE)."""
        one_dtype = {self.kernel, self.source} & OF_ONE_DTYPE
        return "bf16" if self.dtype == "f16" and not one_dtype else self.dtype

    @property
    def ptx(self) -> tuple:
        """Variants with equal keys are assembled from the same PTX."""
        options = self.ptx_dtype, self.qk_dim, self.v_dim, self.constants, self.warps
        return (self.registers, self.kernel, self.source, self.ptx_arch.name, *options)


def only_fallback(head_dims: tuple[int, int]) -> bool:
    """Whether plain calls with these head dims use the fallback kernels, too."""
    return max(head_dims) > max(dim for _, dim in PORTABLE_TILES["forward"])


def tile_of(
    arch: Arch, kernel: str, dtype: str, qk_dim: int, v_dim: int
) -> tuple[int, int, int, int]:
    dim = max(qk_dim, v_dim)
    decodes = kernel in DECODE_TILES
    if kernel in SHARED_TILES:
        tiles = SHARED_TILES[kernel]
        return tiles.get((dtype, dim)) or tiles[arch.tiles, dim]
    if dtype in FLOAT32:
        float32_tiles = FLOAT32_DECODE_TILES if decodes else FLOAT32_TILES
        return float32_tiles.get(f"{dtype} {arch.tiles}", float32_tiles[dtype])[kernel][dim]
    if (arch.tiles, qk_dim, v_dim) in SM80_FORWARD.get(kernel, ()):
        return SM80_FORWARD[kernel][arch.tiles, qk_dim, v_dim]
    rows = (DECODE_TILES if decodes else TILES)[kernel]
    if (arch.tiles, dim) not in rows:
        name = "DECODE" if decodes else "FALLBACK" if kernel in FALLBACK_TILES else "PORTABLE"
        row = f'("{arch.tiles}", {dim}) of {name}_TILES["{kernel}"]'
        if arch.tiles not in {kind for kind, _ in rows}:
            row = f'("{arch.tiles}", {qk_dim}, {v_dim}) of FORWARD["{kernel}"] in tiles_sm80.py'
        raise LookupError(f"{kernel} has no tile for head dims {qk_dim}/{v_dim}: add the row {row}")
    return rows[arch.tiles, dim]


def tiled(kernel: str, arch: Arch, dtype: str, qk_dim: int, v_dim: int) -> Variant:
    decodes = kernel in DECODE_TILES
    of_sm80 = (arch.tiles, qk_dim, v_dim) in SM80_FORWARD.get(kernel, ())
    third = "ROW_WARPS" if of_sm80 and dtype not in FLOAT32 else "STAGES"
    rows, keys, n, warps = tile_of(arch, kernel, dtype, qk_dim, v_dim)
    constants = {"QK_DIM": qk_dim, "V_DIM": v_dim, "BLOCK_M": rows, "BLOCK_N": keys, third: n}
    if kernel in FALLBACK_TILES or kernel in SHARED_TILES or decodes:
        constants["FLOAT32_PRODUCTS"] = int(dtype == "f32")
    if decodes:
        kind = "float32" if dtype in FLOAT32 else arch.tiles
        constants["V_PARTS"] = value_parts(kernel, kind, v_dim, rows)
    block = keys if kernel.startswith("backward_dkdv") else rows
    return Variant(kernel, arch, dtype, qk_dim, v_dim, tuple(constants.items()), block, warps)


def of_each_tile(
    kernel: str, archs: tuple[str, ...], dtype: str, qk_dim: int, v_dim: int
) -> Iterator[Variant]:
    """One variant for all architectures that can run it and have the same tile."""
    for arch in one_set(archs, lambda arch: tile_of(arch, kernel, dtype, qk_dim, v_dim)):
        yield tiled(kernel, arch, dtype, qk_dim, v_dim)


def fp8_decoding(
    archs: tuple[str, ...], dtypes: tuple[str, ...], head_dims: tuple[tuple[int, int], ...]
) -> Iterator[Variant]:
    for arch in one_set(archs):
        for dims in FP8_DIMS:
            for kernel, tiles in FP8_DECODE_TILES.items():
                tile = tiles.get((arch.tiles, max(dims)))
                if tile and dims in head_dims:
                    rows, keys, stages, warps = tile
                    constants = {
                        "QK_DIM": dims[0],
                        "V_DIM": dims[1],
                        "BLOCK_M": rows,
                        "BLOCK_N": keys,
                        "STAGES": stages,
                        "FLOAT32_PRODUCTS": 0,
                        "NATIVE_FP8": int(arch.tiles in NATIVE_FP8),
                        "PAGED": int(kernel.endswith("_pages")),
                        "V_PARTS": 1,
                    }
                    yield Variant(kernel, arch, FP8, *dims, tuple(constants.items()), rows, warps)
    # Queries may have either 16-bit dtype. One that is in `dtypes` has this kernel anyway.
    others = [dtype for dtype in DTYPES if dtype not in dtypes]
    for name, dtype, dims in itertools.product(archs, others, FP8_DIMS):
        if dims in head_dims:
            yield merging(find_arch(name), dtype, *dims)


def fallback_alone(
    archs: tuple[str, ...], dtypes: tuple[str, ...], head_dims: tuple[tuple[int, int], ...]
) -> Iterator[Variant]:
    """The 16-bit kernels for head dims that only fallback kernels support. As with float32, one
    variant serves several architectures."""
    for dtype in dtypes:
        for dims in filter(only_fallback, head_dims):
            for kernel in (*FALLBACK_TILES, "decode"):
                yield from of_each_tile(kernel, archs, dtype, *dims)
            for arch in one_set(archs):
                yield delta("backward_delta_fallback", arch, dtype, *dims)
                yield merging(arch, dtype, *dims)


def float32(
    archs: tuple[str, ...], dtypes: tuple[str, ...], head_dims: tuple[tuple[int, int], ...]
) -> Iterator[Variant]:
    for arch in one_set(archs):
        for dims in FLOAT32_DIMS:
            if dims not in head_dims:
                continue
            for dtype in FLOAT32:
                if dtype in dtypes:
                    for kernel in (*FALLBACK_TILES, *FLOAT32_DECODE_TILES[dtype]):
                        yield tiled(kernel, arch, dtype, *dims)
            if "f32" in dtypes or "tf32" in dtypes:  # these kernels have no products
                yield delta("backward_delta_fallback", arch, "f32", *dims)
                yield merging(arch, "f32", *dims)


def delta(kernel: str, arch: Arch, dtype: str, qk_dim: int, v_dim: int) -> Variant:
    constants = (("V_DIM", v_dim), ("ROWS", DELTA_ROWS))
    return Variant(kernel, arch, dtype, qk_dim, v_dim, constants, DELTA_ROWS, 4)


def with_bias(
    archs: tuple[str, ...], dtypes: tuple[str, ...], head_dims: tuple[tuple[int, int], ...]
) -> Iterator[Variant]:
    """Kernels with a bias array and dropout."""
    for dtype in dtypes:
        for dims in BIAS_DIMS[dtype]:
            if dims in head_dims:
                for kernel in BIAS_TILES:
                    yield from of_each_tile(kernel, archs, dtype, *dims)


def of_tangents(
    archs: tuple[str, ...], dtypes: tuple[str, ...], head_dims: tuple[tuple[int, int], ...]
) -> Iterator[Variant]:
    for kernel, tiles in TANGENT_TILES.items():
        for dtype, dims in itertools.product(dtypes, TANGENT_DIMS[kernel]):
            if dims in head_dims and (dtype in DTYPES or (dtype, dims[0]) in tiles):
                yield from of_each_tile(kernel, archs, dtype, *dims)


def with_bias_alone(
    archs: tuple[str, ...], dtypes: tuple[str, ...], head_dims: tuple[tuple[int, int], ...]
) -> Iterator[Variant]:
    for arch in (arch for arch in map(find_arch, archs) if arch.tiles == "hopper"):
        for kernel, tiles in BIAS_ALONE_TILES.items():
            for dtype, dim in itertools.product(dtypes, tiles):
                if (dim, dim) in head_dims:
                    rows, keys, stages, warps, registers = tiles[dim]
                    constants = {
                        "QK_DIM": dim,
                        "V_DIM": dim,
                        "BLOCK_M": rows,
                        "BLOCK_N": keys,
                        "STAGES": stages,
                        "FLOAT32_PRODUCTS": 0,
                    }
                    if kernel == "backward_dq_of_dbias_alone":
                        del constants["V_DIM"]  # it does not read values
                    block = keys if kernel.startswith("backward_dkdv") else rows
                    named = tuple(constants.items())
                    yield Variant(
                        kernel, arch, dtype, dim, dim, named, block, warps, registers=registers
                    )


def merging(arch: Arch, dtype: str, qk_dim: int, v_dim: int) -> Variant:
    constants = (("V_DIM", v_dim), ("SPLITS", DECODE_SPLITS), ("STEP", DECODE_STEP))
    return Variant("decode_combine", arch, dtype, qk_dim, v_dim, constants, DECODE_SPLITS, 4)


def assembled_twice(kernel: str, row: Dims) -> bool:
    return kernel in TWO_ASSEMBLERS and (kernel, row) not in ONE_ASSEMBLER


def sm90(
    kernel: str, arch: Arch, dtype: str, qk_dim: int, v_dim: int, assembler: str = "12.9"
) -> Variant:
    row = row_of(qk_dim, v_dim)
    tile = SM90_TILES[kernel][row]
    if assembler == "12.9":
        tile = tile | UNDER_12_9.get((kernel, row), {})
    constants = {"QK_DIM": qk_dim, "V_DIM": v_dim, **tile}
    registers = constants.pop("REGISTERS", 0)
    if "QK_CHUNK" in tile and "V_CHUNK" not in tile:  # Gluon's tiles are powers of two
        constants["V_CHUNK"] = min(v_dim & -v_dim, 256)
    if kernel == "backward_postprocess":
        del constants["V_DIM"]
    if kernel == "backward_sum_dbias":
        del constants["QK_DIM"], constants["V_DIM"]
    # rows per program; keys for kernels of dK and dV
    block = {
        **dict.fromkeys(("forward_sm90", "ragged_sm90"), 64 * tile.get("WARP_GROUPS", 0)),
        "forward_tangent_sm90": 128,
        "backward_dq_sm90": 128,
        **dict.fromkeys(("backward_shared_dbias", "backward_shared_float32_dbias"), 64),
        "backward_sum_dbias": tile.get("ELEMENTS", 0),
        "backward_dq_sm90_parts": 64,
    }
    return Variant(
        kernel,
        arch,
        dtype,
        qk_dim,
        v_dim,
        tuple(constants.items()),
        block.get(LIKE_PLAIN.get(kernel, kernel), tile.get("KEYS") or tile.get("ROWS", 0)),
        4,  # warps of the default partition; other partitions add theirs
        assembler,
        registers,
    )


# The kernels that the lowering and C++ look up if there are no Hopper kernels.
SM80_KERNELS = ("backward_preprocess", "backward_sm80", "backward_postprocess_sm80")
SM80_SOFT_CAP = ("forward_sm80_soft_cap", "backward_sm80_soft_cap")


def sm80_backward(arch: Arch, dtype: str, qk_dim: int, v_dim: int) -> Iterator[Variant]:
    """The kernels of a backward that accumulates dQ in memory, for GPUs other than Hopper."""
    row = (arch.tiles, qk_dim, v_dim)
    tile = dict(SM80_BACKWARD[row])
    warps = tile.pop("WARPS")
    rows, keys = tile["BLOCK_M"], tile["BLOCK_N"]
    dims = {"QK_DIM": qk_dim, "V_DIM": v_dim}

    def variant(kernel: str, block: int, warps: int, **constants: int) -> Variant:
        return Variant(kernel, arch, dtype, qk_dim, v_dim, tuple(constants.items()), block, warps)

    capped = ("backward_sm80_soft_cap",) if row in SM80_SOFT_CAP_BACKWARD else ()
    for kernel in ("backward_sm80", *capped):
        yield variant(kernel, keys, warps, **dims, **tile)
    summed = {"QK_DIM": qk_dim, "ROWS": rows, "DQ_WARPS": tile["DQ_WARPS"]}
    yield variant("backward_postprocess_sm80", rows, warps, **summed)
    yield variant(
        "backward_preprocess", PREPROCESS_ROWS, 4, V_DIM=v_dim, QK_DIM=qk_dim, ROWS=PREPROCESS_ROWS
    )


def sm80(arch: Arch, dtype: str, qk_dim: int, v_dim: int) -> Iterator[Variant]:
    """The kernels that exist only for GPUs with rows in tiles_sm80.py."""
    row = (arch.tiles, qk_dim, v_dim)
    if row in SM80_BACKWARD:
        yield from sm80_backward(arch, dtype, qk_dim, v_dim)
    plain = ("forward",) if (qk_dim, v_dim) in SM80_DIMS else ()
    for kernel in (*plain, "forward_sm80_soft_cap"):
        if row in SM80_FORWARD[kernel]:
            yield tiled(kernel, arch, dtype, qk_dim, v_dim)


def variants(
    archs: tuple[str, ...] = tuple(ARCHS),
    dtypes: tuple[str, ...] = ALL_DTYPES,
    head_dims: tuple[tuple[int, int], ...] = ALL_DIMS,
) -> Iterator[Variant]:
    """All variants of the narrowed table, slowest to compile first."""
    if FP8 in dtypes:
        yield from fp8_decoding(archs, dtypes, head_dims)
    dtypes = tuple(dtype for dtype in dtypes if dtype != FP8)
    yield from float32(archs, dtypes, head_dims)
    yield from with_bias(archs, dtypes, head_dims)
    yield from of_tangents(archs, dtypes, head_dims)
    dtypes = tuple(dtype for dtype in dtypes if dtype in DTYPES)
    yield from with_bias_alone(archs, dtypes, head_dims)
    yield from fallback_alone(archs, dtypes, head_dims)
    for name, dtype, dims in itertools.product(archs, dtypes, head_dims):
        yield from sm80(find_arch(name), dtype, *dims)
    for arch in archs:
        if find_arch(arch).tiles != "hopper":
            continue
        for kernel, tiles in SM90_TILES.items():
            built = [dims for dims in head_dims if row_of(*dims) in tiles]  # else portable kernels
            for assembler, dtype, dims in itertools.product(ASSEMBLERS, dtypes, built):
                if assembler == "12.9" or assembled_twice(kernel, row_of(*dims)):
                    yield sm90(kernel, find_arch(arch), dtype, *dims, assembler)
    general = [dims for dims in HEAD_DIMS if not only_fallback(dims)]
    head_dims = tuple(dims for dims in head_dims if dims in general)
    for kernel in TILES:
        for arch in archs:
            for dtype in dtypes:
                for qk_dim, v_dim in head_dims:
                    yield tiled(kernel, find_arch(arch), dtype, qk_dim, v_dim)
    for arch in archs:
        for dtype in dtypes:
            for qk_dim, v_dim in head_dims:
                for kernel in DECODE_TILES:
                    yield tiled(kernel, find_arch(arch), dtype, qk_dim, v_dim)
                yield merging(find_arch(arch), dtype, qk_dim, v_dim)
    for arch in archs:
        for dtype in dtypes:
            for qk_dim, v_dim in head_dims:
                for kernel in ("backward_delta", "backward_delta_fallback"):
                    yield delta(kernel, find_arch(arch), dtype, qk_dim, v_dim)
        for kernel, (named, block, warps) in MASK_KERNELS.items():
            yield Variant(kernel, find_arch(arch), "any", 0, 0, tuple(named.items()), block, warps)
