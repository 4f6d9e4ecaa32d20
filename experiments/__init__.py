"""Questions about training.

Experiment files, sweeps, scaling studies, parity, reports and benchmarks.
"""
