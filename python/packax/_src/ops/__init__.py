"""One attention call as JAX primitives: shapes, batching, lowering to CUDA kernels and to XLA."""
