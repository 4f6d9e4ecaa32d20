"""Values that no run could use, told before anything starts: tables of keys, each mistake one sentence."""

import re
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

from app.config import Config
from app.errors import UserError, nearest
from strategies.dims import unknown_strategy
from strategies.options import (
    CONTEXT_METHODS,
    PIPELINE_SCHEDULES,
    PRECISIONS,
    REDUCE_DTYPES,
    STRATEGIES,
)

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_POSITIVE = (
    "budget cluster.min_workers "
    "train.steps train.epochs train.global_batch_size train.micro_batch_size train.clip_norm train.eval_every "
    "train.eval_batch_size train.patience train.log_every train.noise_scale_every optimizer.lr_batch_size "
    "checkpoint.every_steps checkpoint.every_seconds checkpoint.keep_last "
    "parallel.dp_replicate parallel.dp_shard parallel.cp parallel.tp parallel.pp parallel.ep parallel.chunks "
    "parallel.trace_step"
)
_NOT_NEGATIVE = (
    "cluster.wait_seconds "
    "parallel.bucket_mb parallel.profile_every train.seed train.data_workers optimizer.lr optimizer.weight_decay "
    "optimizer.eps "
    "schedule.warmup_steps schedule.final_fraction tracking.system_metrics_every tracking.flush_timeout "
    "fault.max_restarts fault.start_seconds fault.hang_seconds fault.elastic_seconds"
)
OPTIMIZERS = ("adamw", "adam", "sgd")
"""Those of torch that a name is enough for (app/training/optimizer.py)."""
CHOICES = {
    "run.log_format": ("text", "json"),
    "launcher": ("auto", "ray", "actors", "local", "torchrun"),
    "train.precision": PRECISIONS,
    "train.matmul_precision": ("highest", "high", "medium"),
    "parallel.reduce_dtype": REDUCE_DTYPES,
    "parallel.context": ("auto", *CONTEXT_METHODS),
    "parallel.schedule": PIPELINE_SCHEDULES,
    "optimizer.lr_scaling": ("none", "linear", "sqrt"),
    "schedule.name": ("constant", "linear", "cosine"),
    "checkpoint.mode": ("min", "max"),
    "cluster.when_pending": ("end", "shrink"),
}


def validate(config: Config, mistakes: Sequence[str] = ()) -> None:
    """Raises UserError for the values that no run could use, a sentence each, after the mistakes found before."""
    if found := [*mistakes, *_mistakes(config)]:
        raise UserError("\n".join(found))


def _mistakes(config: Config) -> Iterator[str]:
    def value(key: str) -> Any:
        return reduce(getattr, key.split("."), config)

    for key in _POSITIVE.split():
        if value(key) is not None and not value(key) > 0:
            yield f"{key} is {value(key)}, but it must be greater than 0"
    for key in _NOT_NEGATIVE.split():
        if value(key) is not None and not value(key) >= 0:
            yield f"{key} is {value(key)}, but it must not be negative"
    yield from _names(config)
    for key, allowed in CHOICES.items():
        if value(key) not in allowed:
            near = nearest(value(key), allowed)
            yield f"{key} is {value(key)!r}, but it must be one of {', '.join(allowed)}{near}"
    if config.train.ema_decay is not None and not 0 < config.train.ema_decay < 1:
        yield f"train.ema_decay is {config.train.ema_decay}, but it must be between 0 and 1, such as 0.999"
    if config.optimizer.lr_scaling != "none" and config.optimizer.lr_batch_size is None:
        yield (
            f"optimizer.lr_scaling is {config.optimizer.lr_scaling}, but optimizer.lr_batch_size does not say which "
            "batch size optimizer.lr is meant for: write for instance optimizer.lr_batch_size=256"
        )
    if config.run.name and not RUN_NAME.fullmatch(config.run.name):
        yield f"run.name is {config.run.name!r}: use letters, digits, '.', '_' and '-' (at most 128)"
    if config.workers != "auto" and not (config.workers.isdigit() and int(config.workers) > 0):
        yield f"workers is {config.workers!r}, but it must be auto or a whole number greater than 0"
    first_and_last, ranks = config.profile.steps, config.profile.ranks
    if first_and_last and not (len(first_and_last) == 2 and 0 < first_and_last[0] <= first_and_last[1]):
        yield (f"profile.steps is {first_and_last}, but it must be the first and the last step, such as [20, 25]")
    if not ranks or min(ranks) < 0:
        yield f"profile.ranks is {ranks}, but it must be numbers of workers, of which the first is 0"
    if not (len(config.optimizer.betas) == 2 and all(0 <= beta < 1 for beta in config.optimizer.betas)):
        yield f"optimizer.betas is {config.optimizer.betas}, but it must be two numbers from 0 to below 1: [0.9, 0.999]"
    yield from _resources("resources_per_worker", config.resources_per_worker)
    for stage, resources in enumerate(config.parallel.stage_resources):
        yield from _resources(f"parallel.stage_resources[{stage}]", resources)


def _names(config: Config) -> Iterator[str]:
    """Names that would otherwise be looked up when torch, and perhaps Ray, have been waited for."""
    for name in config.strategy.replace("×", "+").split("+"):
        if name.strip() not in ("auto", *STRATEGIES):
            yield unknown_strategy(name.strip())
    if ":" not in config.optimizer.name and config.optimizer.name not in OPTIMIZERS:
        yield unknown_optimizer(config.optimizer.name)


def unknown_optimizer(name: str) -> str:
    """The sentence about an optimizer that is neither one of torch's that a name is enough for, nor an import path."""
    return (
        f"optimizer.name is {name!r}, but it must be one of {', '.join(OPTIMIZERS)} or an import path such as "
        f"my_package.my_module:MyOptimizer{nearest(name.lower(), OPTIMIZERS)}"
    )


def _resources(key: str, resources: dict[str, float]) -> Iterator[str]:
    for name, amount in resources.items():
        if not isinstance(amount, (int, float)):  # OmegaConf lets a mapping of mappings pass
            yield f"{key}.{name} is {amount}, but it must be a number"
        elif not amount >= 0:
            yield f"{key}.{name} is {amount}, but it must not be negative"


def check_trainable(config: Config) -> None:
    """What `train` needs beyond a valid tree."""
    if not config.task:
        raise UserError("task is empty: write for instance task=image_classification")
    if not config.run.name:
        raise UserError("run.name is empty: write run.name=NAME")
    if (config.train.steps is None) == (config.train.epochs is None):
        given = "neither is" if config.train.steps is None else "both are"
        raise UserError(f"give train.steps or train.epochs, one of the two: {given} given")
