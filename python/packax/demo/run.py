"""Runs the whole demo: packs, trains, checks, draws, and prints a summary."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax
import numpy as np

from packax.demo import checks, model, plots
from packax.demo.data import Rows, pack, standard_library
from packax.demo.settings import Settings
from packax.demo.train import Trained, rows_tokens, train
from packax.info import gather, variant_in_use


def run(settings: Settings) -> int:
    """Runs the demo. Returns the exit code: 1 if a check fails or the loss does not fall."""
    start = time.perf_counter()
    config = settings.model
    print(f"device     {device_line(settings)}")
    rows = packed(settings)
    parts = f" ({rows.parts:,} of them parts of a longer file)" if rows.parts else ""
    print(
        f"rows       {len(rows.tokens)} of {settings.seq_len:,} tokens, {rows.fill:.1%} full, "
        f"{rows.documents:,} documents{parts}"
    )
    shape = f"{config.layers} layers, width {config.width}, heads {config.heads}/{config.kv_heads}"
    print(f"model      {shape}, head dim {config.head_dim}, {np.dtype(config.dtype).name}")

    trained = train(rows, settings)
    print(
        f"trained    {model.count(trained.parameters) / 1e6:.1f} M parameters, "
        f"{len(trained.losses)} steps of {rows_tokens(settings):,} tokens"
        f"{stopped(trained, settings)}"
    )
    results = checks.run_all(trained.parameters, rows, settings)
    for check in results:
        print(f"{'ok' if check.passed else 'FAILED':<10} {check.name}: {check.detail}")

    files = draw(rows, trained, settings)
    fell = trained.last_loss < 0.9 * trained.first_loss
    passed = sum(check.passed for check in results)
    print()
    print(
        f"loss       {trained.first_loss:.3f} -> {trained.last_loss:.3f} nats per byte"
        + ("" if fell else ": it did NOT fall")
    )
    print(
        f"speed      {trained.tokens_a_second:,.0f} tokens/s "
        f"(first step, with compilation: {trained.compile_seconds:.1f} s)"
    )
    print(f"checks     {passed} of {len(results)} passed")
    print(f"files      {', '.join(str(path) for path in files)}")
    print(f"time       {time.perf_counter() - start:.0f} s")
    return 0 if fell and passed == len(results) else 1


def stopped(trained: Trained, settings: Settings) -> str:
    """The reason if training ran fewer steps than requested, else an empty string."""
    if len(trained.losses) == settings.steps:
        return ""
    return f", not {settings.steps}: --seconds {settings.seconds:g} had passed"


def packed(settings: Settings) -> Rows:
    documents = standard_library()
    total = len(documents)
    size = sum(map(len, documents))
    print(
        f"documents  {total:,} files of Python's standard library, "
        f"{size / 1e6:.1f} M tokens (bytes)"
    )
    if settings.whole_documents:
        fitting = [text for text in documents if len(text) < settings.seq_len]
        if len(fitting) >= 50:
            documents = fitting
            print(f"           {total - len(fitting):,} of them are longer than a row and left out")
    limit = settings.steps * settings.batch  # the rows that training can use
    return pack(documents, settings.seq_len, seed=settings.seed, limit=limit)


def device_line(settings: Settings) -> str:
    device = jax.devices()[0]
    if not settings.on_gpu:
        why = "no GPU in use: `python -m packax info` says why"
        return f"{device.platform}: packax's blockwise XLA attention ({why})"
    config = settings.model
    variant = variant_in_use(gather(), device, np.dtype(config.dtype).name, config.head_dim)
    return f"{device.device_kind}: packax's cubin {variant}"


def draw(rows: Rows, trained: Trained, settings: Settings) -> list[Path]:
    mask, loss = settings.out / "mask.png", settings.out / "loss.png"
    plots.document_mask(rows.segment_ids[checks.row_with_most_documents(rows)], mask)
    subtitle = (
        f"{settings.batch} x {settings.seq_len:,} tokens per step, "
        f"{trained.tokens_a_second:,.0f} tokens/s, {jax.devices()[0].device_kind}"
    )
    plots.loss_curve(trained.losses, trained.last_loss, subtitle, loss)
    record = settings.out / "losses.json"
    record.write_text(
        json.dumps({"losses": trained.losses, "tokens_per_second": trained.tokens_a_second}) + "\n"
    )
    return [mask, loss, record]
