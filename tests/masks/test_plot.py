"""Pictures of masks: what is coloured, which blocks have a frame, and what is rejected."""

import sys

import numpy as np
import packax
import pytest

IDS = np.array([[5] * 4 + [2] * 8 + [-1] * 4, [1] * 16])
EXPRESSION = packax.causal() & packax.documents(IDS)


def draw(*arguments, **keywords):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    ax = packax.masks.plot_mask(*arguments, **keywords)
    frames = [(x.get_gid(), *x.get_xy()[::-1], x.get_height(), x.get_width()) for x in ax.patches]
    image, title = np.asarray(ax.images[0].get_array()), ax.get_title()
    pyplot.close(ax.figure)
    return image, frames, title


@pytest.mark.parametrize("built", [False, True])
def test_documents_padding_and_blocks(built):
    mask = packax.create_attention_mask(EXPRESSION) if built else EXPRESSION
    image, frames, title = draw(mask, block_size=4)
    allowed = np.asarray(EXPRESSION.as_array(16, 16))[0]
    colour = np.repeat([2, 3, 1], [4, 8, 4])  # of documents, in order of first appearance
    padding = (IDS[0] == -1)[:, None] | (IDS[0] == -1)
    np.testing.assert_array_equal(image, np.where(allowed, colour[:, None], padding))
    assert frames == [
        ("partial", 0, 0, 4, 4),
        ("partial", 4, 4, 4, 4),
        ("full", 8, 4, 4, 4),
        ("partial", 8, 8, 4, 4),
    ]
    assert ("causal() & documents(int32[2, 16])" in title) is not built
    other, frames, _ = draw(mask, batch=1, block_size=(8, 16))
    np.testing.assert_array_equal(other, np.where(np.tri(16), 2, 0))
    assert frames == [("partial", 0, 0, 8, 16), ("partial", 8, 0, 8, 16)]


def test_groups_of_shared_prefixes():
    """Each group has a colour and padding is grey, also for a tree joined with documents."""
    groups = np.array([7, 7, 7, 3, 3, -1])
    expression = packax.masks.shared_prefix(groups, [-1, 0, 1, -1, 0, -1])
    padding = (groups == -1)[:, None] | (groups == -1)
    wanted = np.where(expression.as_array(6, 6), np.array([2, 2, 2, 3, 3, 1])[:, None], padding)
    np.testing.assert_array_equal(draw(expression)[0], wanted)
    segments = packax.masks.tree([0, 0, 0, 1, 1, -1], [-1, 0]) & packax.documents([4] * 6)
    image = draw(segments)[0]
    assert set(image[:5, :5].flat) == {0, 2} and (image[5] == 1).all() and (image[:, 5] == 1).all()


def test_titles_of_neighbours_do_not_overlap():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 4))
    long = packax.causal() & packax.sliding_window(3, 3) & packax.documents(IDS) & packax.full()
    for ax in axes:
        packax.masks.plot_mask(long, ax=ax)
    figure.canvas.draw()
    boxes = [ax.title.get_window_extent() for ax in axes]
    pyplot.close(figure)
    assert boxes[0].x1 <= boxes[1].x0 and boxes[1].x1 <= boxes[2].x0


def test_heads_lengths_and_last_blocks():
    maps = np.array([[[[True]], [[False]]]])
    one = packax.masks.block_sparse(maps, 8)
    image, frames, _ = draw(one, q_len=5, kv_len=7, block_size=4)
    assert image.shape == (5, 7) and (image == 2).all()
    assert [x[0] for x in frames] == ["full"] * 4 and frames[-1] == ("full", 4, 4, 1, 3)
    image, frames, _ = draw(one, q_len=5, kv_len=7, head=1)
    assert not image.any() and not frames


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(ImportError, match="plot_mask needs matplotlib: pip install matplotlib"):
        packax.masks.plot_mask(EXPRESSION)


def draw_plan(*arguments, **keywords):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    ax = packax.context.plot_plan(*arguments, **keywords)
    ax.figure.canvas.draw()
    texts = [x.get_text() for x in ax.texts]
    lines = [np.asarray(x.get_segments()) for x in ax.collections]
    image, names = (
        np.asarray(ax.images[0].get_array()),
        [x.get_text() for x in ax.get_yticklabels()],
    )
    pyplot.close(ax.figure)
    return image, names, texts, lines, ax.get_title()


def test_a_plan_has_a_lane_for_each_rank():
    ids = np.repeat([0, 1, -1], [512, 384, 128])
    expression = packax.causal() & packax.documents(ids)
    plan = packax.context_plan(expression, ranks=2, chunk=128)
    image, names, texts, lines, title = draw_plan(plan, expression)
    assert names == ["documents", "rank 0", "rank 1"]
    np.testing.assert_array_equal(image[0], np.where(ids < 0, -1, 1 + ids))
    area = np.concatenate([1 + np.arange(512), 1 + np.arange(384), np.zeros(128)])
    rows = plan.index()[0].reshape(2, -1)
    for rank in range(2):
        assert sorted(np.flatnonzero(image[1 + rank])) == sorted(rows[rank])
        assert set(image[1 + rank]) == {0, 1 + rank}
        assert texts[rank] == f"{area[rows[rank]].sum() / area.sum() * 2:.3f}"
    starts = [set(rows[rank][::128]) for rank in range(2)]
    for rank in range(2):  # a border where two chunks of the rank are adjacent
        wanted = [x for x in sorted(starts[rank]) if x - 128 in starts[rank]]
        assert [x[0, 0] for x in lines[rank]] == wanted
    assert title.startswith('"balanced": 2 ranks, 8 chunks of 128 tokens')


def test_a_plan_without_loads_and_one_of_rows():
    expression = packax.causal() & packax.documents(np.repeat([0, 1, 2], [512, 256, 256]))
    plan = packax.context_plan(expression, ranks=2, kind="local")
    image, names, texts, _, title = draw_plan(plan)
    assert (image.shape, names, texts) == ((2, 1024), ["rank 0", "rank 1"], [])
    assert "largest load" not in title
    np.testing.assert_array_equal((image > 0).sum(0), 1)


def test_what_plot_plan_refuses():
    plan = packax.context_plan(packax.causal(), ranks=2, length=16384)
    with pytest.raises(ValueError, match="plan must come from context_plan, but is None"):
        packax.context.plot_plan(None)
    with pytest.raises(ValueError, match="at most 8192 tokens, but the plan has 16384"):
        packax.context.plot_plan(plan, packax.causal())


def test_a_group_that_comes_back_has_a_colour_of_its_own():
    groups = np.array([7, 7, 3, 3, 7, 7])
    image = draw(packax.masks.shared_prefix(groups, [-1, 0, -1, 0, -1, 0]))[0]
    assert image.max(1).tolist() == [2, 2, 3, 3, 4, 4]
