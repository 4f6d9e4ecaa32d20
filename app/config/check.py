"""Finds values that no run can use before anything starts: one sentence for each mistake."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from app.config import Config
from app.config.arguments import no_such_argument
from app.config.batch_schedule import schedule_mistake
from app.config.task_names import BUILT_IN
from app.config.task_source import argument_names
from app.config.words import meant_value, remark_on_value
from app.errors import UserError, nearest
from strategies.dims import LayoutError, checkpoint_every, unknown_strategy
from strategies.options import (
    CONTEXT_METHODS,
    PIPELINE_SCHEDULES,
    PRECISIONS,
    REDUCE_DTYPES,
    STRATEGIES,
    WEIGHT_DTYPES,
)

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
POSITIVE = (
    "budget",
    "cluster.min_workers",
    "cluster.max_workers",
    "train.steps",
    "train.epochs",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.clip_norm",
    "train.eval_every",
    "train.eval_batch_size",
    "train.patience",
    "train.log_every",
    "train.noise_scale_every",
    "optimizer.lr_batch_size",
    "schedule.decay_steps",
    "schedule.decay_factor",
    "schedule.steps",
    "schedule.batch_size",
    "checkpoint.every_steps",
    "checkpoint.every_seconds",
    "checkpoint.keep_last",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.cp",
    "parallel.tp",
    "parallel.pp",
    "parallel.ep",
    "parallel.chunks",
    "parallel.trace_step",
)
"""Keys whose value, unless it is null, must be greater than 0."""
NOT_NEGATIVE = (
    "cluster.wait_seconds",
    "parallel.bucket_mb",
    "parallel.profile_every",
    "train.seed",
    "train.data_workers",
    "optimizer.lr",
    "optimizer.weight_decay",
    "optimizer.eps",
    "schedule.warmup_steps",
    "schedule.join_samples",
    "tracking.system_metrics_every",
    "tracking.flush_timeout",
    "fault.max_restarts",
    "fault.start_seconds",
    "fault.hang_seconds",
    "fault.elastic_seconds",
)
"""Keys whose value, unless it is null, must be 0 or greater."""
LARGEST = 2**63
"""Whole numbers must be smaller, as torch has them in 64 bits."""
FRACTIONS = {"optimizer.momentum": 0.9, "schedule.final_fraction": 0.1}
"""Keys whose value must be from 0 to 1, each with an example."""
RESOURCES = {
    "CPU": "cpu cpus num_cpus CPUs",
    "GPU": "gpu gpus num_gpus GPUs cuda",
    "memory": "mem ram RAM Memory",
}
"""Ray's own resources, each with other names that people write. Any other name is of a cluster."""
OPTIMIZERS = (
    *("adamw", "adam", "sgd", "muon", "adamw8bit", "adafactor", "adadelta", "adagrad", "adamax"),
    *("asgd", "nadam", "radam", "rmsprop", "rprop"),
)
"""The optimizers that have a short name (app/training/optimizer.py)."""
ROUNDS_WEIGHTS = ("adamw", "adamw8bit")
"""The optimizers that can train weights in 16 bits."""
CHOICES = {
    "run.log_format": ("text", "json"),
    "launcher": ("auto", "ray", "actors", "local", "torchrun"),
    "train.precision": PRECISIONS,
    "train.matmul_precision": ("highest", "high", "medium"),
    "train.weight_dtype": WEIGHT_DTYPES,
    "parallel.reduce_dtype": REDUCE_DTYPES,
    "parallel.context": ("auto", *CONTEXT_METHODS),
    "parallel.schedule": PIPELINE_SCHEDULES,
    "optimizer.state_dtype": WEIGHT_DTYPES,
    "optimizer.lr_scaling": ("none", "linear", "sqrt"),
    "schedule.name": ("constant", "linear", "cosine", "wsd", "inverse_sqrt", "one_cycle", "step"),
    "checkpoint.mode": ("min", "max"),
    "cluster.when_pending": ("end", "shrink"),
}
"""The values that a key may have."""
BETTER_HIGH = (
    *("accuracy", "acc", "auc", "bleu", "dice", "f1", "iou", "map", "precision", "psnr", "r2"),
    *("recall", "rouge", "ssim"),
)
BETTER_LOW = ("loss", "error", "mae", "mse", "perplexity", "rmse", "bits_per_byte")
"""Metrics of which everyone knows whether a higher or a lower value is better."""


