"""packax.segments: ids, positions, targets and cumulative lengths against their definitions."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax import segments


def of_lengths(lengths, length):
    """The definition: all tokens of a document have its number."""
    ids = [n for n, size in enumerate(lengths) for _ in range(size)]
    return np.array(ids + [-1] * (length - len(ids)), np.int32)


def random_ids(rng, shape=(3, 40)):
    """Runs of ids that may reappear, with padding anywhere."""
    ids = np.repeat(rng.integers(-1, 5, (shape[0], 20)), rng.integers(1, 4, 20), axis=1)
    return np.pad(ids, ((0, 0), (0, shape[1])), constant_values=-1)[:, : shape[1]].astype(np.int32)


def runs(rng, rows=3, length=40):
    """Ids that do not reappear."""
    ids = [segments.from_lengths(rng.integers(0, 9, 6), length=50) for _ in range(rows)]
    return np.where(rng.random((rows, 50)) < 0.1, -1, np.stack(ids))


def both(function, *arrays, **sizes):
    """The result for NumPy inputs, checked to equal that of JAX under jit; NumPy in, NumPy out."""
    ours = function(*arrays, **sizes)
    leaves = jax.tree.leaves(ours)
    assert all(isinstance(x, np.ndarray) for x in leaves)
    traced = jax.jit(lambda *x: function(*x, **sizes))(*map(jnp.asarray, arrays))
    for x, y in zip(leaves, jax.tree.leaves(traced), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    return ours


LENGTHS = np.array([[3, 0, 2, 0], [1, 1, 1, 5]])
NO_ROWS = np.zeros((0, 3), int)
POSITIONS = np.array([[0, 1, 2, 0, 1, 0, 0, 0], [5, 6, 0, 1, 2, 3, 0, 0]])
VALID = np.array([[1, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0, 0]])
ABSENT = np.array([[0, 3, 7, -1, -1], [0, -1, -1, -1, -1], [0, 2, 3, 5, 9]])  # as in cuDNN's calls
KNOWN = [  # a function, its arrays, the length, and the ids
    (segments.from_lengths, [LENGTHS], 9, [of_lengths(row, 9) for row in LENGTHS]),
    (segments.from_lengths, [LENGTHS[0]], 6, of_lengths(LENGTHS[0], 6)),
    (segments.from_lengths, [NO_ROWS], 9, np.zeros((0, 9))),
    (segments.from_lengths, [np.zeros((2, 0), int)], 3, [[-1] * 3] * 2),
    (segments.from_cu_seqlens, [NO_ROWS], 9, np.zeros((0, 9))),
    (segments.from_cu_seqlens, [np.array([0, 3, 3, 7, 7, 7])], 10, of_lengths([3, 0, 4], 10)),
    (segments.from_cu_seqlens, [ABSENT], 10,
     [of_lengths(x, 10) for x in ([3, 4], [0], [2, 1, 2, 4])]),
    (segments.from_attention_mask, [np.array([[0, 1, 1, 1], [1, 1, 0, 0]])], None,
     [[-1, 0, 0, 0], [0, 0, -1, -1]]),
    (segments.from_attention_mask, [np.array([[False, True, True]])], None, [[-1, 0, 0]]),
    (segments.from_one_based, [np.array([[1, 1, 2, 0]])], None, [[0, 0, 1, -1]]),
    (segments.from_positions, [POSITIONS], None,
     [[0, 0, 0, 1, 1, 2, 3, 4], [0, 0, 1, 1, 1, 1, 2, 3]]),
    (segments.from_positions, [POSITIONS, VALID], None,
     [[0, 0, 0, 1, 1, 2, -1, -1], [-1, 0, 1, 1, 1, 1, -1, -1]]),
]  # fmt: skip


def test_ids_from_what_other_projects_have():
    for function, arrays, length, wanted in KNOWN:
        ids = both(function, *arrays, **({} if length is None else {"length": length}))
        assert ids.dtype == np.int32
        np.testing.assert_array_equal(ids, wanted, err_msg=function.__name__)
    assert segments.from_lengths([3, 2]).tolist() == [0, 0, 0, 1, 1]
    assert segments.from_lengths(np.zeros(0, int)).shape == (0,)
    assert segments.from_lengths(NO_ROWS).shape == (0, 0)


def test_lengths_whose_sum_does_not_fit_int32():
    lengths = np.array([3, 2**31 - 1, 2**31 - 1, 2**30])
    with pytest.raises(ValueError, match="add up to 5368709121 tokens, but length is 5"):
        segments.from_lengths(lengths, length=5)
    ids = segments.from_lengths(jnp.asarray(lengths), length=5)
    assert ids.tolist() == [0, 0, 0, 1, 1]
    many = segments.from_lengths(jnp.full(1 << 17, 1 << 16), length=1 << 16)
    assert not many.any()


def test_from_positions_after_padding():
    """A new id at position 0 and at the first token of a row, which may continue a document."""
    rng = np.random.default_rng(0)
    positions, valid = rng.integers(0, 3, (200, 8)), rng.random((200, 8)) < 0.7
    expected = np.full((200, 8), -1)
    for row in range(200):
        document = -1
        for i in np.flatnonzero(valid[row]):
            document += positions[row, i] == 0 or document == -1
            expected[row, i] = document
    np.testing.assert_array_equal(both(segments.from_positions, positions, valid), expected)


def test_from_positions_of_numpy_with_a_traced_valid():
    """As in a step whose positions are known when tracing, but whose padding is not."""
    positions, valid = np.array([0, 1, 0, 0]), np.array([1, 1, 1, 0])
    ids = jax.jit(lambda valid: segments.from_positions(positions, valid))(valid)
    np.testing.assert_array_equal(ids, [0, 0, 1, -1])


def test_positions_count_the_tokens_of_a_document():
    ids = random_ids(np.random.default_rng(0))
    positions = both(segments.positions, ids)
    for row, places in zip(ids, positions, strict=True):
        for i, (document, place) in enumerate(zip(row, places, strict=True)):
            assert place == (0 if document == -1 else np.sum(row[:i] == document))
    np.testing.assert_array_equal(both(segments.positions, ids[0]), positions[0])


def test_next_tokens_do_not_cross_a_document():
    rng = np.random.default_rng(1)
    ids, tokens = random_ids(rng), rng.integers(1, 99, (3, 40))
    each = rng.random((3, 40)).astype(np.float32)
    targets, weights = both(segments.next_tokens, tokens, ids)
    assert (targets.dtype, weights.dtype) == (np.int32, np.float32)
    weighted = both(segments.next_tokens, tokens, ids, each).weights
    for row in range(3):
        for i in range(40):
            same = i + 1 < 40 and ids[row, i] == ids[row, i + 1] != -1
            assert targets[row, i] == (tokens[row, i + 1] if same else 0)
            assert weights[row, i] == same
            assert weighted[row, i] == (each[row, i + 1] if same else 0)
    each[:, 1:][weights[:, :-1] == 0] = np.nan
    np.testing.assert_array_equal(both(segments.next_tokens, tokens, ids, each).weights, weighted)
    assert segments.next_tokens([7], [0]).targets.tolist() == [0]
    assert segments.next_tokens(np.zeros((2, 0), int), np.zeros((2, 0), int)).targets.size == 0


def test_cu_seqlens_count_what_is_not_padding():
    for seed in range(5):
        ids = runs(np.random.default_rng(seed))
        offsets = segments.cu_seqlens(ids)
        kept = [(b, document) for b, row in enumerate(ids) for document in row if document != -1]
        assert offsets[0] == 0 and offsets[-1] == len(kept)
        for start, stop in itertools.pairwise(offsets):
            assert len(set(kept[start:stop])) == 1
        assert len(offsets) - 1 == len(set(kept))
        filled = both(segments.cu_seqlens, ids, max_documents=20)
        assert filled.shape == (21,) and filled.dtype == np.int32
        assert filled.tolist() == offsets.tolist() + [len(kept)] * (21 - len(offsets))
        few = jax.jit(segments.cu_seqlens, static_argnums=1)(jnp.asarray(ids), 2)
        assert few.tolist() == offsets[:3].tolist()


def first_fit(sizes, length):
    """The definition: the documents of each row, the longest placed first."""
    room, rows = [], {}
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        row = next((r for r, left in enumerate(room) if left >= sizes[n]), len(room))
        room[row:] = room[row:] or [length]
        room[row] -= sizes[n]
        rows.setdefault(row, []).append(n)
    return [rows[row] for row in range(len(room))]


def test_pack_is_first_fit_by_length():
    rng = np.random.default_rng(2)
    documents = [rng.integers(1, 99, n) for n in rng.integers(1, 30, 80)]
    packed = segments.pack(documents, 32, padding_token=7)
    expected = first_fit([len(x) for x in documents], 32)
    assert len(packed.tokens) == len(expected)
    for row, members in enumerate(expected):
        whole = np.concatenate([documents[n] for n in members])
        sizes = [len(documents[n]) for n in members]
        np.testing.assert_array_equal(packed.segment_ids[row], of_lengths(sizes, 32))
        assert packed.tokens[row].tolist() == whole.tolist() + [7] * (32 - len(whole))
    np.testing.assert_array_equal(packed.positions, segments.positions(packed.segment_ids))
    real = packed.source >= 0
    np.testing.assert_array_equal(
        packed.tokens[real], np.concatenate(documents)[packed.source[real]]
    )
    assert sorted(packed.source[real]) == list(range(sum(map(len, documents))))
    assert {x.dtype for x in packed[:3]} == {np.dtype(np.int32)}


def test_pack_cuts_what_is_longer_than_a_row():
    packed = segments.pack([np.arange(1, 11), [], [20]], 4)
    assert packed.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 20, 0]]
    assert packed.segment_ids.tolist() == [[0] * 4, [0] * 4, [0, 0, 1, -1]]
    assert packed.positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 0]]
    assert segments.pack([], 4).tokens.shape == (0, 4)


def test_numpy_starts_no_backend_of_jax():
    """Data loaders fork workers, in which jax would hang."""
    program = """
