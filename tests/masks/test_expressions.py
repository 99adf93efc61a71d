"""Mask expressions as Python values: equality, hashes, text, operators, trees with other leaves,
and exported programs that take one.

Guards against a recompilation for each equal expression, a cache that confuses two masks, a union
that stops being one range when its offsets are replaced, and errors that do not say what to do.
"""

import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from mask_checks import check
from tiers import some

IDS = np.array([[0, 0, 0, 1, 1, 1, -1, -1], [3, 3, 3, 3, 3, 3, 3, 3]], np.int32)
OFFSET = jnp.array([2, 5])

STATIC = {  # without arrays: each maker returns an equal expression
    "full": lambda: packax.full(),
    "causal": lambda: packax.causal(),
    "offset": lambda: packax.causal(3),
    "window": lambda: packax.sliding_window(4, 1),
    "chunked": lambda: packax.chunked(4),
    "prefix": lambda: packax.prefix(3),
    "and": lambda: packax.causal() & packax.chunked(4),
    "or": lambda: (packax.causal() & packax.chunked(4)) | packax.sliding_window(2),
    "or_of_offsets": lambda: packax.causal(3) | packax.sliding_window(2, offset=3),
}
WITH_ARRAYS = {
    "documents": lambda: packax.causal() & packax.documents(IDS, positions=IDS),
    "ranges": lambda: packax.masks.ranges(np.zeros(8, int), np.full(8, 5)),
    "offsets": lambda: packax.causal(OFFSET) | packax.sliding_window(2, offset=OFFSET),
    "prefixes": lambda: packax.prefix(np.abs(IDS)),
    "spans": lambda: packax.masks.spans(IDS, packax.sliding_window(2)) & packax.documents(IDS),
    "block_sparse": lambda: packax.masks.block_sparse(np.eye(4, dtype=bool)[None, None], 2),
}


def test_expressions_without_arrays_are_values():
    expressions = {name: make() for name, make in STATIC.items()}
    for name, make in STATIC.items():
        assert make() == expressions[name] and hash(make()) == hash(expressions[name])
        assert [other for other in expressions if expressions[other] == make()] == [name]
    assert packax.causal() != "causal()" and packax.causal(0) == packax.causal()


@pytest.mark.parametrize("name", WITH_ARRAYS)
def test_expressions_with_arrays_say_why_they_are_not_static(name):
    expression = WITH_ARRAYS[name]()
    assert expression == expression and expression != WITH_ARRAYS[name]()
    with pytest.raises(TypeError, match="holds arrays: it cannot be a static argument") as caught:
        hash(expression)
    assert repr(expression) in str(caught.value) and "ordinary argument" in str(caught.value)
    with pytest.raises(ValueError, match="Pass it as an ordinary argument"):
        jax.jit(lambda x: 0, static_argnums=0)(expression)


def test_equal_expressions_share_a_program():
    traces = []

    def dense(expression):
        traces.append(expression)
        return jnp.asarray(expression.as_array(8, 8))

    static = jax.jit(dense, static_argnums=0)
    for _ in range(2):
        for make in STATIC.values():
            np.testing.assert_array_equal(static(make()), make().as_array(8, 8))
    assert len(traces) == len(STATIC)
    # As an ordinary argument, a number is data: another offset uses the same program.
    traces.clear()
    traced = jax.jit(dense)
    for offset in (1, 3):
        expression = packax.causal(offset) | packax.sliding_window(2, offset=offset)
        np.testing.assert_array_equal(traced(expression), expression.as_array(8, 8))
    assert len(traces) == 1


@pytest.mark.parametrize(
    "expression,text",
    [
        (packax.causal() & packax.documents(np.zeros((2, 64), int)),
            "causal() & documents(int32[2, 64])"),
        (packax.documents([1], kv_segment_ids=[2, 3]),
            "documents(int32[1], kv_segment_ids=int32[2])"),
        (packax.documents([1], positions=[0], kv_positions=[0]),
            "documents(int32[1], positions=int32[1], kv_positions=int32[1])"),
        (packax.sliding_window(3), "sliding_window(3)"),
        (packax.sliding_window(None, 2, offset=OFFSET), "sliding_window(None, 2, offset=int32[2])"),
        ((packax.causal(3) | packax.prefix(2)) & packax.chunked(4),
            "(causal(offset=3) | prefix(2)) & chunked(4)"),
        (packax.causal() & packax.chunked(4) | packax.sliding_window(1),
            "causal() & chunked(4) | sliding_window(1)"),
        (packax.masks.spans(IDS[0]), "spans(int32[8])"),
        (packax.masks.spans(IDS, packax.sliding_window(2)),
         "spans(int32[2, 8], sliding_window(2))"),
        (packax.masks.ranges([0], [1]), "ranges(int32[1], int32[1])"),
        (packax.masks.block_sparse(np.ones((1, 2), bool), (3, 4)),
         "block_sparse(bool[1, 2], (3, 4))"),
        (packax.full(), "full()"),
    ],
)  # fmt: skip
def test_text(expression, text):
    assert repr(expression) == text


