"""FFI handlers with invalid buffers: every check, and its whole message.

Guards against a handler that crashes or launches on invalid operands, and against a message that
names the wrong argument. Runs on a fake libcuda (tests/support/cpp): needs the built extension and
a C compiler.
"""

import pytest
from cpp.call_frame import Array
from cpp.calls import backward, blocks, documents, forward
from cpp.machine import needs_compiler, needs_extension
from cpp.refusals import check_refusal

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

I32 = "int32"


def refusals():
    """(call, changes, message) for every check; the sizes are those of Sizes()."""
    long = (1 << 29) + 1
    at_most = 1 << 29
    yield (
        forward,
        {"query": Array("bfloat16", (2, 300, 64))},
        ("query is bfloat16[2, 300, 64], expected 4 axes (batch, q_len, heads, qk_dim)"),
    )
    yield (
        forward,
        {"key": Array("bfloat16", ())},
        ("key is bfloat16[], expected 4 axes (batch, kv_len, kv_heads, qk_dim)"),
    )
    yield (
        forward,
        {"value": Array("float16", (1,) * 5)},
        ("value is float16[1, 1, 1, 1, 1], expected 4 axes (batch, kv_len, kv_heads, v_dim)"),
    )
    yield (
        forward,
        {"kv_start": Array(I32, (300,))},
        ("kv_start is int32[300], expected 2 axes (mask_batch, q_len)"),
    )
    yield (
        forward,
        {"query": Array("float64", (2, 300, 6, 64))},
        ("query is float64, expected bfloat16, float16 or float32"),
    )
    yield (
        forward,
        {"query": Array("D", (1 << 31, 300, 6, "QK"))},
        ("batch (query axis 0) is 2147483648, expected 0 to 2147483647"),
    )
    yield (
        forward,
        {"query": Array("D", (2, long, 6, "QK"))},
        (f"q_len (query axis 1) is {long}, expected 1 to {at_most}"),
    )
    yield (
        forward,
        {"query": Array("D", (2, 300, 0, "QK"))},
        ("heads (query axis 2) is 0, expected 1 to 65536"),
    )
    yield (
        forward,
        {"query": Array("D", (2, 300, 65538, "QK"))},
        ("heads (query axis 2) is 65538, expected 1 to 65536"),
    )
    yield (
        forward,
        {"query": Array("D", (2, 300, 65536, 512)), "value": Array("D", (2, 700, 2, 512))},
        ("heads * head dim is 65536 * 512 = 33554432, expected at most 11184810"),
    )
    yield (
        forward,
        {"query": Array("D", (2, 300, 6, 0))},
        ("qk_dim (query axis 3) is 0, expected 1 to 2147483647"),
    )
    yield (
        forward,
        {"key": Array("D", (2, 0, 2, "QK"))},
        (f"kv_len (key axis 1) is 0, expected 1 to {at_most}"),
    )
    yield (
        forward,
        {"key": Array("D", (2, 700, 0, "QK"))},
        ("kv_heads (key axis 2) is 0, expected 1 to 65536"),
    )
    yield (
        forward,
        {"value": Array("D", (2, 700, 2, -1))},
        ("v_dim (value axis 3) is -1, expected 1 to 2147483647"),
    )
    yield (
        forward,
        {"key": Array("D", (2, 700, 4, "QK"))},
        ("query has 6 heads, expected a multiple of the 4 heads of key and value"),
    )
    yield (
        forward,
        {"kv_start": Array(I32, (3, 300))},
        ("kv_start has 3 rows (axis 0), expected 1 or the batch, 2"),
    )
    yield (
        forward,
        {"key": Array("D", (3, 700, 2, "QK"))},
        ("key is D[3, 700, 2, QK], expected D[batch=2, kv_len=700, kv_heads=2, qk_dim=QK]"),
    )
    yield (
        forward,
        {"key": Array("float64", (2, 700, 2, "QK"))},
        ("key is float64[2, 700, 2, QK], expected D[batch=2, kv_len=700, kv_heads=2, qk_dim=QK]"),
    )
    yield (
        forward,
        {"value": Array("D", (2, 701, 2, "V"))},
        ("value is D[2, 701, 2, V], expected D[batch=2, kv_len=700, kv_heads=2, v_dim=V]"),
    )
    yield forward, {"mask_mode": (I32, 4)}, "attribute mask_mode is 4, expected 0 to 3"
    yield forward, {"mask_mode": (I32, -1)}, "attribute mask_mode is -1, expected 0 to 3"
    yield (
        forward,
        {"scale": ("float32", float("nan"))},
        ("attribute scale is nan, expected a finite number above 0"),
    )
    yield (
        forward,
        {"scale": ("float32", float("inf"))},
        ("attribute scale is inf, expected a finite number above 0"),
    )
    yield (
        forward,
        {"scale": ("float32", 0.0)},
        ("attribute scale is 0, expected a finite number above 0"),
    )
    rows = f"{I32}[mask_batch=2, q_len=300]"
    keys = f"{I32}[mask_batch=2, kv_len=700]"
    yield forward, {"kv_start": Array(I32, (2, 299))}, f"kv_start is int32[2, 299], expected {rows}"
    for name in ("kv_end", "q_ids", "q_pos"):
        bad = Array(I32, (2, 301))
        yield forward, {name: bad}, f"{name} is int32[2, 301], expected {rows}"
    yield (  # one limit per row where two are read, and the reverse
        forward,
        {"mask_mode": (I32, 3)},
        f"q_pos is int32[2, 300], expected {I32}[mask_batch=2, limits=2, q_len=300]",
    )
    yield (
        forward,
        {"q_pos": Array(I32, (2, 2, 300))},
        f"q_pos is int32[2, 2, 300], expected {rows}",
    )
    for name in ("kv_ids", "kv_pos"):
        bad = Array("int64", (2, 700))
        yield forward, {name: bad}, f"{name} is int64[2, 700], expected {keys}"
    bad = Array(I32, (1, 700))  # also read if only ids are compared
    yield (
        forward,
        {"mask_mode": (I32, 1), "kv_ids": bad},
        f"kv_ids is int32[1, 700], expected {keys}",
    )
    yield (
        forward,
        {"q_blocks": Array(I32, (2, 4, 5))},
        ("q_blocks is int32[2, 4, 5], expected int32[mask_batch=2, bounds=5, ceil(q_len/64)=5]"),
    )
    yield (
        forward,
        {"q_order": Array(I32, (2, 2))},
        ("q_order is int32[2, 2], expected int32[mask_batch=2, ceil(q_len/128)=3]"),
    )
    yield (
        forward,
        {"q_order_192": Array(I32, (2, 3))},
        ("q_order_192 is int32[2, 3], expected int32[mask_batch=2, ceil(q_len/192)=2]"),
    )
    out = "D[batch=2, q_len=300, heads=6, v_dim=V]"
    sums = "float32[batch=2, heads=6, q_len=300]"
    bad = Array("D", (2, 300, 6, 1))
    yield forward, {"out": bad}, f"out is D[2, 300, 6, 1], expected {out}"
    bad = Array("bool", (2, 6, 300))
    yield forward, {"lse": bad}, f"lse is bool[2, 6, 300], expected {sums}"

    bad = Array(I32, (2,))
    yield forward, {"counter": bad}, "counter is int32[2], expected int32[words=1]"

    # The backward shares the forward's checks of query, key, value and mask: one of each suffices.
    yield (
        backward,
        {"key": Array("D", (2, 700, 4, "QK"))},
        ("query has 6 heads, expected a multiple of the 4 heads of key and value"),
    )
    yield backward, {"kv_end": Array(I32, (2, 1))}, f"kv_end is int32[2, 1], expected {rows}"
    yield (
        backward,
        {"kv_blocks": Array(I32, (2, 5, 11))},
        (
            "kv_blocks is int32[2, 5, 11], expected "
            "int32[mask_batch=2, bounds=4, ceil(kv_len/64)=11]"
        ),
    )
    yield (
        backward,
        {"kv_order": Array(I32, (1, 6))},
        ("kv_order is int32[1, 6], expected int32[mask_batch=2, ceil(kv_len/128)=6]"),
    )
    for name in ("sm90", "", "portable "):
        yield (
            backward,
            {"algorithm": ("string", name)},
            f'attribute algorithm is "{name}", expected "portable", "sm90_separate" or '
            '"sm90_fused"',
        )
    yield backward, {"needs_grad": (I32, 4)}, "attribute needs_grad is 4, expected 0 to 3"
    yield (
        backward,
        {"scale": ("float32", -0.5)},
        ("attribute scale is -0.5, expected a finite number above 0"),
    )
    for name in ("out", "dout"):
        bad = Array("D", (2, 300, 2, "V"))
        yield backward, {name: bad}, f"{name} is D[2, 300, 2, V], expected {out}"
    for name in ("lse", "dlse"):
        bad = Array("float32", (2, 300, 6))
        yield backward, {name: bad}, f"{name} is float32[2, 300, 6], expected {sums}"
    yield (
        backward,
        {"workspace": Array("float32", (2, 6, 320))},
        ("workspace is float32[2, 6, 320], expected 1 axes (elements)"),
    )
    yield (
        backward,
        {"workspace": Array(I32, (3840,))},
        ("workspace is int32[3840], expected float32[elements=3840]"),
    )
    bad = Array("float32", (2, 300, 6, "QK"))
    yield (
        backward,
        {"dq": bad},
        ("dq is float32[2, 300, 6, QK], expected D[batch=2, q_len=300, heads=6, qk_dim=QK]"),
    )
    bad = Array("D", (2, 700, 6, "QK"))  # expanded to the query's heads
    yield (
        backward,
        {"dk": bad},
        ("dk is D[2, 700, 6, QK], expected D[batch=2, kv_len=700, kv_heads=2, qk_dim=QK]"),
    )
    bad = Array("D", (2, 700, 6, "V"))
    yield (
        backward,
        {"dv": bad},
        ("dv is D[2, 700, 6, V], expected D[batch=2, kv_len=700, kv_heads=2, v_dim=V]"),
    )

    yield (
        documents,
        {"q_ids": Array(I32, (300,))},
        ("q_ids is int32[300], expected 2 axes (mask_batch, q_len)"),
    )
    yield (
        documents,
        {"kv_ids": Array(I32, (1, 2, 700))},
        ("kv_ids is int32[1, 2, 700], expected 2 axes (mask_batch, kv_len)"),
    )
    yield (
        documents,
        {"q_ids": Array(I32, (1 << 31, 300))},
        ("mask_batch (q_ids axis 0) is 2147483648, expected 0 to 2147483647"),
    )
    yield (
        documents,
        {"q_ids": Array(I32, (2, 0))},
        (f"q_len (q_ids axis 1) is 0, expected 1 to {at_most}"),
    )
    yield (
        documents,
        {"kv_ids": Array(I32, (2, (1 << 27) + 1))},
        ("kv_len (kv_ids axis 1) is 134217729, expected 1 to 134217728"),
    )
    yield (
        documents,
        {"compare_positions": (I32, 3)},
        ("attribute compare_positions is 3, expected 0 to 2"),
    )
    yield (
        documents,
        {"compare_positions": (I32, 2)},
        f"q_pos is int32[2, 300], expected {I32}[mask_batch=2, limits=2, q_len=300]",
    )
    bad = Array("uint32", (2, 300))
    yield documents, {"q_ids": bad}, f"q_ids is uint32[2, 300], expected {rows}"
    yield documents, {"kv_ids": Array("int8", (2, 700))}, f"kv_ids is int8[2, 700], expected {keys}"
    for name in ("q_pos", "lo", "hi", "segment_checked"):
        bad = Array("int16", (2, 300))
        yield documents, {name: bad}, f"{name} is int16[2, 300], expected {rows}"
    bad = Array("complex64", (2, 700))
    yield documents, {"kv_pos": bad}, f"kv_pos is XLA type 15[2, 700], expected {keys}"
    words = 5 * 2048 + 700 + 1
    yield (
        documents,
        {"workspace": Array(I32, (2, words - 1))},
        (f"workspace is int32[2, {words - 1}], expected int32[mask_batch=2, words={words}]"),
    )

    yield (
        blocks,
        {"kv_start": Array(I32, ())},
        "kv_start is int32[], expected 2 axes (mask_batch, q_len)",
    )
    yield (
        blocks,
        {"kv_start": Array(I32, (-1, 300))},
        ("mask_batch (kv_start axis 0) is -1, expected 0 to 2147483647"),
    )
    yield (
        blocks,
        {"kv_start": Array(I32, (2, long))},
        (f"q_len (kv_start axis 1) is {long}, expected 1 to {at_most}"),
    )
    yield (
        blocks,
        {"kv_len": ("int64", 1 << 40)},
        (f"attribute kv_len is {1 << 40}, expected 1 to {at_most}"),
    )
    for name in ("kv_start", "kv_end", "segment_checked"):
        bad = Array("bool", (2, 300))
        yield blocks, {name: bad}, f"{name} is bool[2, 300], expected {rows}"
    yield (
        blocks,
        {"q_blocks": Array(I32, (2, 5, 4))},
        ("q_blocks is int32[2, 5, 4], expected int32[mask_batch=2, bounds=5, ceil(q_len/64)=5]"),
    )
    yield (
        blocks,
        {"kv_blocks": Array(I32, (2, 4, 10))},
        (
            "kv_blocks is int32[2, 4, 10], expected "
            "int32[mask_batch=2, bounds=4, ceil(kv_len/64)=11]"
        ),
    )
    yield (
        blocks,
        {"q_order": Array(I32, (2, 5))},
        ("q_order is int32[2, 5], expected int32[mask_batch=2, ceil(q_len/128)=3]"),
    )
    yield (
        blocks,
        {"q_order_192": Array(I32, (1, 2))},
        ("q_order_192 is int32[1, 2], expected int32[mask_batch=2, ceil(q_len/192)=2]"),
    )
    yield (
        blocks,
        {"kv_order": Array(I32, (2, 5))},
        ("kv_order is int32[2, 5], expected int32[mask_batch=2, ceil(kv_len/128)=6]"),
    )


@pytest.mark.parametrize(
    ("make", "changes", "text"),
    [
        pytest.param(*r, id=f"{r[0].__name__}-{'-'.join(r[1])}-{i}")
        for i, r in enumerate(refusals())
    ],
)
def test_refusal(shared_machine, make, changes, text):
    check_refusal(shared_machine, make, changes, text)


def test_wrong_number_of_operands(shared_machine):
    call = forward(shared_machine)
    call.operands.popitem()
    failure = shared_machine.run(call)
    assert failure.code == "InvalidArgument"
    assert "Wrong number of arguments: expected 22 but got 21" in failure.message
