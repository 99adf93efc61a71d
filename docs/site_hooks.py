"""mkdocs hooks: links that leave docs/ work in the site as they do in the repository.

Pages link to results, examples and sources by relative paths. Each file that is linked goes into
the site under `source/`: Python, C++ and text as a page of code, everything else as it is.
CONTRIBUTING.md and CHANGELOG.md become pages. A link to a file that is not there stops a strict
build. The lists of docs/internals/generate.py are put where their pages mark it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "internals"))

import generate  # noqa: E402

ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
CODE = {".py": "python", ".cc": "cpp", ".h": "cpp", ".txt": "text", ".sh": "bash"}
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
log = get_plugin_logger("site_hooks")


def on_config(config):
    """The version of packax that the site is about, at the end of each page."""
    source = (ROOT / "python" / "packax" / "__init__.py").read_text()
    config.copyright = "packax " + re.search(r'__version__ = "(.+)"', source)[1]
    return config


def on_files(files, config):
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    pages = [f for f in files if f.is_documentation_page()]
    for page in pages:  # grows: a page of the repository may link to more
        for target, _ in LINK.findall(page.content_string):
            path = _linked(page.src_uri, target)
            uri = _in_site(path)
            if files.get_file_from_path(uri) is not None or not uri.startswith("source/"):
                continue
            if not path.is_file():
                log.warning(f"{page.src_uri} links to {path.relative_to(ROOT)}, which is not there")
            elif path.suffix in CODE:
                title = path.relative_to(ROOT).as_posix()
                code = f"``````{CODE[path.suffix]}\n{path.read_text()}\n``````"
                code = f"---\nsearch:\n  exclude: true\n---\n\n# {title}\n\n{code}\n"
                files.append(File.generated(config, uri, content=code))
            else:
                files.append(File.generated(config, uri, abs_src_path=str(path)))
                if path.suffix == ".md":
                    pages.append(files.get_file_from_path(uri))
    return files


def on_page_markdown(markdown, page, config, files):
    uri = page.file.src_uri
    part = generate.PARTS.get(uri.removeprefix("internals/"))
    if part:
        markdown = markdown.replace(generate.MARK, part())

    def replaced(found):
        target = _in_site(_linked(uri, found[1]))
        return os.path.relpath(target, os.path.dirname(uri) or ".") + (found[2] or "")

    return markdown if _is_code(uri) else LINK.sub(replaced, markdown)


def _is_code(uri):
    return uri.startswith("source/") and Path(uri).with_suffix("").suffix in CODE


def _linked(uri, target):
    """The file that a link on a page names, wherever the page is in the repository."""
    names = {page: name for name, page in ROOT_PAGES.items()}
    if uri in names:
        page = ROOT / names[uri]
    elif uri.startswith("source/"):
        page = ROOT / uri.removeprefix("source/")
    else:
        page = ROOT / "docs" / uri
    return Path(os.path.normpath(page.parent / target))


def _in_site(path):
    """Where the site has a file of the repository."""
    name = path.relative_to(ROOT).as_posix()
    if name in ROOT_PAGES:
        return ROOT_PAGES[name]
    if name.startswith("docs/") and path.suffix != ".py":
        return name.removeprefix("docs/")
    return f"source/{name}.md" if path.suffix in CODE else f"source/{name}"
