"""The demo's stages on small inputs: packing loses nothing, training learns, checks can fail."""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax.__main__ import main
from paths import DOCS

pytest.importorskip("optax")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from packax.demo import checks, data, model, plots, run, settings, train

DOCUMENTS = [bytes([65 + i % 26]) * (7 * i % 90 + 1) for i in range(60)] + [b"long " * 100]
MODEL = model.Config(data.VOCABULARY, 2, 32, 4, 2, 16, 48)


def small(tmp_path, **changes) -> settings.Settings:
    chosen = settings.Settings(12, 128, 2, 60.0, 1e-2, MODEL, True, tmp_path, 0)
    return dataclasses.replace(chosen, **changes)


@pytest.fixture(scope="module")
def rows() -> data.Rows:
    return data.pack(DOCUMENTS, 128)


def test_every_document_is_packed_once(rows):
    found = []
    for tokens, ids, positions in zip(rows.tokens, rows.segment_ids, rows.positions, strict=True):
        filled = ids != packax.PADDING_SEGMENT_ID
        assert not filled[filled.sum() :].any()  # padding only at the end
        assert (tokens[~filled] == data.END).all()
        for segment in range(ids.max() + 1):
            (where,) = np.nonzero(ids == segment)
            assert (np.diff(where) == 1).all()
            assert (positions[where] == np.arange(len(where))).all()
            found.append(bytes(tokens[where].astype(np.uint8)))
    whole = [text + b"\0" for text in DOCUMENTS if len(text) < 128]
    (long,) = [text + b"\0" for text in DOCUMENTS if len(text) >= 128]
    parts = [long[i : i + 128] for i in range(0, len(long), 128)]
    assert sorted(found) == sorted(whole + parts)
    assert (rows.documents, rows.parts) == (len(found), len(parts))
    assert rows.fill > 0.9


def test_files_of_the_standard_library(tmp_path, monkeypatch):
    """A dangling link among them is left out."""
    documents = data.standard_library()
    assert len(documents) > 100 and all(data.END not in text for text in documents)
    (tmp_path / "one.py").write_text("1")
    (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "absent")
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path))
    assert data.standard_library() == [b"1"]


def test_batches_cover_every_row(rows):
    feed = train.batches(rows, 4, 0)
    seen = [next(feed)["tokens"].tobytes() for _ in range(2 * len(rows.tokens))]
    assert len(set(seen)) > len(rows.tokens) // 2
    few = dataclasses.replace(rows, tokens=rows.tokens[:1], segment_ids=rows.segment_ids[:1])
    assert next(train.batches(dataclasses.replace(few, positions=few.positions[:1]), 4, 0))[
        "tokens"
    ].shape == (4, 128)


@pytest.fixture(scope="module")
def trained(rows, tmp_path_factory) -> train.Trained:
    return train.train(rows, small(tmp_path_factory.mktemp("demo"), steps=40), quiet=True)


def test_training_learns(trained):
    assert trained.first_loss == pytest.approx(np.log(256), abs=1.0)
    assert trained.last_loss < 0.5 * trained.first_loss
    assert trained.tokens_a_second > 0


@pytest.mark.exhaustive
def test_a_document_alone_has_the_loss_it_has_in_its_row(rows, trained):
    row = checks.row_with_most_documents(rows)
    ids, tokens, positions = (x[row] for x in (rows.segment_ids, rows.tokens, rows.positions))
    where = np.flatnonzero(ids == 2)

    def scores(choice):
        mask = checks.causal_documents(jnp.asarray(ids[choice][None]))
        arrays = (jnp.asarray(x[choice][None]) for x in (tokens, positions))
        return model.logits(trained.parameters, *arrays, mask, MODEL)[0]

    together = scores(np.arange(len(ids)))[where]
    np.testing.assert_allclose(together, scores(where), rtol=1e-3, atol=1e-4)


