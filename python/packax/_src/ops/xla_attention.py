"""Blockwise attention in jax.numpy, for platforms without kernels, in O(S) memory.

The algorithm is FlashAttention-2 (arXiv 2307.08691): the forward is an online softmax over blocks
of keys, the backward has five products per block. One step of the outer loop is a tile of query
rows with all heads. The inner loop visits only the key blocks inside the tile's row ranges, so the
work is proportional to the attended area.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from packax._src.core.spec import (
    INT_MAX,
    ONE_BLOCK,
    AttentionSpec,
    MaskMode,
    Operands,
    accumulator,
    ceil_div,
    fill_up,
    is_symbolic,
)
from packax._src.ops import block_lists, row_sums
from packax._src.ops.dropout import inverse_keep, philox
from packax._src.ops.score_mods import add_sinks
from packax._src.ops.xla_tiles import (
    BiasTiles,
    add,
    add_keys,
    at,
    batch_rows,
    block_range,
    change,
    cut_keys,
    cut_rows,
    div,
    first_key,
    key_block,
    key_integers,
    keys_together,
    of_key_block,
    of_scores,
    put,
    put_row_tile,
    rem,
    row_integers,
    row_tile,
    rows_together,
    select,
    sized,
    stack,
    tile_max,
    tiles_of,
    uncut_rows,
)


def forward(
    spec: AttentionSpec, x: Operands, on_gpu: bool = False, round_weights: bool = True
) -> list[jax.Array]:
    """The results of forward_p. `on_gpu`: use the tiles and factors for GPUs. The weights of values
    must not be rounded to 16 bits for tangents, whose weights are large differences.
    """
    query, key, value = x.query, x.key, x.value
    tiles = tiles_of(x, on_gpu)
    queries, keys, values = cut_rows(query, tiles), cut_keys(key, tiles), cut_keys(value, tiles)
    visit, allowed_of = _visits(spec, x, tiles)
    logits_of = logits_of_blocks(spec, x, tiles)
    kept_of = kept_of_blocks(spec, x, tiles)
    real = accumulator(query.dtype)
    low = _factor_dtype(query.dtype, on_gpu)
    of_weights = low if round_weights else real
    dot = _dots(spec.precision, real)
    scores_of = _products_with_one_tangent(dot)
    depth = value.shape[-1]
    shape = (tiles.products, tiles.group * tiles.rows)

    # The initial row maximum is the lowest finite number, so that -inf - -inf cannot occur.
    least = float(jnp.finfo(real).min)

    def sums_and_maxima(rows, axis):
        return (lax.index_in_dim(rows, n, axis, keepdims=False) for n in (0, 1))

    def one_tile(step, results):
        out, acc, rows = results
        q_tile = row_tile(queries, step).astype(low)

        def one_block(block, state):
            acc, rows = state
            total, row_max = sums_and_maxima(at(rows, step), 0)
            s = scores_of(q_tile, key_block(keys, block).astype(low))
            s = _where(allowed_of(step, block), logits_of(s, step, block).logit, -jnp.inf, tiles)
            # The results do not depend on the shift, so it needs no tangent. The tangent of a
            # maximum also compares scores with the maximum, and possibly none is equal: the
            # compiler may recompute scores with another rounding (a multiply-add).
            row_max = lax.stop_gradient(row_max)
            new_max = lax.max(row_max, lax.reduce_max(lax.stop_gradient(s), (2,)))
            p = lax.exp(lax.sub(s, lax.expand_dims(new_max, (2,))))
            row_sum = lax.reduce_sum(p, (2,))
            if kept_of is not None:
                p = select(kept_of(step, block), p, 0)
            v_block = key_block(values, block).astype(of_weights)
            update = dot(p.astype(of_weights), v_block, 2, 1)
            if tiles.one_block:
                return put(acc, update, step), put(rows, stack([row_sum, new_max], 0), step)
            keep = lax.exp(lax.sub(row_max, new_max))
            total = lax.add(lax.mul(total, keep), row_sum)
            keep, update = lax.expand_dims(keep, (0, 3)), lax.expand_dims(update, (0,))
            acc = change(acc, step, lambda own: lax.add(lax.mul(own, keep), update))
            # One write for both, after all reads of the old values, so that nothing is copied.
            return acc, put(rows, stack([total, new_max], 0), step)

        acc, rows = visit(step, one_block, (acc, rows))
        total, _ = sums_and_maxima(at(rows, step), 0)
        # Broadcast first: XLA would compute reciprocals of the row sums in a separate kernel.
        total = lax.broadcast_in_dim(total, (*shape, depth), (0, 1))
        attends = lax.ne(total, real.type(0))
        divisor = select(attends, total, 1)
        if kept_of is not None:
            divisor = lax.div(divisor, real.type(inverse_keep(spec.dropout_threshold)))
        # Rows that attend to nothing are 0 even if a value is NaN.
        own = select(attends, lax.div(at(acc, step), divisor), 0).astype(query.dtype)
        out = put_row_tile(out, own, step, tiles)
        return out, acc, rows

    # Every tile is overwritten, so any array of this shape works; zeros would cost a kernel.
    out = queries
    if depth != query.shape[-1]:
        out = lax.full((*queries.shape[:-1], depth), 0, query.dtype)
    rows = stack([lax.full((tiles.steps, *shape), x, real) for x in (0, least)], 1)
    results = out, lax.full((tiles.steps, *shape, depth), 0, real), rows
    out, _, rows = _all_steps(tiles, one_tile, results)
    total, row_max = sums_and_maxima(rows, 1)
    attends = lax.ne(total, real.type(0))
    log = lax.log(select(attends, total, 1))
    lse = select(attends, log if x.lse_in_two else lax.add(row_max, log), -jnp.inf)
    lse, row_max = (
        lax.transpose(
            lax.squeeze(rows_together(lax.expand_dims(y, (3,)), tiles, query.shape[1]), (3,)),
            (0, 2, 1),
        )
        for y in (lse, select(attends, row_max, -jnp.inf))
    )
    if x.lse_in_two:
        lse = row_sums.together(row_max, lse)
    out = uncut_rows(out, tiles, query.shape[1])
    if x.sinks is not None:
        out, lse = add_sinks(out, lse, x.sinks)
    return [out, lse, row_max] if spec.max_logits else [out, lse]


def backward(
    spec: AttentionSpec,
    x: Operands,
    on_gpu: bool = False,
    along: dict[str, jax.Array] | None = None,
) -> list[jax.Array]:
    """The results of backward_p, in one pass over the attended blocks. `along`: tangents of some
    operands, by name; then the tangents of the results instead.

    Gradients that are not needed are returned as zeros without being computed: XLA does not remove
    unused sums that a loop carries. For the same reason, each block's tangents are computed by
    itself, instead of those of the loops, which would carry the gradients, too.
    """
    query, key, value = x.query, x.key, x.value
    tiles = tiles_of(x, on_gpu)
    visit, allowed_of = _visits(spec, x, tiles)
    logits_of = logits_of_blocks(spec, x, tiles)
    kept_of = kept_of_blocks(spec, x, tiles)
    bias = BiasTiles(x.bias, tiles) if spec.bias_grad else None
    real = accumulator(query.dtype)
    low = _factor_dtype(query.dtype, on_gpu)
    dot = _dots(spec.precision, real)
    scores_of = _products_with_one_tangent(dot)

    def delta_of(by_name):
        """(B, Sq, H). Computed for whole rows: in tiles, rounding would depend on the number of
        heads per device."""
        out, dout, dlse = (by_name[n] for n in ("out", "dout", "dlse"))
        some = lax.ne(row_sums.apart(by_name["lse"])[1].transpose(0, 2, 1), real.type(-np.inf))
        products = lax.mul(out.astype(real), dout.astype(real))
        attends = lax.broadcast_in_dim(some, out.shape, (0, 1, 2))
        delta = lax.reduce_sum(select(attends, products, 0), (3,))
        return delta if dlse is None else delta - dlse.transpose(0, 2, 1).astype(real)

    def rows_of(by_name):
        """What a tile reads of its rows: the logarithm, delta, and perhaps the largest logit."""
        numbers = [y for y in reversed(row_sums.apart(by_name["lse"])) if y is not None]
        log, *top = (y.transpose(0, 2, 1).astype(real) for y in numbers)
        if top:  # all biases of a row may be -inf
            some = lax.ne(log, real.type(-np.inf))
            log, top = select(some, log, jnp.inf), [select(some, top[0], 0)]
        return cut_rows(stack([log, delta_of(by_name), *top], 3), tiles)

    def cut(by_name):
        """The other arrays that tiles and blocks read, of those that are present."""
        some = {n: y for n, y in by_name.items() if y is not None}
        arrays = {n: cut_rows(some[n], tiles) for n in ("query", "dout") if n in some}
        arrays |= {n: cut_keys(some[n], tiles) for n in ("key", "value") if n in some}
        arrays |= {n: some[n] for n in ("scales", "slopes") if n in some}
        return arrays | ({"bias": BiasTiles(some["bias"], tiles).array} if "bias" in some else {})

    def tile_of(arrays, step):
        """`arrays` with those of rows replaced by a tile. Rows that attend to nothing are masked,
        so that NaN or inf in them or their cotangents is ignored."""
        rows = row_tile(arrays["rows"], step)
        own = {n: row_tile(arrays[n], step).astype(low) for n in ("query", "dout")}
        return arrays | {n: of_attending(rows, y) for n, y in own.items()} | {"rows": rows}

    def of_attending(rows, y):
        """y (products, group * rows, D), and 0 in rows that attend to nothing."""
        attends = lax.ne(lax.abs(rows[..., 0]), real.type(np.inf))
        return select(lax.broadcast_in_dim(attends, y.shape, (0, 1)), y, 0)

    def parts_of(arrays, step, block):
        """What a block adds to each gradient, by name."""
        q_tile, do_tile, rows = arrays["query"], arrays["dout"], arrays["rows"]
        shift, delta, *top = (
            lax.index_in_dim(rows, n, 2, keepdims=False) for n in range(rows.shape[2])
        )
        k_block, v_block = (key_block(arrays[n], block).astype(low) for n in ("key", "value"))
        allowed = allowed_of(step, block)
        s = scores_of(q_tile, k_block)
        logits = logits_of(s, step, block, arrays)
        # For pairs that are not attended, lse and dp may be inf or NaN (garbage in padding,
        # overflow in another document): select, never multiply.
        # The first select also prevents the compiler from computing s * scale - lse as one
        # multiply-add. lse was computed from rounded logits, so p is more exact if the same
        # rounding cancels.
        logit = _where(allowed, logits.logit, -jnp.inf, tiles)
        if top:
            # The difference is above 0 only if a product rounds differently than in the
            # forward. Not lax.min(logit, 0): its derivative at 0 would be 1/2.
            logit = lax.sub(logit, lax.expand_dims(top[0], (2,)))
            logit = lax.sub(logit, lax.stop_gradient(lax.max(logit, lax.full_like(logit, 0))))
        # -0 marks pairs that are not attended, and differs from a p that underflows. Another
        # read of `allowed` would make the compiler compute it again.
        p = _where(allowed, lax.exp(lax.sub(logit, lax.expand_dims(shift, (2,)))), -0.0, tiles)
        dp = scores_of(do_tile, v_block)
        dropped = p
        if kept_of is not None:
            keep = jnp.where(kept_of(step, block), inverse_keep(spec.dropout_threshold), 0)
            dp, dropped = dp * keep.astype(real), p * keep.astype(real)
        dlogit = lax.mul(p, lax.sub(dp, lax.expand_dims(delta, (2,))))
        not_attended = jnp.signbit(p)
        parts = {}
        if bias is not None:
            parts["bias"] = jnp.where(not_attended, 0, dlogit)
        ds = dlogit if logits.cap_slope is None else dlogit * logits.cap_slope
        if spec.score_grads:
            by_scale = by_slope = lax.full(ds.shape[:2], 0, real)
            if x.scales is not None:
                by_scale = _where(allowed, ds * s, 0, tiles).sum(axis=-1)
            if logits.distance is not None:
                by_slope = _where(allowed, dlogit * logits.distance, 0, tiles).sum(axis=-1)
            parts["scores"] = stack([by_scale, -by_slope], 2)
        ds = lax.select(not_attended, lax.full_like(ds, 0), lax.mul(ds, logits.scale)).astype(low)
        if "query" in spec.needs_grad:
            parts["query"] = of_attending(rows, dot(ds, k_block, 2, 1))  # 0 even if a key is NaN
        if "key" in spec.needs_grad:
            parts["key"] = dot(ds, q_tile, 1, 1)
        if "value" in spec.needs_grad:
            parts["value"] = dot(dropped.astype(low), do_tile, 1, 1)
        return parts

    by_name = x._asdict()
    arrays = cut(by_name) | {"rows": rows_of(by_name)}
    moved = {}  # the tangents of arrays
    if along is not None:
        of_rows = {n: along[n] for n in ("out", "lse", "dout", "dlse") if n in along}
        moved = cut(along) | {"rows": _tangent(rows_of, by_name, of_rows)}

    def one_tile(step, sums):
        own = tile_of(arrays, step)
        if along is not None:
            tangents = _tangent(functools.partial(tile_of, step=step), arrays, moved)
            own_moved = {n: tangents[n] for n in moved}

        def one_block(block, sums):
            of_block = functools.partial(parts_of, step=step, block=block)
            parts = of_block(own) if along is None else _tangent(of_block, own, own_moved)
            added = {}
            for name, total in sums.items():
                if bias is not None and name == "bias":
                    added[name] = bias.add(total, step, block, parts[name])
                elif name in ("key", "value"):
                    added[name] = add_keys(total, block, parts[name])
                else:
                    added[name] = add(total, step, parts[name])
            return added

        return visit(step, one_block, sums)

    # Sums are updated in place: a separate accumulator per tile would be zeroed and copied back.
    shape = (tiles.steps, tiles.products, tiles.group * tiles.rows)
    shapes = {"query": (*shape, query.shape[-1]), "scores": (*shape, 2)}
    shapes |= {n: arrays[n].shape for n in ("key", "value", "bias") if n in arrays}
    wanted = [*spec.needs_grad, *(["scores"] if spec.score_grads else [])]
    start = {n: lax.full(shapes[n], 0, real) for n in wanted if n in shapes}
    sums = _all_steps(tiles, one_tile, start)
    q_len = query.shape[1]
    results = [
        rows_together(sums["query"], tiles, q_len).astype(query.dtype)
        if "query" in sums
        else jnp.zeros_like(query),
        *(
            keys_together(sums[n], tiles, y) if n in sums else jnp.zeros_like(y)
            for n, y in (("key", key), ("value", value))
        ),
    ]
    if spec.score_grads:
        results.append(rows_together(sums["scores"], tiles, q_len).transpose(0, 2, 3, 1))
    if spec.row_delta:
        delta = delta_of(by_name) if along is None else _tangent(delta_of, by_name, of_rows)
        attended = (x.kv_end > x.kv_start)[..., None]
        results.append(jnp.where(attended, delta, 0).transpose(0, 2, 1))
    if bias is not None:
        results.append(bias.gradient(sums["bias"], x.bias.dtype))
    return results


def _tangent(function, values, tangents):
    """The tangent of a function of a dictionary. Entries without one stay constants, which costs no
    products."""
    some = {n: values[n] for n in tangents}
    return jax.jvp(lambda y: function(values | y), (some,), (tangents,))[1]


def _factor_dtype(dtype, on_gpu):
    """The dtype of the factors of products: on a GPU also 16 bits, as in the kernels."""
    return dtype if on_gpu and dtype.itemsize == 2 else accumulator(dtype)


def _dots(precision, real):
    """A product batched over axis 0 (`Tiles.products`) that contracts a_axis and b_axis."""

    def dot(a, b, a_axis, b_axis):
        dims = ((a_axis,), (b_axis,)), ((0,), (0,))
        return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=real)

    return dot


def _products_with_one_tangent(dot):
    """a b^T. Its tangent is one product of twice the depth, so that only one array of scores is
    written."""

    @jax.custom_jvp
    def scores(a, b):
        return dot(a, b, 2, 2)

    def rule(primals, tangents):
        (a, b), (da, db) = primals, tangents
        zero = [isinstance(x, jax.custom_derivatives.SymbolicZero) for x in tangents]
        if zero[1]:
            return scores(a, b), dot(da, b, 2, 2)
        if zero[0]:
            return scores(a, b), dot(a, db, 2, 2)
        twice = lax.concatenate([da, a], 2), lax.concatenate([b, db], 2)
        return scores(a, b), dot(*twice, 2, 2)

    scores.defjvp(rule, symbolic_zeros=True)
    return scores


def _where(allowed, x, other, tiles):
    """x (products, group * rows, keys) where allowed, otherwise `other`."""
    return select(of_scores(allowed, tiles), x, other)


def _visits(spec, mask, tiles):
    """Two functions, visit(step, one, state) and allowed_of(step, block).

    visit applies one(block, state) to the blocks that rows of the step attend to, in turn, and
    returns the last state. allowed_of returns the attended pairs, whose axes are those of
    `tiles.scores` or 1.
    """
    mask_mode, block_size = spec.mask_mode, spec.block_size
    all_rows = row_integers(mask, tiles, mask_mode)
    all_keys = key_integers(mask, tiles, mask_mode)

    def allowed_of(step, block):
        own = at(all_rows, step, 1)
        not_lo, hi, *of_row = (lax.index_in_dim(own, n, keepdims=False) for n in range(len(own)))
        of_key = [of_key_block(x, block, tiles) for x in all_keys]
        iota = lax.broadcasted_iota(jnp.int32, (1, 1, tiles.keys), 2)
        index = lax.add(first_key(block, tiles), iota)
        allowed = lax.bitwise_and(lax.le(lax.bitwise_not(index), not_lo), lax.lt(index, hi))
        # In rows that are not segment-checked the comparisons are always true, so no flag is read.
        if mask_mode >= MaskMode.IDS:
            allowed = lax.bitwise_and(allowed, lax.eq(of_row[0], of_key[0]))
        if mask_mode >= MaskMode.UPPER_LIMIT:
            allowed = lax.bitwise_and(allowed, lax.le(of_key[1], of_row[1]))
        if mask_mode >= MaskMode.BOTH_LIMITS:
            allowed = lax.bitwise_and(allowed, lax.le(of_row[2], of_key[1]))
        allowed = lax.expand_dims(allowed, (1, 2))
        if block_size not in (None, ONE_BLOCK):
            allowed = allowed & _in_block_mask(mask, block_size, tiles, step, block)
        # Computed once for all heads: without a barrier every fusion recomputes it for each score.
        return lax.optimization_barrier(allowed)

    if mask.q_block_lists is not None:
        return functools.partial(_visit_listed, mask, tiles), allowed_of
    if tiles.one_block:
        return lambda step, one, state: one(div(step, tiles.row_tiles), state), allowed_of
    most = tile_max(all_rows)

    def visit(step, one, state):
        first, _ = block_range(most, step, tiles)
        return _loop(first, lambda: block_range(most, step, tiles)[1], one, state)

    return visit, allowed_of


def _all_steps(tiles, one, state):
    if not is_symbolic(tiles.steps) and tiles.steps == 1:
        return one(np.int32(0), state)
    return _loop(np.int32(0), lambda: sized(tiles.steps), one, state)


def _loop(first, last_of, one, state):
    """Like fori_loop, but the loop condition computes the end, which saves a fusion.

    The counter is int32, as in `scan`, so that XLA compiles the computations that both share only
    once.
    """

    def more(number_and_state):
        return lax.lt(number_and_state[0], last_of())

    def next_one(number_and_state):
        number, state = number_and_state
        return lax.add(number, np.int32(1)), one(number, state)

    return lax.while_loop(more, next_one, (first, state))[1]


def _visit_listed(mask, tiles, step, one, state):
    """`visit` for a mask with block lists: the blocks in the list of the step's tile."""
    lists = batch_rows(mask.q_block_lists, step, tiles.row_tiles, tiles)[0]
    visited = block_lists.visited_blocks(lists[:, rem(step, tiles.row_tiles)])
    number = jnp.arange(visited.shape[0], dtype=jnp.int32)
    blocks = jnp.sort(jnp.where(visited, number, INT_MAX))
    base = div(step, tiles.row_tiles) * sized(tiles.key_blocks)
    number = visited.sum(dtype=jnp.int32)
    return _loop(
        np.int32(0), lambda: number, lambda nth, state: one(base + at(blocks, nth), state), state
    )


