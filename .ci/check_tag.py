"""Checks that a wheel's manylinux tag is not older than the glibc that auditwheel says it needs.

python .ci/check_tag.py dist/packax-...whl    prints what it needs; exits 1 if the tag is wrong
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

NEWEST = (2, 28)  # glibc of RHEL 8; Ubuntu 20.04 and newer have a newer one


def main(path: str) -> int:
    show = [sys.executable, "-m", "auditwheel", "show", path]
    text = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    found = re.search(r'platform tag:\s+"manylinux_(\d+)_(\d+)_(\w+)"', text)
    if not found:
        print(f"{path}: auditwheel names no manylinux tag:\n{text}")
        return 1
    needs = int(found[1]), int(found[2])
    name = Path(path).stem
    promised = [(int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)_", name)]
    ok = bool(promised) and needs <= min(promised) and needs <= NEWEST
    ok = ok and name.endswith(found[3])
    print(f"{name}: auditwheel says manylinux_{found[1]}_{found[2]}_{found[3]}")
    if not ok:
        print(f"  wrong: the name promises {promised}, {NEWEST} or older is accepted")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
