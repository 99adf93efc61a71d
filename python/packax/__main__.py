"""`python -m packax info`, `python -m packax check` and `python -m packax demo`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from packax import info

DEMO_PACKAGES = ("optax", "tqdm", "matplotlib")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m packax", description="exact attention over packed documents"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "info", help="print what this machine would run, and why if it is not the CUDA kernels"
    )
    commands.add_parser(
        "check",
        help="compare attention with a float32 reference, and time it (takes a minute on a GPU)",
    )
    demo = commands.add_parser(
        "demo",
        help="train a small transformer on packed documents, check it, and draw pictures",
        description="Trains a small byte-level transformer on the sources of Python's standard "
        "library, packed into long rows, compares packax with a dense reference, and draws the "
        "document mask and the loss. The default steps, row length, batch and time depend on the "
        "device.",
    )
    demo.add_argument("--steps", type=int, help="maximum number of training steps")
    demo.add_argument("--seq-len", type=int, help="tokens per row")
    demo.add_argument("--batch", type=int, help="rows per step")
    demo.add_argument("--seconds", type=float, help="maximum training time")
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("demo_output"),
        help="folder for the pictures (default: %(default)s)",
    )
    demo.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    arguments = parser.parse_args(argv)
    command = vars(arguments).pop("command")
    if command == "info":
        print(info.render(info.gather()))
        return 0
    _, error = info.jax_platforms()
    if error is not None:
        print(f"jax cannot start: {error}", file=sys.stderr)
        return 2
    if command == "check":
        from packax.check import run

        return run()
    return run_demo(arguments)


def run_demo(arguments: argparse.Namespace) -> int:
    missing = [name for name in DEMO_PACKAGES if not _installed(name)]
    if missing:
        print(
            f"the demo needs {', '.join(missing)}: pip install {' '.join(missing)}",
            file=sys.stderr,
        )
        return 2
    from packax.demo.run import run
    from packax.demo.settings import defaults

    try:
        settings = defaults(**vars(arguments))
        settings.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"python -m packax demo: {error}", file=sys.stderr)
        return 2
    return run(settings)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # the name is in sys.modules without a spec
        return False


if __name__ == "__main__":
    sys.exit(main())
