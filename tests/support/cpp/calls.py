"""Valid calls of the FFI targets, like those of the lowering. Tests change one thing in them."""

from dataclasses import dataclass, replace
from math import ceil

from cpp.call_frame import Array
from packax._src.core.schema import OPERAND_NAMES, OPERANDS, SYMBOLS


@dataclass
class Call:
    target: str
    operands: dict
    results: dict
    attributes: dict

    def change(self, **changes):
        """A copy with changed operands and results, or attributes (each a (dtype, value))."""
        new = replace(
            self,
            operands=dict(self.operands),
            results=dict(self.results),
            attributes=dict(self.attributes),
        )
        for name, value in changes.items():
            group = next(g for g in (new.operands, new.results, new.attributes) if name in g)
            if isinstance(value, Array):
                value = replace(value, address=group[name].address)
            group[name] = value
        return new

    def addresses(self):
        return {name: a.address for name, a in {**self.operands, **self.results}.items()}


ORDER = {SYMBOLS[x]: OPERAND_NAMES[x] for x in ("forward", "backward", "forward_tangent")}


def make_call(target, operands, results, attributes):
    operands = {name: operands[name] for name in ORDER.get(target, operands)}

    def numbered(arrays, first):
        pairs = enumerate(arrays.items())
        return {name: replace(a, address=first + 256 * i) for i, (name, a) in pairs}

    return Call(target, numbered(operands, 0x10000), numbered(results, 0x90000), attributes)


@dataclass(frozen=True)
class Sizes:
    batch: int = 2
    mask_batch: int = 2
    q_len: int = 300
    kv_len: int = 700
    heads: int = 6
    kv_heads: int = 2

    def limits(self, two):
        """q_pos: the upper limit of each row, or both limits if `two`."""
        return Array("int32", (self.mask_batch, *[2] * two, self.q_len))

    def mask(self, mask_mode):
        rows, keys = (self.mask_batch, self.q_len), (self.mask_batch, self.kv_len)
        return {
            "kv_start": Array("int32", rows),
            "kv_end": Array("int32", rows),
            "q_ids": Array("int32", rows),
            "kv_ids": Array("int32", keys),
            "q_pos": self.limits(mask_mode == 3),
            "kv_pos": Array("int32", keys),
            "q_blocks": Array("int32", (self.mask_batch, 5, ceil(self.q_len / 64))),
            "q_order": Array("int32", (self.mask_batch, ceil(self.q_len / 128))),
        }


ABSENT = Array("float32", (0,))
OPTIONS = {x.name: ABSENT for x in OPERANDS if x.optional or ("H" in x.axes and x.name != "sinks")}


def options(direction, **present):
    """The operands after those of the mask; all except `present` are absent."""
    operands = {**OPTIONS, **present}
    if direction == "forward":
        del operands["kv_block_lists"]
        operands.setdefault("sinks", ABSENT)
    return {**operands, "init": ABSENT}


def attributes(scale, mask_mode, soft_cap=0.0, **more):
    """The attributes that both passes share, by default without options and for all heads."""
    numbers = {
        "mask_mode": mask_mode,
        **dict.fromkeys(("q_block", "kv_block", "bias_of_indices", "float32_products"), 0),
        "first_head": 0,
        "heads": 0,
        **more,
    }
    shared = {"scale": ("float32", scale), "soft_cap": ("float32", soft_cap)}
    shared["dropout_threshold"] = ("int64", 0)
    return shared | {name: ("int32", value) for name, value in numbers.items()}


