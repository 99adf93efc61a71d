"""`packax info` reports, in every situation, what would run, and why cubins would not."""

from __future__ import annotations

import dataclasses

import pytest
from packax import info
from packax.__main__ import main
from stand_in import StandIn

H200 = {"ordinal": 0, "name": "NVIDIA H200", "cc": 90}
A10 = {"ordinal": 1, "name": "NVIDIA A10", "cc": 86}
T4 = {"ordinal": 0, "name": "Tesla T4", "cc": 75}
KERNELS = ("forward", "backward_delta", "backward_dkdv", "backward_dq")
GENERAL = tuple(f"{kernel}_fallback" for kernel in KERNELS)
VARIANTS = tuple(
    {
        "name": f"{kernel}_{dtype}_{qk_dim}x{v_dim}_{arch.replace('_', '')}",
        "kernel": kernel,
        "arch": arch,
        "cc": cc,
        "arch_specific": cc == 90,
        "dtype": dtype,
        "qk_dim": qk_dim,
        "v_dim": v_dim,
    }
    for kernel in KERNELS
    for dtype in ("bf16", "f16")
    for qk_dim, v_dim in ((64, 64), (128, 128), (192, 128), (256, 256))
    for arch, cc in (("sm_80", 80), ("sm_90a", 90))
)
FLOAT32 = tuple(
    VARIANTS[0] | {"kernel": k, "dtype": t, "name": f"{k}_{t}_64x64_sm80"}
    for k in GENERAL
    for t in ("f32", "tf32")
)


WIDE = tuple(
    VARIANTS[0]
    | {"kernel": k, "dtype": t, "qk_dim": 512, "v_dim": 512, "name": f"{k}_{t}_512x512_sm80"}
    for k in GENERAL
    for t in ("bf16", "f16")
)


def build(*rows):
    """The fields of a Report about a wheel with these variants."""

    class Extension(StandIn):
        @staticmethod
        def variants():
            return rows

    return {"variants": rows, "extension": Extension}


GOOD = info.Report(
    versions={"packax": "0.1.0", "jax": "0.11.2", "jax-cuda13-plugin": "0.11.2", "numpy": None},
    driver={"version": 13000, "devices": [H200, A10]},
    platforms=("gpu",),
    **build(*VARIANTS),
)


def text(**changes) -> str:
    return info.render(dataclasses.replace(GOOD, **changes))


def test_everything_is_there():
    shown = text()
    assert "packax 0.1.0, jax 0.11.2, jax-cuda13-plugin 0.11.2, Python 3." in shown
    assert "64 cubins for sm_80, sm_90a" in shown
    assert "dtypes bfloat16, float16; head dims 64, 128, 192/128, 256" in shown
    assert "supports CUDA 13.0" in shown
    assert "GPU 0: NVIDIA H200, compute capability 9.0" in shown
    assert "GPU 0, bfloat16, head dim 64: forward_bf16_64x64_sm90a" in shown
    assert "GPU 1, float16, head dim 128: forward_f16_128x128_sm80" in shown
    assert "GPU 1, bfloat16, head dim 192/128: forward_bf16_192x128_sm80" in shown
    assert "XLA" not in shown


def test_a_part_of_the_kernels():
    shown = text(part="archs 80 90a, head-dims 64 128, dtypes bf16")
    assert "only some of packax's kernels (archs 80 90a, head-dims 64 128, dtypes bf16);" in shown
    assert "PACKAX_ARCHS=all pip install ./ builds all of them" in shown and "only" not in text()


def test_a_part_of_the_dtypes():
    """decode_combine in float16 is for queries over FP8 caches, not for float16 caches."""
    rows = tuple(v for v in VARIANTS if v["dtype"] == "bf16")
    rows += (rows[0] | {"kernel": "decode_combine", "dtype": "f16"},)
    assert "dtypes bfloat16; head dims" in text(**build(*rows))


def test_float32():
    """One line lists what the wheel has, and there is one for every GPU and precision."""
    rows = VARIANTS + FLOAT32
    shown = text(**build(*rows))
    assert "float32, float32 in TF32; head dims up to 64" in shown
    assert "GPU 0, float32, head dims up to 64: no cubin for 9.0" in shown
    assert "GPU 1, float32, head dims up to 64: forward_fallback_f32_64x64_sm80" in shown
    assert "GPU 1, float32 in TF32, head dims up to 64: forward_fallback_tf32_64x64_sm80" in shown
    assert "float32" not in text()


def test_faster_kernels():
    faster = VARIANTS[0] | {"kernel": "forward_sm90", "cc": 90, "name": "forward_sm90_bf16_64x64"}
    faster |= {"dtype": "bf16", "qk_dim": 64, "v_dim": 64, "arch": "sm_90a"}
    rows = (*VARIANTS, faster)
    shown = text(**build(*rows))
    assert "GPU 0, bfloat16, head dim 64: forward_sm90_bf16_64x64" in shown


