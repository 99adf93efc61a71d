"""JAX's transformations of flash_attention beyond plain grad and jit.

docs/guide/transformations.md lists them; test_frozen_operands.py and test_export.py test more of
that page. Guards against a tangent that drops a term, a second derivative that does not match the
first, a vmap that mixes operands, and an error that does not say what to do.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import count
from lowered import Extension, abstract, by_name, calls, text_of
from packax._src.ops import ffi
from tiers import once_each, some
from transformed import DIM, EXPRESSION, HEADS, IDS, KV_HEADS, LENGTH, V_DIM, random

X64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
ALLOWED = np.asarray(EXPRESSION.as_array(LENGTH, LENGTH))


@pytest.fixture
def x64():
    with X64(True):
        yield


def dense(query, key, value, sinks):
    """The same function in plain jax.numpy; rows of padding have lse 0."""
    group = HEADS // KV_HEADS
    key, value = jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)
    s = jnp.einsum("bihd,bjhd->bhij", query, key) * DIM**-0.5
    terms = jnp.where(ALLOWED, jnp.exp(jnp.where(ALLOWED, s, 0)), 0)
    some = ALLOWED.any(-1)
    total = jnp.where(some, terms.sum(-1) + jnp.exp(sinks)[:, None], 1)
    out = jnp.einsum("bhij,bjhd->bihd", terms / total[..., None], value)
    return out, jnp.log(total)


def ours(query, key, value, sinks, **kwargs):
    mask = packax.create_attention_mask(EXPRESSION)
    out, lse = packax.flash_attention(
        query, key, value, mask, sinks=sinks, return_lse=True, **kwargs
    )
    return out, jnp.where(jnp.isfinite(lse), lse, 0)


def scalar(attention):
    """A scalar that is nonlinear in out and lse."""

    def loss(*operands):
        out, lse = attention(*operands)
        return jnp.sum(jnp.sin(out)) + jnp.sum(lse**2)

    return loss


def gradient(attention, argnums=(0, 1, 2, 3)):
    return jax.grad(scalar(attention), argnums)


def gradient_of_gradient(attention, argnums=(0, 1, 2, 3)):
    def penalty(*operands):
        return sum(jnp.sum(jnp.sin(x)) for x in gradient(attention, argnums)(*operands))

    return jax.grad(penalty, (0, 1, 2, 3))


def assert_same(make, *operands):
    """Compares `make` of flash_attention and of the dense function, in float64."""
    got, expected = (jax.jit(make(attention))(*operands) for attention in (ours, dense))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(y).max() > 1e-3
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10)


@pytest.mark.exhaustive
def test_second_derivatives_under_vmap(x64):
    """vmap inside and outside of both gradients, over some operands, along axes other than 0."""
    query, key, value, sinks = random(4, 3)
    operands = (query, key[0], jnp.moveaxis(value, 0, 2), sinks)
    axes = (0, None, 2, 0)
    assert_same(lambda f: jax.vmap(gradient_of_gradient(f), in_axes=axes), *operands)
    assert_same(lambda f: gradient_of_gradient(jax.vmap(f, in_axes=axes)), *operands)


def layers(attention, policy=None):
    """Two checkpointed layers in a scan."""

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(query, weight, key, value, sinks):
        out, lse = attention(query, key * weight, value, sinks)
        return query.at[..., :V_DIM].add(out), lse

    def scanned(query, key, value, sinks):
        weights = jnp.asarray([0.5, 1.5])
        return jax.lax.scan(lambda q, w: layer(q, w, key, value, sinks), query, weights)

    return scanned


@pytest.mark.exhaustive
def test_second_derivatives_under_scan_and_checkpoint(x64):
    keep = jax.checkpoint_policies.save_only_these_names(*packax.CHECKPOINT_NAMES)
    assert_same(lambda f: gradient_of_gradient(layers(f, keep)), *random(5))


def loss_of_tangents(attention, stopped):
    """A loss that contains a jvp, like MeanFlow's; the direction itself depends on the operands."""

    def loss(operands, along):
        along = jax.tree.map(lambda x, u: jnp.sin(x) * u, operands, along)
        primals, tangents = jax.jvp(attention, operands, along)
        tangents = jax.lax.stop_gradient(tangents) if stopped else tangents
        pairs = zip(primals, tangents, strict=True)
        return sum(jnp.sum((jnp.sin(x) + y) ** 2) for x, y in pairs)

    return loss


