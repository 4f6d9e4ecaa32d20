"""What workers in Ray need, imported by a fork server (cluster/fast_start) before they are asked for."""

import importlib

import torch

for _name in (
    "app.cli.runs",
    "app.launchers.actors",
    "app.launchers.ray_launch",
    "app.launchers.ray_train",
    "app.training.loop",
    "app.run.lifecycle",
    "app.tracking.environment",
    "app.run.train",
    "ray.train.torch",
):
    importlib.import_module(_name)
torch.optim.AdamW([torch.zeros(1)])  # the first optimizer of a process imports torch.compile: half a second
