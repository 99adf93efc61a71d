"""Links and paths in the documentation, and pages that the code names, exist."""

import re

import packax
import pytest
from paths import DOCS, ROOT

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
