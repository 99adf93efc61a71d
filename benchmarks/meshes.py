"""Times a step with one sequence per GPU by jit and by shard_map, in one and in several processes.

    python benchmarks/meshes.py [--devices 2] [--tokens 32768] [--rounds 9] [--quick] [--out DIR]

It runs in one process for all GPUs, and in one process per GPU. A step is the loss and gradients of
one attention layer with the shapes of Llama-3-8B, including projections, in bfloat16. Every GPU has
all weights and one sequence with 12 documents; gradients are averaged over the GPUs. Plain jit and
shard_map take turns in the same processes. All losses and gradients are compared with those of
shard_map in one process; if they differ, the exit status is 1. Memory is XLA's plan per GPU,
without arguments. --quick: small shapes on CPU devices. Writes meshes.json into --out (default:
$OUT, else benchmarks/results).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from lib.cases import document_lengths
from lib.output import Report, arguments_of, say

DOCUMENTS, LIMIT = 12, 2e-2  # shard_map averages gradients in bfloat16
LAUNCHES = 6  # per burst; equal in all processes, as each step waits for all gradients
SHAPES = {"width": 4096, "heads": 32, "kv_heads": 8, "dim": 128}
QUICK = {"width": 64, "heads": 4, "kv_heads": 2, "dim": 16}


def steps_of(mesh: Any, heads: int, kv_heads: int, dim: int, **_: Any) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import packax
    from jax.sharding import PartitionSpec as P

    def loss(weights: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        mask = packax.create_attention_mask(packax.causal() & packax.documents(batch["ids"]))
        query = (x @ weights["query"]).reshape(*x.shape[:2], heads, dim)
        both = (x @ weights["key_value"]).reshape(*x.shape[:2], kv_heads, 2 * dim)
        out = packax.flash_attention(query, both[..., :dim], both[..., dim:], mask)
        return jnp.mean((out.reshape(*x.shape[:2], -1) @ weights["out"]).astype(jnp.float32) ** 2)

    def of_a_gpu(weights: Any, batch: Any) -> Any:
        return jax.lax.pmean(jax.value_and_grad(loss)(weights, batch), "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    mapped = jax.shard_map(of_a_gpu, mesh=mesh, **specs)
    return {"shard_map": jax.jit(mapped), "jit": jax.jit(jax.value_and_grad(loss))}


def inputs_of(mesh: Any, tokens: int, shapes: dict[str, int]) -> tuple[Any, Any]:
    """The replicated weights, and the batch, of which each process creates its rows."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    width, heads = shapes["width"], shapes["heads"] * shapes["dim"]
    sizes = {
        "query": (width, heads),
        "key_value": (width, 2 * shapes["kv_heads"] * shapes["dim"]),
        "out": (heads, width),
    }
    ids = np.repeat(np.arange(DOCUMENTS, dtype=np.int32), document_lengths(tokens, DOCUMENTS))

    def draw(spec: P, seed: int, *shape: int) -> jax.Array:
        def normal() -> jax.Array:
            return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

        return jax.jit(normal, out_shardings=NamedSharding(mesh, spec))()

    weights = {
        name: draw(P(), n, *size) / width**0.5 for n, (name, size) in enumerate(sizes.items())
    }
    rows = NamedSharding(mesh, P("data"))
    every = np.broadcast_to(ids, (mesh.size, tokens))
    placed = jax.make_array_from_callback(every.shape, rows, every.__getitem__)
    return weights, {"x": draw(P("data"), 9, mesh.size, tokens, width), "ids": placed}