def forward(m, s=Sizes(), scale=0.125, mask_mode=2):
    dtype, qk_dim, v_dim = m.variant["dtype"], m.variant["qk_dim"], m.variant["v_dim"]
    dtype = {"bf16": "bfloat16", "f16": "float16"}[dtype]
    return make_call(
        "packax_forward_v1",
        {
            "query": Array(dtype, (s.batch, s.q_len, s.heads, qk_dim)),
            "key": Array(dtype, (s.batch, s.kv_len, s.kv_heads, qk_dim)),
            "value": Array(dtype, (s.batch, s.kv_len, s.kv_heads, v_dim)),
            **s.mask(mask_mode),
            "q_order_192": Array("int32", (s.mask_batch, ceil(s.q_len / 192))),
            **options("forward"),
        },
        {
            "out": Array(dtype, (s.batch, s.q_len, s.heads, v_dim)),
            "lse": Array("float32", (s.batch, s.heads, s.q_len)),
            "row_max": ABSENT,
            "counter": Array("int32", (1,)),
        },
        attributes(scale, mask_mode) | {"row_keys": ("int32", 0)},
    )


def workspace(s, algorithm, qk_dim):
    """The workspace of an algorithm of the backward."""
    padded = 64 * ceil(s.q_len / 64)
    rows = s.batch * s.heads * padded
    sums = 2 * rows + 2 * s.mask_batch * padded
    sizes = {"sm90_fused": sums + rows * qk_dim, "sm90_separate": sums + 1}
    return Array("float32", (sizes.get(algorithm, rows),))


def backward(
    m, s=Sizes(), scale=0.125, mask_mode=2, has_dlse=1, algorithm="sm90_fused", needs_grad=3
):  # fmt: skip
    """needs_grad: bit 0 for dq, bit 1 for dk and dv. Results that no kernel writes are absent."""
    f = forward(m, s, scale, mask_mode)
    query, key, value = (f.operands[n] for n in ("query", "key", "value"))
    out, lse = f.results["out"], f.results["lse"]
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "out": out,
        "lse": lse,
        "dout": out,
        "dlse": lse if has_dlse else ABSENT,
        **s.mask(mask_mode),
        "kv_blocks": Array("int32", (s.mask_batch, 4, ceil(s.kv_len / 64))),
        "kv_order": Array("int32", (s.mask_batch, ceil(s.kv_len / 128))),
        **options("backward"),
    }
    dkv = needs_grad & 2 or algorithm == "sm90_fused"
    results = {
        "dq": query if needs_grad & 1 else ABSENT,
        "dk": key if dkv else ABSENT,
        "dv": value if dkv else ABSENT,
        "score_grads": ABSENT,
        "row_delta": ABSENT,
        "dbias": ABSENT,
        "workspace": workspace(s, algorithm, query.shape[3]),
    }
    more = {"algorithm": ("string", algorithm), "needs_grad": ("int32", needs_grad)}
    shared = {name: x for name, x in f.attributes.items() if name != "row_keys"}
    return make_call("packax_backward_v1", operands, results, {**shared, **more})


def with_sinks(call, batch):
    """A call of either pass with sinks. `batch`: the number of their rows in the forward. The
    backward returns row_delta for them."""
    operands, results = dict(call.operands), dict(call.results)
    _, heads, _ = operands["lse"].shape if "lse" in operands else results["lse"].shape
    if "lse" in operands:
        results["row_delta"] = replace(operands["lse"])
    else:
        operands["sinks"] = Array("float32", (batch, heads))
    return make_call(call.target, operands, results, call.attributes)


def of_head_group(plain, first, row_heads, is_first_group=0):
    """A call of forward() or backward() as a call for its heads only, of a query with `row_heads`
    heads. `first` is the first of them."""
    heads = plain.operands["query"].shape[2]

    def widened(arrays):
        return {
            name: replace(a, shape=(*a.shape[:2], row_heads, a.shape[3]))
            if name in ("query", "out", "dout", "dq") and a.shape != ABSENT.shape
            else a
            for name, a in arrays.items()
        }

    operands, results = widened(plain.operands), widened(plain.results)
    result = "out" if "out" in results else "dq"
    if not is_first_group:
        operands["init"] = results[result]
    group = {"first_head": ("int32", first), "heads": ("int32", heads)}
    return Call(plain.target, operands, results, {**plain.attributes, **group})


