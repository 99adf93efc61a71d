"""What the table of kernels (test_kernels.py) cannot say: extreme sinks and biases, NaN, calls for
some heads, tangents, and constants of the kernels that are not those of the table.

Guards against a NaN that reaches other rows or is lost, and sums that overflow or cancel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decode_calls import parse
from gluon_threads import TensorMap
from simulated import TANGENTS, Simulation, kernels_of, variant_of
from tiers import marked, some

DOCUMENTS = "interval=causal,selector=documents,lengths=200x200"
HALF = f"{DOCUMENTS},dims=64x64,dtype=bfloat16"


def of(text: str, **options: Any) -> Simulation:
    return Simulation(parse(text), **options)


def forward(x: Simulation, kernel: str, arch: str = "", **changed: Any) -> None:
    """With a Gluon kernel for this architecture, or a Triton kernel."""
    if not arch:
        return x.triton(kernel)
    variant = variant_of(kernel, arch, (x.fields["qk_dim"], x.fields["v_dim"]))
    return x.gluon(variant, **changed)


# --- Sinks: none, about as large as a row's logits, all of the weight, infinite

SINKS = np.float32([[-np.inf, 1.5, 3e38, np.inf], [np.inf, -2.0, 0.5, -np.inf]])
OF_SINKS = [  # kernel, architecture, call
    ("forward", "", "dims=16x16"),
    ("forward_fallback", "", "dims=16x16"),
    ("forward", "80", "dims=128x128,dtype=bfloat16"),
    ("forward_sm90", "90a", "dims=64x64,dtype=bfloat16"),
    ("forward_sm90_short", "90a", "dims=64x64,dtype=bfloat16"),
    ("forward_sm90_bias", "90a", "dims=64x64,dtype=bfloat16,bias=shared"),
    ("forward_sm80_soft_cap", "80", "dims=64x64,dtype=bfloat16,cap=soft cap"),
    ("forward_sm90_low_occupancy", "90a", "dims=64x64,dtype=bfloat16"),
    ("forward_sm90_max_logits", "90a", "dims=64x64,dtype=bfloat16"),
    ("forward_sm90_soft_cap", "90a", "dims=128x128,dtype=bfloat16,cap=soft cap"),
    ("forward_sm90_alibi", "90a", "dims=128x128,dtype=bfloat16,bias=alibi"),
    *(("forward_sm90", "90a", f"dims={d},dtype=bfloat16") for d in ("192x128", "512x512")),
]


def with_sinks(found: dict[str, Any], sinks: np.ndarray) -> dict[str, Any]:
    """Results with sinks (B, H), from those without."""
    out, lse, sinks = found["out"], found["lse"], sinks[..., None].astype(np.float64)
    total = np.where(np.isneginf(lse), lse, np.logaddexp(lse, sinks))
    with np.errstate(invalid="ignore"):
        weight = np.where(np.isneginf(lse) | np.isposinf(sinks), 0, np.exp(lse - total))
    return found | {"out": out * weight.swapaxes(1, 2)[..., None], "lse": total}


@pytest.mark.parametrize("kernel,arch,text", some(OF_SINKS, 0, 1, 2, 3, 5), ids=str)
def test_sinks(kernel: str, arch: str, text: str) -> None:
    """Each batch row has sinks. Rows that attend to nothing have none: their lse is -inf."""
    x = of(f"{DOCUMENTS},{text}")
    assert np.isneginf(x.true["lse"]).any()
    x.arrays["sinks"], x.fields["sink_batch"] = SINKS, 2
    x.true, x.plain = (with_sinks(y, SINKS) for y in (x.true, x.plain))
    forward(x, kernel, arch)
    x.check_forward(top="max_logits" in kernel or kernel == "forward_fallback")


@pytest.mark.parametrize(
    "kernel,arch,text", some([OF_SINKS[0], OF_SINKS[3], OF_SINKS[5]], 0, 1), ids=str
)
def test_a_sink_of_minus_infinity_changes_no_bit(kernel: str, arch: str, text: str) -> None:
    found = []
    for sinks in (None, np.full((1, 4), -np.inf, np.float32)):
        x = of(f"{DOCUMENTS},{text}")
        if sinks is not None:
            x.arrays["sinks"], x.fields["sink_batch"] = sinks, 1
        forward(x, kernel, arch)
        found.append((x.arrays["out"], x.arrays["lse"]))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "family,text",
    some(
        [
            ("fallback", DOCUMENTS),
            ("fallback", "interval=causal,selector=block mask,lengths=200x200"),
            ("bias", f"{DOCUMENTS},bias=shared"),
            ("portable", DOCUMENTS),
        ],
        0,
        2,
    ),
)
def test_gradients_with_sinks(family: str, text: str) -> None:
    """The reference has sinks of at most 200, which take all the weight, too."""
    x = of(f"{text},dims=16x16,sinks=sinks", sinks=np.minimum(SINKS, 200))
    x.arrays["sinks"], x.fields["sink_batch"] = SINKS, 2
    x.triton("forward" if family == "portable" else f"forward_{family}")
    for kernel in kernels_of(family):
        x.triton(kernel)
    x.check_backward()


def test_nan_in_sinks_and_under_a_large_sink() -> None:
    """A NaN sink makes the rows of its head NaN. A NaN in a value reaches the rows that attend to
    it, even if the sink takes all the weight."""
    x = of(HALF)
    x.arrays["sinks"], x.fields["sink_batch"] = np.float32([[np.nan, 1, 3e38, 0]]), 1
    x.arrays["value"][:, :, 1] = np.nan
    forward(x, "forward_sm90", "90a")
    attends = np.isfinite(x.true["lse"])
    nan = np.isnan(x.arrays["out"].astype(float)).all(-1).swapaxes(1, 2)
    for head, has in enumerate((True, False, True, True)):
        np.testing.assert_array_equal(nan[:, head], attends[:, head] & has, err_msg=str(head))


# --- Logits

# Rows with only hidden keys, and hidden blocks at the start of rows and in between.
HIDDEN = {"-inf": -np.inf, "least": np.float32(-3.3895314e38), "-1e9": -1e9, "most": 3e38}


@pytest.mark.parametrize(
    "family,hidden", [marked((f, h), f == "bias" or h == "-1e9") for f in ("bias", "bias_alone",
        "dbias_of_pairs") for h in HIDDEN]
)  # fmt: skip
def test_additive_masks(family: str, hidden: str) -> None:
    """Where all keys have one large number, the logits are equal in float32: the reference is then
    dense attention in float32."""
    shape = "pairs" if family == "dbias_of_pairs" else "shared"
    text = f"{DOCUMENTS},dims=24x16,bias={shape},heads=2/1"
    bias = parse(text).arrays()["bias"]
    bias[np.isneginf(bias)] = 0
    bias[..., ::3, :], bias[..., 1::3, :100] = HIDDEN[hidden], HIDDEN[hidden]
    x = of(text, bias=bias)
    want = x.true if hidden == "-inf" else x.plain
    forward = {"dbias_of_pairs": "forward_bias_alone"}.get(family, f"forward_{family}")
    for kernel in (forward, *kernels_of(family)):
        x.triton(kernel)
    found = {"out": x.arrays["out"], "dquery": x.arrays["dq"], "dkey": x.arrays["dk"]}
    found |= {"dvalue": x.arrays["dv"], "dbias": x.arrays["dbias"]}
    for name, got in found.items():
        size = np.abs(want[name]).max()
        np.testing.assert_allclose(got, want[name], atol=1e-4 * size, rtol=1e-4, err_msg=name)


def test_logits_far_below_zero() -> None:
    """Logits below -1e30 give the mean."""
    a = parse(HALF).arrays()
    x = of(HALF, query=np.ones_like(a["query"]), key=-np.ones_like(a["key"]))
    forward(x, "forward_sm90", "90a", scale=1e32)
    keys = np.maximum(x.allowed.sum(-1), 1)[..., None]
    value = np.repeat(x.a["value"].astype(float), 2, 2)
    mean = np.einsum("bhij,bjhd->bihd", np.broadcast_to(x.allowed / keys, (2, 4, 200, 200)), value)
    np.testing.assert_allclose(x.arrays["out"].astype(float), mean, atol=0.02)


def test_slopes_whose_bias_is_infinite() -> None:
    """Then all the weight of a row is on the key at its own position."""
    x = of("lengths=130x130,dims=16x16,heads=1/1,bias=alibi", slopes=np.float32([1e37]))
    x.triton("forward_fallback")
    np.testing.assert_allclose(x.arrays["out"], x.a["value"], atol=1e-6)
    for kernel in kernels_of("fallback"):
        x.triton(kernel)
    assert all(np.isfinite(x.arrays[name]).all() for name in ("dq", "dk", "dv"))


def test_tanh() -> None:
    """Within 3 float32 ulp for all magnitudes: no cancellation near 0, no overflow. Through a
    kernel: with a single key, the logit is the score."""
    rng = np.random.default_rng(0)
    scores = rng.uniform(-1, 1, 8192) * 10.0 ** rng.integers(-6, 3, 8192)
    scores[:4] = 0, 1e30, -1e30, 0.3
    query, key = np.zeros((2, 8192, 1, 16), np.float32), np.zeros((2, 1, 1, 16), np.float32)
    query[..., 0], key[..., 0] = scores[None, :, None], 1
    x = of("lengths=8192x1,dims=16x16,heads=1/1,cap=1.0", query=query, key=key)
    x.fields |= {"scale": 1.0}
    x.triton("forward_fallback")
    for got in (x.arrays["lse"], x.arrays["row_max"]):
        np.testing.assert_allclose(
            got[0, 0], np.tanh(scores.astype(np.float32).astype(float)), rtol=6e-7
        )


# --- Garbage and NaN in rows


@pytest.mark.parametrize(
    "kernel,arch,text",
    [OF_SINKS[0], OF_SINKS[2], OF_SINKS[3], ("forward_bias_alone", "", "dims=16x16,bias=shared")],
    ids=str,
)
def test_rows_without_keys_in_tiles_with_full_blocks(kernel: str, arch: str, text: str) -> None:
    """What such rows sum is garbage."""
    ids = np.repeat(np.int32([[0, -1], [-1, 0]]), (150, 50), axis=1)
    x = of(f"selector=documents,lengths=200x200,{text}", ids=ids)
    forward(x, kernel, arch)
    x.check_forward()


@pytest.mark.parametrize("fold", [0, 1])
def test_a_broken_row_reaches_the_keys_it_attends(fold: int) -> None:
    x = of("interval=causal,lengths=200x200,dims=64x64,heads=2/1,dtype=bfloat16")
    x.prepare()
    x.arrays["lse2"][0, 1, 100] = np.nan
    x.gluon(variant_of("backward_sm90", "90a", (64, 64)), LSE_BY_MMA=fold)
    for name in ("dk", "dv"):
        assert np.isnan(x.arrays[name][0, :101].astype(float)).all()


def test_a_block_of_rows_that_crosses_the_end_of_a_document_reads_no_row_after_it() -> None:
    """Blocks of 128 rows from row 64 cross the end of a document at row 384: NaNs after it do not
    reach the document."""
    found = []
    ids = np.repeat(np.int32([0, 1]), (384, 116))[None].repeat(2, 0)
    text = "interval=causal,selector=documents,lengths=500x500,dims=16x16,heads=2/2"
    for garbage in (1, np.nan):
        x = of(text, ids=ids)
        for name in ("query", "key", "value", "dout"):
            x.arrays[name][:, 384:] *= garbage
        for kernel in ("forward", *kernels_of("portable")):
            x.triton(kernel)
        found.append([x.arrays[name] for name in ("out", "dq", "dk", "dv")])
    for clean, broken in zip(*found, strict=True):
        np.testing.assert_array_equal(broken[:, :384], clean[:, :384])
        assert np.isnan(broken[:, 384:]).any()


def test_a_head_group_equals_a_separate_call() -> None:
    """Bit for bit; the other heads of out and dq keep their initial content."""
    alone = of(f"{DOCUMENTS},dims=16x32,heads=2/1")
    group = of(
        f"{DOCUMENTS},dims=16x32,heads=6/1", **{n: alone.a[n] for n in ("key", "value", "ids")}
    )
    heads, first = slice(2, 4), {}
    for name in ("query", "dout"):
        group.arrays[name][:, :, heads] = alone.arrays[name]
    for name in ("lse", "delta", "row_delta"):
        group.arrays[name] = np.full_like(alone.arrays[name], np.nan)
    group.arrays["dlse"] = alone.arrays["dlse"]
    group.fields["heads"] = 2
    for name in ("query", "dout", "out", "dq"):  # seen from the first head
        first[name] = group.arrays[name]
        group.arrays[name] = group.arrays[name].reshape(-1)[2 * group.arrays[name].shape[3] :]
    for x in (alone, group):
        for kernel in ("forward", *kernels_of("portable")):
            x.triton(kernel)
    for name in ("lse", "dk", "dv"):
        np.testing.assert_array_equal(group.arrays[name], alone.arrays[name], err_msg=name)
    for name in ("out", "dq"):
        np.testing.assert_array_equal(first[name][:, :, heads], alone.arrays[name], err_msg=name)
        assert np.isnan(np.delete(first[name], range(2, 4), axis=2)).all(), name


# --- Constants that are not those of the table


@pytest.mark.parametrize("kernel,dim", [("forward_sm90", 96), ("forward_sm90_short", 64)])
def test_forward_in_turns(kernel: str, dim: int) -> None:
    """Without a counter, programs take the same number of tiles, in alternating directions."""
    x = of(f"{DOCUMENTS},dims={dim}x{dim},dtype=bfloat16")
    forward(x, kernel, "90a", counter=np.zeros(0, np.int32))
    x.check_forward()


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize(
    "text",
    ["lengths=300x100,heads=4/1", "interval=causal,lengths=200x200", "", "lengths=90x128",
        "interval=causal,selector=any positions,lengths=100x100", "selector=ranges,lengths=300x90",
        "interval=causal,selector=positions,lengths=128x128", "interval=window,lengths=200x100",
        "selector=documents,lengths=190x60"],
)  # fmt: skip
def test_dq_of_one_tile_of_keys(text: str, dim: int) -> None:
    """Blocks of rows are copied to a sum that was cleared only where no row has keys."""
    ids = {}
    if not text:
        text = "selector=kv ids,lengths=300x100,batch=1"
        ids["ids"] = np.repeat(np.int32([[0, -1, 0]]), [70, 200, 30], 1)
        ids["kv_ids"] = np.zeros((1, 100), np.int32)
    x = of(f"{text},dims={dim}x{dim},dtype=bfloat16", **ids)
    x.prepare(dim)
    variant = variant_of("backward_sm90", "90a", (dim, dim))
    if x.fields["kv_len"] <= variant.block:
        rows = ~x.idle_rows.swapaxes(1, 2)
        rows = np.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % 64)))
        x.arrays["dq_sum"][rows.reshape(*rows.shape[:2], -1, 64).any(3)] = np.nan
    x.gluon(variant)
    x.check_backward(("dk", "dv"), dquery=x.summed_dq())


@pytest.mark.parametrize(
    "text",
    ["lengths=200x256,heads=4/2", "interval=causal,lengths=256x256", "lengths=90x200",
        "interval=window,lengths=256x250", "interval=causal,selector=documents,lengths=200x200",
        "selector=kv ids,lengths=130x140"],
)  # fmt: skip
def test_dq_of_two_tiles_of_keys(text: str) -> None:
    """A program has both tiles of a head, and copies the first part of every block of rows."""
    x = of(f"{text},dims=96x96,dtype=bfloat16")
    x.prepare(96)
    rows = ~x.idle_rows.swapaxes(1, 2)
    rows = np.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % 64)))
    x.arrays["dq_sum"][rows.reshape(*rows.shape[:2], -1, 64).any(3)] = np.nan
    x.gluon(variant_of("backward_sm90_pairs", "90a", (96, 96)))
    x.check_backward(("dk", "dv"), dquery=x.summed_dq())


@pytest.mark.parametrize("kernel,dim", [("forward_sm90", 96), ("forward_sm90_short", 64)])
def test_rows_without_keys_in_tiles_without_masked_steps(kernel: str, dim: int) -> None:
    """Their sums are not those of an attended row, though no step of their tile is masked."""
    ids = np.repeat(np.int32([[0, -1, 0, -1]]), [40, 24, 60, 4], 1)
    text = f"selector=kv ids,lengths=128x128,batch=1,dims={dim}x{dim},dtype=bfloat16"
    x = of(text, ids=ids, kv_ids=np.zeros((1, 128), np.int32))
    full = x.arrays["q_blocks"].reshape(5, -1)[1:3]
    assert (full == [[0], [128]]).all(), "no step is masked"
    forward(x, kernel, "90a")
    x.check_forward()


@pytest.mark.parametrize("lengths,few", [("150x300", True), ("150x1500", False)])
def test_one_of_two_forwards(lengths: str, few: bool) -> None:
    """Of two kernels that are launched, the number of keys that rows attend to chooses one."""
    x = of(f"lengths={lengths},dims=64x64,dtype=bfloat16")
    chosen, other = ("forward_sm90", "forward_sm90_short")[:: -1 if few else 1]
    choice = {"forward_sm90_short": 1, "forward_sm90": 2}
    forward(x, other, "90a", choice=choice[other])
    assert np.isnan(x.arrays["out"].astype(float)).all() and np.isnan(x.arrays["lse"]).all()
    forward(x, chosen, "90a", choice=choice[chosen])
    x.check_forward()


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", ["selector=kv ids", "interval=causal,selector=documents"])
@pytest.mark.parametrize(
    "family,arch,dim,changed",
    [
        *(("fused", "90a", 64, {x: v}) for x, v in (("SKIP", 0), ("PING_PONG", 1), ("DQ", 1),
            ("LSE_BY_MMA", 1))),
        *(("fused", "90a", dim, {x: v}) for dim in (96, 128)
            for x, v in (("PING_PONG", 0), ("LSE_BY_MMA", 0), ("SKIP", 1))),
        ("separate", "90a", 64, {"LSE_BY_MMA": 1}), ("separate", "90a", 128, {"LSE_BY_MMA": 0}),
        *(("sm80", "86", 128, {"STAGES": n, "DO_STAGES": m, "V_REGISTERS": v})
            for n, m, v in ((1, 2, 1), (2, 1, 1), (1, 1, 0), (2, 2, 0))),
    ],
    ids=str,
)  # fmt: skip
def test_candidates(family: str, arch: str, dim: int, changed: dict[str, int], mask: str) -> None:
    """Candidates of benchmarks/tune without timings; with one stage, a block is copied over the
    previous one as soon as that has been read."""
    x = of(f"{mask},lengths=200x200,dims={dim}x{dim},heads=2/1,dtype=bfloat16")
    x.prepare()
    for name in kernels_of(family)[1 : 2 if family == "fused" else 3]:
        variant = variant_of(name, arch, (dim, dim))
        x.gluon(variant, **{n: c for n, c in changed.items() if n in dict(variant.constants)})
    found = {"dquery": x.summed_dq()} if family == "fused" else {}
    x.check_backward(("dk", "dv") if found else ("dq", "dk", "dv"), **found)


def test_the_simulator_refuses_boxes_that_a_gpu_refuses() -> None:
    """TMA reads from multiples of 16 bytes."""
    tensor = TensorMap(np.zeros((1, 1, 4, 64), np.float16))
    tensor.box([0, 0, 3, 56], (1, 1, 4, 16))
    with pytest.raises(IndexError, match="begins at column 4: 16 bytes"):
        tensor.box([0, 0, 0, 4], (1, 1, 4, 16))


# --- Tangents

TANGENT_CALLS = [
    ("forward_tangent", "", f"{DOCUMENTS},dims=16x32"),
    ("forward_tangent", "", "interval=window,selector=positions,lengths=150x150,dims=24x40"),
    ("forward_tangent", "", "interval=causal,lengths=333x70,dims=16x16"),
    ("forward_tangent_fallback", "", f"{DOCUMENTS},dims=24x40,scale=array,bias=alibi,cap=soft cap"),
    ("forward_tangent_fallback", "", "selector=block mask,lengths=150x200,dims=8x16"),
    ("forward_tangent", "", f"{DOCUMENTS},dims=16x16,sinks=sinks"),
    ("forward_tangent_sm90", "90a", HALF),
    ("forward_tangent_sm90", "90a", f"{DOCUMENTS},dims=80x40,dtype=bfloat16,sinks=sinks"),
    ("forward_tangent_sm90", "90a", "lengths=70x333,dims=128x128,heads=4/1,dtype=bfloat16"),
    ("forward_tangent_sm90", "90a", "selector=kv ids,lengths=200x200,dims=64x64,dtype=bfloat16"),
]


@pytest.mark.parametrize("kernel,arch,text", some(TANGENT_CALLS, 0, 3, 4, 5, 6), ids=str)
def test_tangents(kernel: str, arch: str, text: str) -> None:
    x = of(text)
    x.draw_tangents()
    forward(x, kernel, arch)
    x.check_tangents()
    assert not x.arrays["tout"][np.isneginf(x.true["lse"]).swapaxes(1, 2)].any()


@pytest.mark.parametrize("present", some(["tq", "tk tv", "tk", "tv", "tq tv"], 0, 1))
def test_absent_tangents_are_not_read(present: str) -> None:
    x = of("interval=causal,selector=documents,lengths=90x90,dims=16x24,cap=soft cap")
    x.draw_tangents(present.split())
    x.triton("forward_tangent_fallback")
    x.check_tangents()


@pytest.mark.parametrize("kernel,arch,text", [TANGENT_CALLS[0], TANGENT_CALLS[6]], ids=str)
def test_a_constant_added_to_the_tangents_of_logits(kernel: str, arch: str, text: str) -> None:
    """It changes only tlse: tout keeps its accuracy, even if the constant is large."""
    a = parse(text).arrays()
    key, tq = a["key"].copy(), np.random.default_rng(0).standard_normal(a["query"].shape)
    key[..., 0], tq[..., 0] = 1, 64
    x = of(text, key=key)
    x.draw_tangents(tq=tq)
    forward(x, kernel, arch)
    x.check_tangents()


def test_nan_in_tangents() -> None:
    """A NaN in a value reaches the rows that attend to it, and no row that attends to nothing."""
    x = of(HALF)
    x.draw_tangents(TANGENTS)
    x.arrays["value"][:, 150] = np.nan
    forward(x, "forward_tangent_sm90", "90a")
    nan = np.isnan(x.arrays["tout"].astype(float)).all(3).swapaxes(1, 2)
    assert nan[np.broadcast_to(x.allowed[..., 150], nan.shape)].all()
    empty = np.isneginf(x.true["lse"]).swapaxes(1, 2)
    assert not x.arrays["tout"][empty].any()
