"""Options of flash_attention that change the scores, such as sinks, under the same error bounds as
without them.

Guards against a term that only the forward has, a gradient that misses a sum, and an empty row that
gets weight.
"""

import functools

import cases
import context
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
import score_oracle
from jax.sharding import PartitionSpec as P
from score_checks import arrays_of, attention_of, check, sinks_of, slopes_of
from tiers import some

CASE = cases.BY_NAME["batch_of_three"]  # groups of two heads; padding; a row of one document


@pytest.mark.parametrize(
    "name,dtype",
    some(
        [("batch_of_three", "float32"), ("ids_reappear", "bfloat16"), ("all_padding", "float16")],
        1,
        2,
    ),
)
def test_sinks(name, dtype):
    case = cases.BY_NAME[name]
    check(case, dtype, sinks=True)


@pytest.mark.parametrize(
    "name,dtype,options",
    some(
        [
            ("documents_odd", "float32", {"soft_cap": 1.5}),
            ("positions_fall", "bfloat16", {"soft_cap": 20.0, "sinks": True}),
            ("causal_wide", "bfloat16", {"slopes": True, "soft_cap": 2.0}),
            ("cross_documents", "float32", {"slopes": True, "sinks": True, "soft_cap": 3.0}),
            ("gqa_4", "float32", {"scale": -0.7, "soft_cap": 5.0}),
            ("causal", "float32", {"scale": 0.0, "slopes": True}),
        ],
        2,
        4,
    ),
)
def test_options(name, dtype, options):
    """One option alone, and several together, on masks of every kind."""
    case = cases.BY_NAME[name]
    got = check(case, dtype, (24, 40), **options)
    assert np.abs(got.gradients["scale"]) > 1e-3


def test_alibi_by_positions():
    """Positions per batch row, for query rows and for keys, also negative ones."""
    case = cases.BY_NAME["batch_of_three"]
    rng = np.random.default_rng(0)
    positions = rng.integers(-30, 60, (2, 3, case.q_len)).astype(np.int32)
    check(case, "float32", positions=(positions[0], positions[1]), slopes=slopes_of(case.heads))


def test_positions_of_rows_are_those_of_keys():
    arrays, *_ = arrays_of(CASE, "float32")
    mask = packax.create_attention_mask(CASE.expression())
    tensors = [arrays[name] for name in ("query", "key", "value")]
    slopes = slopes_of(CASE.heads)
    index = np.arange(CASE.q_len) * 3
    got = [
        packax.flash_attention(*tensors, mask, bias=bias)
        for bias in (
            packax.alibi(slopes, positions=index),
            packax.alibi(slopes, positions=index, kv_positions=index[None]),
            packax.alibi(3 * slopes),
        )
    ]
    np.testing.assert_array_equal(got[0], got[1])
    np.testing.assert_allclose(got[0], got[2], atol=1e-5)


def test_garbage_in_padding_stays_there():
    """With a cap, a sink and a bias, overflow in padding reaches neither results nor gradients."""
    case = cases.BY_NAME["padding"]
    options = {"sinks": sinks_of(case.heads), "slopes": slopes_of(case.heads)}
    arrays, dout, dlse = arrays_of(case, "float32", **options)
    mask = packax.create_attention_mask(case.expression())
    padding = (cases.PADDED == -1)[None, :, None, None]
    attention = attention_of(mask, soft_cap=2.0)
    run = jax.jit(lambda x, dout: score_oracle.run(attention, x, dout, dlse))
    clean = run(arrays, dout)
    loud = {n: jnp.where(padding, 3e38, arrays[n]) for n in ("query", "key", "value")}
    got = run(arrays | loud, jnp.where(padding, 3e38, dout))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_order_of_results():
    arrays, *_ = arrays_of(CASE, "bfloat16")
    mask = packax.create_attention_mask(CASE.expression())
    tensors = [arrays[name] for name in ("query", "key", "value")]
    out, lse, top = packax.flash_attention(*tensors, mask, return_lse=True, return_max_logits=True)
    assert (lse.shape, top.shape) == ((3, 4, 409), (3, 4)) and top.dtype == jnp.float32
    again, only = packax.flash_attention(*tensors, mask, return_max_logits=True)
    np.testing.assert_array_equal(only, top)
    np.testing.assert_array_equal(again, out)
    gradient = jax.grad(
        lambda q: packax.flash_attention(q, *tensors[1:], mask, return_max_logits=True)[1].sum()
    )(tensors[0])
    assert not np.any(gradient)  # documented as stop_gradient