def score_params(s, batches, has):
    """`batches`: of the scales and of the linear bias. `has`: whether there are scales, and a
    linear bias (1, or 2 if it is ALiBi of indices)."""
    params = {"scales": Array("float32", (batches[0],))} if has[0] else {}
    if has[1]:
        params |= {
            "slopes": Array("float32", (batches[1], s.heads)),
            "q_bias_pos": Array("int32", (batches[1], s.q_len)),
            "kv_bias_pos": Array("int32", (batches[1], s.kv_len)),
        }
    return params


def block_mask(s, batch, heads, q_block, kv_block):
    """The operands of a block mask; only the backward has the last one."""
    rows, columns = ceil(s.q_len / q_block), ceil(s.kv_len / kv_block)
    lists = (s.mask_batch, heads)
    return {
        "block_mask": Array("int32", (batch, heads, rows, ceil(columns / 32))),
        "q_block_lists": Array("int32", (*lists, ceil(s.q_len / 128), 2 + ceil(s.kv_len / 64))),
        "kv_block_lists": Array("int32", (*lists, ceil(s.kv_len / 128), 2 + ceil(s.q_len / 64))),
    }


BLOCKS = (1, 6, 3, 20)  # batch, heads, rows and keys of a block


def forward_fallback(
    m, s=Sizes(), dims=None, batches=(1, 1), has=(1, 1), soft_cap=30.0, dtype=None, float32=0,
    blocks=BLOCKS, needs_row_max=0,
):  # fmt: skip
    """`dims`: head dims, by default those of a plain kernel. `batches`, `has`: as in score_params.
    `float32`: float32_products. `blocks`: arguments of block_mask(), or None."""
    f = forward(m, s)  # mask_mode 2
    query, key, value = (f.operands[n] for n in ("query", "key", "value"))
    qk_dim, v_dim = dims or (query.shape[3], value.shape[3])
    dtype = dtype or query.dtype
    query, key = (replace(x, shape=(*x.shape[:3], qk_dim), dtype=dtype) for x in (query, key))
    value = replace(value, shape=(*value.shape[:3], v_dim), dtype=dtype)
    out = replace(query, shape=(*query.shape[:3], v_dim))
    present = block_mask(s, *blocks) if blocks else {}
    present |= score_params(s, batches, has)
    q_block, kv_block = blocks[2:] if blocks else (0, 0)
    row_max = f.results["lse"] if needs_row_max else ABSENT
    return make_call(
        "packax_forward_v1",
        {
            **f.operands,
            "query": query, "key": key, "value": value,
            **options("forward", **present),
        },
        {**f.results, "out": out, "row_max": row_max},
        attributes(
            0.125, 2, soft_cap, q_block=q_block, kv_block=kv_block, bias_of_indices=has[1] // 2,
            float32_products=float32,
        )
        | {"row_keys": ("int32", 0)},
    )  # fmt: skip


def backward_fallback(
    m, s=Sizes(), dims=None, batches=(1, 1), has=(1, 1), soft_cap=30.0, dtype=None, float32=0,
    needs_grad=3, score_grads=1, blocks=BLOCKS, algorithm="portable", has_dlse=1,
):  # fmt: skip
    """needs_grad: bit 0 for dq, bit 1 for dk and dv. Results that no kernel writes are absent."""
    f = forward_fallback(m, s, dims, batches, has, soft_cap, dtype, float32, blocks)
    b = backward(m, s, has_dlse=has_dlse, algorithm=algorithm, needs_grad=needs_grad)
    query, key, value = (f.operands[n] for n in ("query", "key", "value"))
    present = block_mask(s, *blocks) if blocks else {}
    present |= score_params(s, batches, has)
    dkv = needs_grad & 2 or algorithm == "sm90_fused"
    results = {
        "dq": query if needs_grad & 1 or score_grads else ABSENT,
        "dk": key if dkv else ABSENT,
        "dv": value if dkv else ABSENT,
        "score_grads": Array("float32", (s.batch, s.heads, 2, s.q_len)) if score_grads else ABSENT,
        "row_delta": ABSENT,
        "dbias": ABSENT,
        "workspace": workspace(s, algorithm, query.shape[3]),
    }
    out = f.results["out"]
    tensors = {"query": query, "key": key, "value": value, "out": out, "dout": out}
    return make_call(
        "packax_backward_v1",
        {**b.operands, **tensors, **options("backward", **present)},
        results,
        {
            name: b.attributes[name] if name in ("algorithm", "needs_grad") else f.attributes[name]
            for name in b.attributes
        },
    )


