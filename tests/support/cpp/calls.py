"""Correct calls of the FFI targets, as the lowering makes them; tests change one thing."""

from dataclasses import dataclass, replace
from math import ceil

from cpp.call_frame import Array


@dataclass
class Call:
    target: str
    operands: dict
    results: dict
    attributes: dict

    def change(self, **changes):
        """Operands and results by name; attributes by name as (dtype, value)."""
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


def make_call(target, operands, results, attributes):
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
        """q_pos: an upper limit of each row, or both."""
        return Array("int32", (self.mask_batch, *[2] * two, self.q_len))

    def mask(self, element_test):
        rows, keys = (self.mask_batch, self.q_len), (self.mask_batch, self.kv_len)
        return {
            "q_lo": Array("int32", rows),
            "q_hi": Array("int32", rows),
            "q_ids": Array("int32", rows),
            "kv_ids": Array("int32", keys),
            "q_pos": self.limits(element_test == 3),
            "kv_pos": Array("int32", keys),
            "q_blocks": Array("int32", (self.mask_batch, 5, ceil(self.q_len / 64))),
            "q_order": Array("int32", (self.mask_batch, ceil(self.q_len / 128))),
        }


def forward(m, s=Sizes(), scale=0.125, element_test=2):
    dtype, qk_dim, v_dim = m.variant["dtype"], m.variant["qk_dim"], m.variant["v_dim"]
    dtype = {"bf16": "bfloat16", "f16": "float16"}[dtype]
    return make_call(
        "packax_forward_v1",
        {
            "query": Array(dtype, (s.batch, s.q_len, s.heads, qk_dim)),
            "key": Array(dtype, (s.batch, s.kv_len, s.kv_heads, qk_dim)),
            "value": Array(dtype, (s.batch, s.kv_len, s.kv_heads, v_dim)),
            **s.mask(element_test),
            "q_order_192": Array("int32", (s.mask_batch, ceil(s.q_len / 192))),
        },
        {
            "out": Array(dtype, (s.batch, s.q_len, s.heads, v_dim)),
            "lse": Array("float32", (s.batch, s.heads, s.q_len)),
            "counter": Array("int32", (1,)),
        },
        {"scale": ("float32", scale), "element_test": ("int32", element_test)},
    )


def workspace(m, s, kernels):
    """Elements: what the one kernel of Hopper for all gradients needs, those apart, or the
    portable."""
    padded = 64 * ceil(s.q_len / 64)
    rows = s.batch * s.heads * padded
    sums = 2 * rows + 2 * s.mask_batch * padded
    return {"fused": sums + rows * m.variant["qk_dim"], "apart": sums + 1, "portable": rows}[
        kernels
    ]


def backward(
    m, s=Sizes(), scale=0.125, element_test=2, has_dlse=1, kernels="fused", wanted=3
):  # fmt: skip
    """wanted: bit 0 dq, bit 1 dk and dv; what no kernel writes has no elements."""
    f = forward(m, s, scale, element_test)
    query, key, value = (f.operands[n] for n in ("query", "key", "value"))
    out, lse = f.results["out"], f.results["lse"]
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "out": out,
        "lse": lse,
        "dout": out,
        "dlse": lse,
        **s.mask(element_test),
        "kv_blocks": Array("int32", (s.mask_batch, 4, ceil(s.kv_len / 64))),
        "kv_order": Array("int32", (s.mask_batch, ceil(s.kv_len / 128))),
    }
    results = {
        "dq": query,
        "dk": key,
        "dv": value,
        "workspace": Array("float32", (workspace(m, s, kernels),)),
    }
    large = m.has_sm90() and kernels == "fused"
    unwritten = [] if wanted & 1 else ["dq"]
    unwritten += [] if wanted & 2 or large else ["dk", "dv"]
    results |= {name: Array(query.dtype, (0,)) for name in unwritten}
    attributes = {**f.attributes, "has_dlse": ("int32", has_dlse), "wanted": ("int32", wanted)}
    return make_call("packax_backward_v1", operands, results, attributes)


