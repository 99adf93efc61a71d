""".ci/check_words.py finds words to avoid, only in prose and only in files that it checks.
.ci/gpu rejects unknown parts before it installs anything."""

import importlib
import os
import re
import subprocess
import sys

import pytest
from paths import DOCS, ROOT

SCRIPT = ROOT / ".ci" / "check_words.py"
sys.path.insert(0, str(SCRIPT.parent))
check_words = importlib.import_module("check_words")


def found(text):
    return [(line, words) for line, words, _ in check_words.stumbles(text)]


def test_a_word_is_found_and_named(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "page.md").write_text("# Page\n\nAfter this page you know it.\n")
    (tmp_path / "it.toml").write_text("# beside\n")
    (tmp_path / "not_added.md").write_text("beside\n")
    subprocess.run(["git", "add", "page.md", "it.toml"], cwd=tmp_path, check=True)
    run = [sys.executable, str(SCRIPT)]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "page.md:3: 'After this page'; write: this page covers\n"
    (tmp_path / "page.md").write_text("# Page\n\nThis page covers it.\n")
    assert subprocess.run(run, cwd=tmp_path).returncode == 0


def test_words_in_any_case_in_tables_and_over_two_lines():
    assert found("## Beside cuDNN\n| keys it meets | - |\n") == [(1, "Beside"), (2, "meets")]
    assert found("kernels of\n  its own, likewise\n")[0][0] == 1
    assert len(found("kernels of\n  its own, likewise\n")) == 2
    assert found("It calls `of`\nits code.\n\nof\n\nits own\n") == []


def test_longer_words_are_others():
    assert found("metadata, families, skin, a meeting, beliefs; the best of all keys\n") == []


def test_code_and_link_targets_are_left_out():
    code = "```python\nbeside = 1\n```\n`beside`, `a\nbeside`, [kvax](page.md#beside-kvax)\n"
    assert found(code) == []
    assert found(code + "beside\n") == [(6, "beside")]


def test_files_that_are_checked():
    names = ["README.md", "a/b.py", "third_party/README.md", "a/b.cc", "c.h", "pyproject.toml"]
    assert list(check_words.checked(names)) == ["README.md", "a/b.py", "a/b.cc", "c.h"]


def test_docstrings_and_comments_of_python():
    source = '''beside = "likewise"  # beside it
def f(x):
    """A row that
    attends nothing.

        >>> beside
    """
'''
    prose = check_words.prose_of_python(source)
    assert found(prose) == [(1, "beside"), (4, "attends nothing")]


def test_comments_of_cpp():
    source = '// And so does it.\nSay("and so is");  // neither is y\n'
    prose = check_words.prose_of("a.cc", source)
    assert found(prose) == [(1, "And so does"), (2, "neither is")]
    assert check_words.prose_of("a.md", source) == source


# --- .ci/gpu

GPU = ROOT / ".ci" / "gpu"
PARTS = (
    "info tests memcheck racecheck synccheck bench overheads short decode serving masks biases"
    " models pairs jvp context tune fa4 proxy counters power versus train windows calls demo"
)


def run_gpu(tmp_path, parts):
    environment = os.environ | {"PARTS": parts, "PYTHON": "false", "OUT": str(tmp_path / "out")}
    command = ["bash", str(GPU)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("parts", ["options", "bench options", "tests,bench", "benc", "*"])
def test_an_unknown_part_is_an_error(tmp_path, parts):
    done = run_gpu(tmp_path, parts)
    assert done.returncode == 2
    unknown = next(x for x in parts.split() if x not in PARTS.split())
    assert done.stderr == f"gpu: PARTS has {unknown!r}, which is none of: {PARTS}\n"
    assert done.stdout == "" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("parts", ["bench", "  decode   masks ", PARTS])
def test_known_parts_go_on_to_install_the_wheel(tmp_path, parts):
    """The run fails there because the fake Python does."""
    done = run_gpu(tmp_path, parts)
    assert done.returncode == 1 and "none of" not in done.stderr


def test_every_part_is_known():
    text = GPU.read_text()
    named = re.findall(r"^ +(?:part|program) (\w+) ", text, re.MULTILINE)
    for tools in re.findall(r"for tool in ([\w ]+);", text):
        named += tools.split()
    assert sorted(named) == sorted(PARTS.split())


def test_pages_name_parts_that_exist():
    for page in (ROOT / "README.md", *DOCS.rglob("*.md"), ROOT / "benchmarks/results/README.md"):
        for quoted, bare in re.findall(r'PARTS=(?:"([\w ]+)"|([a-z]\w*))', page.read_text()):
            named = set((quoted or bare).split())
            assert named <= set(PARTS.split()), page
