"""Tests of .ci/check_wheel.py: hardening of the extension module, and kernels."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from cpp.machine import COMPILER, SPEC, needs_compiler, needs_extension
from paths import ROOT

spec = importlib.util.spec_from_file_location("check_wheel", ROOT / ".ci/check_wheel.py")
assert spec and spec.loader
check_wheel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_wheel)
WANTED = len(list(check_wheel.table.variants()))


@pytest.fixture(autouse=True)
def only_some_kernels(monkeypatch):
    monkeypatch.setenv("PACKAX_DTYPES", "bf16")
    monkeypatch.setattr(check_wheel, "NEEDED", ())


@needs_extension
def test_this_build_has_its_cubins_and_is_hardened():
    from packax import _ext

    module = Path(SPEC.origin).read_bytes()
    found = [len(cubin) for cubin in check_wheel.cubins(module)]
    assert sorted(found) == sorted(row["bytes"] for row in _ext.variants())
    assert check_wheel.carelessness(module) == []


def wheel_of(folder: Path, name: str, module: Path) -> str:
    path = folder / f"packax-{name}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(module, "packax/_ext.abi3.so")
    return str(path)


CAREFUL = ["-Wl,-z,now,-z,relro,-z,noexecstack", "-fstack-protector-all"]


def linked(folder: Path, *flags: str) -> Path:
    source, module = folder / "module.c", folder / "module.so"
    source.write_text("int f(int n) { char text[64]; text[n] = 1; return text[1]; }")
    assert COMPILER
    subprocess.run([COMPILER, "-shared", "-fPIC", *flags, "-o", module, source], check=True)
    return module


@needs_compiler
@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("-Wl,-z,lazy", "not linked with -z now"),
        ("-Wl,-z,norelro", "not linked with -z relro"),
        ("-Wl,-z,execstack", "asks for an executable stack"),
        ("-Wl,-rpath,/opt", "has a search path for libraries"),
        ("-fno-stack-protector", "has no stack protector"),
    ],
)
def test_missing_hardening_is_named(tmp_path, capsys, flag, text):
    module = linked(tmp_path, *CAREFUL)
    assert check_wheel.carelessness(module.read_bytes()) == []
    wheel = wheel_of(tmp_path, "1+part", linked(tmp_path, *CAREFUL, flag))
    assert check_wheel.main([wheel]) == 1
    assert f"wrong: {text}\n" in capsys.readouterr().out


@needs_compiler
def test_other_cubins_are_named(tmp_path, capsys):
    """One wheel's cubin differs in its last byte. A wheel of the whole table has too few cubins."""
    module = linked(tmp_path, *CAREFUL)
    cubin = bytearray(module.read_bytes())
    cubin[18:20] = check_wheel.CUDA.to_bytes(2, "little")
    other = tmp_path / "other.so"
    shutil.copy(module, other)
    for path, last in ((module, 1), (other, 2)):
        cubin[-1] = last
        path.write_bytes(path.read_bytes() + bytes(-path.stat().st_size % 64) + cubin)
    first, same, second = (
        wheel_of(tmp_path, name, path)
        for name, path in (("1+a", module), ("1+b", module), ("1+c", other))
    )
    assert check_wheel.main([first, same]) == 0
    assert check_wheel.main([first, second]) == 1
    said = capsys.readouterr().out
    assert said.count(", 1 cubins, sha256 ") == 4
    assert "wrong: other cubins than packax-1+a.whl\n" in said
    assert check_wheel.main([wheel_of(tmp_path, "1", module)]) == 1
    assert f"1 cubins, the table has {WANTED}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "complains"),
    [({"PACKAX_ARCHS": "all"}, True), ({"PACKAX_ARCHS": "all", "PACKAX_DTYPES": "bf16"}, False)],
)
def test_what_is_published_has_every_kernel(tmp_path, capsys, monkeypatch, variables, complains):
    for name in ("PACKAX_ARCHS", "PACKAX_DTYPES", "PACKAX_HEAD_DIMS"):
        monkeypatch.setenv(name, variables.get(name, ""))
    module = tmp_path / "module.so"
    module.write_bytes(b"")
    assert check_wheel.main([wheel_of(tmp_path, "1+part", module)]) == complains
    said = capsys.readouterr().out
    assert (f"wrong: 0 cubins, the table has {WANTED}\n" in said) == complains
