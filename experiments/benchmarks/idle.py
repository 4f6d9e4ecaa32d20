"""`idle`: CPU seconds per second that Ray takes while nothing runs, by process.

Ray is started as `trireme train` starts it on one machine, and after it has settled the CPU time of all its processes
is read from the kernel, twice. With --running the Ray that runs on this machine is watched instead.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import click
import psutil

from experiments.benchmarks.machine import table

MARKS = (
    "gcs_server",
    "raylet",
    "ray/dashboard",
    "autoscaler/_private/monitor",
    "log_monitor",
    "runtime_env/agent",
    "ray::",
)


def run(seconds: float, settle: float, running: bool) -> dict[str, Any]:
    """CPU seconds per second of each kind of process of Ray's, the largest first."""
    if not running:
        from cluster.connect import connect

        connect()
    time.sleep(settle)
    before, begun = _cpu(), time.monotonic()
    time.sleep(seconds)
    after, taken = _cpu(), time.monotonic() - begun
    rates = {
        name: sum(row[pid] - before.get(name, {}).get(pid, 0.0) for pid in row) / taken for name, row in after.items()
    }
    if not running:
        import ray

        ray.shutdown()
    return {"total": sum(rates.values()), "by_process": dict(sorted(rates.items(), key=lambda item: -item[1]))}


def _cpu() -> dict[str, dict[int, float]]:
    """CPU seconds so far: name of the program -> process id -> seconds; without this process."""
    found: dict[str, dict[int, float]] = {}
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        mark = next((mark for mark in MARKS if mark in line), None)
        if mark is None or process.pid == os.getpid():
            continue
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        name = line.split()[0] if mark == "ray::" else mark
        found.setdefault(name, {})[process.pid] = times.user + times.system
    return found


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="Watched for this long.")
@click.option("--settle", default=20.0, show_default=True, help="Waited before.")
@click.option("--running", is_flag=True, help="Watch the Ray that runs here already, as after `trireme cluster up`.")
@click.option("--json", "as_json", is_flag=True)
def main(seconds: float, settle: float, running: bool, as_json: bool) -> None:
    """CPU seconds per second of an idle Ray; asked: at most 0.02."""
    found = run(seconds, settle, running)
    if as_json:
        click.echo(json.dumps(found))
        return
    rates = [*found["by_process"].items(), ("all", found["total"])]
    click.echo(table(["process", "CPU seconds per second"], [[name, f"{rate:.4f}"] for name, rate in rates]))


if __name__ == "__main__":
    main()
