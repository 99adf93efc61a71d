"""Functions with another library's signature, called with the operands of a `Call`, equal the
float64 reference: results and gradients. test_originals.py compares them with the libraries.

Guards against an argument that means something else here, an axis in another place, and an option
that gets lost.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import decode_calls
import dense
import jax
import jax.numpy as jnp
import numpy as np
import packax
import philox
import pytest
from calls import CAP, RATE
from exported import restored
from jax.sharding import PartitionSpec as P
from maxtext_reference import MASKED, Mesh, op
from packax.integrations import flash_attention_jax, flax, levanter, maxtext
from packax.integrations.cuequivariance import triangle_attention
from packax.kvax.ops import create_attention_mask, flash_attention
from packax.kvax.utils import attention_specs
from plain_jit import MOVES, collectives, mesh_of, specs
from tiers import marked, once_each

ALONE = ((None,) * 4,) * 2
RNG = np.random.default_rng(2)


@dataclasses.dataclass(frozen=True)
class Face:
    """attend: the results by their names in `dense`. change: what an operand must be here."""

    attend: Callable[..., dict[str, Any]]
    change: Callable[..., dict[str, Any]] = lambda call, a: {}
    batch: int = 2


def tensors(a: Any) -> tuple[Any, ...]:
    return a["query"], a["key"], a["value"]


def mask_of(call: Any, a: Any) -> Any:
    if "pairs" in a:
        return a["pairs"]
    mask = call.expression(a)
    lengths = dict(zip(("q_len", "kv_len"), call.sizes(), strict=True))
    return packax.create_attention_mask(mask, **lengths) if call.mask == "built" else mask


def pairs(call: Any, a: Any) -> dict[str, Any]:
    """The mask as an array. Without sinks, a row without keys is the mean of all values, so every
    row has one."""
    found = np.array(call.defined(a))
    found[..., 0] |= "sinks" not in a
    return finite_bias(call, a) | {"pairs": found}


def finite_bias(call: Any, a: Any) -> dict[str, Any]:
    bias = {"bias": a["bias"]} if "bias" in a else {}
    return {n: np.where(np.isfinite(x), x, -3).astype(call.dtype) for n, x in bias.items()}


def keys(call: Any, a: Any) -> dict[str, Any]:
    """A mask of keys, with none in the last row of the batch."""
    found = RNG.random((call.batch, 1, 1, call.sizes()[1])) < 0.6
    found[-1] = False
    return {"pairs": found}


def one_padding(call: Any, a: Any) -> dict[str, Any]:
    """Ids in which every negative one is padding, as in MaxText and Levanter."""
    return {name: np.maximum(a[name], -1) for name in ("ids", "kv_ids") if name in a}


def jax_nn(call, a):
    scale = a.get("scale", call.static().get("scale"))
    options = {"scale": scale, "return_residual": True}
    out, residual = packax.dot_product_attention(
        *tensors(a), a.get("bias"), mask_of(call, a), **options
    )
    return {"out": out, "lse": residual.swapaxes(1, 2)}


def of_lengths(call, a):
    counts = [jnp.asarray(a["pairs"][:, 0]).any(axis).sum(-1) for axis in (2, 1)]
    names = "query_seq_lengths", "key_value_seq_lengths"
    given = dict(zip(names, counts, strict=True))
    return {"out": packax.dot_product_attention(*tensors(a), **given)}


def lengths(call, a):
    rows, kept = (np.arange(n) < RNG.integers(1, n, (call.batch, 1)) for n in call.sizes())
    return {"pairs": rows[:, None, :, None] & kept[:, None, None]}


def of_flax(call, a, shared=False):
    """Two dimensions of the batch."""

    def two(x):
        return x.reshape(2, -1, *x.shape[1:]) if len(x) == call.batch else x[None]

    options = {"sinks": a.get("sinks"), "soft_cap": CAP if call.cap != "none" else None}
    options["scale"] = a.get("scale", call.static().get("scale"))
    if "slopes" in a:
        options["bias"] = packax.alibi(a["slopes"])
    mask = two(a["pairs"]) if "pairs" in a else mask_of(call, a)
    own = {"mask": mask} if "pairs" in a else {}  # the layer's; an expression is attention_fn's
    given = {"bias": two(a["bias"])} if "bias" in a else {}
    if "seed" in a:
        key = jax.random.key(a["seed"])
        given |= {"dropout_rng": key, "dropout_rate": RATE, "broadcast_dropout": shared}
    function = flax.attention_fn(None if own else mask, **options)
    return {"out": function(*map(two, tensors(a)), **own, **given).reshape(a["dout"].shape)}


def of_flash_attention_jax(call, a):
    """Two dimensions of the batch; one head of keys for all comes without its axis."""

    def moved(x):
        x = x.swapaxes(1, 2).reshape(2, -1, x.shape[2], x.shape[1], x.shape[3])
        return x[:, :, 0] if x.shape[2] == 1 else x

    if "pairs" in a:
        mask = a["pairs"].reshape(2, -1, call.sizes()[1])
        out = flash_attention_jax.flash_attention(*map(moved, tensors(a)), mask)
    else:
        out = flash_attention_jax.causal_flash_attention(*map(moved, tensors(a)))
    return {"out": out.reshape(-1, *out.shape[2:]).swapaxes(1, 2)}


def at_the_end(call, a):
    """The last query attends to the last key."""
    return {"offset": np.full(call.batch, np.subtract(*call.sizes()[::-1]), np.int32)}


def of_kvax(call, a, tokens=None, **options):
    index = [jax.lax.broadcasted_iota(np.int32, a[n].shape[:2], 1) for n in ("query", "key")]
    given = [a.get("positions", index[0]), a["ids"], a.get("kv_positions", None), a.get("kv_ids")]
    given[2] = (given[0] if "kv_ids" not in a else index[1]) if given[2] is None else given[2]
    given[3] = given[1] if given[3] is None else given[3]
    given = [jnp.asarray(x) for x in (tokens(given) if tokens else given)]
    skip = {name: x for name, x in options.items() if name == "skip_pad_tokens"}
    sequential = {name: x for name, x in options.items() if name not in skip}
    scale = call.static().get("scale", a["query"].shape[-1] ** -0.5)
    with attention_specs(*ALONE):
        mask = create_attention_mask(*given, calc_bwd_mask=True, **skip)
        return {"out": flash_attention(*tensors(a), *given, mask, scale=scale, **sequential)}


def other_positions(tokens):
    return [-tokens[0], tokens[1], -tokens[2], tokens[3]]


def padding_attends(tokens):
    """In the reference, the id 7 is a document like any other."""
    return [jnp.where(x == 7, -1, x) if n % 2 else x for n, x in enumerate(tokens)]


def no_padding(call, a):
    return {name: np.where(a[name] == -1, 7, a[name]) for name in ("ids", "kv_ids") if name in a}


KINDS = {"causal": ("global", None), "left": ("local_sliding", 9), "chunked": ("chunk", 6)}
KINDS |= {"full": ("full", None)}
REORDERED = types.SimpleNamespace(context_parallel_load_balance=True, context_sharding="context")


def of_maxtext(call, a, prefill=False, reorder=False):
    kind, size = KINDS[call.interval]
    one = op(kind, size, attn_logits_soft_cap=CAP if call.cap != "none" else None)
    moved = lambda x, **back: x  # noqa: E731
    if reorder:
        sizes = {"sliding_window_size": 9, "chunk_attn_window_size": 6}
        one = maxtext.AttentionOp(REORDERED, Mesh, attention_type=kind, **sizes)
        moved = lambda x, **back: maxtext.reorder_sequence(jnp.asarray(x), 2, **back)  # noqa: E731
    query, key, value = tensors(a)
    query = query * query.shape[-1] ** -0.5
    options = {"sinks": a.get("sinks"), "record_max_logits": not reorder}
    if "pairs" in a:
        options["indexer_mask"] = jnp.where(a["pairs"][:, 0], 0.0, MASKED)
    if prefill:
        cached = ((key, value, a["kv_ids"]), None)
        before = np.zeros((call.batch, -np.subtract(*call.sizes()), 1))
        out = one(query, *[None] * 4, "prefill", cached, previous_chunk=before, **options)
    else:
        options["decoder_segment_ids_kv"] = a.get("kv_ids")
        operands = [x if x is None else moved(x) for x in (
            query, key, value, a.get("ids"), a.get("positions"))]  # fmt: skip
        out = one(*operands, **options)
    found = {"out": moved(out, to_contiguous=True)}
    return found if reorder else found | {"top": jax.tree.leaves(one.max_logits)[0]}


def end_of_a_prompt(call, a):
    first = -np.subtract(*call.sizes())
    index = np.broadcast_to(np.arange(call.sizes()[1]), a["kv_ids"].shape)
    kv_ids = np.maximum(a["kv_ids"], -1)
    found = {"kv_ids": kv_ids, "ids": kv_ids[:, first:]}
    return found | {"kv_positions": index, "positions": index[:, first:]}


def indexer(call, a):
    padded = one_padding(call, a)
    kept = RNG.random((call.batch, 1, *call.sizes())) < 0.7
    return padded | {"pairs": call.defined(a | padded) & kept}


@dataclasses.dataclass
class Grug:
    """The fields of Levanter's mask."""

    is_causal: bool = False
    segment_ids: Any = None
    sliding_window: int | None = None
    fa4_bounds: Any = None


