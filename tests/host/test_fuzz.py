"""FFI calls made up at random, on every capability and drivers of five versions: none crashes.

Shapes, dtypes and attributes of a good call are changed, sizes to near 2^31 among others. A handler
answers with an error that has a code and a text, or launches; what *initialize* refuses is never
launched. More of them:

    PACKAX_FUZZ_CALLS=200000 python -m pytest tests/host/test_fuzz.py
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace

import pytest
from cpp.call_frame import CODES, DTYPES, EXECUTE, INITIALIZE, Array, Xla
from cpp.calls import CALLS, Call, Sizes
from cpp.machine import SPEC, Machine, make_machine, needs_compiler, needs_extension

if SPEC:
    from packax import _ext

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

CALLS_IN_ALL = int(os.environ.get("PACKAX_FUZZ_CALLS", "800"))
CAPABILITIES = ((75, 80, 86, 87), (89, 90, 100, 103), (110, 120, 121, 90))
DRIVERS = (12000, 12040, 12080, 12090, 13000)
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


def made_up(rng: random.Random, machine: Machine) -> Call:
    """A good call with up to three changes; a length changed everywhere, too."""
    machine = replace(machine, variant=rng.choice(FORWARDS))
    call = CALLS[rng.choice(list(CALLS))](machine, sizes(rng))
    arrays = {**call.operands, **call.results}
    if rng.random() < 0.4:  # one size, wherever it occurs
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
            now = {**call.operands, **call.results}[name]
            call = call.change(**{name: changed_array(rng, now)})
    return call


def check(machine: Machine, call: Call, stage: int) -> bool:
    """Whether it was accepted."""
    failure = machine.run(call, stage)
    assert failure is None or (failure.code in CODES.values() and failure.message), (call, failure)
    return failure is None


def run(machine: Machine, seed: int, count: int) -> int:
    rng, accepted = random.Random(seed), 0
    for _ in range(count):
        call = made_up(rng, machine)
        machine.cuda.fake_set_current(rng.randrange(4))
        machine.cuda.fake_clear()
        initialized = check(machine, call, INITIALIZE)
        if not initialized:
            assert machine.launches() == [], call
        executed = check(machine, call, EXECUTE)
        if not executed:
            assert not initialized, ("accepted first, and then refused", call)
            assert machine.launches() == [], call
        accepted += executed
    return accepted


@pytest.mark.parametrize("driver_version", DRIVERS)
@pytest.mark.parametrize("capabilities", CAPABILITIES)
def test_calls_made_up(tmp_path, driver, capabilities, driver_version):
    machine = make_machine(tmp_path, driver, ccs=capabilities)
    machine.cuda.fake_set_version(driver_version)
    seed = 1000 * CAPABILITIES.index(capabilities) + driver_version
    count = CALLS_IN_ALL // (len(CAPABILITIES) * len(DRIVERS))
    built = {row["cc"] for row in FORWARDS}
    accepted = run(machine, seed, count)
    # The generator is of use only if many of its calls reach the launches.
    assert accepted >= count // 25 or not built & set(capabilities), f"{accepted} of {count}"


def test_threads(tmp_path, driver):
    """Twelve at once on four devices, from the first load of a kernel on."""
    machine = make_machine(tmp_path, driver, ccs=(None,) * 4)
    problems = []

    def work(number: int) -> None:
        rng = random.Random(number)
        own = replace(machine, xla=Xla())
        machine.cuda.fake_set_current(number % 4)
        try:
            for _ in range(max(CALLS_IN_ALL // 120, 5)):
                call = made_up(rng, own)
                for stage in (INITIALIZE, EXECUTE):
                    check(own, call, stage)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]
