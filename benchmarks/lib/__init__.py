"""Shared by the programs in benchmarks/: cases, timing, references, tables."""
