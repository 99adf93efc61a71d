"""Intervals under jit and vmap, and spans with expected values written by hand."""

import jax
import numpy as np
import packax
from mask_checks import check


def test_spans_by_hand():
    """Equal ids apart are two spans, adjacent ones are one; a document boundary splits a span."""
    ids = np.array([0, 0, -1, 0, 1, 1, 1, -1], np.int32)
    expected = np.tril(np.ones((8, 8), bool))
    expected[0, 1] = expected[4, 5:7] = expected[5, 6] = True
    np.testing.assert_array_equal(packax.masks.spans(ids).as_array(8, 8), expected)
    documents = np.array([3, 3, 3, 3, 3, 4, 4, 4], np.int32)
    expected &= documents[:, None] == documents
    # The first document's part of a span has positions up to 4, which the second one's last key is
    # not part of.
    restart = np.array([0, 1, 2, 3, 4, 0, 1, 2], np.int32)
    for positions in (None, restart):
        cut = packax.masks.spans(ids) & packax.documents(documents, positions=positions)
        np.testing.assert_array_equal(cut.as_array(8, 8), expected)
        check(packax.create_attention_mask(cut), cut)


def test_expressions_cross_jit_and_vmap():
    """Offsets, lengths and span ids may be traced; under vmap they lose their batch axis."""
    offsets, lengths = np.array([3, -2, 500], np.int32), np.array([5, 0, 2], np.int32)
    spans = np.array([[-1, 4, 4, -1], [0, 0, 1, 1], [2, 2, 2, 2]], np.int32)

    def expression(offset, length, span_ids):
        window = packax.sliding_window(1, offset=offset) | packax.chunked(2, offset=offset)
        return window & packax.prefix(length), packax.masks.spans(
            span_ids, packax.sliding_window(1)
        )

    @jax.jit
    def build(*arrays):
        def mask(*row):
            return [
                packax.create_attention_mask(one, q_len=4, kv_len=4) for one in expression(*row)
            ]

        return jax.vmap(mask)(*arrays), mask(*arrays)

    each, together = build(offsets, lengths, spans)
    for mask, whole, one in zip(each, together, expression(offsets, lengths, spans), strict=True):
        check(whole, one)
        np.testing.assert_array_equal(mask.kv_start[:, 0], whole.kv_start)
        np.testing.assert_array_equal(mask.kv_end[:, 0], whole.kv_end)
