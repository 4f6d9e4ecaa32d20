"""The checks, by worth: with a budget the first ones run, until what is left is too little for the next."""

from experiments.benchmarks.gpu_first.check import Check

HERE = "experiments.benchmarks.gpu_first."
ROW = "strategy:"
"""How the names of the rows of experiments/parity begin."""

LAZY_LOADING, EAGER_LOADING = {"CUDA_MODULE_LOADING": "LAZY"}, {"CUDA_MODULE_LOADING": "EAGER"}

MACHINE = Check("machine", HERE + "device.machine", seconds=10, limit=120)

CHECKS = (
    Check("products", HERE + "device.products", seconds=8, limit=60),
    Check("copy", HERE + "device.copy", seconds=8, limit=60),
    Check("shapes", HERE + "kernels.shapes", seconds=12, limit=60),
    Check("attention", HERE + "kernels.attention", seconds=10, limit=60),
    Check("power", HERE + "kernels.power", seconds=12, limit=60, needs="gpu"),
    Check("no_waits", HERE + "training.no_waits", seconds=15, limit=120, needs="gpu"),
    Check("no_waits_mixture", HERE + "training.no_waits", 15, 120, (True,), "gpu"),
    Check("speed_1.3b", HERE + "speed.speed", 100, 400, model="1.3b", needs="gpu", has_own_size=True),
    Check("speed_1.3b_both", HERE + "speed.alone", 50, 400, ("both",), "gpu", "1.3b", True),
    Check(
        "speed_1.3b_of_8",
        HERE + "speed.alone",
        60,
        400,
        ("residual_in_fp32=false", "bf16", True, 8),
        "gpu",
        "1.3b",
        True,
    ),
    Check("speed_1.3b_eager", HERE + "speed.alone", 40, 400, ("default", "bf16", False), "gpu", "1.3b", True),
    Check("one_device_bf16", HERE + "training.one_device", 20, 120, ("bf16",)),
    Check("one_device_compiled", HERE + "training.one_device", 40, 240, ("compiled",)),
    Check("resume", HERE + "training.resume", 20, 180, env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    Check("save", HERE + "training.save", seconds=25, limit=120),
    Check("speed_1.3b_fp8", HERE + "speed.alone", 60, 400, ("default", "fp8"), "gpu", "1.3b", True),
    Check("memory_1.3b", HERE + "speed.memory", 25, 180, ("none", 1), "gpu", "1.3b", True),
    Check("memory_1.3b_runs_out", HERE + "speed.memory", 20, 180, ("none", 8), "gpu", "1.3b", True),
    Check("memory_1.3b_recomputed_16", HERE + "speed.memory", 25, 180, ("full", 2), "gpu", "1.3b", True),
    Check("lazy_loading", HERE + "device.first_launch", 12, 60, (True,), "gpu", env=LAZY_LOADING),
    Check("fork", HERE + "device.fork", seconds=12, limit=90),
    Check("group_again", HERE + "device.group_again", seconds=12, limit=90),
    Check("gpu_tests", HERE + "device.gpu_tests", seconds=60, limit=300),
    Check("loss_chunks", HERE + "speed.loss_chunks", seconds=25, limit=180),
    Check("speed", HERE + "speed.speed", seconds=60, limit=300),
    Check("one_device_fp32", HERE + "training.one_device", 20, 120, ("fp32",)),
    Check("one_device_recomputed", HERE + "training.one_device", 20, 120, ("recomputed",)),
    Check("one_device_fp8", HERE + "training.one_device", 40, 120, ("fp8",), "gpu"),
    Check("one_device_mixture", HERE + "training.one_device", 20, 120, ("mixture",)),
    Check("memory", HERE + "speed.memory", 15, 120, ("none", 1)),
    Check("memory_recomputed", HERE + "speed.memory", 15, 120, ("full", 1), "gpu", has_own_size=True),
    Check("memory_1.3b_selective", HERE + "speed.memory", 25, 180, ("selective", 1), "gpu", "1.3b", True),
    Check(
        "eager_loading", HERE + "device.first_launch", 40, 120, (False,), "gpu", env={"CUDA_MODULE_LOADING": "EAGER"}
    ),
    Check("speed_residual_in_fp32=false", HERE + "speed.alone", 40, 300, ("residual_in_fp32=false",), "gpu"),
    Check("speed_fused_projections=true", HERE + "speed.alone", 40, 300, ("fused_projections=true",), "gpu"),
    Check("speed_fp8", HERE + "speed.alone", 60, 300, ("default", "fp8"), "gpu"),
    Check("killed_peer", HERE + "several.killed_peer", seconds=60, limit=180, needs="several"),
)


def row_check(row: str) -> Check:
    """For a row of the parity matrix, by its name."""
    return Check(ROW + row, HERE + "several.row", seconds=40, limit=300, arguments=(row,), needs="several")