def forward_soft_cap(m, s=Sizes(), soft_cap=50.0, **more):
    """A plain call with a soft cap."""
    return forward_fallback(m, s, **{"has": (0, 0), "soft_cap": soft_cap, "blocks": None, **more})


def backward_soft_cap(m, s=Sizes(), soft_cap=50.0, **more):
    more = {"has": (0, 0), "blocks": None, "score_grads": 0, "algorithm": "sm90_fused", **more}
    return backward_fallback(m, s, soft_cap=soft_cap, **more)


SM90_BLOCKS = (2, 6, 4, 32)  # that the Hopper kernels support, for the default Sizes()


def forward_block_lists(m, s=Sizes(), blocks=SM90_BLOCKS, **more):
    """A plain call with a block mask."""
    return forward_fallback(m, s, **{"has": (0, 0), "soft_cap": 0.0, "blocks": blocks, **more})


def backward_block_lists(m, s=Sizes(), blocks=SM90_BLOCKS, **more):
    more = {"has": (0, 0), "soft_cap": 0.0, "score_grads": 0, "algorithm": "sm90_separate", **more}
    return backward_fallback(m, s, blocks=blocks, **more)


INDEX_ALIBI = (1, 2)  # `has`: scales that equal `scale`, slopes of index distances


def forward_alibi(m, s=Sizes(), has=INDEX_ALIBI, **more):
    """A plain call with ALiBi of indices."""
    return forward_fallback(m, s, **{"soft_cap": 0.0, "blocks": None, **more}, has=has)


def backward_alibi(m, s=Sizes(), has=INDEX_ALIBI, **more):
    more = {"soft_cap": 0.0, "blocks": None, "score_grads": 0, "algorithm": "sm90_fused", **more}
    return backward_fallback(m, s, has=has, **more)


def table_size(kv_len):
    power = 1
    while power < kv_len:
        power *= 2
    return max(1024, 2 * power)


def documents(m, s=Sizes(), compare_positions=1):
    rows = Array("int32", (s.mask_batch, s.q_len))
    keys = Array("int32", (s.mask_batch, s.kv_len))
    words = 5 * table_size(s.kv_len) + s.kv_len + ceil(s.kv_len / 1024)
    return make_call(
        "packax_documents_v1",
        {"q_ids": rows, "kv_ids": keys, "q_pos": s.limits(compare_positions == 2), "kv_pos": keys},
        {
            "lo": rows,
            "hi": rows,
            "segment_checked": rows,
            "workspace": Array("int32", (s.mask_batch, words)),
        },
        {"compare_positions": ("int32", compare_positions)},
    )


def blocks(m, s=Sizes()):
    rows = Array("int32", (s.mask_batch, s.q_len))
    return make_call(
        "packax_blocks_v1",
        {"kv_start": rows, "kv_end": rows, "segment_checked": rows},
        {
            "q_blocks": Array("int32", (s.mask_batch, 5, ceil(s.q_len / 64))),
            "kv_blocks": Array("int32", (s.mask_batch, 4, ceil(s.kv_len / 64))),
            "q_order": Array("int32", (s.mask_batch, ceil(s.q_len / 128))),
            "q_order_192": Array("int32", (s.mask_batch, ceil(s.q_len / 192))),
            "kv_order": Array("int32", (s.mask_batch, ceil(s.kv_len / 128))),
        },
        {"kv_len": ("int64", s.kv_len)},
    )


