"""csrc/aot/emit.py, and the lookup over what it generates (csrc/runtime/variants.cc), on made-up
tables.

Guards against a table that C++ would misread: two rows of which one can never be reached, parameter
lists that differ under one struct, a device given a cubin that it cannot run. No GPU, no Triton.
"""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
from paths import AOT, ROOT

SCRIPT = AOT / "emit.py"
COMPILER = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)


def load_script():
    spec = importlib.util.spec_from_file_location("emit", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["emit"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


emit = load_script()

PARAMS = [
    {"name": "out", "type": "ptr"},
    {"name": "scale", "type": "f32"},
    {"name": "rows", "type": "i32"},
    {"name": "bytes", "type": "i64"},
]
MAPPED = [  # of kernel "mapped"
    {"name": "query", "type": "tma"},
    {"name": "dk", "type": "tma"},
    {"name": "q_order", "type": "ptr"},
    {"name": "rows", "type": "i32"},
]
BOXES = [{"box": [1, 64, 32], "swizzle": 3}, {"box": [1, 128, 64], "swizzle": 0}]
ROW = {
    "kernel": "sideways",
    "arch": "sm_90a",
    "cc": 90,
    "exact": True,
    "driver": 12000,
    "dtype": "bf16",
    "qk_dim": 64,
    "v_dim": 64,
    "symbol": "sideways",
    "threads": 128,
    "shared": 1024,
    "block": 64,
    "params": PARAMS,
    "tensor_maps": [],
}
KERNELS = dict.fromkeys(("sideways", "upwards", "mask_rows"), PARAMS)
KERNELS |= {"mapped": MAPPED, "absent": MAPPED[1:]}  # no variant of "absent" anywhere here


def lines(kernels):
    """kernels.txt."""
    params = {k: [f"{p['name']}:{p['type']}" for p in v] for k, v in kernels.items()}
    return "".join(f"{kernel} {' '.join(p)}\n" for kernel, p in params.items())


def write(folder, name, image=None, drop=(), **changes):
    folder.mkdir(exist_ok=True)
    (folder / "kernels.txt").write_text(lines(KERNELS))
    row = {k: v for k, v in {**ROW, **changes}.items() if k not in drop}
    (folder / f"{name}.json").write_text(json.dumps(row))
    (folder / f"{name}.cubin").write_bytes(f"cubin-of-{name}".encode() if image is None else image)


def arch(name, **changes):
    cc = int(name.rstrip("af"))
    return {"arch": f"sm_{name}", "cc": cc, "exact": name.endswith("a"), **changes}


def mapped(**changes):
    row = {"kernel": "mapped", "params": MAPPED, "tensor_maps": BOXES, "block": 192}
    return {**row, **changes}


def mask(name, **changes):
    return arch(name, kernel="mask_rows", dtype="any", qk_dim=0, v_dim=0, **changes)


# --- What it writes -------------------------------------------------------------------------------


def test_same_input_same_output(tmp_path):
    """Whatever the folder, and whatever the order in which its files were written."""
    names = ["b_sm80", "a_sm90a", "c_sm120a"]
    archs = ["80", "90a", "120a"]
    for folder, order in (("one", (0, 1, 2)), ("two", (2, 1, 0))):
        for i in order:
            write(tmp_path / folder, names[i], **arch(archs[i]))
        emit.emit(tmp_path / folder, tmp_path / f"{folder}-out")
    files = sorted(p.name for p in (tmp_path / "one-out").iterdir())
    assert files == ["args.h", "cubins.S", "table.inc"]
    for name in files:
        text = (tmp_path / "one-out" / name).read_text()
        assert text == (tmp_path / "two-out" / name).read_text()
        assert str(tmp_path) not in text
    rows = (tmp_path / "one-out" / "table.inc").read_text().splitlines()
    starts = [r.split("(")[1].split(",")[0] for r in rows if r.startswith("PACKAX_VARIANT")]
    assert starts == sorted(names)


def test_a_changed_cubin_changes_the_text(tmp_path):
    """Else the build would not assemble it again."""
    write(tmp_path / "in", "a")
    emit.emit(tmp_path / "in", tmp_path / "out")
    before = (tmp_path / "out" / "cubins.S").read_text()
    write(tmp_path / "in", "a", image=b"x" * len("cubin-of-a"))
    emit.emit(tmp_path / "in", tmp_path / "out")
    assert before != (tmp_path / "out" / "cubins.S").read_text()


def test_command_line(tmp_path):
    write(tmp_path / "in", "a")
    command = [sys.executable, SCRIPT, tmp_path / "in", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "emit.py: 1 variants of 1 kernels, 0.0 MB of cubins\n"
    write(tmp_path / "in", "b")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("emit.py: b and a have one key")


# --- What it refuses ------------------------------------------------------------------------------


def refused(folder):
    with pytest.raises(emit.TableError) as e:
        emit.emit(folder, folder.parent / "out")
    assert not (folder.parent / "out").exists()
    return str(e.value)


def test_one_key_twice(tmp_path):
    write(tmp_path / "in", "a")
    write(tmp_path / "in", "b", threads=256)
    assert refused(tmp_path / "in") == (
        "b and a have one key "
        "(kernel sideways, cc 90, exact True, driver 12000, dtype bf16, head dims 64x64)"
    )


@pytest.mark.parametrize(
    "other",
    [
        arch("90"),
        arch("80"),
        {"driver": 13000},
        {"dtype": "f16"},
        {"qk_dim": 128},
        {"v_dim": 128},
        {"kernel": "upwards"},
    ],
)
def test_neighbouring_keys(tmp_path, other):
    write(tmp_path / "in", "a")
    write(tmp_path / "in", "b", **other)
    assert len(emit.emit(tmp_path / "in", tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (PARAMS[:3], "4 and 3 arguments"),
        ([*PARAMS[:2], PARAMS[3], PARAMS[2]], "argument 2 is rows (i32) and bytes (i64)"),
        (
            [{"name": "out", "type": "i64"}, *PARAMS[1:]],
            "argument 0 is out (ptr) and out (i64)",
        ),
    ],
)
def test_two_parameter_lists(tmp_path, params, text):
    write(tmp_path / "in", "a")
    write(tmp_path / "in", "b", **arch("80"), params=params)
    assert refused(tmp_path / "in") == f"kernels.txt and b differ in parameters: {text}"


@pytest.mark.parametrize("field", list(ROW))
def test_missing_field(tmp_path, field):
    write(tmp_path / "in", "a", drop=(field,))
    assert refused(tmp_path / "in") == f"a.json: missing {field}"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cc": "90"}, "cc is '90', expected int"),
        ({"exact": 1}, "exact is 1, expected bool"),
        ({"threads": True}, "threads is True, expected int"),
        ({"params": None}, "params is None, expected list"),
        ({"kernel": "a-b"}, "kernel is 'a-b', expected lower-case words joined by '_'"),
        ({"cc": 80}, "arch 'sm_90a' and cc 80 do not agree"),
        ({"arch": "90a"}, "arch '90a' and cc 90 do not agree"),
        (
            {"exact": False},
            "arch sm_90a runs on no other compute capability, so exact must be true",
        ),
        *(
            (
                {"driver": driver},
                f"driver is {driver}, expected a version of CUDA from 12000 on (12090 is 12.9)",
            )
            for driver in (12, 11080, 12009)
        ),
        ({"driver": "13.0"}, "driver is '13.0', expected int"),
        ({"dtype": "f64"}, "dtype is 'f64', expected one of any, bf16, f16, f32, tf32"),
        (
            {"v_dim": 0},
            "head dims (64, 0) with dtype bf16; "
            "'any' goes with (0, 0), the others with positive dims",
        ),
        (
            {"dtype": "any"},
            "head dims (64, 64) with dtype any; "
            "'any' goes with (0, 0), the others with positive dims",
        ),
        ({"symbol": 'a"b'}, "symbol is 'a\"b', expected an identifier"),
        ({"threads": 100}, "threads is 100, expected a multiple of 32 up to 1024"),
        ({"threads": 2048}, "threads is 2048, expected a multiple of 32 up to 1024"),
        ({"shared": -1}, "shared is -1, expected at least 0"),
        ({"block": 0}, "block is 0, expected at least 1 (grids are divided by it)"),
        ({"params": []}, "params is empty"),
        ({"tensor_maps": {}}, "tensor_maps is {}, expected list"),
        ({"tensor_maps": BOXES[:1]}, "1 tensor_maps for 0 parameters of type tma"),
        (mapped(tensor_maps=BOXES[:1]), "1 tensor_maps for 2 parameters of type tma"),
        (
            mapped(tensor_maps=[BOXES[0], {"box": [1, 64, 64]}]),
            "tensor_maps[1] is {'box': [1, 64, 64]}, expected an object with `box`, `swizzle`",
        ),
        *(
            (
                mapped(tensor_maps=[{"box": box, "swizzle": 3}, BOXES[1]]),
                f"tensor_maps[0] has box {box!r}, expected [1, rows, columns] up to 256",
            )
            for box in ([64, 64], [2, 64, 64], [1, 0, 64], [1, 64, 257], [1, 64.0, 64], "164")
        ),
        (
            mapped(tensor_maps=[BOXES[0], {"box": [1, 64, 64], "swizzle": 4}]),
            "tensor_maps[1] has swizzle 4, expected 0 to 3",
        ),
        (
            mapped(
                params=[{"name": f"x{i}", "type": "tma"} for i in range(13)],
                tensor_maps=BOXES[:1] * 13,
            ),
            "13 tensor maps, C++ has room for 12",
        ),
        (mapped(block=64), "block is 64, but q_order is of tiles of 128 or 192"),
        (mapped(block=384), "block is 384, but q_order is of tiles of 128 or 192"),
        (
            mapped(params=[MAPPED[0], {"name": "kv_order", "type": "ptr"}], tensor_maps=BOXES[:1]),
            "block is 192, but kv_order is of tiles of 64 or 128",
        ),
        ({"params": ["out"]}, "params[0] is 'out', expected an object with `name` and `type`"),
        (
            {"params": [{"name": "Out", "type": "ptr"}]},
            "params[0] is named 'Out', expected a lower-case identifier",
        ),
        (
            {"params": [{"name": "out", "type": "u8"}]},
            "parameter out has type 'u8', expected one of ptr, i32, i64, f32, tma",
        ),
        (
            {"params": [PARAMS[0], PARAMS[0]]},
            "a parameter name occurs twice in ['out', 'out']",
        ),
        ({"image": b""}, "a.cubin is empty"),
    ],
)
def test_bad_field(tmp_path, changes, text):
    write(tmp_path / "in", "a", **changes)
    assert refused(tmp_path / "in") == f"a.json: {text}"


def test_bad_folder(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    assert refused(folder) == f"{folder / 'kernels.txt'}: missing; compile.py writes it"
    (folder / "kernels.txt").write_text(lines(KERNELS))
    assert refused(folder) == f"{folder}: no variants (*.json)"
    write(folder, "A-1")
    assert refused(folder).startswith("A-1.json: the file name must be a lower-case identifier")
    (folder / "A-1.json").unlink()
    write(folder, "a")
    assert refused(folder) == f"{folder}: cubins without a JSON file: A-1"
    (folder / "A-1.cubin").unlink()
    (folder / "a.cubin").unlink()
    assert refused(folder) == "a.json: a.cubin is missing beside it"
    (folder / "a.json").write_text("[]")
    assert refused(folder) == "a.json: expected an object, got list"
    (folder / "a.json").write_text("{")
    assert refused(folder).startswith("a.json: not JSON: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("upwards out:ptr\n", "a: kernel sideways is not in kernels.txt"),
        ("sideways out:ptr\n" * 2, "kernels.txt:2: sideways occurs twice"),
        ("sideways\n", "kernels.txt:1: params is empty"),
        (
            "sideways out\n",
            "kernels.txt:1: params[0] is {'name': 'out'}, "
            "expected an object with `name` and `type`",
        ),
        ("\n", "kernels.txt:1: kernel is '', expected lower-case words joined by '_'"),
    ],
)
def test_bad_list_of_kernels(tmp_path, text, message):
    write(tmp_path / "in", "a")
    (tmp_path / "in" / "kernels.txt").write_text(text)
    assert refused(tmp_path / "in") == message


@pytest.mark.parametrize("block", [128, 192])
def test_blocks_that_have_an_order(tmp_path, block):
    write(tmp_path / "in", "a", **mapped(block=block))
    assert len(emit.emit(tmp_path / "in", tmp_path / "out")) == 1


# --- What C++ reads -------------------------------------------------------------------------------


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
    table = emit.emit(source, out)
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
    """Every field and every byte arrives, aligned as cuLibraryLoadData likes it."""
    table, rows, _ = lookup
    for v, row in zip(table, rows, strict=False):
        want = [v.name, v.kernel, v.arch, v.cc, int(v.exact), v.driver, v.dtype]
        want += [v.qk_dim, v.v_dim, v.symbol, v.threads, v.shared, v.block, f"cubin-of-{v.name}", 0]
        if v.kernel == "mapped":
            want += [64, 32, 3, 128, 64, 0]
        assert row == " ".join(map(str, want))
    assert rows[len(table) :] == ["args 6 111111", "maps 18 011111111111111111", "absent 11"]


@pytest.mark.parametrize(
    ("cc", "name"),
    [
        (80, "80"),
        (86, "86"),
        (87, "86"),  # highest minor not above the device's
        (88, "86"),
        (89, "89"),
        (90, "90a"),  # exact before portable
        (91, "90"),  # exact on no other minor
        (100, "100f"),
        (103, "100f"),  # a family
        (120, "120a"),
    ],
)
def test_find(lookup, cc, name):
    ask = lookup[2]
    answers = ask(f"sideways {cc} bf16 64 64", f"mask_rows {cc} any 0 0")
    assert answers == [f"sideways_bf16_64_sm{name}", f"mask_rows_sm{name}"]


def test_find_wants_every_part(lookup):
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
    """The newest row that the driver loads, of the rows that suit the device best."""
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
        "(query and key x value); this build has none"
    ]


@pytest.mark.parametrize("cc", [70, 75, 79, 110, 121])
def test_nothing_to_run(lookup, cc):
    """Never a cubin of another major, of a later minor, or an exact one of a neighbour."""
    archs = "sm_80, sm_86, sm_89, sm_90, sm_90a, sm_100f, sm_120a"
    device = f"{cc // 10}.{cc % 10}"
    assert lookup[2](f"sideways {cc} bf16 64 64", f"mask_rows {cc} any 0 0") == [
        f"no sideways kernel for compute capability {device}, bf16, head dims 64x64 "
        f"(query and key x value); this build has it for {archs}; bf16, f16; "
        "head dims 64x64, 128x128, 192x128",
        f"no mask_rows kernel for compute capability {device}; this build has it for {archs}",
    ]