def test_text_of_trees_of_anything():
    expression = packax.causal(2) & packax.documents(IDS)
    shapes = jax.eval_shape(lambda: expression)
    assert repr(shapes) == "causal(offset=int32[]) & documents(int32[2, 8])"
    assert repr(jax.tree.map(lambda x: "x", expression)) == "causal(offset='x') & documents('x')"


def test_unions_keep_their_offsets_equal():
    """A tree may hold any leaves: a shared offset stays one leaf, and the mask keeps its
    meaning."""
    unions = {
        "arrays": packax.causal(OFFSET) & packax.chunked(4, offset=OFFSET)
        | packax.sliding_window(1, offset=OFFSET),
        "numbers": packax.chunked(4, offset=3) | packax.sliding_window(1, 1, offset=3),
        "equal numpy arrays": packax.chunked(4, offset=[3, 1])
        | packax.sliding_window(1, offset=np.array([3, 1], np.int16)),
        "nested": (packax.chunked(4, offset=OFFSET) | packax.sliding_window(1, offset=OFFSET))
        | (packax.chunked(3, offset=OFFSET) | packax.sliding_window(0, offset=OFFSET)),
    }
    for name, union in unions.items():
        assert len(jax.tree.leaves(union)) == 1, name
        leaves, structure = jax.tree.flatten(union)
        for step in (0, 1, -3):
            other = structure.unflatten([np.asarray(x + step, np.int32) for x in leaves])
            mask = packax.create_attention_mask(other, q_len=8, kv_len=8)
            check(mask, other)
        mask = jax.jit(lambda x: packax.create_attention_mask(x, q_len=8, kv_len=8))(union)
        check(mask, union)
    # A union of different offsets keeps them as separate leaves.
    both = packax.causal(7) | packax.causal(2)
    assert len(jax.tree.leaves(both)) == 2
    check(packax.create_attention_mask(both, q_len=8, kv_len=8), both)
    with pytest.raises(NotImplementedError, match="the same int32 array, not just equal ones"):
        short = OFFSET.astype(jnp.int16)
        packax.chunked(4, offset=short) | packax.sliding_window(1, offset=short)


@pytest.mark.parametrize(
    "name", some([*STATIC, *WITH_ARRAYS], *range(0, len(STATIC) + len(WITH_ARRAYS), 3))
)
def test_exported_programs_take_expressions(name):
    """Written and read back; the caller's arrays and numbers are data."""
    pytest.importorskip("flatbuffers")
    expression = {**STATIC, **WITH_ARRAYS}[name]()
    rng = np.random.default_rng(0)
    tensors = [rng.standard_normal((2, 8, heads, 8)).astype(np.float32) for heads in (2, 1, 1)]
    program = jax.jit(packax.flash_attention)
    written = jax.export.export(program)(*tensors, expression).serialize()
    got = jax.export.deserialize(written).call(*tensors, expression)
    np.testing.assert_allclose(got, program(*tensors, expression), rtol=1e-6, atol=1e-6)


def test_an_exported_program_in_another_process(tmp_path):
    """With symbolic lengths, which the expression takes from its arrays."""
    pytest.importorskip("flatbuffers")
    sizes = jax.export.symbolic_shape("b, s")
    ids = jax.ShapeDtypeStruct(sizes, jnp.int32)
    shapes = [jax.ShapeDtypeStruct((*sizes, heads, 8), jnp.float32) for heads in (2, 1, 1)]

    def make(ids):
        return packax.sliding_window(5) & packax.documents(ids, positions=ids)

    program = jax.export.export(jax.jit(packax.flash_attention), platforms=["cpu"])
    written = program(*shapes, jax.eval_shape(make, ids)).serialize()
    rng = np.random.default_rng(0)
    tensors = [rng.standard_normal((2, 8, heads, 8)).astype(np.float32) for heads in (2, 1, 1)]
    (tmp_path / "program").write_bytes(pickle.dumps((written, tensors, IDS)))
    code = (
        "import pickle, jax, numpy as np, packax\n"
        "written, tensors, ids = pickle.load(open('program', 'rb'))\n"
        "expression = packax.sliding_window(5) & packax.documents(ids, positions=ids)\n"
        "np.save('out', jax.export.deserialize(written).call(*tensors, expression))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ, check=True)
    expected = packax.flash_attention(*tensors, make(IDS))
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, rtol=1e-6, atol=1e-6)
