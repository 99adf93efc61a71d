"""Train the demo's model with FSDP, context and tensor parallelism on all available devices.

    python examples/train_context_parallel.py                      # all GPUs of this host
    python examples/train_context_parallel.py --devices 8 --cpu    # eight fake CPU devices

In every step, a plan for the documents is made on the device (with --plan local, on the host before
the step), and the batch is permuted by it. One mask is built and sharded like the queries, and
all layers use it. Parameters are sharded over the fsdp and tensor axes, rows of the batch over
fsdp, and the sequence over context. The first loss is compared with that of the same step on one
device. Needs packax, optax and tqdm.

With several processes, on one or many hosts, each has its own --process-id:

    python examples/train_context_parallel.py --coordinator HOST:PORT --processes 2 --process-id 0
    python examples/train_context_parallel.py --coordinator HOST:PORT --processes 2 --process-id 1

or only `--distributed` under Slurm or mpirun, whose variables jax reads. Every process loads the
rows that its devices hold (`packax.context.process_rows`).
"""

from __future__ import annotations

import argparse
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import packax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packax.demo import model
from packax.demo.data import VOCABULARY, pack, standard_library
from packax.demo.train import batches
from tqdm import tqdm

AXES = ("fsdp", "context", "tensor")
SHARDING = packax.AttentionSharding(
    query=P("fsdp", "context", "tensor", None), key_value=P("fsdp", "context", "tensor", None)
)


def parameter_specs(parameters: model.Parameters) -> model.Parameters:
    """The wide side of every matrix over tensor, the other side over fsdp; norms are replicated."""
    layers = {
        "attention_norm": P(),
        "query_key_value": P(None, "fsdp", None),
        "attention_out": P(None, "tensor", "fsdp"),
        "mlp_norm": P(),
        "gate_up": P(None, "fsdp", "tensor"),
        "down": P(None, "tensor", "fsdp"),
    }
    specs = {"embedding": P(None, "fsdp"), "layers": layers, "norm": P()}
    specs["unembedding"] = P("fsdp", None)
    assert jax.tree.structure(specs) == jax.tree.structure(parameters)
    return specs


def loss(parameters, batch, config, plan=None, *, kind="balanced", sharding=None):
    """Mean loss; with a sharding, that of the batch permuted by a plan: the mean is the same."""
    # The expression is for documents in order; the plan permutes the batch and the mask's rows.
    expression = packax.causal() & packax.documents(batch["segment_ids"])
    if sharding is None:
        inputs, mask = batch, packax.create_attention_mask(expression)
    else:
        inputs, mask, _ = packax.context.shard_batch(
            batch, expression, sharding=sharding, kind=kind, plan=plan
        )
    return model.loss(parameters, inputs, mask, config)


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="fake CPU devices, 8 unless --devices")
    parser.add_argument("--devices", type=int, help="how many in this process (default: all)")
    parser.add_argument("--mesh", help="sizes of fsdp,context,tensor, such as 2,2,2")
    parser.add_argument("--plan", choices=("balanced", "zigzag", "local"), default="balanced")
    parser.add_argument(
        "--shared",
        type=float,
        default=0.5,
        help="shared fraction of a rank's rows, for --plan local (default: half)",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, help="default: 1024 on CPUs, 32768 on GPUs")
    parser.add_argument("--distributed", action="store_true", help="started by a launcher")
    parser.add_argument("--coordinator", help="address:port of process 0, for several processes")
    parser.add_argument("--processes", type=int, help="number of processes")
    parser.add_argument("--process-id", type=int, help="index of this process, from 0")
    return parser.parse_args()


def mesh_sizes(text: str | None, count: int) -> tuple[int, ...]:
    """The sizes given, or factors of two: first for context, then fsdp, then tensor."""
    if text is not None:
        sizes = tuple(map(int, text.split(",")))
        if len(sizes) != 3 or int(np.prod(sizes)) != count:
            raise SystemExit(f"--mesh must be three sizes with product {count}, but is {text}")
        return sizes
    sizes = {"fsdp": 1, "context": 1, "tensor": 1}
    for axis in ("context", "fsdp", "tensor"):
        if count % 2 == 0:
            sizes[axis], count = 2, count // 2
    sizes["context"] *= count
    return tuple(sizes[axis] for axis in AXES)


