"""The queue of one cluster: which run starts next, whom it may stop, and when it is expected to start.

Its state is files in `.queue` of the folder that holds the runs, so it outlives the cluster's head: an entry for each
run (ID.json), the folder that was shipped with it (ID.zip), and how many workers a user may have at once (quotas.json).
Decisions are pure functions of the entries, their jobs' states and what is free; every waiting job takes the same ones.
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

FOLDER, QUOTAS, FREE = ".queue", "quotas.json", "free.json"
START_SECONDS = 180.0  # until a run that was let in takes its first step; meanwhile no other is let in
EVERYONE = "*"
PREFIX = "queue-"  # of an entry's id


@dataclass(frozen=True)
class Entry:
    """A run that was submitted to the queue. Times are Unix seconds of the cluster's head."""

    id: str
    user: str
    run: str  # its name
    priority: int
    words: tuple[str, ...]  # of `trireme train`
    workers: int
    each: dict[str, float]  # resources of a worker
    since: float  # when it was submitted
    job: str  # Ray's id of the job that waits or trains
    started: float = 0.0  # when it was let in; 0: it waits
    stopped_for: str = ""  # the entry that it was stopped for
    env: dict[str, str] = field(default_factory=dict)  # of its job

    @property
    def demand(self) -> Counter[str]:
        return Counter({name: amount * self.workers for name, amount in self.each.items()})


class State(Enum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping for another"
    LOST = "its job is gone"  # with the head, or it was stopped for another: it is to be sent again
    OVER = "over"


@dataclass(frozen=True)
class Row:
    """An entry as it is now. seconds_left: until its training ends; None: not known."""

    entry: Entry
    state: State
    seconds_left: float | None = None


def state_of(entry: Entry, status: str | None, steps: bool, now: float) -> State:
    """status: of its job in Ray; None: Ray knows no such job. steps: whether it has taken one since it was let in."""
    if status is None or (status == "STOPPED" and entry.stopped_for):
        return State.LOST
    if status in ("SUCCEEDED", "FAILED", "STOPPED"):
        return State.OVER
    if entry.stopped_for:
        return State.STOPPING
    if not entry.started:
        return State.WAITING
    return State.RUNNING if steps or now - entry.started > START_SECONDS else State.STARTING


def line(rows: Sequence[Row]) -> list[Row]:
    """Those that wait, and those to be sent again: by priority, then by age."""
    waiting = [row for row in rows if row.state in (State.WAITING, State.LOST)]
    return sorted(waiting, key=lambda row: (-row.entry.priority, row.entry.since, row.entry.id))


def is_over_quota(row: Row, rows: Sequence[Row], quotas: Mapping[str, int]) -> bool:
    user = row.entry.user
    most = quotas.get(user, quotas.get(EVERYONE))
    has = sum(other.entry.workers for other in _let_in(rows) if other.entry.user == user)
    return most is not None and has + row.entry.workers > most


def first(rows: Sequence[Row], quotas: Mapping[str, int]) -> Row | None:
    """The next to be let in, once its whole group fits; nobody overtakes it, save that users at their quota are passed
    over. None: nobody waits, or another starts just now."""
    if any(row.state is State.STARTING for row in rows):
        return None
    return next((row for row in line(rows) if not is_over_quota(row, rows, quotas)), None)


def victims(row: Row, rows: Sequence[Row], free: Mapping[str, float]) -> list[Row]:
    """The runs to stop at a checkpoint so that `row` fits: of lower priority, the lowest and newest first; [] where
    that would not do, or some are stopping already."""
    lower = [other for other in rows if other.state is State.RUNNING and other.entry.priority < row.entry.priority]
    lower.sort(key=lambda other: (other.entry.priority, -other.entry.started))
    if any(other.state is State.STOPPING for other in rows):
        return []
    room = Counter(free)
    for number, other in enumerate(lower, start=1):
        room.update(other.entry.demand)
        if row.entry.demand <= room:
            return lower[:number]
    return []


def expected(rows: Sequence[Row], free: Mapping[str, float]) -> dict[str, float | None]:
    """Seconds until each that waits is let in, by id: as runs end one after another, in the order of the line. None:
    after a run of which nobody knows how long it takes. free: now, over the cluster."""
    room, at = Counter(free), 0.0
    ends = [(row.seconds_left, row.entry.demand) for row in _let_in(rows)]
    known = sorted((end for end in ends if end[0] is not None), key=lambda end: end[0] or 0.0)
    found: dict[str, float | None] = {}
    for row in line(rows):
        while not row.entry.demand <= room and known:
            end, demand = known.pop(0)
            room.update(demand)
            at = max(at, end or 0.0)
        fits = row.entry.demand <= room and None not in found.values()
        found[row.entry.id] = at if fits else None
        room.subtract(row.entry.demand)
    return found


def _let_in(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.state in (State.STARTING, State.RUNNING, State.STOPPING)]


# --- kept in the storage --------------------------------------------------------------------------------------------


class Book:
    """The queue of the cluster whose runs are in `runs`."""

    def __init__(self, runs: str) -> None:
        self.runs, self.storage = Storage(runs), Storage(runs).join(FOLDER)

    def entries(self) -> list[Entry]:
        names = [name.removesuffix(".json") for name in self.storage.list() if name.endswith(".json")]
        return [entry for name in names if name.startswith(PREFIX) and (entry := self.read(name))]

    def read(self, id: str) -> Entry | None:
        values = self._json(f"{id}.json")
        return Entry(**values | {"words": tuple(values["words"])}) if values else None

    def write(self, entry: Entry, **changes: Any) -> Entry:
        entry = replace(entry, **changes)
        self.put(f"{entry.id}.json", asdict(entry))
        return entry

    def remove(self, id: str) -> None:
        for name in (f"{id}.json", f"{id}.zip"):
            self.storage.remove(name)

    def quotas(self) -> dict[str, int]:
        return self._json(QUOTAS)

    def set_quota(self, user: str, workers: int | None) -> None:
        kept = {name: most for name, most in self.quotas().items() if name != user}
        self.put(QUOTAS, kept | ({user: workers} if workers is not None else {}))

    def free(self) -> dict[str, float]:
        """What was free over the cluster when the first in the line last looked."""
        return self._json(FREE)

    def put(self, name: str, values: Mapping[str, Any]) -> None:
        self.storage.write_bytes(name, json.dumps(values).encode())

    def _json(self, name: str) -> Any:
        try:
            return json.loads(self.storage.read_bytes(name))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise UserError(f"{self.storage}/{name} is not readable ({error}): remove it") from error


# --- on Kubernetes --------------------------------------------------------------------------------------------------


def kueue(manifest: Mapping[str, Any], words: Sequence[str], run: str, priority: int) -> dict[str, Any]:
    """A RayJob's manifest for Kueue, which lets whole jobs in: labels name its queue (the manifest's own, else
    `default`) and the WorkloadPriorityClass `priority-N`. Raises UserError: it is no RayJob."""
    if manifest.get("kind") != "RayJob":
        raise UserError(f"a queue on Kubernetes takes a RayJob, and this is a {manifest.get('kind')}: give such a file")
    labels = {"kueue.x-k8s.io/queue-name": "default", **(manifest["metadata"].get("labels") or {})}
    if priority:
        labels["kueue.x-k8s.io/priority-class"] = f"priority-{priority}"
    entrypoint = shlex.join(["trireme", "train", *words])
    spec = {**manifest["spec"], "entrypoint": entrypoint, "suspend": True, "metadata": {"trireme_run": run}}
    return {**manifest, "metadata": {**manifest["metadata"], "labels": labels}, "spec": spec}