def of_levanter(call, a, bounds=False):
    window = 9 if call.interval == "left" else None
    mask = Grug(call.interval != "full", (a["ids"],) * 2 if "ids" in a else None, window)
    if bounds:
        lower, valid = a["pairs"][:, 0].argmax(-1), a["pairs"][:, 0].any(-1)
        mask = Grug(True, None, None, (lower, valid))
    elif "pairs" in a:
        mask = a["pairs"][:, 0]
    elif "bias" in a:
        mask = a["bias"][:, 0]
    if call.mask == "built":
        mask = levanter.build_mask(mask, call.sizes()[0])
    return {"out": levanter.attention(*tensors(a), mask)}


def ranges(call, a):
    """For bounds: each row attends to its first key and all after it up to its own."""
    padded = one_padding(call, a)
    found = call.defined(a | padded)
    upper = np.tri(found.shape[-1], dtype=bool) & found.any(-1, keepdims=True)
    return padded | {"pairs": np.maximum.accumulate(found, -1) & upper}


def of_cuequivariance(call, a):
    """Two samples of three rows."""

    def moved(x):
        return x.swapaxes(1, 2).reshape(2, 3, x.shape[2], x.shape[1], x.shape[3])

    keys = None if "pairs" not in a else a["pairs"].reshape(2, 3, 1, 1, -1)
    scale = call.static().get("scale", a["query"].shape[-1] ** -0.5)
    out, lse, top = triangle_attention(*map(moved, tensors(a)), a["bias"][:, None], keys, scale)
    out, lse, top = (x.reshape(6, *x.shape[2:]) for x in (out, lse, top))
    return {"out": out.swapaxes(1, 2), "lse": lse[..., 0], "top": top.max((2, 3))}


