"""`python -m packax info`: what this machine would run, and when it is not the cubins, why not.

`gather` asks jax and the extension module; `render` turns its answer into text. Neither starts a kernel.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Iterable
from typing import Any

import packax

OLDEST_DRIVER = 12000  # the cubins are CUDA 12's; the driver states the newest CUDA it supports
CUDA_13_DRIVER = 13000
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
ATTENTION_KERNELS = ("forward", "backward_delta", "backward_dkdv", "backward_dq")
DTYPES = {"bfloat16": "bf16", "float16": "f16"}


@dataclasses.dataclass(frozen=True)
class Report:
    versions: dict[str, str | None]  # distribution -> version, None = not installed
    driver: dict[str, Any] | None  # packax._ext.driver(); None = no extension module
    variants: tuple[dict[str, Any], ...]
    platforms: tuple[str, ...]  # of jax's devices
    jax_error: str | None  # why jax has no devices
    extension: Any  # answers find(kernel, cc, dtype, qk_dim, v_dim)
    extension_error: str | None = None

    @property
    def head_dims(self) -> list[tuple[int, int]]:
        forward = (v for v in self.variants if v["kernel"] == "forward")
        return sorted({(v["qk_dim"], v["v_dim"]) for v in forward})

    @property
    def capabilities(self) -> list[int]:
        return sorted({v["cc"] for v in self.variants})


def report() -> Report:
    """What this machine is."""
    try:
        from packax import _ext
    except ImportError as error:
        return gather(None, extension_error=str(error))
    return gather(_ext)


def gather(
    extension: Any,
    *,
    versions: dict[str, str | None] | None = None,
    platforms: tuple[str, ...] | None = None,
    jax_error: str | None = None,
    extension_error: str | None = None,
) -> Report:
    """A report from an extension module (or a test's double), and from jax unless its answers are given."""
    if platforms is None:
        platforms, jax_error = _jax_platforms()
    return Report(
        versions=_versions() if versions is None else versions,
        driver=None if extension is None else dict(extension.driver()),
        variants=() if extension is None else tuple(map(dict, extension.variants())),
        platforms=platforms,
        jax_error=jax_error,
        extension=extension,
        extension_error=extension_error,
    )


def variant(report: Report, cc: int, dtype: str, qk_dim: int, v_dim: int) -> tuple[str | None, str]:
    """(the forward's variant, "") where every kernel of an attention call exists for this GPU, else (None, why not)."""
    chosen: str | None = None
    for kernel in ATTENTION_KERNELS:
        found = report.extension.find(kernel, cc, DTYPES[dtype], qk_dim, v_dim)
        if found is None:
            return None, _missing(report, kernel, cc, dtype, qk_dim, v_dim)
        if kernel == "forward":
            chosen = found["name"]
    return chosen, ""


def variant_in_use(report: Report, device: Any, dtype: str, head_dim: int) -> str:
    """The forward's variant on one of jax's GPUs, or why there is none."""
    if report.extension is None:
        return f"none: {report.extension_error}"
    cc = int(str(device.compute_capability).replace(".", ""))
    name, why = variant(report, cc, dtype, head_dim, head_dim)
    return name or f"none: {why}"


def render(report: Report) -> str:
    """The text of `python -m packax info`."""
    lines = [
        *_section("versions", _version_lines(report)),
        *_section("wheel", _wheel_lines(report)),
    ]
    driver, usable = _driver_lines(report)
    lines += _section("driver", driver)
    lines += _section("jax", _jax_lines(report))
    lines += _section("runs", _runs_lines(report, usable))
    return "\n".join(lines)


def _section(name: str, lines: Iterable[str]) -> list[str]:
    return [f"{name if i == 0 else '':<10}{line}" for i, line in enumerate(lines)]


def _version_lines(report: Report) -> list[str]:
    known = [f"{name} {version}" for name, version in report.versions.items() if version]
    return [", ".join(known) + f", Python {platform.python_version()}"]


def _wheel_lines(report: Report) -> list[str]:
    if report.extension is None:
        return [
            f"the extension module packax._ext is missing ({report.extension_error}):",
            "this packax was not installed from a wheel; `pip install ./` builds it",
        ]
    archs = sorted({(v["cc"], v["arch"]) for v in report.variants})
    dtypes = [
        name for name, short in DTYPES.items() if any(v["dtype"] == short for v in report.variants)
    ]
    dims = [f"{qk}" if qk == v else f"{qk}/{v}" for qk, v in report.head_dims]
    return [
        f"{len(report.variants)} cubins for {', '.join(arch for _, arch in archs) or 'no GPU'}",
        f"dtypes {', '.join(dtypes) or 'none'}; head dims {', '.join(dims) or 'none'}",
    ]


def _driver_lines(report: Report) -> tuple[list[str], bool]:
    """(text, whether the driver can load the cubins)."""
    driver = report.driver
    if driver is None:
        return ["not asked: that needs the extension module"], False
    if driver.get("error"):
        return [f"not usable: {driver['error']}"], False
    version = int(driver["version"])
    lines = [f"supports CUDA {cuda(version)}"]
    for device in driver["devices"]:
        lines.append(
            f"GPU {device['ordinal']}: {device['name']}, compute capability {capability(device['cc'])}"
        )
    if not driver["devices"]:
        lines.append("sees no GPU (CUDA_VISIBLE_DEVICES hides them, or there is none)")
    if version < OLDEST_DRIVER:
        lines.append(
            f"too old: the cubins need a driver that supports CUDA {cuda(OLDEST_DRIVER)} or newer"
        )
        return lines, False
    return lines, bool(driver["devices"])


def _jax_lines(report: Report) -> list[str]:
    plugins = [name for name in PLUGINS if report.versions.get(name)]
    if report.jax_error:
        lines = [f"cannot start: {report.jax_error}"]
    else:
        lines = [f"runs on {', '.join(report.platforms)}"]
    driver = report.driver or {}
    gpus = bool(driver.get("devices"))
    if gpus and not plugins:
        extra = "cuda13" if int(driver["version"]) >= CUDA_13_DRIVER else "cuda12"
        lines.append(f"has no CUDA plugin: `pip install './[{extra}]'`, or jax's own [{extra}]")
    elif gpus and plugins == ["jax-cuda13-plugin"] and int(driver["version"]) < CUDA_13_DRIVER:
        lines.append(
            f"jax's CUDA 13 plugin needs a driver of CUDA 13 (580 or newer), this one supports CUDA "
            f"{cuda(int(driver['version']))}: use the extra cuda12"
        )
    elif gpus and "gpu" not in report.platforms and not report.jax_error:
        lines.append(
            "does not use the GPU although its CUDA plugin is installed: is JAX_PLATFORMS set?"
        )
    return lines


def _runs_lines(report: Report, usable: bool) -> list[str]:
    fallback = "the blockwise XLA implementation, on the CPU"
    if report.extension is None or not usable:
        return [f"{fallback}: no GPU can be used (see driver and wheel above)"]
    if "gpu" not in report.platforms:
        return [f"{fallback}: jax does not use the GPU (see jax above)"]
    lines = []
    for device in report.driver["devices"] if report.driver else []:
        cc = int(device["cc"])
        if not any(
            report.extension.find("forward", cc, d, *dims)
            for d in DTYPES.values()
            for dims in report.head_dims
        ):
            lines.append(
                f"GPU {device['ordinal']}: nothing: {_missing(report, 'forward', cc, None, 0, 0)};"
            )
            lines.append('implementation="xla" runs there')
            continue
        for dtype in DTYPES:
            for dims in report.head_dims:
                name, why = variant(report, cc, dtype, *dims)
                lines.append(
                    f"GPU {device['ordinal']}, {dtype}, head dim {dims[0]}: {name or 'nothing: ' + why}"
                )
    return lines


def _missing(
    report: Report, kernel: str, cc: int, dtype: str | None, qk_dim: int, v_dim: int
) -> str:
    if dtype is None:
        have = ", ".join(capability(other) for other in report.capabilities)
        return f"no cubin for compute capability {capability(cc)}; this wheel has {have or 'none'}"
    return f"no {kernel} cubin for compute capability {capability(cc)}, {dtype}, head dims {qk_dim}/{v_dim}"


def cuda(version: int) -> str:
    """12090 -> 12.9"""
    return f"{version // 1000}.{version % 1000 // 10}"


def capability(cc: int) -> str:
    """90 -> 9.0"""
    return f"{cc // 10}.{cc % 10}"


def _versions() -> dict[str, str | None]:
    names = ("jax", "jaxlib", *PLUGINS, "numpy")
    return {"packax": packax.__version__} | {name: _installed(name) for name in names}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _jax_platforms() -> tuple[tuple[str, ...], str | None]:
    import jax

    try:
        return tuple(sorted({device.platform for device in jax.devices()})), None
    except RuntimeError as error:
        return (), str(error).strip().splitlines()[0]
