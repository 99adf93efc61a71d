"""What the GPU tests share: head dims of the kernels, memory for results that holds NaN, and which
bits of results are the same in every run.

numpy creates the arrays and device_put copies them, because jax would compile a program for every
shape, for jnp.asarray as well. Only large buffers are filled on the GPU.
"""

from __future__ import annotations

import functools
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


NAN = 0x7FC07FC0  # a float32 NaN, each half of which is a NaN in both dtypes of 16 bits
LARGE = 2**22  # of a buffer, in float32


def poison(a: dict[str, Any]) -> None:
    """Fill buffers of the sizes that the results of a call need with NaN, and free them to the
    pool, so that an element that no kernel writes is a NaN."""
    batch, q_len, heads, dim = a["query"].shape
    sizes = [4 * batch * heads * q_len] * 4
    sizes += [a[n].nbytes for n in ("query", "key", "value", "dout") for _ in "12"]
    sizes += [a["bias"].nbytes] if "bias" in a else []
    sizes.append(16 * batch * (q_len + 64) * heads * dim)  # workspace
    counts = [-(-size // 4) for size in sizes]
    small = np.full(min(max(counts), LARGE), NAN, np.int32)
    buffers = [jax.device_put(small[:n]) if n <= LARGE else _large(n) for n in counts]
    jax.block_until_ready(buffers)
    for y in buffers:
        y.delete()


@functools.partial(jax.jit, static_argnums=0)
def _large(count: int) -> jax.Array:
    return jnp.full(count, NAN, jnp.int32)


def on_gpu(call: Any) -> bool:
    return getattr(call, "implementation", "") == "cuda"


def varying(call: Any) -> tuple[str, ...]:
    """The results whose bits may differ between runs: docs/guide/numerics.md."""
    if not on_gpu(call) or call.order == "deterministic" or call.dtype == "float32":
        return ()
    hopper = jax.devices()[0].compute_capability == "9.0"
    fixed = max(map(int, call.dims.split("x"))) > (128 if hopper else 256)
    fixed |= call.bias in calls.BIASES or call.scale == "array"
    fixed |= (call.bias == "alibi" or call.dropout != "none") and not hopper
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
