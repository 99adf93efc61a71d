"""Draws the pictures of docs/guide/tutorial.md, tutorial_*.png: runs the page's cells.

python docs/pictures/tutorial.py
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "guide" / "tutorial.md"


def run_cells(folder: Path) -> dict[str, Any]:
    """The names that the cells define. They write pictures into the folder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    before = Path.cwd()
    space: dict[str, Any] = {}
    try:
        os.chdir(folder)
        for number, cell in enumerate(
            re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        ):
            exec(compile(cell, f"cell {number} of {PAGE.name}", "exec"), space)
    finally:
        os.chdir(before)
        plt.close("all")
    return space


if __name__ == "__main__":
    run_cells(FOLDER)
