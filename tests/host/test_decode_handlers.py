"""packax_decode_v1 with valid and invalid buffers: kernels, grids, arguments, the number of shares,
every error message.

Guards against arguments in the wrong order, more shares than fit in the workspace or the merging
kernel supports, and a launch after a failed check. Runs on a fake libcuda (tests/support/cpp):
needs the built extension and a C compiler.
"""

import struct
from math import ceil

import pytest
from cpp.call_frame import EXECUTE, INITIALIZE, Array
from cpp.calls import Sizes, decode
from cpp.launches import expect_launches
from cpp.machine import MULTIPROCESSORS, make_machine, needs_compiler, needs_extension
from cpp.refusals import check_refusal

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

AT_ONCE = 2 * MULTIPROCESSORS  # programs, as in csrc/launch/decode_shares.cc
I32, F32 = "int32", "float32"


def f32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def expect(
    machine, call, s, splits, dealt=0, *, pages=0, page_size=0, width=0, sink_batch=1, scale_rows=0
):
    """`splits`: the shares per sequence that must be chosen, or if `dealt` is not 0, the most per
    sequence when about `dealt` shares are dealt to all sequences."""
    group = s.heads // s.kv_heads
    kernel = "decode" if s.q_len * group <= 16 else "decode_tall"
    if scale_rows:
        v, pages_ = machine.variant, "_pages" if page_size else ""
        kernel = f"{kernel}_fp8{pages_}"
        if machine.ext.find(kernel, v["cc"], "e4m3", v["qk_dim"], v["v_dim"]) is None:
            kernel = f"decode_fp8{pages_}"  # most GPUs have no tall kernel
    dims = [call.operands[n].shape[3] for n in ("query", "value")]
    scalars = {
        **{n: f32(call.attributes[n][1]) for n in ("scale", "soft_cap")},
        "has_sinks": int(call.operands["sinks"].shape != (0,)),
        "batch": s.batch,
        "sink_batch": sink_batch,
        "q_len": s.q_len,
        "kv_len": page_size * width or s.kv_len,
        "pages": pages,
        "page_size": page_size,
        "table_width": width,
        "heads": s.heads,
        "kv_heads": s.kv_heads,
        "qk_eighths": dims[0] // 8,
        "v_eighths": dims[1] // 8,
        "splits": splits,
        "shares": dealt,
        "scale_rows": scale_rows,
        "bfloat16_query": int(call.operands["query"].dtype == "bfloat16"),
    }
    places = dealt + s.batch if dealt else s.batch * splits
    grids = {
        kernel: lambda m: [ceil(s.q_len * group / m) * s.kv_heads * places],
        "decode_combine": lambda _: [s.batch * s.q_len * s.heads],
    }
    expect_launches(machine, call, scalars, grids)


