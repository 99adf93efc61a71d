"""A report of racecheck counts as explained only where its store and its load lie at barriers of
the whole block."""

from __future__ import annotations

import json

import pytest
from hand_over import cubins, explained, pairs_of

REPORT = """\
@begin forward_sm90 table 13.4 64x64
========= Error: Race reported between Write access at forward_sm90+0x20
=========     and Read access at forward_sm90+0x80 [2 hazards]
=========     and Read access at forward_sm90+0xc0 [4 hazards]
=========
@begin backward_sm90 STAGES=3 TURNS=0 13.4 128x128
  backward_sm90 STAGES=3 TURNS=0 13.4 ...========= Error: Race reported between Read access \
at backward_sm90+0x80
=========     and Write access at backward_sm90+0x20 [1 hazard]
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
STORE, STATE, ARGUMENTS = 0x20, 0x80, 0xC0
CODE = dict(
    enumerate(
        [
            *("UMOV UR4, 0x400", "BRA `(.L_x_1)", "STS.64 [UR6+0x100], R24",
                "REDUX.MAX.S32 UR8, R18"),
            *("BAR.SYNC.DEFER_BLOCKING 0x1", "EXIT", "NOP", "BAR.SYNC.DEFER_BLOCKING 0x1"),
            *("LDS.U8 R0, [R0+UR4+0xfc]", "R2UR UR6, R0", "BRXU UR6 -0x90",
                "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0"),
            *("LDS.64 R2, [UR5+0x20]", "UMOV UR4, 0x400", "BAR.SYNC.DEFER_BLOCKING 0x1",
                "BRA `(.L_x_0)"),
        ]
    )
)  # fmt: skip


def code(**changed: str) -> list[tuple[int, str]]:
    return [(16 * i, changed.get(f"at_{16 * i:x}", x)) for i, x in CODE.items()]


def test_reports_and_pairs():
    pairs, reports = pairs_of(REPORT)
    assert reports == 2
    assert pairs == {
        ("forward_sm90", "64x64", STORE, STATE): 1,
        ("forward_sm90", "64x64", STORE, ARGUMENTS): 1,
        ("backward_sm90", "128x128", STORE, STATE): 1,
    }
    with pytest.raises(SystemExit, match="two of a kind"):
        pairs_of(REPORT.replace("Write", "Read"))


def test_reports_of_programs_name_head_dims():
    """Which their command has, or a line before them."""
    program = "\n".join(line for line in REPORT.splitlines() if not line.startswith("@begin"))
    assert {dims for _, dims, *_ in pairs_of(program, "192x128")[0]} == {"192x128"}
    assert {dims for _, dims, *_ in pairs_of("@begin programs of 64x64\n" + program)[0]} == {
        "64x64"
    }


def test_cubins(tmp_path):
    """Those that a driver of CUDA 13 gets: its own, else the one there is."""
    for name in ("forward_bf16_64x64_sm90a", "forward_bf16_64x64_sm90a_cuda13",
        "forward_f16_64x64_sm90a", "forward_bf16_64x64_sm80",
                 "backward_dq_bf16_256x256_sm90a"):  # fmt: skip
        (tmp_path / f"{name}.cubin").touch()
    assert {key: [file.stem for file in files] for key, files in cubins(tmp_path).items()} == {
        ("forward", "64x64"): ["forward_bf16_64x64_sm90a_cuda13"],
        ("backward_dq", "256x256"): ["backward_dq_bf16_256x256_sm90a"],
    }
    rows = [{"kernel": "forward", "dims": [64, 64], "file": x} for x in ("table", "other")]
    (tmp_path / "index.json").write_text(json.dumps(rows))
    folder = tmp_path / "cubins"
    assert cubins(tmp_path) == {
        ("forward", "64x64"): [folder / "table.cubin", folder / "other.cubin"]
    }


def test_explained():
    assert explained(code(), STORE, STATE) == "state"
    assert explained(code(), STORE, ARGUMENTS) == "arguments"
    # a warp that does not get its registers asks again
    assert explained(code(at_b0="@!P0 BRA `(.L_x_57)"), STORE, ARGUMENTS) == "arguments"


@pytest.mark.parametrize(
    "load,changed",
    [
        (STATE, {"at_40": "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80"}),  # not all of the block
        (STATE, {"at_30": "@P0 BRA `(.L_x_2)"}),
        (STATE, {"at_20": "ATOMS.ADD R0, [R1], R2"}),
        (STATE, {"at_70": "BAR.SYNC.DEFER_BLOCKING 0x2"}),
        (STATE, {"at_70": "BAR.ARV 0x1, 0x100"}),
        (ARGUMENTS, {"at_e0": "BAR.SYNC.DEFER_BLOCKING 0x10"}),
        (ARGUMENTS, {"at_d0": "BRA `(.L_x_2)"}),
        (ARGUMENTS, {"at_c0": "LDG.E R0, [R2]"}),
        (0xC8, {}),
    ],
)  # fmt: skip
def test_not_explained(load, changed):
    assert explained(code(**changed), STORE, load) == ""
