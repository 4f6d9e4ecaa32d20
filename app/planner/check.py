"""How right the planner is on this machine: calibrate on some configurations, predict others, measure both.

Four models, the strategies that there are, 1, 2 and 4 workers, several batch sizes. Those in `calibrated` fit a dozen
constants of this machine (with `trireme calibrate`'s as the start) and one factor per model, those in `tested` are
predicted from that alone. Measures: mean absolute error of step time and of memory, Kendall's τ between
predicted and measured times, and regret: how much slower the layout is that the planner would have chosen than the
best measured one, for each model, number of workers and batch: the mean and the most of so many choices.

Beside it stands what a user gets who only runs `trireme calibrate`, now, and plans: the same figures without the fit,
and without memory, whose base is measured with the fit.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from app.config import Config
from app.config_io import load_config, to_dict
from app.planner.evaluate import Machine, evaluate
from app.planner.measure import Measured, measure
from app.planner.plan import settings_of
from app.planner.prediction import row_of
from app.planner.rates import Rates, apply, rates
from app.planner.read import Reader
from app.planner.table import Table
from app.tasks import load_task
from strategies.layout import choose

MODELS: dict[str, list[str]] = {
    "gpt": [
        "task=language_modelling",
        "task_args={data: python, sequence_length: 128, d_model: 160, n_layers: 3, n_heads: 4}",
    ],
    "wide": [
        "task=image_classification",
        "task_args={data: digits, model: mlp, model_args: {hidden: [1024, 1024, 1024]}}",
    ],
    "cnn": ["task=image_classification", "task_args={data: digits, model: cnn, model_args: {widths: [64, 128]}}"],
    "resnet": ["task=image_classification", "task_args={data: digits, model: resnet}"],
}
BATCHES = {"gpt": (8, 16, 32), "wide": (64, 128, 256), "cnn": (64, 128, 256), "resnet": (16, 32, 64)}
LAYOUTS: list[tuple[int, list[str]]] = [
    (1, ["strategy=single"]),
    (2, ["strategy=ddp"]),
    (2, ["strategy=fsdp"]),
    (2, ["strategy=zero1"]),
    (4, ["strategy=ddp"]),
    (4, ["strategy=fsdp"]),
]
MORE: dict[str, list[tuple[int, list[str]]]] = {
    "gpt": [
        (1, ["strategy=single", "train.activation_checkpointing=full"]),
        (2, ["strategy=tensor", "parallel.tp=2"]),
        (4, ["strategy=hsdp", "parallel.dp_shard=2"]),
        (4, ["strategy=fsdp+tensor", "parallel.tp=2", "parallel.dp_shard=2"]),
        (2, ["strategy=ddp", "train.micro_batch_size=2"]),
    ],
}


@dataclass
class Case:
    model: str
    workers: int
    batch: int
    overrides: list[str]
    predicted: float = 0.0
    predicted_bytes: float = 0.0
    measured: Measured | None = None

    @functools.cached_property
    def config(self) -> Config:
        extra = [f"train.global_batch_size={self.batch}", "train.steps=1000000", "train.log_every=1000000"]
        extra += ["tracking.enabled=false", f"workers={self.workers}", "launcher=torchrun", "run.name=check"]
        return load_config([], [*MODELS[self.model], *self.overrides, *extra])

    @property
    def name(self) -> str:
        plain = " ".join(o.partition("=")[2] if o.startswith("strategy") else o.split(".")[-1] for o in self.overrides)
        return f"{self.model} {plain} × {self.workers}, batch {self.batch}"


def cases() -> tuple[list[Case], list[Case]]:
    """(calibrated, tested): of every model and layout two batch sizes of three, in turn; none is in both. On one device
    a model is calibrated at two: how its time grows with the batch is its own."""
    calibrated, tested = [], []
    for model, batches in BATCHES.items():
        calibrated.append(Case(model, 1, batches[2], ["strategy=single"]))
        for i, (workers, overrides) in enumerate([*LAYOUTS, *MORE.get(model, [])]):
            calibrated.append(Case(model, workers, batches[i % 3], overrides))
            tested.append(Case(model, workers, batches[(i + 1) % 3], overrides))
    return calibrated, tested


def measured(asked: list[Case], say: Callable[[str], None]) -> None:
    """Measures the cases in place, in as few sets of processes as there are numbers of workers."""
    for workers in sorted({case.workers for case in asked}):
        own = [case for case in asked if case.workers == workers]
        say(f"measuring {len(own)} configurations on {workers} workers")
        for case, found in zip(own, measure([to_dict(case.config) for case in own], workers)):
            case.measured = found


class Predictor:
    """Predicts cases with given constants; reads each model once."""

    def __init__(self) -> None:
        self.readers: dict[str, Reader] = {}
        self.tables: dict[str, Table] = {}

    def plan(self, case: Case, device: Rates, factor: float) -> tuple[float, float]:
        """Seconds per step and bytes (without the process's own)."""
        config = case.config
        if case.model not in self.readers:
            self.readers[case.model] = Reader(load_task(config.task, config.task_args))
        machine = Machine(device, case.workers, case.workers, device.gpu.link_within)
        settings = settings_of(config, machine, factor)
        found = evaluate(self.readers[case.model].read, self.table(case, config), machine, settings)
        return float(found.step[0]), float(found.bytes[0])

    def table(self, case: Case, config: Config) -> Table:
        """The one layout that the case is."""
        if case.name not in self.tables:
            wanted = config.parallel
            layout = choose(config.strategy, case.workers, dp_shard=wanted.dp_shard, tp=wanted.tp)
            self.tables[case.name] = row_of(config, layout)
        return self.tables[case.name]


FITTED = {
    "compute": 0.7,
    "stream": 0.7,
    "k_half": 0.7,
    "mn_half": 1.0,
    "operation": 0.7,
    "packing": 0.7,
    "optimizer": 0.7,
    "step": 1.0,
    "within": 1.0,
    "shared": 1.0,
    "latency_within": 1.0,
    "crowded_latency": 0.7,
    "unit": 1.5,
    "tensor_step": 1.5,
    "hidden": 0.5,
    "contention": 0.7,
    "waiting": 1.0,
    "crowd2": 0.1,
    "crowd4": 0.15,
}
"""What is fitted, each as a factor of what it was, and how far in logarithms it goes easily."""


def changed(device: Rates, factors: dict[str, float]) -> Rates:
    crowd = [(count, device.slowdown(count) * factors.get(f"crowd{count}", 1.0)) for count in (1, 2, 4)]
    plain = [name for name in factors if name not in ("compute", "crowd2", "crowd4")]
    values: dict[str, Any] = {name: getattr(device, name) * factors[name] for name in plain}
    peak = {name: rate * factors["compute"] for name, rate in device.gpu.peak.items()}
    return apply(device, values | {"peak": peak, "crowd": crowd})


def fit(known: list[Case], predictor: Predictor, start: Rates) -> tuple[Rates, dict[str, float]]:
    """Constants of this machine and a factor per model, from measured cases."""
    from scipy.optimize import least_squares

    names, models = list(FITTED), sorted({case.model for case in known})
    loose = np.array([*FITTED.values()] + [0.4] * len(models))
    seen = np.log(np.array([(case.measured or Measured(1.0)).seconds or 1.0 for case in known]))

    def read(x: np.ndarray) -> tuple[Rates, dict[str, float]]:
        factors = {name: float(np.exp(value)) for name, value in zip(names, x)}
        return changed(start, factors), dict(zip(models, np.exp(x[len(names) :])))

    def residuals(x: np.ndarray) -> np.ndarray:
        device, own = read(x)
        errors = np.log([predictor.plan(case, device, own[case.model])[0] for case in known]) - seen
        return np.concatenate([errors / 0.05, x / loose])

    found = least_squares(residuals, np.zeros(len(loose)), loss="soft_l1", diff_step=1e-2, max_nfev=25)
    return read(found.x)


def run(say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The whole measure; about five minutes on a quiet machine of two cores.

    All are measured in one go, one of each kind in turn, so that whatever else the machine does falls on both alike;
    what is predicted comes from those that are calibrated, and from nothing that was measured of the others.
    """
    from app.planner.calibrate import calibrate

    calibrated, tested = cases()
    predictor = Predictor()
    start = rates("cpu")
    say("calibrating")
    plain = rates("cpu", {key: value for key, value in calibrate(4).items() if key != "gpu"})
    measured([case for pair in zip_longest(calibrated, tested) for case in pair if case], say)
    known = [case for case in calibrated if case.measured and case.measured.seconds]
    say(f"fitting {len(known)} configurations")
    device, own = fit(known, predictor, start)
    base = memory_base(known, predictor, device)
    for case in tested:
        case.predicted, _ = predictor.plan(case, plain, 1.0)
    without = summary(tested)
    for case in tested:
        case.predicted, tensors = predictor.plan(case, device, own.get(case.model, 1.0))
        case.predicted_bytes = tensors + base[case.workers]
    factors = {model: float(factor) for model, factor in own.items()}
    figures = ("step_error", "kendall_tau", "regret", "regret_most")
    return summary(tested) | {
        "factors": factors,
        "calibrated": len(known),
        "fitted_on": {case.name: 1e3 * case.measured.seconds for case in known},  # type: ignore[union-attr,operator]
        "plain": {name: without[name] for name in figures},
    }


def memory_base(known: list[Case], predictor: Predictor, device: Rates) -> dict[int, float]:
    """Bytes a process takes beside what is predicted, by number of workers: the median of the calibrated ones."""
    extra: dict[int, list[float]] = defaultdict(list)
    for case in known:
        assert case.measured is not None
        extra[case.workers].append(case.measured.bytes - predictor.plan(case, device, 1.0)[1])
    return {workers: float(np.median(values)) for workers, values in extra.items()}


def summary(tested: list[Case]) -> dict[str, Any]:
    ran = [case for case in tested if case.measured and case.measured.seconds]
    regrets = regret(ran)
    predicted = np.array([case.predicted for case in ran])
    seen = np.array([case.measured.seconds for case in ran])  # type: ignore[union-attr]
    memory = np.array([case.predicted_bytes / case.measured.bytes - 1 for case in ran])  # type: ignore[union-attr]
    return {
        "cases": [
            {
                "name": case.name,
                "predicted_ms": 1e3 * case.predicted,
                "measured_ms": 1e3 * case.measured.seconds,  # type: ignore[union-attr,operator]
                "predicted_mib": case.predicted_bytes / 2**20,
                "measured_mib": case.measured.bytes / 2**20,  # type: ignore[union-attr]
                "base_mib": case.measured.base / 2**20,  # type: ignore[union-attr]
            }
            for case in ran
        ],
        "failed": [
            f"{case.name}: {case.measured.failure}" for case in tested if case.measured and not case.measured.seconds
        ],
        "step_error": float(np.abs(predicted / seen - 1).mean()),
        "memory_error": float(np.abs(memory).mean()),
        "kendall_tau": kendall(predicted, seen),
        "regret": float(np.mean(regrets)) if regrets else 0.0,
        "regret_most": max(regrets, default=0.0),
        "choices": len(regrets),
    }


def kendall(a: np.ndarray, b: np.ndarray) -> float:
    """Kendall's τ: how often two orders agree on a pair, less how often they do not."""
    i, j = np.triu_indices(len(a), 1)
    signs = np.sign(a[i] - a[j]) * np.sign(b[i] - b[j])
    return float(signs.mean()) if len(i) else 1.0


def regret(ran: list[Case]) -> list[float]:
    """For each choice (model, workers, batch) the chosen one's measured time over the best one's, less 1."""
    choices: dict[tuple[str, int, int], list[Case]] = defaultdict(list)
    for case in ran:
        choices[case.model, case.workers, case.batch].append(case)
    found = []
    for options in choices.values():
        if len(options) > 1:
            chosen = min(options, key=lambda case: case.predicted)
            best = min(case.measured.seconds for case in options)  # type: ignore[union-attr,type-var]
            found.append(chosen.measured.seconds / best - 1)  # type: ignore[union-attr,operator]
    return found


def report(as_json: bool, say: Callable[[str], None]) -> str:
    """The measure as a table, or as JSON."""
    found = run(say)
    return json.dumps(found) if as_json else text(found)


def text(found: dict[str, Any]) -> str:
    """What `run` found, as a table."""
    lines = [f"{'configuration':52s}{'predicted':>12s}{'measured':>13s}    MiB  measured"]
    for case in found["cases"]:
        lines.append(
            f"{case['name']:52s}{case['predicted_ms']:10.1f}ms{case['measured_ms']:11.1f}ms"
            f"{case['predicted_mib']:7.0f}{case['measured_mib']:10.0f}"
        )
    lines += [f"did not run: {failure}" for failure in found["failed"]]
    plain = found["plain"]
    lines.append(
        f"{len(found['cases'])} configurations after calibration on {found['calibrated']} others: step time within "
        f"{100 * found['step_error']:.1f} % (10), memory within {100 * found['memory_error']:.1f} % (5), Kendall's τ "
        f"{found['kendall_tau']:.2f} (0.9), regret {100 * found['regret']:.1f} % (5), at most "
        f"{100 * found['regret_most']:.1f} %, of {found['choices']} choices"
    )
    lines.append(
        f"after `trireme calibrate` alone: step time within {100 * plain['step_error']:.1f} %, Kendall's τ "
        f"{plain['kendall_tau']:.2f}, regret {100 * plain['regret']:.1f} %, at most {100 * plain['regret_most']:.1f} %"
    )
    return "\n".join(lines)
