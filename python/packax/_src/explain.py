"""`explain`: which kernels a call would run on a GPU, and why not faster ones.

It traces the call, and asks the code that lowers it (ops/lowering.py, ops/ffi.py) and the tables of
kernels in C++ (`packax._ext.select`), so it has no separate rules.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packax._src.attention import flash_attention
from packax._src.core.arguments import described
from packax._src.core.mask import AttentionMask
from packax._src.core.spec import BLOCK, AttentionSpec, Operands, ceil_div
from packax._src.decode import decode_attention
from packax._src.masks.build import create_attention_mask
from packax._src.masks.expressions import MaskExpression
from packax._src.ops import ffi, lowering
from packax._src.ops.primitives import backward_p, decode_p, forward_p
from packax._src.ragged import ragged_paged_attention

_GPUS = {  # names of common GPUs: compute capability
    **dict.fromkeys(("A100", "A30"), 80),
    **dict.fromkeys(("A10", "A40", "A6000", "RTX 3090"), 86),
    **dict.fromkeys(("L4", "L40S", "RTX 4090"), 89),
    **dict.fromkeys(("H100", "H200", "GH200"), 90),
    **dict.fromkeys(("B200", "GB200"), 100),
    **dict.fromkeys(("B300", "GB300"), 103),
    **dict.fromkeys(("RTX 5090", "RTX PRO 6000"), 120),
    "GB10": 121,
}
_MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 148, 120: 170, 121: 48}
_PASSES = {forward_p: "forward", backward_p: "backward", decode_p: "decode"}
_NEUTRAL = {  # options without which no other kernels run, or that have no meaning alone
    *("sinks", "scale", "dropout_key", "return_lse", "precision", "implementation"),
    *("sharding", "gather_head_groups", "checkpoint_name"),
}


@dataclasses.dataclass(frozen=True)
class ExplainedPass:
    """How one pass of a call runs.

    Attributes:
        name: "forward", "backward" or "decode".
        path: "kernels", "XLA", or "error": the call raises an error when it is lowered.
        kernels: the names of the kernels, in order. Of two forward kernels, one runs, depending on
            how long the documents are.
        changes: how the call is rewritten before kernels run, such as padded head dims.
        why: why no faster path is taken, or the text of the error.
        workspace: bytes of temporary memory, without operands and results; None where XLA allocates
            it.
        calls: how many such calls the program makes, for each rank of a mesh.
    """

    name: str
    path: str
    kernels: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    workspace: int | None = None
    calls: int = 1

    def __str__(self) -> str:
        kernels = (" or " if self.name == "forward" else ", ").join(self.kernels)
        how = {"kernels": kernels, "XLA": "blockwise XLA"}.get(self.path, "error")
        lines = [f"{self.name}: {how}" + (f" ({self.calls} calls)" if self.calls > 1 else "")]
        lines += [f"  {change}" for change in self.changes]
        lines += [f"  {reason}" for reason in self.why]
        if self.workspace is not None:
            lines.append(f"  workspace: {self.workspace:,} bytes")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` returns. Printing it shows everything.

    Attributes:
        device: the GPU for which the call is explained, or why there is none.
        passes: an `ExplainedPass` for each pass.
        visited: how many blocks of 128 queries and 64 keys are computed, for all batch rows of the
            mask, and all heads of its block mask; None: the values of the mask are unknown.
        blocks: how many such blocks there are.
    """

    device: str
    passes: tuple[ExplainedPass, ...]
    visited: int | None = None
    blocks: int | None = None

    def __str__(self) -> str:
        text = "blocks visited: unknown, because the values of the mask are"
        if self.visited is not None and self.blocks is not None:
            share = 100 * self.visited / max(self.blocks, 1)
            text = f"blocks visited: {self.visited:,} of {self.blocks:,} ({share:.1f} %)"
        lines = [f"device: {self.device}", *map(str, self.passes)]
        if any(x.name != "decode" for x in self.passes):
            lines.append(text)
        return "\n".join(lines)

    def __getitem__(self, name: str) -> ExplainedPass:
        """The first pass of this name."""
        return next(x for x in self.passes if x.name == name)


