"""Where to look first: the best batch size and learning rate of language models, by a law.

Li et al. 2025, "Predictable Scale: Part I, Step Law" (https://arxiv.org/abs/2503.04715), from 3,700
models that were trained from new weights with AdamW. With N parameters outside the embedding and
D tokens in all:

    rate  = 1.79 · N^−0.713 · D^0.307
    batch = 0.58 · D^0.571 tokens

The law was fitted to models of 60 M to 1 B parameters. For smaller ones it is a place to begin, and
the sweep says what is true of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from app.config import Config
from app.run.prepare import prepare, read_task
from app.tasks.base import Task
from app.tasks.build import build_model
from experiments.sweep.search import Domain, Values
from experiments.sweep.trials import BATCH, RATE

OPTIMIZERS = ("adam", "adamw")


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What the law says of a model and its data.

    Attributes:
        rate: The learning rate.
        batch: The batch size, in samples.
        parameters: Of the model, outside the embedding and the head.
        tokens: That it is trained on.
    """

    rate: float
    batch: float
    parameters: int
    tokens: float

    @property
    def sentence(self) -> str:
        """The law's answer, for a person."""
        return (
            f"Step Law, for {self.parameters / 1e6:.3g} M parameters and {self.tokens / 1e6:.3g} M "
            f"tokens: batch size {max(1.0, self.batch):.0f}, learning rate {self.rate:.3g}"
        )


def step_law(parameters: float, tokens: float) -> tuple[float, float]:
    """The learning rate, and the batch size in tokens.

    Args:
        parameters: Of the model, outside the embedding.
        tokens: That it is trained on.
    """
    return 1.79 * parameters**-0.713 * tokens**0.307, 0.58 * tokens**0.571


def prior_of(config: Config) -> Prior | None:
    """What the law says of an experiment.

    Args:
        config: The experiment with a trial's number of steps.

    Returns:
        None if it is not a causal language model that is trained from new weights with Adam.
    """
    begins_elsewhere = config.checkpoint.fork or config.checkpoint.load
    is_fine_tuned = any(config.task_args.get(name) for name in ("pretrained", "lora"))
    if config.optimizer.name not in OPTIMIZERS or begins_elsewhere or is_fine_tuned:
        return None
    task = read_task(config)
    sequence_length = getattr(task, "sequence_length", None)
    is_causal = getattr(task, "kind", "causal_lm") == "causal_lm"
    if not (isinstance(sequence_length, int) and is_causal and task.heads()):
        return None
    prepared = prepare(config, task, int(config.workers), devices_per_node=None)
    tokens = config.train.batches.samples_after(prepared.steps) * sequence_length
    parameters = _inner_parameters(task)
    if not parameters or not tokens:
        return None
    rate, batch_tokens = step_law(parameters, tokens)
    return Prior(
        rate=rate,
        batch=batch_tokens / sequence_length,
        parameters=parameters,
        tokens=tokens,
    )


def _inner_parameters(task: Task) -> int:
    """The parameters outside the embedding and the head."""
    with torch.device("meta"):
        model = build_model(task)
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabulary = max((table.num_embeddings for table in tables), default=0)
    # The head has the vocabulary's size too, whatever kind of layer it is.
    inner = [parameter for parameter in model.parameters() if vocabulary not in parameter.shape]
    return sum(parameter.numel() for parameter in inner)


def nearest_point(prior: Prior, space: dict[str, Domain]) -> Values | None:
    """The point of a search space that is nearest to the law.

    Returns:
        None if the space has other keys than batch size and learning rate.
    """
    wanted = {BATCH: max(1.0, prior.batch), RATE: prior.rate}
    if not space.keys() <= wanted.keys():
        return None
    return {key: _nearest(wanted[key], domain) for key, domain in space.items()}


def _nearest(value: float, domain: Domain) -> float | int:
    if domain.is_choice:
        return _nearest_of(value, domain.values)
    low, high = domain.values
    if domain.kind.endswith("randint"):
        return int(min(max(round(value), low), high - 1))
    return float(f"{min(max(value, low), high):.4g}")


def _nearest_of(value: float, values: Sequence[float]) -> float | int:
    """The nearest value by ratio; values that are not above 0 are the last choice."""

    def distance(other: float) -> float:
        return abs(math.log(other / value)) if other > 0 else math.inf

    return min(values, key=distance)
