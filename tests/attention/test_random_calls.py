"""The program of random calls (tests/gpu/random_calls.py) on the CPU: it passes cases of every
dtype and reports a wrong result."""

from __future__ import annotations

import sys

import packax
import pytest
from paths import ROOT
from tiers import some


@pytest.fixture
def random_calls(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    import random_calls

    monkeypatch.setattr(random_calls, "IMPLEMENTATION", "xla")
    yield random_calls
    del sys.modules["random_calls"]


@pytest.mark.filterwarnings("ignore:.*segment_ids ends with 0")
@pytest.mark.parametrize(
    "seed,dtype", some([(22, "float32"), (214, "bfloat16"), (152, "float16")], 1)
)
def test_cases_are_right(random_calls, seed, dtype, capsys):
    assert random_calls.run_seeds(seed, 1, 0) == 0
    assert capsys.readouterr().out == f'CASES {{"wrong": 0, "{dtype}": 1}}\n'


@pytest.mark.exhaustive
def test_a_wrong_result_is_seen(random_calls, monkeypatch, capsys):
    right = packax.flash_attention

    def wrong(*tensors, **options):
        out, lse = right(*tensors, **options)
        return 1.1 * out, lse

    monkeypatch.setattr(packax, "flash_attention", wrong)
    assert random_calls.run_seeds(22, 1, 0) == 1
    assert "WRONG seed 22: interval=causal" in capsys.readouterr().out
