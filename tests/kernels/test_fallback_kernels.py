"""The fallback Triton kernels in the interpreter: score parameters, head dims between the compiled
ones, block masks with the build's lists, and packed trees.

Guards against reads or writes of the next head's columns, a bias that only one loop adds, a sum
over the wrong rows, a list that misses a block, a partial block that is taken for a full one, a
head that reads another's list or bits, and empty rows that put a NaN in a sum.
"""

from __future__ import annotations

import functools
import itertools

import dense
import jax
import numpy as np
import packax
import pytest
import score_oracle
import trees
import triton_interpreter as interpreter
from kernel_masks import ATTENTION, drawn, mask_of, packed
from tiers import some

TILES = ((128, 64), (64, 128), (64, 64))  # of the forward, dkdv and dq
SMALL = ((32, 16), (16, 32), (16, 32))  # for float32 at head dim 256: 1/8 of an order's entry
WIDE = ((32, 32), (16, 16), (16, 32))  # for head dims above 256
WIDE_SM90 = ((64, 32), (32, 16), (64, 32))  # the same for Hopper
NAMES = "query", "key", "value"
SLOPES = (2.0 ** (-8 * np.arange(1, 9) / 8)).astype(np.float32)


def check(
    rng, expression, lengths, heads, dims, compiled, tiles, *, batch=1, strict=False, **options
):  # fmt: skip
    """Both passes against float64. A mask with lists is read through these: what they leave out may
    be NaN. options: soft_cap, scale, scales and slopes, each (1 or batch, ...), and
    whether there are places other than the index."""
    mask = packax.create_attention_mask(expression, q_len=lengths[0], kv_len=lengths[1])
    attends = dense.four_axes(expression.as_array(*lengths))
    attends = np.broadcast_to(attends, (max(batch, len(attends)), heads[0], *lengths))
    lists, idle_keys = None, ~attends.any((1, 2))
    operands = interpreter.Operands.of(mask) if mask.block_size else mask_of(expression, *lengths)
    if mask.block_size:  # blocks of 64 keys without an attended pair are not even read
        lists = [np.asarray(getattr(mask, n)) for n in ("block_mask", "q_block_lists")]
        lists = (*lists, np.asarray(mask.kv_block_lists), mask.block_size)
        idle_keys = [row[n : n + 64].all() for row in idle_keys for n in range(0, lengths[1], 64)]
        idle_keys = np.reshape(idle_keys, (len(attends), -1)).repeat(64, 1)[:, : lengths[1]]
        idle_keys &= len(lists[1]) == len(attends)
    clean, x, idle_rows = drawn(rng, attends, *heads, dims, np.nan if lists else 1e30, idle_keys)
    scale, soft_cap, scales = (options.get(n) for n in ("scale", "soft_cap", "scales"))
    slopes, places = options.get("slopes"), None
    if slopes is not None:
        places = tuple(np.arange(n, dtype=np.int32)[None] for n in lengths)
    if "places" in options:
        places = (rng.integers(-9, n, (len(attends), n)).astype(np.int32) for n in lengths)
        places = tuple(places)
    extras = interpreter.Extras(operands, scale, soft_cap or 0.0, scales, slopes, places, lists)
    tensors = x["query"], x["key"], x["value"]
    out, lse, top = interpreter.forward_fallback(*tensors, operands, extras, tiles[0], compiled)
    *grads, score_grads = interpreter.backward_fallback(
        *tensors, out, lse, x["dout"], x["dlse"], operands, extras, *tiles[1:], compiled
    )
    found = score_oracle.Results(out, lse, dict(zip(NAMES, grads, strict=True)))
    for b in range(len(attends)):
        row = slice(b, b + 1)
        arrays = {name: clean[name][row] for name in NAMES}
        arrays["scale"] = np.float32(scale) if scales is None else scales[b % len(scales)]
        of_row = None
        if slopes is not None:
            arrays["slopes"] = slopes[b % len(slopes)]
            of_row = tuple(y[b % len(y)][None] for y in places)
        true, plain, largest = score_oracle.true_and_plain(
            arrays, attends[row], clean["dout"][row], clean["dlse"][row], soft_cap=soft_cap,
            places=of_row,
        )  # fmt: skip
        got = jax.tree.map(lambda y, row=row: y[row], found)
        if strict:  # float32's tiles: as exact as plain float32
            score_oracle.check(got, true, plain)
        sums, size = score_grads[b].sum(-1, dtype=np.float64), np.abs(score_grads[b]).sum()
        of_scale, of_slopes = true.gradients.pop("scale"), true.gradients.pop("slopes", None)
        np.testing.assert_allclose(sums[:, 0].sum(), of_scale, atol=1e-5 * size)
        if slopes is not None:
            np.testing.assert_allclose(sums[:, 1], of_slopes, atol=1e-5 * size)
        close = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4)
        jax.tree.map(close, (got, top[row].max(-1)), (true, largest))
    assert not out[idle_rows].any() and not grads[0][idle_rows].any()
    return mask, idle_rows


