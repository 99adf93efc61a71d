"""packax_decode_v1 and packax_ragged_v1: kernels, grids, every argument, the number of shares.

Guards against arguments in the wrong order, and more shares than fit in the workspace or the
merging kernel supports. Runs on a fake libcuda (tests/support/cpp): needs the built extension and a
C compiler.
"""

import itertools
from dataclasses import replace
from math import ceil

import pytest
from cpp.call_frame import INITIALIZE
from cpp.calls import Sizes, decode, ragged
from cpp.launches import expect, selected
from cpp.machine import make_machine, needs_compiler, needs_extension
from kernel_sets import MULTIPROCESSORS

pytest_plugins = ("cpp.fixtures",)
pytestmark = [needs_extension, needs_compiler]

AT_ONCE = 2 * MULTIPROCESSORS  # programs, as in csrc/launch/decode_shares.cc
TURNS = 256  # kTurns in csrc/launch/select_decode.cc


def check(machine, call, splits=0, dealt=0, chunks=False):
    """`splits`: the shares per sequence that must be chosen, or if `dealt` is not 0, the most per
    sequence when about `dealt` shares are dealt to all sequences. `chunks`: whether the kernel for
    chunks of packed rows runs."""
    x, results = call.operands, call.results
    batch, q_len, heads, qk_dim = x["query"].shape
    first, second, kv_heads, v_dim = x["value"].shape
    width = x["block_table"].shape[1] if x["block_table"].shape != (0,) else 0
    scale_rows = x["key_scale"].shape[0]
    group, tile_rows = heads // kv_heads, results["sums"].shape[1] if "work" in x else 0
    suffix = ("_fp8" + "_pages" * (width > 0)) if scale_rows else ""
    small, tall = f"decode{suffix}", f"decode_tall{suffix}"
    rows = (tile_rows or q_len) * group
    both = rows > 16 and machine.has(tall)  # most GPUs have no tall kernel for FP8
    values = {
        **{name: float(call.attributes[name][1]) for name in ("scale", "soft_cap")},
        "has_sinks": int(x["sinks"].shape != (0,)), "sink_batch": max(x["sinks"].shape[0], 1),
        "batch": batch, "q_len": q_len, "heads": heads, "kv_heads": kv_heads,
        "kv_len": second * width or second, "pages": first if width else 0,
        "page_size": second if width else 0, "table_width": width, "qk_eighths": qk_dim // 8,
        "v_eighths": v_dim // 8, "splits": splits, "shares": dealt, "tile_rows": tile_rows,
        "has_tall": int(both and tile_rows > 0), "chunks_elsewhere": int(chunks), "workspace": 0,
        "room": results["partial"].shape[0], "scale_rows": scale_rows,
        "bfloat16_query": int(x["query"].dtype == "bfloat16"),
    }  # fmt: skip
    places = dealt + batch if dealt else batch * splits
    grids = {tall if both else small: lambda m: [ceil(rows / m) * kv_heads * places]}
    tokens = q_len
    if tile_rows:
        values["workspace"] = x["work"].address
        by_tma = width == 1 or (second >= 16 and second.bit_count() == 1)
        large = width == 1 or second >= 64
        kind = ("_large_pages" if large else "") if by_tma else "_small_pages"
        chunk_kernel = f"ragged_sm90{kind}"
        grids = {chunk_kernel: lambda _: [MULTIPROCESSORS]} if chunks else {}
        if both:
            grids[tall] = lambda m: [ceil(rows / m) * kv_heads * places]
        tiles = 1 if both else ceil(rows / 16)
        grids[small] = lambda _: [tiles * kv_heads * places]
        places, tokens = values["room"], min(q_len, TURNS) if chunks else q_len
    grids["decode_combine"] = lambda _: [batch * tokens * heads]
    expect(machine, call, list(grids), values, grids)


