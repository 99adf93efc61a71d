"""Wrong versions of packax, each one edit, and the cells of the table that find it.

A mutant is (name, file, old text, new text, cells). A cell is "property: call", as a failure of
tests/table prints it, or the path of a test file.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str  # in python/packax/_src, or csrc/... or tests of the repository
    old: str
    new: str
    cells: tuple[str, ...]


EQ = "equals the reference: "
VMAP = "vmap: "
PLAN = "context plan: "
LOCAL = "local context plan: "
RANKS = "context parallelism without a plan: "
MESH = "explicit mesh: "
AUTO = "plain jit on a mesh: "
SEQUENCE = "explicit mesh, sharded sequence: "
SECOND = "forward mode and second derivatives: "
XLA = "ops/xla_attention.py"
EXPORT = "export of symbolic sizes: "

MUTANTS = [
    # The pairs that a row attends to
    Mutant(
        "first key of a range",
        XLA,
        "lax.le(lax.bitwise_not(index), not_lo)",
        "lax.lt(lax.bitwise_not(index), not_lo)",
        (EQ + "interval=left",),
    ),
    Mutant(
        "end of a range", XLA, "lax.lt(index, hi))", "lax.le(index, hi))", (EQ + "interval=causal",)
    ),
    Mutant(
        "ids compared by order",
        XLA,
        "lax.eq(of_row[0], of_key[0])",
        "lax.le(of_row[0], of_key[0])",
        (EQ + "selector=documents",),
    ),
    Mutant(
        "upper limit of positions",
        XLA,
        "lax.le(of_key[1], of_row[1])",
        "lax.lt(of_key[1], of_row[1])",
        (EQ + "interval=causal,selector=positions",),
    ),
    Mutant(
        "lower limit of positions",
        XLA,
        "lax.le(of_row[2], of_key[1])",
        "lax.lt(of_row[2], of_key[1])",
        (EQ + "interval=left,selector=positions",),
    ),
    Mutant(
        "block mask ignored",
        XLA,
        "if block_size not in (None, ONE_BLOCK):",
        "if False:",
        (EQ + "selector=block mask",),
    ),
    Mutant(
        "block mask of another row of heads",
        XLA,
        "heads = (tiles.kv_heads, tiles.group) if bits.shape[0] > 1 else (1, 1)",
        "heads = (tiles.kv_heads, tiles.group) if bits.shape[0] > 1 else (1, 1)\n"
        "    bits = bits[::-1]",
        (EQ + "selector=block mask",),
    ),
    Mutant(
        "high limit off by one",
        "masks/row_ranges.py",
        "jnp.minimum(row_values.high, kv_len - 1) + 1)",
        "jnp.minimum(row_values.high, kv_len - 1))",
        (EQ + "interval=causal",),
    ),
    Mutant(
        "low limit ignored",
        "masks/row_ranges.py",
        "lo = jnp.maximum(lo, row_values.low)",
        "lo = jnp.minimum(lo, row_values.low)",
        (EQ + "interval=left",),
    ),
    Mutant(
        "end of ranges",
        "masks/row_ranges.py",
        "hi = jnp.minimum(hi, jnp.clip(last, 0, kv_len))",
        "hi = jnp.minimum(hi, jnp.clip(last + 1, 0, kv_len))",
        (EQ + "selector=ranges",),
    ),
    Mutant(
        "positions ignored",
        "masks/row_ranges.py",
        "if document.q_pos is None or (low is None and high is None):",
        "if True:",
        (EQ + "interval=causal,selector=positions",),
    ),
    Mutant(
        "first position after the limit",
        "ops/xla_mask.py",
        "_first_match(jnp.greater, kv_pos, upper, lo, hi)",
        "_first_match(jnp.greater_equal, kv_pos, upper, lo, hi)",
        (EQ + "interval=causal,selector=positions",),
    ),
    Mutant(
        "window one wider",
        "masks/intervals.py",
        "self.shifted(plus(at.q, -self.left))",
        "self.shifted(plus(at.q, -self.left - 1))",
        (EQ + "interval=window",),
    ),
    Mutant(
        "right end of a window",
        "masks/intervals.py",
        "plus(self.shifted(at.q), self.right)",
        "plus(self.shifted(at.q), 0)",
        (EQ + "interval=window",),
    ),
    Mutant(
        "window counts without the token",
        "masks/intervals.py",
        'left = _size("window", window, 1) - 1',
        'left = _size("window", window, 1)',
        (EQ + "interval=left",),
    ),
    Mutant(
        "chunk one shorter",
        "masks/intervals.py",
        "plus(row, self.size - 1 - inside)",
        "plus(row, self.size - 2 - inside)",
        (EQ + "interval=chunked",),
    ),
    Mutant(
        "prefix one longer",
        "masks/intervals.py",
        "last = plus(self._per_row(), -1)",
        "last = plus(self._per_row(), 0)",
        (EQ + "interval=prefix",),
    ),
    Mutant(
        "offset ignored",
        "masks/intervals.py",
        "if self.offset is None:\n            return positions",
        "if True:\n            return positions",
        (EQ + "interval=offset",),
    ),
    Mutant(
        "union as intersection",
        "masks/expressions.py",
        '_combine(self.members, at, "minimum", "maximum", unbounded_wins=True)',
        '_combine(self.members, at, "maximum", "minimum", unbounded_wins=True)',
        (EQ + "interval=union",),
    ),
    Mutant(
        "span cut at its first token",
        "masks/spans.py",
        "xp.minimum(low, first)",
        "xp.maximum(low, first)",
        (EQ + "interval=spans",),
    ),
    Mutant(
        "span across documents",
        "masks/spans.py",
        "for ids in (self.ids, *at.ids)]",
        "for ids in (self.ids,)]",
        (EQ + "interval=spans,selector=documents",),
    ),
    Mutant(
        "tree without its ancestors",
        "masks/tree.py",
        "lo, hi = nodes.first, nodes.own_end",
        "lo, hi = nodes.own_end - 1, nodes.own_end",
        (EQ + "selector=tree",),
    ),
    Mutant(
        "subtree one longer",
        "masks/tree.py",
        'xp.where(real, index + 1, 0), "max", xp)',
        'xp.where(real, index + 2, 0), "max", xp)',
        (EQ + "selector=tree",),
    ),
    Mutant(
        "depth of a limit",
        "masks/tree.py",
        "hi = index_at(nodes, xp.clip(high, 0, nodes.last)) + 1",
        "hi = index_at(nodes, xp.clip(high, 0, nodes.last))",
        (EQ + "interval=window,selector=tree",),
    ),
    Mutant(
        "answers see each other",
        "masks/tree.py",
        "begins = new_group | (real & (answers[at] != answers))",
        "begins = new_group | (real & (answers[at] < answers) & (answers < 1))",
        (EQ + "selector=shared prefix",),
    ),
    Mutant(
        "documents with a tree ignored",
        "masks/row_ranges.py",
        "if mode >= MaskMode.IDS and tree is not False:",
        "if mode >= MaskMode.IDS and tree is None:",
        (EQ + "selector=tree and documents",),
    ),
    Mutant(
        "block bounds of a tree",
        "ops/block_lists.py",
        "overlaps &= own_min <= end_max",
        "overlaps &= own_max <= end_min",
        (EQ + "selector=tree,lengths=165x165",),
    ),
    Mutant(
        "pooled blocks",
        "ops/block_lists.py",
        "some & overlaps, every & full",
        "every & overlaps, every & full",
        (EQ + "selector=block mask,lengths=165x165",),
    ),
    # Scores, sums and gradients
    Mutant(
        "row maximum not applied",
        XLA,
        "lax.add(lax.mul(own, keep), update)",
        "lax.add(own, update)",
        (EQ + "lengths=165x165",),
    ),
    Mutant("sign of dlse", XLA, "delta = delta - dlse", "delta = delta + dlse", (EQ + "full",)),
    Mutant(
        "derivative of the soft cap",
        XLA,
        "soft_cap * t, 1 - t * t",
        "soft_cap * t, 1 - t",
        (EQ + "cap=soft cap",),
    ),
    Mutant(
        "sign of the slopes' gradient",
        XLA,
        "stack([by_scale, -by_slope], 2)",
        "stack([by_scale, by_slope], 2)",
        (EQ + "bias=alibi",),
    ),
    Mutant(
        "gradient of the scale",
        XLA,
        "_where(allowed, ds * s, 0, tiles)",
        "_where(allowed, ds, 0, tiles)",
        (EQ + "scale=array",),
    ),
    Mutant("gradient without the scale", XLA, "lax.mul(ds, logits.scale))", "ds)", (EQ + "full",)),
    Mutant(
        "gradient of dropped pairs",
        XLA,
        "dp * keep.astype(real), p * keep",
        "dp, p * keep",
        (EQ + "dropout=dropout",),
    ),
    Mutant(
        "values of dropped pairs",
        XLA,
        "dot(dropped.astype(low), do_tile, 1, 1)",
        "dot(p.astype(low), do_tile, 1, 1)",
        (EQ + "dropout=dropout",),
    ),
    Mutant(
        "kept fraction",
        XLA,
        "real.type(inverse_keep(spec.dropout_threshold))",
        "real.type(1)",
        (EQ + "dropout=dropout",),
    ),
    Mutant(
        "dropout's batch and head",
        XLA,
        "(row[None, :, None], words[:, 2], words[:, 3])",
        "(row[None, :, None], words[:, 3], words[:, 2])",
        (EQ + "dropout=dropout",),
    ),
    Mutant(
        "heads of slopes swapped",
        XLA,
        "slopes.reshape(tiles.kv_heads, tiles.group)",
        "slopes.reshape(tiles.group, tiles.kv_heads).T",
        (EQ + "bias=alibi",),
    ),
    Mutant(
        "signed distance",
        XLA,
        "jnp.abs(row[:, None] - column[None, :])",
        "(row[:, None] - column[None, :])",
        (EQ + "bias=alibi",),
    ),
    Mutant(
        "bias ignored", XLA, "logit += bias.at(step, block, s.dtype)", "pass", (EQ + "bias=pairs",)
    ),
    Mutant(
        "row of the batch of a bias",
        "ops/xla_tiles.py",
        "zero if self.shape[0] == 1 else div",
        "zero if self.shape[0] != 1 else div",
        (EQ + "bias=pairs",),
    ),
    Mutant(
        "sign of the sinks' gradient",
        "ops/score_mods.py",
        "return -jnp.sum(jnp.where(attended,",
        "return jnp.sum(jnp.where(attended,",
        (EQ + "sinks=sinks",),
    ),
    Mutant(
        "sinks ignored",
        XLA,
        "out, lse = add_sinks(out, lse, x.sinks)",
        "pass",
        (EQ + "sinks=sinks",),
    ),
    Mutant(
        "sinks without their dropout sums",
        "ops/score_mods.py",
        "log + jnp.where(attended, top - larger, 0)",
        "log",
        (EQ + "bias=pairs,sinks=sinks",),
    ),
    Mutant(
        "merged weights",
        "ops/merge.py",
        "_of_rows(weight / total) * values",
        "_of_rows(weight) * values",
        (EQ + "sinks=sinks",),
    ),
    Mutant(
        "largest logit of idle rows",
        XLA,
        "(lse, select(attends, row_max, -jnp.inf))",
        "(lse, select(attends, row_max, 1e9))",
        (EQ + "selector=documents",),
    ),
    Mutant(
        "negative scale",
        "requests.py",
        "return (query, scale) if scale > 0 else (-query, -scale)",
        "return (query, scale) if scale > 0 else (query, -scale)",
        (EQ + "scale=negative",),
    ),
    # Derivatives and vmap
    Mutant(
        "tangent of the backward without a sum",
        "autodiff.py",
        "found[count + 2 :] = [out, row_sums.of_log(lse)][: len(seeds)]",
        "found[count + 2 :] = [out, 0 * row_sums.of_log(lse)][: len(seeds)]",
        (SECOND + "scale=array",),
    ),
    Mutant(
        "hessian without inputs",
        "autodiff.py",
        "rows = iter(hessian.apply(direction, operands))",
        "rows = iter([2 * x for x in hessian.apply(direction, operands)])",
        (SECOND + "scale=array",),
    ),
    Mutant(
        "sign of the tangent's cotangent",
        "autodiff.py",
        "self.inner.has_tangent).apply(along, operands)",
        "self.inner.has_tangent).apply([-x for x in along], operands)",
        (SECOND + "interval=causal",),
    ),
    Mutant(
        "unmapped operands summed",
        "autodiff.py",
        "x if x is None else x.sum(0) if dim is None",
        "x if x is None else x.mean(0) if dim is None",
        (
            VMAP + "full",
            VMAP + "interval=causal",
            VMAP + "scale=array",
        ),
    ),
    Mutant(
        "vmap mixes rows",
        "ops/batching_rules.py",
        "jnp.moveaxis(x, dim, to)",
        "jnp.moveaxis(x, dim, to)[::-1]",
        (VMAP + "dropout=dropout",),
    ),
    Mutant(
        "vmap of biases",
        "ops/batching_rules.py",
        "return [folding.merged(x, groups) for x in placed]",
        "return [folding.merged(x[::-1], groups) for x in placed]",
        (VMAP + "bias=pairs",),
    ),
    # Meshes and plans
    Mutant(
        "sinks' gradient not summed",
        "ops/score_mods.py",
        "sinks=psum(gradients.sinks, rows)",
        "sinks=gradients.sinks",
        (RANKS + "sinks=sinks",),
    ),
    Mutant(
        "scale's gradient not summed",
        "ops/score_mods.py",
        "scales=psum(gradients.scales, rows + layout.heads)",
        "scales=psum(gradients.scales, rows)",
        (RANKS + "scale=array",),
    ),
    Mutant(
        "slopes' gradient not summed",
        "ops/score_mods.py",
        "slopes=psum(gradients.slopes, rows)",
        "slopes=gradients.slopes",
        (RANKS + "bias=alibi",),
    ),
    Mutant(
        "bias gradient not summed",
        "ops/score_mods.py",
        "rows + layout.heads if x not in of_bias",
        "rows if x not in of_bias",
        (RANKS + "bias=keys",),
    ),
    Mutant(
        "gradients of replicated heads",
        "context/all_gather_kv.py",
        "return jax.lax.psum(gradient, axes) if axes else gradient",
        "return gradient",
        (RANKS + "heads=4/1",),
    ),
    Mutant(
        "keys stay in the plan's order",
        "context/all_gather_kv.py",
        "return [take_chunks(_add_token(self.kv_plan[:, way], zero), 1, x) for x in pieces]",
        "return pieces",
        (PLAN + "interval=causal",),
    ),
    Mutant(
        "gradients in the plan's order",
        "context/all_gather_kv.py",
        "parts = self._reorder(self._concat(dk, dv), 0, self.scatter_done)",
        "parts = self._concat(dk, dv)",
        (PLAN + "interval=causal",),
    ),
    Mutant(
        "gradients of other ranks lost",
        "context/all_gather_kv.py",
        "sums = [jax.lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True) for x in sums]",
        "sums = [x[:, : x.shape[1] // 2] for x in sums]",
        (RANKS + "interval=causal",),
    ),
    Mutant(
        "dropout in the plan's order",
        "ops/dropout.py",
        "numbers = order * chunk + numbers % chunk",
        "pass",
        (PLAN + "interval=causal,dropout=dropout",),
    ),
    Mutant(
        "rows of a block mask in order",
        "masks/rank_rows.py",
        "block_mask = take_sharded(self.plan.order, 2, block_mask)",
        "pass",
        (PLAN + "interval=causal,selector=block mask",),
    ),
    Mutant(
        "rows of a plan in order",
        "masks/rank_rows.py",
        "x = self.plan.permute(x)",
        "pass",
        (PLAN + "interval=causal",),
    ),
    Mutant(
        "private keys as shared",
        "masks/local_mask.py",
        "my_ids = jnp.where(private, my_ids, PADDING_SEGMENT_ID)",
        "pass",
        ("tests/context/test_local_masks.py",),
    ),
    Mutant(
        "high limit of a local part",
        "masks/local_mask.py",
        "high = None if high is None else keys.number(plus(high, 1)) - 1",
        "high = None if high is None else keys.number(high)",
        ("tests/context/test_local_masks.py",),
    ),
    Mutant(
        "halo one key short",
        "masks/halo_mask.py",
        "first = (numbers_ * halo.chunk - stretch.before)",
        "first = (numbers_ * halo.chunk - stretch.before + 1)",
        ("tests/context/test_halos.py",),
    ),
    Mutant(
        "heads of a bias not sharded",
        "ops/score_mods.py",
        '"h": layout.heads, "r": layout.context',
        '"h": (), "r": layout.context',
        (RANKS + "bias=pairs",),
    ),
    Mutant(
        "sinks not resharded",
        "requests.py",
        "if own[0] == of_heads[2]:",
        "if True:",
        (
            MESH + "sinks=sinks",
            MESH + "interval=causal,sinks=sinks",
            MESH + "cap=soft cap,sinks=sinks",
        ),
    ),
    Mutant(
        "mesh axis of key heads",
        "ops/partition_rules.py",
        '["b.h.", "b.g.", "b.g.",',
        '["b.h.", "b.h.", "b.g.",',
        (AUTO + "heads=4/1",),
    ),
    Mutant(
        "bias gradient of one device",
        "ops/partition_rules.py",
        'summed[len(gradients)] = names.index("bias")',
        "pass",
        (AUTO + "bias=keys",),
    ),
    # Symbolic sizes
    Mutant(
        "few steps of the search",
        "ops/xla_mask.py",
        "steps = 31 if is_symbolic(kv_len)",
        "steps = 3 if is_symbolic(kv_len)",
        (EXPORT + "interval=causal,selector=positions",),
    ),
    # Decoding
    Mutant(
        "first key of decoding",
        "ops/xla_decode.py",
        "attends = (lo[..., None] <= j)",
        "attends = (lo[..., None] < j)",
        (EQ + "decode,window=left",),
    ),
    Mutant(
        "last key of decoding",
        "ops/xla_decode.py",
        "(j < hi[..., None]) & (j >= block * size)",
        "(j < hi[..., None] - 1) & (j >= block * size)",
        (EQ + "decode",),
    ),
    Mutant(
        "scale of values",
        "ops/xla_decode.py",
        "values * _scale_of(x.value_scale, page)",
        "values * _scale_of(x.key_scale, page)",
        (EQ + "decode,numbers=float8 scales of heads",),
    ),
    Mutant(
        "decoding without a soft cap",
        "ops/xla_decode.py",
        "if spec.soft_cap:",
        "if False:",
        (EQ + "decode,cap=soft cap",),
    ),
    Mutant(
        "decoding without sinks",
        "ops/xla_decode.py",
        "if x.sinks is not None:",
        "if False:",
        (EQ + "decode,sinks=sinks",),
    ),
    Mutant(
        "page of another sequence",
        "ops/xla_decode.py",
        "page = block_table[:, index // page_size]",
        "page = block_table[::-1, index // page_size]",
        (EQ + "decode,cache=pages",),
    ),
    Mutant(
        "causal limit of decoding",
        "decode.py",
        "position + 1 + right, hi)",
        "position + right, hi)",
        (EQ + "decode,rows=3",),
    ),
    Mutant(
        "window of decoding",
        "decode.py",
        "position - min(left, INT_MAX // 2))",
        "position + 1 - min(left, INT_MAX // 2))",
        (EQ + "decode,window=left",),
    ),
    Mutant(
        "positions of packed rows",
        "ops/packed_rows.py",
        "(self.end[self.sequence] - rows)",
        "(self.end[self.sequence] - rows - 1)",
        (EQ + "ragged",),
    ),
    Mutant(
        "sequence of a packed row",
        "ops/packed_rows.py",
        'side="right"',
        'side="left"',
        (EQ + "ragged",),
    ),
    Mutant(
        "slice of a cache",
        "ops/partition_rules.py",
        "jnp.clip(hi - first, 0, size))",
        "jnp.clip(hi - first, 0, size - 1))",
        (SEQUENCE + "decode",),
    ),
    Mutant(
        "prefix forgotten",
        "cascade.py",
        "merged = merge_attention([(out, lse), suffix])",
        "merged = suffix",
        (EQ + "decode,cache=prefix of pairs",),
    ),
    # Faults that users found, put back
    Mutant(
        "fault: explicit types inside a lowering rule",
        "ops/lowering.py",
        "with without_mesh(ctx.avals_in):",
        "if True:",
        ("derivatives on an explicit mesh: interval=causal",),
    ),
    Mutant(
        "fault: means of explicit values",
        "../integrations/jax_nn.py",
        "return over_auto_axes(replaced, (out, lse, value), typed_axes(out))",
        "return replaced(out, lse, value)",
        (MESH + "function=jax.nn",),
    ),
    Mutant(
        "fault: operands of a shard_map unsharded",
        "core/sharding.py",
        "if not self.explicit:\n            return mapped",
        "if True:\n            return mapped",
        (SEQUENCE + "selector=tree", SEQUENCE + "interval=spans", SEQUENCE + "sinks=sinks"),
    ),
    Mutant(
        "fault: prefix over devices",
        "cascade.py",
        "parts = _parts(batch, groups, q_len, _pieces(query, batch_axes))",
        "parts = _parts(batch, groups, q_len, 1)",
        (MESH + "decode,cache=prefix of all",),
    ),
    # Kernels, in their simulators
    Mutant(
        "kernel: signed distance",
        "csrc/kernels/portable/scoring.py",
        "tl.abs(positions.tile[:, None] - at[None, :])",
        "(positions.tile[:, None] - at[None, :])",
        ("tests/kernels/test_fallback_kernels.py",),
    ),
    Mutant(
        "kernel: slope of the first head",
        "csrc/kernels/portable/scoring.py",
        "at = tl.where(bias_batch > 1, b, 0) * heads + head\n",
        "at = tl.where(bias_batch > 1, b, 0) * heads\n",
        ("tests/kernels/test_fallback_kernels.py",),
    ),
    Mutant(
        "kernel: positions that fall",
        "csrc/kernels/mask/segments.py",
        "mask=inner & (pos < before)",
        "mask=inner & (pos > before)",
        ("tests/kernels/test_portable_kernels.py",),
    ),
    Mutant(
        "kernel: last run of an id",
        "csrc/kernels/mask/segments.py",
        "end = tl.minimum(following, carry)",
        "end = following",
        ("tests/kernels/test_portable_kernels.py",),
    ),
]
