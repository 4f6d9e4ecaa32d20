"""`timeline`: which process uses the processors when, from a command to its prompt.

It runs the trainings of `peers`, one after the other, and reads from /proc ten times a second how
much of the processors each of their processes has used. The table says it by phase, and the
picture over time.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from experiments.benchmarks.harness import show
from experiments.benchmarks.peers.program import (
    Measurement,
    Peer,
    measure,
    mlflow_database,
    peers_named,
)
from experiments.benchmarks.peers.workload import FOLDER, WORKLOADS, workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Color = tuple[float, float, float]
"""Red, green and blue, from 0 to 1."""
SAMPLE_SECONDS = 0.1
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PHASES = ("before the first step", "training", "after the last step")
ROLES = (
    ("/gcs_server ", "Ray's server (gcs_server)"),
    ("/raylet ", "Ray's raylet"),
    ("dashboard/dashboard.py", "Ray's dashboard"),
    ("dashboard/agent.py", "Ray's agents of this node"),
    ("runtime_env/agent", "Ray's agents of this node"),
    ("log_monitor.py", "Ray's reader of logs"),
    ("/monitor.py", "Ray's autoscaler"),
    ("ray::Worker", "workers"),
    ("ray::RayTrainWorker", "workers"),
    ("ray::_RayTrainWorker", "workers"),
    ("ray::EventQueue", "queue of events"),
    ("ray::DashboardAgent", "Ray's agents of this node"),
    ("ray::RuntimeEnvAgent", "Ray's agents of this node"),
    ("ray::IDLE", "Ray's idle workers"),
    ("default_worker.py", "Ray's idle workers"),
    ("ray::", "Ray Train's own actors"),
    ("setup_worker.py", "Ray's idle workers"),
    ("torch.distributed.run", "torchrun"),
    ("app.tracking.writer", "writer to MLflow"),
    ("-m app train", "driver"),
    ("with_ray_train", "driver"),
    ("with_ray_actors", "driver"),
    ("peers.", "workers"),
)
"""What a command line has, and the role of such a process; the first that fits."""
OTHER_ROLE = "other"
ALL_ROLES = (*dict.fromkeys(role for _, role in ROLES), OTHER_ROLE)
"""In an order that does not depend on what ran, so that a role has one color in all pictures."""


@dataclass
class Usage:
    """What one process has used.

    Attributes:
        title: Its latest command line; Ray's workers change theirs.
        samples: When it was looked at, in seconds since 1970, and the seconds of processor that it
            had used by then.
    """

    title: str = ""
    samples: list[tuple[float, float]] = field(default_factory=list)

    @property
    def role(self) -> str:
        """What the process is for, for a person."""
        for part, role in ROLES:
            if part in self.title:
                return role
        return OTHER_ROLE

    def used_until(self, moment: float) -> float:
        """The seconds of processor used up to a moment."""
        used = 0.0
        for sampled, total in self.samples:
            if sampled > moment:
                break
            used = total
        return used


class Sampler:
    """Samples all processes that have an environment variable with a certain value.

    Children inherit the variable, also those that Ray detaches from its driver. What a process uses
    after its last sample, at most a tenth of a second, is not seen.

    Args:
        variable: The variable's name.
        value: Its value.
    """

    def __init__(self, variable: str, value: str) -> None:
        self.usages: dict[int, Usage] = {}
        self._entry = f"{variable}={value}".encode()
        self._earlier = {name for name in os.listdir("/proc") if name.isdigit()}
        """The processes that ran before, whose environment need not be read each time."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_ended, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample_until_ended(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            for name in os.listdir("/proc"):
                if name.isdigit() and name not in self._earlier:
                    # A process may end while it is read.
                    with contextlib.suppress(OSError):
                        self._sample(int(name))

    def _sample(self, pid: int) -> None:
        folder = Path("/proc", str(pid))
        if pid not in self.usages:
            entries = (folder / "environ").read_bytes().split(b"\0")
            if self._entry not in entries:
                # It is another command's, or has been forked and has not started its program yet.
                return
            self.usages[pid] = Usage()
        # The name, in parentheses, may contain spaces; the fields after it do not (man 5 proc).
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        used = (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
        usage = self.usages[pid]
        usage.samples.append((time.time(), used))
        title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        usage.title = title.strip() or usage.title


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One command from its beginning to its end.

    Attributes:
        peer: Its name.
        began: When it began, in seconds since 1970.
        measurement: How long its phases took.
        usages: What its processes used.
    """

    peer: str
    began: float
    measurement: Measurement
    usages: Sequence[Usage]

    def by_role(self) -> dict[str, tuple[float, float, float]]:
        """The seconds of processor of each role, by phase; what used most comes first."""
        first = self.began + self.measurement.start
        last = self.began + self.measurement.whole - self.measurement.end
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for usage in self.usages:
            until_first = usage.used_until(first)
            until_last = usage.used_until(last)
            until_end = usage.samples[-1][1]
            phases = (until_first, until_last - until_first, until_end - until_last)
            for phase, used in enumerate(phases):
                totals[usage.role][phase] += used
        in_order = sorted(totals.items(), key=lambda item: -sum(item[1]))
        return {role: (used[0], used[1], used[2]) for role, used in in_order}

    def load_of(self, role: str, seconds: Sequence[float]) -> list[float]:
        """How many processors a role uses in each second up to the moments of a list.

        Args:
            role: One of `by_role`.
            seconds: Moments, counted from the beginning, in order.
        """
        usages = [usage for usage in self.usages if usage.role == role]
        loads = []
        previous = 0.0
        for earlier, later in zip([0.0, *seconds[:-1]], seconds, strict=True):
            used = sum(usage.used_until(self.began + later) for usage in usages)
            loads.append((used - previous) / (later - earlier))
            previous = used
        return loads


def record(peer: Peer, *, model: str, strategy: str, uri: str) -> Timeline:
    """Runs a peer's training once and samples its processes.

    Args:
        peer: Which one.
        model: A workload's name.
        strategy: ddp or fsdp.
        uri: MLflow's.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with Sampler(FOLDER, str(folder / "steps")) as sampler:
            began = time.time()
            measurement = measure(
                peer.command(model=model, strategy=strategy, folder=folder),
                steps=workload(model).steps,
                folder=folder,
                uri=uri,
            )
    usages = [usage for usage in sampler.usages.values() if usage.samples]
    return Timeline(peer=peer.name, began=began, measurement=measurement, usages=usages)


def rows_of(timelines: Mapping[str, Sequence[Timeline]]) -> list[dict[str, str]]:
    """The table: a row for each command and role, medians over the turns."""
    rows = []
    for peer, turns in timelines.items():
        phases = [
            (turn.measurement.start, _training_seconds(turn.measurement), turn.measurement.end)
            for turn in turns
        ]
        rows.append(_row(f"**{peer}**, seconds", phases))
        roles = {role: None for turn in turns for role in turn.by_role()}
        for role in roles:
            used = [turn.by_role().get(role, (0.0, 0.0, 0.0)) for turn in turns]
            rows.append(_row(f"{peer}: {role}, processor", used))
    return rows


def _training_seconds(measurement: Measurement) -> float:
    return measurement.whole - measurement.start - measurement.end


def _row(name: str, phases_of_turns: Sequence[Sequence[float]]) -> dict[str, str]:
    row = {"": name}
    medians = [statistics.median(values) for values in zip(*phases_of_turns, strict=True)]
    for phase, value in zip(PHASES, medians, strict=True):
        row[phase] = f"{value:.1f}"
    row["whole"] = f"{sum(medians):.1f}"
    return row


def draw(timelines: Sequence[Timeline], file: Path) -> None:
    """Draws how many processors each role uses over time, a panel for each command.

    Args:
        timelines: One of each command.
        file: The picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(timelines),
        1,
        sharex=True,
        squeeze=False,
        figsize=(9.0, 2.6 * len(timelines) + 0.6),
        layout="constrained",
    )
    colors: Sequence[Color] = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    color_of_role = dict(zip(ALL_ROLES, colors, strict=False))
    for timeline, panel in zip(timelines, panels[:, 0], strict=True):
        _draw_panel(timeline, panel, color_of_role)
    panels[-1, 0].set_xlabel("seconds since the command")
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def _draw_panel(timeline: Timeline, panel: Axes, color_of_role: Mapping[str, Color]) -> None:
    """Draws one command: areas on one another, and where training begins and ends."""
    measurement = timeline.measurement
    count = max(1, round(measurement.whole / 0.5))
    seconds = [measurement.whole * (number + 1) / count for number in range(count)]
    roles = list(timeline.by_role())
    panel.stackplot(
        seconds,
        [timeline.load_of(role, seconds) for role in roles],
        labels=roles,
        colors=[color_of_role[role] for role in roles],
        step="pre",
    )
    for moment in (measurement.start, measurement.whole - measurement.end):
        panel.axvline(moment, color="black", linewidth=1, linestyle="--")
    panel.set_title(
        f"{timeline.peer}: {measurement.whole:.1f} s, first step after {measurement.start:.1f} s, "
        f"{measurement.end:.1f} s after the last",
        loc="left",
        fontsize=10,
    )
    panel.set_ylabel("processors")
    panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


@click.command()
@click.option("--model", type=click.Choice(list(WORKLOADS)), default="gpt", show_default=True)
@click.option("--strategy", type=click.Choice(["ddp", "fsdp"]), default="ddp", show_default=True)
@click.option("--turns", default=3, show_default=True, help="Trainings of each peer.")
@click.option(
    "--only",
    default="by hand, Trireme",
    show_default=True,
    help="Names of peers, with commas between.",
)
@click.option("--picture", type=click.Path(path_type=Path), help="A PNG file of the last turn.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    model: str,
    strategy: str,
    turns: int,
    only: str,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Measures which process uses the processors when, from a command to its prompt."""
    peers = peers_named(only)
    timelines: dict[str, list[Timeline]] = {peer.name: [] for peer in peers}
    with mlflow_database() as uri:
        for turn in range(turns):
            for peer in peers if turn % 2 == 0 else reversed(peers):
                timeline = record(peer, model=model, strategy=strategy, uri=uri)
                timelines[peer.name].append(timeline)
    if picture is not None:
        draw([turns_of_peer[-1] for turns_of_peer in timelines.values()], picture)
    results = {
        name: [timeline.by_role() for timeline in turns_of_peer]
        for name, turns_of_peer in timelines.items()
    }
    show("timeline", results, rows_of(timelines), as_json=as_json)
