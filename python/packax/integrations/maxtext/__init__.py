"""MaxText's attention op, by packax: docs/guide/integrations.md.

from packax.integrations.maxtext import AttentionOp
"""

from packax.integrations.maxtext.attention_op import AttentionOp, reorder_sequence

__all__ = ["AttentionOp", "reorder_sequence"]