import multiprocessing
import numpy as np
import packax
from packax import masks, segments
from jax._src import xla_bridge

def work():
    packed = segments.pack([np.arange(5), np.arange(3)], 4)
    segments.next_tokens(packed.tokens, packed.segment_ids, np.ones((2, 4)))
    segments.cu_seqlens(segments.from_cu_seqlens(np.array([0, 2, 4])))
    segments.from_positions(packed.positions, packed.segment_ids >= 0)
    segments.positions(segments.from_one_based(np.array([1, 2, 0])))
    segments.positions(segments.from_lengths([2, 1], 4))
    segments.from_attention_mask(np.array([1, 0]))
    str(segments.check_packing(packed.segment_ids, packed.positions, packed.tokens))
    index = np.arange(512)
    ids = index // 200
    placed = packax.documents(ids, positions=index % 200)
    keys = packax.documents(ids, kv_segment_ids=np.where(index % 4, -1, ids))
    tree = masks.tree(np.minimum(ids, 1), [-1, 0])
    group = masks.shared_prefix(ids, index % 200 // 50 - 1)
    window, chunked = packax.sliding_window(9), packax.chunked(64)
    spans, ranges = masks.spans(ids), masks.ranges(index - 3, index)
    expressions = [
        *(packax.full(), packax.causal(), window & placed, chunked & packax.documents(ids)),
        *(packax.prefix(7), packax.causal() | spans, ranges, keys, packax.causal() & keys),
        *(tree, group & packax.causal(), tree & window & packax.documents(ids)),
        *(masks.block_sparse(np.ones((2, 4, 4), bool), 128), packax.causal(np.array([3, 5]))),
    ]
    for expression in expressions:
        repr(expression)
        assert isinstance(expression.as_array(512, 512), np.ndarray)
        for kind in ("balanced", "zigzag", "local"):
            plan = packax.context_plan(expression, ranks=2, kind=kind, length=512)
            moved = plan.permute(np.ones((2, 512)))
            arrays = (plan.order, plan.inverse, plan.index(), moved, plan.unpermute(moved))
            assert all(isinstance(x, np.ndarray) for x in arrays), (expression, kind)
            plan.traffic(2, 8), repr(plan)
    for expression in (tree, group):
        masks.tree_positions(expression), masks.path_predecessors(expression)

work()
assert not xla_bridge._backends, xla_bridge._backends
import jax
jax.numpy.ones(9).sum().block_until_ready()
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join(60)
alive = process.is_alive()
process.kill()
assert not alive and process.exitcode == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def good():
    packed = segments.pack([np.arange(1, 6), np.arange(1, 4), np.arange(1, 3)], 6)
    return packed, segments.next_tokens(packed.tokens, packed.segment_ids)


def problems(*args, **kwargs):
    return segments.check_packing(*args, **kwargs).problems


def test_a_good_batch_has_no_problem():
    packed, (targets, weights) = good()
    report = segments.check_packing(
        packed.segment_ids, packed.positions, targets, tokens=packed.tokens, weights=weights
    )
    assert report.problems == ()
    assert report.summary == "2 rows of 6 tokens: 3 documents (1 to 2 a row), 16.7 % padding"
    assert str(report).endswith("\nNo problem found.")
    ignored = np.where(weights > 0, targets, -100)
    assert problems(packed.segment_ids, None, ignored, tokens=packed.tokens) == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: problems([[1, 1, 2, 0]]), "rows end with id 0 .*from_one_based"),
        (lambda: problems([[1, 2, -100]]), "rows end with id -100"),
        (lambda: problems([[0, 1], [-1, -1]]), "1 row of padding alone: first row 1"),
        (lambda: problems([[0, 1, 0, 2]]), "reappear after others in 1 row: first row 0, id 0"),
        (lambda: problems([0, 0, 1, 1], [0, 1, 2, 3]),
         "1 document does not start at position 0: first row 0, token 2, position 2"),
        (lambda: problems([[0, 0, 1], [1, 1, 1]]), "padding on the left.*from_attention_mask"),
        (lambda: problems(segments.from_attention_mask(jnp.array([1, 1, 2, 2, 2, 0])),
                          [0, 1, 0, 1, 2, 0]),
         "start again at 0 inside documents, at 1 token: first row 0, token 2.*from_one_based"),
        (lambda: problems([0, 0, 0], [0, 2, 3]), "at 1 token: first row 0, token 1, position 2"),
        (lambda: problems([0, 0, 1, 1, -1], None, [2, 3, 4, -100, -1]),
         "1 target counts at the last token of a document.*first row 0, token 1"),
        (lambda: problems([0, 0, -1], None, [2, -100, 0]), "1 target counts at padding: .*token 2"),
        (lambda: problems([0] * 3, None, [3, 0, 0], tokens=[1, 2, 3], weights=[1, 1, 0]),
         "2 targets that count are not the next token: first row 0, token 0; .* shifted twice"),
        (lambda: problems([0] * 3, None, [1, 2, -1], tokens=[1, 2, 3]), "the tokens themselves"),
    ],
)  # fmt: skip
def test_what_check_packing_finds(call, message):
    (problem,) = call()
    assert re.search(message, problem), problem


