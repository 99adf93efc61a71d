"""Finds words and phrases in prose that make a native speaker read a sentence twice.

    python .ci/check_words.py          in the repository's root; lists them, exits 1

Pages, comments and Python docstrings are checked. Code blocks, text in backticks and the targets of
links are not.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

INSTEAD = {  # a regular expression, and what to write
    r"after this page": "this page covers",
    r"beside": "with, next to, compared with, in addition to",
    r"likewise": "in the same way, also",
    r"kin|twins?": "the same kind, the counterpart",
    r"nobody": "no one, nothing, or the passive",
    r"lies": "is",
    r"meets?|met": "reaches, overlaps, is multiplied by",
    r"said once": "with one warning",
    r"in the open": "visible",
    r"pass(?:es)? by": "skips",
    r"of (?:its|their) own": "dedicated, separate",
    r"what is not there": "what is absent",
    r"(?:is|are) of all": "say over what it is computed",
    r"attends? (?:the|no|nothing|all|any|each|every|keys?)": "attends to",
    r"and so (?:do|does|did|is|are|has|have)": "as do, or a second sentence",
    r"neither (?:do|does|did|is|are|has|have)": "no other, or a second sentence",
}
PATTERNS = [
    (re.compile(rf"\b(?:{words.replace(' ', ' +')})\b", re.IGNORECASE), good)
    for words, good in INSTEAD.items()
]
NOT_PROSE = re.compile(r"^```.*?^```$|`[^`]*`|\]\([^)\s]*\)", re.MULTILINE | re.DOTALL)


def checked(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if name.endswith((".md", ".py", ".cc", ".h")) and not name.startswith("third_party/"):
            yield name


def prose_of_python(source: str) -> str:
    """Docstrings and comments on their lines, without doctests; code becomes spaces."""
    prose = [[" "] * len(line) for line in source.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or token.string.startswith('"""'):
            for n, line in enumerate(token.string.splitlines(), token.start[0] - 1):
                first = token.start[1] if n == token.start[0] - 1 else 0
                if not re.match(r" *(?:>>>|\.\.\. )", line):
                    prose[n][first : first + len(line)] = line
    return "\n".join("".join(line).replace("#", " ") for line in prose)


def prose_of_cpp(source: str) -> str:
    """Comments on their lines. A string with two slashes counts as a comment."""
    return "\n".join(line.partition("//")[2] for line in source.splitlines())


def prose_of(name: str, text: str) -> str:
    if name.endswith(".md"):
        return text
    return prose_of_python(text) if name.endswith(".py") else prose_of_cpp(text)


def stumbles(text: str) -> list[tuple[int, str, str]]:
    """(line, words, what to write instead); a phrase on two lines is listed with the first."""
    prose = NOT_PROSE.sub(lambda found: re.sub(r"[^\n]", ".", found[0]), text)
    prose = re.sub(r"\n *(?=\S)", lambda found: " " * len(found[0]), prose)
    all_found = [(x.start(), x[0], good) for words, good in PATTERNS for x in words.finditer(prose)]
    return [(text.count("\n", 0, at) + 1, bad, good) for at, bad, good in sorted(all_found)]


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout
    found = 0
    for name in filter(os.path.isfile, checked(listed.splitlines())):
        for line, bad, good in stumbles(prose_of(name, Path(name).read_text())):
            print(f"{name}:{line}: {bad!r}; write: {good}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
