"""`python -m experiments.benchmarks.pipeline`: our pipeline beside torch.distributed.pipelining's, and beside theory.

Arguments, if any: rounds, then the numbers of micro-batches per step.

Two processes, a GPT of 8 blocks (width 256, 128 tokens), AdamW. All sides take turns, one step each per round, in an
order that is turned round every second round, so that whatever else the machine does falls on all. They live in two
fleets that sleep while the other works: plain processes, and Ray actors that are called once per step. `torch …` is the
stage and schedule as its documentation has them, written by hand; `ours …` is `strategies.parallelize.parallelize`. The
figures are medians over rounds of a step's time (forward, backward, optimizer) on the slower of the two processes, and
medians of the ratios within rounds.

`ideal` is (m + p - 1)(t_F + t_B) with the stage times that our own runtime measures in profiled steps, beside the time
of forward_backward alone.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from strategies.collectives import keep_freed_memory

BLOCKS, WIDTH, TOKENS, VOCABULARY, ROWS, STAGES = 8, 256, 128, 256, 2, 2

TORCH = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", 2),
    "zero_bubble": ("ScheduleInterleavedZeroBubble", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
}
OURS = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_h2": 1, "zbv": 1}
RAY, IN_ACTORS = ", in Ray actors", ["ours 1f1b", "ours zb_h2", "torch 1f1b"]
PAIRS = [*((f"ours {name}", f"torch {name}") for name in ("gpipe", "1f1b", "interleaved_1f1b", "zbv"))]
ZERO_BUBBLE = [(f"ours {name}", "ours 1f1b") for name in ("zb_h1", "zb_h2", "zbv")]


def run(micro_batches: int, rounds: int) -> dict[str, Any]:
    """Runs all sides, each in its fleet of two processes; medians and ratios."""
    os.environ["OMP_NUM_THREADS"] = "1"
    plain = ["single", *(f"torch {name}" for name in TORCH), *(f"ours {name}" for name in OURS)]
    fleets: dict[str, Any] = {"": Processes(micro_batches, plain), RAY: Actors(micro_batches, IN_ACTORS)}
    sides = [("", name) for name in plain] + [(RAY, name) for name in IN_ACTORS]
    times: dict[str, list[float]] = {name + fleet: [] for fleet, name in sides}
    called: list[float] = []  # what a Ray call takes longer than the step in it
    for number in range(rounds + 2):
        for fleet, name in sides if number % 2 else reversed(sides):
            began = time.perf_counter()
            took = fleets[fleet].call("step", name)
            whole = time.perf_counter() - began
            if number >= 2:
                times[name + fleet].append(took)
                if fleet == RAY:
                    called.append(whole - took)
    stage, whole = fleets[""].call("stage_times", rounds)
    for fleet in fleets.values():
        fleet.close()
    found = {"times": times, "stage_seconds": stage, "forward_backward_seconds": whole}
    return _summary(found, micro_batches) | {"ray_call_ms": 1e3 * statistics.median(called)}


def _summary(found: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    times: dict[str, list[float]] = found["times"]

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(times[a], times[b]))

    actors = [(name + RAY, name) for name in IN_ACTORS] + [("ours 1f1b" + RAY, "torch 1f1b")]
    pairs = [*PAIRS, *ZERO_BUBBLE, *actors, *((name, "single") for name in times if name != "single")]
    ideal = (micro_batches + STAGES - 1) * found["stage_seconds"]
    return {
        "micro_batches": micro_batches,
        "rounds": len(times["single"]),
        "step_ms": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "ratios": {f"{a} / {b}": ratio(a, b) for a, b in pairs},
        "ideal_ms": 1e3 * ideal,
        "over_ideal": found["forward_backward_seconds"] / ideal,
    }


# --- in the processes -------------------------------------------------------------------------------------------


def _build() -> Any:
    import torch

    from app.models.gpt import GPT

    torch.manual_seed(0)
    return GPT(VOCABULARY, d_model=WIDTH, n_layers=BLOCKS, n_heads=4)


def _loss(logits: Any, targets: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _batches(micro_batches: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (micro_batches * ROWS, TOKENS + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _optimizer(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-3)


def _single(micro_batches: int) -> Callable[[], None]:
    model, (x, y) = _build(), _batches(micro_batches)
    optimizer = _optimizer(model.parameters())

    def step() -> None:
        for a, b in zip(x.chunk(micro_batches), y.chunk(micro_batches)):
            (_loss(model(a), b) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _part(model: Any, part: int, parts: int) -> Any:
    """By hand: a stage's blocks, with the embedding before the first and the head after the last."""
    from torch import nn

    size = BLOCKS // parts
    layers = list(model.blocks.values())[part * size : (part + 1) * size]
    if part == 0:
        layers.insert(0, model.embed)
    if part == parts - 1:
        layers += [model.norm, model.head]
    return nn.Sequential(*layers)


