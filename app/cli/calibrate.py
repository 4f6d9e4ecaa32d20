"""`trireme calibrate`."""

from __future__ import annotations

import json
from typing import Any

import click

from app.cli.common import experiment_arguments, read, sentences
from app.console import Console


@click.command("calibrate")
@experiment_arguments
@click.option("--workers", type=int, help="Processes of a node that measure links together. Default: its GPUs, else 4.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
def command(arguments: tuple[str, ...], workers: int | None, as_json: bool, traceback: bool) -> None:
    """Measure what devices and links reach, and remember it for plans; half a minute for each kind of GPU.

    With an experiment, at the matrix products of its model. In a Ray cluster (the one that `trireme train` would use)
    on a node of every kind, and between nodes; else on this machine. A GPU that is not in cluster/hardware.yaml is put
    into ~/.config/trireme/hardware.yaml. Kept in ~/.cache/trireme/planner, or beside the cluster's file where
    TRIREME_CLUSTER names one.
    """
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.errors import UserError
        from app.planner.calibrate import keep, products_of

        if workers is not None and workers < 1:
            raise UserError(f"--workers is {workers}: write at least 1")
        shapes = products_of(read(arguments)) if arguments else []
        console.status("measuring")
        kept = [(found, *keep(found)) for found in _measure(shapes, workers)]
        if as_json:
            parts = [{**found, "gpu": name, "file": str(path)} for found, name, path in kept]
            console.result(json.dumps(parts[0] | ({"others": parts[1:]} if parts[1:] else {})))
        for found, name, path in [] if as_json else kept:
            lines = [f"  {key}: {_figure(value)}" for key, value in found.items() if key != "gpu"]
            console.result("\n".join([name, *lines, f"remembered in {path}"]))


def _measure(shapes: list[list[float]], workers: int | None) -> list[dict[str, Any]]:
    import torch

    from app.planner.calibrate import calibrate
    from app.planner.where import connected_shape, is_alone

    if connected_shape() is not None and not is_alone():
        from app.planner.calibrate_cluster import calibrate_cluster

        return calibrate_cluster(shapes, workers)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [calibrate(min(workers or count, count) if count else workers or 4, shapes)]


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
