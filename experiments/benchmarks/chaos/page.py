"""The results as a summary and as one HTML file."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from experiments.report.page import escape
from experiments.report.page import page as document

Rows = list[dict[str, Any]]


def summary(rows: Rows, seed: int) -> dict[str, Any]:
    """The figures that count: numbers of kills and runs, what went wrong, seconds to the next finished step."""
    times = [row["recovered_seconds"] for row in rows if row["recovered_seconds"] is not None]
    problems = {row["run"]: row["problems"] for row in rows if row["problems"]}
    pairs = Counter((row["layout"], row["victim"]) for row in rows)
    return {
        "kills": len(rows),
        "runs": len({row["run"] for row in rows}),
        "seed": seed,
        "of": {layout: {v: n for (own, v), n in sorted(pairs.items()) if own == layout} for layout, _ in sorted(pairs)},
        "wrong": problems,
        "again": sorted({row.get("again", "") for row in rows if row["problems"]}),
        "lost_or_repeated": _said(problems, "samples lost", "samples too many", "samples other", "position"),
        "other_weights": _said(problems, "weights"),
        "other_curve": _said(problems, "curve", "MLflow"),
        "damaged_checkpoints_met": _said(problems, "damaged"),
        "hangs": _said(problems, "within"),
        "forgotten_commits": sum("forgot" in row for row in rows),
        "median_seconds": round(statistics.median(times), 2) if times else None,
        "worst_seconds": max(times, default=None),
        "seconds_per_kill": round(statistics.mean(row["seconds"] for row in rows), 1) if rows else None,
        "file_operations": len({(r["layout"], r["rank"], r["boundary"]) for r in rows if r["victim"] == "boundary"}),
    }


def _said(problems: dict[str, list[str]], *words: str) -> int:
    """Runs with a problem that has one of these words in it."""
    return sum(any(word in text for text in texts for word in words) for texts in problems.values())


def render(rows: Rows, totals: dict[str, Any]) -> str:
    """The page."""
    facts = [
        ("kills", f"{totals['kills']:,}", f"in {totals['runs']} runs, seed {totals['seed']}"),
        ("runs with final weights other than undisturbed", totals["other_weights"], "compared bit by bit"),
        ("runs with samples lost or repeated", totals["lost_or_repeated"], "by the positions that each step saw"),
        ("damaged checkpoints met", totals["damaged_checkpoints_met"], ""),
        ("hangs over 60 s", totals["hangs"], f"median {totals['median_seconds']} s, worst {totals['worst_seconds']} s"),
        ("runs with another curve", totals["other_curve"], "one MLflow run, each step once"),
    ]
    body = ['<dl class="facts">']
    body += [f"<div><dt>{escape(a)}</dt><dd>{escape(b)}<small>{escape(c)}</small></dd></div>" for a, b, c in facts]
    body.append("</dl>")
    if totals["wrong"]:
        body.append("<h2>What went wrong</h2><ul class='plain'>")
        body += [f"<li>{escape(run)}: {escape('; '.join(p))}</li>" for run, p in totals["wrong"].items()]
        body += [f"<li><code>{escape(command)}</code></li>" for command in totals["again"]]
        body.append("</ul>")
    body += ["<h2>By victim</h2>", _table(rows, lambda row: f"{row['victim']}, {row['words'].split()[0]}")]
    body += ["<h2>By layout</h2>", _table(rows, lambda row: row["layout"])]
    body += ["<h2>By layout and victim</h2>", _table(rows, lambda row: f"{row['layout']}: {row['victim']}")]
    body += ["<h2>Seconds from the kill to the next finished step</h2>", _dots(rows)]
    operations = [row for row in rows if row["victim"] == "boundary"]
    body += ["<h2>File operations of a save</h2>", _table(operations, lambda r: f"rank {r['rank']}: {r['what']}")]
    body += ["<details><summary>Every kill</summary>", _every(rows), "</details>"]
    about = "each run: killed, the same command again where it had ended, then held against the run nobody disturbed"
    return document(f"{totals['kills']:,} kills", about, body)


def _table(rows: Rows, key: Callable[[dict[str, Any]], str]) -> str:
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    lines = ["<div class='scroll'><table><tr><th></th><th class='n'>kills</th><th class='n'>went wrong</th>"]
    lines.append("<th class='n'>median s</th><th class='n'>worst s</th></tr>")
    for name, own in sorted(groups.items()):
        times = [row["recovered_seconds"] for row in own if row["recovered_seconds"] is not None]
        middle = f"{statistics.median(times):.2f}" if times else "ended"
        worst = f"{max(times):.2f}" if times else "—"
        wrong = sum(bool(row["problems"]) for row in own)
        cells = "".join(f"<td class='n'>{cell}</td>" for cell in (len(own), wrong, middle, worst))
        lines.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    return "\n".join([*lines, "</table></div>"])


def _dots(rows: Rows) -> str:
    """One dot per kill: across, which; up, seconds; red where the run went wrong."""
    times = [(i, row) for i, row in enumerate(rows) if row["recovered_seconds"] is not None]
    most = max((row["recovered_seconds"] for _, row in times), default=1.0) or 1.0
    width, height = 900, 220
    parts = [f'<figure><svg class="plot" viewBox="0 0 {width} {height + 20}" role="img">']
    for share in (0.0, 0.5, 1.0):
        y = height - share * (height - 20)
        parts.append(f'<line x1="40" x2="{width}" y1="{y:.0f}" y2="{y:.0f}" stroke="#d9dee5"/>')
        parts.append(f'<text x="0" y="{y + 4:.0f}" font-size="12" fill="#55606e">{share * most:.1f} s</text>')
    for i, row in times:
        x = 45 + (width - 50) * i / max(1, len(rows) - 1)
        y = height - row["recovered_seconds"] / most * (height - 20)
        colour = "#b3261e" if row["problems"] else _COLOURS.get(row["victim"], "#2563a8")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{escape(row["words"])}</title></circle>'
        )
    legend = ", ".join(f'<span style="color:{colour}">●</span> {name}' for name, colour in _COLOURS.items())
    return "".join([*parts, "</svg><figcaption>", legend, "</figcaption></figure>"])


_COLOURS = {"worker": "#2563a8", "boundary": "#5b8c2a", "driver": "#a85f1b", "raylet": "#7a3fa0"}
_COLOURS |= {"server": "#0f7f86", "writer": "#9a8500"}


def _every(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["<div class='scroll'><table><tr><th>run</th><th>layout</th><th>what</th><th class='n'>committed</th>"]
    lines.append("<th class='n'>went on after</th><th class='n'>s</th></tr>")
    for row in rows:
        cells = [row["run"], row["layout"], row["words"]]
        numbers = [row["committed"], row["resumed_from"], row["recovered_seconds"]]
        shown = ["—" if value is None else value for value in numbers]
        lines.append(
            "<tr>"
            + "".join(f"<td>{escape(c)}</td>" for c in cells)
            + "".join(f"<td class='n'>{escape(n)}</td>" for n in shown)
            + "</tr>"
        )
    return "\n".join([*lines, "</table></div>"])