def of_samples(call, a):
    """A bias of each sample. Every row has a key: see test_cuequivariance.py."""
    found = keys(call, a)["pairs"]
    found[..., 0] = True
    return {"bias": finite_bias(call, a)["bias"][::3], "pairs": found}


FACES = {
    "jax.nn": Face(jax_nn),
    "jax.nn, lengths": Face(of_lengths, lengths),
    "jax.nn, keys": Face(jax_nn, keys),
    "flax": Face(of_flax, batch=4),
    "flax, array": Face(of_flax, pairs, 4),
    "flax, shared dropout": Face(functools.partial(of_flax, shared=True), batch=4),
    "flash_attention_jax, keys": Face(of_flash_attention_jax, keys, 4),
    "flash_attention_jax, causal": Face(of_flash_attention_jax, at_the_end, 4),
    "kvax": Face(of_kvax),
    "kvax, sequential": Face(
        functools.partial(of_kvax, tokens=other_positions, assume_sequential_positions=True)
    ),
    "kvax, padding attends": Face(
        functools.partial(of_kvax, tokens=padding_attends, skip_pad_tokens=False), no_padding
    ),
    "maxtext": Face(of_maxtext, one_padding),
    "maxtext, prefill": Face(functools.partial(of_maxtext, prefill=True), end_of_a_prompt),
    "maxtext, reordered": Face(functools.partial(of_maxtext, reorder=True), one_padding),
    "maxtext, indexer": Face(of_maxtext, indexer),
    "levanter": Face(of_levanter, one_padding),
    "levanter, bounds": Face(functools.partial(of_levanter, bounds=True), ranges),
    "levanter, array": Face(of_levanter, pairs),
    "cuequivariance": Face(of_cuequivariance, of_samples, 6),
}
EACH_TIME = """
jax.nn: interval=causal,selector=documents,bias=pairs
jax.nn: interval=left,selector=positions,scale=array,mask=built
jax.nn, lengths: lengths=22x34
jax.nn, keys: lengths=33x50,heads=4/1
flax: interval=causal,selector=documents,cap=soft cap,sinks=sinks,scale=array
flax: bias=heads,dropout=dropout
flax, array: selector=documents,sinks=sinks
flax, shared dropout: interval=causal,bias=pairs,dropout=dropout
flash_attention_jax, keys: lengths=33x50,heads=4/1,dims=8x12
flash_attention_jax, causal: interval=offset,lengths=50x33
kvax: interval=causal,selector=positions,lengths=33x50,dims=8x12
kvax, sequential: interval=causal,selector=documents
kvax, padding attends: interval=causal,selector=documents,scale=negative
maxtext: interval=causal,selector=kv ids,dims=8x12
maxtext: interval=left,selector=documents,cap=soft cap,sinks=sinks
maxtext: interval=chunked,selector=documents
maxtext, prefill: interval=left,selector=positions,lengths=18x33
maxtext, reordered: interval=chunked,selector=positions,lengths=32x32
maxtext, indexer: interval=full,selector=documents,cap=soft cap,sinks=sinks
levanter: interval=left,selector=documents
levanter: bias=rows
levanter, bounds: interval=left,selector=documents
cuequivariance: heads=4/4,bias=pairs,lengths=33x50
"""
EXHAUSTIVE = """
jax.nn: interval=union,selector=tree,heads=4/1
jax.nn: selector=block mask,bias=keys,dtype=bfloat16
jax.nn: bias=rows,lengths=33x50,scale=negative,dtype=float16
flax: bias=alibi,interval=prefix,scale=negative
flax: selector=block mask,dims=16x8,bias=pairs
flax, array: selector=tree,bias=pairs,cap=soft cap
flax, array: interval=causal,heads=4/1,dtype=bfloat16
flash_attention_jax, keys: dtype=float16
flash_attention_jax, keys: heads=4/4,lengths=50x33
flash_attention_jax, causal: interval=offset,lengths=33x50,heads=4/1
kvax: interval=causal,selector=kv ids
kvax: interval=causal,selector=documents,dtype=bfloat16
maxtext: interval=full
maxtext: interval=full,selector=documents,dims=16x8,dtype=bfloat16
maxtext, prefill: interval=causal,selector=positions,lengths=18x33,sinks=sinks
maxtext, prefill: interval=chunked,selector=positions,lengths=18x33
maxtext, reordered: interval=left,selector=positions,lengths=32x32
maxtext, reordered: interval=causal,selector=positions,lengths=32x32
maxtext, indexer: interval=left,selector=documents
levanter: interval=causal,mask=built
levanter: interval=left,mask=built
levanter: selector=documents
levanter: interval=causal,selector=documents,heads=4/4
levanter, array: interval=causal,selector=documents,rows=one mask
levanter, array: interval=causal,selector=documents,dtype=bfloat16
cuequivariance: heads=4/4,bias=pairs,dims=8x12,scale=negative
"""
ROWS = [
    marked([row], table is EACH_TIME)
    for table in (EACH_TIME, EXHAUSTIVE)
    for row in table.strip().splitlines()
]