@pytest.mark.exhaustive
def test_reverse_over_forward_under_vmap_scan_and_checkpoint(x64):
    operands, along = random(12, 3), random(13, 3)
    for inside in (True, False):

        def mapped(f, inside=inside):
            if inside:
                return jax.grad(loss_of_tangents(jax.vmap(f), False), (0, 1))
            return jax.vmap(jax.grad(loss_of_tangents(f, False), (0, 1)))

        assert_same(mapped, operands, along)

    assert_same(lambda f: jax.grad(loss_of_tangents(layers(f), False)), random(12), random(13))


ORDERS = {
    "forward over reverse": lambda f, x, u: jax.jvp(gradient(f), x, u),
    "reverse over reverse": lambda f, x, u: gradient_of_gradient(f)(*x),
    "reverse over forward": lambda f, x, u: jax.grad(loss_of_tangents(f, False))(x, u),
}


@pytest.mark.parametrize("order", some(ORDERS))
def test_second_derivatives_in_context_parallel(x64, order):
    """Query rows on two ranks, heads on two: keys are gathered, gradients summed."""
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh(
        (2, 2), ("context", "heads"), devices=devices, axis_types=(AxisType.Auto,) * 2
    )
    spec = P(None, "context", "heads", None)
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    ids = cases.ids_of((3, 5), (-1, 1), (5, 3), (3, 2), (-1, 1))
    expression = packax.causal() & packax.documents(ids)
    operands, along = ([x if x.ndim == 1 else x[:, :12] for x in random(seed)] for seed in (6, 7))

    def attention(sharding):
        def call(*operands):
            mask = packax.create_attention_mask(expression, sharding=sharding)
            *tensors, sinks = operands
            out, lse = packax.flash_attention(
                *tensors, mask, sinks=sinks, return_lse=True, sharding=sharding
            )
            return out, jnp.where(jnp.isfinite(lse), lse, 0)

        return call

    def derivatives(sharding):
        return jax.jit(functools.partial(ORDERS[order], attention(sharding)))

    expected = derivatives(None)(tuple(operands), tuple(along))
    with jax.set_mesh(mesh):
        got = derivatives(sharding)(tuple(operands), tuple(along))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10)


PADDED = packax.causal() & packax.documents(cases.ids_of((0, 20), (-1, 12)))


def padded(x):
    return jnp.sum(packax.flash_attention(x, x, x, PADDED))


def decoded(x):
    return jnp.sum(packax.decode_attention(x[:, :2], x, x, np.array([0])))


CHECKED = {
    "out": padded,
    "out and lse": lambda x: packax.flash_attention(x, x, x, PADDED, return_lse=True)[0],
    "gradient": jax.grad(padded),
    "tangent": lambda x: jax.jvp(padded, (x,), (x,))[1],
    "decoding": decoded,
}


@pytest.mark.parametrize("call,jit", once_each(CHECKED, [True, False]))
def test_debug_nans_and_infs(call, jit):
    """They detect NaNs, ignore infinities in the log-sum-exp of padding, and terminate."""
    x = jnp.ones((1, 32, 2, 8))
    broken = x.at[0, 3].set(jnp.nan)  # outside the context, which would check this operation too
    function = jax.jit(CHECKED[call]) if jit else CHECKED[call]
    with jax.debug_infs(True), jax.debug_nans(True):
        function(x)
    if call != "decoding":
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            function(broken)


@pytest.mark.parametrize("jit", [True, False])
def test_debug_infs(jit):
    x = jnp.ones((1, 32, 2, 8))
    infinite = x * jnp.inf
    function = jax.jit(packax.flash_attention) if jit else packax.flash_attention
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        jax.block_until_ready(function(x, x, infinite, packax.full()))


@pytest.mark.parametrize("call", some(CHECKED, 2, 3, 4))
def test_checkify_sees_nans(call):
    """The error names packax's primitive, not a later operation."""
    x = jnp.ones((1, 32, 2, 8))
    checked = jax.jit(checkify.checkify(CHECKED[call], errors=checkify.float_checks))
    assert checked(x)[0].get() is None
    if call != "decoding":
        assert "nan generated by primitive: packax_" in checked(x.at[0, 3].set(jnp.nan))[0].get()


def test_a_third_derivative_says_what_to_do(x64):
    operands = random(8)
    along = random(9)

    def forward(*x):
        return jax.jvp(ours, x, along)[1]

    for function in (
        lambda: jax.jvp(forward, operands, along),
        lambda: jax.grad(lambda *x: jnp.sum(gradient_of_gradient(ours)(*x)[0]))(*operands),
    ):
        with pytest.raises(NotImplementedError) as error:
            jax.jit(function).lower()
        text = str(error.value)
        assert text.startswith("flash_attention can be differentiated twice, but not in this order")
        assert "jax.grad of a function of jax.jvp" in text and "jax.hessian(f)" in text


