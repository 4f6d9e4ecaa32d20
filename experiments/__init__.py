"""What is asked: experiment files, benchmarks, and later sweeps and scaling studies."""