def test_check_packing_refuses_tracers_and_other_shapes():
    with pytest.raises(ValueError, match="segment_ids is traced: check a batch outside of jit"):
        jax.jit(lambda ids: len(problems(ids)))(jnp.zeros((1, 4), jnp.int32))
    with pytest.raises(ValueError, match="targets must have the shape of segment_ids"):
        problems([0, 0], None, [0])


@pytest.mark.parametrize(
    "function,given,text",
    [
        (segments.from_attention_mask, [1, 1, 2, 2, 2, 0], "0 and 1, .* use from_one_based"),
        (segments.from_one_based, [0, 0, -1], "must be 0 for padding and positive elsewhere"),
    ],
)
def test_values_of_jax_arrays_under_debug_checks(function, given, text):
    function(jnp.array(given))  # values are read only under debug_checks
    with packax.context.debug_checks():
        with pytest.raises(ValueError, match=text):
            function(jnp.array(given))
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=text):
            jax.block_until_ready(jax.jit(function)(jnp.array(given)))
            jax.effects_barrier()
        function(jnp.array([1, 0]))


@pytest.mark.exhaustive
def test_symbolic_sizes():
    """One exported program for any number of rows, tokens and documents."""
    batch, length, number = jax.export.symbolic_shape("b, s, n")

    def exported(function, *shape):
        typed = jax.ShapeDtypeStruct(shape, jnp.int32)
        return jax.export.export(jax.jit(function), platforms=["cpu"])(typed).call

    lengths = np.array([[3, 0, 4], [2**31 - 1, 2**31 - 1, 2**31 - 1], [1, 9, 2]], np.int32)
    want = np.array([[0] * 3 + [2] * 4 + [-1] * 2, [0] * 9, [0] + [1] * 8])
    from_lengths = exported(lambda x: segments.from_lengths(x, 9), batch, number)
    np.testing.assert_array_equal(from_lengths(lengths), want)
    offsets = np.array([[0, 3, 3, 7], [0, 9, 9, 9], [0, 1, -1, 9]], np.int32)
    from_cu_seqlens = exported(lambda x: segments.from_cu_seqlens(x, 9), batch, number)
    want[2, 1:] = 2
    np.testing.assert_array_equal(from_cu_seqlens(offsets), want)
    ids = np.array([[0, 0, 1, -1], [0, -1, 3, 3]], np.int32)

    def of_tokens(ids):  # sizes from shapes
        length = ids.shape[1]
        counts = segments.cu_seqlens(ids, max_documents=2 * length)
        return (
            counts,
            segments.from_lengths([1, 1], length),
            segments.from_lengths(jnp.abs(ids)[:, 1:], length - 1),
            segments.from_cu_seqlens(counts, 2 * length),
            segments.positions(ids),
            segments.next_tokens(ids, ids),
            segments.from_positions(ids, ids >= 0),
            segments.cu_seqlens(np.zeros((2, 2), int), length),
        )

    got = exported(of_tokens, batch, length)(ids)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(of_tokens(ids)), strict=True):
        np.testing.assert_array_equal(x, y)
