"""A pipeline's step as a picture: stage × time, what is computed when, and the bubbles between.

Takes spans, simulated or measured (`strategies.pipeline.simulate.Span`: stage, kind, micro, chunk, start and end in
seconds).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import UserError

if TYPE_CHECKING:
    from strategies.pipeline.simulate import Span

COLOURS = {"F": "#4c78a8", "B": "#f28e2b", "W": "#59a14f"}
NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
IDLE = "#e8e8e8"


def draw(spans: Sequence[Span], path: str | Path, title: str = "") -> None:
    """Writes the picture as path's ending says: .png, .svg or .pdf.

    Raises:
        UserError: no spans, or an ending that no picture has.
    """
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    rows, begin, end = _rows(spans)
    figure = Figure(figsize=(12, 0.9 + 0.55 * len(rows)), layout="constrained")
    axes: Any = figure.subplots()
    unit, scale = _unit(end - begin)
    for stage, row in rows.items():
        idle = [((a - begin) * scale, (b - a) * scale) for a, b in _gaps(row, begin, end)]
        axes.broken_barh(idle, (stage - 0.42, 0.84), facecolors=IDLE, edgecolors="#bbbbbb", hatch="////", linewidth=0)
        for span in row:
            _box(axes, span, begin, scale, (end - begin) * scale)
    share = _idle_share(rows, begin, end)
    axes.set_xlim(0, (end - begin) * scale)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(list(rows), [f"stage {stage}" for stage in rows])
    axes.set_xlabel(f"time in {unit}")
    axes.set_title(f"{title + ': ' if title else ''}{share:.1%} bubble", loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _legend(figure, {span.kind for row in rows.values() for span in row})
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise UserError(f"{path} has an ending that no picture has: write .png, .svg or .pdf") from error


def _rows(spans: Sequence[Span]) -> tuple[dict[int, list[Span]], float, float]:
    """What each stage computes, by start; the first start and the last end."""
    computed = [span for span in spans if span.kind in COLOURS]
    if not computed:
        raise UserError("there is nothing to draw: no stage computes anything")
    rows: dict[int, list[Span]] = {stage: [] for stage in sorted({span.stage for span in computed})}
    for span in sorted(computed, key=lambda span: span.start):
        rows[span.stage].append(span)
    return rows, min(span.start for span in computed), max(span.end for span in computed)


def _gaps(row: list[Span], begin: float, end: float) -> list[tuple[float, float]]:
    gaps, at = [], begin
    for span in row:
        if span.start > at:
            gaps.append((at, span.start))
        at = max(at, span.end)
    return [*gaps, (at, end)] if at < end else gaps


def _idle_share(rows: dict[int, list[Span]], begin: float, end: float) -> float:
    idle = sum(b - a for row in rows.values() for a, b in _gaps(row, begin, end))
    return idle / (len(rows) * (end - begin))


def _box(axes: Any, span: Span, begin: float, scale: float, whole: float) -> None:
    left, width = (span.start - begin) * scale, (span.end - span.start) * scale
    alpha = max(0.45, 1 - 0.35 * span.chunk)  # later chunks are paler
    axes.broken_barh(
        [(left, width)],
        (span.stage - 0.42, 0.84),
        facecolors=COLOURS[span.kind],
        edgecolors="white",
        linewidth=0.8,
        alpha=alpha,
    )
    if width > whole / 90:
        axes.text(left + width / 2, span.stage, str(span.micro), ha="center", va="center", fontsize=7, color="white")


def _legend(figure: Any, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    marks = [Patch(facecolor=COLOURS[kind], label=NAMES[kind]) for kind in COLOURS if kind in kinds]
    marks.append(Patch(facecolor=IDLE, edgecolor="#bbbbbb", hatch="////", label="bubble"))
    figure.legend(handles=marks, loc="outside upper right", ncols=len(marks), fontsize=8, frameon=False)


def _unit(seconds: float) -> tuple[str, float]:
    if seconds >= 1:
        return "s", 1.0
    return ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