@pytest.mark.parametrize(
    "s,splits,dealt",
    [  # at least 128 keys a share, and programs that fill whole waves
        (Sizes(1, 1, 1, 100, 8, 2), 1, 0),
        (Sizes(1, 1, 1, 700, 8, 2), 6, 0),
        (Sizes(1, 1, 1, 1 << 17, 8, 2), AT_ONCE // 2, 0),
        (Sizes(1, 1, 1, 1 << 17, 8, 8), 5, 0),  # two waves of 40; 2 shares fill 4/5 of one
        (Sizes(19, 19, 1, 4096, 1, 1), 32, 19),  # dealt: a long sequence may get up to 32
        (Sizes(64, 64, 1, 1 << 14, 8, 8), 64, 64),  # 26 waves
        (Sizes(65, 65, 1, 1 << 14, 8, 8), 3, 0),  # too many to be dealt; 20 / 8 fill the GPU
        (Sizes(2, 2, 1, 2560, 8, 2), 20, 10),
        (Sizes(2, 2, 1, 2559, 8, 2), 5, 0),  # too short to be dealt
        (Sizes(20, 20, 16, 1 << 14, 8, 1), 1, 0),  # partial sums of 128 rows cost more
        (Sizes(20, 20, 16, 1 << 15, 8, 1), 64, 20),
        (Sizes(1, 1, 16, 1 << 14, 8, 1), AT_ONCE // 2, 0),
    ],
    ids=str,
)
def test_shares(machine, s, splits, dealt):
    check(machine, decode(machine, s, scale=-0.375, soft_cap=30.0), splits, dealt)


@pytest.mark.parametrize(
    "batch,room,splits,dealt",
    [(2, 1, 1, 0), (2, 2, 2, 4), (2, 9, 9, 10), (1, 1, 1, 0), (1, 7, 7, 0), (1, 64, 10, 0)],
)
def test_no_more_shares_than_the_workspace_has_room_for(machine, batch, room, splits, dealt):
    s = Sizes(batch, batch, 1, 1 << 17, 8, 2)
    check(machine, decode(machine, s, room=room), splits, dealt)


def test_no_more_shares_than_are_merged(machine):
    """The `block` of decode_combine is the most shares that it merges."""
    machine.cuda.fake_set_multiprocessors(100)
    check(machine, decode(machine, Sizes(1, 1, 1, 1 << 29, 1, 1), room=1000), 128)
    assert machine.row("decode_combine")["block"] == 128


@pytest.mark.parametrize("sink_batch", (0, 1, 3))
def test_pages_and_sinks(machine, sink_batch):
    s = Sizes(3, 3, 4, 1000, 6, 2)
    check(machine, decode(machine, s, page_size=48, sink_batch=sink_batch), 3)


@pytest.fixture
def machine_of_fp8(tmp_path, driver):
    return make_machine(tmp_path, driver, choose=lambda m: m.has("decode_fp8"))


@pytest.mark.parametrize("tile_rows", [1, 16])
@pytest.mark.parametrize("fp8", [False, True])
def test_packed_rows(request, fp8, tile_rows):
    """Items with more than 16 rows, and others, by two kernels if there is a tall one."""
    m = request.getfixturevalue("machine_of_fp8" if fp8 else "machine")
    check(m, ragged(m, Sizes(1, 1, 70, 700, 8, 2), tile_rows, scale_rows=99 if fp8 else 0))


@pytest.mark.parametrize(
    "q_len,more,chunks",
    [
        *((q_len, more, True) for q_len in (300, 70) for more in (
            {"sink_batch": 1}, {"page_size": 32}, {"page_size": 64}, {"page_size": 700})),
        *((300, {"page_size": size}, True) for size in (1, 8, 15, 17, 48, 699)),
        *((300, more, False) for more in ({"soft_cap": 30.0}, {"scale": -0.125}, {"scale": 0.0})),
    ],
    ids=str,
)  # fmt: skip
def test_packed_rows_with_chunks(tmp_path, driver, q_len, more, chunks):
    """A persistent kernel computes the listed tiles of chunks, if it can; the kernel that merges
    shares takes turns at the other rows. Pages of 16, 32, 64 ... tokens, or one for each sequence,
    are read by TMA."""
    m = make_machine(tmp_path, driver, choose=lambda m: m.has("ragged_sm90"))
    call = ragged(m, Sizes(1, 1, q_len, 700, 8, 2), chunk_tiles=7, **more)
    check(m, call, chunks=chunks)


@pytest.mark.parametrize("q_len", [2, 16])
@pytest.mark.parametrize("page_size,rows", [(0, 1), (0, 3), (48, 1), (48, 99)])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_cache_in_fp8(machine_of_fp8, page_size, rows, q_len, dtype):
    """Scales for all keys, per sequence, or per page; queries in both dtypes."""
    m, s = machine_of_fp8, Sizes(3, 3, q_len, 1000, 6, 2)
    m.variant = m.variant | {"dtype": dtype}
    tall = "decode_tall_fp8_pages" if page_size else "decode_tall_fp8"
    tile = m.row(tall)["block"] if m.has(tall) else 16
    # 18 programs with 3 tiles or 1, 60 with 2: these keep 10 multiprocessors busy enough.
    splits = {1: 3, 2: 5, 3: 1}[ceil(3 * q_len / tile) if q_len == 16 else 1]
    check(m, decode(m, s, page_size=page_size, scale_rows=rows), splits)


@pytest.mark.parametrize(
    "dims,at,q_len,dtype,splits",
    [
        *((dims, (128, 128), 2, "bf16", 6) for dims in ((72, 64), (8, 128))),
        *((dims, (64, 64), 2, "bf16", 5) for dims in ((64, 64), (8, 24))),
        # no tall tiles above 256, nor in TF32: many rows take several of the small tiles
        *((dims, (512, 512), n, "bf16", s) for dims in ((512, 512), (8, 320))
            for n, s in ((2, 5), (16, 5))),
        # merging has no matrix products, so its kernel serves both precisions
        *(((56, 24), (64, 64), 2, dtype, 5) for dtype in ("tf32", "f32")),
        *(((56, 24), (64, 64), 9, dtype, 5) for dtype in ("tf32", "f32")),
    ],
    ids=str,
)  # fmt: skip
def test_the_smallest_head_dims_that_cover_the_calls(machine, dims, at, q_len, dtype, splits):
    m = replace(
        machine, variant=machine.variant | {"dtype": dtype, "qk_dim": at[0], "v_dim": at[1]}
    )
    if not m.has("decode"):
        pytest.skip("this build has no such kernel")
    s = Sizes(2 if at != (128, 128) else 1, 2, q_len, 700, 6, 2)
    more = {"dtype": "float32", "float32": int(dtype == "f32")} if "f32" in dtype else {}
    check(m, decode(m, s, dims=dims, **more), splits)


@pytest.mark.parametrize("cc", [80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
def test_the_kernels_of_each_gpu(cc):
    """In a full build. Blackwell has no tall tiles for FP8, and no GPU has them in TF32."""
    from packax import _ext

    call = {"batch": 3, "kv_len": 1000, "heads": 6, "kv_heads": 2, "qk_dim": 128, "v_dim": 128}
    kinds = [(dtype, False) for dtype in ("bf16", "f16", "f32", "tf32")]
    kinds += [("bf16", True), ("f16", True)]
    for (dtype, fp8), q_len, page in itertools.product(kinds, (2, 16), (0, 16)):
        no_tall = dtype == "tf32" or (fp8 and cc in (100, 103))
        name = "decode_tall" if q_len == 16 and not no_tall else "decode"
        name += ("_fp8" + "_pages" * (page > 0)) if fp8 else ""
        of = call | {"dtype": dtype, "fp8": fp8, "q_len": q_len, "page_size": page}
        found = selected(_ext, "decode", cc, of, 13000)
        assert [kernel for kernel, _ in found] == [name, "decode_combine"]
        merged = "f32" if dtype == "tf32" else dtype
        assert f"_{'e4m3' if fp8 else dtype}_128x128_" in found[0][1]
        assert f"_{merged}_128x128_" in found[1][1]


def test_empty_batch_launches_nothing(machine):
    call = decode(machine, Sizes(0, 0, 1))
    assert machine.run(call, INITIALIZE) is None and machine.run(call) is None
    assert machine.calls("cuLibraryLoadData") == machine.calls("cuLaunchKernel") == 0
