"""Context parallelism: plans of rows for ranks, gathering of keys, what a rank computes."""
