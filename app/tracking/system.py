"""The system metrics that MLflow gets: each node's of a small run, a summary of a large one.

Every node's own metrics are in Prometheus, from Ray's agents.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

EACH_NODES = 8
"""Of so many nodes MLflow gets each one's metrics; of more, minimum, mean and maximum."""
STALE_PERIODS = 3.0
"""A node whose newest sample is so many periods old is gone."""
_GPU = re.compile(r"^gpu_\d+_")

Samples = Mapping[str, float]
"""Metrics of a node by full name, `system/NODE/NAME`."""


class SystemMetrics:
    """Chooses what is logged of the nodes' samples.

    Args:
        every: Seconds between two samples of a node.
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._newest: dict[str, tuple[float, Samples]] = {}
        """Each node's newest sample and its Unix time."""
        self._logged_time = 0.0

    def add(self, time: float, values: Samples) -> dict[str, float]:
        """Takes a node's sample, and returns what is to be logged now; {} if nothing is.

        Args:
            time: Unix seconds.
            values: The sample.
        """
        _, node, _ = next(iter(values), "system//").split("/", 2)
        self._newest[node] = (time, values)
        if len(self._newest) <= EACH_NODES:
            return dict(values)
        if time - self._logged_time < self._every:
            return {}
        self._logged_time = time
        oldest_time = time - STALE_PERIODS * self._every
        self._newest = {
            node: sample for node, sample in self._newest.items() if sample[0] >= oldest_time
        }
        return summary([sample for _, sample in self._newest.values()])


def summary(samples: list[Samples]) -> dict[str, float]:
    """Minimum, mean and maximum over nodes and their GPUs, as `system/min/NAME` and so on."""
    values_of: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for full_name, value in sample.items():
            name = full_name.split("/", 2)[2]
            values_of[_GPU.sub("gpu_", name)].append(value)
    values: dict[str, float] = {}
    for name, of_nodes in values_of.items():
        values[f"system/min/{name}"] = min(of_nodes)
        values[f"system/mean/{name}"] = round(sum(of_nodes) / len(of_nodes), 1)
        values[f"system/max/{name}"] = max(of_nodes)
    return values
