"""Times packax.kvax and kvax in turns, in one process with the same calls: TFLOP/s and ratio.

    pip install --no-deps kvax==0.1.0 && pip install chex jax-triton
    python benchmarks/compare/versus_kvax.py [--cases board] [--rounds 7] [--out DIR]

One function runs with either package, with kvax's names and its block sizes for H100. Every output
and gradient is first compared with the float32 reference of attention.py. Wrong results are not
timed, and the exit status is 1.

kvax 0.1.0 cannot be imported with current jax and Triton. `importable` supplies what they removed
(the old location of shard_map, the mesh in pxla, two helpers of jax-triton) and makes two constants
constexpr for Triton; it does not change what kvax computes. Without a GPU, `--trace` shows that
both packages trace. Writes versus_kvax.json; results/versus_kvax_h200.json has two of the cases.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from lib.cases import Case, select
from lib.implementations import Compiled, Implementation, random_inputs
from lib.machine import machine
from lib.output import Report, arguments_of, first_line, require_gpu, say
from lib.passes import time_passes, usable
from lib.reference import Reference
from lib.turns import bad_cases, not_run, table

PACKAGES = {"packax": "packax.kvax", "kvax": "kvax"}
BLOCKS = {"fwd_params": (128, 128), "bwd_params": (64, 128)}  # queries and keys per block


def importable() -> None:
    """Lets `import kvax` work with current jax."""
    with contextlib.suppress(ImportError):
        from jax._src.mesh import thread_resources
        from jax.interpreters import pxla

        if not hasattr(pxla, "thread_resources"):
            pxla.thread_resources = thread_resources  # type: ignore[attr-defined]

    def shard_map(f: Any, mesh: Any, in_specs: Any, out_specs: Any, check_rep: bool) -> Any:
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(f, mesh=mesh, check_vma=check_rep, **specs)

    old = types.ModuleType("jax.experimental.shard_map")
    old.shard_map, old.Specs = shard_map, Any  # type: ignore[attr-defined]
    sys.modules[old.__name__] = old
    importlib.import_module("jax.experimental").shard_map = old  # type: ignore[attr-defined]
    triton, jax_triton = map(importlib.import_module, ("triton", "jax_triton"))
    for name in ("cdiv", "next_power_of_2"):
        setattr(jax_triton, name, getattr(triton, name))
    kernels = importlib.import_module("kvax.ops.flash_attention_triton")
    constexpr = importlib.import_module("triton.language").constexpr
    for name in ("LOG2_CONST", "NEG_INF"):
        value = getattr(kernels, name)
        if not isinstance(value, constexpr):
            setattr(kernels, name, constexpr(value))


def enter(packages: list[str]) -> None:
    """Sets a mesh and specs for the whole program: kvax needs them even on one device."""
    specs = ("data", None, None, None)
    for package in packages:
        importlib.import_module(f"{package}.utils.specs").set_attention_specs(specs, specs)
    jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)).__enter__()


def attention_of(package: str, case: Case) -> Implementation:
    ops = importlib.import_module(f"{package}.ops")
    mask_type = importlib.import_module(f"{package}.utils.typing").AttentionMask
    params = importlib.import_module(f"{package}.utils").FlashAttentionParamsConfig
    settings = {name: params(*blocks, num_warps=8) for name, blocks in BLOCKS.items()}
    ids = jnp.asarray(case.segment_ids())
    positions = jnp.broadcast_to(jnp.arange(case.seq, dtype=jnp.int32), ids.shape)
    tokens = (positions, ids, positions, ids)

    def build(*tokens: Any) -> Any:
        masks = ops.create_attention_mask(*tokens, calc_bwd_mask=True, **settings)
        return masks if package == "packax.kvax" else tuple(mask.flatten() for mask in masks)

    def function(query: Any, key: Any, value: Any, operands: Any) -> jax.Array:
        tokens, masks = operands
        if package == "kvax":  # its masks cannot be passed through jit
            masks = tuple(mask_type.unflatten(mask) for mask in masks)
        scale = case.head_dim**-0.5
        return ops.flash_attention(query, key, value, *tokens, masks, scale=scale, **settings)

    return Implementation(package, function, (tokens, jax.jit(build)(*tokens)))


def run_package(package: str, case: Case, inputs: Any, reference: Reference) -> dict[str, Any]:
    try:
        return usable(Compiled(attention_of(package, case), inputs), reference.errors)
    except Exception as error:  # the other package must still run
        return not_run(error) | {"passes": {}}


def run_case(case: Case, names: Iterable[str], rounds: int) -> dict[str, Any]:
    inputs = random_inputs(case)
    reference = Reference(case, inputs)
    rows = {name: run_package(PACKAGES[name], case, inputs, reference) for name in names}
    time_passes(rows, {"fwd": case.forward_flops, "bwd": case.backward_flops}, rounds)
    return rows


def trace(packages: list[str]) -> None:
    """Traces the forward and backward passes, to check the calls without a GPU."""
    case = Case("small", 1, 256, 4, 2, 64, 2, split=(128, 128))
    inputs = random_inputs(case)
    for package in packages:

        def both(query: Any, key: Any, value: Any, cotangent: Any, package: str = package) -> Any:
            attention = attention_of(package, case)
            function = functools.partial(attention.function, operands=attention.operands)
            out, pullback = jax.vjp(function, query, key, value)
            return out, pullback(cotangent)

        shapes = jax.eval_shape(both, *inputs)
        same = [x.shape for x in jax.tree.leaves(shapes)] == [inputs[n].shape for n in (3, 0, 1, 2)]
        say(f"{package}: traced, results {'as inputs' if same else 'of OTHER shapes'}")


def main() -> int:
    parser = arguments_of(__doc__, "names and groups of cases.py", default="board", rounds=7)
    parser.add_argument("--trace", action="store_true", help="trace both packages, time nothing")
    arguments = parser.parse_args()
    names = list(PACKAGES)
    try:
        importable()
        version = importlib.metadata.version("kvax")
    except Exception as error:
        say(f"kvax cannot be imported, packax.kvax runs alone: {first_line(error)}")
        version = first_line(error)
        names.remove("kvax")
    packages = [PACKAGES[name] for name in names]
    enter(packages)
    if arguments.trace:
        trace(packages)
        return 0
    require_gpu()
    report = Report(arguments.out, "versus_kvax", arguments.rounds, machine=machine(), kvax=version)
    results = report.run(
        select(arguments.cases),
        lambda case: run_case(case, names, arguments.rounds),
        lambda results: table(results, PACKAGES),
    )
    return report.end(bad_cases(results, PACKAGES))


if __name__ == "__main__":
    sys.exit(main())
