"""The results as a summary."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

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
