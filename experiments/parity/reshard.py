"""Any checkpoint, any layout, measured: train half of a trial under one layout, the rest under another.

`begin` leaves a checkpoint after the first steps, `resume` reads it under another layout and trains on; the curve must
be that of the run that never changed. Written and read with torch.distributed.checkpoint, as the application does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from experiments.parity import curves
from experiments.parity.curves import Curve, Trial, run_steps
from strategies.parallelize import Layout, Options, Parallel


def begin(trial: Trial, layout: Layout, options: Options, device: torch.device, folder: str, steps: int) -> None:
    """Trains the first `steps` and saves model and optimizer in `folder`; collective over the layout's ranks."""
    parallel, optimizer = _start(trial, layout, options, device)
    run_steps(trial, parallel, optimizer, range(steps))
    dcp.save(_state(parallel, optimizer), checkpoint_id=folder, no_dist=not dist.is_initialized())


def resume(trial: Trial, layout: Layout, options: Options, device: torch.device, folder: str, steps: int) -> Curve:
    """Reads what `begin` saved after `steps` and trains to the end of the trial; weights are whole, on rank 0."""
    parallel, optimizer = _start(trial, layout, options, device)
    state = _state(parallel, optimizer)
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    parallel.load_model_state(state["model"])
    parallel.load_optimizer_state(optimizer, state["optimizer"])
    losses, norms = run_steps(trial, parallel, optimizer, range(steps, trial.steps))
    return Curve(losses, norms, parallel.full_model_state(), parallel.notes)


def _start(
    trial: Trial, layout: Layout, options: Options, device: torch.device
) -> tuple[Parallel, torch.optim.Optimizer]:
    parallel = curves.begin(trial, layout, options, device)
    return parallel, parallel.adopt(trial.optimizer(parallel.parameters()))


def _state(parallel: Parallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}
