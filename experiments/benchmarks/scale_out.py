"""`scale-out`: what the control plane costs as ranks grow to 16,384, with simulated ranks.

Nothing is trained, and no process is started: the ranks' messages are made here, and go through the
code that a run has in its driver, its queue, its nodes' aggregators and its ranks. Seconds are of
the CPU, of one core. The exponent is that between the two largest numbers of ranks: what concerns
all ranks together may grow as their number (1), and what one rank does or receives not at all (0).
"""

from __future__ import annotations

import gc
import json
import math
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from app.checkpoint import Checkpointer
from app.checkpoint.commit import Commit, File, decode, divided, encode
from app.checkpoint.table import Table, Wish, routes
from app.launchers import blame
from app.launchers.actors import placement
from app.launchers.aggregator import DIRECT_RANKS, Aggregator, Report, RootAggregator, parents
from app.launchers.elastic import room_by_node
from app.launchers.heartbeats import HangDetector
from app.launchers.recovery import Nodes, State, classify
from app.launchers.supervisor import stacks_text
from app.launchers.torchrun import TorchrunWorkers
from app.launchers.workers import Status
from app.tracking.system import SystemMetrics
from app.training.events import WorkerInfo
from cluster.shape import NodeState
from experiments.benchmarks.harness import show
from strategies.layout import ParallelDims

RANKS = (8, 64, 512, 4096, 16_384)
NODE_RANKS = 8
"""Ranks of a node."""
REPEAT_SECONDS = 0.2
"""A quick measurement is repeated for so long, and the mean is taken."""
TENSORS = 4
"""Of a checkpoint whose table is measured."""
FILE = File(1_000_000, "a" * 64)
"""What a rank writes into a checkpoint."""
EVENTS = 2000
"""Metric events in a checkpoint, as a run keeps them."""

Measured = Callable[[], object]
"""What is measured: its CPU seconds, or the number that it returns."""


class Below:
    """An actor's handle, whose calls are made here and now."""

    def __init__(self, aggregator: Aggregator) -> None:
        self.obey = SimpleNamespace(remote=aggregator.obey)


