"""The architectures that kernels are compiled for, and the assemblers: rows of the table
(table.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

# Bytes of shared memory: of Hopper's multiprocessor, of its largest block, of each block's own.
HOPPER, LARGEST, RESERVED = 233_472, 232_448, 1024


@dataclasses.dataclass(frozen=True)
class Arch:
    """A compilation target.

    `arch_specific`: its cubins run on that compute capability alone, else on later minors of the
    same major too.
    """

    name: str
    cc: int
    arch_specific: bool
    shared: int  # bytes of shared memory that one block may ask for
    tiles: str  # column of TILES
    ptx: str = ""  # the row of ARCHS whose PTX it is assembled from, if not its own
    driver: int = 12000  # the oldest that loads such cubins, as CUDA numbers them
    assembler: str = "12.9"  # of ASSEMBLERS
    ptx_isa: int = 0  # the version of PTX that first had it, where that matters: 90 is 9.0
    multiprocessor: int = 0  # of a proxy: bytes of shared memory of the other GPU's multiprocessor

    def asked(self, used: int) -> int:
        """Bytes of shared memory that a launch asks for. Of a proxy more than are used, so that as
        many blocks fit a multiprocessor as on the other GPU."""
        if not self.multiprocessor:
            return used
        blocks = min(max(self.multiprocessor // (used + RESERVED), 1), 8)
        return max(used, min(LARGEST, HOPPER // blocks - RESERVED))


# docs/guide/gpus.md says which GPUs take which. Binary code of one minor runs on later ones of the
# same major, but not on Tegra's (8.7, Orin; 11.0, Thor): 8.9 runs that of 8.6, which is what the
# assembler would make for it. Families (f) are loaded by drivers of CUDA 12.9 and newer, so the
# arch-specific ones (a) stay for older drivers. 8.x, 11.0 and 12.x multiply with the same
# instructions (mma.sync): their kernels of one tile share the PTX of 8.0, from which the assembler
# makes as good code as from their own, of float32 aside (docs/experiments.md).
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

# What no wheel holds and PACKAX_ARCHS has to name: the PTX of another GPU, assembled for Hopper
# with the tiles and the shared memory of that GPU. It shows on a Hopper card how good kernels of
# mma.sync and cp.async are (docs/internals/proxy.md).
PROXIES = {
    "80@90": Arch("sm_90", 90, False, 166_912, "ampere", ptx="80", multiprocessor=167_936),
    "86@90": Arch("sm_90", 90, False, 101_376, "small", ptx="80", multiprocessor=102_400),
}

# The Triton wheel brings two assemblers. Cubins of 12.9 load with every driver of CUDA 12 and 13
# that knows the GPU; those of 13.4 were seen to load on driver 580 (CUDA 13.0) and are promised for
# no older one.
ASSEMBLERS = {"12.9": ("ptxas", 12000), "13.4": ("ptxas-blackwell", 13000)}


def find_arch(name: str) -> Arch:
    return ARCHS[name] if name in ARCHS else PROXIES[name]


def exact(arch: Arch) -> Arch:
    """The arch-specific architecture of which a family's cubins are made; of others, itself."""
    return ARCHS[arch.name[3:-1] + "a"] if arch.name.endswith("f") else arch


def served_by(arch: Arch) -> list[Arch]:
    """The architectures whose GPUs can run a cubin of this one, it first."""
    if arch.arch_specific:
        return [arch]
    later = (a for a in ARCHS.values() if a.cc // 10 == arch.cc // 10 and a.cc > arch.cc)
    return [arch, *(a for a in later if not a.arch_specific)]


def one_set(
    archs: tuple[str, ...], tile_of: Callable[[Arch], Any] = lambda _arch: None
) -> list[Arch]:
    """One architecture for every group of them that can run the same cubin and have one tile."""
    asked = [find_arch(name) for name in archs]

    def served(arch: Arch, other: Arch) -> bool:
        return arch in served_by(other)[1:] and tile_of(arch) == tile_of(other)

    return [arch for arch in asked if not any(served(arch, other) for other in asked)]
