"""The whole parity matrix on this machine: every row against one device, and every row's checkpoint under every row.

All rows run on GPUs or all on the CPU. A row that a layout refuses says so in a sentence; one that raises anything else
has failed, and the matrix goes on without either. `trireme parity` calls `run` and prints `table.table`.

In float32 the bound is `Row.tolerance`, in 16 bits what one device differs from itself by (drift.py).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from experiments.parity import curves, drift
from experiments.parity.calls import EVERYTHING, VARIANTS, Answer, Call, How, MakeTrial, execute
from experiments.parity.curves import Curve, Difference, bounds
from experiments.parity.rows import ROWS, Row
from strategies.layout import LayoutError
from strategies.parallelize import Options

SINGLE = Row("single", 1)


@dataclass(frozen=True)
class Result:
    """How far a row was from one device. after: the row whose checkpoint it continued. refused: the sentence of a
    layout that cannot do this; error: of anything else that was raised. limit: what is allowed where it is not the
    row's own tolerance."""

    row: Row
    variant: str
    found: Difference | None
    seconds: float
    after: Row | None = None
    refused: str = ""
    error: str = ""
    notes: tuple[str, ...] = ()
    limit: Difference | None = None

    @property
    def bound(self) -> Difference:
        return self.limit or bounds(self.row.tolerance)

    @property
    def passed(self) -> bool:
        return self.found is not None and self.found.inside(self.bound)

    @property
    def verdict(self) -> str:
        """ok, REFUSED, FAILED or DIFFERS."""
        if self.found is None:
            return "REFUSED" if self.refused else "FAILED"
        return "ok" if self.passed else "DIFFERS"


def run(
    make: MakeTrial,
    rows: Iterable[Row] = ROWS,
    *,
    options: Options | None = None,
    variants: Iterable[str] | None = None,
    checkpoints: bool = False,
) -> list[Result]:
    """Trains every row in every variant and compares; then, with `checkpoints`, every ordered pair of rows.

    make: gives the trial; picklable (at the top level of a module), as it is called in the workers. options: of every
    row. variants: names of VARIANTS; None: all, but for bf16 where the options have a precision already.
    Raises:
        LayoutError: one device cannot train this, so there is nothing to compare with.
    """
    rows, options = list(rows), options or Options()
    names = list(variants or (name for name in VARIANTS if name != "bf16" or options.precision == "fp32"))
    most = max((row.workers for row in rows), default=1)
    how = How(make, options, "cuda" if torch.cuda.device_count() >= most else "cpu")
    measure = _one_device(how, [*names, *([EVERYTHING] if checkpoints and EVERYTHING not in names else [])])
    with tempfile.TemporaryDirectory(prefix="trireme-parity-") as folder:
        begin = [Call(row, EVERYTHING, "begin", f"{folder}/{i}") for i, row in enumerate([SINGLE, *rows])]
        calls = [Call(row, variant) for row in rows for variant in names]
        answers = execute(how, calls + (begin if checkpoints else []))
        results = [_compared(call, answer, measure) for call, answer in answers[: len(calls)]]
        results = _two_kinds(measure) + results
        return results + (_resumed(how, answers[len(calls) :], measure) if checkpoints else [])


@dataclass(frozen=True)
class Yardstick:
    """One device's curves of a variant, by kind ("train", and in 16 bits drift.KINDS), and what a row may differ from
    those that a row is held against (none in float32, where the row has a tolerance)."""

    precision: str
    curves: dict[str, Curve]
    limits: dict[str, Difference]

    def of(self, row: Row, skip: int = 0) -> tuple[Curve, Difference | None]:
        """The curve that a row is held against, without its first `skip` steps, and the bound."""
        kind = drift.truth_of(row, self.precision)
        whole = self.curves[kind]
        return Curve(whole.losses[skip:], whole.norms[skip:], whole.weights), self.limits.get(kind)


def _one_device(how: How, names: list[str]) -> dict[str, Yardstick]:
    """Variant → what its rows are held against."""
    precisions = {name: how.variant(name)[1].precision for name in names}
    calls = [Call(SINGLE, name) for name in names]
    calls += [Call(SINGLE, name, kind) for name in names if precisions[name] != "fp32" for kind in drift.KINDS]
    curves: dict[str, dict[str, Curve]] = {name: {} for name in names}
    for call, answer in execute(how, calls):
        if answer.refused and not call.kind.endswith("halved"):  # of a small batch there may be no more micro-batches
            raise LayoutError(answer.refused)
        if answer.error:
            raise RuntimeError(f"one device does not train this: {answer.error}")
        if answer.curve is not None:
            curves[call.variant][call.kind] = answer.curve
    return {
        name: Yardstick(
            precisions[name], found, {} if precisions[name] == "fp32" else drift.limits(precisions[name], found)
        )
        for name, found in curves.items()
    }


def _two_kinds(measure: dict[str, Yardstick]) -> list[Result]:
    """How far the two kinds of 16 bits are from each other on one device: no more than both from themselves."""
    return [
        Result(
            SINGLE,
            f"{name}, by parameters",
            curves.difference(one.curves["train"], one.curves[drift.NARROW]),
            0.0,
            limit=Difference(*map(sum, zip(*map(dataclasses.astuple, one.limits.values()), strict=True))),
        )
        for name, one in measure.items()
        if one.limits
    ]


def _resumed(how: How, begun: list[tuple[Call, Answer]], measure: dict[str, Yardstick]) -> list[Result]:
    """Every row from every row's checkpoint. A row that could not even begin is one result, after itself."""
    half = how.make().steps // 2
    good = {call.folder: call.row for call, answer in begun if not (answer.refused or answer.error)}
    calls = [Call(row, EVERYTHING, "resume", place) for row in good.values() for place in good]
    dropped = [
        dataclasses.replace(_compared(call, answer, measure, half), after=call.row)
        for call, answer in begun
        if call.folder not in good
    ]
    return dropped + [
        dataclasses.replace(_compared(call, answer, measure, half), after=good[call.folder])
        for call, answer in execute(how, calls)
    ]


def _compared(call: Call, answer: Answer, measure: dict[str, Yardstick], skip: int = 0) -> Result:
    truth, limit = measure[call.variant].of(call.row, skip)
    curve = answer.curve
    found = curves.difference(truth, curve) if curve is not None else None
    return Result(
        call.row,
        call.variant,
        found,
        answer.seconds,
        refused=answer.refused,
        error=answer.error,
        notes=curve.notes if curve is not None else (),
        limit=limit,
    )