def _in_block_mask(mask, block_size, tiles, step, block):
    """The pairs of a step and a block that the block mask attends, (1, Hkv or 1, group or 1, rows,
    keys)."""
    indices = [
        (rem(number, count) * size + jnp.arange(size, dtype=jnp.int32)) // of_mask
        for number, count, size, of_mask in zip(
            (step, block), (tiles.row_tiles, tiles.key_blocks), (tiles.rows, tiles.keys),
            block_size, strict=True,
        )
    ]  # fmt: skip
    own = batch_rows(mask.block_mask, step, tiles.row_tiles, tiles)[0]
    bits = block_lists.bit(own, *indices)
    heads = (tiles.kv_heads, tiles.group) if bits.shape[0] > 1 else (1, 1)
    return bits.reshape(1, *heads, *bits.shape[1:])


# --- Operands that change scores and probabilities


class Logits(NamedTuple):
    """The logits of a block, and the factors of their gradient."""

    logit: jax.Array
    scale: jax.Array | float
    cap_slope: jax.Array | None  # derivative of the soft cap
    distance: jax.Array | None  # ALiBi distances


def logits_of_blocks(spec, options, tiles):
    """A function that turns the scores of a step and a block into Logits. Its last argument, if
    any, has the scales, slopes and padded bias."""
    soft_cap = spec.soft_cap
    biased = options.slopes is not None
    bias = None if options.bias is None else BiasTiles(options.bias, tiles)
    if biased:
        q_bias_pos, kv_bias_pos = (
            lax.broadcasted_iota(jnp.int32, (1, count, size), 1) * size
            + lax.broadcasted_iota(jnp.int32, (1, count, size), 2)
            if x is None
            else fill_up(x, 1, count * size).reshape(x.shape[0], count, size)
            for x, count, size in (
                (options.q_bias_pos, tiles.row_tiles, tiles.rows),
                (options.kv_bias_pos, tiles.key_blocks, tiles.keys),
            )
        )

    def of_block(s, step, block, arrays=None):
        scales, slopes, biases = options.scales, options.slopes, None
        if arrays is not None:
            scales, slopes, biases = (arrays.get(x) for x in ("scales", "slopes", "bias"))
        factor = spec.scale
        if scales is not None:
            factor = batch_rows(scales, step, tiles.row_tiles, tiles)
            factor = jnp.broadcast_to(factor[:, None], tiles.scores[:2])
            factor = factor.reshape(tiles.products, 1, 1)
        factor = lax.convert_element_type(factor, s.dtype)
        logit, cap_slope, distance = lax.mul(s, factor), None, None
        if soft_cap:
            t = jnp.tanh(logit / soft_cap)
            logit, cap_slope = soft_cap * t, 1 - t * t
        if biased:
            row, column, slopes = (
                batch_rows(y, step, tiles.row_tiles, tiles)
                for y in (q_bias_pos, kv_bias_pos, slopes)
            )
            row = at(row, rem(step, tiles.row_tiles), 1)[:, None, None, :, None]
            column = at(column, rem(block, tiles.key_blocks), 1)[:, None, None, None, :]
            distance = of_scores(jnp.abs(row - column).astype(s.dtype), tiles)
            slopes = slopes.reshape(-1, *tiles.scores[1:3], 1, 1)
            logit -= of_scores(slopes, tiles) * distance
        if bias is not None:
            logit += bias.at(step, block, s.dtype, biases)
        return Logits(logit, factor, cap_slope, distance)

    return of_block


