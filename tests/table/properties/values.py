"""Properties of the results for some values of the operands, which share a compiled program."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import numpy as np
import packax
from calls import Arrays
from gpu_runs import fixed, on_gpu, poison, same

from properties.rows import as_array, decodes, differences, row

GARBAGE = 1e4  # finite in float16


class Program:
    """The results and gradients of a call, with the expression or a built mask as an argument, and
    donated tensors. On a GPU, memory for results is filled with NaN first, which the results would
    not use if they could have that of donated tensors."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.traced = 0
        self.step = jax.jit(self._step, donate_argnums=() if on_gpu(call) else 0)

    def _step(self, donated: Arrays, others: Arrays, mask: Any) -> dict[str, Any]:
        self.traced += 1
        call = self.call
        return call.step(others | donated, functools.partial(call.attend, mask=mask))

    def inputs(self, a: Arrays) -> Any:
        call = self.call
        inside = decodes(call) or call.mask == "stacked"  # the step builds the mask
        mask = None if inside else call.expression(a)
        if mask is not None and call.mask == "built":
            lengths = {"q_len": a["query"].shape[1], "kv_len": a["key"].shape[1]}
            mask = packax.create_attention_mask(mask, **lengths)
        # jnp.asarray would compile a program for each shape, and device_put may share memory.
        donated = jax.device_put({name: np.array(a[name]) for name in ("query", "key", "value")})
        return donated, {name: x for name, x in a.items() if name not in donated}, mask

    def __call__(self, a: Arrays) -> dict[str, Any]:
        inputs = self.inputs(a)
        if on_gpu(self.call):
            poison(a)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return self.step(*inputs)

    def runs(self, a: Arrays) -> list[dict[str, Any]]:
        """The results of one more run, or of ten on a GPU, one right after the other."""
        if not on_gpu(self.call):
            return [self(a)]
        donated, others, mask = self.inputs(a)
        others = jax.device_put(others)
        poison(a)
        return [self.step(donated, others, mask) for _ in range(10)]


compiled = functools.lru_cache(maxsize=32)(Program)  # for the rows that only change values
values = functools.partial(row, calls="values", group="values")


@functools.lru_cache(maxsize=1)
def first_run(call: Any) -> tuple[Arrays, dict[str, Any], Any]:
    """Operands, their results and references, which most properties of a call share."""
    a = call.arrays(1)
    return a, compiled(call)(a), call.references(a)


def unequal(got: dict[str, Any], want: dict[str, Any], where: str) -> list[str]:
    """Names of results of `want` whose bits differ."""
    pairs = {name: (np.asarray(got[name]), np.asarray(want[name])) for name in want}
    bits = {name: [x.view(f"u{x.itemsize}") for x in pair] for name, pair in pairs.items()}
    return [f"{where}{name}" for name, (x, y) in bits.items() if not np.array_equal(x, y)]


@values("equals the reference")
def _(call):
    a, got, references = first_run(call)
    wrong = differences(call, got, a, references=references)
    if decodes(call) or on_gpu(call):
        return wrong
    return wrong + as_array(call, call.expression(a).as_array, a)


@values("same bits twice")
def _(call):
    a, got, _ = first_run(call)
    others = compiled(call).runs(a)
    return [line for x in others for line in unequal(x, fixed(call, got), "other bits: ")]