def test_kernels_alone(monkeypatch):
    """implementation="cuda" means the kernels or an error."""
    monkeypatch.setattr(ffi, "ext", Extension)
    query, key, value = abstract()

    def out(*x, **options):
        return packax.flash_attention(*x, packax.causal(), implementation="cuda", **options)

    def gradient(*x):
        return jax.grad(lambda *x: out(*x).astype(jnp.float32).sum())(*x)

    def tangent(function):
        return lambda *x: jax.jvp(function, x, x)

    text_of(gradient, query, key, value)
    text_of(tangent(out), query, key, value)
    with pytest.raises(NotImplementedError, match=r"no kernels for second derivatives.*=None"):
        text_of(tangent(gradient), query, key, value)
    bias = jnp.zeros((1, 8, 300, 300), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"forward-mode derivative of .*bfloat16.*=None"):
        text_of(tangent(functools.partial(out, bias=bias)), query, key, value)
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        text_of(tangent(out), query, key, value, platforms=("cpu",))


# Forward mode with the kernels


def along(function, argnums=(0, 1, 2)):
    """The jvp of a function of query, key and value, along some of them."""

    def tangent(*x):
        def of_some(*some):
            return function(*(some[argnums.index(n)] if n in argnums else x[n] for n in range(3)))

        some = tuple(x[n] for n in argnums)
        return jax.jvp(of_some, some, some)

    return tangent


def counted(function, *operands):
    """The FFI calls of attention in a program for CUDA, without "packax_" and "_v1", and whether it
    has loops."""
    text = text_of(function, *operands)
    names = (target[len("packax_") : -len("_v1")] for target, *_ in calls(text))
    return sorted(x for x in names if x not in ("documents", "blocks")), "while" in text


def causal(*x, **options):
    return packax.flash_attention(*x, packax.causal(), **options)


def meanflow(stopped):
    def loss(*x):
        out, tout = along(causal)(*x)
        target = jax.lax.stop_gradient(tout) if stopped else tout
        return jnp.sum((out - target).astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1, 2))


def test_what_runs_on_kernels(monkeypatch):
    """The tangent costs one kernel, and its gradient nothing if it is not needed."""
    monkeypatch.setattr(ffi, "ext", Extension)
    operands = abstract()
    assert counted(along(causal), *operands) == (["forward", "forward_tangent"], False)
    linear = lambda *x: jax.linearize(causal, *x)[1](*x)  # noqa: E731
    assert counted(linear, *operands) == (["forward", "forward_tangent"], False)
    stopped = ["backward", "forward", "forward_tangent"]
    assert counted(meanflow(True), *operands) == (stopped, False)
    assert counted(meanflow(False), *operands)[1]  # second derivatives have loops
    for options in ({"soft_cap": 30.0}, {"bias": packax.alibi(jnp.ones(8))}, {"scale": -2.0}):
        function = along(functools.partial(causal, **options))
        assert counted(function, *operands) == (["forward", "forward_tangent"], False), options
    for options in ({"implementation": "xla"}, {"bias": jnp.zeros((1, 8, 300, 300))}):
        kernels, loops = counted(along(functools.partial(causal, **options)), *operands)
        assert "forward_tangent" not in kernels and loops, options
    # no kernel for these head dims
    assert counted(along(causal), *abstract(dim=320, v_dim=320))[1]


