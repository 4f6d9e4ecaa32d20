"""Checks of training on one device: the numbers are the CPU's, nothing waits, and what is saved continues bit for bit.

`training` is a run's own loop (app/training/loop.py) in this process; its configuration is made of the dataclasses, as
reading a file or a command line would need OmegaConf.
"""

import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from app.config import CheckpointConfig, Config, OptimizerConfig, RunConfig, TrainConfig
from app.config.check import validate
from app.models.gpt import GPT, TENSOR_PLAN
from app.models.mixture import MixtureGPT
from app.planner.advice import predict
from app.planner.estimate import Estimate
from app.planner.machine import Machine, machine_of_run
from app.storage.lease import write_lease
from app.storage.storage import Storage
from app.tasks import load_task
from app.training.job import Job, Place, SilentChannel
from app.training.loop import Training
from experiments.benchmarks.gpt import SHAPES, Shape
from experiments.benchmarks.gpu_first.check import Here
from experiments.parity.curves import Trial, difference, train
from strategies.layout import choose
from strategies.options import Options

SINGLE = choose("single", 1)
STATE_BYTES = 12
"""A parameter's in a checkpoint: itself and AdamW's two moments, in float32."""


def config(shape: Shape, folder: str, options: Mapping[str, Any] | None = None, **train: Any) -> Config:
    """A GPT of that shape on random tokens in bf16, clipped. options: of the model; train: of TrainConfig."""
    tokens = Path(folder, f"{shape.vocab_size}.bin")
    if not tokens.exists():
        Path(folder).mkdir(parents=True, exist_ok=True)
        count = 16 * (shape.batch + 1) * (shape.sequence_length + 1)
        numbers = torch.randint(shape.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
        tokens.write_bytes(numbers.to(torch.int32).numpy().astype("uint16").tobytes())
    sizes: dict[str, Any] = {"vocab_size": shape.vocab_size, "sequence_length": shape.sequence_length, **shape.model()}
    values: dict[str, Any] = {"steps": 1000, "precision": "bf16", "clip_norm": 1.0, "micro_batch_size": shape.batch}
    values["global_batch_size"] = shape.batch * shape.micro_batches
    found = Config(
        task="language_modelling",
        task_args={"data": str(tokens), "eval_samples": 1, **sizes, **(options or {})},
        strategy="single",
        run=RunConfig("first", folder),
        train=TrainConfig(**values | train),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.1),
        checkpoint=CheckpointConfig(every_seconds=None),
    )
    validate(found)
    return found


def training(here: Here, config: Config) -> Training:
    """Continues from what the run's folder has, as a worker does."""
    folder = f"{config.run.storage}/{config.run.name}"
    write_lease(Storage(folder), "first", 0)
    job = Job(
        config=config,
        layout=SINGLE,
        folder=folder,
        attempt="first",
        run_uid="first",
        steps=config.train.steps or 1,
        cwd=os.getcwd(),
    )
    place = Place(rank=0, world_size=1, local_rank=0, device=here.device)
    return Training(job, place, SilentChannel())


def planned(config: Config, machine: Machine | None = None) -> Estimate:
    """What the planner expects of it, here or on another machine."""
    return predict(config, load_task(config.task, config.task_args), SINGLE, machine or machine_of_run(1))


# --- the same numbers ---------------------------------------------------------------------------------------------


SMALL: dict[str, Any] = {"d_model": 128, "n_layers": 2, "n_heads": 4}


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(512, **SMALL)


def _mixture() -> MixtureGPT:
    torch.manual_seed(0)
    return MixtureGPT(512, **SMALL, **MIXTURE)


def trial(build: Callable[[], torch.nn.Module] = _gpt) -> Trial:
    """A small GPT, so that a CPU can train it too."""
    tokens = torch.randint(512, (12, 8, 65), generator=torch.Generator().manual_seed(0))

    def loss(module: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(module(batch[0]).flatten(0, 1).float(), batch[1].flatten())

    batches = [(step[:, :-1].contiguous(), step[:, 1:].contiguous()) for step in tokens]
    return Trial(
        build,
        loss,
        batches.__getitem__,
        steps=12,
        clip=1.0,
        blocks=["blocks.0", "blocks.1"],
        tensor_plan=TENSOR_PLAN,
        heads=4,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5),
    )


MIXTURE: dict[str, Any] = {"n_experts": 8, "top_k": 2}
IN_FP32 = 2e-5, "sums in another order: 5e-7 between layouts on a CPU, which a training of 12 steps amplifies"
VARIANTS: dict[str, tuple[dict[str, Any], tuple[float, str]]] = {
    "fp32": ({}, IN_FP32),
    "bf16": ({"precision": "bf16"}, (5e-3, "a number is rounded by 2**-8; layouts on a CPU agree to 3e-3")),
    "recomputed": ({"activation_checkpointing": "full"}, IN_FP32),
    "compiled": ({"compile": True}, IN_FP32),
    "fp8": ({"precision": "fp8"}, (5e-2, "a number is rounded by 2**-4, an average by less; beside bf16")),
    "mixture": ({"precision": "bf16"}, (2e-2, "as bf16, and rounding chooses another expert for some tokens")),
}
"""Options, and how far the loss may be from a CPU's, relatively; the gradient's norm and the weights ten times that."""


