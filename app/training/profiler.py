"""torch.profiler over some steps of some ranks: a trace to look at, and a table of where time went.

`profile: {steps: [20, 25]}` gives the loop a `Profiler`, which is a context around each step;
without it the loop has none, and pays nothing. What the profiled ranks have recorded is in
profile/steps-20-25 of the run's folder:

    rank-0.trace.json.gz    for https://ui.perfetto.dev
    rank-0.memory.pickle    with profile.memory on a GPU: every allocation, for
                            https://pytorch.org/memory_viz
    profile.json            the tables, which `trireme profile RUN` prints

The times of computing, communication and idling are those of the device: of a GPU's kernels, or of
a CPU's operators. Communication is exposed while nothing is computed. Waiting for a peer that is
late counts as communication.
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
from typing import Any, Protocol

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
"""Prefixes of the names of communication: kernels between GPUs, torch's collectives on CPUs."""
NOT_COMPUTING = (*COMMUNICATION, "c10d::", "_c10d_functional::", "autograd::")
"""Prefixes of the names of operators that only request communication, or contain operators."""
Interval = tuple[float, float]
"""Start and end, in microseconds."""


class TimeRange(Protocol):
    start: float
    end: float


class Event(Protocol):
    """What is read of a torch.autograd.profiler_util.FunctionEvent."""

    name: str
    time_range: TimeRange
    device_type: DeviceType
    thread: int
    is_async: bool
    is_user_annotation: bool


class Profiler:
    """A context around each step of the loop. Every rank has one; those of `profile.ranks` profile.

    Profiling starts one step early, since the first profiled step is slow.

    Args:
        job: What is trained.
        place: This rank's place.
        channel: To the driver.
        first: The first step of the profile.
        last: The last one.
    """

    def __init__(self, job: Job, place: Place, channel: Channel, *, first: int, last: int) -> None:
        self.job = job
        self.place = place
        self.channel = channel
        self.first = first
        self.last = last
        self.folder = f"profile/steps-{first}-{last}"
        self.is_profiled = place.rank in job.config.profile.ranks
        self.on_gpu = place.device.type == "cuda"
        self.records_memory = job.config.profile.memory
        self.profile: profile | None = None
        self.table: dict[str, Any] | None = None
        """This rank's table, once the last step is taken."""

    @classmethod
    def of(cls, job: Job, place: Place, channel: Channel, *, steps_done: int) -> Profiler | None:
        """The profiler of a training; None if no step is profiled, or all have been taken."""
        steps = job.config.profile.steps
        if not steps or steps[0] > job.steps or steps[1] <= steps_done:
            return None
        first = max(steps[0], steps_done + 1)
        last = min(steps[1], job.steps)
        return cls(job, place, channel, first=first, last=last)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A context around one step of the loop."""
        is_near = self.first - 1 <= step <= self.last
        if self.is_profiled and self.profile is None and is_near:
            self._start(warm_up=step < self.first)
        yield
        if self.profile is not None:
            self.profile.step()

    def is_last(self, step: int) -> bool:
        """Whether the step was the last to be profiled, so that `finish` is due."""
        return step == self.last

    def finish(self) -> None:
        """Collect the tables of all ranks, and send them to the driver. A collective call."""
        self.close()
        tables = [table for table in Ranks().all_gather(self.table) if table is not None]
        if self.place.rank == 0 and tables:
            content = {"steps": [self.first, self.last], "ranks": tables}
            text = json.dumps(content, indent=1)
            Storage(self.job.folder).write_bytes(f"{self.folder}/{FILE}", text.encode())
            self.channel.emit(ProfileTaken(step=self.last, folder=self.folder, profile=content))

    def close(self) -> None:
        """End the profile, also one that the end of the run has cut off."""
        if self.profile is not None:
            self.profile.stop()
            self.profile = None

    def _start(self, warm_up: bool) -> None:
        activities = [ProfilerActivity.CPU]
        if self.on_gpu:
            activities.append(ProfilerActivity.CUDA)
        steps = self.last - self.first + 1
        self.profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=int(warm_up), active=steps, repeat=1),
            profile_memory=self.records_memory,
            on_trace_ready=self._save,
        )
        if self.records_memory and self.on_gpu:
            torch.cuda.memory._record_memory_history()
        self.profile.start()

    def _save(self, ended: profile) -> None:
        """Write this rank's files, and compute its table."""
        name = f"rank-{self.place.rank}"
        files: dict[str, Callable[[str], object]] = {
            f"{name}.trace.json.gz": partial(_export_trace, ended)
        }
        if self.records_memory and self.on_gpu:
            files[f"{name}.memory.pickle"] = torch.cuda.memory._dump_snapshot
        storage = Storage(self.job.folder)
        with tempfile.TemporaryDirectory() as scratch:
            for file, write in files.items():
                path = Path(scratch, file)
                write(str(path))
                storage.write_bytes(f"{self.folder}/{file}", path.read_bytes())
        if self.records_memory and self.on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
        steps = self.last - self.first + 1
        self.table = {
            "rank": self.place.rank,
            "device": str(self.place.device),
            **seconds_by_kind(ended.events(), steps, self.on_gpu),
            "operators": longest_operators(ended.key_averages(), steps, self.on_gpu),
        }


def _export_trace(ended: profile, path: str) -> None:
    """Write a compressed trace.

    torch compresses line by line and as strongly as possible, which took half of a profile's time.
    """
    plain = path.removesuffix(".gz")
    ended.export_chrome_trace(plain)
    with open(plain, "rb") as trace, gzip.open(path, "wb", compresslevel=1) as compressed:
        shutil.copyfileobj(trace, compressed, 1 << 20)


