"""Describes a run's data for MLflow's table of data sets: name, digest, source and size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from app.config import Config
from app.console.masking import mask_text
from app.data.loader import fetch, length
from app.tasks.base import Task
from strategies.tree import tree_leaves

DIGEST_SAMPLES = 32
"""Samples, from all over the data, that the digest is made of."""


def inputs(config: Config, task: Task) -> Iterator[dict[str, str]]:
    """Describes the training and the held-out data.

    Returns:
        For each data set the arguments of MLflow's Dataset, and its `context`.
    """
    source = config.task_args.get("data", config.task)
    if not isinstance(source, str):
        source = json.dumps(source, default=str)
    name = mask_text(source)
    for context, data in (("training", task.train_data()), ("evaluation", task.eval_data())):
        if data is None:
            continue
        profile = {"kind": type(data).__name__, "samples": length(data)}
        yield {
            "name": name[-500:],
            "digest": digest(data),
            "context": context,
            "profile": json.dumps(profile),
            "source_type": "local",
            "source": json.dumps({"uri": name}),
        }


def digest(data: Any) -> str:
    """A digest of the number of samples and of some samples, the first ones if data is a stream.

    Returns:
        16 hexadecimal digits.
    """
    size = length(data)
    count = min(DIGEST_SAMPLES, size or DIGEST_SAMPLES)
    positions = [number * (size or count) // count for number in range(count)]
    batch = fetch(data, [(position, position) for position in positions])
    values = [leaf.tolist() if hasattr(leaf, "tolist") else leaf for leaf in tree_leaves(batch)]
    return hashlib.sha256(repr((size, values)).encode()).hexdigest()[:16]
