"""mkdocs hooks: links that leave docs/ work in the site as they do in the repository.

Pages link to results, examples and sources by relative paths. Each file that is linked goes into the
site under `source/`: Python, C++ and text as a page of code, everything else as it is.
CONTRIBUTING.md and CHANGELOG.md become pages. A link to a file that is not there stops a strict build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
CODE = {".py": "python", ".cc": "cpp", ".h": "cpp", ".txt": "text", ".sh": "bash"}
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
log = get_plugin_logger("site_hooks")


def on_files(files, config):
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    pages = [(f.src_uri, f.content_string) for f in files if f.is_documentation_page()]
    for uri, text in pages:
        for target, _ in LINK.findall(text):
            path = _in_repository(uri, target)
            name = _in_site(path)
            if name is None or files.get_file_from_path(name) is not None:
                continue
            if not path.is_file():
                log.warning(f"{uri} links to {path.relative_to(ROOT)}, which is not there")
            elif path.suffix in CODE:
                title = path.relative_to(ROOT).as_posix()
                code = f"``````{CODE[path.suffix]}\n{path.read_text()}\n``````"
                code = f"---\nsearch:\n  exclude: true\n---\n\n# {title}\n\n{code}\n"
                files.append(File.generated(config, name, content=code))
            else:
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    here = os.path.dirname(page.file.src_uri)

    def replaced(found):
        path = _in_repository(page.file.src_uri, found[1])
        name = _in_site(path)
        if name is None and page.file.src_uri in ROOT_PAGES.values():
            name = path.relative_to(ROOT / "docs").as_posix()
        if name is None:
            return found[0]
        return os.path.relpath(name, here or ".") + (found[2] or "")

    return markdown if page.file.src_uri.startswith("source/") else LINK.sub(replaced, markdown)


def _in_repository(uri, target):
    """The file that a link on a page names, wherever the page lies in the repository."""
    names = {page: name for name, page in ROOT_PAGES.items()}
    base = ROOT / names[uri] if uri in names else ROOT / "docs" / uri
    return Path(os.path.normpath(base.parent / target))


def _in_site(path):
    """Where the site has a file of the repository that does not lie in docs/; None for one that does."""
    name = path.relative_to(ROOT).as_posix()
    if name in ROOT_PAGES:
        return ROOT_PAGES[name]
    if name.startswith("docs/") and path.suffix != ".py":
        return None
    return f"source/{name}.md" if path.suffix in CODE else f"source/{name}"
