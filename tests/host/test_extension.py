"""The extension module, and what it reports about this build and machine.

Guards against a driver that is opened at import, and against a module that disagrees with its stub,
this jax or the table. Runs on a fake libcuda (tests/support/cpp): needs the built extension and a C
compiler, but no GPU.
"""

import ast
import collections
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aot_modules import table
from cpp.call_frame import EXECUTE, INITIALIZE, Xla
from cpp.calls import forward
from cpp.machine import (
    SPEC,
    Machine,
    compile_driver,
    copy_without_cubins,
    load_extension,
    make_machine,
    needs_compiler,
    needs_extension,
    outside_cubins,
)

pytest_plugins = ("cpp.fixtures",)
pytestmark = needs_extension


# --- The module -----------------------------------------------------------------------------------


def test_import_opens_no_driver():
    """Runs in a separate process, which must neither need nor open libcuda."""
    code = (
        "import sys, importlib.util as u\n"
        "spec = u.spec_from_file_location('_ext', sys.argv[1])\n"
        "ext = u.module_from_spec(spec); spec.loader.exec_module(ext)\n"
        "ext.registrations(); ext.variants(); ext.host_times()\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
    )
    env = {**os.environ, "PACKAX_LIBCUDA": "/nonexistent/libcuda.so.1"}
    subprocess.run([sys.executable, "-c", code, SPEC.origin], check=True, env=env)


def test_stub_matches_module():
    from packax import _ext

    stub = ast.parse((Path(SPEC.origin).parent / "_ext.pyi").read_text())
    declared = {n.name: n for n in stub.body if isinstance(n, ast.FunctionDef)}
    actual = {n for n in dir(_ext) if not n.startswith("_")}
    assert set(declared) == actual
    variant = next(n for n in stub.body if isinstance(n, ast.ClassDef) and n.name == "Variant")
    fields = [n.target.id for n in variant.body if isinstance(n, ast.AnnAssign)]
    for row in _ext.variants():
        assert list(row) == fields
    with pytest.raises(TypeError):
        _ext.find("forward")


