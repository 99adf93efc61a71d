"""Properties of context parallelism: plans, local plans, no plan, halos, derivatives."""

from __future__ import annotations

import functools
import zlib

import calls
import jax
import numpy as np
import packax
from calls import Call
from packax._src.masks import planning
from ranks import RANKS, OverRanks, or_zigzag, why_not

from properties.rows import decodes, direction, directional, jax_nn, of_direction, row


def no_plan(call: Call) -> str | None:
    if jax_nn(call) or decodes(call):
        return jax_nn(call) or decodes(call)
    if call.bias in ("shared", "groups") and call.rows == "own masks":
        return "a plan for each row needs a bias for each row"
    return "a plan permutes queries and keys alike" if len(set(call.sizes())) > 1 else None


def no_local_plan(call: Call) -> str | None:
    if decodes(call):
        return decodes(call)
    if call.dropout != "none" or call.bias in calls.BIASES:
        return "refused: a bias array or dropout with a local plan"
    return no_plan(call)


over_ranks = functools.partial(row, group="ranks", ranks=True)


@over_ranks("context plan", lambda x: no_plan(x) or why_not(x, "plan"), multiple=512)
def _(call):
    return OverRanks(call, or_zigzag(call, "balanced")).wrong()


@over_ranks("local context plan", lambda x: no_local_plan(x) or why_not(x, "local"), multiple=512)
def _(call):
    program = OverRanks(call, "local")
    local = call.selector in ("documents", "positions") and not program.at.alone
    ranks = int(np.prod([program.at.mesh[axis] for axis in program.at.context]))
    local &= int(np.sum(program.plan.shared)) * ranks < call.sizes()[0]  # not all rows are shared
    wrong = program.wrong()
    return wrong + (["no private part"] if local and program.built.private_part is None else [])


@over_ranks(
    "context parallelism without a plan",
    lambda x: jax_nn(x) or decodes(x) or why_not(x, None),
    multiple=4,
)
def _(call):
    return OverRanks(call, None).wrong()


def no_halos(call: Call) -> str | None:
    if decodes(call) or jax_nn(call):
        return decodes(call) or jax_nn(call)
    if call.bias in calls.BIASES or call.dropout != "none":
        return "a bias array or dropout reads all keys"
    if call.interval == "window":
        return "halos on both sides are as long as all keys of rows as short as these"
    if call.interval not in ("left", "chunked", "union"):
        return "only windows and chunks have halos"
    if call.selector not in ("none", "documents", "positions", "ranges"):
        return "their windows are not of the order of the tokens"
    return "self-attention alone" if len(set(call.sizes())) > 1 else why_not(call, "halos")


@over_ranks("context parallelism with halos", no_halos, multiple=512)
def _(call):
    program = OverRanks(call, or_zigzag(call, None))
    return program.wrong() + ([] if program.built.halo is not None else ["no halo"])


def kinds_of(call: Call) -> dict[str | None, str | None]:
    """Why each kind of plan does not apply."""
    return {
        "plan": no_plan(call) or why_not(call, "plan"),
        "local": no_local_plan(call) or why_not(call, "local"),
        "halos": no_halos(call),
        None: jax_nn(call) or decodes(call) or why_not(call, None),
    }


@over_ranks(
    "arrays of a mask as its specs say",
    lambda call: (
        decodes(call)
        or jax_nn(call)
        or (call.mask == "stacked" and "a mask of a stack has what indexing leaves")
        or (RANKS[call.ranks].run and "masks inside of transformations")
        or no_plan(call)
    ),
    multiple=512,
)
def _(call):
    """Also those that XLA does not read. Outside of jit."""
    program = OverRanks(call, or_zigzag(call, "balanced"))
    with jax.set_mesh(program.mesh):
        mask = program.mask(program.arrays, program.plan)
    specs = jax.tree.leaves(program.sharding.mask_specs(mask))
    arrays = jax.tree.leaves_with_path(mask)
    return [
        f"{jax.tree_util.keystr(path)} is sharded as {x.sharding}, not as {spec}"
        for (path, x), spec in zip(arrays, specs, strict=True)
        if not x.sharding.is_equivalent_to(jax.NamedSharding(program.mesh, spec), x.ndim)
    ]


@row(
    "work of a plan on the host",
    lambda call: decodes(call) or jax_nn(call),
    multiple=128,
)
def _(call):
    """What numpy counts for plans is what the arrays of a mask say."""
    a, sizes = call.arrays(1), call.sizes()
    expression = call.expression(a)
    lengths = dict(zip(("q_len", "kv_len"), sizes, strict=True))
    want = np.asarray(planning._keys_of_mask(packax.create_attention_mask(expression, **lengths)))
    got = planning.keys_on_host(expression, *sizes)
    return [] if np.array_equal(*np.broadcast_arrays(got, want)) else ["another number of keys"]


@over_ranks(
    "derivatives over ranks",
    lambda call: (
        decodes(call)
        or (call.dtype != "float32" and "of float32")
        or (all((whys := kinds_of(call)).values()) and whys[None])
        or None
    ),
    multiple=512,
)
def _(call):
    kinds = [kind for kind, why in kinds_of(call).items() if not why]
    kind = kinds[zlib.crc32(str(call).encode()) % len(kinds)]
    program = OverRanks(call, {"plan": "balanced", "halos": None}.get(kind, kind))
    a = program.arrays
    found, _ = program.run(functools.partial(directional, call), direction(call, a))
    return of_direction(call, a, found)