def validate(config: Config, mistakes: Sequence[str] = ()) -> None:
    """Check that every value is one that a run can use.

    Args:
        config: The configuration.
        mistakes: Sentences about mistakes that are already known; they come first in the message.

    Raises:
        UserError: There are mistakes; the message has a line for each.
    """
    sentences = [*mistakes, *_mistakes(config)]
    if sentences:
        raise UserError("\n".join(sentences))


def unfit_for_training(config: Config) -> list[str]:
    """A sentence for each thing that keeps a valid configuration from training, the task first.

    A stored run is read without this check, since its weights are good whatever it says.
    """
    sentences = []
    if not config.task:
        sentences.append("task is empty: write for instance task=image_classification")
    if not config.run.name:
        sentences.append("run.name is empty: write run.name=NAME")
    if (config.train.steps is None) == (config.train.epochs is None):
        given = "neither is" if config.train.steps is None else "both are"
        sentences.append(f"give train.steps or train.epochs, one of the two: {given} given")
    sentences += _evaluations(config)
    sentences += _followed_plan(config)
    return sentences


def _followed_plan(config: Config) -> Iterator[str]:
    """What leaves `plan.follow` no plan to follow."""
    if not config.plan.follow:
        return
    parallel = config.parallel
    if config.strategy != "auto":
        yield (
            f"plan.follow is true, but strategy is {config.strategy}, which no plan has chosen: "
            "write strategy=auto, or leave plan.follow out"
        )
    elif parallel.stage_resources:
        yield (
            "plan.follow is true, but parallel.stage_resources says where each stage runs: leave "
            "one of the two out"
        )
    elif None not in (parallel.dp_replicate, parallel.dp_shard, parallel.tp, parallel.pp):
        yield (
            "plan.follow is true, but dp_replicate, dp_shard, tp and pp are all written, which "
            "leaves no other layout: leave out those of parallel that may change"
        )


def _evaluations(config: Config) -> Iterator[str]:
    """Settings of evaluations that contradict one another."""
    if config.train.patience is not None and config.train.eval_every is None:
        yield (
            f"train.patience is {config.train.patience} evaluations, but the run is evaluated only "
            "at its end: write train.eval_every too, such as train.eval_every=100"
        )
    yield from _separate_evaluations(config)
    metric = config.checkpoint.metric
    right_mode = "max" if metric.removeprefix("ema_") in BETTER_HIGH else config.checkpoint.mode
    if metric.removeprefix("ema_") in BETTER_LOW:
        right_mode = "min"
    if right_mode != config.checkpoint.mode:
        extreme = "highest" if right_mode == "min" else "lowest"
        yield (
            f"checkpoint.mode is {config.checkpoint.mode}, but checkpoint.metric is {metric}, of "
            f"which the {extreme} value is not the best: write checkpoint.mode={right_mode}, or "
            "another checkpoint.metric"
        )


def _separate_evaluations(config: Config) -> Iterator[str]:
    """Evaluations of checkpoints at steps that have none."""
    train = config.train
    if not train.eval_separate:
        if train.eval_resources:
            yield (
                "train.eval_resources is set, but evaluation has no worker of its own: write "
                "train.eval_separate=true too"
            )
        return
    if train.eval_every is None:
        return
    every_steps = config.checkpoint.every_steps
    if every_steps is None or train.eval_every % every_steps:
        yield (
            "train.eval_separate evaluates checkpoints, but there is none at every step that "
            f"train.eval_every={train.eval_every} means: write checkpoint.every_steps="
            f"{train.eval_every}, or a divisor of it"
        )


