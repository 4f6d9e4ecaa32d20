"""What a benchmark found, as data: ratios of times with their intervals, in `results/NAME.json`.

A file holds every ratio under its label with the machine, its load (the mean number of processes that wanted to run, in
the last five minutes; the benchmark's own two among them), the versions and the command that it came from; measuring it
again replaces it and leaves the others. `ratios` draws them all.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from experiments.benchmarks.machine import versions

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Ratio:
    """Time per step over that of what it is compared with: median, and its 95 % interval, over so many blocks.

    at_most: what is asked, None where nothing is.
    """

    ratio: float
    low: float
    high: float
    blocks: int
    at_most: float | None = None

    @classmethod
    def of(cls, found: dict[str, Any], blocks: int, at_most: float | None = None) -> Ratio:
        """From what a benchmark's `run` gives: "ratio" and "interval"."""
        low, high = found["interval"]
        return cls(found["ratio"], low, high, blocks, at_most)


def keep(benchmark: str, ratios: dict[str, Ratio], folder: Path = FOLDER) -> Path:
    """Writes them; the command is this process's own."""
    path = folder / f"{benchmark}.json"
    known = json.loads(path.read_text())["ratios"] if path.exists() else {}
    from_here = {"machine": _machine(), "load": round(os.getloadavg()[1], 1), "versions": versions()}
    from_here["command"] = _command(benchmark)
    for label, ratio in ratios.items():
        numbers = {key: round(n, 4) if isinstance(n, float) else n for key, n in asdict(ratio).items()}
        known[label] = numbers | from_here
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"benchmark": benchmark, "ratios": known}, indent=1) + "\n")
    return path


def kept(folder: Path = FOLDER) -> dict[str, dict[str, Ratio]]:
    """Per benchmark, in the order of their names, the ratios by label."""
    names = [each.name for each in fields(Ratio)]
    found = {}
    for path in sorted(folder.glob("*.json")):
        ratios = json.loads(path.read_text())["ratios"]
        found[path.stem] = {label: Ratio(**{name: one[name] for name in names}) for label, one in ratios.items()}
    return found


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def _command(benchmark: str) -> str:
    """As it was typed, but for where results go."""
    words = sys.argv[1:]
    if "--results" in words:
        place = words.index("--results")
        words = words[:place] + words[place + 2 :]
    return shlex.join(["python", "-m", "experiments.benchmarks", benchmark, *words])
