"""The architectures for which kernels are compiled, and the assemblers: rows of the table
(table.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

# Bytes of shared memory on Hopper: per multiprocessor, maximum per block, and reserved per block.
HOPPER, LARGEST, RESERVED = 233_472, 232_448, 1024


@dataclasses.dataclass(frozen=True)
class Arch:
    """A compilation target.

    `arch_specific`: its cubins run only on this compute capability. Otherwise they also run on
    later minor versions of the same major one.
    """

    name: str
    cc: int
    arch_specific: bool
    shared: int  # maximum bytes of shared memory per block
    tiles: str  # kind of tile, in the keys of TILES
    ptx: str = ""  # key in ARCHS of the architecture whose PTX it uses, if not its own
    driver: int = 12000  # oldest driver that loads such cubins, in CUDA's numbering
    assembler: str = "12.9"  # key in ASSEMBLERS
    ptx_isa: int = 0  # minimum PTX version, if newer than the default: 90 is 9.0
    multiprocessor: int = 0  # of a proxy: shared memory of the emulated GPU's multiprocessor

    def asked(self, used: int) -> int:
        """Bytes of shared memory that a launch requests. A proxy requests more than it uses, so
        that as many blocks fit on a multiprocessor as on the emulated GPU."""
        if not self.multiprocessor:
            return used
        blocks = min(max(self.multiprocessor // (used + RESERVED), 1), 8)
        return max(used, min(LARGEST, HOPPER // blocks - RESERVED))


# docs/guide/gpus.md lists which GPU uses which architecture. A cubin for one minor version also
# runs on later minor versions of the same major one, but not on Tegra GPUs (8.7, Orin; 11.0, Thor).
# 8.9 uses the cubins of 8.6, which equal what the assembler generates for 8.9. Family cubins (f)
# need a driver of CUDA 12.9 or newer, so the arch-specific ones (a) remain for older drivers. 8.x,
# 11.0 and 12.x have the same matrix instructions (mma.sync): their kernels with the same tile share
# the PTX of 8.0. The assembler generates code from it that is as good as from their own PTX, except
# for float32 (docs/experiments.md).
ARCHS = {
    "80": Arch("sm_80", 80, False, 166_912, "ampere"),
    "86": Arch("sm_86", 86, False, 101_376, "small", ptx="80"),
    "87": Arch("sm_87", 87, True, 166_912, "ampere", ptx="80"),
    "90a": Arch("sm_90a", 90, True, 232_448, "hopper"),
    "100a": Arch("sm_100a", 100, True, 232_448, "blackwell"),
    "100f": Arch("sm_100f", 100, False, 232_448, "blackwell", ptx="100a", driver=12090),
    "110": Arch("sm_110", 110, False, 232_448, "ampere", "80", 13000, "13.4", ptx_isa=90),
    "120a": Arch("sm_120a", 120, True, 101_376, "small", ptx="80"),
    "120f": Arch("sm_120f", 120, False, 101_376, "small", ptx="80", driver=12090),
}

# Architectures that are in no wheel and must be named in PACKAX_ARCHS: the PTX of another GPU,
# assembled for Hopper with the tiles and shared memory of that GPU. On a Hopper GPU, they show how
# good the kernels with mma.sync and cp.async are (docs/internals/proxy.md).
PROXIES = {
    "80@90": Arch("sm_90", 90, False, 166_912, "ampere", ptx="80", multiprocessor=167_936),
    "86@90": Arch("sm_90", 90, False, 101_376, "small", ptx="80", multiprocessor=102_400),
}

# The Triton wheel contains two assemblers. Cubins of 12.9 load with every driver of CUDA 12 and 13
# that supports the GPU. Cubins of 13.4 loaded with driver 580 (CUDA 13.0) in tests, and are not
# guaranteed to load with an older one.
ASSEMBLERS = {"12.9": ("ptxas", 12000), "13.4": ("ptxas-blackwell", 13000)}


def find_arch(name: str) -> Arch:
    return ARCHS[name] if name in ARCHS else PROXIES[name]


def exact(arch: Arch) -> Arch:
    """The arch-specific architecture whose cubins are converted to a family's; for others,
    itself."""
    return ARCHS[arch.name[3:-1] + "a"] if arch.name.endswith("f") else arch


def served_by(arch: Arch) -> list[Arch]:
    """The architectures whose GPUs can run a cubin of this one, starting with itself."""
    if arch.arch_specific:
        return [arch]
    later = (a for a in ARCHS.values() if a.cc // 10 == arch.cc // 10 and a.cc > arch.cc)
    return [arch, *(a for a in later if not a.arch_specific)]


def one_set(
    archs: tuple[str, ...], tile_of: Callable[[Arch], Any] = lambda _arch: None
) -> list[Arch]:
    """`archs` without those that can run the cubin of another one with the same tile."""
    asked = [find_arch(name) for name in archs]

    def served(arch: Arch, other: Arch) -> bool:
        return arch in served_by(other)[1:] and tile_of(arch) == tile_of(other)

    return [arch for arch in asked if not any(served(arch, other) for other in asked)]