def of_head_group(plain, first, row_heads, begins=0):
    """A call of forward() or backward(), for heads of a query that has `row_heads`, its own from
    `first` on."""
    heads = plain.operands["query"].shape[2]

    def widened(arrays):
        return {
            name: replace(a, shape=(*a.shape[:2], row_heads, a.shape[3]))
            if name in ("query", "out", "dout", "dq") and a.shape != (0,)
            else a
            for name, a in arrays.items()
        }

    operands, results = widened(plain.operands), widened(plain.results)
    result = "out" if "out" in results else "dq"
    own = {"first_head": first, "heads": heads, "begins": begins}
    return Call(
        plain.target.replace("_v1", "_heads_v1"),
        {f"{result}_before": results[result], **operands},
        results,
        {**plain.attributes, **{name: ("int32", value) for name, value in own.items()}},
    )


def extras(s, scales_batch, bias_batch):
    return {
        "scales": Array("float32", (scales_batch,)),
        "slopes": Array("float32", (bias_batch, s.heads)),
        "q_places": Array("int32", (bias_batch, s.q_len)),
        "kv_places": Array("int32", (bias_batch, s.kv_len)),
    }


def flags(soft_cap, **more):
    named = {name: ("int32", value) for name, value in more.items()}
    return {"soft_cap": ("float32", soft_cap), **named}


def block_map(s, batch, heads, q_block, kv_block):
    """Its operands: those of the forward, then one that the backward has beside them."""
    rows, columns = ceil(s.q_len / q_block), ceil(s.kv_len / kv_block)
    lists = (s.mask_batch, heads)
    return {
        "map_bits": Array("int32", (batch, heads, rows, ceil(columns / 32))),
        "q_entries": Array("int32", (*lists, ceil(s.q_len / 128), 2 + ceil(s.kv_len / 64))),
        "kv_entries": Array("int32", (*lists, ceil(s.kv_len / 128), 2 + ceil(s.q_len / 64))),
    }


MAP = (1, 6, 3, 20)  # batch, heads, rows and keys of a block
NO_MAP = (1, 1, 1, 1)  # of operands that nobody looks at


def forward_fallback(
    m, s=Sizes(), dims=None, batches=(1, 1), has=(1, 1), soft_cap=30.0, dtype=None, exact=0,
    blocks=MAP, want_top=0,
):  # fmt: skip
    """`dims`: those asked for, by default those of a plain kernel; `batches`: of scales and bias;
    `blocks`: of a map, None without one."""
    f = forward(m, s)  # element_test 2
    query, key, value = (f.operands[n] for n in ("query", "key", "value"))
    qk_dim, v_dim = dims or (query.shape[3], value.shape[3])
    dtype = dtype or query.dtype
    query, key = (replace(x, shape=(*x.shape[:3], qk_dim), dtype=dtype) for x in (query, key))
    value = replace(value, shape=(*value.shape[:3], v_dim), dtype=dtype)
    out = replace(query, shape=(*query.shape[:3], v_dim))
    lse = f.results["lse"]
    order = {"q_order_192": f.operands["q_order_192"]}
    maps = block_map(s, *(blocks or NO_MAP))
    del maps["kv_entries"]
    q_block, kv_block = blocks[2:] if blocks else (0, 0)
    named = {"has_scales": has[0], "has_bias": has[1], "want_top": want_top, "exact": exact}
    return make_call(
        "packax_forward_general_v1",
        {
            "query": query,
            "key": key,
            "value": value,
            **s.mask(2),
            **order,
            **maps,
            **extras(s, *batches),
        },
        {"out": out, "lse": lse, "top": lse, "counter": f.results["counter"]},
        {**f.attributes, **flags(soft_cap, **named, q_block=q_block, kv_block=kv_block)},
    )


def backward_fallback(
    m, s=Sizes(), dims=None, batches=(1, 1), has=(1, 1), soft_cap=30.0, dtype=None, exact=0,
    wanted=3, has_dnumbers=1, blocks=MAP, kernels="portable",
):  # fmt: skip
    """wanted: bit 0 dq, bit 1 dk and dv; what no kernel writes has no elements."""
    f, b = (
        forward_fallback(m, s, dims, batches, has, soft_cap, dtype, exact, blocks),
        backward(m, s),
    )
    del f.attributes["want_top"]
    query, key, value = (f.operands[n] for n in ("query", "key", "value"))
    out, lse = f.results["out"], f.results["lse"]
    sums = {"lse": lse, "dout": out, "dlse": lse}
    keys = {name: b.operands[name] for name in ("kv_blocks", "kv_order")}
    numbers = Array("float32", (s.batch, s.heads, 2, s.q_len) if has_dnumbers else (1,))
    none = Array(query.dtype, (0,))
    dq = query if wanted & 1 or has_dnumbers else none
    dk, dv = (key, value) if wanted & 2 or kernels == "fused" else (none, none)
    elements = Array("float32", (workspace(m, s, kernels),))
    flags = {"has_dlse": 1, "has_dnumbers": has_dnumbers, "wanted": wanted}
    return make_call(
        "packax_backward_general_v1",
        {
            "query": query,
            "key": key,
            "value": value,
            "out": out,
            **sums,
            **s.mask(2),
            **keys,
            **block_map(s, *(blocks or NO_MAP)),
            **extras(s, *batches),
        },
        {"dq": dq, "dk": dk, "dv": dv, "dnumbers": numbers, "workspace": elements},
        {**f.attributes, **{name: ("int32", value) for name, value in flags.items()}},
    )


