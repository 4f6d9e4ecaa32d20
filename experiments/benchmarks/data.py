"""`data`: samples/s of each loader, as training asks for them, and what a large token file keeps resident.

Each case is a process of its own, which reads batches as rank 0 of 2 does, with nothing else to do. The token file has
4 GB (10^9 bytes) by default and is sparse: the pages are real, the disk is not asked. What grows after
the first batch is given for the process's own memory and for pages of the file, which the kernel takes back at need.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.machine import table

CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "MNIST images": ("image_classification", {"data": "mnist"}, 64),
    "Python text as bytes": ("language_modelling", {"data": "python", "sequence_length": 128}, 32),
    "token file": ("language_modelling", {"sequence_length": 1024, "vocab_size": 50257}, 16),
    "token file, 2 data workers": ("language_modelling", {"sequence_length": 1024, "vocab_size": 50257}, 16),
}
"""Task, its arguments, and samples per batch of this rank."""


def run(gigabytes: float, seconds: float, rounds: int) -> dict[str, Any]:
    """Medians over rounds of whole processes, the cases in turn."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.bin"
        with tokens.open("wb") as file:
            file.truncate(int(gigabytes * 1e9))
        for number in range(rounds):
            for name in list(CASES) if number % 2 else list(reversed(CASES)):
                command = [sys.executable, "-m", "experiments.benchmarks.data", "one", name, str(tokens), str(seconds)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found[name].append(json.loads(done.stdout))
    return {name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()}


def one(name: str, tokens: str, seconds: float) -> dict[str, float]:
    """A case in this process: what `run` has of it."""
    import torch

    from app.data.loader import rows, train_batches
    from app.tasks import load_task

    task_name, arguments, size = CASES[name]
    if name.startswith("token"):
        arguments = {**arguments, "data": tokens}
    task = load_task(task_name, arguments)
    batches = train_batches(
        task.train_data(),
        seed=0,
        global_batch_size=2 * size,
        micro_batch_size=None,
        dp_rank=0,
        dp_size=2,
        samples_seen=0,
        steps=10**9,
        device=torch.device("cpu"),
        data_workers=2 if "workers" in name else 0,
    )
    next(batches)
    before, begun, samples = resident(), time.perf_counter(), 0
    while (taken := time.perf_counter() - begun) < seconds:
        samples += sum(rows(batch) for batch in next(batches))
    after = resident()
    batches.close()
    grown = {f"{kind}_mb": (after[kind] - before[kind]) / 1e6 for kind in after}
    return {"samples_per_second": samples / taken, **grown}


def resident() -> dict[str, int]:
    """Bytes of this process that are in memory: its own, and pages of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        kind: int(lines[key].split()[0]) * 1024 for kind, key in (("anonymous", "RssAnon"), ("of_files", "RssFile"))
    }


@click.command()
@click.option("--gigabytes", default=4.0, show_default=True, help="Size of the token file, 10^9 bytes.")
@click.option("--seconds", default=5.0, show_default=True, help="Of reading, each case and round.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(gigabytes: float, seconds: float, rounds: int, as_json: bool) -> None:
    """Samples per second of each loader, and resident memory on a large token file."""
    found = run(gigabytes, seconds, rounds)
    if as_json:
        click.echo(json.dumps(found))
        return
    heads = ["loader", "samples/s", "own memory grows by, MB", "pages of files, MB"]
    rows = [
        [name, f"{r['samples_per_second']:,.0f}", f"{r['anonymous_mb']:.1f}", f"{r['of_files_mb']:.1f}"]
        for name, r in found.items()
    ]
    click.echo(table(heads, rows, about=f"; token file of {gigabytes:g} GB"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(one(sys.argv[2], sys.argv[3], float(sys.argv[4]))))
    else:
        main()
