"""Values that no run could use, told before anything starts: tables of keys, each mistake one sentence."""

from __future__ import annotations

import difflib
import re
from functools import reduce
from typing import Any

from app.config import Config
from app.errors import UserError

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_POSITIVE = (
    "train.steps train.epochs train.global_batch_size train.micro_batch_size train.clip_norm train.eval_every "
    "train.eval_batch_size train.log_every checkpoint.every_steps checkpoint.every_seconds checkpoint.keep_last "
    "parallel.dp_replicate parallel.dp_shard parallel.tp parallel.pp"
)
_NOT_NEGATIVE = (
    "parallel.bucket_mb train.seed train.data_workers optimizer.lr optimizer.weight_decay optimizer.eps "
    "schedule.warmup_steps schedule.final_fraction tracking.system_metrics_every tracking.flush_timeout "
    "fault.max_restarts"
)
CHOICES = {
    "launcher": ("auto", "ray", "local", "torchrun"),
    "train.precision": ("fp32", "bf16", "fp16"),
    "parallel.reduce_dtype": ("fp32", "bf16"),
    "parallel.compression": ("none", "bf16", "powersgd"),
    "schedule.name": ("constant", "linear", "cosine"),
    "checkpoint.mode": ("min", "max"),
}


def validate(config: Config) -> None:
    """Raises UserError for the first value that no run could use."""

    def value(key: str) -> Any:
        return reduce(getattr, key.split("."), config)

    for key in _POSITIVE.split():
        if value(key) is not None and not value(key) > 0:
            raise UserError(f"{key} is {value(key)}, but it must be greater than 0")
    for key in _NOT_NEGATIVE.split():
        if not value(key) >= 0:
            raise UserError(f"{key} is {value(key)}, but it must not be negative")
    for key, allowed in CHOICES.items():
        if value(key) not in allowed:
            near = difflib.get_close_matches(value(key), allowed, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{key} is {value(key)!r}, but it must be one of {', '.join(allowed)}{hint}")
    if config.run.name and not RUN_NAME.fullmatch(config.run.name):
        raise UserError(f"run.name is {config.run.name!r}: use letters, digits, '.', '_' and '-' (at most 128)")
    if config.workers != "auto" and not (config.workers.isdigit() and int(config.workers) > 0):
        raise UserError(f"workers is {config.workers!r}, but it must be auto or a whole number greater than 0")
    for name, amount in config.resources_per_worker.items():
        if not amount >= 0:
            raise UserError(f"resources_per_worker.{name} is {amount}, but it must not be negative")


def check_trainable(config: Config) -> None:
    """What `train` needs beyond a valid tree."""
    if not config.task:
        raise UserError("task is empty: write for instance task=image_classification")
    if not config.run.name:
        raise UserError("run.name is empty: write run.name=NAME")
    if (config.train.steps is None) == (config.train.epochs is None):
        given = "neither is" if config.train.steps is None else "both are"
        raise UserError(f"give train.steps or train.epochs, one of the two: {given} given")
