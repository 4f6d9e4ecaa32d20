"""`python -m experiments.benchmarks torch_pipelining`: is torch.distributed.pipelining right under data parallelism?

Four gloo processes, 2 stages × 2 data-parallel workers, a small GPT. Each schedule of torch's with DDP and with
fully_shard on its stages, as their documentation combines them; the gradients that one step leaves, beside those of the
whole batch on one device. The same for ours. What came of it is in ../LOG.md.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
from typing import Any

from experiments.benchmarks.pipeline import _batches, _build, _loss, _part

MICRO_BATCHES, STAGES, COPIES = 4, 2, 2
SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
}
OURS = {"1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_h2": 1, "zbv": 1}


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    processes = [context.Process(target=_process, args=(rank, port, answers)) for rank in range(STAGES * COPIES)]
    for process in processes:
        process.start()
    print("largest relative error of a gradient's tensor after one step, 2 stages × 2 workers, against one device")
    try:
        while (found := answers.get(timeout=120)) is not None:
            print(f"{found[0]:45} {found[1]}", flush=True)
    except queue.Empty:
        print("and then nothing for two minutes: the processes wait for each other")
    for process in processes:
        process.kill()


def _process(rank: int, port: int, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=STAGES * COPIES)
    truth = _truth()
    sides = [(f"torch {name} + {data}", name, data) for name in SCHEDULES for data in ("ddp", "fully_shard")]
    sides += [(f"ours {name} + {data}", name, data) for name in OURS for data in ("ddp", "fully_shard")]
    for title, name, data in sides:
        try:
            gradients = (_theirs if title.startswith("torch") else _ours)(rank, name, data)
            own = max((_error(gradients[key], truth[key]) for key in gradients), default=0.0)
            missing = [key for key, value in gradients.items() if value is None]
            said = f"{own:.1e}" + (f", no gradient at {len(missing)} of {len(gradients)} tensors" if missing else "")
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, said)
        failed = [text for text in everyone if not text[0].isdigit()]
        if rank == 0:
            answers.put((title, failed[0] if failed else max(everyone, key=lambda text: float(text.split(",")[0]))))
    if rank == 0:
        answers.put(None)
    dist.destroy_process_group()


def _truth() -> dict[str, Any]:
    model, (x, y) = _build(), _batches(MICRO_BATCHES * COPIES)
    _loss(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _error(found: Any, true: Any) -> float:
    if found is None:
        return 0.0
    return float((found - true).norm() / true.norm().clamp_min(1e-12))


def _share(copy: int) -> Any:
    """Each copy's half of the batch."""
    return tuple(part.chunk(COPIES)[copy] for part in _batches(MICRO_BATCHES * COPIES))


def _theirs(rank: int, name: str, data: str) -> dict[str, Any]:
    """torch's schedule with DDP or fully_shard on the stage's modules; the gradients that this process is left with."""
    import torch
    import torch.distributed.pipelining as pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    stage, copy = divmod(rank, COPIES)
    mesh = init_device_mesh("cpu", (STAGES, COPIES), mesh_dim_names=("pp", "dp"))
    chunks, model, parts = SCHEDULES[name], _build(), STAGES * SCHEDULES[name]
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    own = [stage] if chunks == 1 else [stage, parts - 1 - stage] if "ZBV" in name else [stage, STAGES + stage]
    kept, stages = {}, []
    for part in own:
        module: Any = _part(model, part, parts)
        before = [(names[id(parameter)], path) for path, parameter in module.named_parameters()]
        if data == "ddp":
            module = DistributedDataParallel(module, process_group=mesh["dp"].get_group())
        else:
            for layer in module:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(module, mesh=mesh["dp"])
        kept.update({key: (module, path) for key, path in before})
        stages.append(pipelining.PipelineStage(module, part, parts, torch.device("cpu"), group=mesh["pp"].get_group()))
    schedule = getattr(pipelining, name)(stages[0] if chunks == 1 else stages, MICRO_BATCHES, loss_fn=_loss)
    x, y = _share(copy)
    schedule.step(*((x,) if 0 in own else ()), **({"target": y, "losses": []} if parts - 1 in own else {}))
    found = {}
    for key, (module, path) in kept.items():
        gradient = getattr(module, "module", module).get_parameter(path).grad
        found[key] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def _ours(rank: int, name: str, data: str) -> dict[str, Any]:
    import torch

    from strategies.parallelize import Options, choose, parallelize

    def loss(model: Any, batch: Any) -> Any:
        return _loss(model(batch[0]), batch[1])

    x, y = _share(rank % COPIES)
    batches = list(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)))
    layout = choose("ddp+pipeline" if data == "ddp" else "fsdp+pipeline", STAGES * COPIES, pp=STAGES)
    parallel = parallelize(
        _build,
        layout,
        Options(schedule=name, chunks=OURS[name]),
        device=torch.device("cpu"),
        example=(loss, batches[0]),
    )
    weights = [1 / (MICRO_BATCHES * COPIES)] * MICRO_BATCHES
    parallel.forward_backward(batches, weights, loss)
    gradients: dict[str, Any] = {key: parameter.grad for key, parameter in parallel.named_parameters()}
    return {key: g.full_tensor() if hasattr(g, "full_tensor") else g for key, g in gradients.items()}


if __name__ == "__main__":
    main()
