"""`ratios`: all ratios that `step`, `peers`, `ray_train`, `tracking` and `saving` have kept, as one picture.

Each a dot with its 95 % interval around 1.00; a tick where a most is asked. The data are results/*.json.
"""

from __future__ import annotations

from pathlib import Path

import click

from experiments.benchmarks.record import FOLDER, Ratio, kept

PICTURE = Path(__file__).parents[1] / "pictures" / "ratios.png"
ABOUT = {
    "step": "step: Trireme ÷ by hand",
    "peers": "peers: library ÷ by hand",
    "ray_train": "in Ray Train's workers ÷ by hand",
    "tracking": "tracking: logging ÷ not",
    "saving": "saving: saving ÷ not",
}


def draw(found: dict[str, dict[str, Ratio]], path: Path) -> None:
    """One row per ratio, grouped by benchmark."""
    from matplotlib import pyplot

    from experiments.report.figures import FAINT, INK, colour, new

    rows = [(name, label, ratio) for name in found for label, ratio in found[name].items()]
    figure, axes = new(7.2, 0.9 + 0.26 * (len(rows) + len(found)))
    place, places, words = 0.0, [], []
    for number, (name, ratios) in enumerate(found.items()):
        place += 1.0
        axes.text(0.01, place + 0.3, ABOUT.get(name, name), transform=axes.get_yaxis_transform(), color=INK, size=9)
        for label, r in ratios.items():
            place += 1.0
            bar = [[r.ratio - min(r.low, r.ratio)], [max(r.high, r.ratio) - r.ratio]]
            axes.errorbar([r.ratio], [place], xerr=bar, fmt="o", color=colour(number), capsize=2.5, markersize=4.5)
            if r.at_most is not None:
                axes.plot([r.at_most], [place], marker="|", color=INK, markersize=11)
            places.append(place)
            words.append(label)
    axes.axvline(1.0, color=INK, linewidth=0.9)
    axes.set_yticks(places, words, size=8.5)
    axes.set_ylim(place + 0.7, 0.4)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=FAINT)
    axes.set_xlabel("time per step over the other's, median, 95 % interval; | at most this is asked")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


@click.command()
@click.option("--results", default=str(FOLDER), show_default=True, help="Folder of what was measured.")
@click.option("--picture", default=str(PICTURE), show_default=True, help="File to draw; .png or .svg.")
def main(results: str, picture: str) -> None:
    """All ratios as one picture."""
    found = kept(Path(results))
    if not found:
        raise click.ClickException(
            f"nothing is kept in {results}: run step, peers, ray_train, tracking or saving first"
        )
    draw({name: found[name] for name in [*ABOUT, *found] if name in found}, Path(picture))
    click.echo(picture)


if __name__ == "__main__":
    main()
