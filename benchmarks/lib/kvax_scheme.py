"""Context parallelism that moves data as kvax does but runs packax's kernels, for context.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import packax
from jax.sharding import PartitionSpec as P
from packax._src.core.spec import AttentionSpec
from packax._src.ops import primitives
from packax._src.ops.score_mods import NonDiffOperands, ScoreParams

Arrays = tuple[jax.Array, ...]
ROWS, LSE = P(None, "context"), P(None, None, "context")


def kvax_like(mask: packax.AttentionMask, sharding: packax.AttentionSharding, plan: Any) -> Any:
    """Attention that keeps gathered keys as residuals and all-reduces gradients in float32."""
    own = mask.q_len // mask.shards
    mask = dataclasses.replace(mask, kv_plan=None)
    specs = sharding.mask_specs(mask)

    def local(mask: packax.AttentionMask) -> packax.AttentionMask:
        return dataclasses.replace(mask, q_len=own, sharding=None, shards=1)

    def mapped(function: Callable[..., Any], *in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            function, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def whole(x: jax.Array) -> jax.Array:
        return plan.unpermute(jax.lax.all_gather(x, "context", axis=1, tiled=True))

    gather = mapped(whole, ROWS, out_specs=P())
    attend = mapped(
        lambda q, k, v, mask: packax.flash_attention(q, k, v, local(mask)),
        *(ROWS, P(), P(), specs),
        out_specs=ROWS,
    )

    def pull(q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, dout: Any) -> Arrays:
        # Calls packax's backward primitive directly, so the forward is not computed again.
        spec = AttentionSpec(scale=q.shape[3] ** -0.5, needs_grad=("query", "key", "value"))
        call = (q, k, v, ScoreParams(), local(mask), NonDiffOperands())
        dq, dk, dv, _ = primitives.backward_pass(spec, primitives.Inputs(*call, out, lse, dout))
        rank = jax.lax.axis_index("context")
        sums = (jax.lax.psum(x.astype(jnp.float32), "context") for x in (dk, dv))
        dk, dv = (
            jax.lax.dynamic_slice_in_dim(plan.permute(x), rank * own, own, axis=1).astype(q.dtype)
            for x in sums
        )
        return dq, dk, dv

    attend_lse = mapped(
        lambda q, k, v, mask: packax.flash_attention(q, k, v, local(mask), return_lse=True),
        *(ROWS, P(), P(), specs),
        out_specs=(ROWS, LSE),
    )
    pull = mapped(pull, ROWS, P(), P(), specs, ROWS, LSE, ROWS, out_specs=(ROWS,) * 3)

    @jax.custom_vjp
    def attention(query, key, value, mask):
        return attend(query, gather(key), gather(value), mask)

    def forward(query, key, value, mask):
        key, value = gather(key), gather(value)
        out, lse = attend_lse(query, key, value, mask)
        return out, (query, key, value, mask, out, lse)

    attention.defvjp(forward, lambda residuals, dout: (*pull(*residuals, dout), None))
    return lambda query, key, value: attention(query, key, value, mask)
