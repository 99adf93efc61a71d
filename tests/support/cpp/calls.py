"""Valid calls of the FFI targets, like those of the lowering. Tests change one thing in them."""

from dataclasses import dataclass, replace
from functools import partial
from math import ceil, prod

from cpp.call_frame import Array
from packax._src.core.schema import OPERAND_NAMES, OPERANDS, SYMBOLS

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


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

    def arrays(self):
        return {**self.operands, **self.results}


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
        tiles = {"q_order": (self.q_len, 128), "q_order_192": (self.q_len, 192)}
        tiles["kv_order"] = self.kv_len, 128
        return {
            "kv_start": Array("int32", rows),
            "kv_end": Array("int32", rows),
            "q_ids": Array("int32", rows),
            "kv_ids": Array("int32", keys),
            "q_pos": self.limits(mask_mode == 3),
            "kv_pos": Array("int32", keys),
            "q_blocks": Array("int32", (self.mask_batch, 5, ceil(self.q_len / 64))),
            "kv_blocks": Array("int32", (self.mask_batch, 4, ceil(self.kv_len / 64))),
        } | {x: Array("int32", (self.mask_batch, ceil(n / of))) for x, (n, of) in tiles.items()}


SIZES = [
    Sizes(),
    Sizes(batch=3, mask_batch=1, q_len=1, kv_len=1, heads=4, kv_heads=4),
    Sizes(batch=1, mask_batch=1, q_len=128, kv_len=129, heads=8, kv_heads=1),
    Sizes(batch=5, mask_batch=5, q_len=1 << 20, kv_len=(1 << 20) + 1, heads=2, kv_heads=1),
]
ABSENT = Array("float32", (0,))
OPTIONAL = {x.name: ABSENT for x in OPERANDS if x.optional or "H" in x.axes or x.name == "sinks"}
BLOCKS = (1, 6, 3, 20)  # batch, heads, rows and keys of a block
SM90_BLOCKS = (2, 6, 4, 32)  # that the Hopper kernels support, for the default Sizes()
THRESHOLD = 3 << 30  # three quarters are dropped
ALL_AXES = 7
EVERY = {"soft_cap": 30.0, "scales": 1, "slopes": 1, "blocks": BLOCKS}
ALIBI = {"scales": 1, "slopes": 1, "of_indices": 1}  # scales that equal `scale`


def block_mask(s, batch, heads, q_block, kv_block):
    """The operands of a block mask."""
    rows, columns = ceil(s.q_len / q_block), ceil(s.kv_len / kv_block)
    lists = (s.mask_batch, heads)
    return {
        "block_mask": Array("int32", (batch, heads, rows, ceil(columns / 32))),
        "q_block_lists": Array("int32", (*lists, ceil(s.q_len / 128), 2 + ceil(s.kv_len / 64))),
        "kv_block_lists": Array("int32", (*lists, ceil(s.kv_len / 128), 2 + ceil(s.q_len / 64))),
    }


def workspace(s, algorithm, columns, has_bias):
    """The workspace of an algorithm of the backward. `columns`: of the sum of dQ."""
    padded = 64 * ceil(s.q_len / 64)
    rows = s.batch * s.heads * padded
    sums = (2 + has_bias) * rows + 2 * s.mask_batch * padded
    sizes = {"sm90_fused": sums + rows * columns, "sm90_separate": sums + 1}
    return Array("float32", (sizes.get(algorithm, rows),))


