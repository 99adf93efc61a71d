"""The examples run, each in a separate process, and the cells of the tutorial; training lowers the
loss."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from paths import DOCS, EXAMPLES
from xla_flags import of_devices


def run(name: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": of_devices(1), "JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    return result.stdout


def test_pack_documents():
    shown = run("pack_documents.py")
    assert re.search(r"rows of 1,024 tokens: [\d,]+ documents .*, \d\.\d % padding", shown)
    assert "No problem found" in shown
    assert shown.count("largest difference") == 3
    fetched = re.search(r"each fetches (\d+) of the other's 512 keys", shown)
    assert int(fetched[1]) <= 512


@pytest.mark.exhaustive
def test_grpo_tree():
    """A tree has the loss and gradients of its branches as documents."""
    shown = run("grpo_tree.py")
    tree, documents = re.findall(r"(\d+) tokens, loss (-?[\d.]+)", shown)
    assert 3 * int(tree[0]) < int(documents[0])
    loss, gradients = map(float, re.findall(r"(?:loss|gradients) (\d\.\de[-+]\d+)", shown))
    assert loss < 1e-5 and gradients < 1e-5


@pytest.mark.exhaustive
def test_generate():
    """One program serves all steps, and draws the tokens of the full forward."""
    shown = run("generate.py")
    stopped, shared = map(
        int, re.findall(r"(\d+) (?:sequences stopped|prompt tokens shared)", shown)
    )
    assert stopped > 0 and shared > 0
    steps, mixed, programs = map(int, re.findall(r"(\d+) (?:steps|of them|program,)", shown))
    assert 1 < mixed < steps and programs == 1
    error = re.search(r"the full forward draws the same tokens, logits within (\S+)", shown)
    assert float(error[1]) < 1e-4


@pytest.mark.exhaustive
def test_windows_and_global():
    """On four fake devices: equals one device, and windows fetch less."""
    shown = run("windows_and_global.py", "--cpu")
    fetched = dict(re.findall(r"(window|global): a rank fetches (\d+) keys", shown))
    assert 0 < int(fetched["window"]) < int(fetched["global"])
    error = re.search(r"4 devices: loss and gradients equal one device's within (\S+)", shown)
    assert float(error[1]) < 1e-5


@pytest.mark.exhaustive
def test_meanflow():
    """One evaluation of the model turns noise into rings. MeanFlow's loss does not say so: it
    depends on the model, and may rise."""
    pytest.importorskip("optax")
    shown = run("meanflow.py")
    losses = [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", shown)]
    assert len(losses) >= 8 and max(losses) < 4
    noise, samples = map(float, re.findall(r"(?:noise|samples) (\d\.\d+)", shown))
    assert noise > 0.45 and samples < 0.35


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("pack_and_train.py", ("optax",)),
        ("llama.py", ("optax",)),
        ("flax_linen.py", ("optax", "flax")),
        ("flax_nnx.py", ("optax", "flax")),
    ],
)
def test_training(name, needed):
    for module in needed:
        pytest.importorskip(module)
    shown = run(name)
    losses = [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", shown)]
    assert len(losses) >= 8 and losses[-1] < 0.9 * losses[0]
    if name == "llama.py":
        assert "gradients equal those without remat" in shown


PAGE = (DOCS / "guide" / "tutorial.md").read_text()


@pytest.mark.exhaustive
def test_cells_of_the_tutorial(tmp_path, monkeypatch):
    pytest.importorskip("optax")
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(DOCS / "pictures")
    import tutorial

    space = tutorial.run_cells(tmp_path)
    sys.modules.pop("tutorial")
    losses = space["losses"]
    assert losses[0] > 5 and losses[-1] < 1.5
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == sorted(set(re.findall(r"pictures/(\w+\.png)", PAGE)))


def test_the_pictures_are_there_and_small():
    for name in re.findall(r"pictures/(\w+\.png)", PAGE):
        assert 1000 < (DOCS / "pictures" / name).stat().st_size < 60_000