SHARES = [
    # sizes, splits, dealt: at least 128 keys a share, and programs that fill whole waves
    (Sizes(1, 1, 1, 100, 8, 2), 1, 0),
    (Sizes(1, 1, 1, 700, 8, 2), 6, 0),
    (Sizes(1, 1, 1, 1 << 17, 8, 2), AT_ONCE // 2, 0),
    (Sizes(1, 1, 1, 1 << 17, 8, 8), 5, 0),  # 40 programs, two waves; 2 shares fill 4/5 of one
    (Sizes(19, 19, 1, 4096, 1, 1), 32, 19),  # dealt: one long sequence may get up to 32
    (Sizes(64, 64, 1, 1 << 14, 8, 8), 64, 64),  # 26 waves
    (Sizes(65, 65, 1, 1 << 14, 8, 8), 3, 0),  # too many to be dealt; 20 / 8 shares fill the GPU
    (Sizes(2, 2, 1, 2560, 8, 2), 20, 10),
    (Sizes(2, 2, 1, 2559, 8, 2), 5, 0),  # too short to be dealt
    (Sizes(20, 20, 16, 1 << 14, 8, 1), 1, 0),  # two waves; partial sums of 128 rows cost more
    (Sizes(20, 20, 16, 1 << 15, 8, 1), 64, 20),
    (Sizes(1, 1, 16, 1 << 14, 8, 1), AT_ONCE // 2, 0),
]


@pytest.mark.parametrize("s,splits,dealt", SHARES, ids=str)
def test_shares(machine, s, splits, dealt):
    call = decode(machine, s, scale=-0.375, soft_cap=30.0)
    expect(machine, call, s, splits, dealt)
    assert machine.run(call, INITIALIZE) is None and len(machine.launches()) == 2


@pytest.mark.parametrize("room,splits,dealt", [(1, 1, 0), (2, 2, 4), (9, 9, 10)])
def test_dealt_shares_have_room(machine, room, splits, dealt):
    """No sequence gets more shares than fit in the workspace, whatever the lengths are."""
    s = Sizes(2, 2, 1, 1 << 17, 8, 2)
    expect(machine, decode(machine, s, room=room), s, splits, dealt)


@pytest.mark.parametrize("room,splits", [(1, 1), (7, 7), (64, 10)])
def test_no_more_shares_than_the_workspace_has_room_for(machine, room, splits):
    s = Sizes(1, 1, 1, 1 << 17, 8, 2)
    expect(machine, decode(machine, s, room=room), s, splits)


def test_no_more_shares_than_are_merged(machine):
    """The `block` of decode_combine is the most shares that it merges."""
    machine.cuda.fake_set_multiprocessors(100)
    s = Sizes(1, 1, 1, 1 << 29, 1, 1)
    expect(machine, decode(machine, s, room=1000), s, 128)
    assert machine.row("decode_combine", machine.variant["cc"])["block"] == 128


@pytest.mark.parametrize("sink_batch", (0, 1, 3))
def test_pages_and_sinks(machine, sink_batch):
    s = Sizes(3, 3, 4, 1000, 6, 2)
    call = decode(machine, s, page_size=48, sink_batch=sink_batch)
    layout = {"pages": 99, "page_size": 48, "width": 21}
    expect(machine, call, s, 3, **layout, sink_batch=max(sink_batch, 1))


@pytest.fixture
def machine_of_fp8(tmp_path, driver):
    def serves(m):
        v = m.variant
        return m.ext.find("decode_fp8", v["cc"], "e4m3", v["qk_dim"], v["v_dim"]) is not None

    return make_machine(tmp_path, driver, choose=serves)


@pytest.mark.parametrize("q_len", [2, 16])
@pytest.mark.parametrize("page_size,rows", [(0, 1), (0, 3), (48, 1), (48, 99)])
def test_a_cache_in_fp8(machine_of_fp8, page_size, rows, q_len):
    """Scales for all keys, per sequence, or per page; queries in both dtypes."""
    s = Sizes(3, 3, q_len, 1000, 6, 2)
    layout = {"pages": 99, "page_size": 48, "width": 21} if page_size else {}
    for dtype in ("bfloat16", "float16"):
        m = machine_of_fp8
        v = m.variant
        short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        m.cuda.fake_clear()
        m.variant = v | {"dtype": short}
        call = decode(m, s, page_size=page_size, scale_rows=rows, dtype=dtype)
        tall = m.ext.find("decode_tall_fp8", v["cc"], "e4m3", v["qk_dim"], v["v_dim"])
        tile = next((r["block"] for r in m.ext.variants() if r["name"] == tall), 16)
        tiles = -(-3 * q_len // tile) if q_len == 16 else 1
        # 18 programs with 3 tiles or 1, 60 with 2: these keep 10 multiprocessors busy enough.
        splits = {1: 3, 2: 5, 3: 1}[tiles]
        expect(m, call, s, splits, **layout, scale_rows=rows)


@pytest.mark.parametrize(
    "options,text",
    [
        (
            {"dtype": "float32"},
            "no decode kernel for a query in float32 over key in float8_e4m3fn, only for bfloat16 "
            "and float16",
        ),
        (
            {"dims": (24, 64)},
            "no decode kernel for head dims 24x64 (query and key x value), which must be multiples "
            "of 16",
        ),
    ],
)
def test_what_no_kernel_takes_over_fp8(machine, options, text):
    for stage in (INITIALIZE, EXECUTE):
        failure = machine.run(decode(machine, scale_rows=1, **options), stage)
        assert failure.code == "Unimplemented"
        assert failure.message == f"packax_decode_v1: {text}"
    assert machine.launches() == []


def test_dims_in_between(tmp_path, driver):
    """The smallest compiled pair of head dims that covers both."""
    machine = make_machine(tmp_path, driver, choose=lambda m: m.variant["qk_dim"] == 128)
    small = machine.ext.find("decode", machine.variant["cc"], machine.variant["dtype"], 64, 64)
    for dims, room in (((72, 64), 128), ((8, 128), 128), ((64, 64), 64), ((8, 24), 64)):
        if room == 64 and small is None:
            continue
        machine.cuda.fake_clear()
        s = Sizes(1, 1, 1, 700, 4, 1)
        call = decode(machine, s, dims=dims)
        assert machine.run(call) is None
        launch, merge = machine.launches()
        dtype, cc = machine.variant["dtype"], machine.variant["cc"]
        for kernel, got in (("decode", launch), ("decode_combine", merge)):
            name = machine.ext.find(kernel, cc, dtype, room, room)
            row = next(r for r in machine.ext.variants() if r["name"] == name)
            assert got["shared"] == row["shared"] and got["kernel"] == kernel


@pytest.mark.parametrize("q_len", [2, 16])
@pytest.mark.parametrize("dims", [(512, 512), (8, 320)])
def test_dims_above_256(tmp_path, driver, dims, q_len):
    """There are no tall tiles for them: many rows take several of the small tiles."""

    def serves(m):
        return m.ext.find("decode", m.variant["cc"], m.variant["dtype"], 512, 512) is not None

    machine = make_machine(tmp_path, driver, choose=serves)
    s, v = Sizes(2, 2, q_len, 700, 6, 2), machine.variant
    call = decode(machine, s, dims=dims)
    assert machine.run(call, INITIALIZE) is None and machine.run(call) is None
    launches = machine.launches()
    assert [launch["kernel"] for launch in launches] == ["decode", "decode_combine"]
    rows = []
    for launch in launches:
        name = machine.ext.find(launch["kernel"], v["cc"], v["dtype"], 512, 512)
        rows += [r for r in machine.ext.variants() if r["name"] == name]
        assert launch["shared"] == rows[-1]["shared"]
    programs = ceil(q_len * 3 / rows[0]["block"]) * s.kv_heads * s.batch
    assert launches[0]["grid"][0] % programs == 0
    assert launches[1]["grid"] == [s.batch * q_len * s.heads, 1, 1]


@pytest.mark.parametrize(
    "q_len,exact,short,kernel",
    [
        *((2, exact, short, "decode") for exact, short in ((0, "tf32"), (1, "f32"))),
        (9, 0, "tf32", "decode"),  # TF32 has no tall tiles
        (9, 1, "f32", "decode_tall"),
    ],
)
def test_float32(machine, exact, short, q_len, kernel):
    """Kernels of the requested precision for the smallest head dims that cover the call's. Merging
    has no matrix products, so its kernel serves both."""
    asked, cc = (56, 24), machine.variant["cc"]
    pairs = {(v["qk_dim"], v["v_dim"]) for v in machine.ext.variants() if v["dtype"] == short}
    pairs = sorted(pair for pair in pairs if pair[0] >= asked[0] and pair[1] >= asked[1])
    if not pairs:
        pytest.skip("this build has no such kernel")
    s = Sizes(2, 2, q_len, 700, 6, 2)
    call = decode(machine, s, dims=asked, dtype="float32", float32=exact, page_size=16)
    assert machine.run(call, INITIALIZE) is None and machine.run(call) is None
    launches = machine.launches()
    assert [launch["kernel"] for launch in launches] == [kernel, "decode_combine"]
    rows = []
    for launch, kind in zip(launches, (short, "f32"), strict=True):
        name = machine.ext.find(launch["kernel"], cc, kind, *pairs[0], 12040)
        rows += [r for r in machine.ext.variants() if r["name"] == name]
        assert launch["shared"] == rows[-1]["shared"], launch
    programs = ceil(q_len * 3 / rows[0]["block"]) * s.kv_heads * s.batch
    assert launches[0]["grid"] == [programs * 5, 1, 1]  # 4 programs fill one wave, 8 two
    assert launches[1]["grid"] == [s.batch * q_len * s.heads, 1, 1]


@pytest.mark.parametrize(
    "dims,text",
    [
        ((60, 64), "head dims 60x64 (query and key x value), which must be multiples of 8"),
        ((64, 7), "head dims 64x7 (query and key x value), which must be multiples of 8"),
    ],
)
def test_dims_that_no_kernel_has(machine, dims, text):
    for stage in (INITIALIZE, EXECUTE):
        failure = machine.run(decode(machine, dims=dims), stage)
        assert failure.code == "Unimplemented"
        assert failure.message == f"packax_decode_v1: no decode kernel for {text}"
    failure = machine.run(decode(machine, dims=(520, 8)))
    assert failure.code == "Unimplemented"
    assert "head dims 520x8 (query and key x value); this build has it for" in failure.message
    assert machine.launches() == []


def test_empty_batch_launches_nothing(machine):
    call = decode(machine, Sizes(0, 0, 1))
    assert machine.run(call, INITIALIZE) is None and machine.run(call) is None
    assert machine.calls("cuLibraryLoadData") == machine.calls("cuLaunchKernel") == 0


def refusals():
    """As in test_refusals.py; the sizes are those of decode()."""
    paged = {"page_size": 16}
    flag = "float32_products"
    yield {}, {flag: (I32, 2)}, f"attribute {flag} is 2, expected 0 to 1"
    yield (
        {},
        {"query": Array("D", (2, 6, "QK"))},
        "query is D[2, 6, QK], expected 4 axes (batch, q_len, heads, qk_dim)",
    )
    yield (
        {},
        {"key": Array("D", ())},
        "key is D[], expected 4 axes (batch, kv_len, kv_heads, qk_dim)",
    )
    yield (
        {},
        {"value": Array("D", (1,))},
        "value is D[1], expected 4 axes (batch, kv_len, kv_heads, v_dim)",
    )
    yield (
        paged,
        {"key": Array("D", (1,))},
        "key is D[1], expected 4 axes (pages, page_size, kv_heads, qk_dim)",
    )
    yield (
        paged,
        {"value": Array("D", (1,))},
        "value is D[1], expected 4 axes (pages, page_size, kv_heads, v_dim)",
    )
    yield (
        {},
        {"query": Array("float64", (2, 2, 6, "QK"))},
        "query is float64, expected bfloat16, float16 or float32",
    )
    yield (
        {},
        {"query": Array("D", (2, 17, 6, "QK"))},
        "q_len (query axis 1) is 17, expected 1 to 16",
    )
    yield (
        {},
        {"query": Array("D", (2, 2, 0, "QK"))},
        "heads (query axis 2) is 0, expected 1 to 65536",
    )
    yield (
        {},
        {"query": Array("D", (2, 2, 65536, 512))},
        "heads * head dim is 65536 * 512 = 33554432, expected at most 11184810",
    )
    yield (
        {},
        {"query": Array("D", (1 << 31, 2, 6, "QK"))},
        "batch (query axis 0) is 2147483648, expected 0 to 2147483647",
    )
    yield (
        {},
        {"key": Array("D", (2, 0, 2, "QK"))},
        "kv_len (key axis 1) is 0, expected 1 to 536870912",
    )
    yield (
        {},
        {"key": Array("D", (2, 700, 4, "QK"))},
        "query has 6 heads, expected a multiple of the 4 heads of key and value",
    )
    yield (
        {},
        {"key": Array("D", (3, 700, 2, "QK"))},
        "key is D[3, 700, 2, QK], expected D[batch=2, kv_len=700, kv_heads=2, qk_dim=QK]",
    )
    yield (
        {},
        {"value": Array("D", (2, 701, 2, "V"))},
        "value is D[2, 701, 2, V], expected D[batch=2, kv_len=700, kv_heads=2, v_dim=V]",
    )
    yield (
        paged,
        {"value": Array("D", (99, 17, 2, "V"))},
        "value is D[99, 17, 2, V], expected D[pages=99, page_size=16, kv_heads=2, v_dim=V]",
    )
    yield (
        paged,
        {"block_table": Array(I32, (44,))},
        "block_table is int32[44], expected 2 axes (batch, table_width)",
    )
    yield (
        paged,
        {"block_table": Array(I32, (3, 44))},
        "block_table is int32[3, 44], expected int32[batch=2, table_width=44]",
    )
    yield (
        paged,
        {"block_table": Array("int64", (2, 44))},
        "block_table is int64[2, 44], expected int32[batch=2, table_width=44]",
    )
    yield (
        paged,
        {"block_table": Array(I32, (2, 0))},
        "table_width (block_table axis 1) is 0, expected 1 to 536870912",
    )
    yield (
        paged,
        {"block_table": Array(I32, (2, 1 << 26))},
        "table_width * page_size is 1073741824, expected 1 to 536870912",
    )
    yield (
        paged,
        {"key": Array("D", (0, 16, 2, "QK"))},
        "pages (key axis 0) is 0, expected 1 to 2147483647",
    )
    yield (
        {},
        {"kv_start": Array(I32, (2, 3))},
        "kv_start is int32[2, 3], expected int32[batch=2, q_len=2]",
    )
    yield (
        {},
        {"kv_end": Array(F32, (2, 2))},
        "kv_end is float32[2, 2], expected int32[batch=2, q_len=2]",
    )
    sinks = {"sink_batch": 2}
    yield (
        sinks,
        {"sinks": Array(F32, (6,))},
        "sinks is float32[6], expected 2 axes (1 or batch, heads)",
    )
    yield (
        sinks,
        {"sinks": Array(F32, (3, 6))},
        "sinks has 3 rows (axis 0), expected 1 or the batch, 2",
    )
    yield (
        sinks,
        {"sinks": Array(F32, (1, 5))},
        "sinks is float32[1, 5], expected float32[sink_batch=1, heads=6]",
    )
    yield (
        {},
        {"out": Array(F32, (2, 2, 6, "V"))},
        "out is float32[2, 2, 6, V], expected D[batch=2, q_len=2, heads=6, v_dim=V]",
    )
    yield (
        {},
        {"lse": Array(F32, (2, 2, 6))},
        "lse is float32[2, 2, 6], expected float32[batch=2, heads=6, q_len=2]",
    )
    yield (
        {},
        {"partial": Array(F32, (2, 2, 6, "V"))},
        "partial is float32[2, 2, 6, V], expected 5 axes (splits, batch, q_len, heads, v_dim)",
    )
    yield (
        {},
        {"partial": Array(F32, (0, 2, 2, 6, "V"))},
        "splits (partial axis 0) is 0, expected 1 to 2147483647",
    )
    yield (
        {},
        {"partial": Array(F32, (64, 2, 6, 2, "V"))},
        "partial is float32[64, 2, 6, 2, V], "
        "expected float32[splits=64, batch=2, q_len=2, heads=6, v_dim=V]",
    )
    yield (
        {},
        {"sums": Array(F32, (63, 2, 2, 6))},
        "sums is float32[63, 2, 2, 6], expected float32[splits=64, batch=2, q_len=2, heads=6]",
    )
    fp8 = {"scale_rows": 2}
    yield (
        fp8,
        {"value": Array("D", (2, 700, 2, "V"))},
        "value is D[2, 700, 2, V], expected float8_e4m3fn[batch=2, kv_len=700, kv_heads=2, "
        "v_dim=V]",
    )
    yield (
        fp8,
        {"key_scale": Array(F32, (2,))},
        "key_scale is float32[2], expected 2 axes (1 or batch, kv_heads)",
    )
    yield (
        fp8,
        {"key_scale": Array(F32, (3, 2))},
        "key_scale is float32[3, 2], expected float32[1 or batch=2, kv_heads=2]",
    )
    yield (
        fp8,
        {"value_scale": Array(F32, (1, 2))},
        "value_scale is float32[1, 2], expected float32[1 or batch=2, kv_heads=2]",
    )
    yield (
        paged | {"scale_rows": 99},
        {"value_scale": Array(F32, (2, 2))},
        "value_scale is float32[2, 2], expected float32[1 or pages=99, kv_heads=2]",
    )
    yield {}, {"scale": (F32, float("nan"))}, "attribute scale is nan, expected a finite number"
    yield (
        {},
        {"soft_cap": (F32, -1.0)},
        "attribute soft_cap is -1, expected a finite number, 0 for none",
    )
    yield (
        {},
        {"soft_cap": (F32, float("inf"))},
        "attribute soft_cap is inf, expected a finite number, 0 for none",
    )


@pytest.mark.parametrize("options,changes,text", list(refusals()))
def test_refusals(shared_machine, options, changes, text):
    check_refusal(shared_machine, lambda m: decode(m, **options), changes, text)
