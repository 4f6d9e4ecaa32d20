"""Checks of training on one device.

The numbers are those of a CPU, nothing waits, and what is saved continues bit for bit. A `Training`
is a run's own loop (app/training/loop.py) in this process. Its configuration is made from the
dataclasses, since reading a file or a command line would need OmegaConf.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
from experiments.benchmarks.gpu_first.check import CheckContext
from experiments.parity.curves import Trial, difference, train
from strategies.layout import choose
from strategies.options import Options

SINGLE = choose("single", 1)
STATE_BYTES = 12
"""Bytes of a parameter in a checkpoint: itself and AdamW's two moments, in float32."""


# --- runs -----------------------------------------------------------------------------------------


def make_config(
    shape: Shape,
    folder: str,
    model_options: Mapping[str, Any] | None = None,
    **train_changes: Any,
) -> Config:
    """The configuration of a GPT on random tokens, in bf16 with clipping.

    Args:
        shape: Its sizes.
        folder: The run's storage, where the tokens are too.
        model_options: Options of the model.
        train_changes: Fields of TrainConfig.
    """
    task_args = {
        "data": str(_write_tokens(shape, Path(folder))),
        "eval_samples": 1,
        "vocab_size": shape.vocab_size,
        "sequence_length": shape.sequence_length,
        **shape.model(),
        **(model_options or {}),
    }
    train_values = {
        "steps": 1000,
        "precision": "bf16",
        "clip_norm": 1.0,
        "micro_batch_size": shape.batch,
        "global_batch_size": shape.batch * shape.micro_batches,
        **train_changes,
    }
    config = Config(
        task="language_modelling",
        task_args=task_args,
        strategy="single",
        run=RunConfig("first", folder),
        train=TrainConfig(**train_values),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.1),
        checkpoint=CheckpointConfig(every_seconds=None),
    )
    validate(config)
    return config


def _write_tokens(shape: Shape, folder: Path) -> Path:
    """A file with random tokens, which is written once for each vocabulary."""
    file = folder / f"{shape.vocab_size}.bin"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        count = 16 * (shape.batch + 1) * (shape.sequence_length + 1)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(shape.vocab_size, (count,), generator=generator)
        file.write_bytes(tokens.to(torch.int32).numpy().astype("uint16").tobytes())
    return file


def make_training(context: CheckContext, config: Config) -> Training:
    """A run's loop, which continues from what the run's folder has, as that of a worker does."""
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
    place = Place(rank=0, world_size=1, local_rank=0, device=context.device)
    return Training(job, place, SilentChannel())


def estimate_of(config: Config, machine: Machine | None = None) -> Estimate:
    """What the planner expects of a run, on this machine or another one."""
    task = load_task(config.task, config.task_args)
    return predict(config, task, SINGLE, machine or machine_of_run(1))


# --- the same numbers -----------------------------------------------------------------------------


SMALL_MODEL: dict[str, Any] = {"d_model": 128, "n_layers": 2, "n_heads": 4}
MIXTURE: dict[str, Any] = {"n_experts": 8, "top_k": 2}
Batch = tuple[Tensor, Tensor]


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(512, **SMALL_MODEL)


def _mixture() -> MixtureGPT:
    torch.manual_seed(0)
    return MixtureGPT(512, **SMALL_MODEL, **MIXTURE)


