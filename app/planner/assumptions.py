"""What the user may assume of a device and of its trainer (--assume), in place of its constants."""

import math
from dataclasses import replace
from typing import NamedTuple

from app.errors import UserError
from app.planner.device import Device


class Assumption(NamedTuple):
    """A constant of a device that --assume changes.

    Args:
        meaning: What it is. Where this begins with "of", it is a share of something.
        of_trainer: Whether it describes another trainer than Trireme.
        at_most_one: Whether it is at most 1, as a share that cannot be more, or as yes or no.
        above_zero: Whether times are divided by it.
    """

    meaning: str
    of_trainer: bool = False
    at_most_one: bool = False
    above_zero: bool = False


ASSUMPTIONS = {
    "products": Assumption("of the peak that large products reach", above_zero=True),
    "attention": Assumption("of the peak that attention reaches", above_zero=True),
    "flash": Assumption(
        "of FlashAttention-2's speed that attention reaches, in place of `attention`",
        of_trainer=True,
        above_zero=True,
    ),
    "stream": Assumption("of the memory's bandwidth that other operations reach", above_zero=True),
    "within": Assumption("of the links inside a node", above_zero=True),
    "across": Assumption("of the links between nodes", above_zero=True),
    "async_tp": Assumption(
        "of tensor parallelism's communication that parallel.async_tp hides", at_most_one=True
    ),
    "scale": Assumption("of a step lost each time that the GPUs double"),
    "again": Assumption(
        "of the products that selective checkpointing computes again",
        of_trainer=True,
        at_most_one=True,
    ),
    "fragmentation": Assumption(
        "of the allocated memory that cannot be used", of_trainer=True, at_most_one=True
    ),
    "exchange": Assumption(
        "of the rows for experts that are sent, such as 0.5 if each token's go in pairs",
        of_trainer=True,
        at_most_one=True,
    ),
    "dispatch": Assumption(
        "1 if a token is sent once to each worker with experts of it; 0 for Trireme's",
        of_trainer=True,
        at_most_one=True,
    ),
    "exchange_overlap": Assumption(
        "of computing that hides exchanges with experts, in pairs of micro-batches",
        of_trainer=True,
        at_most_one=True,
    ),
    "logits": Assumption(
        "bytes moved for each logit beside the loss, such as by metrics of training batches",
        of_trainer=True,
    ),
    "loss_memory": Assumption(
        "bytes of memory for each logit, such as 14 for a loss of float32 copies", of_trainer=True
    ),
    "split_loss_memory": Assumption(
        "the same of those logits that a tensor-parallel worker has", of_trainer=True
    ),
    "update": Assumption(
        "copies of trained weights that a step of the optimizer makes: 1 of foreach AdamW",
        of_trainer=True,
    ),
    "shared_copies": Assumption(
        "1 if 16-bit weights are kept beside float32, and all computes with them",
        of_trainer=True,
        at_most_one=True,
    ),
    "whole_embedding": Assumption(
        "1 if tensor parallelism does not split the embedding, else 0",
        of_trainer=True,
        at_most_one=True,
    ),
    "kept_weights": Assumption(
        "1 if gathered weights stay until backward, though they are gathered again",
        of_trainer=True,
        at_most_one=True,
    ),
    "weight_copies": Assumption(
        "bytes of kept 8-bit copies of a weight, such as 2 of Transformer Engine", of_trainer=True
    ),
    "gather": Assumption(
        "bytes of a gathered weight of 8-bit products, such as 1 of float8; 0 for Trireme's",
        of_trainer=True,
    ),
    "step": Assumption("seconds in which the host updates a parameter's tensor"),
}
"""What --assume changes, by name."""
OTHER_TRAINERS = {"flash": 0.55, "again": 0.4, "logits": 28.0, "gather": 1.0, "dispatch": 1.0}
"""What published trainers were found to do (experiments/benchmarks/published_sources.yaml).

Attention in Triton, and metrics of every batch's logits (llm-foundry); `selective` that computes
every second product again (torchtitan); weights gathered in 8 bits; a token that is sent once to a
worker that has several of its experts (DeepEP, HybridEP).
"""


def apply_assumptions(device: Device, assumptions: tuple[str, ...]) -> Device:
    """The device with constants that the user assumes.

    Args:
        device: The device.
        assumptions: name=value for each, with a name of `ASSUMPTIONS`.

    Raises:
        UserError: The name is not one of `ASSUMPTIONS`, or it cannot have the value.
    """
    for assumption in assumptions:
        name, _, value = assumption.partition("=")
        if name not in ASSUMPTIONS:
            raise UserError(
                f"--assume {assumption}: write one of {', '.join(ASSUMPTIONS)}, "
                "then = and a number, as in across=0.5"
            )
        number = _assumed_number(name, value)
        if ASSUMPTIONS[name].of_trainer:
            device = replace(device, of_another_trainer=True)
        if name == "products":
            precisions = [*device.matmul, *device.gpu.peak]
            device = replace(device, matmul=dict.fromkeys(precisions, number))
        elif name == "flash":
            attention = device.attention * number / device.flash
            device = replace(device, attention=attention, flash=number)
        else:
            device = replace(device, **{name: number})  # type: ignore[arg-type]
    return device


def _assumed_number(name: str, value: str) -> float:
    """The value of an assumption.

    Args:
        name: One of `ASSUMPTIONS`.
        value: What was written for it.

    Raises:
        UserError: It is not a number, or not one that the name can have.
    """
    assumption = ASSUMPTIONS[name]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    written = f"--assume {name}={value}"
    if assumption.at_most_one and number > 1:
        raise UserError(
            f"{written}: {name} is at most 1 ({assumption.meaning}): write a number from 0 to 1"
        )
    is_large_enough = number > 0 if assumption.above_zero else number >= 0
    if not is_large_enough or math.isinf(number):
        least = "above 0" if assumption.above_zero else "of at least 0"
        raise UserError(
            f"{written}: {name} ({assumption.meaning}) is a number {least}: write {name}=NUMBER"
        )
    return number


def assumptions_text(device: Device, precision: str) -> str:
    """What a plan assumes that a device reaches, in two lines."""
    values = {name: getattr(device, name, 0.0) for name in ASSUMPTIONS}
    values["products"] = device.matmul.get(precision, 0.6)
    if device.measured:
        source = "measured here"
    elif device.fitted:
        source = "fitted to published runs"
    else:
        source = "not measured"
    clock = device.gpu.clock
    if clock != 1:
        source += f"; {device.gpu.watts:.0f} W leave {100 * clock:.0f} % of the clock"
    written = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
    return f"Assumed ({source}; change one with --assume NAME=VALUE):\n  {written}"
