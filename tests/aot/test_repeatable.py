"""Two builds of the same table give the same bytes, whatever their environment."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from paths import ROOT

TWICE = """
import os, pathlib, sys
sys.path.insert(0, "csrc/aot")
import compile as c, table as t
(variant,) = (v for v in t.variants(("80",)) if v.kernel == "documents_init")
for name in ("hostile", "plain"):
    assert c.compile_table([variant], pathlib.Path(sys.argv[1], name), None, 1) == 0
    for name in set(os.environ) - {"PATH", "TMPDIR"}:
        del os.environ[name]
"""


def test_the_environment_changes_nothing(tmp_path: pathlib.Path) -> None:
    """Variables that change what Triton does, a HOME that is no folder; no file remains."""
    pytest.importorskip("triton", reason="a build dependency")
    on = ("TRITON_INTERPRET", "TRITON_DEBUG", "TRITON_ENABLE_ASAN", "TRITON_STORE_BINARY_ONLY")
    hostile = dict.fromkeys((*on, "DISABLE_LLVM_OPT", "USE_IR_LOC", "MLIR_ENABLE_TIMING"), "1")
    hostile |= {"TRITON_DEFAULT_FP_FUSION": "0", "TRITON_OVERRIDE_ARCH": "sm90"}
    hostile |= {"HOME": "/dev/null", "TRITON_CACHE_DIR": "/dev/null", "TMPDIR": str(tmp_path / "t")}
    (tmp_path / "t").mkdir()
    command = [sys.executable, "-c", TWICE, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | hostile)
    hostile_files, plain_files = (sorted((tmp_path / n).iterdir()) for n in ("hostile", "plain"))
    assert [f.read_bytes() for f in hostile_files] == [f.read_bytes() for f in plain_files]
    assert len(plain_files) == 3 and not list((tmp_path / "t").iterdir())


@pytest.mark.exhaustive
def test_two_builds_give_the_same_bytes(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("triton", reason="a build dependency")
    built = []
    for subfolder in ("one", "other/and/deeper"):
        # Builds from a copy of the sources in another place: no path may end up in a cubin.
        root = tmp_path / subfolder
        for part in ("csrc/kernels", "csrc/aot", "python/packax/_src/core"):
            shutil.copytree(ROOT / part, root / part)
        out = root / "out"
        script = (
            "import sys, pathlib; sys.path.insert(0, 'csrc/aot');"
            "import compile as c, table as t;"
            "todo = [v for v in t.variants(('80', '87', '90a'), ('bf16',), ((64, 64),))"
            " if v.kernel in ('forward', 'blocks_rows')];"
            "sys.exit(c.compile_table(todo, pathlib.Path('out'), None, 2))"
        )
        env = {"PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=root, check=True, env=env, stdout=subprocess.PIPE)
        assert b"6 variants, 0 from the cache, 4 kernels to PTX, 0 failed" in done.stdout
        files = sorted(out.iterdir())
        assert len(files) == 13  # a cubin and a JSON file each, and kernels.txt
        built.append({f.name: f.read_bytes() for f in files})
    assert built[0] == built[1]
    record = json.loads(built[0]["forward_bf16_64x64_sm90a.json"])
    assert (
        record["arch"] == "sm_90a"
        and record["arch_specific"]
        and record["params"][0] == {"name": "query", "type": "ptr"}
    )
    assert {len(b) > 1000 for n, b in built[0].items() if n.endswith(".cubin")} == {True}
