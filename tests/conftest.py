"""Selects the tests to run and their devices, and keeps compile time and memory low.

Compilation is made cheap by xla_flags.py. Tests marked `gpu` need a CUDA device; tests marked
`exhaustive` run only under `-m exhaustive`. A `gpu` test becomes `exhaustive` if earlier tests of
its function already cover each of its parameter values. Tests on a GPU run in an order in which the
first cases of every test come early.
PACKAX_TEST_PART="2/3" runs only the second third of the files, and of the cells of tests/table.
JAX's compilation caches are cleared after each module, and after 100 tests of a long one. The
summary reports the peak memory of each worker and the processor time of each folder, and the
command that runs each failure alone.
"""

import collections
import ctypes
import gc
import itertools
import os
import pathlib
import resource
import shlex
import sys

import xla_flags  # noqa: F401, before jax

# isort: split
import jax
import pytest
from hypothesis import settings
from tiers import repeats, spread

# Compile times vary too much for a deadline. A fixed seed makes failures reproducible.
# Tests with generated inputs try more examples under `-m exhaustive`.
settings.register_profile("each time", deadline=None, derandomize=True, max_examples=12)
settings.register_profile("exhaustive", settings.get_profile("each time"), max_examples=60)

# Tracing creates many small long-lived objects, which the collector would scan over and over at
# Python's default thresholds. The fixture _clear_compilation_caches collects explicitly.
gc.set_threshold(50_000, 20, 20)

# Assertions in these helpers also report the compared values.
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
        # The table is in one file, and its cells are divided.
        units = {item: item if item.path.parent.name == "table" else item.path for item in items}
        chosen = {*list(dict.fromkeys(units.values()))[nth - 1 :: parts]}
        left_out = [item for item in items if units[item] not in chosen]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if units[item] in chosen]
    if on_gpu and _has_cuda():
        of_gpu = {*on_gpu}
        items[:] = [x for x in items if x not in of_gpu] + spread(x for x in items if x in of_gpu)


def pytest_collection_finish(session):
    """Freeze the objects that collection created, so that later garbage collections skip them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist load`, give each worker neighbouring tests: tests of one file share compiled
    programs. An idle worker steals half of the tests that another has left. With `-m gpu`, workers
    take the next tests of one queue."""
    from xdist.scheduler import LoadScheduling, WorkStealingScheduling

    if config.option.dist != "load":
        return None
    if "gpu" not in config.option.markexpr:
        return WorkStealingScheduling(config, log)
    queue = LoadScheduling(config, log)
    queue.maxschedchunk = 2
    return queue


def _has_cuda() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


@pytest.fixture(autouse=True)
def _cpu_unless_gpu(request):
    """Run tests without the `gpu` marker on the CPU, even on a machine with a GPU."""
    if request.node.get_closest_marker("gpu"):
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture(autouse=True, scope="module")
def _clear_after_a_module(request):
    """The 4000 tests would otherwise keep 5 GB of compiled programs, and glibc the freed memory.
    On a GPU, the next test is of another module."""
    yield
    if not request.node.get_closest_marker("gpu"):
        _clear_compilation_caches()


@pytest.fixture(autouse=True)
def _clear_in_a_long_module():
    """A cell of tests/table keeps 250 memory mappings, and Linux allows a process 65,530."""
    yield
    if next(_tests_run) % 100 == 0:
        _clear_compilation_caches()


_tests_run = itertools.count(1)


def _clear_compilation_caches() -> None:
    jax.clear_caches()
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _peak_memory() -> float:
    """Peak memory of this process, in GB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def _processor_time() -> float:
    """Processor time of this process and of the children it waited for, in seconds."""
    return sum(os.times()[:4])


_peaks: dict[str, float] = {}
_seconds: collections.Counter[str] = collections.Counter()  # processor time by test folder
_worker_seconds: list[float] = []
_start_time = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    item.stash[_start_time] = _processor_time()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown":
        item.user_properties.append(("seconds", _processor_time() - item.stash[_start_time]))


def pytest_runtest_logreport(report):
    """Count processor time, and append failures to the file that PACKAX_FAILURES names: a run that
    hits a time limit prints no summary."""
    folder = pathlib.Path(report.fspath).parent.name
    _seconds[folder] += sum(x for name, x in report.user_properties if name == "seconds")
    path = os.environ.get("PACKAX_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with pathlib.Path(path).open("a") as file:
            file.write(f"FAILED {report.nodeid}\n{report.longreprtext[-2000:]}\n\n")


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # an xdist worker
        session.config.workeroutput["peak_memory"] = _peak_memory()
        session.config.workeroutput["seconds"] = _processor_time()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    output = getattr(node, "workeroutput", {})  # a worker that crashed has none
    if "peak_memory" in output:
        _peaks[node.gateway.id] = output["peak_memory"]
        _worker_seconds.append(output["seconds"])


def again(nodeid: str, exhaustive: bool) -> str:
    """The command that runs a test alone."""
    if "test_table.py::test_each" in nodeid:
        cell = shlex.quote(nodeid.partition("[")[2][:-1])
        seed = os.environ.get("PACKAX_TABLE_SEED", "0")
        command = "python -m pytest tests/table -k test_each_feature"
        return f"PACKAX_CELL={cell} {command}  # drawn by PACKAX_TABLE_SEED={seed}"
    more = " -m exhaustive" if exhaustive else ""
    return f"python -m pytest {shlex.quote(nodeid)}{more}"


def pytest_terminal_summary(terminalreporter, config):
    exhaustive = "exhaustive" in config.option.markexpr
    failures = [x for kind in ("failed", "error") for x in terminalreporter.getreports(kind)]
    for nodeid in dict.fromkeys(x.nodeid for x in failures):
        terminalreporter.write_line(f"again: {again(nodeid, exhaustive)}")
    peaks = _peaks or {"this process": _peak_memory()}
    shown = ", ".join(f"{name} {peak:.1f} GB" for name, peak in sorted(peaks.items()))
    terminalreporter.write_line(f"peak memory: {shown}")
    folders = ", ".join(f"{name} {seconds:.0f}" for name, seconds in _seconds.most_common())
    every = sum(_worker_seconds) or _processor_time()
    starting = every - sum(_seconds.values())
    terminalreporter.write_line(
        f"processor time: {every:.0f} s, {starting:.0f} of them before and between tests: {folders}"
    )


@pytest.fixture
def extension(monkeypatch):
    """Make lowering query a stand-in extension with a fixed set of kernels, not the real build."""
    from lowered import Extension
    from packax._src.ops import ffi

    monkeypatch.setattr(ffi, "ext", Extension)
