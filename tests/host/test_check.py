"""`python -m packax check` passes on a CPU, and reports what is wrong."""

import pytest
from packax import check
from packax.__main__ import main
from tiers import some

# Always run: documents at a head dim that is padded on Hopper, and the case that runs twice.
NAMES = [case[0] for case in check.CASES]
EACH_TIME = {"documents, head dim 96", "deterministic"}


@pytest.mark.parametrize("names", some([(EACH_TIME,), ({*NAMES},)], 0), ids=["some", "all"])
def test_every_case_is_right_here(capsys, monkeypatch, names):
    assert names <= {*NAMES}
    monkeypatch.setattr(check, "CASES", [case for case in check.CASES if case[0] in names])
    monkeypatch.setattr(check, "TIMED", check.TIMED[:1])
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert out.count("  ok    ") == len(check.CASES) and "WRONG" not in out
    assert "bit-identical" in out and "all cases are correct" in out
    assert "causal 512, head dim 128, packax: forward" in out and "cuDNN" not in out


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_wrong_number_is_found(capsys, monkeypatch, factor):
    def broken(*arguments, **options):
        return factor * right(*arguments, **options)

    right = check.packax.flash_attention
    monkeypatch.setattr(check.packax, "flash_attention", broken)
    monkeypatch.setattr(check, "CASES", check.CASES[:1])
    monkeypatch.setattr(check, "TIMED", ())
    assert check.run() == 1
    assert "WRONG causal" in capsys.readouterr().out
