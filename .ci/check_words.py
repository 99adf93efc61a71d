"""Finds words and phrases in the documentation that make a native speaker read a sentence twice.

    python .ci/check_words.py          from anywhere in the repository; lists them, exits 1

Code blocks, text in backticks and the targets of links are not checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

from check_columns import tracked_texts

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
}
PATTERNS = [
    (re.compile(rf"\b(?:{words.replace(' ', ' +')})\b", re.IGNORECASE), good)
    for words, good in INSTEAD.items()
]
NOT_PROSE = re.compile(r"^```.*?^```$|`[^`]*`|\]\([^)\s]*\)", re.MULTILINE | re.DOTALL)


def checked(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if name.endswith(".md") and not name.startswith("third_party/"):
            yield name


def stumbles(text: str) -> list[tuple[int, str, str]]:
    """(line, words, what to write instead); a phrase on two lines is listed with the first."""
    prose = NOT_PROSE.sub(lambda found: re.sub(r"[^\n]", ".", found[0]), text)
    prose = re.sub(r"\n *(?=\S)", lambda found: " " * len(found[0]), prose)
    all_found = [(x.start(), x[0], good) for words, good in PATTERNS for x in words.finditer(prose)]
    return [(text.count("\n", 0, at) + 1, bad, good) for at, bad, good in sorted(all_found)]


def main() -> int:
    found = 0
    for name, text in tracked_texts(checked):
        for line, bad, good in stumbles(text):
            print(f"{name}:{line}: {bad!r}; write: {good}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