def main() -> int:
    arguments = arguments_of()
    if arguments.cpu:  # before jax looks for devices
        flag = f"--xla_force_host_platform_device_count={arguments.devices or 8}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        jax.config.update("jax_platforms", "cpu")
    if arguments.distributed or arguments.coordinator:  # also before
        jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process_id)
    talks = jax.process_index() == 0
    devices = jax.devices()
    if jax.process_count() == 1:
        devices = devices[: arguments.devices]
    on_gpu = devices[0].platform == "gpu"
    sizes = mesh_sizes(arguments.mesh, len(devices))
    mesh = jax.make_mesh(sizes, AXES, devices=devices, axis_types=(AxisType.Auto,) * 3)
    config = (
        model.Config(VOCABULARY, 8, 1024, 16, 4, 64, 2816, jnp.bfloat16)
        if on_gpu
        else model.Config(VOCABULARY, 2, 128, 4, 2, 32, 352)
    )
    seq_len = arguments.seq_len or (32768 if on_gpu else 1024)
    named = dict(zip(AXES, sizes, strict=True))
    if talks:
        print(f"mesh       {named} on {len(devices)} x {devices[0].device_kind}")

    batch = max(2, named["fsdp"])
    documents = [text for text in standard_library() if len(text) < seq_len]
    rows = pack(documents, seq_len, limit=arguments.steps * batch)
    feed = batches(rows, batch, seed=0)
    if talks:
        print(f"rows       {len(rows.tokens)} of {seq_len:,} tokens, {rows.documents:,} documents")

    first = next(feed)
    host = jax.jit(model.initialize, static_argnums=0)(config, jax.random.key(0))
    alone = float(jax.jit(loss, static_argnums=2)(host, first, config))

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), parameter_specs(host))
    parameters = jax.jit(model.initialize, static_argnums=0, out_shardings=shardings)(
        config, jax.random.key(0)
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95))
    local = arguments.plan == "local"
    settings = {"kind": "balanced" if local else arguments.plan, "sharding": SHARDING}

    def step(parameters, state, batch, plan):
        value, gradients = jax.value_and_grad(loss)(parameters, batch, config, plan, **settings)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    def planned(batch):
        """A plan for the global batch, computed on the host; None: the step computes the plan."""
        if not local:
            return None
        expression = packax.causal() & packax.documents(batch["segment_ids"])
        ranks, shared = named["context"], arguments.shared
        return packax.context_plan(expression, ranks=ranks, kind="local", shared=shared)

    def placed(batch):
        """The global batch, from the rows of this process; the step permutes them."""
        place = NamedSharding(mesh, P("fsdp"))
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(place, x[mine], x.shape), batch
        )

    with jax.set_mesh(mesh):
        mine = packax.context.process_rows(SHARDING, batch)
        packax.context.check_same_rows(placed(first))
        if talks and jax.process_count() > 1:
            print(f"processes  {jax.process_count()}; this one feeds rows {mine.tolist()}")
        state = jax.jit(optimizer.init)(parameters)
        kept = jax.tree.map(lambda x: x.sharding, (parameters, state))
        step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*kept, None))
        losses = []
        fed = first
        for _ in (progress := tqdm(range(arguments.steps), unit="step", disable=not talks)):
            parameters, state, value = step(parameters, state, placed(fed), planned(fed))
            losses.append(float(value))
            progress.set_postfix_str(f"loss {losses[-1]:.3f}")
            fed = next(feed)

    difference = abs(losses[0] - alone) / alone
    limit = 1e-2 if on_gpu else 1e-4  # bfloat16, float32
    if not talks:
        return 0
    print(f"loss       {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte")
    same = "equals" if difference <= limit else "DIFFERS from"
    print(f"first loss {same} one device's: {losses[0]:.6f} and {alone:.6f}")
    return 0 if difference <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
