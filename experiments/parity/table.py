"""What a parity matrix found, as text for a terminal or a file: the rows, and the grid of checkpoints.

`rows` is one line per row and variant. `grid` is one line per row and one column per row whose checkpoint it went on
from; a cell is one number, so that thirty rows fit on a screen.
"""

from __future__ import annotations

import math

from experiments.parity.matrix import Result


def table(results: list[Result]) -> str:
    """Everything: the rows, the grid where there is one, and what was said about either."""
    trained = [result for result in results if result.after is None]
    resumed = [result for result in results if result.after is not None]
    return "\n\n".join(part for part in (rows(trained), grid(resumed), remarks(results)) if part)


def rows(trained: list[Result]) -> str:
    """One line per row and variant: the largest relative differences, and what was allowed where it is not met."""
    width = max((len(str(result.row)) for result in trained), default=3)
    lines = [f"{'row':<{width}} {'variant':<32} {'loss':>8} {'norm':>8} {'weights':>8} {'s':>6}"]
    for result in trained:
        start, found = f"{result.row!s:<{width}} {result.variant:<32}", result.found
        if found is None:
            lines.append(f"{start} {result.verdict}: {result.refused or result.error}")
            continue
        line = f"{start} {found.loss:8.1e} {found.norm:8.1e} {found.weights:8.1e} {result.seconds:6.1f}"
        allowed = f"(allowed {result.bound.loss:.0e} {result.bound.norm:.0e} {result.bound.weights:.0e})"
        lines.append(line if result.passed else f"{line}  {result.verdict} {allowed}")
    return "\n".join(lines)


def grid(resumed: list[Result]) -> str:
    """Rows × rows: how far the loss of a row is that goes on from another's checkpoint. "" where there is none."""
    if not resumed:
        return ""
    dropped = {str(r.row): f"{r.verdict}: {r.refused or r.error}" for r in resumed if r.row == r.after and not r.found}
    names = list(dict.fromkeys(str(result.row) for result in resumed if str(result.row) not in dropped))
    cells = {(str(result.row), str(result.after)): _cell(result) for result in resumed}
    width = max((len(name) for name in [*names, *dropped]), default=0)
    lines = [
        "Row after the checkpoint of (column): 7 is a loss within 1e-7 of the run that never changed, = the same to",
        "the last bit, ! beyond what is allowed.",
        " " * (width + 4) + "".join(f"{number:>3}" for number in range(1, len(names) + 1)),
    ]
    for number, name in enumerate(names, start=1):
        lines.append(f"{number:>3} {name:<{width}}" + "".join(f"{cells.get((name, other), '?'):>3}" for other in names))
    return "\n".join([*lines, *(f"    {name:<{width}} {why}" for name, why in dropped.items())])


def _cell(result: Result) -> str:
    if result.found is None:
        return "!"
    if result.found.loss == 0:
        return "=" if result.passed else "!"
    close = -math.ceil(math.log10(result.found.loss)) if math.isfinite(result.found.loss) else 0
    return f"{'' if result.passed else '!'}{close}"


def remarks(results: list[Result]) -> str:
    """What layouts said aloud, once each, with how many rows said it; and the pairs that differ, by name."""
    said: dict[str, set[str]] = {}
    for result in results:
        for note in result.notes:
            said.setdefault(note, set()).add(str(result.row))
    lines = [f"{note} ({len(of)} row{'s' if len(of) > 1 else ''})" for note, of in said.items()]
    for result in results:
        if result.after is not None and not result.passed and result.row != result.after:
            found = result.found or result.refused or result.error
            lines.append(f"{result.verdict}: {result.row} after {result.after}: {found}")
    return "\n".join(lines)