def test_a_sink_of_minus_infinity_is_none():
    arrays, *_ = arrays_of(CASE, "float32")
    mask = packax.create_attention_mask(CASE.expression())
    without = attention_of(mask)(arrays)
    got = attention_of(mask)(arrays | {"sinks": jnp.full(CASE.heads, -jnp.inf)})
    for x, y in zip(got, without, strict=True):
        np.testing.assert_array_equal(x, y)


def test_an_infinite_sink_takes_all():
    """In the limit out is 0, lse is the sink and the tensors have no gradient; other heads are
    unchanged."""
    case = cases.BY_NAME["batch_of_three"]
    arrays, dout, dlse = arrays_of(case, "float32")
    attention = attention_of(packax.create_attention_mask(case.expression()))
    sinks = jnp.linspace(-1, 1, case.heads)
    group = (
        case.heads // case.kv_heads
    )  # the whole first group, so that one key/value head has no gradient

    def results(sinks):
        return jax.vjp(attention, arrays | {"sinks": sinks})

    (out, lse), back = results(sinks.at[:group].set(jnp.inf))
    (want_out, want_lse), want_back = results(sinks)
    attended = np.isfinite(want_lse)
    np.testing.assert_array_equal(out[:, :, group:], want_out[:, :, group:])
    np.testing.assert_array_equal(lse[:, group:], want_lse[:, group:])
    assert not np.any(out[:, :, :group])
    assert (np.asarray(lse)[:, :group] == np.where(attended, np.inf, -np.inf)[:, :group]).all()
    (got,), (want,) = back((dout, dlse)), want_back((dout, dlse))
    for name, first in (("query", group), ("key", 1), ("value", 1)):
        assert not np.any(got[name][:, :, :first]), name
        np.testing.assert_array_equal(got[name][:, :, first:], want[name][:, :, first:])
    limit = np.where(attended, dlse, 0).sum((0, 2))[:group]
    np.testing.assert_allclose(got["sinks"][:group], limit, rtol=1e-5)
    np.testing.assert_array_equal(got["sinks"][group:], want["sinks"][group:])


@pytest.mark.exhaustive
def test_second_derivatives_with_an_infinite_sink():
    arrays, *_ = arrays_of(cases.BY_NAME["batch_of_three"], "float32")
    mask = packax.create_attention_mask(cases.BY_NAME["batch_of_three"].expression())
    heads = arrays["query"].shape[2]
    arrays["sinks"] = jnp.linspace(-1, 1, heads).at[0].set(jnp.inf)

    def total(arrays):
        return jnp.sum(jnp.sin(attention_of(mask)(arrays)[0]))

    along = jax.tree.map(jnp.ones_like, arrays)
    value, moved = jax.jvp(total, (arrays,), (along,))
    _, second = jax.jvp(jax.grad(total), (arrays,), (along,))
    gradient = jax.grad(total)(arrays)
    inner = sum(jnp.sum(x) for x in jax.tree.leaves(gradient))
    np.testing.assert_allclose(moved, inner, rtol=1e-4)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, gradient, second)))
    assert not np.any(second["query"][:, :, 0]) and second["sinks"][0] == 0