def explain(
    query: Any,
    key: Any,
    value: Any,
    mask: AttentionMask | MaskExpression | None = None,
    *,
    gpu: str | float | int | None = None,
    gradients: bool = True,
    **options: Any,
) -> Explanation:
    """Says how an attention call runs: its kernels, why not faster ones, and the blocks visited.

    It runs no attention. Start from it if attention is slower than you expect; `python -m packax
    info` says what the machine has.

    Args:
        query, key, value: as for `flash_attention`, for `decode_attention` together with
            kv_lengths=, or for `ragged_paged_attention` together with kv_lens=. Only their shapes
            and dtypes are read, so `jax.ShapeDtypeStruct` will do.
        mask: as for `flash_attention`. If its values are known, the visited blocks are counted. A
            mask from `jax.eval_shape` has no values.
        gpu: the name of a GPU, such as "H100", or a compute capability, such as 9.0. None: the GPU
            of this process, or without one, the platform that jax uses.
        gradients: whether to explain the backward pass too, for the gradients of query, key and
            value.
        options: the other arguments of that function, by name. Arrays may be
            `jax.ShapeDtypeStruct`.

    Returns:
        Explanation: print it, or read its fields. For a GPU that this build has no kernels for, and
        for calls without a kernel, the path of a pass is "error", with the text of the error.

    Raises:
        ValueError: an unknown gpu, or an error of the call itself.
        TypeError: options that the function does not have.

    Examples:
        >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)
        >>> print(packax.explain(x, x, x, packax.causal(), gpu="H100"))  # doctest: +SKIP
        device: compute capability 9.0
        forward: forward_sm90
          workspace: 4 bytes
        backward: backward_preprocess, backward_sm90, backward_postprocess
          workspace: 17,072,128 bytes
        blocks visited: 1,056 of 2,048 (51.6 %)
    """
    target = _target(gpu)
    call = _Call(query, key, value, mask, options)
    passes = _passes(call, target, gradients)
    others = _without_options(call)
    found = []
    for one in passes:
        reasons = list(one.why)
        if one.path == "kernels" and not one.why:
            reasons += _faster(one, others, target)
        found.append(dataclasses.replace(one, why=tuple(reasons)))
    visited, blocks = _visited(call)
    return Explanation(target.text, tuple(found), visited, blocks)


@dataclasses.dataclass(frozen=True)
class _Target:
    text: str
    cc: int | None  # None: no GPU
    multiprocessors: int = 0
    driver: int | None = None


@dataclasses.dataclass(frozen=True)
class _Call:
    query: Any
    key: Any
    value: Any
    mask: Any
    options: dict[str, Any]

    @property
    def decodes(self) -> bool:
        return "kv_lengths" in self.options or self.packed

    @property
    def packed(self) -> bool:
        return "kv_lens" in self.options

    def without(self, names: tuple[str, ...]) -> _Call:
        dropped = (*names, "dropout_key") if "dropout_rate" in names else names
        kept = {name: x for name, x in self.options.items() if name not in dropped}
        return dataclasses.replace(self, options=kept)

    def of_dtype(self, dtype: Any) -> _Call:
        query, key, value = (
            jax.ShapeDtypeStruct(jnp.shape(x), dtype) for x in (self.query, self.key, self.value)
        )
        return dataclasses.replace(self, query=query, key=key, value=value)


def _target(gpu: Any) -> _Target:
    if gpu is None:
        local = ffi.local_capabilities()
        if not local:
            return _Target(f"no GPU in this process: jax runs on {jax.default_backend()}", None)
        device = jax.local_devices(backend="cuda")[0]
        cc = min(local)
        driver = None if ffi.ext is None else ffi.ext.driver().get("version")
        count = getattr(device, "core_count", _MULTIPROCESSORS.get(cc, 132))
        return _Target(f"{device.device_kind}, {_capability(cc)}", cc, count, driver)
    try:
        number = float(str(gpu).lower().removeprefix("sm_").rstrip("af"))
        cc = round(number) if number >= 50 else round(10 * number)
    except ValueError:
        named = {name.upper(): of_name for name, of_name in _GPUS.items()}
        cc = named.get(str(gpu).upper().removeprefix("NVIDIA "), 0)
    if not 50 <= cc < 1000 or isinstance(gpu, bool):
        raise ValueError(
            f"gpu must be a compute capability, such as 9.0, or one of {', '.join(_GPUS)}, but is "
            f"{gpu!r}"
        )
    return _Target(_capability(cc), cc, _MULTIPROCESSORS.get(cc, 132))


def _capability(cc: int) -> str:
    return f"compute capability {cc // 10}.{cc % 10}"


# --- Tracing


def _passes(call: _Call, target: _Target, gradients: bool) -> list[ExplainedPass]:
    names = ("decode",) if call.decodes else ("forward", "backward")[: 1 + gradients]
    found: dict[ExplainedPass, int] = {}
    for name in names:
        for direction, of, spec in _calls(call, name == "backward"):
            if direction == name:
                one = _explained(direction, of, spec, target)
                found[one] = found.get(one, 0) + 1
    return [dataclasses.replace(one, calls=number) for one, number in found.items()]


