"""The queue of one cluster: which run starts next, which runs it may stop, and when it may start.

Its state is in files in `.queue` of the folder that holds the runs, so that it outlives the
cluster's head: an entry for each run (ID.json), the folder that was shipped with it (ID.zip), and
how many workers a user may have at once (quotas.json). Decisions are pure functions of the entries,
the states of their jobs and what is free, so every waiting job takes the same ones.
"""

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from app.errors import UserError
from app.storage.storage import Storage

FOLDER = ".queue"
QUOTAS = "quotas.json"
FREE = "free.json"
START_SECONDS = 180.0
"""How long a run that was let in may take to its first step; no other is let in meanwhile."""
EVERYONE = "*"
"""In quotas.json: all users without a quota of their own."""
PREFIX = "queue-"
"""Of an entry's id."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run that was submitted to the queue. Times are Unix seconds of the cluster's head.

    Args:
        id: The entry's id.
        user: Who has submitted the run.
        run: The run's name.
        priority: The highest comes first.
        words: The arguments of `trireme train`.
        workers: How many the run asks for.
        each: Ray resources of one worker.
        since: When the run was submitted.
        job: Ray's id of the job that waits or trains.
        started: When it was let in; 0 while it waits.
        stopped_for: The id of the entry that it was stopped for; "" if it was not stopped.
        env: Environment variables of its job.
    """

    id: str
    user: str
    run: str
    priority: int
    words: tuple[str, ...]
    workers: int
    each: dict[str, float]
    since: float
    job: str
    started: float = 0.0
    stopped_for: str = ""
    env: dict[str, str] = field(default_factory=dict)

    @property
    def demand(self) -> Counter[str]:
        """Ray resources of all workers together."""
        return Counter({name: amount * self.workers for name, amount in self.each.items()})