def test_vmap_over_any_of_them():
    """Over sinks, scale and slopes alone, or with tensors and positions: equals a loop."""
    rng = np.random.default_rng(0)
    tensors = [jnp.asarray(rng.standard_normal((2, 2, 30, 2, 8)), jnp.float32) for _ in range(3)]
    sinks = jnp.asarray([[0.5, -1], [2, 0]], jnp.float32)
    scales = jnp.asarray([0.3, -0.5], jnp.float32)
    slopes = jnp.asarray([[0.1, 0.5], [0, 0.2]], jnp.float32)
    positions = jnp.asarray(np.stack([np.arange(30), np.arange(30) * 2]), jnp.int32)
    mask = packax.create_attention_mask(packax.causal(), q_len=30, kv_len=30)

    def total(q, k, v, sinks, scale, slopes, positions):
        bias = packax.alibi(slopes, positions=positions)
        out, top = packax.flash_attention(
            q, k, v, mask, sinks=sinks, scale=scale, bias=bias, soft_cap=3.0, return_max_logits=True
        )
        return jnp.sum(out**2) + jnp.sum(top)

    gradient = jax.value_and_grad(total, (0, 3, 4, 5))
    given = (*tensors, sinks, scales, slopes, positions)
    for mapped in ("1111111", "0001110", "0000001"):
        axes = tuple(0 if flag == "1" else None for flag in mapped)
        operands = [x[0] if a is None else x for x, a in zip(given, axes, strict=True)]
        got = jax.jit(jax.vmap(gradient, axes))(*operands)
        for n in range(2):
            one = [x if a is None else x[n] for x, a in zip(operands, axes, strict=True)]
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(gradient(*one)), strict=True):
                np.testing.assert_allclose(x[n], y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind,groups", some([("Auto", 2), ("Explicit", 1)], 0))
def test_on_a_mesh(kind, groups):
    """Arrays per head are sharded with the heads, positions with the rows; their gradients are
    summed over the other axes."""
    rows = P("data", "context", "tensor")
    sharding = packax.AttentionSharding(query=rows, key_value=rows)
    mesh = context.mesh_of(2, 2, 2, kind=kind, axes=("data", "context", "tensor"))
    tensors = context.tensors(batch=2, length=256, heads=8, kv_heads=4)
    ids = context.ROWS[1:3, 400:656]
    positions = np.stack([np.arange(256), np.arange(256) // 2]).astype(np.int32)
    numbers = sinks_of(8), slopes_of(8), jnp.float32(0.4)

    @functools.partial(jax.jit, static_argnums=2)
    def results(tensors, numbers, sharding):
        mask = packax.create_attention_mask(
            packax.causal() & packax.documents(ids), sharding=sharding
        )

        def attention(query, key, value, sinks, slopes, scale):
            bias = packax.alibi(slopes, positions=positions, kv_positions=positions)
            options = {"scale": scale, "soft_cap": 2.0, "sinks": sinks, "bias": bias}
            out, lse, top = packax.flash_attention(
                *(query, key, value, mask), **options,
                return_lse=True, return_max_logits=True, gather_head_groups=groups,
            )  # fmt: skip
            return out, jnp.where(jnp.isfinite(lse), lse, 0), top

        query, key, value, dout, dlse = tensors
        results, transpose = jax.vjp(attention, query, key, value, *numbers)
        return *results, *transpose((dout, dlse, jnp.zeros_like(results[2])))

    expected = results(tensors, numbers, None)
    with jax.set_mesh(mesh):
        if kind == "Explicit":
            place = functools.partial(jax.sharding.NamedSharding, mesh)
            specs = [rows] * 4 + [P("data", "tensor", "context")]
            tensors = [jax.device_put(x, place(p)) for x, p in zip(tensors, specs, strict=True)]
        got = jax.block_until_ready(results(tensors, numbers, sharding))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * float(np.abs(y).max()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_bias_of_indices_on_a_mesh(kind):
    """Without position arrays: heads and batch are sharded, the sequence is not; gradients of
    slopes equal those of one device."""
    rows = P("data", None, "tensor")
    sharding = packax.AttentionSharding(query=rows, key_value=rows)
    mesh = context.mesh_of(2, 2, kind=kind, axes=("data", "tensor"))
    tensors = context.tensors(batch=2, length=256)[:4]
    ids = context.ROWS[1:3, 400:656]

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def gradients(tensors, slopes, sharding, with_positions):
        def loss(query, key, value, slopes):
            bias = packax.alibi(slopes, positions=jnp.arange(256) if with_positions else None)
            mask = packax.causal() & packax.documents(ids)
            out = packax.flash_attention(query, key, value, mask, bias=bias, sharding=sharding)
            return jnp.sum(out * tensors[3])

        return jax.grad(loss, (0, 1, 2, 3))(*tensors[:3], slopes)

    expected = gradients(tensors, slopes_of(context.HEADS), None, True)
    with jax.set_mesh(mesh):
        if kind == "Explicit":
            place = jax.sharding.NamedSharding(mesh, rows)
            tensors = [jax.device_put(x, place) for x in tensors]
        got = jax.block_until_ready(gradients(tensors, slopes_of(context.HEADS), sharding, False))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * float(np.abs(y).max()))


@pytest.mark.exhaustive
def test_a_bias_of_indices_under_vmap_and_derived_twice():
    """Mapped slopes, mapped tensors or both, and a directional derivative of the gradient: all
    equal the results with position arrays."""
    case = cases.BY_NAME["gqa_4"]
    query, key, value, *_ = case.tensors("float32", 16, 16)
    mask = packax.create_attention_mask(case.expression(), q_len=case.q_len, kv_len=case.kv_len)
    slopes = jnp.stack([slopes_of(case.heads), 3 * slopes_of(case.heads)])
    positions = {"positions": np.arange(case.q_len), "kv_positions": np.arange(case.kv_len)}

    def total(query, slopes, **positions):
        bias = packax.alibi(slopes, **positions)
        return jnp.sum(packax.flash_attention(query, key, value, mask, bias=bias) ** 2)

    def all_of(**positions):
        gradient = jax.grad(functools.partial(total, **positions), (0, 1))
        two = jnp.stack([query, query[:, ::-1]])
        yield from jax.vmap(gradient, (None, 0))(query, slopes)
        yield from jax.vmap(gradient, (0, None))(two, slopes[0])
        yield from jax.vmap(gradient)(two, slopes)
        yield from jax.jvp(gradient, (query, slopes[0]), (key.mean() * query, slopes[1]))[1]

    for x, y in zip(all_of(), all_of(**positions), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_inside_the_callers_shard_map():
    """Replicated arrays get the sum of all ranks' gradients; the largest logit is over all rows."""
    mesh = context.mesh_of(2, axes=("context",))
    query, key, value, *_ = context.tensors(batch=2, length=64)
    sharding = packax.AttentionSharding(query=P(None, "context"), key_value=P())
    numbers = sinks_of(context.HEADS), slopes_of(context.HEADS), jnp.float32(0.4)
    index = jnp.arange(64)

    def total(query, key, value, sinks, slopes, scale, positions, sharding=None):
        bias = packax.alibi(slopes, positions=positions, kv_positions=index)
        out, top = packax.flash_attention(
            query, key, value, packax.masks.ranges(jnp.zeros(64, int), index + 1),
            sinks=sinks, bias=bias, scale=scale, return_max_logits=True, sharding=sharding,
        )  # fmt: skip
        return jnp.sum(out**2), top

    def rank(*operands):
        out, top = total(*operands, sharding)
        return jax.lax.psum(out, "context"), top

    rows = P(None, "context")
    mapped = jax.shard_map(
        rank, mesh=mesh, in_specs=(rows, *[P()] * 5, P("context")), out_specs=(P(), P())
    )
    operands = (query, key, value, *numbers, index)
    wanted = tuple(range(6))
    with jax.set_mesh(mesh):
        got = jax.jit(jax.value_and_grad(mapped, wanted, has_aux=True))(*operands)
    expected = jax.value_and_grad(total, wanted, has_aux=True)(*operands)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-3)


@pytest.mark.exhaustive
def test_forward_mode_and_second_derivatives():
    """Of sinks, slopes and an array scale, together with the tensors: against finite differences in
    float64."""
    with score_oracle.x64(True):
        rng = np.random.default_rng(3)
        at = [rng.standard_normal((1, 9, 2, 4)) for _ in range(3)]
        at += [np.asarray([0.5, -1]), np.asarray([0.2, 0.1]), np.asarray(0.7)]
        along = [jnp.asarray(rng.standard_normal(x.shape)) for x in at]
        at = [jnp.asarray(x) for x in at]
        mask = packax.create_attention_mask(packax.causal(), q_len=9, kv_len=9)

        def total(q, k, v, sinks, slopes, scale):
            out, lse = packax.flash_attention(
                q, k, v, mask, sinks=sinks, bias=packax.alibi(slopes), scale=scale, soft_cap=2.0,
                return_lse=True,
            )  # fmt: skip
            return jnp.sum(jnp.sin(out)) + jnp.sum(lse**2)

        def line(function, t):
            return function(*(x + t * d for x, d in zip(at, along, strict=True)))

        first = jax.jit(lambda t: line(total, t))
        slope = jax.jit(lambda: jax.jvp(total, tuple(at), tuple(along))[1])()
        np.testing.assert_allclose(slope, (first(1e-5) - first(-1e-5)) / 2e-5, rtol=1e-7)
        gradient = jax.grad(total, tuple(range(6)))
        second = jax.jit(lambda t: line(gradient, t))
        got = jax.jit(lambda: jax.jvp(gradient, tuple(at), tuple(along))[1])()
        for x, up, down in zip(got, second(1e-5), second(-1e-5), strict=True):
            np.testing.assert_allclose(x, (up - down) / 2e-5, rtol=1e-5, atol=1e-6)
