"""Which tests run, on which devices; compiling is cheap (xla_flags.py) and memory stays small.

Tests marked `gpu` run only where CUDA is, those marked `exhaustive` only under `-m exhaustive`. Of
the `gpu` ones, those that repeat every value of their parameters become `exhaustive`.
PACKAX_TEST_PART="2/3": the second third of the files alone.
What jax compiled for a module's tests is dropped after it. The last lines of a run say how much
memory each worker took at most, and the processor time of each folder.
"""

import collections
import ctypes
import gc
import os
import pathlib
import resource
import sys

import xla_flags  # noqa: F401, before jax

# isort: split
import jax
import pytest
from hypothesis import settings
from tiers import repeats

# Compiling is slow and comes at random: no deadline. One seed, so that a failure comes back.
# What draws its inputs draws more of them under `-m exhaustive`.
settings.register_profile("each time", deadline=None, derandomize=True, max_examples=12)
settings.register_profile("exhaustive", settings.get_profile("each time"), max_examples=60)

# Tracing makes many small objects that live on: at Python's thresholds the collector looks through
# them all again and again. _no_programs_of_other_modules collects.
gc.set_threshold(50_000, 20, 20)

# Assertions of these helpers, too, say what was there.
pytest.register_assert_rewrite("cpp.launches", "lowered")


def pytest_configure(config):
    exhaustive = "exhaustive" in config.option.markexpr
    settings.load_profile("exhaustive" if exhaustive else "each time")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    else:
        for item in repeats(on_gpu):
            item.add_marker("exhaustive")
    if "exhaustive" in config.option.markexpr:
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker("exhaustive")
    else:
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    if part := os.environ.get("PACKAX_TEST_PART"):
        nth, parts = map(int, part.split("/"))
        files = sorted({item.path for item in items})[nth - 1 :: parts]
        config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
        items[:] = [item for item in items if item.path in files]


def pytest_collection_finish(session):
    """What collecting made lives on: the collector of a module's programs need not look there."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests share programs: a worker gets files that stand together, and who is done
    takes half of what another has left."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


def _has_cuda() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


@pytest.fixture(autouse=True)
def _cpu_unless_gpu(request):
    """Tests of the CPU suite run on the CPU also where there is a GPU."""
    if request.node.get_closest_marker("gpu"):
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture(autouse=True, scope="module")
def _no_programs_of_other_modules():
    """A suite of 4000 tests keeps 5 GB of compiled programs otherwise, and glibc what they took."""
    yield
    jax.clear_caches()
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _peak_memory() -> float:
    """Of this process, in GB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def _processor_time() -> float:
    """Of this process and those that it waited for, in seconds."""
    return sum(os.times()[:4])


_peaks: dict[str, float] = {}
_seconds: collections.Counter[str] = collections.Counter()  # of processors, by folder of tests
_of_workers: list[float] = []
_began = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    item.stash[_began] = _processor_time()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown":
        item.user_properties.append(("seconds", _processor_time() - item.stash[_began]))


def pytest_runtest_logreport(report):
    """A run that a time limit ends prints no summary: PACKAX_FAILURES names a file that has it."""
    folder = pathlib.Path(report.fspath).parent.name
    _seconds[folder] += sum(x for name, x in report.user_properties if name == "seconds")
    path = os.environ.get("PACKAX_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with pathlib.Path(path).open("a") as file:
            file.write(f"FAILED {report.nodeid}\n{report.longreprtext[-2000:]}\n\n")


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a worker of xdist
        session.config.workeroutput["peak_memory"] = _peak_memory()
        session.config.workeroutput["seconds"] = _processor_time()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    output = getattr(node, "workeroutput", {})  # a worker that crashed has none
    if "peak_memory" in output:
        _peaks[node.gateway.id] = output["peak_memory"]
        _of_workers.append(output["seconds"])


def pytest_terminal_summary(terminalreporter):
    peaks = _peaks or {"this process": _peak_memory()}
    shown = ", ".join(f"{name} {peak:.1f} GB" for name, peak in sorted(peaks.items()))
    terminalreporter.write_line(f"peak memory: {shown}")
    folders = ", ".join(f"{name} {seconds:.0f}" for name, seconds in _seconds.most_common())
    every = sum(_of_workers) or _processor_time()
    starting = every - sum(_seconds.values())
    terminalreporter.write_line(
        f"processor time: {every:.0f} s, {starting:.0f} of them before and between tests: {folders}"
    )


@pytest.fixture
def extension(monkeypatch):
    """Lowering asks a stand-in with kernels, whatever the build at hand has."""
    from lowered import Extension
    from packax._src.ops import ffi

    monkeypatch.setattr(ffi, "ext", Extension)
