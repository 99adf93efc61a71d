"""Draws docs/pictures/public_models.svg: cuDNN's time / packax's by model, from benchmarks/results.

python docs/pictures/public_models.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "models_h200.json"
sys.path.append(str(ROOT / "benchmarks"))


def main() -> None:
    sys.modules.pop("lib.ratios", None)  # it must draw with the `svg` that is imported now
    from lib.ratios import picture_of

    picture_of(json.loads(RESULTS.read_text())).save(__file__)


if __name__ == "__main__":
    main()
