"""packax with the calling conventions of other projects.

See "Migrating" in the documentation. Import each module separately, such as
`from packax.integrations import flax`; importing packax requires none of these projects. The
modules contain no code of these projects: they call packax's attention.
"""

from __future__ import annotations

import sys
import types
from typing import Any


def replace_everywhere(old: Any, new: Any, package: str = "") -> None:
    """Replaces `old` by `new` in all imported modules (of this package, if given)."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and package in ("", name.split(".")[0]):
            for attribute, x in list(vars(module).items()):
                if x is old:
                    setattr(module, attribute, new)
