"""The table of a call: every operand, result and attribute of the FFI targets, in one row each.

`Operands` (spec.py), the batching and partitioning rules, the arrays that context parallelism cuts,
and the operands and attributes of FFI calls are read from it at import. csrc/aot/emit.py generates
C++ signatures and structs from it, csrc/aot/arguments.py the argument lists of kernels, and
docs/internals/generate.py the lists of ffi.md. It imports only the standard library, because the
build has no jax.
"""

from __future__ import annotations

from typing import NamedTuple


class Array(NamedTuple):
    """An operand or a result.

    `axes` has a letter for every axis:
    b, B, E: the batch; the batch or 1; a divisor of the batch, whose entries serve consecutive rows
    h, H, g: query heads; query heads or 1; heads of key and value
    s, k: rows of query; rows of key and value
    r, R: rows, keys or tiles of them, divided among the ranks of a context-parallel mesh; r or 1
    ".": any other axis, complete on every device. Further axes are of this kind, too.
    """

    name: str
    shape: str  # and dtype, as text
    axes: str = ""
    passes: str = ""  # letters of the targets that take it as operand: f, b, t, d, r (TARGETS)
    fold: str = ""  # arrays of equal `fold` have equal batches; "": only this one
    view: bool = False  # C++ has a TensorView of it, not a pointer
    optional: bool = False  # changes scores or probabilities
    gradient: bool = False


class Attribute(NamedTuple):
    name: str
    values: str
    type: str = "int32_t"  # in C++
    kept: bool = False  # unchanged, in a field of csrc/call/operands.h, and perhaps by kernels


_ALL, _FORWARD, _BACKWARD = "fbt", "f", "b"
_KEYS = "; if paged (pages, page_size, kv_heads, {})"
_LISTS = "(mask_batch, heads of block_mask, {}) int32; or absent"


def _tensor(name: str, shape: str, axes: str, passes: str) -> Array:
    return Array(name, shape, axes, passes, view=True)


def _mask(name: str, shape: str, axes: str, passes: str = _ALL) -> Array:
    return Array(name, shape, axes, passes, "mask")


def _score(
    name: str, shape: str, axes: str, fold: str = "", passes: str = _ALL, **more: bool
) -> Array:
    return Array(name, f"{shape}; or absent", axes, passes, fold, optional=True, **more)


OPERANDS = (
    _tensor("query", "(batch, q_len, row_heads, qk_dim)", "bsh.", "fbtd"),
    _tensor("key", "(batch, kv_len, kv_heads, qk_dim)" + _KEYS.format("qk_dim"), "bkg.", "fbtd"),
    _tensor("value", "(batch, kv_len, kv_heads, v_dim)" + _KEYS.format("v_dim"), "bkg.", "fbtd"),
    # The results of the forward, and their cotangents.
    _tensor("out", "(batch, q_len, row_heads, v_dim)", "b.h.", "bt"),
    Array(
        "lse",
        "(batch, heads, q_len) float32; with a bias or dropout (batch, heads, q_len, 2)",
        *("bh", "bt"),
    ),
    _tensor("dout", "like out", "b.h.", _BACKWARD),
    Array("dlse", "(batch, heads, q_len) float32; or absent", "bh", _BACKWARD),
    # The mask. Masks for decoding have only the first two, with the batch of query.
    _mask("kv_start", "(mask_batch, q_len) int32", "Br", "fbtd"),
    _mask("kv_end", "like kv_start", "Br", "fbtd"),
    _mask("q_ids", "like kv_start", "Br"),
    _mask("kv_ids", "(mask_batch, kv_len) int32", "B."),
    _mask("q_pos", "like kv_start; if mask_mode is 3, (mask_batch, 2, q_len)", "Br"),
    _mask("kv_pos", "like kv_ids", "B."),
    _mask("q_blocks", "(mask_batch, 5, ceil(q_len/64)) int32", "B.r"),
    _mask("q_order", "(mask_batch, ceil(q_len/128)) int32", "Br"),
    _mask("q_order_192", "(mask_batch, ceil(q_len/192)) int32", "Br", _FORWARD),
    _mask("kv_blocks", "(mask_batch, 4, ceil(kv_len/64)) int32", "B.r", _BACKWARD),
    _mask("kv_order", "(mask_batch, ceil(kv_len/128)) int32", "Br", _BACKWARD),
    _mask(
        "block_mask",
        "(1 or mask_batch, 1 or heads, ceil(q_len/q_block), words) int32; or absent",
        "BHr.",
    ),
    _mask("q_block_lists", _LISTS.format("ceil(q_len/128), 2 + ceil(kv_len/64)"), "BHr."),
    _mask(
        "kv_block_lists", _LISTS.format("ceil(kv_len/128), 2 + ceil(q_len/64)"), "BH.r", _BACKWARD
    ),
    # Slopes come with scales. Without positions, the positions of slopes are indices.
    _score("scales", "(1 or batch) float32", "B", gradient=True),  # replaces the attribute `scale`
    _score("slopes", "(1 or batch, heads) float32", "Bh", "slopes", gradient=True),
    _score("q_bias_pos", "(1 or batch, q_len) int32", "Br", "slopes"),
    _score("kv_bias_pos", "(1 or batch, kv_len) int32", "B.", "slopes"),
    _score(
        "bias",
        "(a divisor of batch, 1 or heads, 1 or q_len, kv_len), in query's dtype or float32",
        "EHR.",
        view=True,
        gradient=True,
    ),
    _score("dropout_streams", "(batch, heads, 4) uint32", "bh."),  # come with dropout_rows
    _score("dropout_rows", "(1 or batch, q_len) int32", "Br"),
    # If a call computes only some query heads (head_groups.py): out or dq with the other heads.
    _tensor("init", "the first result, in the same memory; or absent", "b.h.", "fb"),
    # Decoding, over caches of keys and values.
    Array("block_table", "(batch, table_width) int32; absent if the cache is not paged", "B.", "d"),
    Array(
        "key_scale",
        "(1 or batch, kv_heads) float32; if paged (1 or pages, kv_heads); absent unless key and "
        "value are float8_e4m3fn",
        *("B.", "d"),
    ),
    Array("value_scale", "like key_scale", "B.", "d"),
    Array("sinks", "(1 or batch, heads) float32; or absent", "Bh", "fd", gradient=True),
    # Packed rows of several sequences, in a batch of 1: of the primitive, and of the FFI call.
    Array("row_bounds", "(2, sequences) int32: the first row of each, and one past the last", ".."),
    # With chunks 8 * (items + 1 + tiles) + 3 * q_len.
    Array("work", "(2 * q_len + 8 * items,) int32, or more with chunks", ".", "r"),
)
ROWS = {x.name: x for x in OPERANDS}

