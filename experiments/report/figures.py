"""Figures by matplotlib that read on paper and on a phone; a page has them as SVG text."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2563a8", "#d1651c", "#2f8f5b", "#b0344a", "#7a4fb5", "#8a6d1f", "#3a8fa8", "#6b6b6b")
"""Distinct for people who see colours differently; in print the marks tell lines apart."""
DARK_COLOURS = (
    "#6aa9ec",
    "#ef8f4d",
    "#5cc48a",
    "#ec7a92",
    "#b294e6",
    "#cfae4f",
    "#63bfd8",
    "#a6a6a6",
)
"""The same series where a page is dark."""
GREY = "#8793a1"
LIGHT_GREY = "#b8c0ca"
FRAME = "#d1651c"
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK = "#1d2733"
FAINT = "#d9dee5"
PAPER = "#ffffff"
CELL_INK, CELL_PAPER = "#111821", "#fefefe"
"""Of the text in the cells of a heat map, whose colours are the same on a dark page."""
WIDTH = 5.1
"""Inches.

Text of 10 points is then 10 pixels high on a phone, and 16 where two figures are side by side.
"""
LONGEST_LABEL = 24
"""Characters for which there is room beside an axis, and twice in the width of a legend."""
MAX_NAMED = 8
"""Lines of a plot that have a colour of their own and an entry in the legend."""
_SVG_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
_STYLE: Any = {
    "font.size": 10.5,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "svg.fonttype": "none",  # text stays text: it can be found and copied, and the file stays small
    "svg.hashsalt": "trireme",  # the same data give the same file
    "figure.constrained_layout.use": True,
}

Points = Sequence[tuple[float, float]]


def colour_variables() -> dict[str, tuple[str, str]]:
    """The colours that a page changes where it is dark.

    Returns:
        The name of the page's variable → (the colour in figures, the colour on a dark page).
    """
    variables = {
        "ink": (INK, "#dfe6ee"),
        "grid": (FAINT, "#2c3641"),
        "grey": (GREY, "#7f8c9b"),
        "pale": (LIGHT_GREY, "#4c5866"),
        "paper": (PAPER, "#12171d"),
    }
    for number, colours in enumerate(zip(COLOURS, DARK_COLOURS, strict=True)):
        variables[f"series-{number}"] = colours
    return variables


def new(height: float = 3.4) -> tuple[Figure, Axes]:
    """An empty figure and its axes.

    Args:
        height: In inches.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Not a context: the style is read again when legends and the file are drawn.
    pyplot.rcParams.update(_STYLE)
    figure, axes = pyplot.subplots(figsize=(WIDTH, height))
    return figure, axes


def to_svg(figure: Figure) -> str:
    """The figure as an <svg> element that takes the width of its surroundings; closes it."""
    from matplotlib import pyplot

    output = io.StringIO()
    figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    document = output.getvalue()
    element = document[document.index("<svg") :]
    element = re.sub(
        r'<svg [^>]*?viewBox="([^"]+)"[^>]*>',
        rf'<svg {_SVG_NAMESPACES} class="plot" viewBox="\1" role="img">',
        element,
        count=1,
    )
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.S)
    for name, (light, _) in colour_variables().items():
        element = re.sub(rf"{light}\b", f"var(--{name}, {light})", element)
    return element


def colour(index: int) -> str:
    """The colour of a series."""
    return COLOURS[index % len(COLOURS)]


def line_plot(
    series: Mapping[str, Points],
    *,
    x: str,
    y: str,
    log_y: bool = False,
    numbers: Mapping[str, int] | None = None,
) -> Figure:
    """One line per series; several have a legend with the first eight.

    Args:
        series: Points by the series' name; those that are not finite are left out.
        x: The label of the x axis.
        y: The label of the y axis.
        log_y: Whether the y axis is logarithmic; values must be positive.
        numbers: The number of each series among all that a page has, which has the same colour in
            every plot; None: they are numbered as they come.
    """
    figure, axes = new()
    values = []
    positions: list[float] = []
    for place, (name, points) in enumerate(series.items()):
        i = place if numbers is None else numbers[name]
        positions += [position for position, _ in points]
        finite = [(position, value) for position, value in points if math.isfinite(value)]
        values += [value for _, value in finite]
        axes.plot(
            [position for position, _ in finite],
            [value for _, value in finite],
            color=colour(i) if i < MAX_NAMED else LIGHT_GREY,
            linewidth=1.6 if len(series) < 12 else 1.0,
            # A line through fewer than three points is hardly seen.
            marker=MARKS[i % len(MARKS)] if len(finite) < 3 else None,
            markersize=4,
            label=name if i < MAX_NAMED else None,
        )
    # Over a smaller range a logarithmic axis would have one tick, or none.
    if log_y and values and max(values) > 3 * min(values):
        axes.set_yscale("log")
        set_ticks(axes, "y", log_ticks(values))
    if all(float(position).is_integer() for position in positions):
        set_whole_ticks(axes)
    axes.set_xlabel(x)
    axes.set_ylabel(y if len(y) <= LONGEST_LABEL else y.rsplit("/", 1)[-1])
    if len(series) > 1:
        legend_above(axes)
    return figure


