"""The parts of benchmarks/soak.py: its job, its cluster, the faults, and the counts."""
