"""The cases of biases and dropout, and each implementation's function for a case."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packax

BUCKETS, FURTHEST = 32, 128  # T5's relative position buckets, and their maximum distance


@dataclasses.dataclass(frozen=True)
class BiasCase:
    name: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: str = "none"  # "array": (1, H, S, S); "table": T5's; both with gradients; "none"
    causal: bool = False
    dropout: float = 0.0

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def area(self) -> float:
        """The attended pairs of one head in the whole batch."""
        return self.batch * self.seq * (self.seq + 1 if self.causal else 2 * self.seq) / 2

    def flops(self, what: str) -> float:
        """The FLOPs of attention without the bias: two products forward, five backward."""
        forward = 4.0 * self.heads * self.head_dim * self.area
        return {"fwd": forward, "bwd": 2.5 * forward}[what]

    def operand(self) -> jax.Array | None:
        """The differentiated array from which the bias is computed."""
        shapes = {
            "array": (1, self.heads, self.seq, self.seq),
            "table": (BUCKETS, self.heads),
        }
        if self.bias == "none":
            return None
        # Float32, because the gradient of a table entry sums many pairs.
        dtype = jnp.float32 if self.bias == "table" else jnp.bfloat16
        return jax.random.normal(jax.random.key(7), shapes[self.bias], dtype)

    def bias_rows(self, operand: Any, rows: jax.Array) -> Any:
        """(1, H, rows, S): the bias of some rows."""
        if self.bias == "table":
            return operand[self._buckets(rows)].transpose(2, 0, 1)[None].astype(jnp.bfloat16)
        return None if operand is None else operand[:, :, rows]

    def bias_of(self, operand: Any) -> Any:
        """The whole bias, (1, H, S, S)."""
        return self.bias_rows(operand, jnp.arange(self.seq)) if self.bias == "table" else operand

    def _buckets(self, rows: jax.Array) -> jax.Array:
        """T5's buckets of distances, in both directions or, if causal, only of earlier keys."""
        far = rows[:, None] - jnp.arange(self.seq)
        count = BUCKETS if self.causal else BUCKETS // 2
        ahead = jnp.zeros_like(far) if self.causal else jnp.where(far < 0, count, 0)
        far = jnp.maximum(far, 0) if self.causal else jnp.abs(far)
        exact = count // 2
        steps = jnp.log(jnp.maximum(far, 1) / exact) / np.log(FURTHEST / exact) * exact
        wide = jnp.minimum(exact + steps.astype(int), count - 1)
        return ahead + jnp.where(far < exact, far, wide)


# pair: AlphaFold 3, tokens of a complex with 16 heads and one pair bias for all diffusion samples.
# t5: T5 large. dropout: training of a decoder. The last ones run the kernels above head dim 128.
CASES = (
    BiasCase("pair_768_d24", 48, 768, 16, 16, 24, "array"),
    BiasCase("pair_2k_d32", 4, 2048, 16, 16, 32, "array"),
    BiasCase("pair_4k_d64", 1, 4096, 16, 16, 64, "array"),
    BiasCase("t5_2k_d64", 4, 2048, 16, 16, 64, "table"),
    BiasCase("t5_causal_4k_d64", 2, 4096, 16, 16, 64, "array", causal=True),
    BiasCase("dropout_4k_d64", 2, 4096, 16, 16, 64, causal=True, dropout=0.1),
    BiasCase("dropout_16k_d128", 1, 16384, 32, 8, 128, causal=True, dropout=0.1),
    BiasCase("array_4k_d128", 1, 4096, 16, 16, 128, "array"),
    BiasCase("array_4k_d256", 1, 4096, 16, 16, 256, "array"),
    BiasCase("dropout_8k_d256", 1, 8192, 16, 8, 256, causal=True, dropout=0.1),
)
DROPOUT_KEY = jax.random.key(11)

Function = Callable[..., jax.Array]  # (query, key, value, operand) -> output


def packax_function(case: BiasCase, *, plain: bool = False) -> Function:
    """`plain`: the same attention without bias and dropout, to show their cost."""
    expression = packax.causal() if case.causal else packax.full()
    mask = packax.create_attention_mask(expression, q_len=case.seq, kv_len=case.seq)
    drops: dict[str, Any] = {"dropout_rate": case.dropout, "dropout_key": DROPOUT_KEY}

    def run(q: jax.Array, k: jax.Array, v: jax.Array, operand: Any) -> jax.Array:
        if plain:
            return packax.flash_attention(q, k, v, mask)
        more = drops if case.dropout else {}
        return packax.flash_attention(q, k, v, mask, bias=case.bias_of(operand), **more)

    return run


def _by_jax_nn(case: BiasCase, implementation: str) -> Function:
    return lambda q, k, v, operand: jax.nn.dot_product_attention(
        q, k, v, case.bias_of(operand), is_causal=case.causal, implementation=implementation
    )


def jax_function(case: BiasCase) -> Function:
    """jax.nn's attention in XLA. It has no dropout: such cases are written out as in Flax."""
    if not case.dropout:
        return _by_jax_nn(case, "xla")

    def run(q: jax.Array, k: jax.Array, v: jax.Array, operand: Any) -> jax.Array:
        k, v = (jnp.repeat(x, case.heads // case.kv_heads, 2) for x in (k, v))
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        logits *= case.head_dim**-0.5
        if operand is not None:
            logits += case.bias_of(operand)
        if case.causal:
            logits = jnp.where(jnp.tri(case.seq, dtype=bool), logits, jnp.finfo(jnp.float32).min)
        p = jax.nn.softmax(logits).astype(v.dtype)
        kept = jax.random.bernoulli(DROPOUT_KEY, 1 - case.dropout, p.shape)
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(kept, p / (1 - case.dropout), 0), v)

    return run


def cudnn_function(case: BiasCase) -> Function:
    """cuDNN through jax.nn, or with dropout through jax's private function that supports it."""
    if not case.dropout:
        return _by_jax_nn(case, "cudnn")

    def run(q: jax.Array, k: jax.Array, v: jax.Array, operand: Any) -> jax.Array:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        kinds = cudnn.MaskType
        return cudnn.dot_product_attention(
            q,
            k,
            v,
            case.bias_of(operand),
            scale=case.head_dim**-0.5,
            mask_type=kinds.CAUSAL if case.causal else kinds.NO_MASK,
            dropout_rate=case.dropout,
        )

    return run
