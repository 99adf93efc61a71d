"""Random FFI calls, on every compute capability and five driver versions: none crashes.

Shapes, dtypes and attributes of a valid call are changed, some sizes to values near 2^31. A handler
either returns an error with a code and a message, or launches; a call that *initialize* rejects is
never launched. To run more calls:

    PACKAX_FUZZ_CALLS=200000 python -m pytest tests/host/test_fuzz.py
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace

import pytest
from cpp.call_frame import CODES, EXECUTE, INITIALIZE, Xla
from cpp.calls import Call
from cpp.machine import Machine, make_machine, needs_compiler, needs_extension
from cpp.made_up import FORWARDS, random_call

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

CALLS_IN_ALL = int(os.environ.get("PACKAX_FUZZ_CALLS", "4000"))
CAPABILITIES = ((75, 80, 86, 87), (89, 90, 100, 103), (110, 120, 121, 90))
DRIVERS = (12000, 12040, 12080, 12090, 13000)


def check(machine: Machine, call: Call, stage: int) -> bool:
    """Runs a call. Returns whether it was accepted."""
    failure = machine.run(call, stage)
    assert failure is None or (failure.code in CODES.values() and failure.message), (call, failure)
    return failure is None


def run(machine: Machine, seed: int, count: int) -> int:
    rng, accepted = random.Random(seed), 0
    for _ in range(count):
        call = random_call(rng, machine)
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
    row = FORWARDS[0]
    kind = (row["dtype"], row["qk_dim"], row["v_dim"], driver_version)
    served = [cc for cc in capabilities if machine.ext.find("forward", cc, *kind)]
    accepted = run(machine, seed, count)
    # The generator is useful only if many of its calls are launched, on devices that have kernels.
    assert accepted >= count * len(served) // (25 * len(capabilities)), f"{accepted} of {count}"


def test_threads(tmp_path, driver):
    """Twelve threads at once on four devices, starting before any kernel is loaded."""
    machine = make_machine(tmp_path, driver, ccs=(None,) * 4)
    problems = []

    def work(number: int) -> None:
        rng = random.Random(number)
        own = replace(machine, xla=Xla())
        machine.cuda.fake_set_current(number % 4)
        try:
            for _ in range(max(CALLS_IN_ALL // 120, 5)):
                call = random_call(rng, own)
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
