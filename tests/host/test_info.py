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
SM80 = ("backward_preprocess", "backward_sm80", "backward_postprocess_sm80")
SM90 = ("backward_preprocess", "backward_sm90", "backward_postprocess")
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


def of(kernels, **row):
    """Rows of other head dims or dtypes."""
    return tuple(VARIANTS[0] | {"kernel": k, "name": f"{k}_{row['qk_dim']}"} | row for k in kernels)


OF_96 = of(("forward", *SM80), dtype="bf16", qk_dim=96, v_dim=96)
OF_72 = of(("forward_sm90", *SM90), dtype="bf16", qk_dim=72, v_dim=72, cc=90, arch_specific=True)
FASTER = of(("forward_sm90",), dtype="bf16", qk_dim=64, v_dim=64, cc=90, arch="sm_90a")
BFLOAT16 = tuple(v for v in VARIANTS if v["dtype"] == "bf16")
WIDE_90 = tuple(row | {"cc": 90} for row in WIDE)
ONLY_FORWARD = of(("forward_sm90",), dtype="f16", qk_dim=512, v_dim=512, cc=90)
NO_DQ = tuple(v for v in VARIANTS if (v["kernel"], v["dtype"]) != ("backward_dq", "f16"))
PADDED = ["GPU 0, bfloat16, head dim 96: padded to 128", "GPU 1, bfloat16, head dim 96: forward_96",
    "GPU 1, float16, head dim 96: padded to 128",
    *(f"GPU {gpu}: other head dims run on the next larger one" for gpu in (0, 1))]  # fmt: skip
NONE = ["forward_"]  # no kernel
SHOWN = {  # changes of GOOD, what is shown, and what is not
    "everything": ({},
        ["packax 0.1.0, jax 0.11.2, jax-cuda13-plugin 0.11.2, Python 3.",
        "64 cubins for sm_80, sm_90a",
        "dtypes bfloat16, float16; head dims 64, 128, 192/128, 256", "supports CUDA 13.0",
        "GPU 0: NVIDIA H200, compute capability 9.0",
        "GPU 0, bfloat16, head dim 64: forward_bf16_64x64_sm90a",
        "GPU 1, float16, head dim 128: forward_f16_128x128_sm80",
        "GPU 1, bfloat16, head dim 192/128: forward_bf16_192x128_sm80"],
        ["XLA", "only", "float32", "512"]),
    "a part of the kernels": ({"part": "archs 80 90a, head-dims 64 128, dtypes bf16"},
        ["only some of packax's kernels (archs 80 90a, head-dims 64 128, dtypes bf16);",
        "PACKAX_ARCHS=all pip install ./ builds all of them"], []),
    # decode_combine in float16 is for queries over FP8 caches, not for float16 caches
    "a part of the dtypes": (
        build(*BFLOAT16, BFLOAT16[0] | {"kernel": "decode_combine", "dtype": "f16"}),
        ["dtypes bfloat16; head dims"], []),
    # one line lists what the wheel has, and there is one for every GPU and precision
    "float32": (build(*VARIANTS, *FLOAT32),
        ["float32, float32 in TF32; head dims up to 64",
        "GPU 0, float32, head dims up to 64: no cubin for 9.0",
        "GPU 1, float32, head dims up to 64: forward_fallback_f32_64x64_sm80",
        "GPU 1, float32 in TF32, head dims up to 64: forward_fallback_tf32_64x64_sm80"], []),
    "faster kernels": (build(*VARIANTS, *FASTER),
        ["GPU 0, bfloat16, head dim 64: forward_sm90_64"], []),
    "head dims of one GPU": (build(*VARIANTS, *OF_96), PADDED, []),
    "head dims of each GPU": (build(*VARIANTS, *OF_96, *OF_72),
        ["GPU 0, bfloat16, head dim 72: forward_sm90_72",
        "GPU 1, bfloat16, head dim 72: padded to 96"], []),
    "fallback kernels for 512": (build(*VARIANTS, *WIDE),
        ["head dims 64, 128, 192/128, 256, up to 512",
        "GPU 0, bfloat16, head dims up to 512: no cubin for 9.0",
        "GPU 1, float16, head dims up to 512: forward_fallback_f16_512x512_sm80",
        "GPU 1, float16, head dim 64: forward_f16_64x64_sm80"], ["head dim 512"]),
    "PACKAX_HEAD_DIMS=512": (build(*WIDE),
        ["GPU 1, float16, head dims up to 512: forward_fallback_f16_512x512_sm80"],
        ["head dim 64"]),
    "a forward for 512": (build(*VARIANTS, *WIDE, *WIDE_90, *ONLY_FORWARD),
        ["GPU 0, float16, head dims up to 512: forward_sm90_512",
        "GPU 0, bfloat16, head dims up to 512: forward_fallback"], ["head dim 512"]),
    "a missing backward": (build(*NO_DQ),
        ["GPU 0, bfloat16, head dim 64: forward_bf16_64x64_sm90a",
        "GPU 0, float16, head dim 64: no backward cubin for compute capability 9.0 with float16 "
        "and head dims 64/64"], []),
    "no driver": ({"driver": {"error": "cannot open libcuda.so.1"}, "platforms": ("cpu",)},
        ["not usable: cannot open libcuda.so.1", "on the CPU: no usable GPU"], NONE),
    "no GPU": ({"driver": {"version": 12040, "devices": []}, "platforms": ("cpu",)},
        ["sees no GPU: there is none", "supports CUDA 12.4", "on the CPU: no usable GPU"], NONE),
    "no plugin": ({"versions": {"jax": "0.11.2"}, "platforms": ("cpu",)},
        ["has no CUDA plugin: pip install 'jax[cuda13]'", "jax uses no GPU"], NONE),
    "no plugin, CUDA 12": ({"versions": {"jax": "0.11.2"}, "platforms": ("cpu",),
        "driver": {"version": 12080, "devices": [H200]}},
        ["has no CUDA plugin: pip install 'jax[cuda12]'"], NONE),
    "plugin newer than the driver": ({"driver": {"version": 12080, "devices": [H200]},
        "platforms": (), "jax_error": "Unable to initialize backend 'cuda'"},
        ["cannot start: Unable to initialize backend 'cuda'",
        "needs a driver that supports CUDA 13.0, and this one supports 12.8",
        "pip install 'jax[cuda12]'"], NONE),
    "JAX_PLATFORMS": ({"platforms": ("cpu",)},
        ["uses no GPU, though its CUDA plugin is installed: is JAX_PLATFORMS set?"], NONE),
    "GPU without a cubin": ({"driver": {"version": 13000, "devices": [T4]}},
        ["no cubin for compute capability 7.5; this wheel has 8.0, 9.0",
        'implementation="xla"'], NONE),
    "no extension": ({"driver": {}, "variants": (), "extension_error": "no file _ext",
        "platforms": ("cpu",)},
        ["packax._ext did not load: no file _ext",
        "on cpu: this installation has no kernels"], NONE),
}  # fmt: skip


@pytest.mark.parametrize("changes,shown,absent", SHOWN.values(), ids=SHOWN)
def test_what_is_shown(changes, shown, absent):
    """Nothing that would not run."""
    rendered = text(**changes)
    for part in shown:
        assert part in rendered, rendered
    for part in absent:
        assert part not in rendered, rendered


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
