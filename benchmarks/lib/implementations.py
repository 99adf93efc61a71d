"""packax and its peers in JAX as functions of (query, key, value, operands), and their passes.

cuDNN is called through `jax.nn.dot_product_attention` for one causal document, and through jax's
private function for several, for which jax has no public one. FlashAttention-3 is the package
flash-attn3-jax: `flash_mha`, and `flash_mha_varlen` for several documents. jla is the package
jax-linear-attention, whose Pallas kernels have two backward passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import packax

from lib.cases import Case

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Implementation:
    name: str
    function: Callable[..., jax.Array]  # (query, key, value, operands) -> output
    operands: Any  # shared by all layers: a built mask, or lengths and offsets


def expression_of(case: Case, ids: jax.Array | None = None) -> Any:
    """The case's mask expression; `ids`: its segment ids, if they are traced."""
    interval = packax.sliding_window(case.window - 1) if case.window else packax.causal()
    return interval & packax.documents(case.segment_ids() if ids is None else ids)


def packax_attention(case: Case, *, deterministic: bool = False) -> Implementation:
    build = jax.jit(lambda ids: packax.create_attention_mask(expression_of(case, ids)))
    mask = build(jnp.asarray(case.segment_ids()))
    # Uses only arguments that every packax has: attention.py also times other wheels.
    options = {"deterministic": True} if deterministic else {}
    return Implementation(
        "deterministic" if deterministic else "packax",
        lambda q, k, v, mask: packax.flash_attention(q, k, v, mask, **options),
        mask,
    )


# cuDNN's backward needs 64.5 GiB for 64 documents in 32k tokens: not tried with more documents.
MOST_DOCUMENTS = 64


FA3_HEAD_DIM = 128  # the only head dim in the wheels of flash-attn3-jax


def not_tried(name: str, case: Case) -> dict[str, str]:
    """The passes that are not tried with this peer, and the reason."""
    if name not in JAX_PEERS:
        return {}
    if case.window:
        return {"fwd": "windows are timed only for packax and FlashAttention-2"}
    if name == "fa3" and (case.head_dim, case.value_dim) != (FA3_HEAD_DIM, FA3_HEAD_DIM):
        return {"fwd": f"its wheels have head dim {FA3_HEAD_DIM} alone"}
    if name == "jla" and case.value_dim != case.head_dim:
        return {"fwd": "its fused backward takes one head dim: see jla_ranged"}
    if name == "cudnn" and case.documents > 1 and case.value_dim != case.head_dim:
        return {"fwd": "documents with two head dims: wrong results, or an illegal memory access"}
    if name == "cudnn" and case.documents > MOST_DOCUMENTS:
        return {"bwd": f"not tried with {case.documents} documents, for its workspace"}
    return {}


def cudnn_attention(case: Case) -> Implementation:
    """cuDNN through jax.nn if it supports the case (one document, one head dim), else through jax's
    private function."""
    scale = case.head_dim**-0.5
    if case.documents == 1 and case.value_dim == case.head_dim:
        options = {"scale": scale, "is_causal": True, "implementation": "cudnn"}
        return Implementation(
            "cudnn", lambda q, k, v, _: jax.nn.dot_product_attention(q, k, v, **options), ()
        )

    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    if case.documents == 1:
        causal = {"scale": scale, "mask_type": cudnn.MaskType.CAUSAL}
        return Implementation(
            "cudnn", lambda q, k, v, _: cudnn.dot_product_attention(q, k, v, **causal), ()
        )

    edges = np.concatenate([[0], np.cumsum(case.lengths)])
    lengths = jnp.asarray(np.tile(case.lengths, (case.batch, 1)), jnp.int32)
    offsets = jnp.asarray(np.tile(edges, (case.batch, 1)), jnp.int32)

    def packed(q: jax.Array, k: jax.Array, v: jax.Array, operands: Arrays) -> jax.Array:
        lengths, offsets = operands
        rows = {"q_seqlen": lengths, "kv_seqlen": lengths}
        rows |= {"q_offsets": offsets, "kv_offsets": offsets}
        mask_type = cudnn.MaskType.PADDING_CAUSAL
        return cudnn.dot_product_attention(q, k, v, **rows, scale=scale, mask_type=mask_type)

    return Implementation("cudnn", packed, (lengths, offsets))