def parsed(row: str) -> tuple[Face, Any]:
    name, text = row.split(": ")
    return FACES[name], dataclasses.replace(decode_calls.parse(text), batch=FACES[name].batch)


def operands(face: Face, call: Any) -> Any:
    a = call.arrays(1)
    a |= {"dlse": np.zeros_like(a["dlse"])} | face.change(call, a)
    return {n: x.astype(np.int32) if x.dtype == np.int64 else x for n, x in a.items()}


def step(face: Face, call: Any, a: Any) -> dict[str, Any]:
    given = {name: a[name] for name in call.differentiable()}
    found, back = jax.vjp(lambda x: face.attend(call, a | x), given)
    along = {n: a["dout"] if n == "out" else jnp.zeros_like(x) for n, x in found.items()}
    return found | {"d" + name: x for name, x in back(along)[0].items()}


def wrong(row: str, call: Any, got: Any, a: Any) -> list[str]:
    options = call.options(a)
    if "shared dropout" in row:
        shape = (1, 1, *call.sizes())
        options["factors"] = philox.factors(jax.random.key(int(a["seed"])), RATE, shape)
    true = dense.true_and_plain(call.operands(a), call.allowed(a), call.dtype, **options)
    return dense.close({n: np.asarray(x) for n, x in got.items()}, *true, call.factor)


