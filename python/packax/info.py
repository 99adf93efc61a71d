"""`python -m packax info`: what this machine would run, and why if it is not the cubins.

`gather` queries jax and the extension module, and `render` formats the answers. Neither launches a
kernel.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import os
import platform
from typing import Any

import packax

CUDA_13_DRIVER = 13000
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
DTYPES = {"bfloat16": "bf16", "float16": "f16"}
FLOAT32 = {"float32": "f32", "float32 in TF32": "tf32"}  # kernels also serve smaller head dims
_MULTIPROCESSORS = 132
_SIZES = {"batch": 1, "q_len": 1 << 16, "kv_len": 1 << 16, "heads": 8, "kv_heads": 8}
_LARGE_CALL = {**_SIZES, "needs_dq": True, "needs_dkv": True}  # of a training step, no option


@dataclasses.dataclass(frozen=True)
class Report:
    versions: dict[str, str | None]  # distribution -> version, None = not installed
    driver: dict[str, Any]  # packax._ext.driver()
    variants: tuple[dict[str, Any], ...]  # packax._ext.variants()
    extension: Any  # packax._ext
    platforms: tuple[str, ...]  # of jax's devices
    jax_error: str | None = None  # the error if jax has no devices
    extension_error: str | None = None  # the error if packax._ext did not load
    part: str = ""  # packax._ext.part()

    @property
    def devices(self) -> list[dict[str, Any]]:
        return list(self.driver.get("devices", ()))

    @property
    def driver_version(self) -> int:
        return int(self.driver.get("version", 0))

    @property
    def head_dims(self) -> list[tuple[int, int]]:
        return sorted(self._dims_of("forward", "forward_sm90") - set(self.wide_dims))

    @property
    def wide_dims(self) -> list[tuple[int, int]]:
        """16-bit head dims that have fallback kernels but no `forward` kernel; each kernel also
        serves smaller head dims."""
        short = [v for v in self.variants if v["dtype"] in DTYPES.values()]
        of = {(v["qk_dim"], v["v_dim"]) for v in short if v["kernel"] == "forward_fallback"}
        return sorted(of - self._dims_of("forward"))

    def _dims_of(self, *kernels: str) -> set[tuple[int, int]]:
        return {(v["qk_dim"], v["v_dim"]) for v in self.variants if v["kernel"] in kernels}

    @property
    def float32_dims(self) -> list[tuple[int, int]]:
        """The head dims of float32 kernels; each kernel also serves smaller head dims."""
        of = (v for v in self.variants if v["dtype"] in FLOAT32.values())
        return sorted({(v["qk_dim"], v["v_dim"]) for v in of})

    @property
    def capabilities(self) -> list[int]:
        return sorted({v["cc"] for v in self.variants})


def gather() -> Report:
    """Queries jax and the extension module about this machine."""
    platforms, jax_error = jax_platforms()
    try:
        extension = importlib.import_module("packax._ext")
    except ImportError as error:
        return Report(_versions(), {}, (), None, platforms, jax_error, extension_error=str(error))
    return Report(
        versions=_versions(),
        driver=dict(extension.driver()),
        variants=tuple(map(dict, extension.variants())),
        extension=extension,
        platforms=platforms,
        jax_error=jax_error,
        part=extension.part(),
    )


def variant(report: Report, cc: int, dtype: str, qk_dim: int, v_dim: int) -> tuple[str | None, str]:
    """(the forward kernel's variant, "") if the GPU has the kernels of both passes of a large call
    without options, else (None, why)."""
    call = {**_LARGE_CALL, "dtype": dtype, "qk_dim": qk_dim, "v_dim": v_dim}
    driver = report.driver_version
    dims = report.extension.judge("forward", call, [cc], driver)["dims"]
    if dims:
        return None, f"padded to {_dims(*dims)}"
    forward, backward = (
        report.extension.select(direction, cc, _MULTIPROCESSORS, call, driver)
        for direction in ("forward", "backward")
    )
    if forward and backward:
        return forward[0][1], ""
    what = "" if not forward and not backward else "backward " if forward else "forward "
    names = {short: name for name, short in (DTYPES | FLOAT32).items()}
    where = f"compute capability {capability(cc)} with {names[dtype]} and head dims"
    return None, f"no {what}cubin for {where} {qk_dim}/{v_dim}"


def variant_in_use(report: Report, device: Any, dtype: str, head_dim: int) -> str:
    """The forward kernel's variant on one of jax's GPUs, or why there is none."""
    cc = int(str(device.compute_capability).replace(".", ""))
    name, why = variant(report, cc, DTYPES[dtype], head_dim, head_dim)
    return name or (why if why.startswith("padded") else f"none: {why}")


def render(report: Report) -> str:
    """The text of `python -m packax info`."""
    sections = {
        "versions": _version_lines(report),
        "wheel": _wheel_lines(report),
        "driver": _driver_lines(report),
        "jax": _jax_lines(report),
        "runs": _runs_lines(report),
    }
    return "\n".join(
        f"{name if i == 0 else '':<10}{line}"
        for name, lines in sections.items()
        for i, line in enumerate(lines)
    )


def _version_lines(report: Report) -> list[str]:
    known = [f"{name} {version}" for name, version in report.versions.items() if version]
    return [", ".join([*known, f"Python {platform.python_version()}"])]


def _wheel_lines(report: Report) -> list[str]:
    if report.extension_error is not None:
        return [
            f"the extension module packax._ext did not load: {report.extension_error}",
            "it holds the kernels: reinstall packax (from its sources: pip install ./)",
        ]
    archs = [arch for _, arch in sorted({(v["cc"], v["arch"]) for v in report.variants})]
    # Narrowed to FP8 caches, a build has decode_combine for both dtypes of queries.
    built = {v["dtype"] for v in report.variants if v["kernel"] != "decode_combine"}
    dtypes = [name for name, short in DTYPES.items() if short in built]
    dims = [_dims(*pair) for pair in report.head_dims]
    dims += [f"up to {_dims(*pair)}" for pair in report.wide_dims]
    lines = [
        f"{len(report.variants)} cubins for {', '.join(archs) or 'no GPU'}",
        f"dtypes {', '.join(dtypes) or 'none'}; head dims {', '.join(dims) or 'none'}",
    ]
    names = [name for name, short in FLOAT32.items() if short in built]
    if names:
        dims = [_dims(*pair) for pair in report.float32_dims]
        lines.append(f"{', '.join(names)}; head dims up to {', '.join(dims)}")
    if report.part:
        lines.append(f"only some of packax's kernels ({report.part});")
        lines.append("PACKAX_ARCHS=all pip install ./ builds all of them")
    return lines


def _driver_lines(report: Report) -> list[str]:
    if report.extension_error is not None:
        return ["unknown: the extension module queries it"]
    if "error" in report.driver:
        return [f"not usable: {report.driver['error']}"]
    lines = [f"supports CUDA {cuda(report.driver_version)}"]
    for device in report.devices:
        name = f"GPU {device['ordinal']}: {device['name']}"
        lines.append(f"{name}, compute capability {capability(device['cc'])}")
    if not report.devices:
        lines.append("sees no GPU: there is none, or CUDA_VISIBLE_DEVICES hides it")
    return lines


def _jax_lines(report: Report) -> list[str]:
    if report.jax_error is None:
        lines = [f"runs on {', '.join(report.platforms)}"]
    else:
        lines = [f"cannot start: {report.jax_error}"]
    plugins = [name for name in PLUGINS if report.versions.get(name)]
    if not report.devices:
        return lines
    if not plugins:
        extra = "cuda13" if report.driver_version >= CUDA_13_DRIVER else "cuda12"
        lines.append(f"has no CUDA plugin: pip install 'jax[{extra}]'")
    elif plugins == ["jax-cuda13-plugin"] and report.driver_version < CUDA_13_DRIVER:
        lines.append(
            f"its CUDA 13 plugin needs a driver that supports CUDA {cuda(CUDA_13_DRIVER)}, "
            f"and this one supports {cuda(report.driver_version)}: pip install 'jax[cuda12]'"
        )
    elif "gpu" not in report.platforms and report.jax_error is None:
        lines.append("uses no GPU, though its CUDA plugin is installed: is JAX_PLATFORMS set?")
    return lines


def _runs_lines(report: Report) -> list[str]:
    fallback = "blockwise XLA attention on the CPU"
    if report.extension_error is not None:
        return [
            f"blockwise XLA attention on {', '.join(report.platforms) or 'nothing'}: "
            "this installation has no kernels (wheel, above)"
        ]
    if "error" in report.driver or not report.devices:
        return [f"{fallback}: no usable GPU (driver, above)"]
    if "gpu" not in report.platforms:
        return [f"{fallback}: jax uses no GPU (jax, above)"]
    lines = []
    for device in report.devices:
        cc, gpu = device["cc"], f"GPU {device['ordinal']}"
        rows = {
            (name, *dims): variant(report, cc, short, *dims)
            for name, short in DTYPES.items()
            for dims in report.head_dims
        }
        if rows and all(name is None and "padded" not in why for name, why in rows.values()):
            have = ", ".join(map(capability, report.capabilities)) or "none"
            lines.append(
                f"{gpu}: no cubin for compute capability {capability(cc)}; this wheel has {have}"
            )
            lines.append('on this GPU, pass implementation="xla": the default is an error')
            continue
        for (dtype, *dims), (name, why) in rows.items():
            lines.append(f"{gpu}, {dtype}, head dim {_dims(*dims)}: {name or why}")
        lines.append(f"{gpu}: other head dims run on the next larger one that has kernels")
        wide = [(*dtype, pair) for dtype in DTYPES.items() for pair in report.wide_dims]
        wide += [(*dtype, pair) for dtype in FLOAT32.items() for pair in report.float32_dims]
        for dtype, short, pair in wide:
            name, _ = variant(report, cc, short, *pair)
            what = name or f"no cubin for {capability(cc)}"
            lines.append(f"{gpu}, {dtype}, head dims up to {_dims(*pair)}: {what}")
    return lines


def _dims(qk_dim: int, v_dim: int) -> str:
    return str(qk_dim) if qk_dim == v_dim else f"{qk_dim}/{v_dim}"


def cuda(version: int) -> str:
    """Formats a CUDA version: 12090 -> 12.9."""
    return f"{version // 1000}.{version % 1000 // 10}"


def capability(cc: int) -> str:
    """Formats a compute capability: 90 -> 9.0."""
    return f"{cc // 10}.{cc % 10}"


def _versions() -> dict[str, str | None]:
    names = ("jax", "jaxlib", *PLUGINS, "numpy")
    return {"packax": packax.__version__} | {name: _installed(name) for name in names}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def jax_platforms() -> tuple[tuple[str, ...], str | None]:
    """The platforms of jax's devices, and why there are none."""
    import jax

    try:
        return tuple(sorted({device.platform for device in jax.devices()})), None
    except Exception as error:  # an AssertionError without text if a plugin is missing
        name = os.environ.get("JAX_PLATFORMS", "")
        lines = str(error).strip().splitlines()
        return (), lines[0] if lines else f"{type(error).__name__}, with JAX_PLATFORMS={name}"
