"""`packax.integrations.levanter`: masks of a step, layers, `install`.

test_faces.py compares masks in Grug's form with the reference.

Levanter itself is not needed: a stand-in has the fields of its mask. The layers, on haliax's named
arrays, are tested where marin-levanter is installed.
"""

import dataclasses
import itertools
import sys
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
from packax.integrations import fallback, levanter

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 24, 4, 2, 8
IDS = np.asarray([[0] * 9 + [3] * 8 + [7] * 3 + [-1] * 4, [-2] * 5 + [1] * 19], np.int32)


@dataclasses.dataclass
class Mask:
    """The fields of Grug's mask."""

    is_causal: bool = False
    segment_ids: Any = None
    sliding_window: int | None = None
    fa4_bounds: Any = None


def tensors():
    rng = np.random.default_rng(0)
    shapes = [(BATCH, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


PAIR = (jnp.asarray(IDS), jnp.asarray(IDS))


def test_a_window_narrows_bounds_and_no_mask():
    row, key = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    lower = np.maximum(np.arange(LENGTH, dtype=np.int32) - 3, 0)[None]
    bounds = Mask(True, None, None, (jnp.asarray(lower), jnp.ones((1, LENGTH), bool)))
    window = key > row - 2
    for mask, want in ((bounds, window & (key <= row)), (None, window)):
        built = levanter.build_mask(mask, LENGTH, sliding_window=2)
        np.testing.assert_array_equal(built.as_array()[0], want)


def test_a_dense_mask_without_keys_in_a_row():
    """Such a row gives the mean of all values, as in Levanter."""
    q, k, v = tensors()
    allowed = np.tri(LENGTH, dtype=bool)
    allowed[5] = False
    out = levanter.attention(q, k, v, allowed)
    mean = jnp.repeat(v.mean(1), HEADS // KV_HEADS, 1)
    np.testing.assert_allclose(out[:, 5], mean, rtol=1e-5, atol=1e-6)


def built_once(q, k, v, kinds, wrap=lambda layer: layer):
    """A scan over layers that selects the row ranges of one of two masks per layer."""
    mask = Mask(True, PAIR)
    whole, window = (levanter.build_mask(mask, LENGTH, sliding_window=n) for n in (None, 5))

    def layer(x, is_global):
        chosen = jax.tree.map(lambda a, b: jnp.where(is_global, a, b), whole, window)
        return levanter.attention(x, k, v, chosen), None

    return jax.lax.scan(wrap(layer), q, kinds)[0]


def built_by_calls(q, k, v, kinds, wrap=lambda layer: layer):
    """A scan over pairs of layers whose attention gets Grug's masks."""

    def layer(x, _):
        for window in (5, None):
            x = levanter.attention(x, k, v, Mask(True, PAIR, window))
        return x, None

    return jax.lax.scan(wrap(layer), q, kinds)[0]


@pytest.mark.parametrize(
    ("scan", "wrap", "step_builds", "loop_builds"),
    [
        (built_once, jax.checkpoint, 2, 0),
        (built_by_calls, lambda layer: layer, 2, 0),  # JAX moves them out of the loop
        (built_by_calls, jax.checkpoint, 4, 2),  # each pair builds them again for its gradients
    ],
)
def test_masks_that_a_step_builds(scan, wrap, step_builds, loop_builds):
    def loss(*args):
        return scan(*args, jnp.asarray([False, True, False]), wrap).sum()

    step = jax.make_jaxpr(jax.grad(loss))(*tensors())
    names = [x.primitive.name for x in jaxprs.equations(step)]
    loops = [x for x in jaxprs.equations(step) if x.primitive.name == "scan"]
    in_loops = [x.primitive.name for loop in loops for x in jaxprs.equations(loop.params["jaxpr"])]
    assert "packax_backward" in in_loops
    assert names.count("packax_documents") == step_builds
    assert in_loops.count("packax_documents") == loop_builds


@pytest.mark.exhaustive
def test_two_masks_of_a_step_in_a_scan_over_layers():
    q, k, v = tensors()
    got = jax.jit(built_once)(q, k, v, jnp.asarray([False, True, False]))
    want = q
    for window in (5, None, 5):
        want = levanter.attention(want, k, v, Mask(True, PAIR, window))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def named(seed, *axes):
    hax = pytest.importorskip("haliax")
    pytest.importorskip("levanter.layers.attention")
    return hax.random.normal(jax.random.key(seed), axes)


LAYERS = {
    "offset": lambda m, x: {"mask": m.causal(offset=x["offset"])},
    "window": lambda m, x: {"mask": m.causal(sliding_window=4)},
    "both ways": lambda m, x: {"mask": m.bidirectional_sliding_window(2)},
    "ids": lambda m, x: {"mask": m.causal().with_segment_ids(x["ids"])},
    "explicit": lambda m, x: {"mask": m.causal() & m.explicit(x["dense"])},
    "array": lambda m, x: {"mask": x["dense"]},
    "prefix": lambda m, x: {"mask": x["prefix"]},
    "precision": lambda m, x: {"mask": m.causal(), "precision": jax.lax.Precision.HIGHEST},
    "dtype and blocks": lambda m, x: {"attention_dtype": jnp.float32, "flash_block_size": 4},
    "sinks": lambda m, x: {"mask": m.causal(), "attn_sink": x["sink"]},
    "sinks below a cap": lambda m, x: {
        "mask": m.causal(),
        "attn_sink": x["sink"] * 3,
        "logits_soft_cap": 1.5,
    },
    "sinks and a dense mask": lambda m, x: {"mask": x["dense"], "attn_sink": x["sink"]},
    "soft cap": lambda m, x: {"logits_soft_cap": 1.5},
    "bias": lambda m, x: {"bias": x["bias"]},
    "scale": lambda m, x: {"scaling_factor": 0.3},
    "bias below a cap": lambda m, x: {"bias": x["bias"], "logits_soft_cap": 1.5},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "rows_first"), list(itertools.product(LAYERS, [False, True])))
def test_layers(name, rows_first):
    hax = pytest.importorskip("haliax")
    module = pytest.importorskip("levanter.layers.attention")
    sizes = {"batch": 2, "position": 12, "key_position": 12, "kv_heads": 2, "group": 3, "dim": 8}
    B, Q, K, H, G, D = hax.make_axes(**sizes)
    arrays = {"sink": named(3, H, G), "bias": named(4, G, Q, K), "dense": named(5, B, Q, K) > 0}
    arrays["dense"] = arrays["dense"] & (hax.arange(Q) != 1)  # a query without keys
    arrays["ids"] = hax.named(jnp.asarray([[0] * 5 + [2] * 7, [4] * 12]), (B, Q))
    arrays["prefix"] = hax.nn.attention.prefix_lm_mask(Q, K, 5)
    arrays["offset"] = hax.named(jnp.asarray([0, 2]), (B,))
    query = named(0, *((B, Q, H, G, D) if rows_first else (B, H, G, Q, D)))
    args = query, named(1, B, H, K, D), named(2, B, H, K, D)
    options = LAYERS[name](module.AttentionMask, arrays)
    backend = module.AttentionBackend.VANILLA
    theirs = getattr(module.dot_product_attention, "by_levanter", module.dot_product_attention)

    def loss(function, args, **more):
        out = function("position", "key_position", "dim", *args, **options, **more)
        return hax.sum(hax.sin(out)).array, out

    def both(function, **more):
        step = jax.value_and_grad(lambda x: loss(function, x, **more), has_aux=True)
        return jax.jit(step)(args)

    want = both(theirs, attn_backend=backend)
    got = both(levanter.dot_product_attention)
    assert got[0][1].axes == want[0][1].axes
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def causal_layers(dim=8, length=64, function=levanter.dot_product_attention):
    """Values are unit vectors, so that the output is the weights."""
    hax = pytest.importorskip("haliax")
    module = pytest.importorskip("levanter.layers.attention")
    sizes = {"batch": 2, "position": length, "key_position": length, "heads": 2, "dim": dim}
    B, Q, K, H, D = hax.make_axes(**sizes)
    value = hax.named(jnp.eye(length), (K, "value")).broadcast_axis((B, H))
    args = named(0, B, Q, H, D), named(1, B, K, H, D), value
    options = {"mask": module.AttentionMask.causal()}
    return lambda **more: (
        function("position", "key_position", "dim", *args, **(options | more)).array
    )


@pytest.mark.exhaustive
def test_dropout_of_layers():
    attend, rate = causal_layers(), 0.25
    weights = np.asarray(attend())
    key = jax.random.key(3)
    np.testing.assert_array_equal(attend(dropout=rate, inference=True, prng=key), weights)
    np.testing.assert_array_equal(attend(dropout=0.0, inference=False, prng=key), weights)
    got = np.asarray(attend(dropout=rate, inference=False, prng=key))
    np.testing.assert_array_equal(attend(dropout=rate, inference=False, prng=key), got)
    other = np.asarray(attend(dropout=rate, inference=False, prng=jax.random.key(4)))
    assert ((other == 0) != (got == 0)).any()
    kept, attended = got != 0, weights > 0
    np.testing.assert_allclose(got[kept], weights[kept] / (1 - rate), rtol=1e-5)
    share = kept.sum() / attended.sum()  # of 8,320 weights: the standard deviation is 0.005
    assert abs(share - (1 - rate)) < 0.02


@pytest.mark.exhaustive
def test_precision_of_layers():
    attend = causal_layers()
    highest = str(jax.make_jaxpr(lambda: attend(precision=jax.lax.Precision.HIGHEST))())
    assert "HIGHEST" in highest and "HIGHEST" not in str(jax.make_jaxpr(attend)())


FALLS_BACK = {
    "a bias below a soft cap": lambda x: {"bias": x, "logits_soft_cap": 1.5},
    "a mask of dtype float32": lambda x: {"mask": x},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("reason", FALLS_BACK)
def test_layers_that_fall_back_say_so_once(reason, monkeypatch):
    attend = causal_layers(length=8)
    monkeypatch.setattr(fallback, "_said", set())
    options = FALLS_BACK[reason](named(5, *pytest.importorskip("haliax").make_axes(
        position=8, key_position=8
    )))  # fmt: skip
    with pytest.warns(fallback.FallbackWarning, match=f"Levanter's attention with {reason}: runs"):
        attend(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(**options)


@pytest.mark.parametrize("installed", [False, True])
def test_calls_of_levanters_attention(installed, monkeypatch):
    """Other implementations are Levanter's, also after `install` replaced its function."""

    def by_levanter(q, k, v, mask, *, implementation):
        return q, mask, implementation

    def replaced(*args, **options):
        raise AssertionError("packax would call itself")

    replaced.by_levanter = by_levanter
    core = types.ModuleType("levanter.grug.attention._core")
    core.attention = replaced if installed else by_levanter
    for name in ("levanter", "levanter.grug", "levanter.grug.attention", core.__name__):
        monkeypatch.setitem(sys.modules, name, core)
    q, k, v = tensors()
    mask = jnp.zeros((LENGTH, LENGTH))
    assert levanter.attention(q, k, v, mask, implementation="theirs") == (q, mask, "theirs")
    monkeypatch.setattr(fallback, "_said", set())
    monkeypatch.setattr(fallback, "has_kernels", lambda *_, **__: False)
    with pytest.warns(fallback.FallbackWarning, match="with a bias, float32"):
        assert levanter.attention(q, k, v, mask) == (q, mask, "reference")


def runs_packax(function, *args):
    """Traced anew, whatever JAX has cached for the same function."""
    return jaxprs.count("packax_forward", lambda *x: function(*x), *args) > 0


@pytest.mark.exhaustive
def test_install(monkeypatch):
    """By name in both attentions, and as the default if requested."""
    core = pytest.importorskip("levanter.grug.attention")
    module = pytest.importorskip("levanter.layers.attention")
    layers = causal_layers(
        function=lambda *args, **more: module.dot_product_attention(*args, **more)
    )

    def grug(**options):
        mask = core.AttentionMask.causal()
        return runs_packax(lambda *x: core.attention(*x, mask, **options), *tensors())

    try:
        levanter.install()
        levanter.install()  # a second call must not wrap again
        assert not hasattr(core.attention.by_levanter, "by_levanter")
        backend = module.AttentionBackend("packax")
        assert backend is module.AttentionBackend.PACKAX and str(backend) == "packax"
        for option in (backend, "packax"):
            assert runs_packax(lambda option=option: layers(attn_backend=option))
        assert grug(implementation="packax")
        assert not grug(implementation="reference") and not grug()
        assert not runs_packax(layers)
        with pytest.raises(ValueError, match="use_flash is False, but attn_backend is packax"):
            layers(attn_backend=backend, use_flash=False)
        levanter.install(default=True)
        assert not grug() and not runs_packax(layers)  # on the CPU
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert grug() and runs_packax(layers) and not grug(implementation="reference")
        monkeypatch.undo()
        levanter.install(default="everywhere")
        assert grug() and runs_packax(layers)
        assert not runs_packax(lambda: layers(attn_backend=module.AttentionBackend.VANILLA))
        with pytest.raises(ValueError, match='default must be False, True or "everywhere"'):
            levanter.install(default="gpu")
    finally:
        levanter.install()