def fa3_attention(case: Any, causal: bool = True) -> Implementation:
    """FlashAttention-3, for a case of lib/cases.py or lib/model_cases.py. If the package is
    missing, the first call fails, which is reported."""
    options = {"softmax_scale": case.head_dim**-0.5, "is_causal": causal}
    if case.documents == 1:

        def whole(q: jax.Array, k: jax.Array, v: jax.Array, _: Any) -> jax.Array:
            from flash_attn3_jax import flash_mha

            return flash_mha(q, k, v, **options)

        return Implementation("fa3", whole, ())

    flat = np.tile(case.lengths, case.batch)
    longest = max(case.lengths)

    def packed(q: jax.Array, k: jax.Array, v: jax.Array, edges: jax.Array) -> jax.Array:
        from flash_attn3_jax import flash_mha_varlen

        out = flash_mha_varlen(
            *(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)),
            edges,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **options,
        )
        return out.reshape(q.shape)

    return Implementation("fa3", packed, jnp.asarray(np.cumsum([0, *flat]), jnp.int32))


def jla_attention(case: Case, backward: str) -> Implementation:
    """`backward`: "fused", one kernel that accumulates dQ in memory, or "ranged", two kernels."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
        from jla.ops.mosaic_gpu.attention import flash_attention

        return flash_attention(q, k, v, segment_ids=ids, backward=backward)

    ids = None if case.documents == 1 else jnp.asarray(case.segment_ids())
    return Implementation("jla", attention, ids)


JAX_PEERS = {
    "cudnn": cudnn_attention,
    "fa3": fa3_attention,
    "jla": functools.partial(jla_attention, backward="fused"),
    "jla_ranged": functools.partial(jla_attention, backward="ranged"),
}


@contextlib.contextmanager
def unpadded() -> Iterator[None]:
    """Inside this context, packax runs the fallback kernels instead of padding head dims."""
    from packax._src.ops import lowering  # may be missing in another wheel

    rewritten = lowering.rewritten

    def without_padding(*call: Any) -> Any:
        found = rewritten(*call)
        return None if found and found[0] is lowering.padded else found

    jax.clear_caches()
    with mock.patch.object(lowering, "rewritten", without_padding):
        yield
    jax.clear_caches()


def keys_of(case: Any) -> int:
    """The number of keys of a batch row: as many as queries, except in some of model_cases.py."""
    return getattr(case, "kv_len", case.seq)


def random_inputs(case: Any, seed: int = 0) -> Arrays:
    """query, key, value and the output's cotangent: bfloat16, normally distributed."""
    rng = jax.random.split(jax.random.key(seed), 4)
    rows, keys, qk, v = case.seq, keys_of(case), case.head_dim, case.value_dim
    sizes = (
        (rows, case.heads, qk),
        (keys, case.kv_heads, qk),
        (keys, case.kv_heads, v),
        (rows, case.heads, v),
    )
    return tuple(
        jax.random.normal(key, (case.batch, *size), jnp.bfloat16)
        for key, size in zip(rng, sizes, strict=True)
    )


LOOP = 20  # passes per call, for passes that are shorter than a dispatch


def touched(x: jax.Array, by: jax.Array) -> jax.Array:
    """x with a data dependency on `by`, through a small kernel that writes one element."""
    at = (0,) * x.ndim
    return x.at[at].add((by[at] * 0).astype(x.dtype))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The jitted passes of one implementation with bound inputs."""

    implementation: Implementation
    inputs: Arrays  # the differentiated operands, and the cotangent

    def function(self, what: str, loops: int = 1) -> Callable[[], Any]:
        """Compiles the pass "fwd", or "bwd": only the pullback, with residuals in memory.

        loops: the number of sequential passes per call, for passes shorter than a dispatch.
        """
        *tensors, cotangent = self.inputs
        attention, operands = self.implementation.function, self.implementation.operands

        def residuals(operands, *tensors):
            return jax.vjp(lambda *x: attention(*x, operands), *tensors)[1]

        def forward_loop(query, *others):
            def step(_: Any, query: jax.Array) -> jax.Array:
                return touched(query, attention(query, *others))

            return jax.lax.fori_loop(0, loops, step, query, unroll=True)

        def backward_loop(pullback, cotangent):
            def step(_: Any, cotangent: jax.Array) -> jax.Array:
                for gradient in pullback(cotangent):
                    cotangent = touched(cotangent, gradient)
                return cotangent

            return jax.lax.fori_loop(0, loops, step, cotangent, unroll=True)

        arguments: tuple[Any, ...] = (*tensors, operands)
        run = attention if loops == 1 else forward_loop
        if what == "bwd":
            arguments = jax.jit(residuals)(operands, *tensors), cotangent
            run = (lambda pullback, x: pullback(x)) if loops == 1 else backward_loop
        program = jax.jit(run).lower(*arguments).compile()
        return lambda: program(*arguments)
