"""Attention under plain `jit` with sharded inputs: XLA divides it by batch and heads.

No `shard_map`, no `sharding=`. The compiled program may sum gradients of what is replicated; it
must not gather, permute or exchange anything, and its results are those of one device.
"""

import collections
import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packax._src.ops import partitioning

BATCH, LENGTH, HEADS, DIM = 4, 192, 4, 16
MOVES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def mesh_of(kind="Auto", shape=(4, 2), names=("data", "tensor")):
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("needs eight CPU devices: see conftest.py")
    devices = devices[: int(np.prod(shape))]
    return jax.make_mesh(
        shape, names, devices=devices, axis_types=(getattr(AxisType, kind),) * len(names)
    )


def collectives(compiled):
    text = compiled.as_text()
    found = re.findall(rf"\b({'|'.join((*MOVES, 'all-reduce'))})(?:-start)?\(", text)
    return collections.Counter(found)


def tensors(kv_heads=2, seed=0):
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    query = array(BATCH, LENGTH, HEADS, DIM)
    key, value = (array(BATCH, LENGTH, kv_heads, DIM) for _ in range(2))
    ids = jnp.asarray(np.sort(rng.integers(-1, 5, (BATCH, LENGTH)), axis=1), jnp.int32)
    return query, key, value, ids


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def shard(mesh, query, key, value, ids):
    heads = "tensor" if key.shape[2] % mesh.shape["tensor"] == 0 else None
    return (
        put(mesh, query, "data", None, "tensor"),
        put(mesh, key, "data", None, heads),
        put(mesh, value, "data", None, heads),
        put(mesh, ids, "data"),
    )


def causal_documents(ids):
    return packax.causal() & packax.documents(ids)


SLOPES = jnp.asarray([0.5, 0.25, 0.125, 0.0625])
BLOCKS = np.tril(np.random.default_rng(3).integers(0, 2, (HEADS, 3, 3)) | np.eye(3, dtype=int))

CASES = {
    "documents": lambda q, k, v, ids: packax.flash_attention(q, k, v, causal_documents(ids)),
    "positions": lambda q, k, v, ids: packax.flash_attention(
        q,
        k,
        v,
        packax.sliding_window(20)
        & packax.documents(ids, positions=jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)),
    ),
    "one mask for all": lambda q, k, v, ids: packax.flash_attention(q, k, v, packax.causal()),
    "lse": lambda q, k, v, ids: packax.flash_attention(
        q, k, v, causal_documents(ids), return_lse=True
    ),
    "largest logits": lambda q, k, v, ids: packax.flash_attention(
        q, k, v, causal_documents(ids), return_max_logits=True
    ),
    "sinks": lambda q, k, v, ids: packax.flash_attention(
        q, k, v, causal_documents(ids), sinks=SLOPES
    ),
    "soft cap": lambda q, k, v, ids: packax.flash_attention(
        q, k, v, causal_documents(ids), soft_cap=2.0
    ),
    "array scale": lambda q, k, v, ids: packax.flash_attention(
        q, k, v, causal_documents(ids), scale=jnp.float32(0.3)
    ),
    "alibi": lambda q, k, v, ids: packax.flash_attention(
        q, k, v, causal_documents(ids), bias=packax.alibi(SLOPES)
    ),
    "block map": lambda q, k, v, ids: packax.flash_attention(
        q, k, v, packax.causal() & packax.block_sparse(jnp.asarray(BLOCKS[None], bool), (64, 64))
    ),
    "deterministic": lambda q, k, v, ids: packax.flash_attention(
        q, k, v, causal_documents(ids), deterministic=True
    ),
    "jax.nn's call": lambda q, k, v, ids: packax.dot_product_attention(q, k, v, is_causal=True),
}


def weights_of(x):
    """Constants, so that a cotangent has the same bits however XLA fuses what makes it."""
    return np.cos(np.arange(x.size)).reshape(x.shape).astype(np.float32)


def both(function):
    """Results and gradients of a loss of them all."""

    def loss(query, key, value, ids):
        results = function(query, key, value, ids)
        terms = [jnp.where(jnp.isfinite(x), x, 0) for x in jax.tree.leaves(results)]
        return sum(jnp.sum(x * weights_of(x)) for x in terms), results

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)


@functools.cache
def expected(name, kv_heads):
    return jax.jit(both(CASES[name]))(*tensors(kv_heads))


