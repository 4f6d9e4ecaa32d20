"""Checks of the device itself: what it can do at most, how it launches, and what its processes may do."""

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import torch
import torch.distributed as dist

from experiments.benchmarks.gpu_first.check import OURS, Here, NotHere


def machine(here: Here) -> None:
    """What there is. Also which rows of the parity matrix there are GPUs for; without a GPU one, in processes."""
    gpus = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(number) for number in range(gpus)]
    here.found(gpus=gpus, names=names, torch=torch.__version__, cuda=torch.version.cuda, cpus=os.cpu_count())
    from experiments.parity.rows import ROWS  # if that fails, it is known what GPUs there are

    rows = [row for row in ROWS if 2 <= row.workers <= max(2, gpus)]
    here.found(rows=[str(row) for row in rows if gpus or row.name == "ddp"])
    if gpus:
        free, total = torch.cuda.mem_get_info()
        here.found(memory_bytes=total, free_bytes=free, capability=torch.cuda.get_device_capability())
        here.found(nccl=list(torch.cuda.nccl.version()))


def products(here: Here) -> None:
    """bf16 products of random numbers: of ones they draw less power, and are faster than any training's."""
    sheet, size = here.datasheet(), 8192 if here.on_gpu and here.model != "tiny" else 256
    peak = sheet.gpu.rate("bf16") / 1e12
    why = "0.65 to 0.95 of the datasheet's peak (cluster/hardware.yaml); an H100 of the same image gave 0.81"
    here.expect_speed("tflops", 0.65 * peak, 0.95 * peak, why)
    here.expect_speed("ones_over_random", 1.0, 1.25, "an H200 gave 1.13 with zeros, less power being drawn")
    rates = {}
    for name, make in (("random", torch.randn), ("ones", torch.ones)):
        a, b = (make(size, size, device=here.device).bfloat16() for _ in range(2))
        c = torch.empty_like(a)
        rates[name] = 2 * size**3 / here.seconds_of(lambda a=a, b=b, c=c: torch.mm(a, b, out=c)) / 1e12  # type: ignore[misc]
    here.found(
        tflops=rates["random"], ones_over_random=rates["ones"] / rates["random"], planner=sheet.matmul.get("bf16")
    )


def copy(here: Here) -> None:
    """Bytes read and written by a copy within the device's memory."""
    most = here.datasheet().gpu.memory_bandwidth / 1e9
    why = "0.8 to 0.97 of the datasheet's bandwidth (cluster/hardware.yaml); an H100 of the same image gave 0.90"
    here.expect_speed("gb_per_second", 0.8 * most, 0.97 * most, why)
    x = torch.randn(2**28 if here.on_gpu and here.model != "tiny" else 2**20, device=here.device)
    y = torch.empty_like(x)
    here.found(gb_per_second=2 * x.nbytes / here.seconds_of(lambda: y.copy_(x)) / 1e9)


def fork(here: Here) -> None:
    """A process forked from one that has imported everything, as parity's are, must be able to use the GPU."""
    for name in ("app.training.loop", "app.tracking.environment", "strategies.parallelize"):
        __import__(name)
    torch.optim.AdamW([torch.zeros(1)])  # imports torch.compile
    here.expect("initialised_before", 0, 0, "importing must not start CUDA, which no fork survives (torch's notes)")
    here.expect("exit_code", 0, 0, "CUDA starts in the child")
    here.found(initialised_before=int(torch.cuda.is_initialized()))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            x = torch.ones(64, 64, device=here.device)
            code = 0 if float((x @ x).sum()) == 64**3 else 2
        finally:
            os._exit(code)
    here.found(exit_code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def first_launch(here: Here, lazy: bool) -> None:
    """Whether a kernel's first launch waits for what runs on another stream, here a chain of products of half a second.
    A pipeline whose receive waits on another stream while a kernel is first launched would hang."""
    why = "CUDA's programming guide, Lazy Loading: loading a kernel may synchronise the context"
    here.expect("waited", int(lazy), int(lazy), why if lazy else "kernels are all loaded before")
    here.expect("again_ms", 0.0, 5.0, "a launch that waits for nothing takes microseconds")
    x = torch.randn(8192, 8192, device=here.device).bfloat16()  # 0.5 to 2 ms each: a queue holds about 1,000 launches
    y, little, side = torch.empty_like(x), torch.rand(64, device=here.device), torch.cuda.Stream()
    seconds, ended = here.seconds_of(lambda: torch.mm(x, x, out=y)), torch.cuda.Event()
    launched = []
    for _ in range(2):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(int(0.5 / seconds)):
                torch.mm(x, x, out=y)
            ended.record()
        begun = time.perf_counter()
        torch.erfinv(little)  # which nothing here has launched before
        launched.append(time.perf_counter() - begun)
        running = not ended.query()
        torch.cuda.synchronize()
        here.found(**{f"chain_was_running_{len(launched)}": int(running)})
    here.found(waited=int(launched[0] > 0.2), first_ms=1e3 * launched[0], again_ms=1e3 * launched[1])


def group_again(here: Here) -> None:
    """A process group that is given up and made again, as survivors of a lost peer do; NCCL, or gloo on a CPU."""
    here.expect("sum", 2.0, 2.0, "the second group of one rank adds up as the first: 1 each")
    here.expect_speed("seconds", 0.0, 30.0, "NCCL's communicator of one rank takes about a second, aborting less")
    begun, total = time.perf_counter(), 0.0
    for number in range(2):
        store = dist.HashStore()
        dist.init_process_group("nccl" if here.on_gpu else "gloo", store=store, rank=0, world_size=1)
        one = torch.ones(1, device=here.device)
        dist.all_reduce(one)
        total += float(one)
        if here.on_gpu and number == 0:
            group = dist.group.WORLD
            assert group is not None
            group.abort()
        dist.destroy_process_group()
    here.found(sum=total, seconds=time.perf_counter() - begun)


def gpu_tests(here: Here) -> None:
    """The suite's tests that are marked `gpu`; where there is no GPU they must at least be found, and be skipped."""
    if find_spec("pytest") is None:
        raise NotHere("pytest is not installed")
    files = sorted(str(path) for path in Path("tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    here.expect("failed", 0, 0, "they pass")
    here.expect("passed" if here.on_gpu else "skipped", 1, None, f"{len(files)} files have some")
    report = Path(os.environ["TMPDIR"], "report.xml")
    options = ["-m", "gpu", "--noconftest", "-p", "no:cacheprovider", f"--junitxml={report}", "-o", "addopts="]
    options.append("--continue-on-collection-errors")  # a file may need what is not installed here
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True)
    if not report.exists():
        raise RuntimeError(f"pytest ended with exit code {done.returncode}: {done.stdout[-1500:]}{done.stderr[-500:]}")
    by: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": [], "left_out": []}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        by[_outcome(case)].append(case.get("name", ""))
    here.found(failed=len(by["failed"]), which=by["failed"], passed=len(by["passed"]), skipped=len(by["skipped"]))
    if by["left_out"]:
        here.found(files_that_need_what_is_not_installed=by["left_out"])
    if by["failed"]:
        here.found(said=done.stdout[-2000:])


def _outcome(case: ElementTree.Element) -> str:
    """passed, failed, skipped, or left_out: a file that cannot be imported without a package that is not here."""
    bad = [each for each in case if each.tag in ("failure", "error")]
    lacks = re.search(r"ModuleNotFoundError: No module named '(\w+)", "".join(each.text or "" for each in bad))
    if lacks and lacks[1] not in OURS:
        return "left_out"
    return "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
