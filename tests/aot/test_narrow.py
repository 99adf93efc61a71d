"""Which part of the kernel table a build compiles: by environment variables or the local GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from aot_modules import load
from cpp.machine import compile_driver, needs_compiler
from paths import AOT

narrow = load("narrow")


@pytest.mark.parametrize(
    ("here", "archs"),
    [
        ([80], ["80"]),
        ([86], ["86"]),
        ([87], ["87"]),
        ([88], ["86"]),  # runs cubins for 8.6; those for 8.7 run only on 8.7
        ([89], ["86"]),
        ([90], ["90a"]),
        ([100], ["100a"]),
        ([103], ["100f"]),
        ([110], ["110"]),
        ([120], ["120a"]),
        ([121], ["120f"]),
        ([80, 90], ["80", "90a"]),
        ([75, 90], ["90a"]),  # 7.5 has no kernels
    ],
)
def test_architectures_of_the_gpus_here(here, archs):
    assert narrow.chosen({}, here) == {"archs": archs}


@pytest.mark.parametrize("here", [[], [75]])
def test_the_default_set_where_no_gpu_has_kernels(here):
    assert narrow.chosen({}, here) == narrow.DEFAULT
    asked = {"PACKAX_DTYPES": "f16", "PACKAX_HEAD_DIMS": "all"}
    kept = {option: narrow.DEFAULT[option] for option in ("archs", "assemblers")}
    assert narrow.chosen(asked, here) == {**kept, "dtypes": ["f16"]}


def test_the_default_set_is_in_the_table():
    archs, dims, dtypes = (narrow.DEFAULT[o] for o in ("archs", "head-dims", "dtypes"))
    assert set(archs) <= set(narrow.table.ARCHS) and set(dtypes) <= set(narrow.table.DTYPES)
    assert {(int(dim), int(dim)) for dim in dims} <= set(narrow.table.HEAD_DIMS)
    # One cubin per kernel, and one that every CUDA 12 and 13 driver loads.
    assert {narrow.table.ARCHS[arch].assembler for arch in archs} == {*narrow.DEFAULT["assemblers"]}


@pytest.mark.parametrize("here", [[90], []])
@pytest.mark.parametrize("asked", ["all", "ALL", " all "])
def test_all_asks_for_every_gpu(asked, here):
    options = narrow.chosen({"PACKAX_ARCHS": asked}, here)
    assert options == {} and narrow.local_version(options) == ""


def test_environment_variables_choose_the_part():
    """Compute capabilities as in a data sheet name architectures; compile.py refuses others."""
    asked = {"PACKAX_ARCHS": "90a;80", "PACKAX_HEAD_DIMS": "64x64", "PACKAX_DTYPES": "bf16, f16"}
    options = narrow.chosen(asked, [120])
    assert options == {"archs": ["90a", "80"], "head-dims": ["64x64"], "dtypes": ["bf16", "f16"]}
    assert narrow.local_version(options) == "+sm90a.sm80.bf16.f16.64x64"
    assert narrow.local_version(narrow.chosen({}, [])) == "+sm80.sm90a.bf16.128.ptxas12.9"
    for text, archs in (("8.9;7.5", ["86", "7.5"]), ("89 SM_90 103 86", ["86", "90a", "100f"])):
        assert narrow.chosen({"PACKAX_ARCHS": text}, [])["archs"] == archs


def test_one_line_gives_the_reason_for_the_choice():
    line = narrow.reason({}, narrow.chosen({}, [90]), [90])
    assert line.count("\n") == 0 and "archs 90a" in line and "PACKAX_ARCHS=all" in line
    asked = {"PACKAX_ARCHS": "90a"}
    assert "PACKAX_* variables" in narrow.reason(asked, narrow.chosen(asked, []), [])
    assert narrow.reason({}, narrow.chosen({}, []), []) == (
        "packax: no GPU here: a part of the kernels (archs 80 90a, head-dims 128, dtypes bf16, "
        "assemblers 12.9); PACKAX_ARCHS=all builds all"
    )
    assert narrow.reason({}, {}) == ""


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACKAX_")}
    command = [sys.executable, AOT / "narrow.py"]
    return subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, check=True
    )


@needs_compiler
@pytest.mark.parametrize(("capability", "arch"), [("90", "90a"), ("121", "120f")])
def test_the_driver_is_asked(tmp_path, capability, arch):
    library = Path(compile_driver(tmp_path))
    stub = tmp_path / "stub.c"
    stub.write_text(
        "void fake_add_device(const char*, int, int);\n"
        "__attribute__((constructor)) static void add(void) "
        f'{{ fake_add_device("GPU", {capability}, 1 << 17); }}\n'
    )
    folder = tmp_path / "lib"
    folder.mkdir()
    link = ["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", stub, library]
    subprocess.run(link, check=True)
    done = run({"LD_LIBRARY_PATH": str(folder)})
    assert done.stdout == f"--archs={arch}\n" and "this machine's GPUs" in done.stderr
    assert run({"LD_LIBRARY_PATH": str(folder), "PACKAX_ARCHS": "all"}).stdout == ""


def test_without_a_driver_the_default_set(tmp_path):
    (tmp_path / "libcuda.so.1").write_text("not a library")
    done = run({"LD_LIBRARY_PATH": str(tmp_path)})
    assert done.stdout == "--archs=80,90a\n--head-dims=128\n--dtypes=bf16\n--assemblers=12.9\n"
    assert "no GPU here" in done.stderr
