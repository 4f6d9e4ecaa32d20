"""torch.profiler over some steps of some ranks: a trace to look at, and a table of where the time went.

`profile: {steps: [20, 25]}` gives the loop a `Profiler`, a context around each step; without it the loop has none, and
pays nothing. What every profiled rank has seen is in profile/steps-20-25 of the run's folder:

    rank-0.trace.json.gz    for https://ui.perfetto.dev
    rank-0.memory.pickle    with profile.memory on a GPU: every allocation, for https://pytorch.org/memory_viz
    profile.json            the tables, which `trireme profile RUN` prints

Computing, communication and idle time are those of the device: of a GPU's kernels, of a CPU's operators. Communication
is exposed where nothing is computed meanwhile; waiting for a peer that is late counts as communication.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from app.checkpoint.ranks import Ranks
from app.errors import UserError
from app.storage.storage import Storage
from app.training.events import ProfileTaken
from app.training.job import Channel, Job, Place

FILE = "profile.json"
LONGEST = 25  # operators in a table
COMMUNICATION = ("nccl", "gloo:")
"""How the names of what communicates begin: kernels between GPUs, and torch's collectives on CPUs."""
NOT_COMPUTING = (*COMMUNICATION, "c10d::", "_c10d_functional::", "autograd::")
"""What only asks for communication, or has operators inside."""
Interval = tuple[float, float]


class Profiler:
    """A context around each step of the loop, until its last step is taken. Every rank has one; those of
    `profile.ranks` profile. It begins a step early, since the first profiled one is slow."""

    def __init__(self, job: Job, place: Place, channel: Channel, *, first: int, last: int) -> None:
        self.job = job
        self.place = place
        self.channel = channel
        self.first = first
        self.last = last
        self.is_profiled = place.rank in job.config.profile.ranks
        self.memory = job.config.profile.memory
        self.on_gpu = place.device.type == "cuda"
        self.folder = f"profile/steps-{first}-{last}"
        self.profile: profile | None = None
        self.figures: dict[str, Any] | None = None
        """Of this rank, once its last step is taken."""

    @classmethod
    def of(cls, job: Job, place: Place, channel: Channel, *, steps_done: int) -> Profiler | None:
        """None where nothing is to be profiled, or those steps are taken already."""
        steps = job.config.profile.steps
        if not steps or steps[0] > job.steps or steps[1] <= steps_done:
            return None
        return cls(job, place, channel, first=max(steps[0], steps_done + 1), last=min(steps[1], job.steps))

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step of the loop."""
        if self.is_profiled and self.profile is None and self.first - 1 <= step <= self.last:
            self._start(warm_up=step < self.first)
        yield
        if self.profile is not None:
            self.profile.step()

    def is_last(self, step: int) -> bool:
        """Whether the step was the last to be profiled: `finish` is due."""
        return step == self.last

    def close(self) -> None:
        """Ends a profile that the run's end has cut off."""
        if self.profile is not None:
            self.profile.stop()
            self.profile = None

    def _start(self, warm_up: bool) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        when = schedule(wait=0, warmup=int(warm_up), active=self.last - self.first + 1, repeat=1)
        self.profile = profile(
            activities=activities, schedule=when, profile_memory=self.memory, on_trace_ready=self._take
        )
        if self.memory and self.on_gpu:
            torch.cuda.memory._record_memory_history()
        self.profile.start()

    def _take(self, ended: profile) -> None:
        """Writes a rank's files, and adds up what is in them."""
        place = self.place
        storage = Storage(self.job.folder)
        files: dict[str, Callable[[str], object]] = {f"rank-{place.rank}.trace.json.gz": partial(_export, ended)}
        if self.memory and self.on_gpu:
            files[f"rank-{place.rank}.memory.pickle"] = torch.cuda.memory._dump_snapshot
        with tempfile.TemporaryDirectory() as scratch:
            for name, write in files.items():
                write(str(Path(scratch, name)))
                storage.write_bytes(f"{self.folder}/{name}", Path(scratch, name).read_bytes())
        if self.memory and self.on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
        steps = self.last - self.first + 1
        self.figures = {
            "rank": place.rank,
            "device": str(place.device),
            **shares(ended.events(), steps, self.on_gpu),
            "operators": operators(ended.key_averages(), steps, self.on_gpu),
        }

    def finish(self) -> None:
        """Brings the ranks' tables together, and tells the driver. Collective."""
        self.close()
        ranks = [figures for figures in Ranks().all(self.figures) if figures is not None]
        if self.place.rank == 0 and ranks:
            tables = {"steps": [self.first, self.last], "ranks": ranks}
            Storage(self.job.folder).write_bytes(f"{self.folder}/{FILE}", json.dumps(tables, indent=1).encode())
            self.channel.emit(ProfileTaken(step=self.last, folder=self.folder, profile=tables))