class Tree:
    """The queue, and the aggregators of the nodes of so many ranks.

    Args:
        ranks: The number of ranks.
        attempt: The number of the attempt.
        queue: One that has begun this attempt; None makes one.
    """

    def __init__(self, ranks: int, attempt: int = 1, queue: RootAggregator | None = None) -> None:
        self.ranks = ranks
        self.attempt = attempt
        self.clock = 0.0
        if queue is None:
            queue = RootAggregator(lambda: self.clock)
            queue.begin(attempt, ranks)
        self.queue = queue
        self.aggregators: list[Aggregator] = []
        self.gone: set[int] = set()
        """Numbers of aggregators that do not report any more."""
        nodes = math.ceil(ranks / NODE_RANKS) if ranks > DIRECT_RANKS else 0
        for parent in parents(nodes):
            aggregator = Aggregator(lambda: self.clock)
            aggregator.begin(attempt, 0)
            self.aggregators.append(aggregator)
            above = self.queue if parent is None else self.aggregators[parent]
            above.adopt(attempt, Below(aggregator))

    def above(self, rank: int) -> Aggregator:
        """What a rank reports to."""
        return self.aggregators[rank // NODE_RANKS] if self.aggregators else self.queue

    def beat(self, step: int, silent: frozenset[int] = frozenset()) -> None:
        """Every rank sends a heartbeat, but those that are silent."""
        for rank in range(self.ranks):
            if rank not in silent:
                self.above(rank).beat(
                    self.attempt, rank, ("training", step, 0, rank % 3 == 0), None
                )

    def reports_to_queue(self) -> list[tuple[str, Report]]:
        """The aggregators report, the lowest first; returns the reports to the queue."""
        to_queue: list[tuple[str, Report]] = []
        above = parents(len(self.aggregators))
        for number in reversed(range(len(self.aggregators))):
            if number in self.gone:
                continue
            parent = above[number]
            report = self.aggregators[number].take()
            if parent is None:
                to_queue.append((str(number), report))
            else:
                self.aggregators[parent].report(self.attempt, str(number), report)
        return to_queue

    def deliver(self) -> None:
        """The aggregators report, and the queue takes it."""
        for child, report in self.reports_to_queue():
            self.queue.report(self.attempt, child, report)


def heartbeats_at_queue(ranks: int) -> Measured:
    """The queue's work of a second in which every rank has moved."""
    tree = Tree(ranks)
    tree.beat(1)
    reports = [pickle.dumps(report) for report in tree.reports_to_queue()]

    def work() -> None:
        for report in reports:
            tree.queue.report(1, *pickle.loads(report))
        if not reports:
            tree.beat(2)
        pickle.dumps(tree.queue.take())

    return work


def calls_at_queue(ranks: int) -> Measured:
    """How many calls the queue takes in a second."""
    tree = Tree(ranks)
    tree.beat(1)
    return lambda: len(tree.reports_to_queue()) or ranks


def driver_second(ranks: int) -> Measured:
    """The driver's work of a second in which every rank has moved: 20 polls."""
    tree = Tree(ranks)
    detector = HangDetector(10.0, 0.0)
    polls = []
    for poll in range(20):
        if poll == 10:
            tree.beat(1)
            tree.deliver()
        polls.append(pickle.dumps(tree.queue.take()))

    def work() -> None:
        for number, pickled in enumerate(polls):
            report: Report = pickle.loads(pickled)
            statuses: dict[int, Status] = {}
            for beat, of_ranks in report.beats.items():
                statuses |= dict.fromkeys(of_ranks, Status.of(beat))
            detector.update(statuses, number / 20, report.silent or frozenset())

    return work


def driver_in_a_pause(ranks: int) -> Measured:
    """The driver's and the queue's work of a second in which no rank has moved: 20 polls."""
    tree = Tree(ranks)
    tree.beat(1)
    tree.deliver()
    detector = HangDetector(10.0, 0.0)
    for beat, of_ranks in tree.queue.take().beats.items():
        detector.update(dict.fromkeys(of_ranks, Status.of(beat)), 0.0)

    def work() -> None:
        for number in range(20):
            report = tree.queue.take()
            detector.update({}, number / 20, report.silent or frozenset())

    return work


def meeting(ranks: int) -> Measured:
    """All ranks join, and each learns its place."""

    def work() -> None:
        tree = Tree(ranks)
        for rank in range(ranks):
            store = ("10.0.0.1", 29500) if rank == 0 else None
            tree.above(rank).join(1, rank, f"node-{rank // NODE_RANKS}", store)
        tree.deliver()
        for rank in range(ranks):
            assert tree.above(rank).meeting(1, rank, f"node-{rank // NODE_RANKS}") is not None

    return work


def bytes_of_meeting(ranks: int) -> Measured:
    """What a rank receives."""
    tree = Tree(ranks)
    for rank in range(ranks):
        tree.above(rank).join(1, rank, f"node-{rank // NODE_RANKS}", ("10.0.0.1", 29500))
    tree.deliver()
    last = ranks - 1
    assignment = tree.above(last).meeting(1, last, f"node-{last // NODE_RANKS}")
    return lambda: len(pickle.dumps(assignment))


class RecordingRanks:
    """Rank 0 of so many, which notes what it sends to each other rank.

    Args:
        size: The number of ranks.
    """

    distributed = True
    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes_of_a_rank = 0

    def from_first(self, value: Any) -> Any:
        """Notes a value that every rank gets."""
        self.bytes_of_a_rank += len(pickle.dumps(value))
        return value

    def scatter(self, values: list[Any]) -> Any:
        """Notes the value of a rank in the middle."""
        self.bytes_of_a_rank += len(pickle.dumps(values[self.size // 2]))
        return values[0]

    def any(self, *flags: bool) -> list[bool]:
        """Flags that no other rank has set."""
        return list(flags)

    def run_on_first(self, function: Callable[[], Any]) -> Any:
        """Notes a result that every rank gets."""
        return self.from_first(function())

    def run_and_divide(self, function: Callable[[], Any], divide: Callable[..., Any]) -> Any:
        """The share of rank 0, of which alone the checkpoint is planned."""
        return divide([function()])[0]

    def run_and_combine(self, function: Callable[[], Any], combine: Callable[..., Any]) -> Any:
        """Every other rank has written a file and knows of no shard."""
        others: list[Any] = [({f"__{rank}_0.distcp": FILE}, []) for rank in range(1, self.size)]
        return self.from_first(combine([function(), *others]))


def bytes_of_save(ranks: int) -> Measured:
    """What a rank learns of a checkpoint that all of them save, after it has its plan."""
    recording = RecordingRanks(ranks)

    def work() -> int:
        with tempfile.TemporaryDirectory() as folder:
            with mock.patch("app.checkpoint.saver.Ranks", return_value=recording):
                saver = Checkpointer(folder)
            saver.save({"weight": torch.ones(4)}, meta={"step": 1})
            saver.close()
        return recording.bytes_of_a_rank

    return work


def commit_of(ranks: int) -> Commit:
    """A checkpoint into which so many ranks have written a file each."""
    files = {f"__{rank}_0.distcp": FILE for rank in range(ranks)}
    files[".metadata"] = File(1000, "b" * 64)
    events = [f'{{"type": "metrics", "step": {step}, "values": {{}}}}' for step in range(EVENTS)]
    meta = {"step": 1, "events": events}
    return Commit(step=1, path="/runs/a/checkpoints/step-00000001", meta=meta, files=files)


def bytes_of_resume(ranks: int) -> Measured:
    """What a rank learns of the checkpoint from which it continues."""
    commit = commit_of(ranks)

    def work() -> int:
        recording = RecordingRanks(ranks)
        divided(commit, recording)  # type: ignore[arg-type]
        return recording.bytes_of_a_rank

    return work


def table_of(ranks: int) -> Metadata:
    """The table of a checkpoint in which every rank has a row of each tensor."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    properties = TensorProperties(dtype=torch.float32)
    for number in range(TENSORS):
        name = f"model.blocks.{number}.weight"
        offsets = [torch.Size([rank, 0]) for rank in range(ranks)]
        chunks = [ChunkStorageMetadata(offset, torch.Size([1, 64])) for offset in offsets]
        size = torch.Size([ranks, 64])
        entries[name] = TensorStorageMetadata(properties, size, chunks)
        for rank, offset in enumerate(offsets):
            places[MetadataIndex(name, offset)] = (f"__{rank}_0.distcp", 0, 256)
    return Metadata(entries, storage_data=places)


def wish_of_row(rank: int) -> Wish:
    """What a rank wants to know that has a row of each tensor."""
    return {f"model.blocks.{number}.weight": [((rank, 0), (1, 64))] for number in range(TENSORS)}


def parts_of_table(ranks: int) -> Measured:
    """Cutting a checkpoint's table into the parts of all ranks, on rank 0."""
    metadata = table_of(ranks)

    def work() -> None:
        table = Table(metadata)
        for rank in range(ranks):
            pickle.dumps(table.part(wish_of_row(rank)))

    return work


def bytes_of_table(ranks: int) -> Measured:
    """What a rank gets of a checkpoint's table."""
    table = Table(table_of(ranks))
    return lambda: len(pickle.dumps(table.part(wish_of_row(ranks // 2))))


def parts_sent_by_rank_0(ranks: int) -> Measured:
    """How many parts rank 0 sends if the ranks are replicas of 8, each with its own shards."""
    digests = [bytes([rank % NODE_RANKS]) for rank in range(ranks)]

    def work() -> int:
        by_rank = routes(digests)
        return sum(route.asks for route in by_rank) + len(by_rank[0].targets)

    return work


def marker(ranks: int) -> Measured:
    """Writing and reading a checkpoint's marker, on rank 0."""
    commit = commit_of(ranks)
    return lambda: decode(encode(commit), commit.path)


def infos_of(ranks: int) -> dict[int, WorkerInfo]:
    """Where so many ranks run."""
    return {
        rank: WorkerInfo(
            rank=rank, pid=rank, ip="10.0.0.1", node=f"node-{rank // NODE_RANKS}", oom_kills=0
        )
        for rank in range(ranks)
    }


def classify_lost_peers(ranks: int) -> Measured:
    """What ended the run, if a rack of 64 nodes is lost and every rank only lost a peer."""
    rack = {f"node-{node}" for node in range(64)}
    state = State(
        workers=infos_of(ranks),
        step=100,
        progressed=True,
        logs=Path("none"),
        nodes=Nodes(lost=lambda nodes: set(nodes) & rack, oom_kills=lambda node: 0),
    )
    failures: dict[int | None, BaseException] = {
        rank: RuntimeError("Connection closed by peer [10.0.0.1]:123") for rank in range(ranks)
    }
    return lambda: classify(failures, state, [])


def nodes_of(ranks: int) -> list[NodeState]:
    """Empty nodes for so many ranks."""
    node = {"CPU": 96.0, "GPU": float(NODE_RANKS)}
    return [
        NodeState(address="", kind="", total=node, available=node, id=f"node-{number}")
        for number in range(math.ceil(ranks / NODE_RANKS))
    ]


def place_workers(ranks: int) -> Measured:
    """Choosing bundles for data-parallel workers."""
    dims = ParallelDims(dp_replicate=ranks)
    nodes = nodes_of(ranks)
    return lambda: placement(dims, [{"GPU": 1.0, "CPU": 1.0}], nodes)


def room(ranks: int) -> Measured:
    """Counting the room on every node, and without each."""
    free = {node.id: node.available for node in nodes_of(ranks)}

    def work() -> None:
        by_node = room_by_node({"GPU": 1.0}, free)
        total = sum(by_node.values())
        assert min(total - workers for workers in by_node.values()) == total - NODE_RANKS

    return work


def flight_record(rank: int, ranks: int) -> str:
    """A rank's summary of its record: of all ranks, and of the 8 of its node; one is behind."""
    enqueued = 99 if rank == ranks // 2 else 100
    groups = [["nccl", "0", enqueued, enqueued, 99], ["nccl", f"{rank // 8 + 1}", 50, 50, 50]]
    return json.dumps({"groups": groups, "unused": [], "receives": [], "sends": []})


def blame_a_rank(ranks: int) -> Measured:
    """Finding the rank that the others wait for."""
    summaries = {rank: flight_record(rank, ranks) for rank in range(ranks)}

    def work() -> None:
        behind = blame.rank_behind(summaries)
        assert behind is not None and behind.rank == ranks // 2

    return work


def report_of_stacks(ranks: int) -> Measured:
    """How many bytes of stacks a hang leaves, if each rank has one of its own."""
    stacks = {rank: f"{rank}\n" + "  File x, line 1\n" * 200 for rank in range(ranks)}
    text = stacks_text(infos_of(ranks), stacks)
    return lambda: len(text)


def values_of_system_metrics(ranks: int) -> Measured:
    """Values of system metrics that MLflow gets in a second."""
    names = [
        "cpu_utilization_percentage",
        "system_memory_usage_megabytes",
        *(
            f"gpu_{gpu}_{name}"
            for gpu in range(NODE_RANKS)
            for name in ("power_usage_watts", "memory")
        ),
    ]
    nodes = math.ceil(ranks / NODE_RANKS)

    def work() -> float:
        metrics = SystemMetrics(5.0)
        logged = 0
        for second in range(0, 100, 5):
            for node in range(nodes):
                values = {f"system/node-{node}/{name}": 1.0 for name in names}
                logged += len(metrics.add(1e9 + second + node / nodes, values))
        return logged / 100

    return work


def torchrun_beats(ranks: int) -> Measured:
    """One reading of all heartbeats from a real store of torch.distributed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = TorchrunWorkers(
        SimpleNamespace(place=SimpleNamespace(world_size=ranks)),  # type: ignore[arg-type]
        lambda job: None,
    )
    workers.store = dist.PrefixStore("watch/x", store)
    workers.infos = infos_of(ranks)
    for rank in range(ranks):
        workers.store.set(f"beat/{rank}", '[1, ["training", 100, 0, true]]')

    def work() -> None:
        workers.beats = {}
        assert len(workers._read_beats()) == ranks

    return work


@dataclass(frozen=True)
class Row:
    """One thing that is measured.

    Attributes:
        what: For a person.
        prepare: Makes what is measured, for a number of ranks.
        exponent: How it may grow with the number of ranks.
        unit: Of the number that it returns; "s" if its seconds are measured.
    """

    what: str
    prepare: Callable[[int], Measured]
    exponent: int = 1
    unit: str = "s"


ROWS = (
    Row("heartbeats: calls of the queue's process a second", calls_at_queue, 1, "calls"),
    Row("heartbeats: the queue's second, every rank has moved", heartbeats_at_queue),
    Row("heartbeats: the driver's second (20 polls), every rank has moved", driver_second),
    Row("heartbeats: the same, no rank has moved", driver_in_a_pause, 0),
    Row("torchrun: one reading of all heartbeats", torchrun_beats),
    Row("meeting: all ranks and nodes together", meeting),
    Row("meeting: what a rank receives", bytes_of_meeting, 0, "bytes"),
    Row("placement of actors", place_workers),
    Row("room on all nodes, and without each", room),
    Row("checkpoint: marker written and read", marker),
    Row("checkpoint: what a rank learns of it", bytes_of_save, 0, "bytes"),
    Row("resume: what a rank learns of the checkpoint", bytes_of_resume, 0, "bytes"),
    Row("resume: cutting the table into the ranks' parts", parts_of_table),
    Row("resume: what a rank gets of the table", bytes_of_table, 0, "bytes"),
    Row("resume: parts that rank 0 sends to replicas of 8", parts_sent_by_rank_0, 0, "parts"),
    Row("a lost rack: what ended the run, of lost peers alone", classify_lost_peers),
    Row("a hang: which rank the others wait for", blame_a_rank),
    Row("a hang: stacks that are kept", report_of_stacks, 1, "bytes"),
    Row("system metrics: values into MLflow a second", values_of_system_metrics, 0, "values"),
)


def measure(row: Row, ranks: int) -> float:
    """What a row costs for a number of ranks."""
    measured = row.prepare(ranks)
    gc.collect()
    if row.unit != "s":
        return float(measured())  # type: ignore[arg-type]
    times = 0
    start = time.process_time()
    while True:
        measured()
        times += 1
        seconds = time.process_time() - start
        if seconds > REPEAT_SECONDS:
            return seconds / times


def exponent(smaller: tuple[int, float], larger: tuple[int, float]) -> float:
    """The power of the number of ranks with which a cost grows."""
    return math.log(larger[1] / smaller[1]) / math.log(larger[0] / smaller[0])


def formatted(value: float, unit: str) -> str:
    """A cost for a person."""
    if unit != "s":
        return f"{value:,.0f} {unit}"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:,.3g} ms"


@click.command(help=__doc__)
@click.option("--ranks", type=int, multiple=True, default=RANKS, help="Numbers of ranks.")
@click.option("--json", "as_json", is_flag=True)
def main(ranks: tuple[int, ...], as_json: bool) -> None:
    results: dict[str, dict[int, float]] = {}
    rows: list[dict[str, str]] = []
    for row in ROWS:
        costs = {number: measure(row, number) for number in ranks}
        results[row.what] = costs
        cells = {f"{number:,}": formatted(cost, row.unit) for number, cost in costs.items()}
        grows_as = ""
        if len(costs) > 1:
            smaller, larger = list(costs.items())[-2:]
            grows_as = f"{exponent(smaller, larger):.2f} (may be {row.exponent})"
        rows.append({"what": row.what, **cells, "exponent": grows_as})
    show("scale-out", results, rows, as_json=as_json)


if __name__ == "__main__":
    main()