def legend_above(axes: Axes) -> None:
    """Puts the legend above the plot, so that it does not cover it."""
    names = axes.get_legend_handles_labels()[1]
    are_long = max(map(len, names), default=0) > LONGEST_LABEL
    columns = 1 if are_long else 2
    axes.legend(ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def set_whole_ticks(axes: Axes) -> None:
    """Sets ticks of the x axis at whole numbers, as there is no step 22.5."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def set_ticks(axes: Axes, axis_name: Literal["x", "y"], values: Sequence[float]) -> None:
    """Sets the ticks of a logarithmic axis, written as 0.4 rather than 4 × 10⁻¹."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis = axes.xaxis if axis_name == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FixedFormatter([f"{value:g}" for value in values]))
    axis.set_minor_locator(NullLocator())


def log_ticks(values: Sequence[float]) -> list[float]:
    """Ticks for a logarithmic axis: 1, 2 and 5 of every decade; of many decades powers of ten.

    Args:
        values: The positive values that the axis shows.
    """
    low = min(values) / 2
    high = max(values) * 2
    digits = (1, 2, 5) if high < 1e4 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]


Cell = tuple[float, float]
"""The batch size and the learning rate of a heat map's cell."""


def heat_map(
    batches: Sequence[float],
    rates: Sequence[float],
    values: Mapping[Cell, float],
    *,
    lower_is_better: bool,
    unfinished: Collection[Cell],
) -> Figure:
    """A cell per batch size and learning rate, with its value in it; the best one is framed.

    Args:
        batches: The batch sizes, one a column.
        rates: The learning rates, one a row from the bottom.
        values: The value of each cell that was tried: infinite if training diverged, nan if it
            failed. At least one is finite.
        lower_is_better: Whether lower values are better.
        unfinished: Cells whose value is followed by "…".
    """
    from matplotlib import pyplot

    best, worst = _colour_range(values.values(), lower_is_better=lower_is_better)
    figure, axes = new(max(2.4, 0.42 * len(rates) + 1.2))
    axes.grid(False)
    table = []
    for rate in rates:
        row = [values.get((batch, rate), math.nan) for batch in batches]
        table.append([value if math.isfinite(value) else math.nan for value in row])
    scheme = pyplot.get_cmap("viridis_r" if lower_is_better else "viridis")
    axes.imshow(
        table,
        cmap=scheme.with_extremes(bad="#f1f3f6"),
        vmin=min(best, worst),
        vmax=max(best, worst),
        aspect="auto",
        origin="lower",
    )
    axes.set_xticks(range(len(batches)), [f"{batch:g}" for batch in batches])
    axes.set_yticks(range(len(rates)), [f"{rate:.3g}" for rate in rates])
    for (batch, rate), value in values.items():
        position = batches.index(batch), rates.index(rate)
        is_dark = False
        if math.isfinite(value) and worst != best:
            is_dark = (value - best) / (worst - best) > 0.45
        axes.annotate(
            _cell_text(value, is_unfinished=(batch, rate) in unfinished),
            position,
            ha="center",
            va="center",
            fontsize=10.5,
            color=CELL_PAPER if is_dark else CELL_INK,
        )
        if value == best:
            corner = position[0] - 0.5, position[1] - 0.5
            frame = pyplot.Rectangle(corner, 1, 1, fill=False, edgecolor=FRAME, linewidth=2.5)
            axes.add_patch(frame)
    axes.set_xlabel("global batch size")
    axes.set_ylabel("learning rate")
    return figure


def _colour_range(values: Collection[float], *, lower_is_better: bool) -> tuple[float, float]:
    """The values at both ends of the colours: the best one, and the worst one that still counts."""
    finite = [value for value in values if math.isfinite(value)]
    finite.sort(reverse=not lower_is_better)
    best = finite[0]
    worst = finite[-1]
    spread = 4 * abs(finite[len(finite) // 2] - best)
    # Cells that nearly diverged would take up the whole range of colours.
    if len(finite) > 4 and spread:
        worst = min(worst, best + spread) if lower_is_better else max(worst, best - spread)
    return best, worst


def _cell_text(value: float, *, is_unfinished: bool) -> str:
    if math.isnan(value):
        return "failed"
    if math.isinf(value):
        return "diverged"
    return f"{value:.3g} …" if is_unfinished else f"{value:.3g}"
