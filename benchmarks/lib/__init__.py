"""What the programs in benchmarks/ share: cases, timing, references, tables."""
