"""Questions about training: experiment files, sweeps, scaling studies, parity, reports, benchmarks."""
