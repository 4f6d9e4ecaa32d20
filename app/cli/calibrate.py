"""`trireme calibrate`."""

from __future__ import annotations

import json
from typing import Any

import click

from app.cli.common import sentences
from app.console import Console


@click.command("calibrate")
@click.option("--workers", type=int, help="Processes of a node that measure links together. Default: its GPUs, else 4.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
def command(workers: int | None, as_json: bool, traceback: bool) -> None:
    """Measure what devices and links reach, and remember it for plans; it takes half a minute.

    In a Ray cluster (the one that `trireme train` would use) on one of its nodes, and between two; else on this
    machine. A GPU that is not in cluster/hardware.yaml is put into ~/.config/trireme/hardware.yaml. Kept in
    ~/.cache/trireme/planner, or beside the cluster's file where TRIREME_CLUSTER names one.
    """
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.errors import UserError
        from app.planner.calibrate import keep

        if workers is not None and workers < 1:
            raise UserError(f"--workers is {workers}: write at least 1")
        console.status("measuring")
        found = _measure(workers)
        name, path = keep(found)
        lines = [f"  {key}: {_figure(value)}" for key, value in found.items() if key != "gpu"]
        text = "\n".join([name, *lines, f"remembered in {path}"])
        console.result(json.dumps({**found, "gpu": name, "file": str(path)}) if as_json else text)


def _measure(workers: int | None) -> dict[str, Any]:
    import torch

    from app.planner.calibrate import calibrate, calibrate_cluster
    from app.planner.machine import connected_shape, is_alone

    if connected_shape() is not None and not is_alone():
        return calibrate_cluster(workers)
    count = torch.cuda.device_count()
    return calibrate(min(workers or count, count) if count else workers or 4)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