@pytest.mark.parametrize(
    "case,options,dims,compiled",
    some([
        ("documents", {"soft_cap": 2.0}, (16, 32), (16, 32)),
        ("three rows", {"slopes": True, "scales": 3}, (24, 40), (32, 64)),
        ("checked by id", {"slopes": True, "soft_cap": 3.0, "scales": 1}, (40, 16), (48, 16)),
        ("longer keys", {"slopes": True, "scales": 1}, (24, 16), (32, 16)),
        ("ranges with empty rows", {"slopes": True, "soft_cap": 1.0, "scales": 1}, (16, 24),
            (16, 48)),
        ("longer queries", {}, (8, 56), (64, 64)),
        ("checked by id", {"tiles": SMALL, "soft_cap": 3.0, "slopes": True}, (16, 16), (16, 16)),
        ("short", {"tiles": WIDE, "soft_cap": 2.0}, (320, 264), (512, 512)),
        ("three rows", {"tiles": WIDE_SM90, "slopes": True}, (24, 16), (32, 16)),
    ], *(0, 2)),
)  # fmt: skip
def test_options(case, options, dims, compiled):
    expression, *lengths, heads, kv_heads = ATTENTION[case]
    tiles, strict, options = options.get("tiles", TILES), "tiles" in options, dict(options)
    options.pop("tiles", None)
    batch = 3 if case == "three rows" else 1
    if "scales" in options:
        options["scales"] = np.linspace(-0.6, 0.9, options["scales"]).astype(np.float32)
    if "slopes" in options:
        more = np.arange(batch, dtype=np.float32)[:, None] / 10
        options["slopes"] = SLOPES[:heads] + more
        options["places"] = True
    options["scale"] = 1.5 * dims[0] ** -0.5
    rng = np.random.default_rng(len(case))
    check(
        rng, expression, lengths, (heads, kv_heads), dims, compiled, tiles, strict=strict,
        **options,
    )  # fmt: skip


ALL = {"scale": 0.3, "soft_cap": 2.0, "slopes": np.full((1, 4), 0.03, np.float32)}
IDS = packed(90, 60, 40, -20, 90)
IDS = np.where(IDS == 2, 0, IDS)  # an id reappears
RANGES = [np.repeat(x, 260, 1) for x in ([[20], [0]], [[260], [250]])]


