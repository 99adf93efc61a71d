"""Block masks on Hopper: sm90/block_lists.py with numpy in place of Gluon, and its assembly
instruction by instruction for a warp group, because Gluon has no interpreter.

Guards against a bit of another row or key, a shift that is wrong for some block size, a word or
list entry that is read out of bounds, and a list of another head or tile.
"""

import collections
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax._src.ops import block_lists as lists
from paths import KERNEL_DIR
from ptx_warp import Warp

pytest.importorskip("triton")
sys.path.insert(0, str(KERNEL_DIR))

from sm90 import args, block_lists
from tiers import some

BlockMask, HeadMask = (
    collections.namedtuple(x.__name__, x.__aggregate_fields__)
    for x in (args.BlockMask, args.HeadMask)
)

THREADS = 128  # in a warp group
TID = np.arange(THREADS, dtype=np.uint64)
# The two rows of the accumulator's 64 that each thread has.
PLACES = [16 * (TID // 32) + TID % 32 // 4 + 8 * i for i in (0, 1)]


class Tensor(np.ndarray):
    """A number or tensor in a kernel."""

    type = None

    def to(self, _):
        return self


def tensor(x):
    return np.asarray(x, np.int64).view(Tensor)


class Pointer:
    """A pointer to int32; only elements in [low, high) may be read."""

    def __init__(self, memory, at=0, bounds=None):
        self.memory, self.at = memory, tensor(at)
        self.bounds = bounds or (0, memory.size)

    def __add__(self, more):
        return Pointer(self.memory, self.at + more, self.bounds)

    def read(self):
        low, high = self.bounds
        assert (self.at >= low).all() and (self.at < high).all(), "a read past the end"
        return tensor(self.memory[self.at])


def inline_asm(text, constraints, arguments, *_, **__):
    """Results by thread, (registers, THREADS). A tensor of 64 rows takes two registers, a scalar
    one."""
    kinds = constraints.split(",")
    outputs = sum(kind.startswith("=") for kind in kinds)
    registers, pointer = [], None
    for x in arguments:
        if isinstance(x, Pointer):
            pointer, x = x, 4 * x.at
        x = np.asarray(x, np.int64).astype(np.uint64)
        registers += [x[place] for place in PLACES] if x.shape else [np.full(THREADS, x)]
    assert len(registers) == len(kinds) - outputs
    values = {f"${outputs + i}": x for i, x in enumerate(registers)}
    for (name, x), kind in zip(values.items(), kinds[outputs:], strict=True):
        values[name] = x.astype(np.uint32) if kind == "r" else x

    def words(address):
        assert (address % 4 == 0).all()
        return Pointer(pointer.memory, address // 4, pointer.bounds).read().astype(np.uint32)

    warps = Warp(threads=THREADS, memory=words)
    values = warps.run(str(text), values | {"%tid.x": TID})
    results = np.stack([values[f"${i}"] for i in range(outputs)])
    return tensor(results[0][0]) if len(results) == 1 else results


@pytest.fixture(autouse=True)
def gluon(monkeypatch):
    """Makes the functions of sm90/block_lists.py plain Python."""
    language = SimpleNamespace(
        int32=None, int64=None, where=lambda c, a, b: tensor(np.where(c, a, b)),
        minimum=lambda a, b: tensor(np.minimum(a, b)), load=Pointer.read, inline_asm=inline_asm,
    )  # fmt: skip
    monkeypatch.setattr(block_lists, "gl", language)
    monkeypatch.setattr(block_lists, "HeadMask", HeadMask)
    for name, value in vars(block_lists).items():
        if not name.endswith("_asm") and hasattr(value, "fn"):
            monkeypatch.setattr(block_lists, name, value.fn)


def columns_of(thread_bits):
    """The bits of two registers per thread as (64, 64): rows and columns of the accumulator."""
    found = np.zeros((64, 64), bool)
    for place, bits in zip(PLACES, thread_bits, strict=True):
        for octet in range(8):
            for j in (0, 1):
                column = 8 * octet + 2 * (TID % 4) + j
                found[place, column] = bits >> np.uint64(2 * octet + j) & np.uint64(1)
    return found


Q_LEN, KV_LEN, BATCH, HEADS = 270, 331, 2, 3


def mapped(size, heads=HEADS, batch=BATCH, q_len=Q_LEN, kv_len=KV_LEN, seed=None):
    """A block mask, its words, and the kernels' BlockMask without lists."""
    shape = batch, heads, -(-q_len // size[0]), -(-kv_len // size[1])
    chosen = np.random.default_rng(seed).random(shape) < 0.5
    words = np.asarray(lists.packed(jnp.asarray(chosen)))
    return chosen, words, BlockMask(Pointer(words.reshape(-1)), None, batch, heads, *size)


def lengths(q_len=Q_LEN, kv_len=KV_LEN):
    return SimpleNamespace(q_len=tensor(q_len), kv_len=tensor(kv_len))


def words_of(blocks, words, b, head, **sizes):
    """mask_of_head, restricted so that only the words of this head may be read."""
    found = block_lists.mask_of_head(blocks, lengths(**sizes), tensor(b), tensor(head))
    size = words[b % len(words), head % words.shape[1]].size
    first = (b % len(words) * words.shape[1] + head % words.shape[1]) * size
    assert found.words.at == first and found.width == words.shape[3]
    bounded = Pointer(found.words.memory, found.words.at, (first, first + size))
    return found._replace(words=bounded)


def brute(chosen, size, b, head, first_row, first_key):
    """The (64, 64) bits of these rows and keys, and which of them are in bounds."""
    rows, keys = first_row + np.arange(64), first_key + np.arange(64)
    in_bounds = (rows < Q_LEN)[:, None] & (keys < KV_LEN)
    at = np.minimum(rows, Q_LEN - 1) // size[0], np.minimum(keys, KV_LEN - 1) // size[1]
    of_head = chosen[b % len(chosen), head % chosen.shape[1]]
    return of_head[np.ix_(*at)], in_bounds


SHIFTS = range(13)


@pytest.mark.parametrize("q_shift", some(SHIFTS, 6))
def test_bits(q_shift):
    """bits_of_keys and bits_of_rows, for every block size and block of 64; the last blocks are
    partial."""
    for kv_shift in SHIFTS:
        size = 1 << q_shift, 1 << kv_shift
        chosen, words, blocks = mapped(size)
        b, head = kv_shift % BATCH, (q_shift + kv_shift) % HEADS
        head_mask = words_of(blocks, words, b, head)
        for i in range(6):  # every block of rows and of keys, paired differently for each size
            first_row, first_key = (i + q_shift + kv_shift) % 5 * 64, i * 64
            want, in_bounds = brute(chosen, size, b, head, first_row, first_key)
            rows = tensor(first_row + np.arange(64))
            got = block_lists.bits_of_keys(head_mask, rows, tensor(first_key), tensor(Q_LEN))
            np.testing.assert_array_equal(columns_of(got)[in_bounds], want[in_bounds], str(size))
            keys = tensor(first_key + np.arange(64))
            got = block_lists.bits_of_rows(head_mask, keys, tensor(first_row), tensor(Q_LEN))
            np.testing.assert_array_equal(columns_of(got).T[in_bounds], want[in_bounds], str(size))


@pytest.mark.parametrize("first", [Q_LEN, 320])
def test_rows_past_the_end_read_nothing_else(first):
    """The second half of a tile of 128 rows may be out of bounds: its bits may be anything, but no
    read may pass the mask."""
    for size in ((1, 1), (2, 64), (64, 1), (512, 512)):
        _, words, blocks = mapped(size)
        for head in (0, HEADS - 1):
            head_mask = words_of(blocks, words, BATCH - 1, head)
            rows = tensor(first + np.arange(64))
            block_lists.bits_of_keys(head_mask, rows, tensor(0), tensor(Q_LEN))


@pytest.mark.parametrize("kv_len", [1, 31, 32, 33, 64, 95, 97, 130])
def test_keys_past_the_end_read_nothing_else(kv_len):
    """The second word of a step, and the words for the keys of a tile of 128."""
    for shift in (0, 1, 5, 6, 7):
        _, words, blocks = mapped((1, 1 << shift), kv_len=kv_len)
        head_mask = words_of(blocks, words, BATCH - 1, HEADS - 1, kv_len=kv_len)
        rows = tensor(Q_LEN - 64 + np.arange(64))  # nothing may be read after the last row
        for first in range(0, kv_len, 64):
            block_lists.bits_of_keys(head_mask, rows, tensor(first), tensor(Q_LEN))
        for first in range(0, -(-kv_len // 128) * 128, 64):
            keys = tensor(first + np.arange(64))
            block_lists.bits_of_rows(head_mask, keys, tensor(256), tensor(Q_LEN))


@pytest.mark.parametrize("heads,batch", [(1, 1), (1, 2), (3, 1)])
def test_block_masks_shared_by_heads_or_batch_rows(heads, batch):
    """Their words, and the lists of their heads."""
    chosen, words, blocks = mapped((4, 16), heads, batch)
    for b in range(BATCH):
        for head in range(HEADS):
            head_mask = words_of(blocks, words, b, head)
            want, _ = brute(chosen, (4, 16), b, head, 64, 128)
            rows = tensor(64 + np.arange(64))
            got = block_lists.bits_of_keys(head_mask, rows, tensor(128), tensor(Q_LEN))
            np.testing.assert_array_equal(columns_of(got), want)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 64, 4096, (1 << 30) - 1, 1 << 30, (1 << 31) - 1])
def test_shift(size):
    """The shift of a power of two; the handlers refuse other sizes."""
    assert block_lists.shift_of(tensor(size)) == size.bit_length() - 1


@pytest.mark.parametrize("heads", [1, HEADS])
def test_lists(heads):
    """The lists for a tile of rows, for a tile of keys and for the heads of a group are those that
    block_lists.py made for them."""
    chosen, _, blocks = mapped((16, 64), heads, q_len=700, kv_len=523)
    chosen[0, 0, :8] = False  # a tile of rows without blocks
    mask = packax.create_attention_mask(
        packax.masks.block_sparse(chosen, (16, 64)) & packax.causal(), q_len=700, kv_len=523
    )
    of_rows, of_keys = np.asarray(mask.q_block_lists), np.asarray(mask.kv_block_lists)
    rows, keys = (blocks._replace(lists=Pointer(x.reshape(-1))) for x in (of_rows, of_keys))
    scalars = lengths(700, 523)
    empty = 0
    for b in range(blocks.block_mask_batch):
        for head in range(3):
            for tile in range(6):
                listed, edges, core = block_lists.list_of_rows(
                    rows, scalars, tensor(b), tensor(head), tensor(128 * tile)
                )
                want = of_rows[b, head % heads, tile]
                none = want[:2].sum() == 0  # then the list has one block, which the mask empties
                empty += none
                assert (edges, core) == (max(want[0], none), want[1])
                for i in range(edges + core):
                    assert (listed + i).read() == want[2 + i] < 9
            for tile in range(5):
                at = SimpleNamespace(
                    mask_b=tensor(b), first_key=tensor(128 * tile), kv_head=tensor(0), group=3
                )
                listed, edges, core = block_lists.list_of_keys(keys, scalars, at, tensor(head))
                want = of_keys[b, head % heads, tile]
                assert (edges, core) == tuple(want[:2])
                for i in range(edges + core):
                    assert (listed + i).read() == want[2 + i] < 11
                total = block_lists.blocks_of_lists(keys, scalars, at)
                assert total == sum(of_keys[b, h % heads, tile, :2].sum() for h in range(3))
    assert empty
