"""Errors of the functions with other libraries' signatures (integrations.txt) name the argument,
its value and what is accepted."""

import contextlib
import types

import errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import packax
import packax.kvax as kvax
import pytest
from context import mesh_of
from dot_products import DENSE, S, T, lengths, tensors  # noqa: F401
from jax.sharding import PartitionSpec as P
from kvax_cases import ALONE, KV_IDS, KV_POSITIONS, TOKENS  # noqa: F401
from kvax_cases import tensors as kvax_tensors
from maxtext_reference import IMAGES, MOBA, op  # noqa: F401
from maxtext_reference import tensors as of_maxtext
from packax.integrations import flash_attention_jax, flax, levanter, maxtext  # noqa: F401
from packax.integrations.cuequivariance import triangle_attention
from packax.integrations.ragged_paged_attention import ragged_paged_attention
from packax.kvax.ops import create_attention_mask, flash_attention
from packax.kvax.utils import FlashAttentionParamsConfig as Params
from packax.kvax.utils import attention_specs, set_attention_specs  # noqa: F401

BUILT = packax.create_attention_mask(packax.full(), q_len=T, kv_len=S)
q = jnp.ones((2, 23, 4, 4))
MASK = packax.create_attention_mask(packax.causal(), q_len=23, kv_len=23)
EINSUMS = {"einsum_dot_general": jax.lax.dot_general}
NAMES = ("query_positions", "query_segment_ids", "kv_positions", "kv_segment_ids")


def dot_product(**options):
    return packax.dot_product_attention(*tensors(), **options)


def flax_attention(**options):
    return flax.dot_product_attention(q, q, q, **options)


def init(attention_fn):
    layer = nn.MultiHeadDotProductAttention(2, attention_fn=attention_fn)
    return layer.init(jax.random.key(0), jnp.ones((2, 8, 16)))


def plain(shapes, key_mask):
    arrays = (np.zeros(shape, np.float32) for shape in shapes)
    return flash_attention_jax.flash_attention(*arrays, key_mask)


def three_masks():
    return create_attention_mask(*TOKENS, Params(16, 32), Params(64, 8), calc_bwd_mask=True)


def kvax_mask(**change):
    return create_attention_mask(**dict(zip(NAMES, TOKENS, strict=True)) | change)


def kvax_attention(**change):
    query, key, value, _ = kvax_tensors()
    arguments = {"query": query, "key": key, "value": value}
    arguments |= dict(zip(NAMES, TOKENS, strict=True))
    arguments |= {"mask": three_masks} | change
    return flash_attention(**arguments | {"mask": arguments["mask"]()})


def permute(axis, tokens, plan=None, ranks=4):
    """Over a mesh with a context axis of that many ranks."""
    mesh = mesh_of(1, ranks, axes=("data", "context"))
    with attention_specs((None, axis, None, None), (None,) * 4):
        kvax.utils.permute_tokens_context_parallelism(tokens, mesh=mesh, plan=plan)


IDS = np.repeat(np.arange(8, dtype=np.int32), 128)[None].repeat(2, 0)
PLAN = packax.context_plan(packax.causal() & packax.documents(IDS), ranks=4, kind="balanced")
MOVED = PLAN.permute(IDS)


@contextlib.contextmanager
def over(*sizes, kind="Auto"):
    mesh = mesh_of(*sizes, axes=("data", "context"), kind=kind)
    specs = ("data", "context", None, None), ("data", None, None, None)
    with jax.set_mesh(mesh), attention_specs(*specs):
        yield mesh


def on_mesh(tokens=(MOVED, MOVED, IDS, IDS), ranks=4, kind="Auto", plan=PLAN, mesh=None):
    """kvax's mask over a mesh, with positions that are the ids."""
    with over(1, ranks, kind=kind):
        return create_attention_mask(*tokens, plan=plan, mesh=mesh)


def attention_on_mesh(length=1024, plan=PLAN, tokens=(MOVED, MOVED, IDS, IDS), ranks=4, **options):
    """With a mask for four ranks."""
    x, tokens = jnp.ones((2, length, 2, 8)), [x[:, :length] for x in tokens]
    mask = on_mesh(tokens, plan=plan)
    with over(1, ranks):
        return flash_attention(x, x, x, *tokens, mask, **options)


def mask_inside_shard_map():
    specs = (P(None, "context"),) * 2 + (P(),) * 2
    with over(1, 4) as mesh:
        make = lambda *x: create_attention_mask(*x)[0].lower_bounds  # noqa: E731
        jax.shard_map(make, mesh=mesh, in_specs=specs, out_specs=P())(*(jnp.asarray(IDS),) * 4)


def of_axes(call, *arguments, **options):
    """Specs with an axis, and no mesh."""
    with attention_specs(("data", None, None, None), ("data", None, None, None)):
        call(*arguments, **options)


def train(**options):
    return op()(*of_maxtext(), **options)


def decode(config=None, cached=33, other=None, heads=4, **options):
    query, key, value = of_maxtext(1, 33)
    cached = ((key, value, np.ones((2, cached), int)), other)
    mode = options.pop("model_mode", "autoregressive")
    return op(config=config)(query[:, :, :heads], *[None] * 4, mode, cached, **options)


def indexer(**options):
    query, key, _ = of_maxtext()
    return op().generate_attention_mask(query, key, np.ones((2, 33), int), "train", **options)


def grug(mask):
    return levanter.attention(*[jnp.ones((2, 24, 2, 8))] * 3, mask)


def grug_mask(window):
    return types.SimpleNamespace(
        is_causal=True, segment_ids=None, sliding_window=window, fa4_bounds=None
    )


def triangle(**shapes):
    rest = {"q": (2, 3, 2, 20, 16), "k": (2, 3, 2, 28, 16), "v": (2, 3, 2, 28, 16)}
    rest |= {"bias": (2, 1, 2, 20, 28), "mask": (2, 3, 1, 1, 28)}
    arrays = {n: np.zeros(shape, np.float32) for n, shape in (rest | shapes).items()}
    return triangle_attention(**arrays | {"mask": arrays["mask"] > 0}, scale=1.0)


def ragged(q=(16, 4, 8), pages=(20, 4, 4, 8), **options):
    table, starts = np.zeros((2, 4), np.int32), np.array([0, 1, 9])
    arrays = jnp.ones(q), jnp.ones(pages), np.array([9, 14]), table, starts, np.array([2])
    return ragged_paged_attention(*arrays, **options)


@pytest.mark.parametrize("call,error,said", list(errors.rows("integrations")), ids=str)
def test_error(call, error, said):
    with attention_specs(*ALONE):
        errors.check(call, error, said, globals())
