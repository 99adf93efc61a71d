"""Mask expressions and the builder that makes an AttentionMask of them."""
