"""The kernel lookup (csrc/runtime/variants.cc) in the output of csrc/aot/emit.py for a made-up
table."""

import subprocess

import pytest
from emitted import COMPILER, arch, emit, mapped, mask, write
from paths import ROOT

PART = "archs 80 86, dtypes bf16"
BIG = {"qk_dim": 512, "v_dim": 512, "shared": 101_377}
WHOLE = f"; this build has a part of packax's kernels ({PART}): PACKAX_ARCHS=all pip install ./ "
WHOLE += "builds all"


@pytest.fixture(scope="module")
def lookup(tmp_path_factory):
    """(rows, ask): the compiled table, and Find() over it."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("lookup")
    source, out = folder / "in", folder / "out"
    for name in ("80", "86", "89", "90a", "90", "100f", "120a"):
        write(source, f"sideways_bf16_64_sm{name}", **arch(name))
        write(source, f"mask_rows_sm{name}", **mask(name))
    write(source, "sideways_f16_128_sm80", **arch("80", dtype="f16", qk_dim=128, v_dim=128))
    write(source, "sideways_bf16_192_sm80", **arch("80", qk_dim=192, v_dim=128))
    write(source, "mapped_sm90a", **mapped())
    for name, row in (("90a", arch("90a")), ("90", arch("90"))):
        for driver in (12000, 12080, 13000):
            row = {**row, "driver": driver, "dtype": "f16"}
            write(source, f"sideways_f16_sm{name}_{driver}", **row)
    newer = {"driver": 13000, "qk_dim": 32, "v_dim": 32}
    write(source, "upwards_sm90a_13000", kernel="upwards", **newer)
    for name in ("80", "86"):  # above and at the shared memory limit of 8.6
        large = {"qk_dim": 256, "v_dim": 256, "shared": 101_377 if name == "80" else 101_376}
        write(source, f"sideways_bf16_256_sm{name}", **arch(name, **large, dtype="f16"))
    write(source, "sideways_f16_512_sm80", **arch("80", **BIG, dtype="f16"))
    table = emit.emit(source, out, PART)
    program = folder / "lookup"
    files = [
        ROOT / "tests/support/cpp/lookup.cc",
        ROOT / "csrc/runtime/variants.cc",
        out / "cubins.S",
    ]
    flags = ["-std=c++20", f"-I{ROOT / 'csrc'}", f"-I{out}", f"-Wa,-I,{source}"]
    subprocess.run([COMPILER, *flags, *files, "-o", program], check=True)

    def run(*questions):
        newest = 2**31 - 1
        text = "".join(q + (f" {newest}\n" if q.count(" ") < 5 else "\n") for q in questions)
        done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    rows = run()
    return table, rows, lambda *questions: run(*questions)[len(rows) :]


def test_compiled_table(lookup):
    """Every field and byte arrives, and cubins are aligned for cuLibraryLoadData."""
    table, rows, _ = lookup
    for v, row in zip(table, rows, strict=False):
        want = [v.name, v.kernel, v.arch, v.cc, int(v.arch_specific), v.driver, v.dtype]
        want += [v.qk_dim, v.v_dim, v.symbol, v.threads, v.shared, v.block, f"cubin-of-{v.name}", 0]
        if v.kernel == "mapped":
            want += [64, 32, 3, 128, 64, 0]
        assert row == " ".join(map(str, want))
    assert rows[len(table) :] == ["args pfilpp 111111", "maps ttpipp 111", "absent 1"]


@pytest.mark.parametrize(
    ("cc", "name"),
    [
        (80, "80"),
        (86, "86"),
        (87, "86"),  # the highest minor not above the device's
        (88, "86"),
        (89, "89"),
        (90, "90a"),  # arch-specific is preferred to portable
        (91, "90"),  # arch-specific code runs on no other minor
        (100, "100f"),
        (103, "100f"),  # family-specific
        (120, "120a"),
    ],
)
def test_find(lookup, cc, name):
    ask = lookup[2]
    answers = ask(f"sideways {cc} bf16 64 64", f"mask_rows {cc} any 0 0")
    assert answers == [f"sideways_bf16_64_sm{name}", f"mask_rows_sm{name}"]


def test_find_matches_every_part_of_the_key(lookup):
    ask = lookup[2]
    assert ask("sideways 86 f16 128 128") == ["sideways_f16_128_sm80"]
    assert ask("sideways 86 bf16 192 128") == ["sideways_bf16_192_sm80"]
    for question in ("80 f16 64 64", "86 bf16 128 192", "86 any 0 0", "90 bf16 192 128"):
        (answer,) = ask(f"sideways {question}")
        assert answer.startswith("no sideways kernel for compute capability ")
    assert ask("downwards 90 bf16 64 64", "sideways 90 f64 64 64") == ["unknown", "unknown"]


@pytest.mark.parametrize(
    ("driver", "found"),
    [
        (12000, 12000),
        (12079, 12000),
        (12080, 12080),
        (12090, 12080),
        (13000, 13000),
        (14020, 13000),
    ],
)
def test_find_for_a_driver(lookup, driver, found):
    """Of the rows that suit the device best, the newest one that the driver can load."""
    assert lookup[2](f"sideways 90 f16 64 64 {driver}", f"sideways 91 f16 64 64 {driver}") == [
        f"sideways_f16_sm90a_{found}",
        f"sideways_f16_sm90_{found}",
    ]


def test_find_for_an_older_driver_than_any(lookup):
    assert lookup[2]("sideways 90 f16 64 64 11080", "upwards 90 bf16 32 32 12090") == [
        "no sideways kernel for compute capability 9.0, f16, head dims 64x64 (query and key x "
        "value); sideways_f16_sm90a_12000 needs a driver for CUDA 12.0 or newer, this one is for "
        "CUDA 11.8",
        "no upwards kernel for compute capability 9.0, bf16, head dims 32x32 (query and key x "
        "value); upwards_sm90a_13000 needs a driver for CUDA 13.0 or newer, this one is for "
        "CUDA 12.9",
    ]


def test_find_a_kernel_that_the_build_left_out(lookup):
    assert lookup[2]("absent 90 bf16 64 64") == [
        "no absent kernel for compute capability 9.0, bf16, head dims 64x64 "
        f"(query and key x value); this build has none{WHOLE}"
    ]


@pytest.mark.parametrize("cc", [80, 86, 87, 88, 89])
def test_shared_memory_counts(lookup, cc):
    """8.6 and 8.9 can run cubins for 8.0, but have less shared memory per block."""
    ask = lookup[2]
    small = cc in (86, 88, 89)
    assert ask(f"sideways {cc} f16 256 256") == [f"sideways_bf16_256_sm{'80' if cc == 80 else 86}"]
    assert ask(f"sideways {cc} f16 512 512") == [
        f"no sideways kernel for compute capability 8.{cc % 10}, f16, head dims 512x512 (query and "
        "key x value); sideways_f16_512_sm80 needs 101377 bytes of shared memory, this GPU has "
        f"101376 for a block{WHOLE}"
        if small
        else "sideways_f16_512_sm80"
    ]


@pytest.mark.parametrize("cc", [70, 75, 79, 110, 121])
def test_nothing_to_run(lookup, cc):
    """Never a cubin for another major or a later minor, nor a neighbour's arch-specific one."""
    archs = "sm_80, sm_86, sm_89, sm_90, sm_90a, sm_100f, sm_120a"
    device = f"{cc // 10}.{cc % 10}"
    whole = WHOLE if cc >= 80 else ""  # older GPUs have no kernels to build
    assert lookup[2](f"sideways {cc} bf16 64 64", f"mask_rows {cc} any 0 0") == [
        f"no sideways kernel for compute capability {device}, bf16, head dims 64x64 "
        f"(query and key x value); this build has it for {archs}; bf16, f16; "
        f"head dims 64x64, 128x128, 192x128, 256x256, 512x512{whole}",
        f"no mask_rows kernel for compute capability {device}; this build has it for {archs}"
        f"{whole}",
    ]
