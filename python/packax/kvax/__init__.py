"""kvax's public API on packax: change only `kvax` to `packax.kvax` in the imports.

`ops` and `utils` have the modules, names, arguments and defaults of kvax 0.1.0. Where kvax's
results depend on block sizes or are wrong, these are exact. "From kvax" in the documentation lists
every difference.

Examples:
    >>> from packax.kvax.ops import create_attention_mask, flash_attention
    >>> from packax.kvax.utils import attention_specs
"""

from packax.kvax import ops, utils

__all__ = ["ops", "utils"]