@values(
    "finite garbage where nothing is attended",
    lambda call: decodes(call) and "keys that decoding must not read are NaN in every cell",
)
def _(call):
    """The same bits, and the cotangents of idle queries are ignored. Then garbage in a few keys and
    queries: the same numbers in all others that do not attend to these."""
    a, want, references = first_run(call)
    allowed = call.allowed(a)
    if "bias" in a:
        bias = a["bias"] != -np.inf
        allowed = allowed & np.repeat(bias, call.batch // len(bias), 0)
    heads, kv_heads = a["query"].shape[2], a["key"].shape[2]
    allowed = np.broadcast_to(allowed, (call.batch, heads, *allowed.shape[2:]))
    queries = ~allowed.any(-1).swapaxes(1, 2)  # (B, Sq, H)
    keys = ~of_groups(allowed.any(2), kv_heads)  # (B, Skv, Hkv)
    dirty = with_garbage(a, queries, keys)
    dirty["dlse"] = np.where(queries.swapaxes(1, 2), -GARBAGE, a["dlse"])
    if "bias" in a:
        dirty["dout"] = np.where(queries[..., None], np.nan, a["dout"]).astype(a["dout"].dtype)
    got = compiled(call)(dirty)
    wrong = differences(call, got, a, references=references)
    # A probability of 0 times garbage may be -0.
    bits = [{name: np.asarray(x) + 0 for name, x in y.items()} for y in (got, fixed(call, want))]
    wrong += unequal(*bits, "other bits: ")

    rng = np.random.default_rng(2)
    some = [rng.permutation(np.arange(n) < 3) for n in allowed.shape[2:]]
    queries, keys = (
        np.broadcast_to(x[:, None], y.shape) for x, y in zip(some, (queries, keys), strict=True)
    )
    got = compiled(call)(with_garbage(a, queries, keys))
    rows = allowed[..., some[1]].any(-1) | some[0]  # (B, H, Sq)
    reached = of_groups((allowed & rows[..., None]).any(2), kv_heads) | keys
    of_rows, of_keys = {"out", "dquery"}, {"dkey", "dvalue"}
    for name in of_rows | of_keys:
        others = ~(rows.swapaxes(1, 2) if name in of_rows else reached)
        x, y = (np.asarray(z[name])[others] for z in (got, want))
        wrong += [] if same(call, name, x, y) else [f"{name} depends on what is not attended"]
    return wrong


def of_groups(x: np.ndarray, kv_heads: int) -> np.ndarray:
    """(B, H, S) to (B, S, Hkv): whether it holds in any head of a group."""
    return x.reshape(len(x), kv_heads, -1, x.shape[2]).any(2).swapaxes(1, 2)


def with_garbage(a: Arrays, queries: np.ndarray, keys: np.ndarray) -> Arrays:
    places = {"query": queries, "dout": queries, "key": keys, "value": keys}
    return a | {
        name: np.where(place[..., None], GARBAGE, a[name]).astype(a[name].dtype)
        for name, place in places.items()
    }


@values(
    "NaN stays in its row and head",
    lambda call: decodes(call) and "sequences may share pages",
)
def _(call):
    a, want, _ = first_run(call)
    kv_heads = a["key"].shape[2]
    group = a["query"].shape[2] // kv_heads
    dirty = {name: np.array(x) for name, x in a.items()}
    for name, head in (("query", 0), ("key", 0), ("value", 0), ("dout", 0)):
        dirty[name][0, :, head] = np.nan
    got = compiled(call)(dirty)
    heads = {"out": group, "dquery": group, "dkey": 1, "dvalue": 1}
    wrong = []
    for name, of in heads.items():
        x, y = (np.array(z[name], np.float32) for z in (got, want))
        x[0, :, :of] = y[0, :, :of] = 0
        wrong += [] if same(call, name, x, y) else [f"{name} of another row or head"]
    if "lse" not in got:
        return wrong
    x, y = (np.array(z["lse"], np.float32) for z in (got, want))
    x[0, :group] = y[0, :group] = 0
    return wrong + ([] if np.array_equal(x, y) else ["lse of another row or head"])


@values("extreme values")
def _(call):
    """Zeros, logits in the hundreds, and a cotangent of zero."""
    a, _, _ = first_run(call)
    wrong = []
    for name, scale in (("query", 0), ("query", 60), ("dout", 0)):
        if name not in a:
            continue
        other = a | {name: (scale * a[name]).astype(a[name].dtype)}
        got = compiled(call)(other)
        if scale == 60:  # the gradients lose accuracy: docs/guide/numerics.md
            got = {n: x for n, x in got.items() if n in ("out", "lse", "top")}
            other = {n: x for n, x in other.items() if n != "dout"}
        wrong += differences(call, got, other, f"{name} times {scale}: ")
    return wrong


@values("one program for other values")
def _(call):
    a = call.arrays(2)
    program = compiled(call)
    wrong = differences(call, program(a), a)
    before = program.traced  # not always 1: conftest.py clears jax's caches between tests
    program(call.arrays(3))
    return wrong + ([] if program.traced == before else ["traced again"])