def kept_of_blocks(spec, operands, tiles):
    """A function of a step and a block that returns whether dropout keeps each probability,
    (products, group * rows, keys), with the same bits as csrc/kernels/portable/dropout.py. None: no
    dropout."""
    if not spec.dropout_threshold:
        return None
    streams, rows = operands.dropout_streams, operands.dropout_rows
    whole = tiles.row_tiles * tiles.rows
    rows = fill_up(rows, 1, whole).reshape(rows.shape[0], tiles.row_tiles, tiles.rows)

    def kept(step, block):
        row = at(batch_rows(rows, step, tiles.row_tiles, tiles), rem(step, tiles.row_tiles), 1)
        words = batch_rows(streams, step, tiles.row_tiles, tiles)[..., None, None]
        words = jnp.broadcast_to(words, (tiles.together, *words.shape[1:]))  # (..., H, 4, 1, 1)
        fours_count = ceil_div(tiles.keys, 4)
        shape = (*words.shape[:2], tiles.rows, fours_count)
        fours = first_key(block, tiles) // 4 + lax.broadcasted_iota(jnp.int32, shape, 3)
        row, batch, head = (
            jnp.broadcast_to(x.astype(jnp.uint32), shape)
            for x in (row[:, None, :, None], words[:, :, 2], words[:, :, 3])
        )
        of_seed = words[:, :, 0], words[:, :, 1]
        bits = philox((fours.astype(jnp.uint32), row, head, batch), of_seed)
        keep = jnp.stack([x >= np.uint32(spec.dropout_threshold) for x in bits], -1)
        keep = keep.reshape(*shape[:3], 4 * fours_count)[..., : tiles.keys]
        return keep.reshape(tiles.products, tiles.group * tiles.rows, tiles.keys)

    return kept
