"""Context parallelism: how a sequence is split over GPUs, and plans that balance the work.

The names that most programs use are also in `packax`.
"""

from packax._src.context.load_balance import ContextPlan
from packax._src.context.plan_check import check_plan
from packax._src.context.processes import check_same_rows, process_rows
from packax._src.core.debug import debug_checks
from packax._src.core.sharding import AttentionSharding
from packax._src.masks.planning import (
    ShardedBatch,
    context_plan,
    shard_batch,
)
from packax._src.masks.plot import plot_plan

__all__ = [
    "AttentionSharding",
    "ContextPlan",
    "ShardedBatch",
    "check_plan",
    "check_same_rows",
    "context_plan",
    "debug_checks",
    "plot_plan",
    "process_rows",
    "shard_batch",
]
