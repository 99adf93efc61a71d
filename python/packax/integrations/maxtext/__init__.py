"""MaxText's attention op, computed by packax: see "MaxText" in the documentation.

Call `install()` before or after MaxText's modules are imported:

    from packax.integrations import maxtext

    maxtext.install()
"""

from packax.integrations.maxtext.attention_op import AttentionOp, reorder_sequence
from packax.integrations.maxtext.install import install

__all__ = ["AttentionOp", "install", "reorder_sequence"]
