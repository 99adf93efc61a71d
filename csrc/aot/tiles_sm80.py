"""Tiles of the kernels of mma.sync and cp.async, in Gluon, for GPUs of compute capability 8.x, 11.0
and 12.x: rows of the table (table.py)."""

from __future__ import annotations

# Head dims that have no other kernels, and only these GPUs: on others such calls are padded.
DIMS = ((96, 96), (192, 192))

# The fastest of those tried on an H100 or H200 by proxy (docs/internals/proxy.md). Of soft caps, no
# other tiles were timed.

# kernel -> (kind, head dims of query and value) -> BLOCK_M, BLOCK_N, STAGES (one buffer each of
# keys and values), warps: rows whose forward is sm80/fwd.py. At 64 the compiler of portable/fwd.py
# does as well.
FORWARD = {
    "forward": {
        ("ampere", 96, 96): (128, 64, 1, 4),
        ("ampere", 128, 128): (128, 32, 1, 4),
        ("ampere", 192, 128): (128, 32, 1, 4),
        ("ampere", 192, 192): (128, 128, 1, 8),
        ("ampere", 256, 256): (128, 64, 1, 8),
        ("small", 96, 96): (128, 64, 1, 4),
        ("small", 128, 128): (128, 32, 1, 4),
        ("small", 192, 128): (64, 32, 1, 4),
        ("small", 192, 192): (128, 64, 1, 8),
        ("small", 256, 256): (128, 32, 1, 8),
    }
}

# (kind, head dims) -> BLOCK_M, BLOCK_N, STAGES of rows, warps, and of these how many share the rows
# of a tile of dQ. One kernel makes all gradients, and adds dQ up in memory; where there is no row,
# and for deterministic gradients, the portable kernels do.
BACKWARD = {
    ("ampere", 64, 64): (64, 64, 2, 4, 2),
    ("ampere", 96, 96): (64, 128, 2, 8, 2),
    ("ampere", 128, 128): (64, 128, 2, 8, 4),
    ("ampere", 192, 128): (64, 64, 2, 8, 4),
    ("ampere", 192, 192): (32, 128, 2, 8, 4),
    ("ampere", 256, 256): (64, 64, 1, 8, 4),
    ("small", 64, 64): (64, 128, 2, 8, 2),
    ("small", 96, 96): (64, 64, 2, 4, 2),
    ("small", 128, 128): (32, 64, 2, 4, 2),
    ("small", 192, 128): (32, 64, 2, 8, 4),
    ("small", 192, 192): (32, 64, 1, 8, 4),
    ("small", 256, 256): (32, 32, 1, 4, 4),
}

# With a soft cap and nothing else: the same tiles, of the head dims that models with it have.
_CAPPED = ((64, 64), (128, 128), (256, 256))
FORWARD["forward_sm80_soft_cap"] = {
    (kind, *dims): FORWARD["forward"].get((kind, *dims), (128, 64, 1, 4))
    for kind in ("ampere", "small")
    for dims in _CAPPED
}
SOFT_CAP_BACKWARD = {row for row in BACKWARD if row[1:] in _CAPPED}


def absent_arguments(kernel: str) -> tuple[str, ...]:
    """Arguments of a function of csrc/kernels/sm80 that are None in the kernel; of the plain
    forward tiles_fallback.py says it."""
    return ("soft_cap",) if kernel == "backward_sm80" else ()