def test_registers_with_this_jax():
    """The module must not be built against a newer FFI API than this jaxlib's."""
    code = (
        "import jax\n"
        "from packax import _ext\n"
        "for name, stages in _ext.registrations().items():\n"
        "    jax.ffi.register_ffi_target(name + '_test', stages, platform='cpu')\n"
        "jax.devices()\n"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_handlers_declare_themselves():
    from packax import _ext

    registrations = _ext.registrations()
    assert set(registrations) == {
        "packax_documents_v1",
        "packax_blocks_v1",
        "packax_forward_v1",
        "packax_backward_v1",
        "packax_decode_v1",
        "packax_ragged_v1",
        "packax_forward_tangent_v1",
    }
    for stages in registrations.values():
        assert set(stages) == {"initialize", "execute"}
        for capsule in stages.values():
            version, traits = Xla().metadata(capsule)
            assert version == (0, 1)
            assert traits == 1  # command-buffer compatible


def test_the_build_has_the_kernels_that_it_says():
    """Those of the table, or of the part that it names."""
    from packax import _ext

    rows, part = _ext.variants(), dict(x.split(" ", 1) for x in _ext.part().split(", ") if x)
    part = {name: words.split() for name, words in part.items()}
    dims = {f"{a}x{b}": (a, b) for a, b in table.ALL_DIMS}
    given = [x if "x" in x else f"{x}x{x}" for x in part.get("head-dims", dims)]
    wanted = table.variants(
        tuple(part.get("archs", table.ARCHS)), tuple(part.get("dtypes", table.ALL_DTYPES)),
        tuple(dims[x] for x in given),
    )  # fmt: skip
    assemblers = part.get("assemblers", table.ASSEMBLERS)
    assert sorted(r["name"] for r in rows) == sorted(
        v.name for v in wanted if v.assembler in assemblers
    )
    for r in rows:
        assert r["bytes"] > 0 and r["threads"] % 32 == 0 and r["block"] > 0


def test_find():
    from packax import _ext

    by_key = collections.defaultdict(list)  # rows that differ at most in arch and driver
    for r in _ext.variants():
        by_key[r["kernel"], r["cc"], r["dtype"], r["qk_dim"], r["v_dim"]].append(r)

    def best(rows, driver):
        able = [r for r in rows if r["driver"] <= driver]
        return max(able, key=lambda r: (r["arch_specific"], r["driver"]))["name"]

    for r in _ext.variants():
        key = (r["dtype"], r["qk_dim"], r["v_dim"])
        same = by_key[r["kernel"], r["cc"], *key]
        assert _ext.find(r["kernel"], r["cc"], *key, driver=r["driver"]) == best(same, r["driver"])
        assert _ext.find(r["kernel"], r["cc"], *key, r["driver"] - 1) != r["name"]
        assert _ext.find(r["kernel"], r["cc"], *key, 11080) is None
        assert _ext.find(r["kernel"], 20, *key) is None
        assert _ext.find(r["kernel"], r["cc"], r["dtype"], 1, 1) is None
        assert _ext.find(r["kernel"], r["cc"], *key) == best(same, math.inf)
    assert _ext.find("sideways", 90, "bf16", 64, 64) is None
    assert _ext.find("forward", 90, "float32", 64, 64) is None


def test_copies_for_tests_are_small(tmp_path):
    """Full copies would fill CI's disk with 46 GB per run."""
    from packax import _ext

    copy = tmp_path / "copy.so"
    copy_without_cubins(copy)
    assert outside_cubins()[1] == len(_ext.variants())
    assert copy.stat().st_size == Path(SPEC.origin).stat().st_size
    assert copy.stat().st_blocks * 512 < 3e6


# --- The driver -----------------------------------------------------------------------------------


def test_no_driver(tmp_path):
    ext = load_extension(tmp_path, "/nonexistent/libcuda.so.1")
    error = ext.driver()["error"]
    assert error.startswith("no CUDA driver: cannot open /nonexistent/libcuda.so.1 (")
    xla = Xla()
    variant = next(v for v in ext.variants() if v["kernel"] == "forward")
    machine = Machine(ext, None, xla, variant)
    for stage in (INITIALIZE, EXECUTE):
        failure = machine.run(forward(machine), stage)
        assert (failure.code, failure.message) == ("Internal", f"packax_forward_v1: {error}")


@needs_compiler
def test_old_driver(tmp_path):
    path = compile_driver(tmp_path, "-DFAKE_OLD")
    ext = load_extension(tmp_path, path)
    assert ext.driver() == {
        "error": f"{path} (CUDA 11.8) has no cuLibraryLoadData; "
        "packax needs a driver for CUDA 12.0 or newer"
    }


@needs_compiler
def test_driver_describes_the_machine(tmp_path, driver):
    machine = make_machine(tmp_path, driver, ccs=(90, 86))
    assert machine.ext.driver() == {
        "version": 12040,
        "devices": [
            {"ordinal": 0, "name": "Fake GPU 0", "cc": 90},
            {"ordinal": 1, "name": "Fake GPU 1", "cc": 86},
        ],
    }


@needs_compiler
def test_no_gpu_is_visible(machine):
    """As with CUDA_VISIBLE_DEVICES="": cuInit itself returns CUDA_ERROR_NO_DEVICE."""
    machine.fail("cuInit", 100)
    assert machine.ext.driver() == {"version": 12040, "devices": []}


@needs_compiler
@pytest.mark.parametrize(
    ("function", "where"),
    [
        ("cuInit", ""),
        ("cuDriverGetVersion", ""),
        ("cuDeviceGetCount", ""),
        ("cuDeviceGet", ", device 0"),
        ("cuDeviceGetName", ", device 0"),
        ("cuDeviceGetAttribute", ", device 0"),
    ],
)
def test_driver_error(machine, function, where):
    machine.fail(function, 1)
    text = f"{function} failed: CUDA_ERROR_INVALID_VALUE (invalid argument){where}"
    assert machine.ext.driver() == {"error": text}
    machine.fail(function, 0)
    assert "error" not in machine.ext.driver()
