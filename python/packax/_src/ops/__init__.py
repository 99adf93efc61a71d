"""Attention as JAX primitives: shapes, batching, partitioning, lowering to CUDA and XLA."""
