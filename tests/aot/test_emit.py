"""csrc/aot/emit.py on made-up tables.

Guards against a table that C++ would misread: a row that the lookup can never reach, differing
parameter lists for one struct, a device that gets a cubin it cannot run. No GPU, no Triton.
"""

import subprocess
import sys

import pytest
from emitted import BOXES, KERNELS, MAPPED, PARAMS, ROW, SCRIPT, arch, emit, lines, mapped, write

# --- Output ---------------------------------------------------------------------------------------


def test_same_input_same_output(tmp_path):
    """The output depends neither on the folder nor on the order in which its files were written."""
    names = ["b_sm80", "a_sm90a", "c_sm120a"]
    archs = ["80", "90a", "120a"]
    for folder, order in (("one", (0, 1, 2)), ("two", (2, 1, 0))):
        for i in order:
            write(tmp_path / folder, names[i], **arch(archs[i]))
        emit.emit(tmp_path / folder, tmp_path / f"{folder}-out")
    files = sorted(p.name for p in (tmp_path / "one-out").iterdir())
    assert files == ["args.h", "build.h", "cubins.S", "signatures.h", "table.inc"]
    for name in files:
        text = (tmp_path / "one-out" / name).read_text()
        assert text == (tmp_path / "two-out" / name).read_text()
        assert str(tmp_path) not in text
    rows = (tmp_path / "one-out" / "table.inc").read_text().splitlines()
    starts = [r.split("(")[1].split(",")[0] for r in rows if r.startswith("PACKAX_VARIANT")]
    assert starts == sorted(names)


def test_a_file_that_stays_the_same_is_not_written(tmp_path):
    """All C++ files include args.h, so rewriting it would recompile them."""
    write(tmp_path / "in", "a")
    emit.emit(tmp_path / "in", tmp_path / "out")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    write(tmp_path / "in", "a", image=b"other")
    emit.emit(tmp_path / "in", tmp_path / "out")
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"cubins.S"}


def test_a_changed_cubin_changes_the_text(tmp_path):
    """cubins.S includes the cubins by name; without a change the build would not reassemble it."""
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


# --- Errors ---------------------------------------------------------------------------------------


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
        "(kernel sideways, cc 90, arch_specific True, driver 12000, dtype bf16, head dims 64x64)"
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


@pytest.mark.parametrize("field", [*ROW, "sha256"])
def test_missing_field(tmp_path, field):
    write(tmp_path / "in", "a", drop=(field,))
    assert refused(tmp_path / "in") == f"a.json: missing {field}"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cc": "90"}, "cc is '90', expected int"),
        ({"arch_specific": 1}, "arch_specific is 1, expected bool"),
        ({"threads": True}, "threads is True, expected int"),
        ({"params": None}, "params is None, expected list"),
        ({"kernel": "a-b"}, "kernel is 'a-b', expected lower-case words joined by '_'"),
        ({"cc": 80}, "arch 'sm_90a' and cc 80 do not agree"),
        ({"arch": "90a"}, "arch '90a' and cc 90 do not agree"),
        ({"arch_specific": False},
            "arch sm_90a runs on no other compute capability, so arch_specific must be true"),
        *(
            (
                {"driver": driver},
                f"driver is {driver}, expected a version of CUDA from 12000 on (12090 is 12.9)",
            )
            for driver in (12, 11080, 12009)
        ),
        ({"driver": "13.0"}, "driver is '13.0', expected int"),
        ({"dtype": "f64"}, "dtype is 'f64', expected one of any, bf16, f16, f32, tf32, e4m3"),
        ({"v_dim": 0}, "head dims (64, 0) with dtype bf16; "
            "'any' goes with (0, 0), the others with positive dims"),
        ({"dtype": "any"}, "head dims (64, 64) with dtype any; "
            "'any' goes with (0, 0), the others with positive dims"),
        ({"symbol": 'a"b'}, "symbol is 'a\"b', expected an identifier"),
        ({"threads": 100}, "threads is 100, expected a multiple of 32 up to 1024"),
        ({"threads": 2048}, "threads is 2048, expected a multiple of 32 up to 1024"),
        ({"shared": -1}, "shared is -1, expected at least 0"),
        ({"block": 0}, "block is 0, expected at least 1 (grids are divided by it)"),
        ({"params": []}, "params is empty"),
        ({"tensor_maps": {}}, "tensor_maps is {}, expected list"),
        ({"tensor_maps": BOXES[:1]}, "1 tensor_maps for 0 parameters of type tma"),
        (mapped(tensor_maps=BOXES[:1]), "1 tensor_maps for 2 parameters of type tma"),
        (mapped(tensor_maps=[BOXES[0], {"box": [1, 1, 64, 64]}]),
            "tensor_maps[1] is {'box': [1, 1, 64, 64]}, expected an object with `box`, `swizzle`"),
        *(
            (
                mapped(tensor_maps=[{"box": box, "swizzle": 3}, BOXES[1]]),
                f"tensor_maps[0] has box {box!r}, expected [1, 1, rows, columns] up to 256",
            )
            for box in ([1, 64, 64], [1, 2, 64, 64], [1, 1, 0, 64], [1, 1, 64, 257],
                [1, 1, 64.0, 64], "1164")
        ),
        (mapped(tensor_maps=[BOXES[0], {"box": [1, 1, 64, 64], "swizzle": 4}]),
            "tensor_maps[1] has swizzle 4, expected 0 to 3"),
        (mapped(params=[{"name": f"x{i}", "type": "tma"} for i in range(14)],
            tensor_maps=BOXES[:1] * 14), "14 tensor maps, C++ has room for 13"),
        (mapped(block=32), "block is 32, but q_order is of tiles of 64 or 128 or 192"),
        (mapped(block=384), "block is 384, but q_order is of tiles of 64 or 128 or 192"),
        (mapped(block=64, params=[*MAPPED[:3], {"name": "counter", "type": "ptr"}]),
            "block is 64, but q_order is of tiles of 128 or 192"),
        (mapped(params=[MAPPED[0], {"name": "kv_order", "type": "ptr"}], tensor_maps=BOXES[:1]),
            "block is 192, but kv_order is of tiles of 64 or 128"),
        ({"params": ["out"]}, "params[0] is 'out', expected an object with `name` and `type`"),
        ({"params": [{"name": "Out", "type": "ptr"}]},
            "params[0] is named 'Out', expected a lower-case identifier"),
        ({"params": [{"name": "out", "type": "u8"}]},
            "parameter out has type 'u8', expected one of ptr, i32, i64, f32, tma"),
        ({"params": [PARAMS[0], PARAMS[0]]}, "a parameter name occurs twice in ['out', 'out']"),
        ({"image": b""}, "a.cubin is empty"),
        ({"sha256": "0" * 64}, f"a.cubin is not the cubin with the sha256 {'0' * 64}"),
    ],
)  # fmt: skip
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
        ("sideways out\n", "kernels.txt:1: params[0] is {'name': 'out'}, "
            "expected an object with `name` and `type`"),
        ("\n", "kernels.txt:1: kernel is '', expected lower-case words joined by '_'"),
    ],
)  # fmt: skip
def test_bad_list_of_kernels(tmp_path, text, message):
    write(tmp_path / "in", "a")
    (tmp_path / "in" / "kernels.txt").write_text(text)
    assert refused(tmp_path / "in") == message


@pytest.mark.parametrize("block", [128, 192])
def test_blocks_that_have_an_order(tmp_path, block):
    write(tmp_path / "in", "a", **mapped(block=block))
    assert len(emit.emit(tmp_path / "in", tmp_path / "out")) == 1