class State(Enum):
    """What an entry's run does."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping for another"
    LOST = "its job is gone"
    """The head was lost, or the run was stopped for another: it is to be sent again."""
    OVER = "over"


@dataclass(frozen=True)
class Row:
    """An entry as it is now.

    Args:
        entry: The entry.
        state: What its run does.
        seconds_left: Until the training ends; None if that is not known.
    """

    entry: Entry
    state: State
    seconds_left: float | None = None


def state_of(entry: Entry, status: str | None, has_stepped: bool, now: float) -> State:
    """What an entry's run does.

    Args:
        entry: The entry.
        status: Of its job in Ray; None if Ray knows no such job.
        has_stepped: Whether the run has taken a step since it was let in.
        now: Unix time.
    """
    if status is None or (status == "STOPPED" and entry.stopped_for):
        return State.LOST
    if status in ("SUCCEEDED", "FAILED", "STOPPED"):
        return State.OVER
    if entry.stopped_for:
        return State.STOPPING
    if not entry.started:
        return State.WAITING
    if has_stepped or now - entry.started > START_SECONDS:
        return State.RUNNING
    return State.STARTING


def waiting_line(rows: Sequence[Row]) -> list[Row]:
    """Runs that wait or are to be sent again, by priority and then by age."""
    waiting = [row for row in rows if row.state in (State.WAITING, State.LOST)]
    return sorted(waiting, key=lambda row: (-row.entry.priority, row.entry.since, row.entry.id))


def is_over_quota(row: Row, rows: Sequence[Row], quotas: Mapping[str, int]) -> bool:
    """Whether a run's user would have more workers than the quota allows.

    Args:
        row: A run that waits.
        rows: The whole queue.
        quotas: Workers by user; see `EVERYONE`.
    """
    user = row.entry.user
    quota = quotas.get(user, quotas.get(EVERYONE))
    if quota is None:
        return False
    used = sum(other.entry.workers for other in _let_in(rows) if other.entry.user == user)
    return used + row.entry.workers > quota


def next_to_start(rows: Sequence[Row], quotas: Mapping[str, int]) -> Row | None:
    """The run to let in next, once its whole group fits.

    No other run overtakes it, except that users at their quota are passed over.

    Returns:
        None if no run waits, or another is starting just now.
    """
    if any(row.state is State.STARTING for row in rows):
        return None
    for row in waiting_line(rows):
        if not is_over_quota(row, rows, quotas):
            return row
    return None


def runs_to_stop(row: Row, rows: Sequence[Row], free: Mapping[str, float]) -> list[Row]:
    """The runs to stop at a checkpoint so that another run fits.

    They have a lower priority; the lowest and newest come first.

    Args:
        row: The run that is to fit.
        rows: The whole queue.
        free: Resources that are free over the cluster.

    Returns:
        An empty list if stopping runs would not suffice, or some are stopping already.
    """
    if any(other.state is State.STOPPING for other in rows):
        return []
    lower = [
        other
        for other in rows
        if other.state is State.RUNNING and other.entry.priority < row.entry.priority
    ]
    lower.sort(key=lambda other: (other.entry.priority, -other.entry.started))
    room = Counter(free)
    for number, other in enumerate(lower, start=1):
        room.update(other.entry.demand)
        if row.entry.demand <= room:
            return lower[:number]
    return []


def expected_starts(rows: Sequence[Row], free: Mapping[str, float]) -> dict[str, float | None]:
    """When each run that waits is expected to start, as others end, in the order of the line.

    Args:
        rows: The whole queue.
        free: Resources that are free over the cluster now.

    Returns:
        Seconds from now by the entry's id; None after a run whose duration is not known.
    """
    ends: list[tuple[float, Counter[str]]] = []
    for row in _let_in(rows):
        if row.seconds_left is not None:
            ends.append((row.seconds_left, row.entry.demand))
    ends.sort(key=lambda end: end[0])
    room = Counter(free)
    seconds = 0.0
    starts: dict[str, float | None] = {}
    for row in waiting_line(rows):
        demand = row.entry.demand
        while not demand <= room and ends:
            end_seconds, freed = ends.pop(0)
            room.update(freed)
            seconds = max(seconds, end_seconds)
        is_known = demand <= room and None not in starts.values()
        starts[row.entry.id] = seconds if is_known else None
        room.subtract(demand)
    return starts


def _let_in(rows: Sequence[Row]) -> list[Row]:
    """Runs that hold resources."""
    active = (State.STARTING, State.RUNNING, State.STOPPING)
    return [row for row in rows if row.state in active]


# --- in the storage -------------------------------------------------------------------------------


class QueueStore:
    """The stored queue of the cluster whose runs are in a folder.

    Args:
        runs: The folder.
    """

    def __init__(self, runs: str) -> None:
        self.runs = Storage(runs)
        self.storage = self.runs.join(FOLDER)

    def entries(self) -> list[Entry]:
        """All entries."""
        entries = []
        for name in self.storage.list():
            if name.startswith(PREFIX) and name.endswith(".json"):
                entry = self.read(name.removesuffix(".json"))
                if entry is not None:
                    entries.append(entry)
        return entries

    def read(self, id: str) -> Entry | None:
        """The entry with this id; None if there is none."""
        values = self._read_json(f"{id}.json")
        if not values:
            return None
        return Entry(**{**values, "words": tuple(values["words"])})

    def write(self, entry: Entry, **changes: Any) -> Entry:
        """Writes an entry with changes to some of its fields, and returns it."""
        entry = replace(entry, **changes)
        self.put(f"{entry.id}.json", asdict(entry))
        return entry

    def remove(self, id: str) -> None:
        """Removes an entry, and the folder that was shipped with it."""
        for name in (f"{id}.json", f"{id}.zip"):
            self.storage.remove(name)

    def quotas(self) -> dict[str, int]:
        """How many workers a user may have at once, by user; see `EVERYONE`."""
        return dict(self._read_json(QUOTAS))

    def set_quota(self, user: str, workers: int | None) -> None:
        """Sets how many workers a user may have at once; None removes the quota."""
        quotas = self.quotas()
        quotas.pop(user, None)
        if workers is not None:
            quotas[user] = workers
        self.put(QUOTAS, quotas)

    def free(self) -> dict[str, float]:
        """What was free over the cluster when the first in the line last looked."""
        return dict(self._read_json(FREE))

    def put(self, name: str, values: Mapping[str, object]) -> None:
        """Writes a JSON file."""
        self.storage.write_bytes(name, json.dumps(values).encode())

    def _read_json(self, name: str) -> dict[str, Any]:
        """A JSON file's values; empty if there is no file.

        Raises:
            UserError: It cannot be read.
        """
        try:
            values: dict[str, Any] = json.loads(self.storage.read_bytes(name))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise UserError(
                f"{self.storage}/{name} is not readable ({error}): remove it"
            ) from error
        return values


# --- on Kubernetes --------------------------------------------------------------------------------


def kueue_manifest(
    manifest: Mapping[str, Any], words: Sequence[str], run: str, priority: int
) -> dict[str, Any]:
    """A RayJob's manifest for Kueue, which lets whole jobs in.

    Labels name its queue (the manifest's own, or else `default`) and the WorkloadPriorityClass
    `priority-N`. https://kueue.sigs.k8s.io/docs/tasks/run/rayjobs/

    Args:
        manifest: Of a RayJob.
        words: The arguments of `trireme train`.
        run: The run's name.
        priority: The highest comes first; 0 names no class.

    Raises:
        UserError: The manifest is not of a RayJob.
    """
    kind = manifest.get("kind")
    if kind != "RayJob":
        raise UserError(
            f"a queue on Kubernetes takes a RayJob, and this is a {kind}: give such a file"
        )
    metadata = manifest["metadata"]
    labels = {"kueue.x-k8s.io/queue-name": "default", **(metadata.get("labels") or {})}
    if priority:
        labels["kueue.x-k8s.io/priority-class"] = f"priority-{priority}"
    spec = {
        **manifest["spec"],
        "entrypoint": shlex.join(["trireme", "train", *words]),
        "suspend": True,
        "metadata": {"trireme_run": run},
    }
    return {**manifest, "metadata": {**metadata, "labels": labels}, "spec": spec}
