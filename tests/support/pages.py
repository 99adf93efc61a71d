"""The Python blocks of README.md and docs/, each page run once in a namespace of its names.

A page imports the modules that it uses, or says that the quick start does. Pages about other
libraries and the tutorial begin without names. A block that must not run starts with a comment
`# not run: why`, and one that needs another package with `# needs: package`.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import packax
from jax.sharding import PartitionSpec as P
from lowered import Extension
from packax._src.ops import ffi
from paths import LIBRARY_PAGES, ROOT

TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}
BLOCKS = {
    name: re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for name, text in TEXTS.items()
}
LENGTH = 1024  # a plan for four ranks deals chunks of 128 rows
IDS = np.repeat(np.arange(4, dtype=np.int32), LENGTH // 4)[None].repeat(2, 0)
QUICK_START = "docs/guide/quick_start.md"


def names(length: int = LENGTH) -> dict[str, Any]:
    """The reader's variables that the texts mention: small arrays of the documented shapes."""
    rng = np.random.default_rng(0)

    def tensor(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    query, key, value = tensor(2, length, 2, 8), tensor(2, length, 1, 8), tensor(2, length, 1, 8)
    ids = jnp.asarray(IDS[:, :length])
    space = {"query": query, "key": key, "value": value, "heads": 2, "segment_ids": ids}
    expression = packax.causal() & packax.documents(ids)
    sharding = packax.AttentionSharding(P("data", "context"), P("data", "context"))
    space |= {"expression": expression, "sharding": sharding}
    batch = {"tokens": ids, "segment_ids": ids, "positions": ids}
    space |= {"batch": batch, "local_batch": {name: np.asarray(x) for name, x in batch.items()}}
    return space | {"mask": packax.create_attention_mask(packax.documents(ids))}


def around() -> Any:
    """The mesh of docs/guide/context_parallelism.md."""
    kinds = (jax.sharding.AxisType.Auto,) * 3
    return jax.set_mesh(jax.make_mesh((2, 4, 1), ("fsdp", "context", "tensor"), axis_types=kinds))


@functools.cache
def namespace_of(page: str) -> dict[str, Any]:
    """What a page defines; `outs`: the `out` of each block; `after`: what there was after each."""
    library = page in (f"docs/guide/{name}.md" for name in LIBRARY_PAGES)
    space: dict[str, Any] = {} if library else names()
    if "quick_start.md#call-attention" in TEXTS[page]:
        space = {}
        exec(BLOCKS[QUICK_START][0], space)
    outs: list[Any] = []
    after: list[dict[str, Any]] = []
    # As on a machine with all kernels.
    kernels = mock.patch.object(ffi, "ext", ffi.ext if library else Extension)
    with kernels, mock.patch.object(jax.distributed, "initialize", lambda: None):
        for number, block in enumerate(BLOCKS[page]):
            packages = re.findall(r"^# needs: (\S+)", block)
            packages += ["flatbuffers"] if "serialize" in block else []
            if block.startswith("# not run:") or not all(map(importlib.util.find_spec, packages)):
                after.append(dict(space))
                continue
            code = compile(block, f"block {number} of {page}", "exec")
            if library:
                exec(code, space)
            else:
                with around():
                    exec(code, space)
            outs.append(space.get("out"))
            assert outs[-1] is None or np.isfinite(np.asarray(outs[-1], np.float32)).all(), number
            after.append(dict(space))
    return space | {"outs": outs, "after": after}
