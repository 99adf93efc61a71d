"""Functions with other libraries' signatures on a GPU: calls reach the kernels, with right results.
tests/integrations/test_faces.py has more of them."""

from __future__ import annotations

import functools
import runpy
import sys
import warnings

import jax
import numpy as np
import pytest
from paths import EXAMPLES, TESTS

pytestmark = pytest.mark.gpu
SIZES = "implementation=cuda,lengths=300x300,dims=64x64,dtype=bfloat16"
ROWS = [
    "jax.nn: interval=causal,selector=documents,bias=pairs",
    "jax.nn, lengths: interval=full",
    "jax.nn, keys: interval=full",
    "flax: interval=causal,selector=documents",
    "maxtext: interval=left,selector=documents",
    "flash_attention_jax, causal: interval=offset",
    "kvax: interval=causal,selector=positions",
    "kvax, sequential: interval=causal,selector=documents",
    "flash_attention_jax, causal: interval=offset,dtype=float32",
]


@pytest.fixture(scope="module")
def faces():
    pytest.importorskip("flax")
    return runpy.run_path(str(TESTS / "integrations" / "test_faces.py"))


@pytest.mark.parametrize("row", ROWS)
def test_equals_the_reference(faces, row):
    name, text = row.split(": ")
    row = f"{name}: {SIZES},{text}"
    face, call = faces["parsed"](row)
    a = faces["operands"](face, call)
    step = jax.jit(functools.partial(faces["step"], face, call))
    with jax.default_matmul_precision("highest" if call.dtype == "float32" else None):
        text = step.lower(a).as_text()
        assert "packax_forward" in text and "packax_backward" in text
        wrong = faces["wrong"](row, call, step(a), a)
    assert not wrong, wrong


def test_maxtext_decoding(faces):
    """A cache whose tokens are a ring buffer that wrapped, with a hole; other entries are NaN."""
    call = faces["parsed"](f"maxtext: {SIZES},interval=full")[1]
    a = call.arrays()
    ids = np.ones((2, 300), int)
    ids[0, 100:170] = ids[1, 250] = 0
    hidden = (ids == 0)[..., None, None]
    tokens = [np.where(hidden, np.nan, a[n]).astype(a[n].dtype) for n in ("key", "value")]
    op = faces["op"]("local_sliding", 200)
    run = jax.jit(lambda q, cached: op(q, *[None] * 4, "autoregressive", cached))
    query, cached = a["query"][:, :1], ((*tokens, ids), None)
    assert "packax_decode" in run.lower(query, cached).as_text()
    allowed = ((ids == 1) & (np.arange(300) >= 100))[:, None]
    operands = {name: a[name] for name in ("key", "value")} | {"query": query, "scale": 1.0}
    references = faces["dense"].true_and_plain(operands, allowed, "bfloat16")
    wrong = faces["dense"].close({"out": np.asarray(run(query, cached))}, *references)
    assert not wrong, wrong


def test_a_program_for_kvax_trains(monkeypatch, capsys):
    pytest.importorskip("optax")
    script = EXAMPLES / "from_kvax.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--devices", "1", "--steps", "12"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `with mesh:`
        runpy.run_path(str(script), run_name="__main__")
    shown = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in shown.splitlines() if "loss" in line]
    assert losses[-1] < losses[0] - 0.5, shown
