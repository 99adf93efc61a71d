"""Tiles of the kernels of mma.sync and cp.async, in Gluon, for GPUs of compute capability 8.x, 11.0
and 12.x: rows of the table (table.py)."""

from __future__ import annotations

# The fastest of those tried on an H100 by proxy (docs/internals/proxy.md), but for "small" at 192
# and 256, which were not timed.

# (kind, larger head dim) -> BLOCK_M, BLOCK_N, STAGES (one buffer each of keys and values), warps:
# rows whose forward is sm80/fwd.py. At 64 the compiler of portable/fwd.py does as well.
FORWARD = {
    ("ampere", 128): (128, 32, 1, 4),
    ("ampere", 192): (128, 32, 1, 4),
    ("ampere", 256): (128, 64, 1, 8),
    ("small", 128): (128, 32, 1, 4),
    ("small", 192): (64, 32, 1, 4),
    ("small", 256): (128, 32, 1, 8),
}

# (kind, larger head dim) -> BLOCK_M, BLOCK_N, STAGES of rows, warps, and of these how many share
# the rows of a tile of dQ. One kernel makes all gradients, and adds dQ up in memory; where there is
# no row, and for deterministic gradients, the portable kernels do.
BACKWARD = {
    ("ampere", 64): (64, 64, 2, 4, 2),
    ("ampere", 128): (64, 128, 2, 8, 4),
    ("ampere", 256): (32, 64, 2, 8, 4),
    ("small", 64): (64, 128, 2, 8, 2),
    ("small", 128): (32, 64, 2, 4, 2),
}