def child(options: argparse.Namespace) -> None:
    """Runs one process of a setup. Process 0 writes times, memory and results to --out."""
    import jax

    if options.processes > 1:
        own = None if options.quick else [options.process]
        jax.distributed.initialize(
            options.address, options.processes, options.process, local_device_ids=own
        )
    from lib.machine import machine
    from lib.turns import as_row, burst, in_turns

    auto, devices = (jax.sharding.AxisType.Auto,), jax.devices()[: options.devices]
    mesh = jax.make_mesh((options.devices,), ("data",), devices=devices, axis_types=auto)
    shapes = QUICK if options.quick else SHAPES
    with jax.set_mesh(mesh):
        arguments = inputs_of(mesh, options.tokens, shapes)
        programs = {
            name: step.lower(*arguments).compile()
            for name, step in steps_of(mesh, **shapes).items()
        }
        results, rows = {}, {}
        for name, program in programs.items():
            plan = program.memory_analysis()
            mib = (plan.temp_size_in_bytes + plan.output_size_in_bytes) / 2**20
            rows[name] = {"mib": round(mib, 1)}
            loss, gradients = program(*arguments)
            for what, x in {"loss": loss, **gradients}.items():
                results[f"{name} {what}"] = np.asarray(x.addressable_data(0), np.float32)
        bursts = {
            name: lambda f=f: burst(lambda: f(*arguments), jax.block_until_ready, LAUNCHES)
            for name, f in programs.items()
        }
        for name, took in in_turns(bursts, options.rounds).items():
            rows[name] |= as_row(took)
    if options.process == 0:
        np.savez(options.out / "results.npz", **results)
        report = {"machine": machine(), "rows": rows}
        (options.out / "rows.json").write_text(json.dumps(report))


def run_setup(options: argparse.Namespace, processes: int, folder: Path) -> dict[str, Any]:
    """Runs the processes of a setup and returns its rows. Results are in folder/results.npz."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    folder.mkdir()
    environment = dict(os.environ)
    if options.quick:
        count = options.devices // processes
        flags = f"--xla_force_host_platform_device_count={count}"
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    command = [sys.executable, __file__, "--processes", str(processes), "--address", address]
    command += ["--tokens", str(options.tokens), "--rounds", str(options.rounds)]
    command += ["--devices", str(options.devices), "--out", str(folder)]
    command += ["--quick"] * options.quick
    started = [
        subprocess.Popen([*command, "--process", str(n)], env=environment) for n in range(processes)
    ]
    try:
        if any(process.wait() for process in started):
            raise RuntimeError("a process failed")
    finally:
        for process in started:
            process.kill()
    return json.loads((folder / "rows.json").read_text())


def differences(folder: Path, exact: Path) -> dict[str, float]:
    """The largest relative difference of loss and gradients, for jit and for shard_map."""
    found, wanted = np.load(folder / "results.npz"), np.load(exact / "results.npz")
    worst: dict[str, float] = {}
    for name in found.files:
        way, what = name.split()
        want = wanted[f"shard_map {what}"]
        error = float(np.linalg.norm(found[name] - want) / np.linalg.norm(want))
        worst[way] = max(worst.get(way, 0.0), error)
    return worst


def table(results: dict[str, Any]) -> str:
    lines = [
        f"{'processes':<12}{'way':<12}{'ms':>10}{'low':>10}{'high':>10}{'MiB':>10}{'differs':>10}"
    ]
    for processes, rows in results.items():
        for way, row in rows.items():
            numbers = "".join(f"{row[name]:>10.3f}" for name in ("ms", "ms_low", "ms_high"))
            line = f"{processes:<12}{way:<12}{numbers}{row['mib']:>10.1f}{row['differs']:>10.1e}"
            lines.append(line)
    return "\n".join(lines)


def main() -> int:
    parser = arguments_of(__doc__, rounds=9)
    parser.add_argument("--devices", type=int, default=2, help="GPUs, from the first")
    parser.add_argument("--tokens", type=int, default=32768, help="of each GPU's sequence")
    parser.add_argument("--quick", action="store_true", help="tries the program on a CPU")
    for name in ("--process", "--processes", "--address"):  # for the processes of a setup
        parser.add_argument(name, type=str if name == "--address" else int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.processes:
        child(options)
        return 0
    report, bad = Report(options.out, "meshes", options.rounds, tokens=options.tokens), []
    with tempfile.TemporaryDirectory() as root:
        for processes in (1, options.devices):
            folder = Path(root, str(processes))
            found = run_setup(options, processes, folder)
            report["machine"] = found["machine"]
            for way, error in differences(folder, Path(root, "1")).items():
                found["rows"][way]["differs"] = error
                bad += [f"{processes} processes, {way}"] if not error <= LIMIT else []
            report.add(str(processes), found["rows"])
            say(f"{processes} processes")
    print(table(report["cases"]))
    return report.end(bad)


if __name__ == "__main__":
    sys.exit(main())
