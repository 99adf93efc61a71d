"""packax with other projects' calling conventions: docs/guide/integrations.md.

Each module is imported separately (`from packax.integrations import flax`), so that importing
packax needs none of these projects. No module copies code: they compute packax's attention.
"""

from __future__ import annotations

import sys
import types
from typing import Any


def replace_everywhere(old: Any, new: Any, package: str = "") -> None:
    """Puts `new` in the place of `old` in every module, of this package, that is imported."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and package in ("", name.split(".")[0]):
            for attribute, x in list(vars(module).items()):
                if x is old:
                    setattr(module, attribute, new)
