"""What a run's data is, for MLflow's table of data sets: name, digest, source and size."""

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

LOOKED_AT = 32  # samples, from all over the data, that the digest is made of


def inputs(config: Config, task: Task) -> Iterator[dict[str, str]]:
    """Of the training and the held-out data: what MLflow's Dataset takes, and `context`."""
    source = config.task_args.get("data", config.task)
    name = mask_text(source if isinstance(source, str) else json.dumps(source, default=str))
    for context, data in (("training", task.train_data()), ("evaluation", task.eval_data())):
        if data is not None:
            kind = {"kind": type(data).__name__, "samples": length(data)}
            about = {"name": name[-500:], "digest": digest(data), "context": context, "profile": json.dumps(kind)}
            yield about | {"source_type": "local", "source": json.dumps({"uri": name})}


def digest(data: Any) -> str:
    """Of the number of samples and some of them (of a stream the first), 16 hexadecimal digits."""
    size = length(data)
    count = min(LOOKED_AT, size or LOOKED_AT)
    batch = fetch(data, [(at, at) for at in (i * (size or count) // count for i in range(count))])
    values = [leaf.tolist() if hasattr(leaf, "tolist") else leaf for leaf in tree_leaves(batch)]
    return hashlib.sha256(repr((size, values)).encode()).hexdigest()[:16]
