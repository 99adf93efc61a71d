"""Random FFI calls: a valid call with random changes of its sizes, dtypes and attributes."""

from __future__ import annotations

import random
from dataclasses import replace

from cpp.call_frame import DTYPES, Array
from cpp.calls import CALLS, Call, Sizes
from cpp.machine import SPEC, Machine

if SPEC:
    from packax import _ext

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 300, 700, 4096)
NEAR_LIMITS = (
    *(0, 65_535, 65_536, 65_537, (1 << 27) + 1, (1 << 29) - 1, 1 << 29, (1 << 29) + 1),
    *((1 << 31) - 65, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, 1 << 32, (1 << 32) + 1),
    *((1 << 62), (1 << 63) - 1),
)
NUMBERS = (0, 1, 2, 3, 4, 7, 8, 64, -1, (1 << 31) - 1, -(1 << 31))
FLOATS = (0.0, 1.0, -1.0, 30.0, 1e-40, 1e38, float("inf"), float("nan"))
FORWARDS = [r for r in _ext.variants() if r["kernel"] == "forward"] if SPEC else []
WORDS = ("portable", "sm90_fused", "sm90_separate", "", "other", "sm90_fused\0")


def sizes(rng: random.Random) -> Sizes:
    batch, kv_heads = rng.choice((0, 1, 2, 3)), rng.choice((1, 2, 8))
    return Sizes(
        batch=batch,
        mask_batch=rng.choice((1, max(batch, 1))),
        q_len=rng.choice(LENGTHS),
        kv_len=rng.choice(LENGTHS),
        heads=kv_heads * rng.choice((1, 3, 8)),
        kv_heads=kv_heads,
    )


def changed_array(rng: random.Random, array: Array) -> Array:
    shape = list(array.shape)
    what = rng.random()
    if what < 0.15:
        return replace(array, dtype=rng.choice(list(DTYPES)))
    if what < 0.25:
        return replace(array, shape=(0,))
    if what < 0.35 and shape:
        shape.pop(rng.randrange(len(shape)))
    elif what < 0.45:
        shape.insert(rng.randint(0, len(shape)), rng.choice((1, 2)))
    elif shape:
        at = rng.randrange(len(shape))
        near = (shape[at] + 1, max(shape[at] - 1, 0), 2 * shape[at])
        shape[at] = rng.choice((*near, *NEAR_LIMITS))
    return replace(array, shape=tuple(shape))


def random_call(rng: random.Random, machine: Machine) -> Call:
    """A valid call with up to three changes. Sometimes one size is also changed in all arrays."""
    machine = replace(machine, variant=rng.choice(FORWARDS))
    call = CALLS[rng.choice(list(CALLS))](machine, sizes(rng))
    arrays = call.arrays()
    if rng.random() < 0.4:  # one size in all arrays
        old = rng.choice([n for a in arrays.values() for n in a.shape] or [0])
        new = rng.choice((*LENGTHS, *NEAR_LIMITS))
        call = call.change(
            **{
                name: replace(a, shape=tuple(new if n == old else n for n in a.shape))
                for name, a in arrays.items()
            }
        )
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        if rng.random() < 0.4 and call.attributes:
            name = rng.choice(list(call.attributes))
            dtype, _ = call.attributes[name]
            pool = {"float32": FLOATS, "string": WORDS}.get(dtype, NUMBERS)
            call = call.change(**{name: (dtype, rng.choice(pool))})
        else:
            name = rng.choice(list(arrays))
            now = call.arrays()[name]
            call = call.change(**{name: changed_array(rng, now)})
    return call
