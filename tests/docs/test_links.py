"""Links, paths and pictures in the documentation, and pages that the code names, exist; generated
lists are complete; every feature and call that a page lists has tests, which shown_by.md names."""

import ast
import functools
import importlib.util
import re
import sys

import packax
import pytest
from packax._src.core.schema import SYMBOLS
from paths import DOCS, ROOT, TESTS

PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
PAGES += sorted(DOCS.rglob("*.md"))
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
FOLDERS = ("python", "csrc", "tests", "benchmarks", "docs", "examples", "third_party", ".ci")
PATH = re.compile(rf"(?:{'|'.join(map(re.escape, FOLDERS))}|_src)/[\w./*-]*\w")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cc", ".h", "") and path.is_file() and "results" not in path.parts
]


def exists(name):
    base = ROOT / "python" / "packax" if name.startswith("_src/") else ROOT
    return bool(list(base.glob(name)))


def anchors(page):
    """Anchors of its headings, as GitHub generates them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links(name):
    text = re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)", text):
        if "://" in target:
            continue
        page = (ROOT / name).parent / target if target else ROOT / name
        assert page.is_file(), f"{name} links to {target}"
        if anchor and page.suffix == ".md":
            assert anchor in anchors(page), f"{name} links to {target}#{anchor}"


@pytest.mark.parametrize("name", NAMES)
def test_paths_that_a_page_names(name):
    for code in re.findall(r"`([^`\n]+)`", (ROOT / name).read_text()):
        for path in PATH.findall(code):
            assert exists(path), f"{name} names {path}"


def test_pages_that_the_code_names():
    missing = []
    for source in SOURCES:
        text = source.read_text(errors="ignore")
        for path in re.findall(r"(?<![\w/])docs/[\w/]+\.(?:md|py|svg|png)", text):
            if not exists(path):
                missing.append(f"{source.relative_to(ROOT)}: {path}")
    assert not missing, "\n".join(missing)


def test_the_reference_has_every_public_name():
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    named = set(re.findall(r"(?:^::: |^## )packax\.(\w+)$", text, re.MULTILINE))
    assert set(packax.__all__) - {"__version__"} <= named


def test_the_architecture_has_every_file():
    """Its tables "in FOLDER" name the existing files, and nothing else."""
    text = (DOCS / "internals" / "architecture.md").read_text()
    tables = re.findall(
        r"^\| in `([\w/]+)` \| job \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    assert [folder for folder, _ in tables] == ["python/packax/_src", "csrc"]
    for folder, rows in tables:
        named = {
            x for row in rows.splitlines() for x in re.findall(r"`([^`]+)`", row.split(" | ")[0])
        }
        assert not [x for x in named if not (ROOT / folder / x).exists()], folder
        files = [x.relative_to(ROOT / folder).as_posix() for x in (ROOT / folder).rglob("*.*")]
        files = [x for x in files if x.endswith((".py", ".cc", ".h")) and "__init__" not in x]
        covered = tuple(x for x in named if x.endswith("/"))
        assert not [x for x in files if x not in named and not x.startswith(covered or "//")], (
            folder
        )


@pytest.mark.parametrize("name", NAMES)
def test_no_number_begins_a_list_by_accident(name):
    """A line of a paragraph that begins with "256. " becomes a list in Markdown."""
    assert not re.findall(r"^ *\d{2,}\. .*", (ROOT / name).read_text(), re.MULTILINE)


# The jobs of a first day: what their page, one click from the README, shows or links to.
JOBS = {
    "pack and train": ("data.md", "layers.md", "tutorial.md"),
    "several GPUs": ("meshes.md", "context_parallelism.md"),
    "two processes": ("meshes.md#several-processes", "meshes.md#try-it-on-one-machine"),
    "fine-tuning": ("fine_tuning.md#padded-batches", "fine_tuning.md#prefix-lm", "trees.md"),
    "serving": (
        "decoding.md#from-prefill-to-the-cache",
        "decoding.md#paged-caches",
        "decoding.md#ring-buffers",
        "decoding.md#draft-trees",
    ),
    "pair biases": ("structure_prediction.md", "biases.md#a-bias"),
    "vision": ("vision.md", "vision.md#windows-in-two-dimensions"),
    "other libraries": ("jax_nn.md", "flax.md", "migrating.md#flash-attn"),
    "saving memory": (
        "transformations.md#checkpoint",
        "faq.md#how-much-memory-does-attention-need",
    ),
    "speed and NaN": ("is_it_fast.md", "faq.md#my-loss-is-nan"),
    "mistakes": ("data.md#checking-a-batch", "faq.md#my-packing-leaks", "masks.md#windows"),
}


def links_of(page):
    found = re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]+))?\)", page.read_text())
    return {((page.parent / name).resolve() if name else page, anchor) for name, anchor in found}


@pytest.mark.parametrize("job", JOBS)
def test_each_job_is_two_clicks_from_the_readme(job):
    """A click on a link, or on a heading in a page's list of contents."""
    first = {page for page, _ in links_of(ROOT / "README.md") if page.suffix == ".md"}
    second = {page for one in first for page, _ in links_of(one)}
    for target in JOBS[job]:
        name, _, anchor = target.partition("#")
        page = DOCS / "guide" / name
        assert page in (first if anchor else first | second), target
        assert not anchor or anchor in anchors(page), target