def unknown_optimizer(name: str) -> str:
    """The sentence about an optimizer that is neither a short name nor an import path."""
    if name.lower().replace("_", "") in ("lbfgs", "sparseadam"):
        return (
            f"optimizer.name is {name!r}, which this training loop cannot use: lbfgs computes the "
            "loss several times in a step, and sparseadam needs sparse gradients; write adamw"
        )
    module, dot, class_name = name.rpartition(".")
    hint = nearest(name.lower(), OPTIMIZERS)
    if dot and module and class_name:
        hint = f" (did you mean '{module}:{class_name}'?)"
    return (
        f"optimizer.name is {name!r}, but it must be one of {', '.join(OPTIMIZERS)} "
        f"or an import path such as my_package.my_module:MyOptimizer{hint}"
    )


def _mistakes(config: Config) -> Iterator[str]:
    yield from _ranges(config)
    yield from _names(config)
    yield from _choices(config)
    yield from _training(config)
    yield from _workers_and_profile(config)
    yield from _optimizer(config)
    yield from _sixteen_bits(config)
    yield from _resources("resources_per_worker", config.resources_per_worker)
    yield from _resources("train.eval_resources", config.train.eval_resources)
    for stage, resources in enumerate(config.parallel.stage_resources):
        yield from _resources(f"parallel.stage_resources[{stage}]", resources)


