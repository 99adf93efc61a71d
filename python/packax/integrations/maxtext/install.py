"""`install()`: makes MaxText's attention op use packax where possible.

The new op is a subclass of MaxText's that overrides `__init__` and `__call__`; everything else that
layers use (the mask of a sparse indexer, names in checkpoints) is inherited. Calls that packax does
not support run on MaxText's "dot_product" attention, with one warning.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import math
import threading
from typing import Any

from flax import linen, nnx
from jax.sharding import PartitionSpec as P

from packax import AttentionSharding
from packax.integrations import replace_everywhere
from packax.integrations.fallback import fall_back, why_not
from packax.integrations.maxtext.attention_op import TRAIN, AttentionOp, reordered_ranks
from packax.integrations.maxtext.masks import reorder_sequence

KERNELS = ("packax", "autoselected", "flash", "cudnn_flash_te", "cudnn_flash_jax")
_ORDERED = {  # the arrays of a batch that have one value per token
    *("inputs", "inputs_position", "inputs_segmentation", "corruption_mask"),
    *("targets", "targets_position", "targets_segmentation", "targets_loss_mask"),
}
_OWN = ("pad_kv_total", "compress_ratio", "slot")  # no effect without compressed_kv
_DENSE = "dot_product"
_TILE = 256  # rows per rank must be a multiple: two chunks of whole 128-row tiles
_BATCH, _ROWS, _HEADS = "activation_batch_attn", "activation_q_length", "activation_heads"
_chosen: set[str] = set(KERNELS)
_said: set[str] = set()
_lock = threading.Lock()  # of the two sets, and of `install`, which replaces a class once
_logger = logging.getLogger("packax")


def install(*, every: bool = False) -> None:
    """Replaces MaxText's attention by packax's, before or after its modules are imported.

    MaxText's AttentionOp then uses packax with `attention=packax`, and with the settings that
    select a fused kernel: autoselected (the default), flash, cudnn_flash_te and cudnn_flash_jax.
    `attention=dot_product` remains MaxText's own. packax uses the axes of MaxText's mesh and rules;
    the first call logs one line that names them (logger "packax", at level INFO).

    Tokens are reordered for context parallelism without TransformerEngine, always by swapping two
    chunks per rank: the "striped" order of TransformerEngine is for its own kernels, and packax
    does not need it.

    Args:
        every: also for dot_product, the only setting that MaxText's checks accept for MoBA, sparse
            indexers and block diffusion. The last call wins.

    Raises:
        ModuleNotFoundError: maxtext (0.2) is not installed.

    Examples:
        >>> import packax.integrations.maxtext
        >>> packax.integrations.maxtext.install()  # and then MaxText's train.main(argv)
    """
    with _lock:
        _install(every)


def _install(every: bool) -> None:
    module = importlib.import_module("maxtext.layers.attention_op")
    theirs = module.AttentionOp
    (_chosen.add if every else _chosen.discard)(_DENSE)
    if hasattr(theirs, "by_packax"):
        return
    ours = _op_of(theirs)
    utils = importlib.import_module("maxtext.utils.max_utils")
    replace_everywhere(theirs, ours, "maxtext")
    replace_everywhere(utils.reorder_causal_load_balanced, _reordered, "maxtext")


def _reordered(batch: Any, cp_size: int, reorder_strategy: Any = None, hardware: str = "") -> Any:
    """Replaces MaxText's reorder_causal_load_balanced: two chunks per rank on any hardware."""
    return {
        name: reorder_sequence(x, cp_size) if name in _ORDERED else x for name, x in batch.items()
    }


