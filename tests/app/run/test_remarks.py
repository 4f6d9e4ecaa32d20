"""What a person is told of GPUs left idle and of workers with too little to do."""

from __future__ import annotations

import pytest

from app.config import Config, TrainConfig
from app.run.driver import UtilizationMonitor
from app.run.prepare import Prepared, gpus_of_this_machine, with_remarks
from strategies.parallelize import choose


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"used": 0}, "computes on CPUs, but the cluster has 8 GPUs"),
        ({"workers": 4, "used": 4}, "4 of the cluster's 8 GPUs are not used: workers=4 takes 4"),
        ({"batch": 8}, "computes one sample per step"),
        ({"samples": 100}, "a step takes 256 samples, but the data has 100"),
    ],
)
def test_remarks_at_the_start(change: dict[str, int], says: str) -> None:
    facts = {"workers": 8, "gpus": 8, "used": 8, "batch": 256, "samples": 10_000} | change
    config = Config(train=TrainConfig(global_batch_size=facts["batch"]))
    prepared = Prepared(config, choose("ddp", 8), 10, facts["samples"], "", ("first",))
    found = with_remarks(prepared, workers=facts["workers"], gpus=facts["gpus"], gpus_used=facts["used"]).notes
    assert found[0] == "first" and len(found) == 1 + bool(says)
    assert says in found[-1]


@pytest.mark.parametrize(
    ("strategy", "processes", "visible", "used"),
    [("single", 1, 4, 1), ("dp", 1, 4, 4), ("ddp_model_parallel", 2, 4, 4), ("ddp", 4, 4, 4), ("ddp", 2, 0, 0)],
)
def test_gpus_that_the_processes_of_a_machine_use(strategy: str, processes: int, visible: int, used: int) -> None:
    assert gpus_of_this_machine(choose(strategy, processes), processes, visible) == used


def sample(*gpus: float, cpu: float = 30.0, node: str = "node-0") -> dict[str, float]:
    values = {f"system/{node}/gpu_{i}_utilization_percentage": share for i, share in enumerate(gpus)}
    return values | {f"system/{node}/cpu_utilization_percentage": cpu, f"system/{node}/disk_usage_percentage": 99.0}


def observed(*samples: dict[str, float]) -> list[str]:
    monitor = UtilizationMonitor()
    return [sentence for values in samples for sentence in monitor.observe(values)]


def test_idle_gpus_are_reported_once() -> None:
    assert observed(*[sample(90.0, 0.0, 85.0)] * 20) == ["GPU 1 of node-0 is idle while others train"]
    (sentence,) = observed(*[sample(0.0, 1.0, cpu=95.0)] * 20)
    assert "every GPU is idle while the CPUs work" in sentence
    assert observed(*[sample(90.0, 80.0)] * 20) == []
    assert observed(*[sample(90.0, 0.0)] * 3) == [], "too early"
    both = [values for _ in range(9) for values in (sample(90.0), sample(0.0, node="node-1"))]
    assert observed(*both) == ["GPU 0 of node-1 is idle while others train"]
