"""The rows of the table: what must hold for every call. A property runs a call in some way, and
returns what is wrong with the results; `reason` says where it does not apply."""

from properties import meshes, over_ranks, transformations, values  # noqa: F401, which add rows
from properties.rows import PROPERTIES, Property

__all__ = ["PROPERTIES", "Property"]
