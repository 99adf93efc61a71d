"""Which of racecheck's reports are of what Triton hands to the warps of a partition, by the
instructions at their addresses:

    python tests/gpu/hand_over.py RACECHECK.txt FOLDER
    python tests/gpu/hand_over.py RACECHECK.txt CUBINS 128x128

Needs no GPU; nvdisasm is in the Triton wheel.

RACECHECK.txt is what `hazards.py racecheck ... -- benchmarks/tune/tune.py check FOLDER` wrote,
FOLDER the one of `tune.py build`; or, of whole programs of these head dims, `... --
tests/gpu/sanitize.py --small --dims 128x128`, CUBINS the output of csrc/aot/compile.py (read are
those of bfloat16 that a driver of CUDA 13 gets on sm_90a). Lines `@begin WHAT of 64x64` in it say
head dims, too.

Before a kernel's warps part, those of the default partition store a state for each idle warp, and
arguments; at the end, the state that lets them go. All warps of the block meet at named barrier 1
then (`BAR.SYNC 0x1`, without a count). An idle warp reads its state behind that barrier, jumps by
it, reads its arguments, and meets the others at barrier 1 again before they go on. So a report is
explained if its store runs into that barrier with no branch between, and its load comes straight
from it (the state) or runs into it from where the jump leads (arguments). racecheck of
compute-sanitizer 2025.3.1 seems not to count a barrier that warps meet from different instructions.
Prints a line for every pair of instructions; exit status 1: one is not explained.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

BEGIN = re.compile(r"@begin (\w+) .*? (\d+x\d+)$")
COMPILED = re.compile(r"(\w+)_bf16_(\d+x\d+)_sm90a(?:_cuda13)?\.cubin$")
ACCESS = re.compile(r"(Race reported between|and) (Read|Write) access at (\w+)\+0x([0-9a-f]+)")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;")
BARRIER = re.compile(r"BAR\.SYNC\.DEFER_BLOCKING 0x1$")
JUMP = re.compile(r"(?:BRA|EXIT|BRX|BRXU|RET|JMP)\b")  # by all threads; with a predicate: by some
ANY_JUMP = re.compile(rf"(?:@!?U?P\d\s+)?{JUMP.pattern}")

Pair = tuple[str, str, int, int]  # kernel, head dims, address of the store, of the load
Code = list[tuple[int, str]]  # addresses and instructions


def pairs_of(text: str, dims: str = "") -> tuple[Counter[Pair], int]:
    """Pairs of a store and a load, with how many reports have them; and how many reports there are.
    `dims`: until the text names others."""
    found: Counter[Pair] = Counter()
    reports, first = 0, ("", 0)
    for line in text.splitlines():
        if begun := BEGIN.search(line):
            dims = begun[2]
        access = ACCESS.search(line)
        if not access:
            continue
        this = (access[2], int(access[4], 16))
        if access[1] != "and":
            reports, first = reports + 1, this
            continue
        write, read = (first, this) if first[0] == "Write" else (this, first)
        if (write[0], read[0]) != ("Write", "Read"):
            raise SystemExit(f"two of a kind: {line.strip()}")
        found[access[3], dims, write[1], read[1]] += 1
    return found, reports


def first_of(instructions: Iterable[str], wanted: re.Pattern[str], ends: re.Pattern[str]) -> bool:
    """Whether one that is wanted comes before one that ends the search."""
    for x in instructions:
        if wanted.match(x):
            return True
        if ends.match(x):
            return False
    return False


def explained(code: Code, store: int, load: int) -> str:
    """What was handed over, or "" if these are no such store and load."""
    places = {address: i for i, (address, _) in enumerate(code)}
    if store not in places or load not in places:
        return ""
    text = [x for _, x in code]
    i, j = places[store], places[load]
    if not (text[i].startswith("STS") and text[j].startswith("LDS")):
        return ""
    if not first_of(text[i:], BARRIER, ANY_JUMP):
        return ""
    if first_of(reversed(text[:j]), BARRIER, ANY_JUMP):
        return "state"
    from_a_jump = first_of(reversed(text[:j]), JUMP, BARRIER)
    return "arguments" if from_a_jump and first_of(text[j:], BARRIER, ANY_JUMP) else ""


def disassembled(cubin: Path) -> Code:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    text = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    return [(int(a, 16), " ".join(x.split())) for a, x in INSTRUCTION.findall(text)]


def cubins(folder: Path) -> dict[tuple[str, str], list[Path]]:
    """(kernel, head dims) -> its files: candidates of one kernel are not told apart by the tool."""
    files: dict[tuple[str, str], list[Path]] = {}
    if (folder / "index.json").exists():
        for row in json.loads((folder / "index.json").read_text()):
            key = row["kernel"], "x".join(map(str, row["dims"]))
            files.setdefault(key, []).append(folder / "cubins" / f"{row['file']}.cubin")
        return files
    for file in sorted(folder.glob("*.cubin")):  # ..._sm90a.cubin before ..._sm90a_cuda13.cubin
        if found := COMPILED.match(file.name):
            files[found[1], found[2]] = [file]
    return files


def main(report: Path, folder: Path, dims: str = "") -> int:
    found, reports = pairs_of(report.read_text(), dims)
    files = cubins(folder)
    codes: dict[Path, Code] = {}
    kinds: Counter[tuple[str, str, str]] = Counter()
    for (kernel, dims, store, load), times in sorted(found.items()):
        kind = ""
        for file in files.get((kernel, dims), []):
            if file not in codes:
                codes[file] = disassembled(file)
            kind = kind or explained(codes[file], store, load)
        kinds[kernel, dims, kind or "NOT EXPLAINED"] += times
        print(f"{kernel} {dims} store {store:#x} load {load:#x}: {kind or 'NOT EXPLAINED'}")
    print(f"{reports} reports, {len(found)} pairs of instructions; how often which were reported:")
    for (kernel, dims, kind), times in sorted(kinds.items()):
        print(f"{kernel:<28}{dims:<9}{kind:<15}{times:>5}")
    return int(any(kind == "NOT EXPLAINED" for *_, kind in kinds))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
