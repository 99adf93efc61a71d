"""Sizes on a GPU: every length to 300, rows too long for a dense reference, and more than 2^31
elements. `pytest -m gpu`."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import trees
from gpu_runs import of
from properties.values import Program, unequal
from tiers import once_each, some

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "lengths",
    [
        *(
            (1, 63, 64, 66),
            (2, 65, 300),
            (126, 127, 128),
            (129, 132, 191, 192),
            (193, 253, 256, 257),
        ),
        *some(range(first, first + 25) for first in range(1, 301, 25)),
    ],
    ids=lambda lengths: f"{lengths[0]} to {lengths[-1]}",
)
def test_every_length_to_300(lengths):
    for length in lengths:
        dims = {13: "256x256", 11: "192x128", 7: "128x128"}
        dim = next((dim for n, dim in dims.items() if length % n == 0), "64x64")
        text = f"dims={dim},dtype=bfloat16,heads=2/1,batch=1,lengths={length}x{length}"
        call = of(f"interval=causal,selector=packed,{text}")
        a = call.arrays(length)
        assert not (wrong := call.wrong(Program(call)(a), a)), (length, wrong)


@pytest.mark.parametrize(
    "mask,dims,lengths",
    [
        ("interval=causal,selector=packed", "80x80", "256x256"),
        ("interval=full,selector=kv ids", "72x72", "300x130"),
        ("interval=window 50 20,selector=documents", "96x96", "200x200"),
        ("interval=full,selector=none", "88x88", "64x255"),
    ],
)
def test_two_tiles_of_keys_of_many_heads(mask, dims, lengths):
    """On Hopper, one program of the backward pass has all keys of a head."""
    call = of(f"{mask},dims={dims},dtype=bfloat16,heads=128/128,lengths={lengths}")
    a = call.arrays(1)
    assert a["key"].shape[0] * a["key"].shape[2] >= 256
    assert not (wrong := call.wrong(Program(call)(a), a)), wrong


# --- Long rows: the results of XLA, and the same bits each time


def check_long(call, a, unit=2.0**-6):
    """Within `unit` of the largest number."""
    program = Program(call)
    got, again = program(a), program(a)
    assert not unequal(again, got, "bits: ")
    want = Program(dataclasses.replace(call, implementation="xla"))(a)
    for name, x in got.items():
        x, y = (np.asarray(z, np.float32) for z in (x, want[name]))
        np.testing.assert_array_equal(x == -np.inf, y == -np.inf, name)
        some = y > -np.inf
        size = np.abs(y[some]).max()
        np.testing.assert_allclose(x[some], y[some], rtol=0, atol=unit * size, err_msg=name)


@pytest.mark.parametrize(
    "size,dims",
    some(
        itertools.product(
            ("128 128", "1 512", "64 16"),
            ("64x64", "128x128", "192x128", "160x160", "256x256", "264x264"),
        ),
        *(0, 7, 14, 17),
    ),
)
def test_long_lists_of_blocks(size, dims):
    """Full and partial blocks, and garbage in rows that attend to nothing."""
    garbage = np.nan if dims == "264x264" else 1e30  # the fallback kernels ignore NaN there
    text = f"dims={dims},dtype=bfloat16,heads=8/2,lengths=4096x4096"
    call = of(f"interval=causal,selector=block mask {size},{text}")
    a = call.arrays(1)
    share = {"128 128": 0.7, "1 512": 0.5, "64 16": 0.2}[size]  # of the blocks drawn
    a["blocks"] &= np.random.default_rng(0).random(a["blocks"].shape) < share
    a["blocks"][0, 3, : a["blocks"].shape[2] // 2] = False
    lse = np.asarray(jax.jit(call.attend)(a)[1])
    idle = np.isneginf(lse).swapaxes(1, 2)[..., None]
    assert idle.any()
    for name in ("query", "dout"):
        a[name] = np.where(idle, garbage, a[name]).astype(a[name].dtype)
    check_long(call, a)


@pytest.mark.parametrize(
    "dims,name", once_each(("64x64", "128x128", "192x128", "256x256"), trees.LARGE)
)
def test_large_trees(dims, name):
    """Long lists of mostly full blocks; the mask kernels produce the same integers as XLA."""
    tree = trees.LARGE[name]()
    length = len(tree.ids)
    text = f"dims={dims},dtype=bfloat16,heads=2/1,batch=1,lengths={length}x{length}"
    call = of(f"interval=causal,selector=tree,{text}")
    given = {"segments": tree.ids[None], "parents": tree.parents[None].astype(np.int32)}
    masks = [
        packax.create_attention_mask(call.expression(given), implementation=implementation)
        for implementation in (None, "xla")
    ]
    jax.tree.map(np.testing.assert_array_equal, *masks)
    # The batch of one has other sizes than `arrays` draws: only tensors are drawn.
    drawn = dataclasses.replace(call, selector="none", interval="full").arrays(1)
    check_long(call, drawn | given)


@pytest.mark.parametrize("window,sinks", once_each([128, 500, 9], ["none", "sinks"]))
def test_windows(window, sinks):
    """`row_keys` chooses the kernel on Hopper; every choice gives the results of XLA."""
    text = f"dims=64x64,dtype=bfloat16,sinks={sinks},lengths=3001x3001"
    call = of(f"interval=window {window - 1} 0,selector=packed,{text}")
    a = call.arrays(window)
    a["ids"] = np.repeat(np.int32([[0, 1, 2, -1]] * 2), [1000, 1700, 101, 200], 1)
    mask = packax.create_attention_mask(call.expression(a))
    assert mask.row_keys in (128, 512)
    want = jax.jit(functools.partial(call.attend, implementation="xla"))(a, mask)
    for row_keys in (0, 1):
        got = jax.jit(call.attend)(a, dataclasses.replace(mask, row_keys=row_keys))
        for x, y in zip(got, want, strict=True):
            x, y = (np.asarray(z, np.float32) for z in (x, y))
            np.testing.assert_allclose(x, y, atol=0.02, rtol=0.01)


def test_the_dropout_of_long_rows_is_that_of_xla():
    """Each output is a mean of ones: a dropout bit that differs changes it by 1 / length."""
    text = "dims=64x64,dtype=float16,dropout=dropout,heads=3/3,lengths=4097x4097"
    call = of(f"interval=window 400 40,{text}")
    a = call.arrays(1)
    a |= {"query": np.zeros_like(a["query"]), "value": np.ones_like(a["value"])}
    attend = functools.partial(call.attend, a)
    x, y = (np.float32(jax.jit(lambda i=i: attend(implementation=i)[0])()) for i in ("cuda", "xla"))
    np.testing.assert_allclose(x, y, atol=1e-3)


def test_alibi():
    """Far from the diagonal the bias is in the thousands; the log-sum-exp stays right."""
    length = 40_000
    text = f"dims=64x64,dtype=bfloat16,bias=alibi,heads=2/1,batch=1,lengths={length}x{length}"
    call = of(f"interval=causal,{text}")
    a = call.arrays(1) | {"slopes": np.float32([0, -0.01])}
    lse = np.asarray(jax.jit(call.attend)(a)[1])
    rows = np.r_[0:3, 17_000:17_003, length - 3 : length]
    query, key = (a[name].astype(np.float64) for name in ("query", "key"))
    scores = np.einsum("ihd,jd->hij", query[0, rows], key[0, :, 0])
    far = rows[:, None] - np.arange(length)
    logits = scores / 8 - a["slopes"].astype(np.float64)[:, None, None] * np.abs(far)
    want = np.logaddexp.reduce(np.where(far >= 0, logits, -np.inf), axis=-1)
    np.testing.assert_allclose(lse[0][:, rows], want, rtol=2e-6, atol=1e-4)


def test_head_dim_512():
    """Hundreds of steps per program and more programs than run at once: five runs give the same
    bits, and dV has the right sum."""
    text = "dims=512x512,dtype=bfloat16,heads=8/2,batch=1,lengths=8192x8192"
    call = of(f"interval=causal,selector=packed,{text}")
    a = call.arrays(1)
    a["ids"] = np.repeat(np.int32([[0, 1]]), [5000, 3192], 1)
    step = jax.jit(call.step)
    first = step(a)
    for _ in range(4):
        assert not unequal(step(a), first, "bits: ")
    # The rows of P sum to 1, so dV summed over all keys is the sum of dout.
    sums = a["dout"].astype(np.float32).reshape(1, 8192, 2, 4, 512).sum((1, 3))
    np.testing.assert_allclose(np.float32(first["dvalue"]).sum(1), sums, atol=3.0)


@pytest.mark.parametrize("dim,length", once_each([128, 64, 80], [8192, 1000]))
def test_tangents(dim, length):
    """Along all operands, a kernel for Hopper runs, and along one of them, the fallback kernel.
    Many tiles: two rows of documents, grouped heads."""
    from packax._src.ops import ffi

    call = of(f"selector=packed,interval=causal,dims={dim}x{dim},dtype=bfloat16,heads=8/2,"
              f"lengths={length}x{length}")  # fmt: skip
    a, along = call.arrays(0), call.arrays(1)
    if jax.devices()[0].compute_capability == "9.0":
        of_call = {"dtype": "bf16", "qk_dim": dim, "v_dim": dim}
        of_call |= {"has_tq": 1, "has_tk": 1, "has_tv": 1}
        found = ffi.ext.select("forward_tangent", 90, 132, of_call, ffi.ext.driver()["version"])
        assert [kernel for kernel, _ in found] == ["forward_tangent_sm90"]

    @functools.partial(jax.jit, static_argnums=0)
    def tangents(names, along):
        operands, moved = ({name: x[name] for name in names} for x in (a, along))
        return jax.jvp(lambda x: call.attend(a | x), (operands,), (moved,))[1]

    names = ("query", "key", "value")
    got = tangents(names, along)
    for x, *parts in zip(got, *(tangents((name,), along) for name in names), strict=True):
        want = sum(np.asarray(y, np.float64) for y in parts)
        error = np.asarray(x, np.float64) - want
        assert np.sqrt(np.mean(error**2)) < 0.01 * np.sqrt(np.mean(want**2))
        assert np.abs(error).max() < 0.05 * np.abs(want).max()
    for x, y in zip(got, tangents(names, along), strict=True):  # no race
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_offsets_past_two_to_the_31():
    """2 x 132,096 x 64 x 128 elements: the last document and heads equal a call with only these."""
    free = jax.devices()[0].memory_stats()["bytes_limit"]
    if free < 60e9:
        pytest.skip(f"needs 60 GB of GPU memory, there are {free / 1e9:.0f}")
    length, document, heads = 132096, 1024, 64
    call = of(f"interval=causal,selector=packed,dims=128x128,dtype=bfloat16,heads={heads}/{heads}")
    *keys, last = jax.random.split(jax.random.key(0), 5)
    a = {
        name: jax.random.normal(key, (2, length, heads, 128), jnp.bfloat16)
        for name, key in zip(("query", "key", "value", "dout"), keys, strict=True)
    }
    a["dlse"] = jax.random.normal(last, (2, heads, length))
    a["ids"] = np.repeat(np.arange(length // document, dtype=np.int32), document)[None]
    assert a["query"].size > 2**31
    got = jax.jit(call.step)(a)
    alone = of(f"interval=causal,dims=128x128,heads=2/2,lengths={document}x{document},batch=1,"
               "dtype=bfloat16")  # fmt: skip
    for batch, start in ((0, 0), (1, length - document)):

        def part(name, x, batch=batch, rows=slice(start, start + document)):
            few = (slice(-2, None), rows) if "lse" in name else (rows, slice(-2, None))
            return np.asarray(x[batch : batch + 1, *few])

        few = {name: part(name, a[name]) for name in ("query", "key", "value", "dout", "dlse")}
        wrong = alone.wrong({name: part(name, x) for name, x in got.items()}, few)
        assert not wrong, wrong