def check(row: str) -> list[str]:
    face, call = parsed(row)
    assert not call.invalid()
    a = operands(face, call)
    return wrong(row, call, jax.jit(functools.partial(step, face, call))(a), a)


@pytest.mark.parametrize("row", ROWS)
def test_equals_the_reference(row):
    assert not check(row)


def sharded(row: str, mesh: Any) -> Any:
    """Operands over the batch and the heads."""
    face, call = parsed(row)
    a = operands(face, call)
    of = specs(call, {"b": "data", "h": "tensor"})
    of |= {name: P("data") for name in {*a} - {*of}}  # masks in place of the call's
    return {n: jax.device_put(x, jax.NamedSharding(mesh, of[n])) for n, x in a.items()}


@pytest.mark.parametrize(
    ("kind", "row"), once_each(["Auto", "Explicit"], EACH_TIME.strip().splitlines())
)
def test_on_a_mesh(kind, row):
    """Over batch and heads, nothing is gathered under plain jit. Explicit axes also take second
    derivatives, whose types are checked when they are traced."""
    face, call = parsed(row)
    mesh = mesh_of(kind, (2, 2))
    with jax.set_mesh(mesh):
        a = sharded(row, mesh)
        one = functools.partial(step, face, call)
        compiled = jax.jit(one).lower(a).compile()
        assert not wrong(row, call, compiled(a), a)
        if kind == "Explicit":
            along = {name: a[name] for name in call.differentiable()}
            jax.eval_shape(lambda x: jax.jvp(lambda y: one(a | y), (x,), (x,)), along)
        elif not row.startswith("kvax"):  # attention_specs says how tokens are sharded there
            assert not {*collectives(compiled)} & {*MOVES}


SYMBOLIC = (
    "jax.nn: interval=causal,selector=documents,bias=pairs",
    "flax, array: interval=causal,heads=4/1",
    "kvax: interval=causal,selector=kv ids",
    "maxtext: interval=left,selector=documents,cap=soft cap",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", SYMBOLIC)
def test_export_with_symbolic_sizes(row):
    """The program of an unknown batch and length, with another batch and length."""
    face, call = parsed(row)
    a = operands(face, call)
    b, s = jax.export.symbolic_shape("b, s")
    labels = call.labels() | {"pairs": "b.qk"}
    sizes = {"q": s, "k": s} if "flax" in row else {"b": b, "q": s, "k": s}
    shapes = {
        name: jax.ShapeDtypeStruct(
            [sizes.get(at, n) for at, n in zip(labels[name], x.shape, strict=True)], x.dtype
        )
        for name, x in a.items()
    }
    program = restored(jax.export.export(jax.jit(functools.partial(step, face, call)))(shapes))
    batch = call.batch if "flax" in row else 3
    longer = dataclasses.replace(call, batch=batch, lengths="40x40")
    a = operands(face, longer)
    assert not wrong(row, longer, program.call(a), a)
