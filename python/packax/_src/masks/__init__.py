"""Mask expressions, and the builder that turns them into an `AttentionMask`."""
