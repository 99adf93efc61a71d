"""packax_decode_v1 and packax_ragged_v1 with valid and invalid buffers: kernels, grids, arguments,
the number of shares, every error message.

Guards against arguments in the wrong order, more shares than fit in the workspace or the merging
kernel supports, and a launch after a failed check. Runs on a fake libcuda (tests/support/cpp):
needs the built extension and a C compiler.
"""

import struct
from math import ceil

import pytest
from cpp.call_frame import INITIALIZE
from cpp.calls import Sizes, decode, ragged
from cpp.launches import expect_launches
from cpp.machine import MULTIPROCESSORS, make_machine, needs_compiler, needs_extension
from cpp.sm90 import maps_of

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

AT_ONCE = 2 * MULTIPROCESSORS  # programs, as in csrc/launch/decode_shares.cc


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
        **dict.fromkeys(("tile_rows", "has_tall", "chunks_elsewhere", "workspace"), 0),
        "room": call.results["partial"].shape[0],
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


@pytest.mark.parametrize("tile_rows", [1, 16])
@pytest.mark.parametrize("fp8", [False, True])
def test_packed_rows(request, fp8, tile_rows):
    """Items with more than 16 rows, and others, by two kernels if there is a tall one."""
    m = request.getfixturevalue("machine_of_fp8" if fp8 else "machine")
    expect_packed(m, Sizes(1, 1, 70, 700, 8, 2), tile_rows, fp8)


@pytest.fixture
def machine_of_chunks(tmp_path, driver):
    return make_machine(tmp_path, driver, choose=lambda m: m.has_kernels(["ragged_sm90"]))


@pytest.mark.parametrize("q_len", [300, 70])
@pytest.mark.parametrize("pages,sinks", [({}, 1), ({"page_size": 64}, 0), ({"page_size": 700}, 0)])
def test_packed_rows_with_chunks(machine_of_chunks, q_len, pages, sinks):
    """A persistent kernel computes the listed tiles of chunks; the kernel that merges shares takes
    turns at the other rows. A page that is the only one of its sequence may have any size."""
    s = Sizes(1, 1, q_len, 700, 8, 2)
    expect_packed(machine_of_chunks, s, 16, False, 7, chunks=True, sink_batch=sinks, **pages)


@pytest.mark.parametrize(
    "more",
    [{"page_size": 8}, {"page_size": 48}, {"soft_cap": 30.0}, {"scale": -0.125}, {"scale": 0.0}],
    ids=str,
)
def test_chunks_that_the_portable_kernels_compute(machine_of_chunks, more):
    expect_packed(machine_of_chunks, Sizes(1, 1, 300, 700, 8, 2), 16, False, 7, **more)


def expect_packed(m, s, tile_rows, fp8, chunk_tiles=0, chunks=False, page_size=16, **more):
    """`chunks`: whether the kernel for chunks runs."""
    v, q_len = m.variant, s.q_len
    suffix, dtype = ("_fp8_pages", "e4m3") if fp8 else ("", v["dtype"])
    call = ragged(
        m, s, tile_rows, chunk_tiles=chunk_tiles, page_size=page_size,
        scale_rows=99 if fp8 else 0, **more,
    )  # fmt: skip
    tall = m.ext.find(f"decode_tall{suffix}", v["cc"], dtype, v["qk_dim"], v["v_dim"])
    both = tile_rows == 16 and tall is not None
    dims = [call.operands[n].shape[3] for n in ("query", "value")]
    width = ceil(700 / page_size)
    sizes = {"batch": 1, "sink_batch": 1, "q_len": q_len, "kv_len": width * page_size}
    sizes |= {"pages": 99, "page_size": page_size, "table_width": width, "heads": 8}
    sizes |= {"kv_heads": 2, "splits": 0, "has_sinks": more.get("sink_batch", 0), "room": 40}
    sizes |= {"shares": 0, "tile_rows": tile_rows, "has_tall": int(both)}
    sizes |= {"qk_eighths": dims[0] // 8, "v_eighths": dims[1] // 8, "scale_rows": 99 * fp8}
    sizes |= {"scale": more.get("scale", 0.125), "soft_cap": more.get("soft_cap", 0.0)}
    sizes["chunks_elsewhere"] = int(chunks)
    sizes["workspace"] = call.addresses()["work"]
    sizes["bfloat16_query"] = int(call.operands["query"].dtype == "bfloat16")
    grids = {"ragged_sm90": lambda _: [MULTIPROCESSORS]} if chunks else {}
    if both:
        grids[f"decode_tall{suffix}"] = lambda m: [ceil(4 * tile_rows / m) * 2 * 40]
    small = 1 if both else ceil(4 * tile_rows / 16)
    tokens = min(q_len, 256) if chunks else q_len
    grids |= {f"decode{suffix}": lambda _: [small * 2 * 40]}
    grids |= {"decode_combine": lambda _: [tokens * 8]}
    values = dict.fromkeys(grids, sizes)
    if chunks:
        arrays = {**call.operands, **call.results}
        values["ragged_sm90"] = sizes | maps_of(m, "ragged_sm90", arrays)
    expect_launches(m, call, values, grids)
    cleared = [x["memset"] for x in m.record() if "memset" in x]
    assert cleared == ([[call.results["counter"].address, 0, 1]] if chunks else [])


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


def test_empty_batch_launches_nothing(machine):
    call = decode(machine, Sizes(0, 0, 1))
    assert machine.run(call, INITIALIZE) is None and machine.run(call) is None
    assert machine.calls("cuLibraryLoadData") == machine.calls("cuLaunchKernel") == 0