def _torch(name: str, micro_batches: int, rank: int) -> Callable[[], None]:
    import torch
    import torch.distributed.pipelining as pipelining
    from torch import nn

    kind, chunks = TORCH[name]
    parts, model = STAGES * chunks, _build()
    own = [rank] if chunks == 1 else [rank, parts - 1 - rank] if name == "zbv" else [rank, STAGES + rank]
    cpu = torch.device("cpu")
    stages = [pipelining.PipelineStage(_part(model, part, parts), part, parts, cpu) for part in own]
    make = getattr(pipelining, kind)
    schedule = make(stages[0] if chunks == 1 else stages, micro_batches, loss_fn=_loss)
    optimizer = _optimizer(nn.ModuleList([stage.submod for stage in stages]).parameters())
    x, y = _batches(micro_batches)
    given = (x,) if 0 in own else ()
    target = {"target": y, "losses": []} if parts - 1 in own else {}

    def step() -> None:
        schedule.step(*given, **target)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _ours(name: str, micro_batches: int) -> tuple[Callable[[], None], Any]:
    import torch

    from strategies.parallelize import Options, choose, parallelize

    def loss(model: Any, batch: Any) -> Any:
        return _loss(model(batch[0]), batch[1])

    x, y = _batches(micro_batches)
    batches = list(zip(x.chunk(micro_batches), y.chunk(micro_batches)))
    options = Options(
        schedule=name, chunks=OURS[name], stages=(BLOCKS // STAGES,) * STAGES if OURS[name] == 1 else None
    )
    if name == "zbv":
        options = Options(schedule=name)
    parallel = parallelize(
        _build, choose("pipeline", STAGES), options, device=torch.device("cpu"), example=(loss, batches[0])
    )
    optimizer = _optimizer(parallel.parameters())
    weights = [1 / micro_batches] * micro_batches

    def forward_backward() -> None:
        parallel.forward_backward(batches, weights, loss)

    def step() -> None:
        forward_backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, parallel


class Stage:
    """One process of a fleet: its sides, each of which can be asked for a step."""

    def __init__(self, rank: int, port: int, micro_batches: int, chosen: list[str]) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        keep_freed_memory()  # for every side, as Trireme's workers do
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=STAGES)
        self.sides: dict[str, Callable[[], None]] = {}
        self.parallels: dict[str, Any] = {}
        for name in chosen:
            whose, _, schedule = name.partition(" ")
            if whose == "single":
                self.sides[name] = _single(micro_batches) if rank == 0 else lambda: None
            elif whose == "torch":
                self.sides[name] = _torch(schedule, micro_batches, rank)
            else:
                self.sides[name], self.parallels[name] = _ours(schedule, micro_batches)

    def step(self, name: str) -> float:
        """Seconds of one step, from when both processes are there until both are done."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        began = time.perf_counter()
        self.sides[name]()
        took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took)

    def stage_times(self, rounds: int) -> tuple[float, float]:
        """Seconds: t_F + t_B of the slower stage, and forward_backward as a whole; medians over profiled steps."""
        import torch
        import torch.distributed as dist

        parallel = self.parallels["ours 1f1b"]
        parallel.profiling = True
        computes, wholes = [], []
        for _ in range(rounds):
            dist.barrier()
            self.sides["ours 1f1b"]()
            spans = parallel.profile()
            each = (
                statistics.median(span.end - span.start for span in spans if span.kind == kind) for kind in ("F", "B")
            )
            computes.append(sum(each))
            wholes.append(max(span.end for span in spans))
        parallel.profiling = False
        found = torch.tensor([statistics.median(computes), statistics.median(wholes)], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found[0].item(), found[1].item()


class Processes:
    """A fleet of plain processes."""

    def __init__(self, micro_batches: int, chosen: list[str]) -> None:
        context, port = multiprocessing.get_context("spawn"), _free_port()
        self.pipes = []
        for rank in range(STAGES):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, port, micro_batches, chosen)
            context.Process(target=_serve, args=arguments, daemon=True).start()
            self.pipes.append(ours)

    def call(self, method: str, *args: Any) -> Any:
        for pipe in self.pipes:
            pipe.send((method, args))
        answers = [pipe.recv() for pipe in self.pipes]  # of all, so that none is left in a pipe
        return answers[0]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()


def _serve(pipe: Any, rank: int, port: int, micro_batches: int, chosen: list[str]) -> None:
    stage = Stage(rank, port, micro_batches, chosen)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(getattr(stage, method)(*args))


class Actors:
    """A fleet of Ray actors: one call per step."""

    def __init__(self, micro_batches: int, chosen: list[str]) -> None:
        import ray

        ray.init(address="local", num_cpus=STAGES, include_dashboard=False, log_to_driver=False)
        port = _free_port()
        remote = ray.remote(num_cpus=1, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})(Stage)
        self.actors = [remote.remote(rank, port, micro_batches, chosen) for rank in range(STAGES)]

    def call(self, method: str, *args: Any) -> Any:
        import ray

        return ray.get([getattr(actor, method).remote(*args) for actor in self.actors])[0]

    def close(self) -> None:
        import ray

        ray.shutdown()


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    single = result["step_ms"]["single"]
    lines = [f"{STAGES} stages × {result['micro_batches']} micro-batches, {result['rounds']} rounds", ""]
    lines += ["| side | step, ms | beside one process |", "|---|---|---|"]
    lines += [f"| {name} | {ms:.1f} | {ms / single:.3f} |" for name, ms in result["step_ms"].items()]
    lines += ["", "| ratio of step times | median |", "|---|---|"]
    lines += [f"| {pair} | {value:.3f} |" for pair, value in result["ratios"].items() if not pair.endswith("single")]
    lines += [f"| a Ray call takes longer than the step in it, ms | {result['ray_call_ms']:.2f} |"]
    lines += [f"| ours 1f1b / ideal {result['ideal_ms']:.1f} ms | {result['over_ideal']:.3f} |"]
    return "\n".join(lines)


if __name__ == "__main__":
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    for count in [int(value) for value in sys.argv[2:]] or (8, 4):
        print(table(run(count, turns)), end="\n\n", flush=True)
