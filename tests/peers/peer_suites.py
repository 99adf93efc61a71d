"""Runs other projects' own tests with packax in place of their attention, on the CPU.

    python tests/peers/peer_suites.py jax CHECKOUT [--out DIR]
    python tests/peers/peer_suites.py flax CHECKOUT
    python tests/peers/peer_suites.py kvax CHECKOUT
    python tests/peers/peer_suites.py levanter CHECKOUT
    python tests/peers/peer_suites.py maxtext CHECKOUT [-k EXPRESSION]
    PYTHONPATH=CHECKOUT/src python tests/peers/peer_suites.py maxtext CHECKOUT \
        --name "maxtext main" --version e591f30

CHECKOUT is a folder with the project's sources at the installed version; nothing is downloaded.
Every test runs twice: with the unchanged project, then with packax in place (see in_place.py). A
test that passes unchanged but not with packax is "refused" if packax raised NotImplementedError,
otherwise "wrong"; either makes the program exit with 1. kvax does not run unchanged without a GPU
and on today's jax, so all of its tests count. Writes peer_suites.json into --out (default: $OUT,
else benchmarks/results) and keeps the other suites in that file.

JAX_PLATFORMS defaults to "cpu"; kvax's tests of rows with 32k tokens need a GPU.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from lib.output import default_out, say, write_json

HERE = Path(__file__).resolve().parent
SUITES: dict[str, tuple[str, ...]] = {  # pytest arguments; the checkout may lack some files
    "jax": ("tests/nn_test.py", "-k", "DotProductAttention"),
    "flax": ("tests/linen/linen_attention_test.py", "tests/nnx/nn/attention_test.py"),
    "kvax": ("tests",),
    "levanter": (  # in Marin; then in Levanter 1.2, a separate repository
        "lib/levanter/tests/grug/test_attention.py",
        "lib/levanter/tests/test_attention.py",
        "tests/test_attention.py",
        "tests/test_flash_attention.py",
        "tests/test_latent_attention.py",
    ),
    "maxtext": (
        "tests/unit/attention_test.py",
        "tests/unit/qk_clip_test.py",
        "tests/unit/decoder_layer_model_mode_test.py",
        "tests/unit/deepseek_decode_consistency_test.py",
    ),
}
NOT_AS_IT_IS = ("kvax",)
DISTRIBUTIONS = {"levanter": "marin-levanter"}  # where the name differs


def arguments_of(suite: str, checkout: Path) -> list[str]:
    return [x for x in SUITES[suite] if not x.endswith(".py") or (checkout / x).exists()]


def outcomes(suite: str, checkout: Path, arguments: list[str], plain: bool) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        paths = [str(HERE), *sys.path[1:]]
        environment = os.environ | {
            "PEER_SUITE": suite,
            "PEER_REPORT": str(report),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
        }
        environment.pop("PEER_PLAIN", None)
        if plain:
            environment["PEER_PLAIN"] = "1"
        options = ["-q", "-p", "in_place", "-p", "no:cacheprovider", "-c", os.devnull]
        options += [f"--rootdir={checkout}", "--import-mode=importlib"]
        command = [
            sys.executable,
            "-m",
            "pytest",
            *options,
            *arguments_of(suite, checkout),
            *arguments,
        ]
        subprocess.run(command, cwd=checkout, env=environment)
        return json.loads(report.read_text())


def summary(plain: dict[str, str] | None, ours: dict[str, str]) -> dict[str, object]:
    """Counts, and the outcome of each test that packax breaks. Without `plain`, all should pass."""
    if plain is None:
        plain = {}
        passes = {name for name, outcome in ours.items() if outcome != "skipped"}
    else:
        passes = {name for name, outcome in plain.items() if outcome == "passed"}
    kinds = {name: ours.get(name, "failed: did not run").split(":")[0] for name in passes}
    count = collections.Counter(kinds.values())
    broken = {name: ours.get(name, "failed: did not run") for name in sorted(passes)}
    return {
        "as it is": dict(collections.Counter(x.split(":")[0] for x in plain.values())),
        "passed": count["passed"],
        "refused": count["refused"],
        "wrong": len(passes) - count["passed"] - count["refused"],
        "broken": {name: x for name, x in broken.items() if x != "passed"},
        "fails as it is": {name: x for name, x in plain.items() if x.startswith("failed")},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--name", help="of the result in the file; default: the suite's")
    parser.add_argument("--version", help="of the project; default: of what is installed")
    parser.add_argument("--out", type=Path, default=default_out())
    options, others = parser.parse_known_args(arguments)
    checkout = options.checkout.resolve()
    runs = options.suite not in NOT_AS_IT_IS
    plain = outcomes(options.suite, checkout, others, plain=True) if runs else None
    ours = outcomes(options.suite, checkout, others, plain=False)
    version = options.version or _version(options.suite)
    result: dict[str, object] = {"version": version, **summary(plain, ours)}
    result["jax"] = importlib.metadata.version("jax")
    result["arguments"] = [*arguments_of(options.suite, checkout), *others]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "peer_suites.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, {**known, options.name or options.suite: result})
    say(f"{options.suite} {result['version']}, as it is: {result['as it is']}")
    counts = ", ".join(f"{name} {result[name]}" for name in ("passed", "refused", "wrong"))
    say(f"with packax: {counts}")
    return bool(result["wrong"] or result["refused"] or not result["passed"])


def _version(project: str) -> str:
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(project, project))
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
