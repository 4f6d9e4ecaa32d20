"""The checks, in the order in which they run: what most others depend on comes first."""

from experiments.benchmarks.gpu_first.check import Check

HERE = "experiments.benchmarks.gpu_first."
ROW = "strategy:"
"""How the names of the rows of experiments/parity begin."""

MACHINE = Check("machine", HERE + "device.machine", 120)

CHECKS = (
    Check("products", HERE + "device.products", 60),
    Check("copy", HERE + "device.copy", 60),
    Check("fork", HERE + "device.fork", 90),
    Check("lazy_loading", HERE + "device.first_launch", 60, (True,), "gpu", env={"CUDA_MODULE_LOADING": "LAZY"}),
    Check("eager_loading", HERE + "device.first_launch", 120, (False,), "gpu", env={"CUDA_MODULE_LOADING": "EAGER"}),
    Check("group_again", HERE + "device.group_again", 90),
    Check("gpu_tests", HERE + "device.gpu_tests", 300),
    Check("one_device_fp32", HERE + "training.one_device", 120, ("fp32",)),
    Check("one_device_bf16", HERE + "training.one_device", 120, ("bf16",)),
    Check("one_device_recomputed", HERE + "training.one_device", 120, ("recomputed",)),
    Check("one_device_compiled", HERE + "training.one_device", 240, ("compiled",)),
    Check("one_device_fp8", HERE + "training.one_device", 120, ("fp8",), "gpu"),
    Check("one_device_mixture", HERE + "training.one_device", 120, ("mixture",)),
    Check("no_waits", HERE + "training.no_waits", 120, needs="gpu"),
    Check("no_waits_mixture", HERE + "training.no_waits", 120, (True,), "gpu"),
    Check("resume", HERE + "training.resume", 180, env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    Check("loss_chunks", HERE + "speed.loss_chunks", 180),
    Check("speed", HERE + "speed.speed", 300),
    Check("speed_residual_in_fp32=false", HERE + "speed.speed", 300, ("residual_in_fp32=false",), "gpu"),
    Check("speed_fused_projections=true", HERE + "speed.speed", 300, ("fused_projections=true",), "gpu"),
    Check("speed_fp8", HERE + "speed.speed", 300, ("default", "fp8"), "gpu"),
    Check("speed_1.3b", HERE + "speed.speed", 400, model="1.3b", needs="gpu", has_own_size=True),
    Check("speed_1.3b_options", HERE + "speed.speed", 400, ("both",), "gpu", "1.3b", True),
    Check("save", HERE + "training.save", 120),
    Check("memory", HERE + "speed.memory", 120, ("none", 1)),
    Check("memory_recomputed", HERE + "speed.memory", 120, ("full", 1), "gpu", has_own_size=True),
    Check("memory_1.3b", HERE + "speed.memory", 180, ("none", 1), "gpu", "1.3b", True),
    Check("memory_1.3b_selective", HERE + "speed.memory", 180, ("selective", 1), "gpu", "1.3b", True),
    Check("memory_1.3b_recomputed_16", HERE + "speed.memory", 180, ("full", 2), "gpu", "1.3b", True),
    Check("memory_1.3b_runs_out", HERE + "speed.memory", 180, ("none", 8), "gpu", "1.3b", True),
    Check("killed_peer", HERE + "several.killed_peer", 180, needs="several"),
)


def row_check(row: str) -> Check:
    """For a row of the parity matrix, by its name."""
    return Check(ROW + row, HERE + "several.row", 300, (row,), "several")
