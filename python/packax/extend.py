"""What wrappers of packax need besides its functions, such as those in `packax.integrations`.

It checks arguments and describes them in errors as packax does, and knows which calls have kernels.
Unlike other public names, these may change in any release.
"""

from packax._src.context.load_balance import zigzag as zigzag
from packax._src.core.arguments import as_int32 as as_int32
from packax._src.core.arguments import described as described
from packax._src.core.context_mask import ContextMask as ContextMask
from packax._src.core.jax_compat import jax_nn_attention as jax_nn_attention
from packax._src.core.sharding import UNSHARDED as UNSHARDED
from packax._src.core.sharding import Layout as Layout
from packax._src.core.sharding import check_divides as check_divides
from packax._src.core.sharding import entered_mesh as entered_mesh
from packax._src.core.sharding import layout_of as layout_of
from packax._src.core.sharding import over_auto_axes as over_auto_axes
from packax._src.core.sharding import typed_axes as typed_axes
from packax._src.core.spec import accumulator as accumulator
from packax._src.core.spec import is_symbolic as is_symbolic
from packax._src.masks.expressions import instead_of_ids as instead_of_ids
from packax._src.ops.dropout import OneForAll as OneForAll
from packax._src.ops.ffi import has_kernels as has_kernels
from packax._src.ops.primitives import check_implementation as check_implementation
from packax._src.requests import DTYPES as DTYPES
from packax._src.requests import as_array as as_array
from packax._src.requests import as_arrays as as_arrays
from packax._src.requests import checked_precision as checked_precision