# option -> the arguments that kernels with the option have, and that are None in all others
# (csrc/aot/arguments.py). Numbers without a row above come from the sizes of the arrays.
KERNEL_ARGUMENTS = {
    "row_stats": ("row_max", "score_grads", "has_score_grads"),
    "scales": ("scales", "scales_batch"),
    "soft_cap": ("soft_cap",),
    "slopes": ("slopes", "q_bias_pos", "kv_bias_pos", "bias_batch"),
    "block_mask": (
        *("block_mask", "q_block_lists", "kv_block_lists"),
        *("block_mask_batch", "block_mask_heads", "q_block", "kv_block"),
    ),
    "bias": ("bias", "bias_kind", "bias_axes"),
    "dropout": (
        *("dropout_streams", "dropout_rows", "dropout_threshold", "dropout_rows_batch"),
        "inverse_keep",
    ),
    "fp8": ("key_scale", "value_scale", "scale_rows", "bfloat16_query"),
}
_without = {x.name for x in OPERANDS if x.optional and x.passes}.difference(
    *KERNEL_ARGUMENTS.values()
)
assert not _without, f"{_without}: kernels without an option need its row in KERNEL_ARGUMENTS"


class Target(NamedTuple):
    """An FFI target. If `of_attention`, it begins with the operands and attributes of SHARED."""

    operands: tuple[Array, ...]
    results: tuple[Array, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    of_attention: bool = False


def _taking(letter: str) -> tuple[Array, ...]:
    """The operands of a target for attention, without those of all of them."""
    return tuple(x for x in OPERANDS if letter in x.passes and x not in SHARED.operands)


SHARED = Target(
    tuple(x for x in OPERANDS if set(_ALL) <= set(x.passes)),
    attributes=(
        Attribute("scale", "the factor of the scores", "float", kept=True),
        Attribute("soft_cap", "the cap; 0: none", "float", kept=True),
        Attribute(
            "dropout_threshold",
            "elements whose 32-bit random word is smaller are dropped; 0: no dropout",
            "int64_t",
        ),
        Attribute(
            "mask_mode",
            "0: no check; 1: ids; 2: and the highest position; 3: both limits",
            kept=True,
        ),
        Attribute("q_block", "rows of a block of the block mask; 0: none"),
        Attribute("kv_block", "keys of a block of the block mask; 0: none"),
        Attribute(
            "bias_of_indices", "1: ALiBi by the distance of indices; 0: none, or by position"
        ),
        Attribute("float32_products", "for float32 operands: 1: products in float32; 0: in TF32"),
        Attribute("first_head", "the first of the query's heads that is computed", kept=True),
        Attribute("heads", "how many heads are computed; 0, with first_head 0: all"),
    ),
)
_OUT, _LSE = (ROWS[x]._replace(passes="") for x in ("out", "lse"))
_OF_DECODE = ("scale", "soft_cap", "float32_products")
_S32 = "(mask_batch, q_len) int32"

TARGETS = {  # packax_NAME_v1
    "documents": Target(
        (
            Array("q_ids", _S32),
            Array("kv_ids", "(mask_batch, kv_len) int32"),
            Array("q_pos", "like q_ids; if compare_positions is 2, (mask_batch, 2, q_len)"),
            Array("kv_pos", "like kv_ids"),
        ),
        (
            *(Array(name, "like q_ids") for name in ("lo", "hi", "segment_checked")),
            Array("workspace", "(mask_batch, words) int32"),
        ),
        (
            Attribute(
                "compare_positions",
                "0: none; 1: the highest of each row; 2: both limits",
                kept=True,
            ),
        ),
    ),
    "blocks": Target(
        (ROWS["kv_start"], ROWS["kv_end"], Array("segment_checked", "like kv_start")),
        tuple(ROWS[x] for x in ("q_blocks", "kv_blocks", "q_order", "q_order_192", "kv_order")),
        (Attribute("kv_len", "the number of keys", "int64_t"),),
    ),
    "forward": Target(
        _taking("f"),
        (
            *(_OUT, _LSE),
            Array("row_max", "(batch, heads, q_len) float32; or absent"),
            Array("counter", "(1,) int32; workspace"),
        ),
        (
            Attribute(
                "row_keys", "a bound on the keys that a row attends to; 0: unknown", kept=True
            ),
        ),
        of_attention=True,
    ),
    "backward": Target(
        _taking("b"),
        (
            *(
                Array(f"d{x[0]}", f"like {x}; absent if nothing writes it", view=True)
                for x in ("query", "key", "value")
            ),
            Array("score_grads", "(batch, heads, 2, q_len) float32; or absent"),
            Array("row_delta", "(batch, heads, q_len) float32; or absent"),
            Array("dbias", "like bias; or absent", view=True),
            Array("workspace", "(elements) float32, depends on the algorithm", view=True),
        ),
        (
            Attribute("algorithm", "portable, sm90_separate or sm90_fused", "std::string_view"),
            Attribute("needs_grad", "bit 0: dq is needed; bit 1: dk and dv"),
        ),
        of_attention=True,
    ),
    "decode": Target(
        tuple(x for x in OPERANDS if "d" in x.passes),
        (
            *(_OUT._replace(view=False), _LSE),
            Array("partial", "(splits, batch, q_len, heads, v_dim) float32; workspace"),
            Array("sums", "(splits, batch, q_len, heads) float32; workspace"),
        ),
        tuple(x for x in SHARED.attributes if x.name in _OF_DECODE),
    ),
    "ragged": Target(
        # In a batch of 1. A paged cache; block_table has a row for each sequence.
        tuple(x for x in OPERANDS if {*x.passes} & {*"dr"}),
        (
            *(_OUT._replace(view=False), _LSE),
            Array("partial", "(items, rows of an item, heads, v_dim) float32; workspace"),
            Array("sums", "(items, rows of an item, heads) float32; workspace"),
            Array("counter", "(1,) int32; workspace"),
        ),
        tuple(x for x in SHARED.attributes if x.name in _OF_DECODE),
    ),
    "forward_tangent": Target(
        (
            *_taking("t"),
            *(
                Array(f"t{x[0]}", f"like {x}; or absent", view=True)
                for x in ("query", "key", "value")
            ),
        ),
        (Array("tout", "like out", view=True), Array("tlse", "like lse")),
        of_attention=True,
    ),
}

SYMBOLS = {x: f"packax_{x}_v1" for x in TARGETS}
"""The names under which XLA calls the targets."""
OPERAND_NAMES = {
    name: tuple(x.name for x in (SHARED.operands if y.of_attention else ()) + y.operands)
    for name, y in TARGETS.items()
}
"""The operands of each target, in order."""
ATTRIBUTES = {
    name: (SHARED.attributes if y.of_attention else ()) + y.attributes
    for name, y in TARGETS.items()
}
"""The attributes of each target. Those that have the name of a field of AttentionSpec are this
field, others are computed for the call (ops/ffi.py)."""
