"""Computes the package metadata that pyproject.toml cannot express: version and description.

scikit-build-core calls `dynamic_metadata` during a build.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
import tomllib
from collections.abc import Mapping
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))

import narrow  # noqa: E402

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", re.DOTALL)
PICTURE = re.compile(r"^!\[[^\]]*\]\(([^)\s]+)\)\n\n?", re.MULTILINE)


def version(root: pathlib.Path = ROOT, environment: Mapping[str, str] = os.environ) -> str:
    """The version in python/packax/__init__.py, with a local label if only a part of the kernels is
    built. An sdist (which contains PKG-INFO) keeps the version that pip expects.
    """
    text = (root / "python/packax/__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found, "python/packax/__init__.py has no line __version__"
    if (root / "PKG-INFO").exists():
        return found[1]
    return found[1] + narrow.local_version(narrow.chosen(environment))


def is_elsewhere(target: str) -> bool:
    return "://" in target or target.startswith(("#", "mailto:"))


def readme(root: pathlib.Path = ROOT) -> str:
    """README.md for a page without the other files of the repository.

    Relative links go to the repository that [project.urls] names as Source. Without it, links
    become plain text, and pictures are removed.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    source = project.get("urls", {}).get("Source", "").rstrip("/")
    text = (root / "README.md").read_text()
    text = re.sub(r"^<!-- .* -->\n", "", text, flags=re.MULTILINE)

    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        if is_elsewhere(target):
            return match[0]
        return f"[{words}]({source}/blob/HEAD/{target})" if source else words

    def picture(match: re.Match[str]) -> str:
        if is_elsewhere(match[1]):
            return match[0]
        return match[0].replace(match[1], f"{source}/raw/HEAD/{match[1]}") if source else ""

    return LINK.sub(link, PICTURE.sub(picture, text))


def dynamic_metadata(field: str, settings: Mapping[str, Any], *_: Any) -> str | dict[str, str]:
    if settings:
        raise ValueError(f"{field}: settings {dict(settings)} came, none are accepted")
    if field == "version":
        return version()
    if field == "readme":
        return {"content-type": "text/markdown", "text": readme()}
    raise ValueError(f"field: {field!r} came, version and readme are accepted")
