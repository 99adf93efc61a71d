"""The primitives called with named operands."""

from packax._src.core.spec import AttentionSpec, Operands
from packax._src.ops import primitives

ALL = ("query", "key", "value")
SPEC = AttentionSpec(scale=0.3, mask_mode=2, needs_grad=ALL)


def forward(query, key, value, mask, spec=SPEC):
    """`mask`: a dict of its arrays for both passes."""
    return primitives.forward(spec, of_pass("forward", mask, query=query, key=key, value=value))


def backward(tensors, mask, spec=SPEC):
    """`tensors`: query to dlse, or to dout."""
    named = dict(zip(Operands._fields, tensors, strict=False))
    return primitives.backward(spec, of_pass("backward", mask, **named))


def of_pass(direction, mask, **tensors):
    unread = {"forward": ("kv_blocks", "kv_order"), "backward": ("q_order_192",)}[direction]
    return Operands(**tensors, **{name: x for name, x in mask.items() if name not in unread})


def arrays_of(mask):
    """A mask's arrays for both passes, by name."""
    return mask.operands("forward") | mask.operands("backward")
