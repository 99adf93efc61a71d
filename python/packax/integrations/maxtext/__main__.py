"""Runs MaxText's programs with packax's attention.

python -m packax.integrations.maxtext [--every] train.py CONFIG [OPTION=VALUE ...]

--every: use packax with attention=dot_product, too, which MaxText requires for MoBA and sparse
indexers. The next argument is `train.py` (MaxText's pre-training), another module of MaxText, such
as maxtext.trainers.post_train.sft.train_sft, or the path of a script.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from packax.integrations.maxtext.install import install

_TRAIN = "maxtext.trainers.pre_train.train"


def main(arguments: list[str]) -> None:
    every = arguments[:1] == ["--every"]
    arguments = arguments[every:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    program = arguments[0]
    install(every=every)
    sys.argv = arguments
    if program in ("train", "train.py") and not Path(program).exists():
        program = _TRAIN
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
