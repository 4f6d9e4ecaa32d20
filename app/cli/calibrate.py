"""`trireme calibrate`."""

from __future__ import annotations

from typing import Any

import click

from app.cli.common import Invocation, verb


@verb("calibrate")
@click.option("--workers", type=int, help="Processes of a node that measure links together. Default: its GPUs, else 4.")
def command(cli: Invocation, workers: int | None) -> None:
    """Measure what devices and links reach, and remember it for plans; it takes half a minute.

    In a Ray cluster (the one that `trireme train` would use) on one of its nodes, and between two; else on this
    machine. A GPU that is not in cluster/hardware.yaml is put into ~/.config/trireme/hardware.yaml. Kept in
    ~/.cache/trireme/planner.
    """
    from app.errors import UserError
    from app.planner.calibrate import keep

    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}: write at least 1")
    cli.console.status("measuring")
    found = _measure(workers)
    name, path = keep(found)
    lines = [f"  {key}: {_figure(value)}" for key, value in found.items() if key != "gpu"]
    cli.answer({**found, "gpu": name, "file": str(path)}, "\n".join([name, *lines, f"remembered in {path}"]))


def _measure(workers: int | None) -> dict[str, Any]:
    import torch

    from app.planner.calibrate import calibrate, calibrate_cluster
    from app.planner.machine import connected_shape

    if connected_shape() is not None:
        return calibrate_cluster(workers)
    count = torch.cuda.device_count()
    return calibrate(min(workers or count, count) if count else workers or 4)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