def _value(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _ranges(config: Config) -> Iterator[str]:
    for key in (*POSITIVE, *NOT_NEGATIVE, *FRACTIONS):
        value = _value(config, key)
        if value is None:
            continue
        if isinstance(value, int) and abs(value) >= LARGEST:
            yield f"{key} is {value}, but it must be less than {LARGEST:.1e}"
        elif not math.isfinite(value):
            yield f"{key} is {value}, but it must be a finite number"
        elif key in POSITIVE and not value > 0:
            yield f"{key} is {value}, but it must be greater than 0"
        elif key in NOT_NEGATIVE and not value >= 0:
            yield f"{key} is {value}, but it must not be negative"
        elif key in FRACTIONS and not 0 <= value <= 1:
            yield f"{key} is {value}, but it must be from 0 to 1, such as {FRACTIONS[key]}"


def _names(config: Config) -> Iterator[str]:
    """Unknown strategies and optimizers, and arguments that a built-in task does not take.

    Without this check they would be noticed only after torch, and perhaps Ray, has started.
    """
    for written in config.strategy.replace("×", "+").split("+"):
        strategy = written.strip()
        if strategy not in ("auto", *STRATEGIES):
            yield unknown_strategy(strategy, config.strategy)
    is_import_path = ":" in config.optimizer.name
    if not is_import_path and config.optimizer.name not in OPTIMIZERS:
        yield unknown_optimizer(config.optimizer.name)
    if config.tracking.also and not config.tracking.enabled:
        yield "tracking.also is set, but tracking.enabled is false: leave one of them out"
    known = argument_names(config.task) if config.task in BUILT_IN else []
    for name in config.task_args:
        if known and name not in known:
            owner = f"task {config.task!r}"
            yield no_such_argument(name, known, key="task_args", owner=owner)


def _choices(config: Config) -> Iterator[str]:
    for key, choices in CHOICES.items():
        value = _value(config, key)
        remark = remark_on_value(key, value)
        if remark is not None:
            yield f"{key} is {value!r}, but {remark}"
        elif value not in choices:
            meant = meant_value(key, value)
            hint = nearest(value if meant is None else meant, choices)
            yield f"{key} is {value!r}, but it must be one of {', '.join(choices)}{hint}"


def _training(config: Config) -> Iterator[str]:
    ema_decay = config.train.ema_decay
    if ema_decay is not None and not 0 < ema_decay < 1:
        yield f"train.ema_decay is {ema_decay}, but it must be between 0 and 1, such as 0.999"
    try:
        checkpoint_every(config.train.activation_checkpointing)
    except LayoutError as error:
        yield str(error)
    mistake = schedule_mistake(config.train.batch_schedule)
    if mistake:
        yield (
            f"train.batch_schedule is {config.train.batch_schedule!r}, but {mistake}: "
            "write for instance 'train.batch_schedule=[[0,32],[200000,64]]'"
        )
    if config.train.grows_by_itself and config.schedule.batch_size is not None:
        yield (
            "train.batch_schedule is auto, whose schedule counts steps of the first batch, but "
            f"schedule.batch_size is {config.schedule.batch_size}: leave one of them out"
        )
    if config.optimizer.lr_scaling != "none" and config.optimizer.lr_batch_size is None:
        yield (
            f"optimizer.lr_scaling is {config.optimizer.lr_scaling}, but optimizer.lr_batch_size "
            "does not say which batch size optimizer.lr is meant for: "
            "write for instance optimizer.lr_batch_size=256"
        )


def _workers_and_profile(config: Config) -> Iterator[str]:
    name = config.run.name
    if name and not RUN_NAME.fullmatch(name):
        yield f"run.name is {name!r}: use letters, digits, '.', '_' and '-' (at most 128)"
    workers = config.workers
    if workers != "auto" and not (workers.isdecimal() and int(workers) > 0):
        yield f"workers is {workers!r}, but it must be auto or a whole number greater than 0"
    steps = config.profile.steps
    if steps and not (len(steps) == 2 and 0 < steps[0] <= steps[1]):
        yield (
            f"profile.steps is {steps}, "
            "but it must be the first and the last step, such as [20, 25]"
        )
    ranks = config.profile.ranks
    if not ranks or min(ranks) < 0:
        yield (
            f"profile.ranks is {ranks}, but it must be numbers of workers, of which the first is 0"
        )


def _optimizer(config: Config) -> Iterator[str]:
    betas = config.optimizer.betas
    if not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        yield (
            f"optimizer.betas is {betas}, "
            "but it must be two numbers from 0 to below 1: [0.9, 0.999]"
        )
    if config.optimizer.name == "rprop" and config.optimizer.weight_decay:
        yield "optimizer.weight_decay is set, but rprop has none: leave it out"
    transfer = config.optimizer.width_transfer
    base = transfer.get("base")
    if transfer and (set(transfer) != {"base"} or not isinstance(base, Mapping) or not base):
        yield (
            f"optimizer.width_transfer is {transfer!r}, but it must be base with arguments of the "
            "task: {base: {d_model: 64}}"
        )
    for pattern, values in config.optimizer.groups.items():
        if not isinstance(values, Mapping) or not values or "params" in values:
            yield (
                f"optimizer.groups[{pattern!r}] is {values!r}, but it must be a mapping of the "
                "optimizer's arguments, such as {weight_decay: 0}"
            )
            continue
        for name in ("lr", "weight_decay", "eps", "momentum"):
            if isinstance(values.get(name), str | bool):
                yield (
                    f"optimizer.groups[{pattern!r}] has {name} {values[name]!r}, "
                    "but it must be a number"
                )


def _sixteen_bits(config: Config) -> Iterator[str]:
    """Weights and optimizer state in bfloat16 where they cannot be."""
    name = config.optimizer.name
    if config.optimizer.state_dtype != "fp32" and name != "adamw":
        yield (
            f"optimizer.state_dtype=bf16 is for adamw, but optimizer.name is {name}: write "
            "optimizer.name=adamw, or leave it out"
        )
    if config.train.weight_dtype == "fp32":
        return
    if name not in ROUNDS_WEIGHTS:
        yield (
            f"train.weight_dtype=bf16 needs an optimizer that rounds at random, but optimizer.name "
            f"is {name}: write optimizer.name=adamw, or adamw8bit"
        )
    if config.train.precision not in ("bf16", "fp8"):
        yield (
            f"train.weight_dtype=bf16 needs products in bfloat16, but train.precision is "
            f"{config.train.precision}: write train.precision=bf16"
        )
    if config.train.ema_decay is not None:
        yield (
            "train.ema_decay averages weights in float32, but train.weight_dtype is bf16: leave "
            "one of them out"
        )


def _resources(key: str, resources: Mapping[str, float]) -> Iterator[str]:
    for name, amount in resources.items():
        for meant, others in RESOURCES.items():
            if name in others.split():
                yield f"{key}.{name} is called {meant} in Ray: write {key}.{meant}={amount:g}"
        if not isinstance(amount, (int, float)):  # OmegaConf accepts a mapping of mappings
            yield f"{key}.{name} is {amount}, but it must be a number"
        elif not (math.isfinite(amount) and amount >= 0):
            yield f"{key}.{name} is {amount}, but it must be a number from 0 on"