def _export(ended: profile, path: str) -> None:
    """torch itself would pack it line by line and as small as can be, which took half of a profile's time."""
    plain = path.removesuffix(".gz")
    ended.export_chrome_trace(plain)
    with open(plain, "rb") as trace, gzip.open(path, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(trace, packed, 1 << 20)


# --- what is in a profile ---------------------------------------------------------------------------------------------


def shares(events: Iterable[Any], steps: int, on_gpu: bool) -> dict[str, float]:
    """Seconds a step, in all and of each kind, of a profile's events."""
    computing: list[Interval] = []
    communicating: list[Interval] = []
    own: dict[int, list[Interval]] = {}  # communication that a thread does itself, with operators in it
    bounds: list[float] = []
    found = list(events)
    for event in found:
        span = (event.time_range.start, event.time_range.end)
        here = event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU)
        if event.name.startswith("ProfilerStep") and event.device_type == DeviceType.CPU:
            bounds += span
        elif here and _communicates(event, on_gpu):
            communicating.append(span)
            if not event.is_async:
                own.setdefault(event.thread, []).append(span)
    for event in found:
        if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU) and _computes(event, on_gpu):
            span = (event.time_range.start, event.time_range.end)
            if on_gpu:
                bounds.append(span[1])
            if on_gpu or not any(begin <= span[0] and span[1] <= end for begin, end in own.get(event.thread, ())):
                computing.append(span)
    busy, sent = length(computing), length(communicating)
    both = length([*computing, *communicating])
    whole = max(bounds) - min(bounds) if bounds else both
    values = {"step": whole, "computing": busy, "communication": sent, "exposed_communication": both - busy}
    values["idle"] = max(0.0, whole - both)
    return {f"{name}_seconds": value / steps / 1e6 for name, value in values.items()}


def _communicates(event: Any, on_gpu: bool) -> bool:
    return event.name.startswith(COMMUNICATION) and not (on_gpu and event.is_user_annotation)


def _computes(event: Any, on_gpu: bool) -> bool:
    if on_gpu:
        return not event.is_user_annotation and not event.name.startswith(COMMUNICATION)
    return "::" in event.name and not event.name.startswith(NOT_COMPUTING)


def length(intervals: list[Interval]) -> float:
    """Of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def operators(averages: Iterable[Any], steps: int, on_gpu: bool) -> list[dict[str, Any]]:
    """The longest operators: name, calls, seconds and bytes allocated a step, without what they call."""
    kind = "device" if on_gpu else "cpu"
    rows = [
        {
            "name": row.key,
            "calls": row.count / steps,
            "seconds": getattr(row, f"self_{kind}_time_total") / steps / 1e6,
            "bytes": getattr(row, f"self_{kind}_memory_usage") / steps,
        }
        for row in averages
        if row.device_type == DeviceType.CPU and not row.is_user_annotation
    ]
    return sorted((row for row in rows if row["seconds"] > 0), key=lambda row: -row["seconds"])[:LONGEST]


# --- for a person -----------------------------------------------------------------------------------------------------


def read_profile(storage: Storage) -> tuple[dict[str, Any], str]:
    """The newest profile of a run, and its folder in the run's. Raises UserError where there is none."""
    folders = sorted(storage.list("profile"), key=lambda name: int(name.split("-")[1]))
    if not folders:
        raise UserError(f"{storage.url} has no profile: train it with profile.steps=[20,25] for instance")
    folder = f"profile/{folders[-1]}"
    return json.loads(storage.read_bytes(f"{folder}/{FILE}")), folder


def table(found: Mapping[str, Any]) -> str:
    """A profile as lines of text."""
    lines: list[str] = []
    for rank in found["ranks"]:
        whole = rank["step_seconds"]
        parts = [
            f"{rank[f'{name}_seconds'] / whole:.0%} {name.replace('_', ' ')}"
            for name in ("computing", "exposed_communication", "idle")
        ]
        lines += [
            f"rank {rank['rank']} ({rank['device']}), steps {found['steps'][0]} to {found['steps'][1]}: "
            f"{whole * 1e3:.1f} ms a step",
            f"{', '.join(parts)}; communication in all {rank['communication_seconds'] / whole:.0%}",
            f"{'ms':>9} {'of step':>8} {'calls':>8} {'MB':>9}  operator",
        ]
        for row in rank["operators"]:
            share, ms, megabytes = row["seconds"] / whole, row["seconds"] * 1e3, row["bytes"] / 1e6
            lines.append(f"{ms:>9.3f} {share:>8.1%} {row['calls']:>8.1f} {megabytes:>9.1f}  {row['name']}")
        lines.append("")
    return "\n".join(lines)
