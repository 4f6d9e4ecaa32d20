"""A plan beside what a run measured, by part of the step, and what later plans learn from it.

    computing      kernels, the optimizer, launches, fixed costs, and computing that is slower
                   because communication runs beside it
    communication  of any cause, as far as nothing hides it, and stragglers
    bubble         of a pipeline
    data           waiting for samples

If the measured speed is outside of a plan's range, each part's measured seconds over its planned
ones are kept as a correction, in the file of `trireme calibrate`. Plans of this machine use it for
models of similar size in the same precision, as errors of small models say little about large ones.
Waiting for data depends on the data set, so no correction is kept for it.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from app.planner.measurements import drop_measured_value, measured_values, save_measured_values
from app.training.events import StepParts

Part = Literal["computing", "communication", "bubble", "data"]
PARTS: tuple[Part, ...] = ("computing", "communication", "bubble", "data")
_COMMUNICATION = ("tensor", "context", "expert", "shard", "replicate", "pipeline_send", "scale")
SIMILAR = 4.0
"""A model with this many times the parameters of another one is still corrected like it."""
LEAST_SHARE = 0.01
"""Of a step: a part that is planned to take less is not multiplied by what was measured."""
MOST = 100.0
"""A correction is at most this factor."""
KEY = "corrections"


def part_of(name: str) -> Part:
    """The part of a step to which one of timing.py's seconds belongs."""
    if name in _COMMUNICATION:
        return "communication"
    if name == "bubble":
        return "bubble"
    return "data" if name == "data" else "computing"


def planned_parts(seconds: Mapping[str, float]) -> StepParts:
    """The parts of a planned step.

    Args:
        seconds: As `Estimate.seconds` has them.
    """
    sums = dict.fromkeys(PARTS, 0.0)
    for name, value in seconds.items():
        sums[part_of(name)] += value
    return StepParts(**sums)


def multiplied(
    seconds: Mapping[str, float], factors: Mapping[str, float], *, data_seconds: float | None = None
) -> dict[str, float]:
    """Planned seconds, each times the factor of its part.

    Args:
        seconds: As `Estimate.seconds` has them.
        factors: By part; a part that is missing stays.
        data_seconds: What waiting for samples takes instead; None for what is planned.
    """
    corrected = {name: value * factors.get(part_of(name), 1.0) for name, value in seconds.items()}
    if data_seconds is not None:
        corrected["data"] = data_seconds
    return corrected


def factors_of(planned: StepParts, measured: StepParts) -> dict[str, float]:
    """By part, what was measured over what was planned, where enough was planned to say so."""
    factors = {}
    for part in ("computing", "communication", "bubble"):
        expected: float = getattr(planned, part)
        if expected > LEAST_SHARE * planned.step:
            factor = getattr(measured, part) / expected
            factors[part] = min(max(factor, 1 / MOST), MOST)
    return factors


# --- one run beside its plan ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A plan beside what was measured.

    Args:
        planned: Seconds of a step by part.
        measured: The same.
        speed_range: Between these shares of the planned speed are 80 % of runs.
    """

    planned: StepParts
    measured: StepParts
    speed_range: tuple[float, float]

    @property
    def is_inside(self) -> bool:
        """Whether the measured speed is within the plan's range."""
        low, high = self.speed_range
        return low <= self.planned.step / self.measured.step <= high

    @property
    def wrong_part(self) -> Part:
        """The part that contributes most to the error of the whole step."""
        sign = 1 if self.measured.step > self.planned.step else -1
        return max(PARTS, key=lambda part: sign * self._error(part))

    def _error(self, part: Part) -> float:
        return float(getattr(self.measured, part) - getattr(self.planned, part))

    @property
    def sentence(self) -> str:
        """Which part was wrong, for a person."""
        low, high = self.speed_range
        part = self.wrong_part
        expected: float = getattr(self.planned, part)
        seconds: float = getattr(self.measured, part)
        return (
            f"a step takes {self.measured.step:.3g} s, outside of the planned "
            f"{self.planned.step / high:.3g} to {self.planned.step / low:.3g} s; the plan was "
            f"wrong mostly about {_NAMES[part]}: {expected:.3g} s planned, {seconds:.3g} s measured"
        )

    def metrics(self) -> dict[str, float]:
        """Planned and measured seconds by part, as metrics to log."""
        values = {}
        for part in PARTS:
            values[f"plan/{part}_seconds"] = getattr(self.planned, part)
            values[f"plan/{part}_seconds_measured"] = getattr(self.measured, part)
        return values


_NAMES = {
    "computing": "computing",
    "communication": "communication that nothing hides",
    "bubble": "the pipeline's bubble",
    "data": "waiting for data",
}


# --- what later plans learn -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What one run says about plans of models like its own.

    Args:
        factors: By part, what was measured over what a plan without corrections says.
        parameters: Of the run's model.
        precision: Of the run.
        run: Its name.
        date: When it was measured, as YYYY-MM-DD.
    """

    factors: dict[str, float]
    parameters: int
    precision: str
    run: str
    date: str

    def is_for(self, parameters: int, precision: str) -> bool:
        """Whether plans of such a model use it."""
        ratio = parameters / max(1, self.parameters)
        return precision == self.precision and 1 / SIMILAR <= ratio <= SIMILAR

    @property
    def sentence(self) -> str:
        """How it changes a plan, in a sentence for a person."""
        factors = ", ".join(f"{part} × {factor:.2g}" for part, factor in self.factors.items())
        return (
            f"Corrected by what run {self.run} measured here on {self.date}: {factors} "
            "(`trireme calibrate --drop-corrections` drops it)."
        )


def corrections_of(records: Sequence[Mapping[str, Any]]) -> tuple[Correction, ...]:
    """The corrections of a file of `trireme calibrate`."""
    return tuple(Correction(**record) for record in records)


def correction_for(
    corrections: Sequence[Correction], parameters: int, precision: str
) -> Correction | None:
    """The newest correction for a model; None if there is none."""
    for correction in reversed(corrections):
        if correction.is_for(parameters, precision):
            return correction
    return None


def keep_correction(
    gpu: str,
    comparison: Comparison,
    before: Correction | None,
    *,
    parameters: int,
    precision: str,
    run: str,
) -> Correction:
    """Keep what a run measured for later plans of this machine.

    It takes the place of what was kept for the same kind of model.

    Args:
        gpu: The device's name in the catalogue.
        comparison: The run beside its plan.
        before: The correction that the plan had; None for none.
        parameters: Of the run's model.
        precision: Of the run.
        run: Its name.
    """
    factors = dict(before.factors) if before is not None else {}
    for part, factor in factors_of(comparison.planned, comparison.measured).items():
        together = factor * factors.get(part, 1.0)
        factors[part] = min(max(together, 1 / MOST), MOST)
    correction = Correction(
        factors=factors,
        parameters=parameters,
        precision=precision,
        run=run,
        date=datetime.date.today().isoformat(),
    )
    kept = corrections_of(measured_values(gpu).get(KEY, []))
    others = [each for each in kept if not each.is_for(parameters, precision)]
    save_measured_values(gpu, {KEY: [asdict(each) for each in (*others, correction)]})
    return correction


def drop_corrections(gpus: Sequence[str]) -> list[Correction]:
    """Forget what runs have measured of these devices; returns what there was."""
    dropped: list[Correction] = []
    for gpu in gpus:
        dropped += corrections_of(measured_values(gpu).get(KEY, []))
        drop_measured_value(gpu, KEY)
    return dropped
