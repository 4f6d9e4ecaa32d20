"""`trireme calibrate`."""

from __future__ import annotations

import json

import click

from app.cli.common import sentences
from app.console import Console


@click.command("calibrate")
@click.option("--workers", type=int, help="Processes that measure links together. Default: the GPUs, else 2 or 4.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
def command(workers: int | None, as_json: bool, traceback: bool) -> None:
    """Measure what this machine's devices and links reach, and remember it for plans; half a minute.

    Kept in ~/.cache/trireme/planner, or beside the cluster's file where TRIREME_CLUSTER names one.
    """
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        import torch

        from app.errors import UserError
        from app.planner.calibrate import calibrate
        from app.planner.calibration import remember

        if workers is not None and workers < 1:
            raise UserError(f"--workers is {workers}: write at least 1")
        console.status("measuring")
        found = calibrate(workers or torch.cuda.device_count() or 4)
        name = found.pop("gpu")
        path = remember(name, found)
        if as_json:
            console.result(json.dumps({"gpu": name, "file": str(path), **found}))
        else:
            lines = [
                f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}" for key, value in found.items()
            ]
            console.result(f"{name}\n  " + "\n  ".join(lines) + f"\nremembered in {path}")
