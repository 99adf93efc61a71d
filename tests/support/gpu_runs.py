"""What the GPU tests share: head dims of the kernels, memory for results that holds NaN, and which
bits of results are the same in every run.

numpy creates the arrays, because jax would compile a program for every shape, which takes half the
time of a short test on a CPU.
"""

from __future__ import annotations

from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
from decode_calls import parse

# (head dim of query and key, head dim of value)
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))


def of(text: str) -> calls.Call:
    """A call of the kernels, without the largest logits, for which others may run."""
    return parse(f"implementation=cuda,results=out+lse,{text}")


def poison(a: dict[str, Any]) -> None:
    """Fill buffers of the sizes that the results of a call need with NaN, and free them to the
    pool, so that an element that no kernel writes is a NaN."""
    batch, q_len, heads, dim = a["query"].shape
    kinds = [((batch, heads, q_len), np.dtype(np.float32))] * 4
    kinds += [(a[n].shape, a[n].dtype) for n in ("query", "key", "value", "dout") for _ in "12"]
    kinds += [(a["bias"].shape, a["bias"].dtype)] if "bias" in a else []
    kinds.append(((4 * batch, q_len + 64, heads, dim), np.dtype(np.float32)))  # workspace
    buffers = [jnp.asarray(np.full(shape, np.nan, dtype)) for shape, dtype in kinds]
    jax.block_until_ready(buffers)
    for y in buffers:
        y.delete()


def on_gpu(call: Any) -> bool:
    return getattr(call, "implementation", "") == "cuda"


def varying(call: Any) -> tuple[str, ...]:
    """The results whose bits may differ between runs: docs/guide/numerics.md."""
    if not on_gpu(call) or call.order == "deterministic" or call.dtype == "float32":
        return ()
    hopper = jax.devices()[0].compute_capability == "9.0"
    fixed = max(map(int, call.dims.split("x"))) > (128 if hopper else 256)
    fixed |= call.bias in calls.BIASES or call.dropout != "none" or call.scale == "array"
    fixed |= call.bias == "alibi" and not hopper
    fixed |= "block" in call.selector or call.selector in calls.TREES
    fixed |= call.bias != "alibi" and bool({"key", "value"} & {*call.frozen.split("+")})
    return () if fixed else ("dquery",)


def fixed(call: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The results whose bits are the same in every run."""
    return {name: x for name, x in found.items() if name not in varying(call)}


def same(call: Any, name: str, x: np.ndarray, y: np.ndarray) -> bool:
    """Whether all numbers of a result are the same, or close, if their bits vary."""
    if name not in varying(call):
        return np.array_equal(x, y)
    x, y = x.astype(float), y.astype(float)
    return bool((np.abs(x - y) <= 0.02 * np.abs(y).max(initial=0)).all())
