"""A training run in this process, and a run's folder as training leaves it, for tests."""

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
from app.training.persistence import NullPersistence, Persistence
from app.training.width_transfer import Widths
from strategies.dims import DEGREES
from strategies.layout import choose
from tests.app.checkpoint.kit import save


def training_of(
    config: Config,
    folder: str | Path,
    rank: int = 0,
    world: int = 1,
    strategy: str = "single",
    *,
    widths: Widths | None = None,
    persistence_class: type[Persistence] = NullPersistence,
    measures_parts: bool = False,
) -> tuple[Training, list[Event]]:
    """A training run that by default saves nothing, and the list that gets its events."""
    channel = SilentChannel()
    events = list[Event]()
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
        widths=widths or {},
        measures_parts=measures_parts,
    )
    place = Place(rank=rank, world_size=world, local_rank=rank, device=torch.device("cpu"))
    return Training(job, place, channel, persistence_class=persistence_class), events


def logged(events: Iterable[Event], metric: str = "") -> list[MetricsLogged]:
    """The events with metrics, or only those with the given metric."""
    metrics_events = [event for event in events if isinstance(event, MetricsLogged)]
    return [event for event in metrics_events if not metric or metric in event.values]


def a_run(
    folder: Path, task: str, task_args: dict[str, Any], steps: tuple[int, ...] = (1,)
) -> list[Any]:
    """Makes a run's folder with a checkpoint per step, and returns the models in them."""
    folder.mkdir()
    config = {
        "task": task,
        "task_args": task_args,
        "train": {"steps": steps[-1]},
        "run": {"name": folder.name},
    }
    (folder / "config.yaml").write_text(to_yaml(from_dict(config)))
    (folder / "run.json").write_text("{}")
    models = []
    for step in steps:
        seed_everything(step)
        model = load_task(task, task_args).build_model().eval()
        state = {"model": model.state_dict()}
        save(folder / "checkpoints", step, state=state, keep_last=len(steps))
        models.append(model)
    return models
