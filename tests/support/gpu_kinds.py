"""The dtypes, head dims and masks that the GPU tests share."""

import itertools

import numpy as np
import packax
from gpu_runs import packed

DTYPES = ("bfloat16", "float16")
# (head dim of query and key, head dim of value)
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))
WIDE = DIMS[2:]
# Each wide pair has one dtype here: the other differs only in the type of a load, and
# test_wide_cases covers both.
KINDS = [(dtype, dims) for dims in DIMS[:2] for dtype in DTYPES] + list(
    zip(itertools.cycle(DTYPES), WIDE, strict=False)
)


def name_of(kind):
    dtype, (qk_dim, v_dim) = kind
    return f"{dtype}-d{qk_dim}" + (f"x{v_dim}" if v_dim != qk_dim else "")


def causal_documents(ids, **more):
    return packax.causal() & packax.documents(ids, **more)


THREE_ROWS = np.stack(
    [packed(300, 1, -40, 129, -30), packed(500), packed(-7, 64, 64, 200, -100, 65)]
)
