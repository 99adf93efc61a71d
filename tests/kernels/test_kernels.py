"""Every kernel of attention on the CPU, against dense attention in float64: one table.

Guards against tiles that are left out or visited twice, a wrong index or mask, reads of garbage,
barriers that deadlock or release too early, and tiles read before they arrive or after they are
overwritten; not against compiler errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decode_calls import parse
from simulated import Simulation, kernels_of, variant_of
from tiers import marked

MASKS = {
    "causal": "interval=causal,lengths=200x200",
    "documents": "interval=causal,selector=documents,lengths=200x200",
    "ids": "selector=kv ids,lengths=200x200",
    "window": "interval=window,selector=documents,lengths=200x200",
    "positions": "interval=causal,selector=positions,lengths=150x150",
    "two limits": "interval=window,selector=positions,lengths=150x150",
    "ranges": "selector=ranges,lengths=150x200",
    "one mask": "interval=prefix,selector=documents,rows=one mask,lengths=150x150",
    "longer keys": "lengths=70x260",
    "longer queries": "interval=causal,lengths=260x70",
    "one row": "lengths=1x130",
    "blocks": "interval=causal,selector=block mask,lengths=200x200",
    "large blocks": "selector=block mask,lengths=200x200",  # heads with different lists
    "tree": "interval=causal,selector=tree,lengths=200x200",
}
LISTED = "blocks", "large blocks", "tree"  # with lists of blocks
SMALL = {"forward": (64, 32), "backward_dkdv": (32, 64), "backward_dq": (64, 64)}
SMALL |= {"backward_dbias": (32, 32), "forward_tangent": (128, 32)}


def simulation(text: str, mask: str, block: str = "", **options: Any) -> Simulation:
    """`block`: the rows and keys of a block of a block mask."""
    mask = MASKS[mask].replace("block mask", f"block mask {block}".rstrip())
    return Simulation(parse(f"{mask},{text}"), **options)


# --- Triton's kernels


def check_portable(x: Simulation, family: str) -> None:
    forward = {"portable": "forward", "dbias_of_pairs": "forward_bias_alone"}
    x.triton(forward.get(family, f"forward_{family}"))
    x.check_forward(top=family in ("fallback", "bias"))
    for kernel in kernels_of(family):
        if kernel != "backward_dbias" or "bias" in x.a:
            x.triton(kernel)
    names = ("dq", "dk", "dv") + (("dbias",) if "bias" in x.a else ())
    of_scores = x.score_grads() if family in ("fallback", "bias") else {}
    x.check_backward(names, **of_scores)


PORTABLE = [  # family, call, masks of the first tier, other masks
    ("portable", "dims=16x32", "documents, ids, two limits, one row", "*"),
    ("portable", "dims=24x40,heads=4/1", "longer queries", "documents, positions"),
    ("portable", "dims=192x128", "", "documents, positions"),
    ("fallback", "dims=16x32,cap=soft cap", "window", "*"),
    ("fallback", "dims=24x40,scale=array,bias=alibi,heads=4/1", "positions", "*"),
    ("fallback", "dims=8x56", "longer queries", "ranges"),
    ("fallback", "dims=16x8,scale=array,cap=soft cap,bias=alibi", "blocks, tree", "*"),
    ("fallback", "dims=8x8", "large blocks", ""),
    ("fallback", "dims=320x264,cap=soft cap", "", "one row"),
    ("bias", "dims=24x16,bias=shared,dropout=dropout,cap=soft cap", "documents", "*"),
    ("bias", "dims=24x16,bias=pairs", "", "ranges, blocks, tree"),
    ("bias", "dims=24x16,bias=keys,dropout=dropout", "", "ids"),
    ("bias", "dims=24x16,dropout=dropout,scale=array,bias=alibi", "one mask", "ids"),
    ("bias", "dims=136x200,bias=rows,dropout=dropout", "one row", "longer keys"),
    ("bias_alone", "dims=24x16,bias=shared,lengths=131x200", "documents", "causal"),
    ("bias_alone", "dims=24x16,bias=heads,lengths=200x200", "", "documents, ids"),
    ("dbias_of_pairs", "dims=24x16,bias=pairs,lengths=131x200", "ranges", "documents"),
]


def rows(of: list[tuple[str, ...]]) -> list[Any]:
    found = []
    for *row, first, more in of:
        first, more = (x.split(", ") if x else [] for x in (first, more))
        others = [x for x in (MASKS if more == ["*"] else more) if x not in first]
        if "*" in more and row[0] in ("portable",):
            others = [x for x in others if x not in LISTED]
        found += [marked((*row, mask), mask in first) for mask in (*first, *others)]
    return found


@pytest.mark.parametrize("tiles", [None, marked([SMALL], False)], ids=["tiles", "small tiles"])
@pytest.mark.parametrize("family,text,mask", rows(PORTABLE))
def test_triton(family: str, text: str, mask: str, tiles: Any) -> None:
    block = "100 64" if mask == "large blocks" else ""
    check_portable(simulation(text, mask, block, tiles=tiles), family)


@pytest.mark.parametrize(
    "kernel,forward,option",
    [("", "", ""), ("_dbias", "_bias", ",bias=shared"), ("_dropout", "_bias", ",dropout=dropout")],
)
def test_preprocess(kernel: str, forward: str, option: str) -> None:
    """Against what the other tests pass to the kernels that follow it."""
    x = simulation(f"dims=16x16{option}", "documents")
    x.triton(f"forward{forward}")
    x.prepare()
    names = ("lse2", "delta", "lo", "hi", "top") if "bias" in x.a else ("lse2", "delta", "lo", "hi")
    want = {name: x.arrays[name] for name in names}
    x.arrays |= {name: np.full_like(a, -7) for name, a in want.items()}
    x.arrays["dq_sum"][:] = np.nan
    x.triton(f"backward_preprocess{kernel}")
    attends = np.isfinite(want["lse2"])
    for name, a in want.items():
        got = x.arrays[name]
        if name in ("delta", "top"):  # of other rows, whose P is 0, any number
            a, got = a[attends], got[attends]
        np.testing.assert_allclose(got, a, rtol=1e-4, atol=1e-4, err_msg=name)
    assert not x.arrays["dq_sum"].any()
    x.arrays["dq_sum"][:] = np.nan
    x.fields["clear_dq"] = 2  # only tiles of 32 rows without keys
    x.triton(f"backward_preprocess{kernel}")
    keys = (x.arrays["lo"] < x.arrays["hi"]).reshape(len(x.arrays["lo"]), 1, -1, 32).any(3)
    sums = x.arrays["dq_sum"].reshape(*x.arrays["dq_sum"].shape[:2], keys.shape[2], -1)
    assert (np.isnan(sums) == keys[..., None]).all()


# --- Gluon's kernels: those with mma.sync (8.x), and Hopper's


def check_gluon(x: Simulation, family: str, arch: str, forward: str = "", **changed: Any) -> None:
    """`forward`: the kernel of the forward, if it runs. `changed`: constants of the kernels."""
    dims = x.fields["qk_dim"], x.fields["v_dim"]
    if forward:
        x.gluon(variant_of(forward, arch, dims))
        x.check_forward(top="max_logits" in forward)
    if not family:
        return
    _, kernel, *others = kernels_of(family)
    variant = variant_of(kernel, arch, dims)
    x.prepare(variant.qk_dim)
    x.gluon(variant, **{n: c for n, c in changed.items() if n in dict(variant.constants)})
    names, found = ["dq", "dk", "dv"], {}
    if family.startswith("fused"):
        names, found = ["dk", "dv"], {"dquery": x.summed_dq()}
        others = []
    if family == "sm90_dbias":
        names, others = ["dk", "dv", "dbias"], []
    for other in others:
        if other != "backward_sum_dbias":
            x.gluon(variant_of(other, arch, dims))
    if "bias" in x.a and family != "sm90_dbias":
        found["dbias"] = x.arrays["dbias_sums"].sum(0)
    x.check_backward(names, **found)


OF_SM80 = [  # forward, family, call, masks of the first tier, other masks
    ("forward", "sm80", "dims=128x128", "documents, two limits", "*"),
    ("forward", "sm80", "dims=64x64,heads=4/1", "", "*"),
    ("forward", "sm80", "dims=192x128", "one row", "documents, longer queries"),
    ("forward", "sm80", "dims=96x96", "longer queries", "documents, ids"),
    ("forward", "sm80", "dims=256x256", "", "documents, ids, longer queries"),
    ("forward_sm80_soft_cap", "sm80_soft_cap", "dims=64x64,cap=soft cap", "window", "documents"),
]
OF_SM90 = [
    ("forward_sm90", "fused", "dims=64x64", "documents, two limits", "*"),
    ("forward_sm90", "fused", "dims=128x128,heads=4/1", "longer queries", "*"),
    ("forward_sm90", "fused", "dims=80x40", "window", "documents, ids, longer queries"),
    ("forward_sm90", "fused", "dims=8x16", "", "documents, ids, longer queries"),
    ("", "fused_short", "dims=64x64,heads=4/1", "documents", "*"),
    ("", "fused_short", "dims=40x56", "longer keys", "*"),
    ("", "separate", "dims=64x64", "ids", "*"),
    ("", "separate", "dims=128x128", "longer keys", "*"),
    ("forward_sm90", "separate", "dims=192x128", "ranges", "documents, longer queries, one row"),
    ("forward_sm90", "separate", "dims=256x256,heads=2/1", "one row", "documents, ids"),
    ("forward_sm90", "separate", "dims=136x184", "", "documents, ids"),
    ("forward_sm90", "separate_parts", "dims=512x512,heads=2/1", "one row", "longer keys, causal"),
    ("forward_sm90_low_occupancy", "", "dims=64x64", "one mask", "*"),
    ("forward_sm90_short", "", "dims=64x64", "positions", "*"),
    ("forward_sm90_max_logits", "", "dims=64x64", "ranges", "documents, longer queries"),
    ("forward_sm90_max_logits", "", "dims=512x512,heads=2/1", "", "one row"),
    ("forward_sm90_soft_cap", "fused_soft_cap", "dims=64x64,cap=soft cap", "window", "ids"),
    ("forward_sm90_soft_cap", "separate_soft_cap", "dims=256x256,cap=soft cap", "", "ids"),
    ("", "separate_soft_cap", "dims=64x64,cap=soft cap", "ids", "longer keys"),
    *(
        ("forward_sm90_dropout", f"{family}_dropout", f"dropout=dropout,{text}", first, more)
        for family, text, first, more in (
            ("fused", "dims=64x64", "documents", "*"),
            ("fused", "dims=128x128", "", "ids, window"),
            ("separate", "dims=64x64,heads=4/1", "", "*"),
            ("separate", "dims=120x104", "longer keys", "*"),
        )
    ),
    ("forward_sm90_alibi", "fused_alibi", "dims=128x128,bias=alibi", "documents", "ids"),
    *(
        (f"forward_sm90{x}_bias", f"sm90{x}_bias", f"dims={dim},bias={bias}", first, "*")
        for x, dim, bias, first in (
            ("", "64x64", "shared", "documents"), ("", "32x32", "rows", ""),
            ("_float32", "128x128", "shared", "longer keys"), ("_float32", "32x24", "pairs", ""),
        )
    ),
    ("forward_sm90_bias", "sm90_dbias", "dims=64x64,bias=pairs", "ids", "*"),
    ("forward_sm90_bias", "sm90_dbias", "dims=256x256,bias=pairs", "", "one row, longer keys"),
    *(
        ("forward_sm90_block_lists", "separate_block_lists", f"dims={dims}", first, more)
        for dims, first, more in (
            ("64x64", "blocks", "tree"), ("128x128", "tree", "blocks"), ("192x128", "", "blocks"),
            ("256x256", "", "tree"),
        )
    ),
]  # fmt: skip


def gluon_rows(arch: str, of: list[tuple[str, ...]]) -> list[Any]:
    found = []
    for row in rows(of):
        forward, *_, mask = row.values
        if mask not in LISTED or "block_lists" in forward:
            found.append(pytest.param(arch, *row.values, marks=row.marks))
    return found


@pytest.mark.parametrize(
    "arch,forward,family,text,mask", gluon_rows("80", OF_SM80) + gluon_rows("90a", OF_SM90)
)
def test_gluon(arch: str, forward: str, family: str, text: str, mask: str) -> None:
    block = {"64x64": "8 32", "128x128": "64 64", "192x128": "1 2"}  # powers of two
    text += ",bias_dtype=float32" * ("float32" in forward)
    size = block.get(text.removeprefix("dims="), "256 128")
    x = simulation(f"{text},dtype=bfloat16", mask, size)
    check_gluon(x, family, arch, forward)
