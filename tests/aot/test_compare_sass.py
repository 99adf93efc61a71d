"""csrc/aot/compare_sass.py on made-up cubins: which differences count."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from paths import AOT

RECORD = {
    "arch": "sm_90a",
    "dtype": "bf16",
    "qk_dim": 64,
    "v_dim": 64,
    "threads": 128,
    "shared": 0,
    "block": 128,
    "assembler": "12.9",
    "registers": 32,
    "stack": 0,
    "driver": 12000,
    "tensor_maps": [],
    "params": [{"name": "query", "type": "ptr"}],
}


def elf(sections: dict[str, bytes]) -> bytes:
    """A 64-bit ELF file with these sections and a section name table."""
    names, body, headers = b"\0", b"", []
    for name, content in {**sections, ".shstrtab": b""}.items():
        headers.append([len(names), 64 + len(body), len(content)])
        names += name.encode() + b"\0"
        body += content
    headers[-1][1:] = [64 + len(body), len(names)]
    body += names
    head = bytearray(64)
    struct.pack_into("<Q", head, 40, 64 + len(body))
    struct.pack_into("<HHH", head, 58, 64, len(headers), len(headers) - 1)
    table = b"".join(
        struct.pack("<IIQQQQ", name, 1, 0, 0, offset, size).ljust(64, b"\0")
        for name, offset, size in headers
    )
    return bytes(head) + body + table


def build(
    folder: Path, kernel: str, code: bytes = b"FFMA", symbol: str = "", **changes: object
) -> None:
    folder.mkdir(exist_ok=True)
    name, symbol = f"{kernel}_bf16_64x64_sm90a", symbol or kernel
    (folder / f"{name}.json").write_text(
        json.dumps({**RECORD, "kernel": kernel, "symbol": symbol, **changes})
    )
    sections = {f".text.{symbol}": code, ".note.path": folder.name.encode()}
    (folder / f"{name}.cubin").write_bytes(elf(sections))


def compared(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, AOT / "compare_sass.py", tmp_path / "a", tmp_path / "b", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_names_of_kernels_and_files_do_not_count(tmp_path):
    build(tmp_path / "a", "forward_hopper")
    build(tmp_path / "b", "forward_sm90")
    renamed = compared(tmp_path, "--renamed", "forward_hopper=forward_sm90")
    assert renamed == (0, "1 variants compared, 0 differences\n")
    code, text = compared(tmp_path)
    assert code == 1 and "forward_hopper_bf16_64x64_sm90a: only before" in text
    assert "forward_sm90_bf16_64x64_sm90a: only after" in text


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"code": b"FADD"}, ".text.KERNEL: 4 bytes -> 4, not the same"),
        ({"registers": 40}, "registers 32 -> 40"),
        ({"shared": 64}, "shared 0 -> 64"),
        ({"params": [{"name": "query", "type": "tma"}]}, "types of parameters"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_differences_in_code_or_metadata_are_reported(tmp_path, changes, text):
    build(tmp_path / "a", "forward")
    build(tmp_path / "b", "forward", **changes)
    code, shown = compared(tmp_path)
    assert code == 1 and f"forward_bf16_64x64_sm90a: {text}\n" in shown
    assert shown.endswith("1 variants compared, 1 differences\n")


def test_nothing_to_compare_is_no_success(tmp_path):
    build(tmp_path / "a", "forward")
    build(tmp_path / "b", "forward")
    assert compared(tmp_path, "--arch", "80")[0] == 1