def attention(
    target, m, s=Sizes(), dims=None, *, dtype=None, float32=0, scale=0.125, mask_mode=2,
    soft_cap=0.0, scales=0, slopes=0, of_indices=0, blocks=None, bias=None, bias_dtype=None,
    groups=None, dropout=0, dropout_rows=1, sinks=0, row_stats=0, row_keys=0,
    algorithm="sm90_fused", columns=None, needs_grad=3, has_dlse=1, dbias=1, parts=0,
    tangents=(1, 1, 1),
):  # fmt: skip
    """A call of the forward, the backward or the tangent; plain by default, with the head dims and
    the dtype of the machine's kernels.

    scales, slopes: their batches. of_indices: the slopes are ALiBi of indices. blocks: arguments
    of block_mask(). bias: bits of the axes that are not broadcast (batch, heads, rows); groups: of
    batch rows that share one, if not by these bits. dropout: the threshold. sinks: their batch; the
    backward then returns row_delta. row_stats: row_max or score_grads is a result. float32:
    float32_products.

    Of a backward: columns of the sum of dQ, by default the head dim; parts: sums of the bias
    gradient in the workspace; needs_grad: bit 0 for dq, bit 1 for dk and dv. Results that no kernel
    writes are absent."""
    forward, backward = target == "forward", target == "backward"
    dtype = dtype or DTYPES[m.variant["dtype"]]
    qk_dim, v_dim = dims or (m.variant["qk_dim"], m.variant["v_dim"])
    query, out = (Array(dtype, (s.batch, s.q_len, s.heads, d)) for d in (qk_dim, v_dim))
    key, value = (Array(dtype, (s.batch, s.kv_len, s.kv_heads, d)) for d in (qk_dim, v_dim))
    sums = Array("float32", (s.batch, s.heads, s.q_len))
    two = bias is not None or dropout  # the largest logit, and the logarithm of the sum
    lse = replace(sums, shape=(*sums.shape, 2)) if two else sums
    operands = {**OPTIONAL, "init": ABSENT, **s.mask(mask_mode)}
    operands |= {"query": query, "key": key, "value": value}
    if blocks:
        operands |= block_mask(s, *blocks)
    if scales:
        operands["scales"] = Array("float32", (scales,))
    if slopes:
        operands["slopes"] = Array("float32", (slopes, s.heads))
        operands["q_bias_pos"] = Array("int32", (slopes, s.q_len))
        operands["kv_bias_pos"] = Array("int32", (slopes, s.kv_len))
    if bias is not None:
        sizes = (s.batch, s.heads, s.q_len)
        shape = (n if bias >> bit & 1 else 1 for bit, n in enumerate(sizes))
        batch, *rows = shape
        operands["bias"] = Array(bias_dtype or "float32", (groups or batch, *rows, s.kv_len))
    if dropout:
        operands["dropout_streams"] = Array("uint32", (s.batch, s.heads, 4))
        operands["dropout_rows"] = Array("int32", (dropout_rows, s.q_len))
    if sinks and forward:
        operands["sinks"] = Array("float32", (sinks, s.heads))
    numbers = {
        "mask_mode": mask_mode, "q_block": blocks[2] if blocks else 0,
        "kv_block": blocks[3] if blocks else 0, "bias_of_indices": of_indices,
        "float32_products": float32, "first_head": 0, "heads": 0,
    }  # fmt: skip
    if forward:
        numbers["row_keys"] = row_keys
        results = {"out": out, "lse": lse, "row_max": sums if row_stats else ABSENT}
        results["counter"] = Array("int32", (1,))
    elif backward:
        numbers["needs_grad"] = needs_grad
        operands |= {"out": out, "lse": lse, "dout": out, "dlse": sums if has_dlse else ABSENT}
        dkv = needs_grad & 2 or algorithm == "sm90_fused"
        score_grads = Array("float32", (s.batch, s.heads, 2, s.q_len))
        results = {
            "dq": query if needs_grad & 1 or row_stats else ABSENT,
            "dk": key if dkv else ABSENT,
            "dv": value if dkv else ABSENT,
            "score_grads": score_grads if row_stats else ABSENT,
            "row_delta": sums if sinks else ABSENT,
            "dbias": operands["bias"] if dbias else ABSENT,
            "workspace": workspace(s, algorithm, columns or qk_dim, bias is not None),
        }
        if parts:
            elements = results["workspace"].shape[0] + 63 + parts * prod(operands["bias"].shape)
            results["workspace"] = Array("float32", (elements,))
    else:
        present = zip(("tq", "tk", "tv"), (query, key, value), tangents, strict=True)
        operands |= {"out": out, "lse": lse} | {n: x if has else ABSENT for n, x, has in present}
        results = {"tout": out, "tlse": lse}
    attributes = {name: ("int32", value) for name, value in numbers.items()}
    attributes |= {"scale": ("float32", scale), "soft_cap": ("float32", soft_cap)}
    attributes["dropout_threshold"] = ("int64", dropout)
    if backward:
        attributes["algorithm"] = ("string", algorithm)
    return make_call(f"packax_{target}_v1", operands, results, attributes)


forward = partial(attention, "forward")
backward = partial(attention, "backward")
tangent = partial(attention, "forward_tangent")


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


CALLS = {  # with the names in refusals.txt
    "forward": forward,
    "backward": backward,
    "documents": documents,
    "blocks": blocks,
    "decode": lambda m, s=Sizes(): decode(m, replace(s, q_len=min(s.q_len, 2))),
    "forward_fallback": partial(forward, **EVERY),
    "backward_fallback": partial(backward, **EVERY, row_stats=1, algorithm="portable"),
    "forward_bias": partial(forward, **EVERY, bias=ALL_AXES, dropout=THRESHOLD),
    "backward_bias": partial(
        backward, **EVERY, bias=ALL_AXES, dropout=THRESHOLD, row_stats=1, algorithm="portable"
    ),
}
