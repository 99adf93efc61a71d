"""The kernel lookup (csrc/runtime/variants.cc) in the output of csrc/aot/emit.py for a made-up
table."""

import subprocess

import pytest
from emitted import COMPILER, arch, emit, mapped, mask, write
from paths import ROOT

PART = "archs 80 86, dtypes bf16"
BIG = {"qk_dim": 512, "v_dim": 512, "shared": 101_377}
WHOLE = f"; this build has only some of packax's kernels ({PART}): PACKAX_ARCHS=all pip install "
WHOLE += "./ builds all"
NEWEST = 2**31 - 1


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
    write(source, "upwards_sm87", **arch("87", kernel="upwards", arch_specific=True))
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
        words = [q.split() for q in questions]
        last = [str(NEWEST), "0"]  # driver and covering, unless the question has them
        text = "".join(" ".join([*w, *last[len(w) - 5 :]]) + "\n" for w in words)
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
        (88, "86"),  # the highest minor not above the device's
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


def test_orin_runs_only_its_own_code(lookup):
    """Desktop and Tegra GPUs do not run each other's cubins (csrc/aot/archs.py)."""
    assert lookup[2]("upwards 87 bf16 64 64") == ["upwards_sm87"]
    for cc in (80, 86, 88, 89):
        assert lookup[2](f"upwards {cc} bf16 64 64")[0].startswith("no upwards kernel")


@pytest.mark.parametrize("cc", [80, 86, 88, 89])
def test_shared_memory_counts(lookup, cc):
    """8.6 and 8.9 can run cubins for 8.0, but have less shared memory per block."""
    ask = lookup[2]
    small = cc > 80
    assert ask(f"sideways {cc} f16 256 256") == [f"sideways_bf16_256_sm{'80' if cc == 80 else 86}"]
    assert ask(f"sideways {cc} f16 512 512") == [
        f"no sideways kernel for compute capability 8.{cc % 10}, f16, head dims 512x512 (query and "
        "key x value); sideways_f16_512_sm80 needs 101377 bytes of shared memory, this GPU has "
        f"101376 for a block{WHOLE}"
        if small
        else "sideways_f16_512_sm80"
    ]


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("80 f16 8 8", "f16_128_sm80"),
        ("86 f16 200 128", "bf16_256_sm86"),
        ("80 bf16 72 64", "bf16_192_sm80"),
        ("80 f16 384 384", "f16_512_sm80"),
        ("90 bf16 64 8", "bf16_64_sm90a"),
    ],
)
def test_the_smallest_head_dims_that_cover_a_call(lookup, question, name):
    assert lookup[2](f"sideways {question} {NEWEST} 1") == [f"sideways_{name}"]


def test_why_no_head_dims_cover_a_call(lookup):
    """As for exact head dims, the error names the variant that lacks shared memory or a newer
    driver."""
    assert lookup[2](f"sideways 89 f16 384 384 {NEWEST} 1", "upwards 90 bf16 8 32 12090 1") == [
        "no sideways kernel for compute capability 8.9, f16, head dims 384x384 (query and key x "
        "value); sideways_f16_512_sm80 needs 101377 bytes of shared memory, this GPU has 101376 "
        f"for a block{WHOLE}",
        "no upwards kernel for compute capability 9.0, bf16, head dims 8x32 (query and key x "
        "value); upwards_sm90a_13000 needs a driver for CUDA 13.0 or newer, this one is for "
        "CUDA 12.9",
    ]


@pytest.mark.parametrize("cc", [70, 75, 79, 87, 110, 121])
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
