"""Checks of the device itself: its ceilings, its launches, and what its processes may do."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import torch
import torch.distributed as dist

from experiments.benchmarks.gpu_first.check import OUR_PACKAGES, CannotRun, CheckContext


def machine(context: CheckContext) -> None:
    """What there is, and the rows of the parity matrix that it has GPUs for.

    Without a GPU it is one row, in processes.
    """
    gpus = torch.cuda.device_count()
    context.measured(
        gpus=gpus,
        names=[torch.cuda.get_device_name(number) for number in range(gpus)],
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cpus=os.cpu_count(),
    )
    # If this import fails, it is known already what GPUs there are.
    from experiments.parity.rows import ROWS

    rows = [row for row in ROWS if 2 <= row.workers <= max(2, gpus)]
    context.measured(rows=[str(row) for row in rows if gpus or row.name == "ddp"])
    if gpus:
        free, total = torch.cuda.mem_get_info()
        context.measured(
            memory_bytes=total,
            free_bytes=free,
            capability=torch.cuda.get_device_capability(),
            nccl=list(torch.cuda.nccl.version()),
        )


def products(context: CheckContext) -> None:
    """bf16 products of random numbers.

    Products of ones draw less power, and are faster than those of any training.
    """
    datasheet = context.datasheet()
    is_large = context.on_gpu and context.model != "tiny"
    size = 8192 if is_large else 256
    peak = datasheet.gpu.rate("bf16") / 1e12
    context.expect_speed(
        "tflops",
        0.65 * peak,
        0.95 * peak,
        why="0.65 to 0.95 of the datasheet's peak (cluster/hardware.yaml); an H100 of the same "
        "image gave 0.81",
    )
    context.expect_speed(
        "ones_over_random",
        1.0,
        1.25,
        why="an H200 gave 1.13 with zeros, less power being drawn",
    )
    random_tflops = _product_tflops(context, torch.randn, size)
    ones_tflops = _product_tflops(context, torch.ones, size)
    context.measured(
        tflops=random_tflops,
        ones_over_random=ones_tflops / random_tflops,
        planner=datasheet.matmul.get("bf16"),
    )


def _product_tflops(context: CheckContext, make: Callable[..., torch.Tensor], size: int) -> float:
    """TFLOP/s of the bf16 product of two square matrices.

    Args:
        context: Where the check runs.
        make: Makes a matrix.
        size: Its rows and columns.
    """
    a = make(size, size, device=context.device).bfloat16()
    b = make(size, size, device=context.device).bfloat16()
    product = torch.empty_like(a)
    seconds = context.seconds_of(lambda: torch.mm(a, b, out=product))
    return 2 * size**3 / seconds / 1e12


def copy(context: CheckContext) -> None:
    """Bytes that a copy within the device's memory reads and writes per second."""
    bandwidth = context.datasheet().gpu.memory_bandwidth / 1e9
    context.expect_speed(
        "gb_per_second",
        0.8 * bandwidth,
        0.97 * bandwidth,
        why="0.8 to 0.97 of the datasheet's bandwidth (cluster/hardware.yaml); an H100 of the "
        "same image gave 0.90",
    )
    is_large = context.on_gpu and context.model != "tiny"
    x = torch.randn(2**28 if is_large else 2**20, device=context.device)
    y = torch.empty_like(x)
    context.measured(gb_per_second=2 * x.nbytes / context.seconds_of(lambda: y.copy_(x)) / 1e9)


def fork(context: CheckContext) -> None:
    """A process that is forked after everything was imported, as parity's are, can use the GPU."""
    for name in ("app.training.loop", "app.tracking.environment", "strategies.parallelize"):
        __import__(name)
    torch.optim.AdamW([torch.zeros(1)])  # imports torch.compile
    context.expect(
        "initialised_before",
        0,
        0,
        why="importing must not start CUDA, which no fork survives (torch's notes)",
    )
    context.expect("exit_code", 0, 0, why="CUDA starts in the child")
    context.measured(initialised_before=int(torch.cuda.is_initialized()))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            x = torch.ones(64, 64, device=context.device)
            code = 0 if float((x @ x).sum()) == 64**3 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    context.measured(exit_code=os.waitstatus_to_exitcode(status))