def assert_equal(got, want):
    """Integers exactly; in float32 XLA adds in another order where pieces have another shape."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(x.dtype, jnp.integer):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        else:
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("name", CASES)
def test_nothing_moves_but_sums(name):
    mesh = mesh_of()
    args = shard(mesh, *tensors())
    compiled = jax.jit(both(CASES[name])).lower(*args).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    gradients, results = compiled(*args)
    for x in (*gradients, jax.tree.leaves(results)[0]):
        assert x.sharding.spec[0] == "data" and x.sharding.spec[2] == "tensor", x.sharding
    assert_equal((gradients, results), expected(name, 2))


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_key_value_heads(kv_heads):
    """As many as devices or more: divided; fewer: replicated, and their gradients summed."""
    mesh = mesh_of(shape=(2, 4))
    args = shard(mesh, *tensors(kv_heads))
    compiled = jax.jit(both(CASES["lse"])).lower(*args).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    (dq, *others), results = compiled(*args)
    (want_dq, *want_others), want = expected("lse", kv_heads)
    assert_equal((dq, results), (want_dq, want))
    for x, y in zip(others, want_others, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_key_value_heads_that_do_not_divide():
    """Three of them over two devices: each takes those that its query heads read."""
    rng = np.random.default_rng(1)
    query = jnp.asarray(rng.standard_normal((BATCH, 64, 6, 8)), jnp.float32)
    key, value = (jnp.asarray(rng.standard_normal((BATCH, 64, 3, 8)), jnp.float32) for _ in "kv")
    mesh = mesh_of()
    function = jax.jit(both(lambda q, k, v, _: packax.flash_attention(q, k, v, packax.causal())))
    args = (
        put(mesh, query, "data", None, "tensor"),
        put(mesh, key, "data"),
        put(mesh, value, "data"),
    )
    compiled = function.lower(*args, None).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    for x, y in zip(
        jax.tree.leaves(compiled(*args, None)),
        jax.tree.leaves(function(query, key, value, None)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_flax_layers():
    """Weights by tensor, batch by data, as a module of Flax has them."""
    linen = pytest.importorskip("flax.linen")
    from packax.integrations.flax import dot_product_attention

    layer = linen.MultiHeadDotProductAttention(
        num_heads=HEADS, qkv_features=64, attention_fn=dot_product_attention
    )
    x = jnp.asarray(np.random.default_rng(7).standard_normal((BATCH, 64, 32)), jnp.float32)
    weights = layer.init(jax.random.key(0), x, mask=packax.causal())
    mesh = mesh_of()

    def placed(path, leaf):
        last = "out" in jax.tree_util.keystr(path)
        heads = 0 if last else leaf.ndim - 2
        spec = [None] * leaf.ndim
        if not (last and leaf.ndim == 1):  # the bias of the last one has no heads
            spec[heads] = "tensor"
        return put(mesh, leaf, *spec)

    def loss(weights, x):
        return jnp.sum(layer.apply(weights, x, mask=packax.causal()) ** 2)

    step = jax.jit(jax.value_and_grad(loss))
    args = jax.tree_util.tree_map_with_path(placed, weights), put(mesh, x, "data")
    compiled = step.lower(*args).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    for got, want in zip(
        jax.tree.leaves(compiled(*args)), jax.tree.leaves(step(weights, x)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_calls_of_flash_attention_jax():
    """(batch, heads, length, dim) there."""
    from packax.integrations.flash_attention_jax import causal_flash_attention

    mesh = mesh_of()
    args = [jnp.swapaxes(x, 1, 2) for x in tensors(HEADS)[:3]]
    sharded = [put(mesh, x, "data", "tensor") for x in args]
    function = jax.jit(causal_flash_attention)
    compiled = function.lower(*sharded).compile()
    assert not collectives(compiled), collectives(compiled)
    assert_equal(compiled(*sharded), function(*args))


def test_a_batch_that_does_not_divide_is_whole():
    mesh = mesh_of()
    query, key, value, ids = (x[:3] for x in tensors())
    function = jax.jit(CASES["documents"])
    args = put(mesh, query, None, None, "tensor"), key, value, ids
    assert_equal(function(*args), function(query, key, value, ids))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("entered", ["set_mesh", "with", "nothing"])
def test_meshes(kind, entered):
    mesh = mesh_of(kind)
    if kind == "Explicit" and entered == "with":
        pytest.skip("jax wants set_mesh there")
    context = {"set_mesh": jax.set_mesh, "with": lambda m: m, "nothing": contextlib.nullcontext}
    args = shard(mesh, *tensors())
    with context[entered](mesh) if entered != "nothing" else contextlib.nullcontext():
        function = jax.jit(both(CASES["lse"]))
        assert not set(collectives(function.lower(*args).compile())) & set(MOVES)
        assert_equal(function(*args), expected("lse", 2))


def some_axes_mapped(mesh, function):
    return jax.shard_map(
        function, mesh=mesh, in_specs=(P("data"),) * 4, out_specs=P("data"), axis_names={"data"}
    )


def test_a_shard_map_over_some_axes_warns_of_the_others():
    mesh = mesh_of()
    args = shard(mesh, *tensors())
    with pytest.warns(UserWarning, match="what is sharded over 'tensor' is gathered"):
        out = jax.jit(some_axes_mapped(mesh, CASES["documents"]))(*args)
    assert_equal(out, expected("documents", 2)[1])


def test_a_shard_map_over_some_axes_and_sharding_for_the_others():
    mesh = mesh_of()
    args = shard(mesh, *tensors())
    spec = P("data", None, "tensor")
    sharding = packax.AttentionSharding(query=spec, key_value=spec)

    def function(query, key, value, ids):
        return packax.flash_attention(query, key, value, causal_documents(ids), sharding=sharding)

    compiled = jax.jit(some_axes_mapped(mesh, function)).lower(*args).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    assert_equal(compiled(*args), expected("documents", 2)[1])


def test_vmap_over_a_sharded_axis():
    mesh = mesh_of()
    args = tensors()
    query, key, value, ids = (x[:, None] for x in args)
    function = jax.vmap(CASES["documents"], spmd_axis_name="data")
    sharded = (
        put(mesh, query, "data", None, None, "tensor"),
        *(put(mesh, x, "data", None, None, "tensor") for x in (key, value)),
        put(mesh, ids, "data"),
    )
    compiled = jax.jit(function).lower(*sharded).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    assert_equal(compiled(*sharded)[:, 0], expected("documents", 2)[1])


def layers(query, key, value, ids, remat):
    mask = packax.create_attention_mask(causal_documents(ids))

    def layer(x, _):
        return packax.flash_attention(x, key, value, mask), None

    body = jax.checkpoint(layer) if remat else layer
    return jax.lax.scan(body, query, None, length=3)[0]


@pytest.mark.parametrize("remat", [False, True])
def test_layers_in_a_scan(remat):
    mesh = mesh_of()
    args = shard(mesh, *tensors())
    function = both(functools.partial(layers, remat=remat))
    compiled = jax.jit(function, donate_argnums=0).lower(*args).compile()
    assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
    want = jax.jit(function)(*tensors())
    assert_equal(compiled(*args), want)


@pytest.mark.parametrize("paged", [False, True])
def test_decoding(paged):
    mesh = mesh_of()
    rng = np.random.default_rng(5)

    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    query, lengths = array(BATCH, 2, HEADS, DIM), jnp.asarray([5, 64, 1, 40])
    if paged:
        key, value = array(20, 16, 2, DIM), array(20, 16, 2, DIM)
        table = jnp.asarray(rng.permutation(20)[:16].reshape(4, 4), jnp.int32)
        caches, tables = P(None, None, "tensor"), {"block_table": put(mesh, table, "data")}
    else:
        key, value = array(BATCH, 64, 2, DIM), array(BATCH, 64, 2, DIM)
        caches, tables = P("data", None, "tensor"), {}
    function = jax.jit(packax.decode_attention)
    args = (
        put(mesh, query, "data", None, "tensor"),
        *(put(mesh, x, *caches) for x in (key, value)),
        put(mesh, lengths, "data"),
    )
    compiled = function.lower(*args, **tables).compile()
    assert not collectives(compiled), collectives(compiled)
    want = function(query, key, value, lengths, **jax.tree.map(np.asarray, tables))
    assert_equal(compiled(*args, **tables), want)


def test_sharded_pages_are_gathered_with_a_warning():
    mesh = mesh_of()
    pages = put(mesh, jnp.ones((8, 16, 2, DIM)), "data")
    query, table = jnp.ones((2, 1, HEADS, DIM)), jnp.asarray([[0, 1], [2, 3]])
    with pytest.warns(UserWarning, match="pages of key and value are sharded over 'data'"):
        out = jax.jit(packax.decode_attention)(
            query, pages, pages, jnp.asarray([20, 9]), block_table=table
        )
    np.testing.assert_allclose(out, 1, rtol=1e-6)


def test_building_a_mask():
    mesh = mesh_of()
    *_, ids = tensors()
    build = jax.jit(lambda ids: packax.create_attention_mask(causal_documents(ids)))
    sharded = put(mesh, ids, "data")
    compiled = build.lower(sharded).compile()
    assert not collectives(compiled), collectives(compiled)
    assert_equal(compiled(sharded), build(ids))


@pytest.mark.parametrize("which", ["query", "key and value"])
def test_a_sharded_sequence_is_an_error(which):
    mesh = mesh_of()
    query, key, value, ids = tensors()
    if which == "query":
        query = put(mesh, query, None, "data")
    else:
        key, value = (put(mesh, x, None, "data") for x in (key, value))
    message = rf"the sequence axis of {which} is sharded over 'data'.*sharding="
    with pytest.raises(Exception, match=message):
        jax.jit(CASES["documents"])(query, key, value, ids)


def test_a_sharded_sequence_is_gathered_on_request(monkeypatch):
    monkeypatch.setenv(partitioning.SEQUENCE_SWITCH, "gather")
    mesh = mesh_of()
    query, key, value, ids = tensors()
    args = put(mesh, query, None, "data"), key, value, ids
    with pytest.warns(UserWarning, match="the sequence axis of query is sharded over 'data'"):
        out = jax.jit(lambda *x: CASES["documents"](*x))(*args)
    assert_equal(out, expected("documents", 2)[1])


def test_one_device_has_the_same_program(monkeypatch):
    args = tensors()
    with_rules = jax.jit(both(CASES["lse"])).lower(*args).as_text()
    assert "CustomSPMDPartitioning" not in with_rules
    monkeypatch.setattr(partitioning, "_mesh_in_use", lambda module: None)
    jax.clear_caches()
    assert jax.jit(both(CASES["lse"])).lower(*args).as_text() == with_rules


def test_the_rule_is_in_the_program_for_cuda():
    """As text: the kernels themselves are looked up when XLA divides the calls."""
    mesh = mesh_of()
    args = shard(mesh, *(x.astype(jnp.bfloat16) for x in tensors()[:3]), tensors()[3])
    lowered = jax.jit(both(CASES["lse"])).trace(*args).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("@CustomSPMDPartitioning") == 4  # documents, blocks, forward, backward
    assert text.count("sdy.sharding_rule") == 4


def test_the_program_says_what_is_computed():
    """Not by a pointer alone, which a persistent cache may leave out of its key."""
    mesh = mesh_of()
    query, key, value, _ = shard(mesh, *tensors())

    def text(**options):
        def function(query, key, value):
            return packax.flash_attention(query, key, value, packax.causal(), **options)

        lowered = jax.jit(function).lower(query, key, value).as_text()
        return re.sub(r'backend_config = "\d+"', "", lowered)

    assert text(scale=0.5) == text(scale=0.5)
    assert text(scale=0.5) != text(scale=0.25)
    assert text(soft_cap=2.0) != text(soft_cap=3.0)


def test_a_shard_map_over_all_axes_is_left_alone():
    """Also for a mesh of no devices, as jax.export lowers for."""
    mesh = mesh_of().abstract_mesh
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data")))
        for x in tensors()
    ]
    mapped = jax.shard_map(
        CASES["documents"], mesh=mesh, in_specs=(P("data"),) * 4, out_specs=P("data")
    )
    lowered = jax.jit(mapped).trace(*shapes).lower(lowering_platforms=("cpu",))
    assert "CustomSPMDPartitioning" not in lowered.as_text()


def test_rules_in_letters():
    dims = partitioning.Dims(("bsh.", "bkg.", "b."), ("b.h.", "bh."))
    assert partitioning.shardy_rule(dims) == "b x0 h x1, b x2 g x3, b x4 -> b x5 h x6, b h x7"


def test_gspmd(monkeypatch):
    """The partitioner before Shardy, as long as jax has it."""
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip("this jax has one partitioner")
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        mesh = mesh_of()
        args = shard(mesh, *tensors())
        compiled = jax.jit(both(CASES["lse"])).lower(*args).compile()
        assert not set(collectives(compiled)) & set(MOVES), collectives(compiled)
        assert_equal(compiled(*args), expected("lse", 2))
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