@pytest.mark.exhaustive
def test_checks_pass(rows, trained, tmp_path):
    results = checks.run_all(trained.parameters, rows, small(tmp_path))
    assert len(results) == 6
    assert [check.name for check in results if not check.passed] == []


def test_checks_notice_a_leak_between_documents(rows, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "causal_documents", lambda ids: _causal(ids.shape[1]))
    results = checks.run_all(trained.parameters, rows, small(tmp_path))
    failed = {check.name for check in results if not check.passed}
    assert "no gradient crosses a document boundary" in failed
    assert "other documents change nothing, bit for bit" in failed
    assert "output equals the dense reference" in failed


def _causal(length):
    return packax.create_attention_mask(packax.causal(), q_len=length, kv_len=length)


def test_fewer_steps_than_asked_for_are_explained(trained, tmp_path):
    assert run.stopped(trained, small(tmp_path, steps=40)) == ""
    short = run.stopped(trained, small(tmp_path, steps=120, seconds=60.0))
    assert short == ", not 120: --seconds 60 had passed"


def test_smoothing_keeps_the_ends():
    losses = list(np.linspace(5, 2, 100))
    np.testing.assert_allclose(plots._smooth(losses), losses)


@pytest.mark.exhaustive
@pytest.mark.parametrize("passed", [True, False])
def test_the_whole_demo(tmp_path, monkeypatch, capsys, passed):
    monkeypatch.setattr(run, "standard_library", lambda: DOCUMENTS)
    monkeypatch.setattr(run, "train", lambda rows, chosen: train.train(rows, chosen, quiet=True))
    if not passed:
        bad = [checks.Check("equal", False, "error 1")]
        monkeypatch.setattr(run.checks, "run_all", lambda *_: bad)
    assert run.run(small(tmp_path, steps=30)) == (not passed)
    shown = capsys.readouterr().out
    assert ("checks     6 of 6 passed" in shown) == passed
    assert ("FAILED     equal: error 1" in shown) == (not passed)
    for name in ("mask.png", "loss.png", "losses.json"):
        assert str(tmp_path / name) in shown and (tmp_path / name).stat().st_size > 0


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optax", None)
    assert main(["demo"]) == 2
    assert "the demo needs optax: pip install optax" in capsys.readouterr().err


def test_bad_arguments(tmp_path, capsys):
    (tmp_path / "file").touch()
    for options, said in (
        *((f"--{name} 0", f"--{name} must be at least") for name in ("steps", "seq-len", "batch")),
        ("--seconds 0", "--seconds must be at least"),
        ("--seed -1", "--seed must be from 0 to 4294967295, got -1"),
        (f"--seed {2**32}", "--seed must be from 0 to 4294967295, got 4294967296"),
        (f"--out {tmp_path / 'file'}", "python -m packax demo: "),
    ):
        assert main(["demo", *options.split()]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ("demo", "check", "info"))
def test_jax_cannot_start(command, monkeypatch, capsys):
    """With JAX_PLATFORMS=cuda and no plugin, jax raises an AssertionError without text."""

    def devices(*_):
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert main([command]) == (0 if command == "info" else 2)
    printed = capsys.readouterr()
    text = "cannot start: AssertionError, with JAX_PLATFORMS=cuda"
    assert text in (printed.out if command == "info" else printed.err)


@pytest.mark.parametrize("backend,kind", [("cpu", "CPU"), ("gpu", "GPU")])
def test_the_page_has_the_limits_of_training(tmp_path, monkeypatch, backend, kind):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    chosen = settings.defaults(
        steps=None, seq_len=None, batch=None, seconds=None, out=tmp_path, seed=0
    )
    assert backend == "gpu" or chosen.model.dtype == jnp.float32
    page = " ".join((DOCS / "reference" / "command_line.md").read_text().split())
    assert f"after {chosen.steps} steps or {chosen.seconds:.0f} seconds on a {kind}" in page
