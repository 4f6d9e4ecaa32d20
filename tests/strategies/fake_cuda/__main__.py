"""Try cases on fake CUDA devices, each in forks of this process.

`python -m tests.strategies.fake_cuda` reads the number of a case from each line of its input, and
answers with a line of JSON: the list of the case's problems. Ranks are forks of this process, which
has imported everything, because a process of its own would take seconds to start.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.strategies.fake_cuda import device

TIMEOUT = 240.0
"""Seconds that the ranks of a case may take."""
Work = Callable[[int], dict[str, Any]]


def serve() -> None:
    """Answer until the input ends."""
    device.install(8)
    importlib.import_module("torch._dynamo")  # every case would import it otherwise

    from tests.strategies.fake_cuda import cases

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a case prints must not become a part of the answer
    references: dict[str, dict[str, Any]] = {}
    gc.disable()
    gc.freeze()  # a collection in a fork would copy every page that it looks at
    for line in sys.stdin:
        case = cases.CASES[int(line)]
        for module in case.imports:
            importlib.import_module(module)
        key = str(case.reference)
        if case.reference is not None and key not in references:
            references[key] = run_ranks(case.reference, 1)[0]
        results = run_ranks(case.work, case.workers)
        problems = cases.problems(case, results, references.get(key))
        print(json.dumps(problems), file=answers, flush=True)


def run_ranks(work: Work, workers: int) -> list[dict[str, Any]]:
    """The result of `work(rank)` on every rank, or {"error": …}."""
    deadline = time.monotonic() + TIMEOUT
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="fake-cuda-") as folder:
        processes = []
        for rank in range(workers):
            process = fork.Process(target=_run_rank, args=(work, workers, rank, Path(folder)))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        return [_read_result(Path(folder), rank) for rank in range(workers)]


def _read_result(folder: Path, rank: int) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return json.loads((folder / str(rank)).read_text())
    output = (folder / f"stderr{rank}").read_text(errors="replace")
    return {"error": f"rank {rank} ended, or took more than {TIMEOUT:g} s: {output[-1000:]}"}


def _run_rank(work: Work, workers: int, rank: int, folder: Path) -> None:
    """What a fork does: it leaves its result in the folder."""
    import torch.distributed as dist

    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    tempfile.tempdir = str(folder)  # temporary files of a rank are removed with the folder
    try:
        os.environ["LOCAL_RANK"] = str(rank)
        os.environ["LOCAL_WORLD_SIZE"] = str(workers)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if workers > 1:
            store = dist.FileStore(str(folder / "store"), workers)
            dist.init_process_group(
                "cpu:gloo,cuda:gloo", store=store, rank=rank, world_size=workers
            )
        result = work(rank)
        if workers > 1:
            dist.barrier()
    except BaseException:
        result = {"error": traceback.format_exc()}
    partial_file = folder / f"part{rank}"
    partial_file.write_text(json.dumps(result))
    os.replace(partial_file, folder / str(rank))
    os._exit(0)


if __name__ == "__main__":
    serve()
