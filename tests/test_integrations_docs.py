"""The Python blocks of docs/integrations.md, in order, in one namespace."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

DOCS = Path(__file__).parents[1] / "docs" / "integrations.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def namespace():
    return {}


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block(number, namespace):
    needed = re.match(r"# needs: (\S+)", BLOCKS[number])
    if needed:
        pytest.importorskip(needed[1])
    namespace.pop("out", None)
    exec(compile(BLOCKS[number], f"{DOCS}, block {number}", "exec"), namespace)
    out = np.asarray(namespace["out"])
    assert out.size and np.all(np.isfinite(out))


def test_equinox_rows_of_documents(namespace):
    """The Equinox block: a document does not see the one before it, and padding gives nothing."""
    pytest.importorskip("equinox")
    run, layer, ids = (namespace[name] for name in ("run", "layer", "segment_ids"))
    x = jax.random.normal(jax.random.key(1), (2, 100, 32))
    out = run(layer, x, ids)
    other = run(layer, x.at[0, :40].add(1.0), ids)
    np.testing.assert_array_equal(out[0, 40:], other[0, 40:])
    assert np.abs(out[0, :40] - other[0, :40]).max() > 0.01
    assert not np.any(out[1, 90:])
