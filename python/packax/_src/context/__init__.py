"""Context parallelism: plans that distribute rows, gathers of keys, the passes of a rank."""
