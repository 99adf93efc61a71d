"""The pages' pictures are what their scripts draw, and small."""

import importlib
import sys

import pytest
from paths import DOCS

FOLDER = DOCS / "pictures"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("svg", "tutorial"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_picture_is_up_to_date(name, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    svg = importlib.import_module("svg")
    drawn = []
    monkeypatch.setattr(svg.Picture, "save", lambda picture, script: drawn.append(picture.text()))
    script = importlib.import_module(name)
    script.main()
    for module in (name, "svg"):
        sys.modules.pop(module)
    path = FOLDER / f"{name}.svg"
    assert drawn == [path.read_text()], f"run python docs/pictures/{name}.py"
    assert path.stat().st_size < 30_000


def test_every_picture_is_on_a_page():
    pages = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert sorted(path.stem for path in FOLDER.glob("*.svg")) == SCRIPTS
    assert not [name for name in SCRIPTS if f"pictures/{name}.svg" not in pages]
