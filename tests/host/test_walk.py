"""Which files a plain call on one device goes through, as shown in docs/internals/walk.md.

Guards against a stage that repacks the request, and against a call on one GPU that enters context
parallelism.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import packax
import pytest
from lowered import abstract
from paths import ROOT

PACKAGE = Path(packax.__file__).parent
PAGE = ROOT / "docs" / "internals" / "walk.md"
STAGES = (
    *("attention.py", "requests.py", "autodiff.py", "ops/primitives.py"),
    *("ops/partitioning.py", "ops/lowering.py"),
)
CORE = tuple(f"core/{x}.py" for x in ("mask", "sharding", "spec"))
CUDA = ("ops/ffi.py",)
XLA = ("ops/xla_attention.py", "ops/xla_tiles.py")


class Walk:
    """The files that a function enters, and its deepest chain of frames in them."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.files: set[str] = set()
        self.deepest: list[str] = []
        sys.setprofile(self._enter)
        try:
            self.result = function()
        finally:
            sys.setprofile(None)

    def _enter(self, frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE / "_src"):
            return
        self.files.add(path.relative_to(PACKAGE / "_src").as_posix())
        chain = []
        while frame is not None:
            if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                chain.append(frame.f_code.co_qualname)
            frame = frame.f_back
        if len(chain) > len(self.deepest):
            self.deepest = chain[::-1]


def plain_call() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    jax.clear_caches()
    ids = jnp.zeros((1, 256), jnp.int32)
    mask = packax.create_attention_mask(packax.causal() & packax.documents(ids))
    tensors = abstract(q_len=256, kv_len=256)
    return packax.flash_attention, (*tensors, mask)


@pytest.mark.usefixtures("extension")
def test_files_and_frames_on_cuda():
    function, operands = plain_call()
    trace = Walk(lambda: jax.jit(function).trace(*operands))
    lower = Walk(lambda: trace.result.lower(lowering_platforms=("cuda",)))
    assert trace.files | lower.files == {*STAGES, *CORE, *CUDA}
    assert max(len(trace.deepest), len(lower.deepest)) <= 14


def test_files_in_xla():
    function, operands = plain_call()
    walk = Walk(lambda: jax.jit(function).trace(*operands).lower(lowering_platforms=("cpu",)))
    assert walk.files == {*STAGES, *CORE, *XLA}


def test_gradients_do_not_enter_context():
    function, operands = plain_call()

    def loss(query, *others):
        return function(query, *others).astype(jnp.float32).sum()

    walk = Walk(lambda: jax.jit(jax.grad(loss)).trace(*operands))
    assert "autodiff.py" in walk.files
    assert not [x for x in walk.files if x.startswith("context/")]


def test_the_page_names_the_files():
    text = PAGE.read_text()
    assert [x for x in (*STAGES, *CORE, *CUDA, *XLA) if f"`{x}`" not in text] == []