@pytest.mark.parametrize("page", sorted((DOCS / "guide").glob("*.md")), ids=lambda x: x.stem)
def test_a_guide_page_begins_with_an_example(page):
    first = page.read_text().partition("\n```")[0].count("\n")
    assert first < 20 or page.stem in ("features", "support")


# --- Pictures.

PICTURES = DOCS / "pictures"
SCRIPTS = sorted(
    path.stem for path in PICTURES.glob("*.py") if path.stem not in ("svg", "tutorial")
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_picture_is_up_to_date(name, monkeypatch):
    monkeypatch.syspath_prepend(PICTURES)
    svg = importlib.import_module("svg")
    drawn = []
    monkeypatch.setattr(svg.Picture, "save", lambda picture, script: drawn.append(picture.text()))
    script = importlib.import_module(name)
    script.main()
    for module in (name, "svg"):
        sys.modules.pop(module)
    path = PICTURES / f"{name}.svg"
    assert drawn == [path.read_text()], f"run python docs/pictures/{name}.py"
    assert path.stat().st_size < 30_000


def test_every_picture_is_on_a_page():
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert sorted(path.stem for path in PICTURES.glob("*.svg")) == SCRIPTS
    assert not [name for name in SCRIPTS if f"pictures/{name}.svg" not in pages]


# --- Lists that docs/internals/generate.py generates from the sources.

FILE = DOCS / "internals" / "generate.py"
spec = importlib.util.spec_from_file_location("generate_docs", FILE)
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.PARTS)
def test_the_page_says_where_its_list_goes(name):
    assert (FILE.parent / name).read_text().count(generate.MARK) == 1


def test_every_target_is_listed():
    text = generate.targets()
    for name in SYMBOLS.values():
        section = text.partition(f"### {name}\n")[2].partition("###")[0]
        assert "| operand | `" in section, name
        assert "| result | `" in section, name


def test_every_kernel_is_listed():
    text = generate.kernels()
    for kernel in generate.table.KERNELS:
        section = text.partition(f"### {kernel}\n")[2].partition("###")[0]
        assert "- pointers: " in section or "Arguments as `" in section, kernel


def test_every_kernel_has_a_grid():
    text = (FILE.parent / "kernels.md").read_text()
    grids = text[text.index("## Grids") : text.index("## Arguments")]
    for kernel in generate.table.KERNELS:
        assert f"`{kernel}`" in grids, kernel


# --- The tests of each feature and call.

GUIDE = [path.read_text() for path in sorted((DOCS / "guide").glob("*.md"))]
REFERENCE = re.compile(r"(?:(?P<file>test_\w+\.py)::)?(?P<test>test_\w+)(?:\[(?P<case>[^]]+)\])?")


def sections(text):
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name, _, rest = section.partition("\n")
        yield name, rest


SHOWN_BY = {
    name: dict(re.findall(r"^- (.+)\n((?:  .+\n)+)", text, re.MULTILINE))
    for name, text in sections((TESTS / "docs" / "shown_by.md").read_text())
}


def tables():
    """The title of each page with a table, its header row and its other rows, as lists of cells."""
    for page in GUIDE:
        name = page.partition("\n")[0].removeprefix("# ")
        for lines in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
            head, _, *rows = ([x.strip() for x in re.split(r" \| ", line.strip("| \n"))]
                              for line in lines.splitlines())  # fmt: skip
            yield name, head, rows


@functools.cache
def functions_of(file):
    """Maps each function in a test file to the text of the file."""
    (path,) = TESTS.rglob(file)
    functions = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef)]
    return {x.name: path.read_text() for x in functions}


def test_the_tests_are_there():
    found = 0
    for entry, text in (entry for entries in SHOWN_BY.values() for entry in entries.items()):
        file = None
        for test in REFERENCE.finditer(text):
            file, found = test["file"] or file, found + 1
            assert test["test"] in functions_of(file), f"{entry}: {file} has no {test['test']}"
            if test["case"]:
                assert f'"{test["case"]}"' in functions_of(file)[test["test"]], (
                    f"{entry}: {test[0]}"
                )
        assert file, f"{entry} has no test"
        assert not REFERENCE.sub("", text).strip(", \n"), f"{entry}: not read as tests"
    assert found > 100


def test_every_call_has_tests():
    calls = {
        name: [row[0] for row in rows] for name, head, rows in tables() if head[1:] == ["packax"]
    }
    assert calls == {name: [*x] for name, x in SHOWN_BY.items() if name != "Features"}


def test_every_feature_has_tests_or_is_not_there():
    (rows,) = [rows for _, head, rows in tables() if "Flex" in head]
    assert [row[0] for row in rows if row[1] != "**no**"] == [*SHOWN_BY["Features"]]