def one_device(here: Here, variant: str) -> None:
    """The curve beside that of the CPU in fp32 or bf16, neither compiled nor recomputed."""
    options, (bound, why) = VARIANTS[variant]
    for what, times in (("loss", 1.0), ("norm", 10.0), ("weights", 10.0)):
        here.expect(what, 0.0, times * bound, why)
    precision = options.get("precision", "fp32")
    made = trial(_mixture if variant == "mixture" else _gpt)
    truth = train(made, SINGLE, Options(precision="bf16" if precision == "fp8" else precision), torch.device("cpu"))
    if not here.on_gpu:  # compiling kernels for a CPU takes longer, and shows less
        options = options | {"compile_backend": "aot_eager"}
    curve = train(made, SINGLE, Options(**options), here.device)
    here.found(**vars(difference(truth, curve)), losses=[curve.losses[0], curve.losses[-1]])


# --- nothing waits ------------------------------------------------------------------------------------------------


WAITED = "called a synchronizing CUDA operation"
"""What torch warns of; set_sync_debug_mode itself warns, too, that it is a prototype."""


def no_waits(here: Here, mixture: bool = False) -> None:
    """Steps of a run, with clipping and without a log line, in which nothing may wait for the device. mixture: of
    experts, all on one GPU."""
    here.expect("waits", 0, 0, "the loop waits at boundaries only (app/training/loop.py)")
    here.expect("steps_under_error", 2, 2, 'torch.cuda.set_sync_debug_mode("error") raises where one waits')
    shape = SHAPES[here.model]
    options = {"mixture": {**MIXTURE, "d_expert": shape.d_model}} if mixture else None
    run = training(here, config(shape, os.environ["TMPDIR"], options))
    batches = run.batches()
    ahead = [next(batches) for _ in range(7)]
    for micro_batches in ahead[:3]:
        run.step(micro_batches)
    here.wait()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for micro_batches in ahead[3:5]:
            run.step(micro_batches)
        torch.cuda.set_sync_debug_mode("default")
    places = {f"{one.filename}:{one.lineno}" for one in seen if WAITED in str(one.message)}
    here.found(waits=len(places), where=sorted(places))
    torch.cuda.set_sync_debug_mode("error")
    for done, micro_batches in enumerate(ahead[5:], 1):
        run.step(micro_batches)
        here.found(steps_under_error=done)
    torch.cuda.set_sync_debug_mode("default")


# --- what is saved ------------------------------------------------------------------------------------------------


def _steps(run: Training, count: int) -> dict[str, torch.Tensor]:
    batches: Any = run.batches()
    for _ in range(count):
        run.step(next(batches))
    batches.close()
    state = run.parallel.optimizer_state(run.optimizer)["state"]
    moments = {f"{name}.{key}": value for name, own in state.items() for key, value in own.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in (run.parallel.model_state() | moments).items()}


def resume(here: Here) -> None:
    """Six steps, against three, a save, and three more of a new training that loads it; with deterministic kernels."""
    here.expect("different", 0, 0, "a checkpoint holds all that a step depends on")
    here.expect("different_in_a_twin", 0, 0, "the same six steps again are the same with deterministic kernels")
    shape, folder = SHAPES["tiny"], os.environ["TMPDIR"]
    ends = []
    for name in ("once", "again"):
        ends.append(_steps(training(here, config(shape, f"{folder}/{name}", deterministic=True)), 6))
    halves = config(shape, f"{folder}/halves", deterministic=True)
    first = training(here, halves)
    _steps(first, 3)
    first.persistence.save(first.progress)
    first.persistence.finish(first.progress)
    first.close()
    second = training(here, halves)
    here.found(resumed_from=second.resumed_from)
    ends.append(_steps(second, 3))
    once, again, resumed = ends
    assert once.keys() == resumed.keys() and any("exp_avg" in name for name in once), sorted(once)
    here.found(different=_different(once, resumed), different_in_a_twin=_different(once, again), tensors=len(once))


def _different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> int:
    return sum(not torch.equal(tensor, b[name]) for name, tensor in a.items())


def save(here: Here) -> None:
    """How long saves hold training up, and the host memory that they pin."""
    shape, folder = SHAPES[here.model], os.environ["TMPDIR"]
    run = training(here, config(shape, folder))
    size = STATE_BYTES * sum(parameter.numel() for parameter in run.parallel.parameters())
    why = "the copy runs beside the next steps: at most bytes over 10 GB/s, which PCIe 4 has, and 50 ms for the rest"
    here.expect_speed("stall", 0.0, size / 10e9 + 0.05, why)
    here.expect_speed("first_stall", 0.0, size / 1e9 + 1.0, "it pins the buffers, at about 1 GB/s or faster")
    here.expect_speed("pinned_over_state", 1.0, 1.1, "every tensor has a buffer of its size")
    stalls, totals = [], []
    batches: Any = run.batches()
    for _ in range(3):
        run.step(next(batches))
        here.wait()
        run.persistence.save(run.progress)
        stalls.append(run.persistence.checkpointer.last_stall_seconds)
        begun = time.perf_counter()
        run.persistence.finish(run.progress)
        totals.append(time.perf_counter() - begun)
    here.found(first_stall=stalls[0], stall=min(stalls[1:]), written_after=totals, state_bytes=size)
    here.found(pinned_over_state=run.persistence.checkpointer.locked_bytes / size)
    batches.close()
    run.close()