def decode(
    m, s=Sizes(q_len=2, kv_len=700), scale=0.125, soft_cap=0.0, page_size=0, sink_batch=0, room=64,
    pages=99, dims=None, dtype=None, float32=0, scale_rows=0,
):  # fmt: skip
    """`page_size`: 0 if the cache is not paged. `sink_batch`: 0 without sinks. `room`: shares that
    fit in the workspace. `scale_rows`: rows of the scales of a cache in FP8, 0 for other caches."""
    dtype = dtype or {"bf16": "bfloat16", "f16": "float16"}[m.variant["dtype"]]
    qk_dim, v_dim = dims or (m.variant["qk_dim"], m.variant["v_dim"])
    rows = Array("int32", (s.batch, s.q_len))
    table = Array("int32", (s.batch, ceil(s.kv_len / page_size))) if page_size else ABSENT
    cache = (pages, page_size) if page_size else (s.batch, s.kv_len)
    cache_dtype = "float8_e4m3fn" if scale_rows else dtype
    scales = Array("float32", (scale_rows, s.kv_heads)) if scale_rows else ABSENT
    return make_call(
        "packax_decode_v1",
        {
            "query": Array(dtype, (s.batch, s.q_len, s.heads, qk_dim)),
            "key": Array(cache_dtype, (*cache, s.kv_heads, qk_dim)),
            "value": Array(cache_dtype, (*cache, s.kv_heads, v_dim)),
            "kv_start": rows,
            "kv_end": rows,
            "block_table": table,
            "key_scale": scales,
            "value_scale": scales,
            "sinks": Array("float32", (sink_batch, s.heads)) if sink_batch else ABSENT,
        },
        {
            "out": Array(dtype, (s.batch, s.q_len, s.heads, v_dim)),
            "lse": Array("float32", (s.batch, s.heads, s.q_len)),
            "partial": Array("float32", (room, s.batch, s.q_len, s.heads, v_dim)),
            "sums": Array("float32", (room, s.batch, s.q_len, s.heads)),
        },
        {
            "scale": ("float32", scale),
            "soft_cap": ("float32", soft_cap),
            "float32_products": ("int32", float32),
        },
    )


def ragged(
    m, s=Sizes(1, 1, 70, 700, 8, 2), tile_rows=16, items=40, sequences=5, chunk_tiles=0, **more
):
    """Packed rows, `s.q_len` in all. `chunk_tiles`: for how many tiles of chunks there is room in
    the list; 0: it has no chunks. `more`: arguments of `decode`."""
    of = decode(m, s, **{"page_size": 16} | more)
    heads, v_dim = of.results["out"].shape[2:]
    chunks = s.q_len + 8 * (1 + chunk_tiles) if chunk_tiles else 0
    work = {"work": Array("int32", (2 * s.q_len + 8 * items + chunks,))}
    table = Array("int32", (sequences, *of.operands["block_table"].shape[1:]))
    sums = Array("float32", (items, tile_rows, heads))
    return make_call(
        "packax_ragged_v1",
        of.operands | {"block_table": table} | work,
        of.results
        | {"partial": Array("float32", (*sums.shape, v_dim)), "sums": sums}
        | {"counter": Array("int32", (1,))},
        of.attributes,
    )


def tangent(m, s=Sizes(), has=(1, 1, 1), of=None):
    """`has`: which of tq, tk and tv are present. `of`: a call of the forward, by default plain."""
    f = of or forward(m, s)
    out, lse = f.results["out"], f.results["lse"]
    names = zip(("tq", "tk", "tv"), ("query", "key", "value"), has, strict=True)
    tangents = {name: f.operands[primal] if h else ABSENT for name, primal, h in names}
    operands = {name: x for name, x in f.operands.items() if name not in ("q_order_192", "init")}
    operands |= {"out": out, "lse": lse, **tangents}
    results = {"tout": out, "tlse": lse}
    shared = {name: x for name, x in f.attributes.items() if name != "row_keys"}
    return make_call("packax_forward_tangent_v1", operands, results, shared)


CALLS = {
    "forward": forward,
    "backward": backward,
    "documents": documents,
    "blocks": blocks,
    "decode": lambda m, s=Sizes(): decode(m, replace(s, q_len=min(s.q_len, 2))),
    "forward_fallback": forward_fallback,
    "backward_fallback": backward_fallback,
}
