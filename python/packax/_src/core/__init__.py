"""What all layers share: the mask, sharding, precision, sizes. Imports no other layer."""