# --- what a profile shows -------------------------------------------------------------------------


def seconds_by_kind(events: Iterable[Event], steps: int, on_gpu: bool) -> dict[str, float]:
    """Seconds per step: in all, computing, communicating, communicating exposed, and idle.

    Args:
        events: Of the profile.
        steps: How many steps the profile has.
        on_gpu: Whether the device is a GPU.
    """
    device_type = DeviceType.CUDA if on_gpu else DeviceType.CPU
    computing: list[Interval] = []
    communicating: list[Interval] = []
    collectives_by_thread: dict[int, list[Interval]] = {}
    bounds: list[float] = []
    all_events = list(events)
    for event in all_events:
        interval = (event.time_range.start, event.time_range.end)
        if event.name.startswith("ProfilerStep") and event.device_type == DeviceType.CPU:
            bounds += interval
        elif event.device_type == device_type and _communicates(event, on_gpu):
            communicating.append(interval)
            if not event.is_async:
                collectives_by_thread.setdefault(event.thread, []).append(interval)
    for event in all_events:
        if event.device_type != device_type or not _computes(event, on_gpu):
            continue
        interval = (event.time_range.start, event.time_range.end)
        if on_gpu:  # kernels run after the host has left the step
            bounds.append(interval[1])
            computing.append(interval)
        # On a CPU the operators in a collective, which run in its thread, are communication.
        elif not _is_within(interval, collectives_by_thread.get(event.thread, [])):
            computing.append(interval)
    compute_time = union_length(computing)
    busy_time = union_length([*computing, *communicating])
    step_time = max(bounds) - min(bounds) if bounds else busy_time
    microseconds = {
        "step": step_time,
        "computing": compute_time,
        "communication": union_length(communicating),
        "exposed_communication": busy_time - compute_time,
        "idle": max(0.0, step_time - busy_time),
    }
    return {f"{kind}_seconds": time / steps / 1e6 for kind, time in microseconds.items()}


def _communicates(event: Event, on_gpu: bool) -> bool:
    is_annotation = on_gpu and event.is_user_annotation
    return event.name.startswith(COMMUNICATION) and not is_annotation


def _computes(event: Event, on_gpu: bool) -> bool:
    if on_gpu:
        return not event.is_user_annotation and not event.name.startswith(COMMUNICATION)
    return "::" in event.name and not event.name.startswith(NOT_COMPUTING)


def _is_within(interval: Interval, outer: list[Interval]) -> bool:
    start, end = interval
    return any(outer_start <= start and end <= outer_end for outer_start, outer_end in outer)


def union_length(intervals: list[Interval]) -> float:
    """The length of the union of intervals."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def longest_operators(averages: Iterable[Any], steps: int, on_gpu: bool) -> list[dict[str, Any]]:
    """The operators that take longest, without what they call.

    Args:
        averages: What `key_averages` of the profile returns.
        steps: How many steps the profile has.
        on_gpu: Whether the device is a GPU.

    Returns:
        For each operator its name, and per step its calls, seconds and allocated bytes.
    """
    device = "device" if on_gpu else "cpu"
    rows: list[dict[str, Any]] = []
    for average in averages:
        if average.device_type != DeviceType.CPU or average.is_user_annotation:
            continue
        microseconds = getattr(average, f"self_{device}_time_total")
        if microseconds > 0:
            rows.append(
                {
                    "name": average.key,
                    "calls": average.count / steps,
                    "seconds": microseconds / steps / 1e6,
                    "bytes": getattr(average, f"self_{device}_memory_usage") / steps,
                }
            )
    rows.sort(key=lambda row: row["seconds"], reverse=True)
    return rows[:LONGEST]


# --- for a person ---------------------------------------------------------------------------------


def read_profile(storage: Storage) -> tuple[dict[str, Any], str]:
    """Read the newest profile of a run.

    Args:
        storage: The run's folder.

    Returns:
        (the profile, its folder relative to the run's)

    Raises:
        UserError: The run has no profile.
    """
    folders = sorted(storage.list("profile"), key=lambda name: int(name.split("-")[1]))
    if not folders:
        raise UserError(
            f"{storage.url} has no profile: train it with profile.steps=[20,25] for instance"
        )
    folder = f"profile/{folders[-1]}"
    return json.loads(storage.read_bytes(f"{folder}/{FILE}")), folder


def table(content: Mapping[str, Any]) -> str:
    """A profile as lines of text.

    Args:
        content: What profile.json contains.
    """
    first, last = content["steps"]
    lines: list[str] = []
    for rank in content["ranks"]:
        step_seconds = rank["step_seconds"]
        shares = [
            f"{rank[f'{kind}_seconds'] / step_seconds:.0%} {kind.replace('_', ' ')}"
            for kind in ("computing", "exposed_communication", "idle")
        ]
        communication = rank["communication_seconds"] / step_seconds
        lines += [
            f"rank {rank['rank']} ({rank['device']}), steps {first} to {last}: "
            f"{step_seconds * 1e3:.1f} ms a step",
            f"{', '.join(shares)}; communication in all {communication:.0%}",
            f"{'ms':>9} {'of step':>8} {'calls':>8} {'MB':>9}  operator",
        ]
        for operator in rank["operators"]:
            milliseconds = operator["seconds"] * 1e3
            share = operator["seconds"] / step_seconds
            megabytes = operator["bytes"] / 1e6
            lines.append(
                f"{milliseconds:>9.3f} {share:>8.1%} {operator['calls']:>8.1f} "
                f"{megabytes:>9.1f}  {operator['name']}"
            )
        lines.append("")
    return "\n".join(lines)
