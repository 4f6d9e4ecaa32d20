"""What study.json holds: the points of a scaling study, and what was concluded from them."""

from typing import Any, TypedDict

from experiments.study import StudyManifest


class Point(TypedDict):
    """A measurement of one strategy on one number of workers.

    Attributes:
        strategy: The strategy.
        workers: The number of workers.
        repeat: The number of this measurement of the point, from 0.
        batch: The global batch size.
        step: Seconds per step: computing + bubble + communication + data.
        computing: Seconds of computing.
        bubble: Seconds that a pipeline's schedule leaves idle.
        communication: Seconds of communication that is not hidden behind computing.
        data: Seconds of waiting for data.
        balance: The mean of the workers' computing over the largest.
        memory: Bytes of the worker with most.
        notes: What a person should know.
        layout: The layout in words.
        samples: The samples of the whole experiment.
    """

    strategy: str
    workers: int
    repeat: int
    batch: int
    step: float
    computing: float
    bubble: float
    communication: float
    data: float
    balance: float
    memory: int
    notes: list[str]
    layout: str
    samples: int


class ScalingManifest(StudyManifest, total=False):
    """A scaling study.

    Attributes:
        points: All measurements.
        price: US dollars per hour for one worker; None if the price is not known.
        curves: By strategy, the planned samples per second by number of workers.
        speeds: By strategy, the measured samples per second by number of workers.
        laws: By strategy, the law of its points (`Law.to_json`).
        verdicts: By strategy, whether twice the workers pay.
        recommended: Which strategy to use on how many workers.
    """

    points: list[Point]
    price: float | None
    curves: dict[str, dict[int, float]]
    speeds: dict[str, dict[int, list[float]]]
    laws: dict[str, dict[str, Any]]
    verdicts: dict[str, str]
    recommended: str
