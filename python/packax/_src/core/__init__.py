"""What every layer reads: the mask's fields, sharding, precision, sizes. Imports no other layer."""
