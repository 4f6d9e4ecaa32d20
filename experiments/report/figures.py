"""Figures by matplotlib, drawn so that they read on paper and on a phone, and put into the page as SVG text."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2563a8", "#d1651c", "#2f8f5b", "#b0344a", "#7a4fb5", "#8a6d1f", "#3a8fa8", "#6b6b6b")
"""Told apart by people who see colours differently, and in print by the lines' own marks."""
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, FAINT = "#1d2733", "#d9dee5"
WIDTH = 5.4
"""Inches. Of text of 10.5 points that leaves on a phone 10 pixels, and 14 where two figures stand side by side."""
_NAMES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
_STYLE: Any = {
    "font.size": 10.5,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#8793a1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # text stays text: it can be found and copied, and the file stays small
    "svg.hashsalt": "trireme",  # the same data give the same file
    "figure.constrained_layout.use": True,
}


def new(height: float = 3.4) -> tuple[Figure, Axes]:
    """An empty figure and its axes; inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(_STYLE)  # read again when legends and the file are drawn
    figure, axes = pyplot.subplots(figsize=(WIDTH, height))
    return figure, axes


def svg(figure: Figure) -> str:
    """The figure as an <svg> element that fits its surroundings."""
    from matplotlib import pyplot

    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg {_NAMES} class="plot" viewBox="\1" role="img">', text, count=1
    )
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    log_y: bool = False,
) -> Figure:
    """One line per series; a legend where there are several, at most eight named."""
    figure, axes = new()
    finite = {name: [(a, b) for a, b in points if math.isfinite(b)] for name, points in series.items()}
    for i, (name, points) in enumerate(finite.items()):
        axes.plot(
            [a for a, _ in points],
            [b for _, b in points],
            color=colour(i) if i < 8 else "#b8c0ca",
            linewidth=1.6 if len(series) < 12 else 1.0,
            marker=MARKS[i % 8] if len(points) < 3 else None,
            markersize=4,
            label=name if i < 8 else None,
        )
    values = [b for points in finite.values() for _, b in points]
    if log_y and values and max(values) > 3 * min(values):  # over less there would be one tick, or none
        axes.set_yscale("log")
        plain_ticks(axes, "y", one_two_five(values))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if len(series) > 4:
        axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))  # over the lines, not on them
    elif len(series) > 1:
        axes.legend()
    return figure


def plain_ticks(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Ticks at these values, written out (0.4 rather than 4 × 10⁻¹); for logarithmic axes."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FixedFormatter([f"{value:g}" for value in values]))
    axis.set_minor_locator(NullLocator())


def one_two_five(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 of every decade that the values touch; of many decades the powers of ten."""
    low, high = min(values) / 2, max(values) * 2
    digits = (1, 2, 5) if high < 1e4 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]


def heat_map(
    columns: Sequence[float],
    rows: Sequence[float],
    values: Mapping[tuple[float, float], float],
    *,
    best_low: bool,
    unfinished: Collection[tuple[float, float]],
) -> Figure:
    """A cell per (batch size, learning rate) with its value written in it, with … where it is unfinished; the best cell
    framed; empty where nothing was tried. Values may be infinite (diverged) or nan (failed)."""
    from matplotlib import pyplot

    finite = sorted((v for v in values.values() if math.isfinite(v)), reverse=not best_low)
    best, spread = finite[0], 4 * abs(finite[len(finite) // 2] - finite[0])
    worst = finite[-1]
    if len(finite) > 4 and spread:  # diverged corners would take up the whole range of colours
        worst = min(worst, best + spread) if best_low else max(worst, best - spread)
    figure, axes = new(max(2.4, 0.42 * len(rows) + 1.2))
    axes.grid(False)
    table = [[values.get((c, r), math.nan) for c in columns] for r in rows]
    shown = [[value if math.isfinite(value) else math.nan for value in row] for row in table]
    scheme = pyplot.get_cmap("viridis_r" if best_low else "viridis").with_extremes(bad="#f1f3f6")
    axes.imshow(shown, cmap=scheme, vmin=min(best, worst), vmax=max(best, worst), aspect="auto", origin="lower")
    axes.set_xticks(range(len(columns)), [f"{c:g}" for c in columns])
    axes.set_yticks(range(len(rows)), [f"{r:.3g}" for r in rows])
    for (column, row), value in values.items():
        at = (columns.index(column), rows.index(row))
        known = math.isfinite(value)
        dark = known and worst != best and (value - best) / (worst - best) > 0.45
        text = f"{value:.3g}{' …' if (column, row) in unfinished else ''}"
        if not known:
            text = "failed" if math.isnan(value) else "diverged"
        axes.annotate(text, at, ha="center", va="center", fontsize=9, color="white" if dark else INK)
        if value == best:
            frame = pyplot.Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, fill=False, edgecolor="#d1651c", linewidth=2.5)
            axes.add_patch(frame)
    axes.set_xlabel("global batch size")
    axes.set_ylabel("learning rate")
    return figure