def _calls(call: _Call, backward: bool) -> list[tuple[str, Operands, AttentionSpec]]:
    """The attention calls of the traced program: pass, avals and spec of each."""
    is_array = (jax.Array, jax.ShapeDtypeStruct)
    arrays = {
        name: x
        for name, x in call.options.items()
        if isinstance(x, is_array) and name != "sharding"
    }
    others = {name: x for name, x in call.options.items() if name not in arrays}
    held = None if isinstance(call.mask, MaskExpression) else call.mask
    if not isinstance(held, (AttentionMask, type(None))):
        raise ValueError(
            "mask must come from create_attention_mask, or be an expression such as causal() & "
            f"documents(segment_ids), but is {described(held)}"
        )

    def attend(query: Any, key: Any, value: Any, arrays: Any, held: Any) -> Any:
        options = {**others, **arrays}
        if call.packed:
            return ragged_paged_attention(query, key, value, **options)
        if call.decodes:
            return decode_attention(query, key, value, options.pop("kv_lengths"), **options)
        mask = call.mask if held is None else held
        return flash_attention(query, key, value, mask, **options)

    def train(query: Any, key: Any, value: Any, arrays: Any, held: Any) -> Any:
        def of_tensors(query: Any, key: Any, value: Any) -> Any:
            return attend(query, key, value, arrays, held)

        out, pullback = jax.vjp(of_tensors, query, key, value)
        return pullback(jax.tree.map(jnp.ones_like, out))

    tensors = [_abstract(x) for x in (call.query, call.key, call.value)]
    program = jax.make_jaxpr(train if backward else attend)(*tensors, arrays, held)
    return list(_equations(program))


def _abstract(x: Any) -> Any:
    if isinstance(x, jax.core.Tracer):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x


def _equations(program: Any) -> Iterator[tuple[str, Operands, AttentionSpec]]:
    for equation in getattr(program, "jaxpr", program).eqns:
        direction = _PASSES.get(equation.primitive)
        if direction is not None:
            avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
            names, spec = equation.params["names"], equation.params["spec"]
            yield direction, Operands.of(names, avals), spec
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _equations(inner)


