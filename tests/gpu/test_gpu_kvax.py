"""packax.kvax on a GPU: the kernels run, and equal packax.flash_attention and dense attention."""

from __future__ import annotations

import runpy
import sys
import warnings

import dense
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax.kvax.ops import create_attention_mask, flash_attention
from packax.kvax.utils import attention_specs
from packings import ids_of, positions_of
from paths import EXAMPLES

pytestmark = pytest.mark.gpu

IDS = np.stack([ids_of((0, 300), (1, 20), (-1, 9), (2, 500), (-1, 71)), ids_of((5, 900))])
POSITIONS = np.stack([positions_of(ids) for ids in IDS])


@pytest.mark.parametrize("sequential", [False, True])
def test_equals_dense_attention_and_flash_attention(sequential):
    rng = np.random.default_rng(0)
    query, key, value, dout = (
        jnp.asarray(rng.standard_normal((2, 900, heads, 64)), jnp.bfloat16)
        for heads in (4, 2, 2, 4)
    )
    tokens = (POSITIONS, IDS, POSITIONS, IDS)

    @jax.jit
    def run(query, key, value, dout):
        masks = create_attention_mask(*tokens, calc_bwd_mask=True)

        def attention(query, key, value):
            return flash_attention(
                query, key, value, *tokens, masks, scale=0.125,
                assume_sequential_positions=sequential,
            )  # fmt: skip

        out, transpose = jax.vjp(attention, query, key, value)
        return out, *transpose(dout)

    with attention_specs((None,) * 4, (None,) * 4):
        out, *gradients = run(query, key, value, dout)
    expression = packax.causal() & packax.documents(IDS)
    direct = packax.flash_attention(query, key, value, expression, scale=0.125)
    np.testing.assert_array_equal(out.astype(jnp.float32), direct.astype(jnp.float32))
    operands = {"query": query, "key": key, "value": value, "dout": dout, "scale": 0.125}
    allowed = np.asarray(expression.as_array(900, 900))
    references = dense.true_and_plain(operands, allowed, "bfloat16")
    names = ("out", "dquery", "dkey", "dvalue")
    got = dict(zip(names, map(np.asarray, (out, *gradients)), strict=True))
    assert not (wrong := dense.close(got, *references)), wrong


def test_the_program_for_kvax_trains(monkeypatch, capsys):
    pytest.importorskip("optax")
    script = EXAMPLES / "from_kvax.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--devices", "1", "--steps", "12"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `with mesh:`
        runpy.run_path(str(script), run_name="__main__")
    shown = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in shown.splitlines() if "loss" in line]
    assert losses[-1] < losses[0] - 0.5, shown
