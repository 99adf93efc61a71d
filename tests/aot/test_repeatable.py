"""Two builds of the same table give the same bytes."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
from paths import ROOT


@pytest.mark.exhaustive
def test_two_builds_give_the_same_bytes(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("triton", reason="a build dependency")
    built = []
    for subfolder in ("one", "other/and/deeper"):
        # Builds from a copy of the sources in another place: no path may end up in a cubin.
        root = tmp_path / subfolder
        for part in ("kernels", "aot"):
            shutil.copytree(ROOT / "csrc" / part, root / "csrc" / part)
        out = root / "out"
        script = (
            "import sys, pathlib; sys.path.insert(0, 'csrc/aot');"
            "import compile as c, table as t;"
            "todo = [v for v in t.variants(('80', '87', '90a'), ('bf16',), ((64, 64),))"
            " if v.kernel in ('forward', 'blocks_rows')];"
            "sys.exit(c.compile_table(todo, pathlib.Path('out'), None, 2))"
        )
        env = {"PATH": "/usr/bin:/bin", "HOME": str(root), "TRITON_CACHE_DIR": str(root / "cache")}
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
