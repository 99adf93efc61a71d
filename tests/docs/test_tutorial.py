"""The cells of docs/guide/tutorial.md run in order: the model learns, pictures are drawn."""

from __future__ import annotations

import re
import sys

import pytest
from paths import DOCS

PAGE = (DOCS / "guide" / "tutorial.md").read_text()


@pytest.mark.exhaustive
def test_cells(tmp_path, monkeypatch):
    pytest.importorskip("optax")
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(DOCS / "pictures")
    import tutorial

    space = tutorial.run_cells(tmp_path)
    sys.modules.pop("tutorial")
    losses = space["losses"]
    assert losses[0] > 5 and losses[-1] < 1.5
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == sorted(set(re.findall(r"pictures/(\w+\.png)", PAGE)))


def test_the_pictures_are_there_and_small():
    for name in re.findall(r"pictures/(\w+\.png)", PAGE):
        assert 1000 < (DOCS / "pictures" / name).stat().st_size < 60_000