def _language_loss(module: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    logits = module(tokens).flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(logits, targets.flatten())


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


def make_trial(build: Callable[[], nn.Module] = _gpt) -> Trial:
    """A training of a model that is so small that a CPU can train it too."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(512, (12, 8, 65), generator=generator)
    batches = [(step[:, :-1].contiguous(), step[:, 1:].contiguous()) for step in tokens]
    return Trial(
        build=build,
        loss=_language_loss,
        batch=batches.__getitem__,
        steps=len(batches),
        clip=1.0,
        blocks=["blocks.0", "blocks.1"],
        tensor_plan=TENSOR_PLAN,
        heads=4,
        optimizer=_adamw,
    )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How the small model is trained.

    Attributes:
        options: Options of parallelism.
        bound: How much the loss may differ from a CPU's, relatively. The gradient's norm and the
            weights may differ ten times as much.
        why: Where the bound comes from.
    """

    bound: float
    why: str
    options: dict[str, Any] = field(default_factory=dict)


FLOAT32_BOUND = 2e-5
FLOAT32_WHY = (
    "sums in another order: 5e-7 between layouts on a CPU, which a training of 12 steps amplifies"
)
VARIANTS = {
    "fp32": Variant(bound=FLOAT32_BOUND, why=FLOAT32_WHY),
    "bf16": Variant(
        options={"precision": "bf16"},
        bound=5e-3,
        why="a number is rounded by 2**-8; layouts on a CPU agree to 3e-3",
    ),
    "recomputed": Variant(
        options={"activation_checkpointing": "full"}, bound=FLOAT32_BOUND, why=FLOAT32_WHY
    ),
    "compiled": Variant(options={"compile": True}, bound=FLOAT32_BOUND, why=FLOAT32_WHY),
    "fp8": Variant(
        options={"precision": "fp8"},
        bound=5e-2,
        why="a number is rounded by 2**-4, an average by less; beside bf16",
    ),
    "mixture": Variant(
        options={"precision": "bf16"},
        bound=2e-2,
        why="as bf16, and rounding chooses another expert for some tokens",
    ),
}


def one_device(context: CheckContext, name: str) -> None:
    """The curve of a variant beside that of the CPU.

    The CPU computes in fp32 or bf16, neither compiled nor recomputed.
    """
    variant = VARIANTS[name]
    context.expect("loss", 0.0, variant.bound, why=variant.why)
    context.expect("norm", 0.0, 10.0 * variant.bound, why=variant.why)
    context.expect("weights", 0.0, 10.0 * variant.bound, why=variant.why)
    trial = make_trial(_mixture if name == "mixture" else _gpt)
    precision = variant.options.get("precision", "fp32")
    cpu_options = Options(precision="bf16" if precision == "fp8" else precision)
    expected = train(trial, SINGLE, cpu_options, torch.device("cpu"))
    options = dict(variant.options)
    if not context.on_gpu:
        # Compiling kernels for a CPU takes longer, and shows less.
        options["compile_backend"] = "aot_eager"
    curve = train(trial, SINGLE, Options(**options), context.device)
    first_and_last_loss = [curve.losses[0], curve.losses[-1]]
    context.measured(**asdict(difference(expected, curve)), losses=first_and_last_loss)


# --- nothing waits --------------------------------------------------------------------------------


WAIT_WARNING = "called a synchronizing CUDA operation"
"""A part of torch's warning. set_sync_debug_mode also warns that it is a prototype itself."""


def no_waits(context: CheckContext, has_mixtures: bool = False) -> None:
    """Steps of a run, with clipping and without a log line, in which nothing waits for the device.

    Args:
        context: Where the check runs.
        has_mixtures: Whether the model has mixtures of experts, all on one GPU.
    """
    context.expect("waits", 0, 0, why="the loop waits at boundaries only (app/training/loop.py)")
    context.expect(
        "steps_under_error",
        2,
        2,
        why='torch.cuda.set_sync_debug_mode("error") raises where one waits',
    )
    shape = SHAPES[context.model]
    model_options = None
    if has_mixtures:
        model_options = {"mixture": {**MIXTURE, "d_expert": shape.d_model}}
    config = make_config(shape, os.environ["TMPDIR"], model_options)
    run = make_training(context, config)
    batches = run.batches()
    steps = [next(batches) for _ in range(7)]
    for micro_batches in steps[:3]:
        run.step(micro_batches)
    context.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for micro_batches in steps[3:5]:
            run.step(micro_batches)
        torch.cuda.set_sync_debug_mode("default")
    places = set()
    for warning in caught:
        if WAIT_WARNING in str(warning.message):
            places.add(f"{warning.filename}:{warning.lineno}")
    context.measured(waits=len(places), where=sorted(places))
    torch.cuda.set_sync_debug_mode("error")
    for count, micro_batches in enumerate(steps[5:], 1):
        run.step(micro_batches)
        context.measured(steps_under_error=count)
    torch.cuda.set_sync_debug_mode("default")


# --- what is saved --------------------------------------------------------------------------------


def _take_steps(run: Training, count: int) -> dict[str, Tensor]:
    """Take steps.

    Returns:
        Copies of the weights and of the optimizer's moments.
    """
    batches: Any = run.batches()
    for _ in range(count):
        run.step(next(batches))
    batches.close()
    tensors = dict(run.parallel.model_state())
    for name, state in run.parallel.optimizer_state(run.optimizer)["state"].items():
        for key, value in state.items():
            tensors[f"{name}.{key}"] = value
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def resume(context: CheckContext) -> None:
    """Six steps, beside three, a save, and three more of a new training that loads it.

    Kernels are deterministic.
    """
    context.expect("different", 0, 0, why="a checkpoint holds all that a step depends on")
    context.expect(
        "different_in_a_twin",
        0,
        0,
        why="the same six steps again are the same with deterministic kernels",
    )
    folder = os.environ["TMPDIR"]

    def config(name: str) -> Config:
        return make_config(SHAPES["tiny"], f"{folder}/{name}", deterministic=True)

    once = _take_steps(make_training(context, config("once")), 6)
    again = _take_steps(make_training(context, config("again")), 6)
    first_half = make_training(context, config("halves"))
    _take_steps(first_half, 3)
    first_half.persistence.save(first_half.progress)
    first_half.persistence.finish(first_half.progress)
    first_half.close()
    second_half = make_training(context, config("halves"))
    context.measured(resumed_from=second_half.resumed_from)
    resumed = _take_steps(second_half, 3)
    assert once.keys() == resumed.keys()
    assert any("exp_avg" in name for name in once), sorted(once)
    context.measured(
        different=_count_differences(once, resumed),
        different_in_a_twin=_count_differences(once, again),
        tensors=len(once),
    )


def _count_differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> int:
    return sum(not torch.equal(tensor, b[name]) for name, tensor in a.items())


def save(context: CheckContext) -> None:
    """How long saves hold training up, and the host memory that they pin."""
    config = make_config(SHAPES[context.model], os.environ["TMPDIR"])
    run = make_training(context, config)
    numel = sum(parameter.numel() for parameter in run.parallel.parameters())
    state_bytes = STATE_BYTES * numel
    context.expect_speed(
        "stall",
        0.0,
        state_bytes / 10e9 + 0.05,
        why="the copy runs beside the next steps: at most bytes over 10 GB/s, which PCIe 4 has, "
        "and 50 ms for the rest",
    )
    context.expect_speed(
        "first_stall",
        0.0,
        state_bytes / 1e9 + 1.0,
        why="it pins the buffers, at about 1 GB/s or faster",
    )
    context.expect_speed("pinned_over_state", 1.0, 1.1, why="every tensor has a buffer of its size")
    stalls = []
    seconds_to_write = []
    batches: Any = run.batches()
    for _ in range(3):
        run.step(next(batches))
        context.synchronize()
        run.persistence.save(run.progress)
        stalls.append(run.persistence.checkpointer.last_stall_seconds)
        start = time.perf_counter()
        run.persistence.finish(run.progress)
        seconds_to_write.append(time.perf_counter() - start)
    context.measured(
        first_stall=stalls[0],
        stall=min(stalls[1:]),
        written_after=seconds_to_write,
        state_bytes=state_bytes,
        pinned_over_state=run.persistence.checkpointer.locked_bytes / state_bytes,
    )
    batches.close()
    run.close()