@pytest.mark.parametrize("argnums", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_absent_tangents_are_absent_operands(monkeypatch, argnums):
    monkeypatch.setattr(ffi, "ext", Extension)
    text = text_of(along(causal, argnums), *abstract())
    (call,) = (x for x in calls(text) if x[0] == "packax_forward_tangent_v1")
    operands = by_name(call)
    present = [operands[name] != "0xf32" for name in ("tq", "tk", "tv")]
    assert present == [n in argnums for n in range(3)]
    assert operands["lse"] == "2x8x300xf32" and operands["out"] == operands["query"]


# vmap

POSITIONS = np.arange(LENGTH)[::-1].copy() % 5


def attend(query, key, value, sinks, ids, positions):
    """Results and all gradients, with the mask built inside."""
    mask = packax.create_attention_mask(
        packax.causal() & packax.documents(ids, positions=positions)
    )

    def loss(*operands):
        *tensors, sinks = operands
        out, lse = packax.flash_attention(*tensors, mask, sinks=sinks, return_lse=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), out

    return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(query, key, value, sinks)


attend_once = jax.jit(attend)


def mapped_operands(axes, size=3):
    """Operands of `attend`, mapped along the given axes, and a function that returns those of one
    call."""
    rng = np.random.default_rng(11)
    shapes = (LENGTH, HEADS, DIM), (LENGTH, KV_HEADS, DIM), (LENGTH, KV_HEADS, V_DIM)
    base = [rng.standard_normal((2, *shape)).astype(np.float32) for shape in shapes]
    base += [rng.standard_normal(HEADS).astype(np.float32)]
    base += [np.stack([IDS, np.roll(IDS, 3)]), np.stack([POSITIONS, POSITIONS])]
    every = [
        x if axis is None else np.stack([np.roll(x, n, axis=-1) for n in range(size)], axis)
        for x, axis in zip(base, axes, strict=True)
    ]
    return every, lambda n: [
        x if axis is None else np.take(x, n, axis) for x, axis in zip(every, axes, strict=True)
    ]


def test_vmap_in_vmap_and_of_a_built_mask():
    """Queries mapped over one axis and masks, built outside, over another: every pair."""
    every, one = mapped_operands((0, None, None, None, 0, 0))
    query, key, value, sinks, ids, positions = every
    masks = jax.vmap(
        lambda i, p: packax.create_attention_mask(
            packax.causal() & packax.documents(i, positions=p)
        )
    )(ids, positions)

    def out(query, mask):
        return packax.flash_attention(query, key, value, mask, sinks=sinks)

    pairs = jax.jit(jax.vmap(jax.vmap(out, in_axes=(None, 0)), in_axes=(0, None)))(query, masks)
    assert pairs.shape[:2] == (3, 3)
    for n, m in ((0, 0), (1, 2), (2, 1)):
        operands = [*one(n)[:4], *one(m)[4:]]
        np.testing.assert_allclose(pairs[n, m], attend_once(*operands)[0][1], rtol=1e-5, atol=1e-5)


def test_vmap_over_stages_of_a_pipeline():
    """vmap(..., spmd_axis_name="stage") with context parallelism: each rank has one stage."""
    mesh = jax.make_mesh(
        (2, 2),
        ("stage", "context"),
        devices=jax.devices("cpu")[:4],
        axis_types=(AxisType.Auto,) * 2,
    )
    spec = P(None, "context", None, None)
    sharding = packax.AttentionSharding(query=spec, key_value=spec)
    operands = [np.stack([x, -x])[:, :, :12] for x in map(np.float32, random(12)[:3])]
    ids = np.broadcast_to(cases.ids_of((0, 5), (1, 7)), (2, 12))

    def gradients(sharding):
        def loss(query, key, value):
            expression = packax.causal() & packax.documents(ids)
            mask = packax.create_attention_mask(expression, sharding=sharding)
            return jnp.sum(
                jnp.sin(packax.flash_attention(query, key, value, mask, sharding=sharding))
            )

        return jax.vmap(
            jax.grad(loss, (0, 1, 2)), spmd_axis_name=None if sharding is None else "stage"
        )

    expected = jax.jit(gradients(None))(*operands)
    with jax.set_mesh(mesh):
        place = jax.sharding.NamedSharding(mesh, P("stage", None, "context"))
        got = jax.jit(gradients(sharding))(*jax.device_put(operands, place))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


# Donation and checkpoint policies


@pytest.mark.parametrize("policy", ["save", "offload", "nothing"])
def test_checkpointed_layers_in_a_scan(policy):
    """Saved or offloaded by name, the results are not recomputed, also in a scan."""
    policies = jax.checkpoint_policies
    names = list(packax.CHECKPOINT_NAMES)
    rule = {
        "save": policies.save_only_these_names(*names),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=names,
            offload_src="device",
            offload_dst="pinned_host",
        ),
        "nothing": policies.nothing_saveable,
    }[policy]

    def loss(query, weights, key, value):
        @functools.partial(jax.checkpoint, policy=rule)
        def layer(query, weight):
            out = packax.flash_attention(query * weight, key, value, EXPRESSION)
            return query.at[..., :V_DIM].add(out), None

        return jnp.sum(jax.lax.scan(layer, query, weights)[0] ** 2)

    query, key, value = (jnp.asarray(x, jnp.float32) for x in random(14)[:3])
    gradient = jax.grad(loss, (0, 1))
    runs = count("packax_forward", gradient, query, jnp.ones(2), key, value)
    assert runs == (2 if policy == "nothing" else 1)
