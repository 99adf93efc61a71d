""".ci/check_columns.py finds lines over 100 columns, only in files that people write."""

import importlib.util
import subprocess
import sys

from paths import ROOT

SCRIPT = ROOT / ".ci" / "check_columns.py"
spec = importlib.util.spec_from_file_location("check_columns", SCRIPT)
check_columns = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_columns)


def test_a_long_line_is_found_and_named(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "notes.md").write_text(f"short\n| {'x ' * 49}|\n{'y ' * 50}\n")
    (tmp_path / "report.json").write_text("1, " * 99)
    (tmp_path / "not_added.md").write_text("z " * 99)
    subprocess.run(["git", "add", "notes.md", "report.json"], cwd=tmp_path, check=True)
    run = [sys.executable, str(SCRIPT)]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "notes.md:2: 101 columns, 100 are accepted\n"
    (tmp_path / "notes.md").write_text("short\n")
    assert subprocess.run(run, cwd=tmp_path).returncode == 0


def test_a_word_that_cannot_be_broken_is_no_long_line():
    assert check_columns.long_lines(f"    https://{'x' * 200}\n") == []
    assert check_columns.long_lines(f"see https://{'x' * 200}\n") == [(1, 212)]


def test_files_of_programs_are_left_out():
    names = ["benchmarks/results/a.txt", "benchmarks/results/README.md", "third_party/README.md"]
    names += ["third_party/licenses/x.txt", "docs/a.svg", ".ci/run", "pyproject.toml"]
    kept = ["benchmarks/results/README.md", "third_party/README.md", ".ci/run", "pyproject.toml"]
    assert list(check_columns.checked(names)) == kept
