"""What wrappers of packax need besides its functions, such as those in `packax.integrations`.

It checks arguments and describes them in errors as packax does, and knows which calls have kernels.
Unlike other public names, these may change in any release.
"""

from packax._src.core.arguments import as_int32, described
from packax._src.core.context_mask import ContextMask
from packax._src.core.jax_compat import jax_nn_attention
from packax._src.core.sharding import (
    Layout,
    check_divides,
    entered_mesh,
    layout_of,
    over_auto_axes,
    typed_axes,
)
from packax._src.core.spec import accumulator, is_symbolic
from packax._src.masks.expressions import instead_of_ids
from packax._src.ops.dropout import OneForAll
from packax._src.ops.ffi import has_kernels
from packax._src.ops.primitives import check_implementation
from packax._src.requests import DTYPES, as_array, as_arrays, checked_precision

__all__ = [
    "DTYPES",
    "ContextMask",
    "Layout",
    "OneForAll",
    "accumulator",
    "as_array",
    "as_arrays",
    "as_int32",
    "check_divides",
    "check_implementation",
    "checked_precision",
    "described",
    "entered_mesh",
    "has_kernels",
    "instead_of_ids",
    "is_symbolic",
    "jax_nn_attention",
    "layout_of",
    "over_auto_axes",
    "typed_axes",
]
