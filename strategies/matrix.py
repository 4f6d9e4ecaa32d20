"""The whole parity matrix on this machine: every row against one device, and every row's checkpoint under every row.

All rows run on GPUs or all on the CPU. A row that a layout refuses says so in a sentence; one that raises anything else
has failed, and the matrix goes on without either. `trireme parity` calls `run` and prints `table.table`.

In float32 the bound is `Row.tolerance`. In 16 bits it is the drift of one device against itself: the same training
with its rows in another order, in more and in fewer micro-batches, and in float32, rounds elsewhere, as a layout does,
and `DRIFT` times the largest of these is what a row may differ by, or the rounding of one number if that is more.
(Measured over 20 steps of bf16: one device 1.5e-3 from itself, ddp and pipelines less, tensor as much, fsdp and
fsdp+tensor, which normalise in 16 bits too, 3.6e-3 and 4.3e-3.)
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from strategies import parity
from strategies.calls import EVERYTHING, VARIANTS, Answer, Call, How, MakeTrial, execute
from strategies.compose import Options
from strategies.dims import LayoutError
from strategies.parity import Curve, Difference, bounds
from strategies.precision import DTYPES
from strategies.rows import ROWS, Row

DRIFT = 4.0
"""How many times one device's own drift in 16 bits a row may differ."""
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
    truth, limits = _one_device(how, [*names, *([EVERYTHING] if checkpoints and EVERYTHING not in names else [])])
    with tempfile.TemporaryDirectory(prefix="trireme-parity-") as folder:
        begin = [Call(row, EVERYTHING, "begin", f"{folder}/{i}") for i, row in enumerate([SINGLE, *rows])]
        calls = [Call(row, variant) for row in rows for variant in names]
        answers = execute(how, calls + (begin if checkpoints else []))
        results = [_compared(call, answer, truth[call.variant], limits) for call, answer in answers[: len(calls)]]
        return results + (_resumed(how, answers[len(calls) :], truth[EVERYTHING], limits) if checkpoints else [])


def _one_device(how: How, names: list[str]) -> tuple[dict[str, Curve], dict[str, Difference]]:
    """One device's curve of each variant, and for each in 16 bits what a row may differ by."""
    narrow = [name for name in names if how.variant(name)[1].precision != "fp32"]
    kinds = ("reversed", "halved", "merged", "float32")
    calls = [Call(SINGLE, name) for name in names] + [Call(SINGLE, name, kind) for name in narrow for kind in kinds]
    truth: dict[str, Curve] = {}
    limits = {name: bounds(torch.finfo(DTYPES[how.variant(name)[1].precision]).eps / 2) for name in narrow}
    for call, answer in execute(how, calls):
        if answer.refused and call.kind != "halved":  # of a small batch there may be no more micro-batches
            raise LayoutError(answer.refused)
        if answer.error:
            raise RuntimeError(f"one device does not train this: {answer.error}")
        if call.kind == "train" and answer.curve is not None:
            truth[call.variant] = answer.curve
        elif answer.curve is not None:
            found = parity.difference(truth[call.variant], answer.curve)
            most = limits[call.variant]
            limits[call.variant] = Difference(
                max(most.loss, DRIFT * found.loss),
                max(most.norm, DRIFT * found.norm),
                max(most.weights, DRIFT * found.weights),
            )
    return truth, limits


def _resumed(how: How, begun: list[tuple[Call, Answer]], whole: Curve, limits: dict[str, Difference]) -> list[Result]:
    """Every row from every row's checkpoint. A row that could not even begin is one result, after itself."""
    half = how.make().steps // 2
    rest = Curve(whole.losses[half:], whole.norms[half:], whole.weights)
    good = {call.folder: call.row for call, answer in begun if not (answer.refused or answer.error)}
    calls = [Call(row, EVERYTHING, "resume", place) for row in good.values() for place in good]
    dropped = [
        dataclasses.replace(_compared(call, answer, rest, limits), after=call.row)
        for call, answer in begun
        if call.folder not in good
    ]
    return dropped + [
        dataclasses.replace(_compared(call, answer, rest, limits), after=good[call.folder])
        for call, answer in execute(how, calls)
    ]


def _compared(call: Call, answer: Answer, truth: Curve, limits: dict[str, Difference]) -> Result:
    curve = answer.curve
    found = parity.difference(truth, curve) if curve is not None else None
    why = {"refused": answer.refused, "error": answer.error, "notes": curve.notes if curve is not None else ()}
    return Result(call.row, call.variant, found, answer.seconds, limit=limits.get(call.variant), **why)  # type: ignore[arg-type]
