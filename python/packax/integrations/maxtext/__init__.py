"""MaxText's attention op, by packax: docs/guide/maxtext.md.

from packax.integrations import maxtext

maxtext.install()
"""

from packax.integrations.maxtext.attention_op import AttentionOp, reorder_sequence
from packax.integrations.maxtext.install import install

__all__ = ["AttentionOp", "install", "reorder_sequence"]