@pytest.mark.parametrize(
    "expression,lengths,shape,size,share,tiles",
    some([
        # blocks of 1, 3 or 5, a block mask per batch row and head, rows checked by id
        (packax.documents(IDS), (300, 300), (2, 4), (5, 3), 0.3, TILES),
        (packax.causal(offset=9), (80, 150), (1, 4), (1, 1), 0.2, ((64, 32), (32, 128), (64, 32))),
        # full blocks, which skip the mask; one block mask for all, or one per batch row
        (packax.causal(), (330, 330), (1, 1), (64, 192), 0.6, ((128, 64), (64, 64), (128, 64))),
        (packax.full(), (150, 330), (2, 1), (1, 64), 0.2, ((128, 32), (64, 64), (64, 64))),
        # one block mask for all batch rows, a mask per batch row; heads with lists of other lengths
        (packax.masks.ranges(*RANGES), (260, 260), (1, 4), (128, 64), 0.5, TILES),
    ], *(1, 4)),
)  # fmt: skip
def test_block_masks(expression, lengths, shape, size, share, tiles):
    rng = np.random.default_rng(lengths[0])
    blocks = [-(-n // m) for n, m in zip(lengths, size, strict=True)]
    chosen = rng.random((*shape, *blocks)) < share
    chosen[..., -1] = False  # no row attends to the last keys
    expression &= packax.masks.block_sparse(chosen, size)
    mask, idle_rows = check(
        rng, expression, lengths, (4, 2), (16, 8), (16, 16), tiles, batch=2, **ALL
    )
    assert idle_rows.any() or (1 not in size and share >= 0.3) or size == (1, 1)
    lists = (np.asarray(x)[..., 1] for x in (mask.q_block_lists, mask.kv_block_lists))
    assert all(x.sum() for x in lists) == (size in ((64, 192), (128, 64)))


TREES = {
    "prompt and answers": (trees.prompt_and_answers(170, 3, 50), "causal"),
    "deep": (trees.of_lengths([130, 30, 1, 60, 60, 40], [-1, 0, 1, 1, 0, -1]), "alone"),
    "window": (trees.random_tree(3, 300, 9), "window"),
}


@pytest.mark.parametrize(
    "name,tiles", some(itertools.product(TREES, [TILES, ((64, 32), (32, 64), (64, 64))]), 0)
)
def test_trees(name, tiles):
    """Lists that exclude siblings, full blocks, and the subtree check in partial blocks."""
    tree, joined = TREES[name]
    lengths = (len(tree.ids),) * 2
    expression = trees.expression(tree, joined)
    np.testing.assert_array_equal(expression.as_array(*lengths), trees.meaning(tree, joined))
    rng = np.random.default_rng(len(tree.ids))
    check(rng, expression, lengths, (4, 2), (16, 8), (16, 16), tiles, **ALL)


def test_slopes_whose_bias_is_infinite():
    """Then all the weight of a row is on the key at its own position."""
    mask = mask_of(packax.full(), 130, 130)
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, 130, 1, 16)).astype(np.float32) for _ in range(3))
    places = (np.arange(130, dtype=np.int32)[None],) * 2
    slopes = np.full((1, 1), 1e37, np.float32)
    extras = interpreter.Extras(mask, 0.25, 0.0, np.full(1, 0.25, np.float32), slopes, places)
    out, lse, _ = interpreter.forward_fallback(query, key, value, mask, extras, TILES[0], (16, 16))
    np.testing.assert_allclose(out, value, atol=1e-6)
    zero = np.zeros_like(lse)
    *grads, _ = interpreter.backward_fallback(
        query, key, value, out, lse, value, zero, mask, extras, *TILES[1:], (16, 16)
    )
    for x in grads:
        assert np.isfinite(x).all()


def test_tanh():
    """Within 3 float32 ulp for all magnitudes: no cancellation near 0, no overflow."""
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.uniform(-1, 1, 128 * 64 - 4) * 10.0 ** rng.integers(-6, 3, 128 * 64 - 4),
            [0, 1e30, -1e30, 0.3],
        ]
    )
    # Through a kernel: with a single key, the logit is the score.
    mask = mask_of(packax.full(), 8192, 1)
    query = np.zeros((1, 8192, 1, 16), np.float32)
    query[0, :, 0, 0] = x
    key = np.zeros((1, 1, 1, 16), np.float32)
    key[0, 0, 0, 0] = 1
    extras = interpreter.Extras(mask, 1.0, 1.0)
    _, lse, row_max = interpreter.forward_fallback(
        query, key, key, mask, extras, (128, 32), (16, 16)
    )
    for got in (lse, row_max):
        np.testing.assert_allclose(
            got[0, 0], np.tanh(x.astype(np.float32).astype(np.float64)), rtol=6e-7
        )