def first_launch(context: CheckContext, lazy: bool) -> None:
    """Whether the first launch of a kernel waits for what runs on another stream.

    A pipeline whose receive waits on another stream while a kernel is launched first would hang. On
    the other stream run products for half a second.

    Args:
        context: Where the check runs.
        lazy: Whether CUDA loads a kernel when it is launched first.
    """
    why = "kernels are all loaded before"
    if lazy:
        why = "CUDA's programming guide, Lazy Loading: loading a kernel may synchronise the context"
    context.expect("waited", int(lazy), int(lazy), why=why)
    context.expect("again_ms", 0.0, 5.0, why="a launch that waits for nothing takes microseconds")
    # A product takes 0.5 to 2 ms, and a queue holds about 1,000 launches.
    x = torch.randn(8192, 8192, device=context.device).bfloat16()
    y = torch.empty_like(x)
    small = torch.rand(64, device=context.device)
    side_stream = torch.cuda.Stream()
    products_ended = torch.cuda.Event()
    seconds_per_product = context.seconds_of(lambda: torch.mm(x, x, out=y))
    launch_seconds = []
    for number in (1, 2):
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(int(0.5 / seconds_per_product)):
                torch.mm(x, x, out=y)
            products_ended.record()
        start = time.perf_counter()
        torch.erfinv(small)  # nothing else here launches this kernel
        launch_seconds.append(time.perf_counter() - start)
        were_running = not products_ended.query()
        torch.cuda.synchronize()
        context.measured(**{f"chain_was_running_{number}": int(were_running)})
    first, second = launch_seconds
    context.measured(waited=int(first > 0.2), first_ms=1e3 * first, again_ms=1e3 * second)


def group_again(context: CheckContext) -> None:
    """A process group is given up and made again, as survivors of a lost peer do.

    It is one of NCCL, or of gloo on a CPU.
    """
    context.expect("sum", 2.0, 2.0, why="the second group of one rank adds up as the first: 1 each")
    context.expect_speed(
        "seconds",
        0.0,
        30.0,
        why="NCCL's communicator of one rank takes about a second, aborting less",
    )
    start = time.perf_counter()
    total = 0.0
    for number in range(2):
        backend = "nccl" if context.on_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        one = torch.ones(1, device=context.device)
        dist.all_reduce(one)
        total += float(one)
        if context.on_gpu and number == 0:
            group = dist.group.WORLD
            assert group is not None
            group.abort()
        dist.destroy_process_group()
    context.measured(sum=total, seconds=time.perf_counter() - start)


# --- tests ----------------------------------------------------------------------------------------


def gpu_tests(context: CheckContext) -> None:
    """The tests that are marked `gpu`. Without a GPU they must be found and skipped."""
    if find_spec("pytest") is None:
        raise CannotRun("pytest is not installed")
    test_files = Path("tests").rglob("test_*.py")
    files = sorted(str(path) for path in test_files if "mark.gpu" in path.read_text())
    context.expect("failed", 0, 0, why="they pass")
    context.expect(
        "passed" if context.on_gpu else "skipped", 1, None, why=f"{len(files)} files have some"
    )
    report = Path(os.environ["TMPDIR"], "report.xml")
    options = [
        "-q",
        "--import-mode=importlib",
        "-m",
        "gpu",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "-o",
        "addopts=",
        "--continue-on-collection-errors",  # a file may need a package that is missing here
    ]
    command = [sys.executable, "-m", "pytest", *options, *files]
    process = subprocess.run(command, capture_output=True, text=True)
    if not report.exists():
        raise RuntimeError(
            f"pytest ended with exit code {process.returncode}: {process.stdout[-1500:]}"
            f"{process.stderr[-500:]}"
        )
    names: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": [], "left_out": []}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        names[_outcome(case)].append(case.get("name", ""))
    context.measured(
        failed=len(names["failed"]),
        which=names["failed"],
        passed=len(names["passed"]),
        skipped=len(names["skipped"]),
    )
    if names["left_out"]:
        context.measured(files_that_need_what_is_not_installed=names["left_out"])
    if names["failed"]:
        context.measured(said=process.stdout[-2000:])


def _outcome(case: ElementTree.Element) -> str:
    """passed, failed, skipped; or left_out, for a file that needs a package that is missing."""
    problems = [element for element in case if element.tag in ("failure", "error")]
    text = "".join(element.text or "" for element in problems)
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", text)
    if missing and missing[1] not in OUR_PACKAGES:
        return "left_out"
    if problems:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"
