"""What these tests share: a training in this process, and a run's folder as training leaves it."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from app.config import Config
from app.config.io import from_dict, to_yaml
from app.data.randomness import seed_everything
from app.tasks import load_task
from app.training.events import Event, MetricsLogged
from app.training.job import Job, Place, SilentChannel
from app.training.loop import Training
from app.training.persistence import NullPersistence
from strategies.dims import DEGREES
from strategies.layout import choose
from tests.app.checkpoint.kit import save


def training_of(
    config: Config, folder: str | Path, rank: int = 0, world: int = 1, strategy: str = "single"
) -> tuple[Training, list[Event]]:
    """A training that keeps nothing, and what it will tell its driver."""
    channel, events = SilentChannel(), list[Event]()
    channel.emit = events.append  # type: ignore[method-assign]
    degrees = {name: getattr(config.parallel, name) for name in DEGREES}
    job = Job(
        config=config,
        layout=choose(strategy, world, **degrees),
        folder=str(folder),
        attempt="attempt",
        run_uid="uid",
        steps=config.train.steps,
        cwd=os.getcwd(),
    )
    place = Place(rank=rank, world_size=world, local_rank=rank, device=torch.device("cpu"))
    return Training(job, place, channel, persistence_class=NullPersistence), events


def logged(events: Iterable[Event], metric: str = "") -> list[MetricsLogged]:
    """The events of metrics; with a metric's name, those that hold it."""
    found = [event for event in events if isinstance(event, MetricsLogged)]
    return [event for event in found if not metric or metric in event.values]


def a_run(folder: Path, task: str, task_args: dict[str, Any], steps: tuple[int, ...] = (1,)) -> list[Any]:
    """A run's folder with a checkpoint of each of these steps; the models in them."""
    folder.mkdir()
    config = {"task": task, "task_args": task_args, "train": {"steps": steps[-1]}, "run": {"name": folder.name}}
    (folder / "config.yaml").write_text(to_yaml(from_dict(config)))
    (folder / "run.json").write_text("{}")
    made = []
    for step in steps:
        seed_everything(step)
        made.append(load_task(task, task_args).build_model().eval())
        save(folder / "checkpoints", step, state={"model": made[-1].state_dict()}, keep_last=len(steps))
    return made
