"""`python -m tests.strategies.fake_cuda` reads a case's number from each line of its input, tries the case and answers
with its problems as JSON. Ranks are forks of this process, which has imported everything: one of its own would take
seconds to begin."""

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

SECONDS = 240.0
"""That ranks may take."""
Work = Callable[[int], dict[str, Any]]


def serve() -> None:
    device.install(8)
    importlib.import_module("torch._dynamo")  # what every case would import by itself otherwise

    from tests.strategies.fake_cuda import cases

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the cases print is not part of the answer
    truths: dict[str, dict[str, Any]] = {}
    gc.disable()
    gc.freeze()  # a collection in a fork would copy every page that it looks at
    for line in sys.stdin:
        case = cases.CASES[int(line)]
        for name in case.imports:
            importlib.import_module(name)
        key = str(case.truth)
        if case.truth is not None and key not in truths:
            truths[key] = run(case.truth, 1)[0]
        print(json.dumps(cases.problems(case, run(case.work, case.workers), truths.get(key))), file=out, flush=True)


def run(work: Work, workers: int) -> list[dict[str, Any]]:
    """What `work(rank)` gave on every rank, or {"error": …}."""
    until = time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory(prefix="fake-cuda-") as folder:
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=_rank, args=(work, workers, rank, Path(folder))) for rank in range(workers)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()
        return [_answer(Path(folder), rank) for rank in range(workers)]


def _answer(folder: Path, rank: int) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return json.loads((folder / str(rank)).read_text())
    said = (folder / f"said{rank}").read_text(errors="replace")
    return {"error": f"rank {rank} ended, or took more than {SECONDS:g} s: {said[-1000:]}"}


def _rank(work: Work, workers: int, rank: int, folder: Path) -> None:
    import torch.distributed as dist

    os.dup2(os.open(folder / f"said{rank}", os.O_WRONLY | os.O_CREAT), 2)
    tempfile.tempdir = str(folder)  # what a rank leaves there goes with it
    try:
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers), "GLOO_SOCKET_IFNAME": "lo"}
        if workers > 1:
            store = dist.FileStore(str(folder / "store"), workers)
            dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=rank, world_size=workers)
        answer = work(rank)
        if workers > 1:
            dist.barrier()
    except BaseException:
        answer = {"error": traceback.format_exc()}
    (folder / f"part{rank}").write_text(json.dumps(answer))
    os.replace(folder / f"part{rank}", folder / str(rank))
    os._exit(0)


if __name__ == "__main__":
    serve()