def _is_program(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


# --- One call


def _explained(direction: Any, of: Operands, spec: AttentionSpec, target: _Target) -> ExplainedPass:
    if spec.implementation == "xla":
        return ExplainedPass(direction, "XLA", why=('implementation="xla" was passed',))
    if target.cc is None:
        if spec.implementation == "cuda":
            why = 'implementation="cuda" needs a CUDA device'
            return ExplainedPass(direction, "error", why=(why,))
        why = 'kernels need a CUDA device: pass gpu=, such as gpu="H100", to ask about one'
        return ExplainedPass(direction, "XLA", why=(why,))
    changes: list[str] = []
    try:
        with ffi.assumed_capability(target.cc):
            if direction == "decode":
                workspace = 0
                if of.row_bounds is not None:
                    of = _with_work_list(of, spec)
                    workspace = 4 * (of.work.size + 1)  # and the counter
                lowering.require_decode_kernel(of, spec)
                workspace += 4 * sum(map(math.prod, lowering.decode_workspace(of, spec)))
            else:
                of, spec = _rewritten(direction, of, spec, changes)
                ffi.require_kernels(direction, of, spec)
                workspace = 4
                if direction == "backward":
                    workspace *= ffi.backward_workspace(of, spec)[1]
            kernels = _kernels(direction, of, spec, target)
    except NotImplementedError as error:
        return ExplainedPass(direction, "error", changes=tuple(changes), why=(str(error),))
    if not kernels:
        why = f"no kernel of this build runs on {_capability(target.cc)}{ffi.whole_build()}"
        return ExplainedPass(direction, "error", changes=tuple(changes), why=(why,))
    return ExplainedPass(direction, "kernels", kernels, tuple(changes), (), workspace)


def _rewritten(
    direction: Any, of: Operands, spec: AttentionSpec, changes: list[str]
) -> tuple[Operands, AttentionSpec]:
    """The call that kernels run, after the rewrites of the lowering, which `changes` collects."""
    while (found := lowering.rewritten(direction, of, spec, False)) is not None:
        rewrite, to = found
        run = functools.partial(_run, rewrite, direction, spec, of.names, to)
        inner = _equations(jax.make_jaxpr(run)(*of.leaves))
        after, spec = next((of, spec) for name, of, spec in inner if name == direction)
        changes.append(_change(of, after))
        of = after
    return of, spec


def _with_work_list(of: Operands, spec: AttentionSpec) -> Operands:
    listed = functools.partial(lowering.with_work_list, spec=spec, names=of.names)
    ((_, after, _),) = _equations(jax.make_jaxpr(listed)(*of.leaves))
    return after


def _run(rewrite: Any, direction: Any, spec: Any, names: Any, to: Any, *leaves: Any) -> Any:
    return rewrite(direction, spec, Operands.of(names, leaves), to)


def _change(before: Operands, after: Operands) -> str:
    if before.query.shape[0] != after.query.shape[0]:
        return f"{before.query.shape[0]} short rows are packed into one"
    if before.key.shape[2] != after.key.shape[2]:
        parts = after.key.shape[2] // before.key.shape[2]
        return f"the query heads of each key/value head are divided into {parts} parts"
    if before.key.shape[1] != after.key.shape[1]:
        return f"keys are padded from {before.key.shape[1]} to {after.key.shape[1]}"
    old, new = (f"{x.query.shape[3]}/{x.value.shape[3]}" for x in (before, after))
    return f"head dims (query/value) are padded from {old} to {new}"


def _kernels(direction: Any, of: Operands, spec: AttentionSpec, target: _Target) -> tuple[str, ...]:
    assert ffi.ext is not None and target.cc is not None
    driver = {} if target.driver is None else {"driver": target.driver}
    call = ffi.fields(direction, of, spec)
    found = ffi.ext.select(direction, target.cc, target.multiprocessors, call, **driver)
    return tuple(kernel for kernel, _ in found)


# --- Why not faster


def _without_options(call: _Call) -> list[tuple[str, _Call]]:
    """The call without each of its options, without all of them, and in bfloat16."""
    if call.decodes:
        return []
    given = {name: x for name, x in call.options.items() if name not in _NEUTRAL}
    present = [name for name, x in given.items() if x is not None and x is not False]
    if isinstance(call.options.get("scale"), (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
        present.append("scale")
    found = [(f"without {name}", call.without((name,))) for name in present]
    if len(present) > 1:
        every = f"{', '.join(present[:-1])} and {present[-1]}"
        found.append((f"without {every}", call.without(tuple(present))))
    if getattr(call.query, "dtype", None) == jnp.float32:
        found.append(("in bfloat16", call.of_dtype(jnp.bfloat16)))
    return found


def _faster(one: ExplainedPass, others: list[tuple[str, _Call]], target: _Target) -> list[str]:
    reasons = []
    for label, other in others:
        for better in _passes(other, target, one.name == "backward"):
            if better.name != one.name or better.path != "kernels":
                continue
            deterministic = label == "without deterministic" and better.kernels != one.kernels
            if _rank(better.kernels) > _rank(one.kernels) or deterministic:
                reasons.append(f"{label}, these kernels would run: {', '.join(better.kernels)}")
    if not reasons and _rank(one.kernels) < _rank(("sm80",)) and one.name != "decode":
        reasons.append("no kernel is dedicated to this GPU, dtype, these head dims and options")
    return reasons


def _rank(kernels: tuple[str, ...]) -> int:
    """Larger for faster kernels: fallback, portable, for Ampere, for Hopper."""
    text = " ".join(kernels)
    for rank, part in ((3, "sm90"), (2, "sm80"), (0, "fallback"), (0, "bias")):
        if part in text:
            return rank
    return 1


# --- Blocks


def _visited(call: _Call) -> tuple[int | None, int | None]:
    """(visited, all) blocks of 128 rows and 64 keys, or (None, None) if values are unknown."""
    mask = call.mask
    unknown = (jax.core.Tracer, jax.ShapeDtypeStruct)
    if mask is None or any(isinstance(x, unknown) for x in jax.tree.leaves(mask)):
        return None, None
    if isinstance(mask, MaskExpression):
        if call.options.get("sharding") is not None:
            return None, None
        mask = create_attention_mask(mask, q_len=call.query.shape[1], kv_len=call.key.shape[1])
    mask = mask.with_batch()
    arrays = (mask.q_blocks, mask.q_block_lists)
    if not all(getattr(x, "is_fully_addressable", True) for x in arrays):
        return None, None
    if mask.q_block_lists is not None:
        lists = np.asarray(mask.q_block_lists)
        return int(lists[..., :2].sum()), math.prod(lists.shape[:3]) * (lists.shape[3] - 2)
    lo, hi = np.asarray(mask.q_blocks)[:, [0, 3]].swapaxes(0, 1).astype(np.int64)
    odd = [(0, 0), (0, lo.shape[1] % 2)]
    lo = np.pad(lo, odd, constant_values=mask.kv_len).reshape(len(lo), -1, 2).min(axis=2)
    hi = np.pad(hi, odd).reshape(len(hi), -1, 2).max(axis=2)
    of_tiles = np.where(lo < hi, -(-hi // BLOCK) - lo // BLOCK, 0)
    return int(of_tiles.sum()), of_tiles.size * ceil_div(mask.kv_len, BLOCK)