def forward_soft_cap(m, s=Sizes(), soft_cap=50.0, **more):
    """A soft cap is all that it has beside a plain call."""
    return forward_fallback(m, s, **{"has": (0, 0), "soft_cap": soft_cap, "blocks": None, **more})


def backward_soft_cap(m, s=Sizes(), soft_cap=50.0, **more):
    more = {"has": (0, 0), "blocks": None, "has_dnumbers": 0, "kernels": "fused", **more}
    return backward_fallback(m, s, soft_cap=soft_cap, **more)


POWERS = (2, 6, 4, 32)  # a map that Hopper's kernels take, of the default sizes


def forward_block_lists(m, s=Sizes(), blocks=POWERS, **more):
    """A map of blocks is all that it has beside a plain call."""
    return forward_fallback(m, s, **{"has": (0, 0), "soft_cap": 0.0, "blocks": blocks, **more})


def backward_block_lists(m, s=Sizes(), blocks=POWERS, **more):
    more = {"has": (0, 0), "soft_cap": 0.0, "has_dnumbers": 0, "kernels": "apart", **more}
    return backward_fallback(m, s, blocks=blocks, **more)


OF_INDICES = (1, 2)  # scales that are `scale`, slopes without places


def forward_alibi(m, s=Sizes(), has=OF_INDICES, **more):
    """Slopes of indices are all that it has beside a plain call."""
    return forward_fallback(m, s, **{"soft_cap": 0.0, "blocks": None, **more}, has=has)


def backward_alibi(m, s=Sizes(), has=OF_INDICES, **more):
    more = {"soft_cap": 0.0, "blocks": None, "has_dnumbers": 0, "kernels": "fused", **more}
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
            "tested": rows,
            "workspace": Array("int32", (s.mask_batch, words)),
        },
        {"compare_positions": ("int32", compare_positions)},
    )


def blocks(m, s=Sizes()):
    rows = Array("int32", (s.mask_batch, s.q_len))
    return make_call(
        "packax_blocks_v1",
        {"q_lo": rows, "q_hi": rows, "tested": rows},
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
    pages=99, dims=None, dtype=None, exact=0,
):  # fmt: skip
    """`page_size`, `sink_batch`: 0 for a cache that is not paged, and for no sinks. `room`: shares
    in the workspace."""
    dtype = dtype or {"bf16": "bfloat16", "f16": "float16"}[m.variant["dtype"]]
    qk_dim, v_dim = dims or (m.variant["qk_dim"], m.variant["v_dim"])
    rows = Array("int32", (s.batch, s.q_len))
    table = Array("int32", (s.batch, ceil(s.kv_len / page_size))) if page_size else rows
    cache = (pages, page_size) if page_size else (s.batch, s.kv_len)
    return make_call(
        "packax_decode_v1",
        {
            "query": Array(dtype, (s.batch, s.q_len, s.heads, qk_dim)),
            "key": Array(dtype, (*cache, s.kv_heads, qk_dim)),
            "value": Array(dtype, (*cache, s.kv_heads, v_dim)),
            "q_lo": rows,
            "q_hi": rows,
            "block_table": table,
            "sinks": Array("float32", (sink_batch, s.heads)) if sink_batch else rows,
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
            "paged": ("int32", int(page_size > 0)),
            "has_sinks": ("int32", int(sink_batch > 0)),
            "exact": ("int32", exact),
        },
    )


CALLS = {
    "forward": forward,
    "backward": backward,
    "documents": documents,
    "blocks": blocks,
    "decode": lambda m, s=Sizes(): decode(m, replace(s, q_len=min(s.q_len, 2))),
    "forward_fallback": forward_fallback,
    "backward_fallback": backward_fallback,
}
