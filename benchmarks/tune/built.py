"""The kernels that `tune.py build` left in a folder, for the machine with the GPU."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from cubin import Driver, Kernel

MASK = ("documents_init", "documents_runs", "documents_rows", "blocks_rows", "blocks_keys",
    "blocks_order")  # fmt: skip


class Built:
    """The kernels in a folder, by name, head dims, label and assembler, loaded when requested."""

    def __init__(self, driver: Driver, folder: pathlib.Path):
        self.driver, self.folder = driver, folder
        self.rows = json.loads((folder / "index.json").read_text())
        self.loaded: dict[str, Kernel] = {}

    def kernel(self, row: dict[str, Any]) -> Kernel:
        name = row["file"]
        if name not in self.loaded:
            self.loaded[name] = Kernel(self.driver, self.folder / "cubins" / f"{name}.json")
        return self.loaded[name]

    def masks(self) -> dict[str, Kernel]:
        found = {row["kernel"]: row for row in self.rows if row["dims"] == [0, 0]}
        return {name: self.kernel(found[name]) for name in MASK}

    def twin(self, kernel: str, dims: tuple[int, int]) -> Kernel | None:
        """The table's portable kernel."""
        for row in self.rows:
            if (row["kernel"], tuple(row["dims"]), row["label"]) == (kernel, dims, None):
                return self.kernel(row)
        return None

    def candidates(
        self, dims: tuple[int, int], kernels: Sequence[str]
    ) -> dict[str, tuple[str, Kernel]]:
        """Title -> (kernel's name, kernel), the table's tile first, without those that need a newer
        driver."""
        rows = [row for row in self.rows if row["label"] and tuple(row["dims"]) == dims]
        rows = [row for row in rows if row["kernel"] in kernels]
        rows.sort(key=lambda row: row["assembler"], reverse=True)  # the newest first, as in C++
        rows.sort(key=lambda row: (kernels.index(row["kernel"]), row["label"] != "table"))
        found = {}
        for row in rows:
            meta = json.loads((self.folder / "cubins" / f"{row['file']}.json").read_text())
            if meta["driver"] <= self.driver.version:
                title = f"{row['kernel']} {row['label']} {row['assembler']}"
                found[title] = (row["kernel"], self.kernel(row))
        return found