def _op_of(theirs: Any) -> type:
    own_init, own_call = theirs.__init__, theirs.__call__
    init, call = inspect.signature(own_init), inspect.signature(own_call)

    @functools.wraps(own_init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        given = init.bind(self, *args, **options)
        kernel = given.arguments.get("attention_kernel")
        # In MaxText, only TransformerEngine's kernel supports dropout.
        drops = given.arguments.get("dropout_rate", 0.0) > 0.0 and kernel == "cudnn_flash_te"
        chosen = kernel in _chosen and not drops
        if drops:
            fall_back("MaxText's attention", "dropout", "TransformerEngine")
        if chosen:
            given.arguments["attention_kernel"] = _DENSE
        own_init(*given.args, **given.kwargs)
        self.by_packax = chosen

    @functools.wraps(own_call)
    def __call__(self: Any, *args: Any, **options: Any) -> Any:
        given = call.bind(self, *args, **options)
        given.apply_defaults()
        reason = _no_kernel(self, given.arguments) if self.by_packax else None
        if reason is not None:
            fall_back("MaxText's attention", reason, "MaxText's dot_product")
        if not self.by_packax or reason is not None:
            return own_call(self, *args, **options)
        return _attend(self, given.arguments)

    return type(theirs)(
        theirs.__name__,
        (theirs,),
        {
            "__init__": __init__,
            "__call__": __call__,
            "__module__": theirs.__module__,
            "__qualname__": theirs.__qualname__,
            "__doc__": theirs.__doc__,
            "by_packax": False,
        },
    )


def _no_kernel(op: Any, given: dict[str, Any]) -> str | None:
    """The feature of the call that only MaxText supports, or None."""
    if getattr(op.attention_type, "value", op.attention_type) == "compressed":
        return 'attention_type "compressed"'
    if given.get("compressed_kv") is not None or given.get("compressed_mask") is not None:
        return "compressed keys"
    if op.kv_quant is not None:
        return "a quantized cache"
    # There is none for 576/512 with use_mla_absorbed_mqa.
    return why_not(given["query"], given["key"], given["value"], blockwise=False)


def _attend(op: Any, given: dict[str, Any]) -> Any:
    given = {name: x for name, x in given.items() if name not in ("self", *_OWN)}
    query, key = given["query"], given["key"]
    training = given["model_mode"] == TRAIN and given.get("previous_chunk") is None
    sharding = sharding_of(op.mesh, query.shape, key.shape, op.config) if training else None
    ours = AttentionOp(
        op.config,
        op.mesh,
        attention_type=op.attention_type,
        attn_logits_soft_cap=op.attn_logits_soft_cap,
        sliding_window_size=op.sliding_window_size,
        chunk_attn_window_size=op.chunk_attn_window_size,
        sharding=sharding,
    )
    ours.stripes = 1  # _reordered never makes the striped order
    _say(op, sharding)
    out = ours(**given)
    if given.get("record_max_logits"):
        op.max_logits = nnx.Intermediate(ours.max_logits.get_value())
    return out


def _say(op: Any, sharding: Any) -> None:
    """Logs one line about the version and sharding, in the first call only."""
    with _lock:
        if _said:
            return
        _said.add("sharding")
    axes = "on one device"
    if op.mesh is not None and op.mesh.size > 1:
        axes = f"on a mesh of {op.mesh.size}, as jit divides it"
    if sharding is not None:
        names = zip(("batch", "context", "heads"), sharding.query, strict=False)
        axes = "over the mesh: " + ", ".join(f"{what} {x}" for what, x in names if x is not None)
    line = f"packax: attention of MaxText {importlib.metadata.version('maxtext')}, {axes}"
    _logger.info(line)


# --- The `AttentionSharding` for MaxText's mesh and logical axis rules.


def sharding_of(
    mesh: Any, query: tuple[int, ...], key: tuple[int, ...], config: Any
) -> AttentionSharding | None:
    """The sharding of attention; None: nothing is sharded.

    Mesh axes of size 1 are omitted, as are trailing axes that do not divide the array's size.
    Axes of an enclosing `shard_map` or `vmap` (pipeline stages) are not used. If tokens were
    reordered over the context axis and are sharded over further axes, such as Ulysses axes, these
    shard the heads. The sequence is not sharded if the keys have another length, or if tokens were
    reordered for another number of ranks or in chunks that are not multiples of 128 rows.
    """
    if mesh is None or mesh.size == 1:
        return None
    rules = linen.get_logical_axis_rules()
    batch, rows, heads = (
        _dividing(mesh, _axes(mesh, name, rules), size)
        for name, size in ((_BATCH, query[0]), (_ROWS, query[1]), (_HEADS, query[2]))
    )
    ranks = math.prod(mesh.shape[axis] for axis in rows)
    if not (batch or rows or heads):
        return None
    ordered = reordered_ranks(mesh, config)
    context = getattr(config, "context_sharding", "context")
    if 1 < ordered < ranks and context in rows:
        others = tuple(axis for axis in rows if axis != context)  # Ulysses
        heads = _dividing(mesh, (*heads, *others), query[2])
        rows, ranks = (context,), ordered
    in_tiles = ordered == 1 or (ordered == ranks and query[1] % (_TILE * ranks) == 0)
    if query[1] != key[1] or not in_tiles:
        rows = ()
    of_heads = heads if heads == _dividing(mesh, heads, key[2]) else ()
    return AttentionSharding(
        query=P(*(x or None for x in (batch, rows, heads, ()))),
        key_value=P(*(x or None for x in (batch, rows, of_heads, ()))),
        mesh=mesh,
    )


def _axes(mesh: Any, name: str, rules: Any) -> tuple[str, ...]:
    found = linen.logical_to_mesh_axes((name,), rules=rules)
    entry = found[0] if found else None
    axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    return tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)


def _dividing(mesh: Any, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    while axes and size % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return axes
