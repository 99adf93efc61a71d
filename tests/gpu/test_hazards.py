"""hazards.py counts all reports of compute-sanitizer, and an unfinished run is not clean."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import hazards

RACES = """\
========= COMPUTE-SANITIZER
long bfloat16 64x64: errors 2.1e-03
========= Error: Race reported between Write access at backward_sm90+0x1a0
=========     and Read access at backward_sm90+0x240 [12 hazards]
=========     and Write access at backward_sm90+0x2b0 [4 hazards]
=========
========= Warning: Race reported between Read access at \
void loop_add_fusion<int>(float*)+0x40 in f.py:3
=========     and Write access at loop_add_fusion+0x60 [1 hazard]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
OLD = """\
========= Invalid __global__ read of size 4 bytes
=========     at 0x1a0 in forward_sm90
=========     by thread (0,0,0) in block (1,0,0)
=========
========= Barrier error detected. Missing wait.
=========     at forward_sm90+0x20
=========
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure" \
on CUDA API call to cuLaunchKernel.
=========
========= ERROR SUMMARY: 3 errors
"""


def test_counts_by_kernel_and_first_reports():
    text, clean = hazards.summary(RACES)
    assert not clean
    first, *rest = text.splitlines()
    assert first == "backward_sm90: 1 reports: 16 x Error: Race reported"
    assert "    Error: Race reported between Write access at backward_sm90+0x1a0" in rest
    assert "loop_add_fusion: 1 reports: 1 x Warning: Race reported" in rest
    assert rest[-1] == "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"


def test_the_older_format_and_errors_without_a_kernel():
    text, clean = hazards.summary(OLD)
    assert not clean
    assert (
        "forward_sm90: 2 reports: 1 x Invalid __global__ read of size 4 bytes, 1 x Barrier" in text
    )
    assert "(no kernel named): 1 reports: 1 x Program hit CUDA_ERROR_LAUNCH_FAILED" in text


def test_clean_needs_the_closing_line():
    closing = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert hazards.summary(closing)[1]
    text, clean = hazards.summary("sanitize.py: ok\n")
    assert not clean and "did not end" in text
    assert not hazards.summary("========= ERROR SUMMARY: 1 error\n")[1]


def test_many_reports_are_counted_and_a_few_shown():
    report = (
        "========= Error: Race reported between Write access at forward_sm90+0x{:x}\n"
        "=========     and Read access at forward_sm90+0x9 [2 hazards]\n=========\n"
    )
    text, _ = hazards.summary("".join(report.format(i) for i in range(50)))
    assert text.startswith("forward_sm90: 50 reports: 100 x Error: Race reported\n")
    assert text.count("between Write access") == hazards.SHOWN


def test_the_tool_is_started_on_small_cases_and_its_log_kept(tmp_path: Path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\ncat <<"E"\narguments $*\n{RACES}E\n'.replace("$*", "AT"))
    tool.write_text(tool.read_text() + 'echo "$@" >"$OUT/arguments"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    result = subprocess.run(
        [sys.executable, hazards.__file__, "racecheck", "--kernel-name", "kne=x"],
        capture_output=True,
        text=True,
        env={**os.environ, "COMPUTE_SANITIZER": str(tool), "OUT": str(tmp_path)},
    )
    assert result.returncode == 1, result.stderr
    assert "backward_sm90: 1 reports" in result.stdout
    assert "long bfloat16 64x64" in result.stdout  # the program's own output
    assert RACES in (tmp_path / "racecheck.txt").read_text()
    # The first run is without the tool; it fails on a machine without a GPU.
    assert "without the tool: " in result.stdout and "exit status " in result.stdout
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("--tool racecheck ") and "--kernel-name kne=x" in arguments
    assert arguments.rstrip().endswith("sanitize.py --small")


def test_both_runs_share_one_compilation_cache(tmp_path: Path):
    """Both runs use one cache, which is deleted afterwards. A failure without the tool counts,
    whatever the tool reports."""
    tool, program = tmp_path / "compute-sanitizer", tmp_path / "program.py"
    tool.write_text(
        f'#!/bin/sh\ncase "$*" in *version*) exit;; esac\n{sys.executable} {program} watched\n'
        "echo '========= ERROR SUMMARY: 0 errors'\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    program.write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "made = Path(os.environ['JAX_COMPILATION_CACHE_DIR'], 'made')\n"
        "print('cached', made.exists(), made.parent)\nmade.touch()\n"
        "sys.exit(len(sys.argv) == 1 and int(os.environ['BROKEN']))\n"
    )
    for broken in (0, 1):
        result = subprocess.run(
            [sys.executable, hazards.__file__, "memcheck", "--", str(program)],
            capture_output=True,
            text=True,
            env={k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
            | {"COMPUTE_SANITIZER": str(tool), "OUT": str(tmp_path), "BROKEN": str(broken)},
        )
        assert result.returncode == broken, result.stderr
        (line,) = (line for line in result.stdout.splitlines() if line.startswith("cached"))
        assert line.startswith("cached True ") and not Path(line.split()[-1]).exists()
