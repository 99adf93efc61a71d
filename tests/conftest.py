"""Eight CPU devices for the sharding tests; tests marked `gpu` run only where CUDA is."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

# `pytest -n auto` on a machine with a GPU: many processes share its memory
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest
from hypothesis import settings

# Compiling is slow and comes at random: no deadline. One seed, so that a failure comes back.
settings.register_profile("packax", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("packax")

# Assertions of these helpers, too, say what was there.
pytest.register_assert_rewrite("cpp.launches", "lowered")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")


def pytest_collection_modifyitems(items):
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_cuda():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


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


@pytest.fixture
def extension(monkeypatch):
    """Lowering asks a stand-in with kernels, whatever the build at hand has."""
    from lowered import Extension
    from packax._src.ops import ffi as kernel_table

    monkeypatch.setattr(kernel_table, "ext", Extension)
