"""The checks, by worth: with a budget the first ones run, until too little is left for the next."""

from functools import partial

from experiments.benchmarks.gpu_first.check import Check

PACKAGE = "experiments.benchmarks.gpu_first."
ROW_PREFIX = "strategy:"
"""How the names of checks of rows of experiments/parity begin."""

_of_1_3b = partial(Check, model="1.3b", needs="gpu", has_own_size=True)
"""A check of the model of 1.3 billion parameters, which only a GPU holds."""
_SPEED_ALONE = PACKAGE + "speed.alone"
_MEMORY = PACKAGE + "speed.memory"
_ONE_DEVICE = PACKAGE + "training.one_device"

MACHINE = Check(name="machine", function=PACKAGE + "device.machine", seconds=10, limit=120)

CHECKS = (
    Check(name="products", function=PACKAGE + "device.products", seconds=8, limit=60),
    Check(name="copy", function=PACKAGE + "device.copy", seconds=8, limit=60),
    Check(name="shapes", function=PACKAGE + "kernels.shapes", seconds=12, limit=60),
    Check(name="attention", function=PACKAGE + "kernels.attention", seconds=10, limit=60),
    Check(name="power", function=PACKAGE + "kernels.power", seconds=12, limit=60, needs="gpu"),
    Check(
        name="no_waits",
        function=PACKAGE + "training.no_waits",
        seconds=15,
        limit=120,
        needs="gpu",
    ),
    Check(
        name="no_waits_mixture",
        function=PACKAGE + "training.no_waits",
        seconds=15,
        limit=120,
        arguments=(True,),
        needs="gpu",
    ),
    _of_1_3b(name="speed_1.3b", function=PACKAGE + "speed.speed", seconds=100, limit=400),
    _of_1_3b(
        name="speed_1.3b_both",
        function=_SPEED_ALONE,
        seconds=50,
        limit=400,
        arguments=("both",),
    ),
    _of_1_3b(
        name="speed_1.3b_of_8",
        function=_SPEED_ALONE,
        seconds=60,
        limit=400,
        arguments=("residual_in_fp32=false", "bf16", True, 8),
    ),
    _of_1_3b(
        name="speed_1.3b_eager",
        function=_SPEED_ALONE,
        seconds=40,
        limit=400,
        arguments=("default", "bf16", False),
    ),
    Check(
        name="one_device_bf16",
        function=_ONE_DEVICE,
        seconds=20,
        limit=120,
        arguments=("bf16",),
    ),
    Check(
        name="one_device_compiled",
        function=_ONE_DEVICE,
        seconds=40,
        limit=240,
        arguments=("compiled",),
    ),
    Check(
        name="resume",
        function=PACKAGE + "training.resume",
        seconds=20,
        limit=180,
        env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
    Check(name="save", function=PACKAGE + "training.save", seconds=25, limit=120),
    _of_1_3b(
        name="speed_1.3b_fp8",
        function=_SPEED_ALONE,
        seconds=60,
        limit=400,
        arguments=("default", "fp8"),
    ),
    _of_1_3b(
        name="memory_1.3b",
        function=_MEMORY,
        seconds=25,
        limit=180,
        arguments=("none", 1),
    ),
    _of_1_3b(
        name="memory_1.3b_runs_out",
        function=_MEMORY,
        seconds=20,
        limit=180,
        arguments=("none", 8),
    ),
    _of_1_3b(
        name="memory_1.3b_recomputed_16",
        function=_MEMORY,
        seconds=25,
        limit=180,
        arguments=("full", 2),
    ),
    Check(
        name="lazy_loading",
        function=PACKAGE + "device.first_launch",
        seconds=12,
        limit=60,
        arguments=(True,),
        needs="gpu",
        env={"CUDA_MODULE_LOADING": "LAZY"},
    ),
    Check(name="fork", function=PACKAGE + "device.fork", seconds=12, limit=90),
    Check(name="group_again", function=PACKAGE + "device.group_again", seconds=12, limit=90),
    Check(name="gpu_tests", function=PACKAGE + "device.gpu_tests", seconds=60, limit=300),
    Check(name="loss_chunks", function=PACKAGE + "speed.loss_chunks", seconds=25, limit=180),
    Check(name="speed", function=PACKAGE + "speed.speed", seconds=60, limit=300),
    Check(
        name="one_device_fp32",
        function=_ONE_DEVICE,
        seconds=20,
        limit=120,
        arguments=("fp32",),
    ),
    Check(
        name="one_device_recomputed",
        function=_ONE_DEVICE,
        seconds=20,
        limit=120,
        arguments=("recomputed",),
    ),
    Check(
        name="one_device_fp8",
        function=_ONE_DEVICE,
        seconds=40,
        limit=120,
        arguments=("fp8",),
        needs="gpu",
    ),
    Check(
        name="one_device_mixture",
        function=_ONE_DEVICE,
        seconds=20,
        limit=120,
        arguments=("mixture",),
    ),
    Check(name="memory", function=_MEMORY, seconds=15, limit=120, arguments=("none", 1)),
    Check(
        name="memory_recomputed",
        function=_MEMORY,
        seconds=15,
        limit=120,
        arguments=("full", 1),
        needs="gpu",
        has_own_size=True,
    ),
    _of_1_3b(
        name="memory_1.3b_selective",
        function=_MEMORY,
        seconds=25,
        limit=180,
        arguments=("selective", 1),
    ),
    Check(
        name="eager_loading",
        function=PACKAGE + "device.first_launch",
        seconds=40,
        limit=120,
        arguments=(False,),
        needs="gpu",
        env={"CUDA_MODULE_LOADING": "EAGER"},
    ),
    Check(
        name="speed_residual_in_fp32=false",
        function=_SPEED_ALONE,
        seconds=40,
        limit=300,
        arguments=("residual_in_fp32=false",),
        needs="gpu",
    ),
    Check(
        name="speed_fused_projections=true",
        function=_SPEED_ALONE,
        seconds=40,
        limit=300,
        arguments=("fused_projections=true",),
        needs="gpu",
    ),
    Check(
        name="speed_fp8",
        function=_SPEED_ALONE,
        seconds=60,
        limit=300,
        arguments=("default", "fp8"),
        needs="gpu",
    ),
    Check(
        name="killed_peer",
        function=PACKAGE + "several.killed_peer",
        seconds=60,
        limit=180,
        needs="several",
    ),
)


def row_check(row: str) -> Check:
    """The check of a row of the parity matrix, by its name."""
    return Check(
        name=ROW_PREFIX + row,
        function=PACKAGE + "several.row",
        seconds=40,
        limit=300,
        arguments=(row,),
        needs="several",
    )
