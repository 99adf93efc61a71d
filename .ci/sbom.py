"""Writes what the wheels of a release contain and what built them, as CycloneDX 1.5 JSON.

    python .ci/sbom.py dist    writes dist/packax-VERSION.cdx.json

Versions are read from the environment that runs this, in which .ci/wheels built the wheels.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# distribution -> (licence, scope in CycloneDX, its role or what a wheel contains of it)
PARTS = {
    "nanobind": ("BSD-3-Clause", "required", "linked statically, with tsl::robin_map (MIT)"),
    "triton": ("MIT", "required", "compiled the kernels; its library code is in them"),
    "ziglang": (
        "MIT AND Apache-2.0 WITH LLVM-exception",
        "required",
        "libc++, libc++abi, libunwind and compiler-rt, linked statically",
    ),
    "jaxlib": ("Apache-2.0", "excluded", "headers of XLA's FFI"),
    "nvidia-cuda-runtime-cu12": ("LicenseRef-NVIDIA-CUDA-EULA", "excluded", "types of cuda.h"),
    "scikit-build-core": ("Apache-2.0", "excluded", "builds"),
    "cmake": ("Apache-2.0", "excluded", "builds"),
    "ninja": ("Apache-2.0", "excluded", "builds"),
    "auditwheel": ("MIT", "excluded", "checks the wheels and names them"),
}


def purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def component(name: str) -> dict[str, object]:
    licence, scope, role = PARTS[name]
    version = importlib.metadata.version(name)
    return {
        "type": "library" if scope == "required" else "application",
        "bom-ref": purl(name, version),
        "name": name,
        "version": version,
        "purl": purl(name, version),
        "scope": scope,
        "description": role,
        "licenses": [{"expression": licence}],
    }


def bom(folder: Path) -> dict[str, object]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "python/packax/__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found, "python/packax/__init__.py has no line __version__"
    me = purl("packax", found[1])
    files = [
        {
            "type": "file",
            "bom-ref": path.name,
            "name": path.name,
            "hashes": [
                {"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}
            ],
        }
        for path in sorted([*folder.glob("packax-*.whl"), *folder.glob("packax-*.tar.gz")])
    ]
    parts = [component(name) for name in PARTS]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": me,
                "name": "packax",
                "version": found[1],
                "purl": me,
                "licenses": [{"expression": project["license"]}],
            }
        },
        "components": [*parts, *files],
        "dependencies": [
            {"ref": me, "dependsOn": [part["bom-ref"] for part in parts]},
        ],
    }


def main(folder: str) -> int:
    made = bom(Path(folder))
    version = made["metadata"]["component"]["version"]  # type: ignore[index]
    path = Path(folder) / f"packax-{version}.cdx.json"
    path.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{path}: {len(made['components'])} components")  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