def test_head_dims_that_are_padded():
    """The head dims that other GPUs have are listed (packax/_src/ops/lowering.py)."""
    of_96 = ("forward", "backward_preprocess", "backward_sm80", "backward_postprocess_sm80")
    own = {"dtype": "bf16", "qk_dim": 96, "v_dim": 96}
    rows = (*VARIANTS, *(VARIANTS[0] | own | {"kernel": k, "name": f"{k}_96"} for k in of_96))
    shown = text(**build(*rows))
    assert "GPU 0, bfloat16, head dim 96: padded to 128" in shown
    assert "GPU 1, bfloat16, head dim 96: forward_96" in shown
    assert "GPU 1, float16, head dim 96: padded to 128" in shown
    for gpu in (0, 1):
        assert f"GPU {gpu}: other head dims run on the next larger one" in shown
    own = {"cc": 90, "arch_specific": True, "dtype": "bf16", "qk_dim": 72, "v_dim": 72}
    of_72 = ("forward_sm90", "backward_preprocess", "backward_sm90", "backward_postprocess")
    rows += (*(VARIANTS[0] | own | {"kernel": k, "name": f"{k}_72"} for k in of_72),)
    shown = text(**build(*rows))
    assert "GPU 0, bfloat16, head dim 72: forward_sm90_72" in shown
    assert "GPU 1, bfloat16, head dim 72: padded to 96" in shown


@pytest.mark.parametrize("others", [VARIANTS, ()], ids=["all", "PACKAX_HEAD_DIMS=512"])
def test_head_dims_of_fallback_kernels_alone(others):
    rows = others + WIDE
    shown = text(**build(*rows))
    assert "head dims 64, 128, 192/128, 256, up to 512" in shown or not others
    assert "GPU 0, bfloat16, head dims up to 512: no cubin for 9.0" in shown
    assert "GPU 1, float16, head dims up to 512: forward_fallback_f16_512x512_sm80" in shown
    assert ("GPU 1, float16, head dim 64: forward_f16_64x64_sm80" in shown) == bool(others)
    assert "512" not in text()
    own = {"kernel": "forward_sm90", "name": "forward_sm90_512", "dtype": "f16", "cc": 90}
    rows += (*(row | {"cc": 90} for row in WIDE), WIDE[0] | own)  # only the forward
    shown = text(**build(*rows))
    assert "GPU 0, float16, head dims up to 512: forward_sm90_512" in shown
    assert "GPU 0, bfloat16, head dims up to 512: forward_fallback" in shown
    assert "head dim 512" not in shown


@pytest.mark.parametrize(
    "changes,reasons",
    (
        ({"driver": {"error": "cannot open libcuda.so.1"}, "platforms": ("cpu",)},
            ["not usable: cannot open libcuda.so.1", "on the CPU: no usable GPU"]),
        ({"driver": {"version": 12040, "devices": []}, "platforms": ("cpu",)},
            ["sees no GPU: there is none", "supports CUDA 12.4", "on the CPU: no usable GPU"]),
        ({"versions": {"jax": "0.11.2"}, "platforms": ("cpu",)},
            ["has no CUDA plugin: pip install 'jax[cuda13]'", "jax uses no GPU"]),
        ({"versions": {"jax": "0.11.2"}, "platforms": ("cpu",),
            "driver": {"version": 12080, "devices": [H200]}},
            ["has no CUDA plugin: pip install 'jax[cuda12]'"]),
        ({"driver": {"version": 12080, "devices": [H200]}, "platforms": (),
            "jax_error": "Unable to initialize backend 'cuda'"},
            ["cannot start: Unable to initialize backend 'cuda'",
            "needs a driver that supports CUDA 13.0, and this one supports 12.8",
            "pip install 'jax[cuda12]'"]),
        ({"platforms": ("cpu",)},
            ["uses no GPU, though its CUDA plugin is installed: is JAX_PLATFORMS set?"]),
        ({"driver": {"version": 13000, "devices": [T4]}},
            ["no cubin for compute capability 7.5; this wheel has 8.0, 9.0",
            'implementation="xla"']),
        ({"driver": {}, "variants": (), "extension_error": "no file _ext", "platforms": ("cpu",)},
            ["packax._ext did not load: no file _ext", "on cpu: this installation has no kernels"]),
    ),
    ids=(
        "no driver",
        "no GPU",
        "no plugin",
        "no plugin, CUDA 12",
        "plugin newer than the driver",
        "JAX_PLATFORMS",
        "GPU without a cubin",
        "no extension",
    ),
)  # fmt: skip
def test_why_not(changes, reasons):
    shown = text(**changes)
    for reason in reasons:
        assert reason in shown, shown
    assert "forward_" not in shown  # nothing that would not run


def test_a_pass_whose_kernels_are_missing_is_named():
    few = tuple(v for v in VARIANTS if not (v["kernel"] == "backward_dq" and v["dtype"] == "f16"))
    shown = text(**build(*few))
    assert "GPU 0, bfloat16, head dim 64: forward_bf16_64x64_sm90a" in shown
    where = "compute capability 9.0 with float16 and head dims 64/64"
    assert f"GPU 0, float16, head dim 64: no backward cubin for {where}" in shown


def test_the_command_on_this_machine(capsys):
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for section in ("versions", "wheel", "driver", "jax", "runs"):
        assert f"\n{section} " in "\n" + shown


def test_variant_in_use():
    class Device:
        compute_capability = "9.0"

    assert info.variant_in_use(GOOD, Device, "bfloat16", 64) == "forward_bf16_64x64_sm90a"
    assert info.variant_in_use(GOOD, Device, "bfloat16", 80) == "padded to 128"
    assert info.variant_in_use(GOOD, Device, "bfloat16", 520).startswith("none: no cubin for")
