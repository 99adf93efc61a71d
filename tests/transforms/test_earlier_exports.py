"""Programs that earlier versions exported still load, run and give the same numbers.
    python tests/transforms/test_earlier_exports.py    exports with the installed packax, once for
                                                       each release, with the oldest jax
tests/transforms/exported holds them, named by packax's version: a forward and a backward over
packed documents, for CPUs and CUDA, and some rows of their results on a CPU.
packax promises to keep the calls in the program; JAX keeps the file format for half a year. These
files are older than that for the newest jax, so the tests allow expired files by its setting.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import packax
import pytest
from packax._src.ops import ffi

FOLDER = Path(__file__).resolve().parent / "exported"
ROWS = np.s_[:, ::16]
NAMES = sorted(path.stem for path in FOLDER.glob("*.jaxexport"))
EXPIRED = "jax_export_deserialize_expired_versions"


def load(name):
    pytest.importorskip("flatbuffers")
    return jax.export.deserialize(bytearray((FOLDER / f"{name}.jaxexport").read_bytes()))


@pytest.fixture
def expired_too():
    """jax has the setting from 0.12 on; earlier versions load every file."""
    before = getattr(jax.config, EXPIRED, None)
    if before is not None:
        jax.config.update(EXPIRED, True)
    yield
    if before is not None:
        jax.config.update(EXPIRED, before)


def arguments():
    rng = np.random.default_rng(24)
    shapes = (1, 192, 4, 64), (1, 192, 2, 64), (1, 192, 2, 64)
    tensors = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    return *tensors, jnp.asarray(np.repeat([[0, 1, 2, -1]], [70, 60, 50, 12], axis=1), jnp.int32)


def program(query, key, value, ids):
    """Output and gradients, with the mask built inside."""
    mask = packax.create_attention_mask(packax.causal() & packax.documents(ids))

    def attend(*tensors):
        return packax.flash_attention(*tensors, mask)

    out, pull = jax.vjp(attend, query, key, value)
    return out, *pull(jnp.sin(out))


def as_float32(results):
    return [np.asarray(x, np.float32) for x in results]


pytestmark = pytest.mark.filterwarnings("ignore:.*6-month:DeprecationWarning")


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_here(name, expired_too):
    exported = load(name)
    assert exported.platforms == ("cpu", "cuda")
    kept = np.load(FOLDER / f"{name}.npz")
    got = as_float32(exported.call(*arguments()))
    for one, now, plain in zip(kept.values(), got, as_float32(program(*arguments())), strict=True):
        np.testing.assert_allclose(now[ROWS], one, rtol=2e-2, atol=2e-2)
        np.testing.assert_allclose(now, plain, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(ffi.ext is None, reason="packax._ext is not built")
@pytest.mark.parametrize("name", NAMES)
def test_its_targets_are_registered(name, expired_too):
    """On CUDA the program calls these by name. A target version is removed only after the time that
    docs/guide/support.md promises, with a line in CHANGELOG.md."""
    exported = load(name)
    targets = set(re.findall(r"custom_call @(packax_\w+)", exported.mlir_module()))
    assert {t.split("_")[1] for t in targets} == {"documents", "blocks", "forward", "backward"}
    assert ffi.ext is not None and targets <= set(ffi.ext.registrations())


@pytest.mark.parametrize("name", NAMES)
def test_without_the_setting_jax_loads_it_or_says_that_it_is_too_old(name):
    """As docs/guide/support.md describes."""
    try:
        assert load(name).platforms == ("cpu", "cuda")
    except ValueError as error:
        assert hasattr(jax.config, EXPIRED) and "6-month" in str(error)


def test_there_is_one():
    assert NAMES


def main() -> None:
    assert importlib.util.find_spec("flatbuffers"), "pip install flatbuffers"
    shapes = arguments()
    exported = jax.export.export(
        jax.jit(program), platforms=["cpu", "cuda"], disabled_checks=packax.export_checks()
    )(*shapes)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{packax.__version__}.jaxexport"
    path.write_bytes(exported.serialize())
    results = as_float32(exported.call(*shapes))
    np.savez_compressed(path.with_suffix(".npz"), *(x[ROWS] for x in results))
    print(f"{path}: {path.stat().st_size} bytes, jax {jax.__version__}")


if __name__ == "__main__":
    main()
