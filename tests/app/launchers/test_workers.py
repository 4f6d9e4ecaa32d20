"""The workers of a run: their number, resources, placement, CPU threads and environment.

No GPU is needed.
"""

import math
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import cloudpickle
import psutil
import pytest
import ray
import torch
from torch.distributed import HashStore, TCPStore

from app.config.io import with_values
from app.errors import SourceLine, UserError, own_line
from app.launchers import actors, ray_launch, ray_workers, room, threads, train
from app.launchers.actors import ActorWorkers, Placement, placement, resources_of_stages
from app.launchers.ray_launch import (
    RayLaunch,
    fits_on_one_machine_without_gpus,
    ray_is_gone,
    resources_to_ask_for,
    workers_after_waiting,
)
from app.launchers.ray_workers import RayWorkers
from app.launchers.store import open_store
from app.launchers.torchrun import Environment, StoreHeartbeat
from app.launchers.workers import Failures, kill_process
from app.run.prepare import Prepared, with_idle_gpus
from app.training.events import WorkerFailed, WorkerInfo
from app.training.job import Heartbeat
from cluster import ClusterError
from cluster.connect import Cluster
from cluster.environment import set_defaults, shared_variables
from cluster.pending import AutoscalerReport, Diagnosis
from cluster.shape import NodeState, shape_of_nodes
from strategies.layout import ParallelDims
from strategies.parallelize import choose
from tests.chain import config
from tests.cluster.test_pending import SHAPE, node
from tests.running import ROOT, environment

pytestmark = pytest.mark.pure

ONE = {"CPU": 1.0}
TWO = {"CPU": 2.0}


def nodes(*cpus: float, **used_resources: float) -> list[NodeState]:
    """Nodes with these numbers of CPUs, on each of which other jobs use the resources given."""
    return [node("", "", {"CPU": count}, **used_resources) for count in cpus]


UNLIKE = "[{big: 1}, {small: 2, CPU: 0.5}]"
BIG = {"CPU": 1.0, "big": 1.0}
SMALL = {"CPU": 0.5, "small": 2.0}
BOTH = [node("", "", {**BIG, **SMALL, "CPU": 8.0}) for _ in range(2)]
APART = [node("", "", {**resources, "CPU": 8.0}) for resources in (BIG, SMALL)]


@pytest.mark.parametrize(
    ("dims", "stage_resources", "cluster_nodes", "expected"),
    [
        # A replica fits on a node: its stages are placed together, the replicas apart.
        (ParallelDims(dp_replicate=2, pp=2), "[]", nodes(2, 2), Placement([TWO] * 2, [0, 1, 0, 1])),
        # A replica does not fit: the shards of a stage are placed together.
        (ParallelDims(dp_shard=2, pp=2), "[]", nodes(2, 2), Placement([TWO] * 2, [0, 0, 1, 1])),
        # One replica would fit, but not both: 3 + 3 stages on nodes of 4 and 2.
        (ParallelDims(dp_replicate=2, pp=3), "[]", nodes(4, 2), Placement([ONE] * 6, [*range(6)])),
        # No two workers fit on a node.
        (ParallelDims(tp=2, pp=2), "[]", nodes(1, 1, 1, 1), Placement([ONE] * 4, [*range(4)])),
        # Room in use counts only where there is no other: two nodes now, or one node later.
        (ParallelDims(pp=2), "[]", nodes(2, 2, CPU=1), Placement([ONE] * 2, [0, 1])),
        (ParallelDims(pp=2), "[]", nodes(2, 2, CPU=2), Placement([TWO], [0, 0])),
        # Stages with other resources: no replica is kept together where no node has both kinds.
        (
            ParallelDims(dp_replicate=2, pp=2),
            UNLIKE,
            BOTH,
            Placement([Counter(BIG) + Counter(SMALL)] * 2, [0, 1] * 2),
        ),
        (ParallelDims(pp=2), UNLIKE, APART, Placement([BIG, SMALL], [0, 1])),
    ],
)
def test_workers_that_communicate_most_are_placed_together(
    dims: ParallelDims, stage_resources: str, cluster_nodes: Any, expected: Placement
) -> None:
    stages = resources_of_stages(config(f"parallel.stage_resources={stage_resources}"), dims, ONE)
    assert placement(dims, stages, cluster_nodes) == expected


@pytest.mark.parametrize(
    ("stage_resources", "message"),
    [
        ("[{CPU: 1}]", "has 1 entries, but there are 2 stages"),
        ("[{CPU: 1}, {CPU: 9}]", r"worker 2 \(stage 1 of 2\) asks for CPU 9, for which no node"),
        ("[{CPU: 1}, {disk: 1, net: 1}]", "asks for CPU 1, disk 1, net 1, for which no node"),
        ("[{GPU: 1}, {CPU: 1}]", "GPUs to some stages and none to others"),
        ("[{CPU: 3}, {CPU: 3}]", "asks for CPU 3, for which no node has room beside the others"),
    ],
)
def test_resources_of_stages_that_cannot_be_met_are_refused(
    stage_resources: str, message: str
) -> None:
    run_config = config(f"parallel.stage_resources={stage_resources}")
    dims = ParallelDims(pp=2, dp_replicate=2)
    cluster_nodes = [
        node("a", "", {"CPU": 4, "GPU": 1, "disk": 1}),
        node("b", "", {"CPU": 4, "GPU": 1, "net": 1}),
    ]
    with pytest.raises(UserError, match=message):
        placement(dims, resources_of_stages(run_config, dims, ONE), cluster_nodes)
    if "no node" in message:  # a node with room may still come, or come back
        stages = resources_of_stages(run_config, dims, ONE)
        everything = dict.fromkeys(("CPU", "disk", "net"), 99.0)
        assert placement(dims, stages, cluster_nodes, returning=True).bundles
        assert placement(dims, stages, cluster_nodes, limits=everything).bundles


def cluster(nodes: int, **resources: float) -> Cluster:
    """A connected cluster of equal nodes, the first of which is the head."""
    head = {"node:__internal_head__": 1.0}
    totals = [resources | head, *[resources] * (nodes - 1)]
    states = tuple(
        NodeState(address="here", kind="", total=total, available={}) for total in totals
    )
    return Cluster(states, shape_of_nodes(states))


EIGHT = cluster(2, GPU=4.0, CPU=16.0)
NONE = cluster(1, CPU=8.0)


@pytest.mark.parametrize(
    ("overrides", "found_cluster", "expected"),
    [
        (["strategy=single"], EIGHT, (1, {"GPU": 1.0})),
        (["strategy=dp"], EIGHT, (1, {"GPU": 4.0})),
        (["strategy=dp", "resources_per_worker.GPU=2"], EIGHT, (1, {"GPU": 2.0})),
        (["strategy=ddp_model_parallel"], EIGHT, (4, {"GPU": 2.0})),
        # No CPUs are asked for beside a GPU, so a worker may run where no CPU is free.
        (["strategy=ddp"], EIGHT, (8, {"GPU": 1.0})),
        (["strategy=dp"], NONE, (1, {"CPU": 1.0})),
        (["strategy=ddp"], NONE, (2, {"CPU": 1.0})),
    ],
)
def test_workers_and_resources_follow_from_the_strategy(
    overrides: list[str], found_cluster: Cluster, expected: tuple[int, dict[str, float]]
) -> None:
    run_config = config(*overrides)
    assert resources_to_ask_for(run_config, found_cluster) == expected
    assert choose(run_config.strategy, expected[0]).dims.world_size == expected[0]


@pytest.mark.parametrize(
    ("found_cluster", "overrides", "expected"),
    [
        (NONE, [], True),
        (NONE, ["workers=8"], True),
        # Another node may come, by hand or by an autoscaler that has no file here.
        (NONE, ["workers=9"], False),
        (NONE, ["cluster.max_workers=16"], False),
        (replace(NONE, folder=Path("/tmp/ray")), ["workers=9"], True),
        (cluster(2, CPU=8.0), [], False),
        (cluster(1, CPU=8.0, GPU=2.0), [], False),
    ],
    ids=["fits", "fills it", "too many", "may grow", "private", "two nodes", "with GPUs"],
)
def test_auto_takes_actors_where_one_machine_without_gpus_is_enough(
    found_cluster: Cluster, overrides: list[str], expected: bool
) -> None:
    run_config = config(*overrides)
    workers, per_worker = resources_to_ask_for(run_config, found_cluster)
    answer = fits_on_one_machine_without_gpus(
        run_config, found_cluster, workers=workers, per_worker=per_worker
    )
    assert answer == expected


def test_a_run_shrinks_or_ends_when_it_has_waited_for_workers_too_long() -> None:
    busy = Diagnosis("bundle 6 of 8 is held", 5, True)
    at_limit = Diagnosis("at its limit", 0, False)
    end = config("train.global_batch_size=12", "cluster.when_pending=end")
    shrink = config("train.global_batch_size=12", "cluster.when_pending=shrink")
    assert workers_after_waiting(shrink, busy, 8) == 4, (
        "the largest divisor of the batch that has room"
    )
    message = r"there is room for 5 of 8 workers after 600 s: bundle 6 of 8"
    with pytest.raises(ClusterError, match=message):
        workers_after_waiting(end, busy, 8)
    at_least_5 = with_values(shrink, {"cluster.min_workers": 5})
    message = r"layout is 4, below cluster.min_workers=5\): bundle 6 of 8"
    with pytest.raises(ClusterError, match=message):
        workers_after_waiting(at_least_5, busy, 8)
    with pytest.raises(ClusterError, match="waiting would not help"):
        workers_after_waiting(end, at_limit, 8)


class SlowGroup:
    """A placement group in an autoscaling cluster, and the clock of who waits for it.

    Args:
        monkeypatch: Puts both in place.
        placed_at: When it has its places.
        holder: Why it cannot be placed, at a time; None if there seems to be room.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        placed_at: float = math.inf,
        holder: Callable[[float], Diagnosis | None] = lambda now: None,
    ) -> None:
        self.now = 1000.0
        self.placed_at = 1000.0 + placed_at
        busy_nodes = [node("a", "", {"CPU": 4.0}, CPU=1.0), node("b", "", {"CPU": 4.0})]
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(ray_launch, "time", clock)
        monkeypatch.setattr(ray_launch, "reserve", lambda demand, excluded: self)
        monkeypatch.setattr(ray_launch, "remove_placement_group", lambda group: None)
        monkeypatch.setattr(ray_launch, "autoscaler_now", AutoscalerReport)
        monkeypatch.setattr(room, "living_nodes", lambda excluded: busy_nodes)
        monkeypatch.setattr(ray_launch, "why_pending", lambda *_, **__: holder(self.now - 1000.0))

    def wait(self, seconds: float) -> bool:
        """Waits as Ray does, and gives up the test after an hour."""
        self.now += seconds
        assert self.now < 5000, "the run waits for ever"
        return self.now >= self.placed_at

    def launch(self, *overrides: str) -> tuple[RayLaunch, Mock]:
        """The workers of a run that waits for it, and the run's console."""
        console = Mock()
        growing_cluster = replace(NONE, shape=SHAPE)
        run_config = config("workers=4", "launcher=actors", *overrides)
        return RayLaunch(growing_cluster, run_config, console), console


def test_a_run_does_not_wait_for_ever_for_places_for_which_there_seems_to_be_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = SlowGroup(monkeypatch)
    launch, console = group.launch("cluster.wait_seconds=60")
    asked = re.escape("4 × (CPU 1) are asked for, and CPU 7 are free, but Ray has not placed them")
    waited = re.escape("the workers have no places after 60 s (cluster.wait_seconds)")
    with pytest.raises(ClusterError, match=f"{waited}: {asked}"):
        launch.wait_for_room()
    assert 60 < group.now - 1000 < 65
    (remark,) = [call.args[0] for call in console.say.call_args_list]
    assert re.match(f"waiting for resources: {asked}", remark)
    (repeated,) = console.waits_for.call_args_list
    assert re.match(r"resources \(at most 60 s, cluster.wait_seconds\): 4 × ", repeated.args[0])
    assert repeated.kwargs == {"since": 1000.0}


def test_a_run_says_nothing_while_ray_places_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that takes a moment more than there is to wait, or after another job has ended."""
    obstacle = Diagnosis("3 of 4 CPU are held", 1, True)
    launch, console = SlowGroup(monkeypatch, placed_at=4).launch("cluster.wait_seconds=0")
    assert launch.wait_for_room() == 4 and not console.say.called
    group = SlowGroup(monkeypatch, placed_at=63, holder=lambda now: obstacle if now < 60 else None)
    launch, console = group.launch("cluster.wait_seconds=60")
    assert launch.wait_for_room() == 4
    console.say.assert_called_once_with("waiting for resources: 3 of 4 CPU are held")


def test_gpus_left_idle_are_named() -> None:
    """Idle GPUs of a cluster; those of this machine: test_bad_input.py."""
    prepared = Prepared(config=config(), layout=choose("ddp", 8), steps=1, samples=1)
    unused = with_idle_gpus(prepared, workers=8, gpus_per_worker=0, gpus=8, pool="the cluster")
    assert "computes on CPUs, but the cluster has 8 GPUs" in unused.notes[0]


def test_workers_share_the_cores_of_a_node() -> None:
    assert threads.share(96, 8, 0.5) == 6
    assert threads.share(4, 8, 1) == 1
    assert threads.share(8, 1, 2) == 8


Env = dict[str, str]
SET = {"OMP_NUM_THREADS": "1"}
THREE = {"OMP_NUM_THREADS": "3"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("gpus", "variables", "parent_variables", "threads_taken"),
    [
        # In Ray, where the raylet starts the worker.
        (1.0, {}, {}, 2),
        (2.0, {}, {}, 4),
        (0.0, {}, {}, 1),  # as many threads as CPUs
        (1.0, THREE, {}, 3),
        (1.0, {}, SET, 1),  # set where Ray was started
        # One of four processes on a node. torchrun sets one thread; under Slurm the user has.
        (None, SET | TORCHRUN, {}, 2),
        (None, SET | TORCHRUN, SET, 1),
        (None, SET, {}, 1),
        (None, {"SLURM_CPUS_PER_TASK": "4"}, {}, 4),
    ],
)
def test_a_worker_takes_its_share_of_cores_unless_the_user_has_set_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: float | None,
    variables: Env,
    parent_variables: Env,
    threads_taken: int,
) -> None:
    """On a node of 8 cores and 4 GPUs.

    Args:
        gpus: The GPUs of a worker in Ray; None under torchrun or Slurm.
        variables: The environment that the user asks for.
        parent_variables: The environment of the process that starts the worker.
        threads_taken: The expected number of threads.
    """
    for module in (ray_workers, threads):
        monkeypatch.setattr(module, "usable_cores", lambda: 8)
    context = {
        "get_node_id.return_value": "b",
        "get_assigned_resources.return_value": {"GPU": gpus} if gpus else {},
    }
    runtime_context = Mock(runtime_env={"env_vars": variables}, **context)
    monkeypatch.setattr(ray, "get_runtime_context", Mock(return_value=runtime_context))
    nodes = [
        {"NodeID": "a", "Resources": {"GPU": 1.0}},
        {"NodeID": "b", "Resources": {"GPU": 4.0}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    parent_environment = {"A": "1", **parent_variables}
    environ = "".join(f"{name}={value}\0" for name, value in parent_environment.items())
    (tmp_path / "environ").write_text(environ)
    monkeypatch.setattr(threads, "Path", {"/proc/77/environ": tmp_path / "environ"}.__getitem__)
    monkeypatch.setattr(os, "getppid", lambda: 77)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    set_by_ray = SET if gpus is not None else {}
    for name, value in (set_by_ray | variables | {"RAY_RAYLET_PID": "77"}).items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if gpus is None:
            threads.take_share_of_node(4)
        else:
            ray_workers.work_in("/nowhere")
        assert os.environ["OMP_NUM_THREADS"] == str(threads_taken)
        assert torch.get_num_threads() == threads_taken
    finally:
        torch.set_num_threads(before)


def test_defaults_are_set_and_do_not_replace_the_users_variables() -> None:
    user_variables = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
    }
    environ = dict(user_variables)
    set_defaults(environ)
    assert environ == user_variables | {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    }
    assert shared_variables(environ | SET | {"HOME": "/"}) == environ | SET
    in_job = SET | {"RAY_RAYLET_PID": "7"}
    assert shared_variables(in_job) == {}, "Ray sets it for a job's driver, which has no CPUs"


def test_every_launcher_sets_defaults_before_its_first_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers of a running cluster have them too: test_launchers.py."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    values = list[str | None]()
    for function in ("_under_torchrun", "_in_a_run"):
        monkeypatch.setattr(train, function, lambda *_, **__: values.append(os.environ.pop(name)))
    for launcher in ("torchrun", "local", "ray"):
        train.train(config(f"launcher={launcher}", "run.name=x"), Mock())
    assert values == ["2"] * 3


@pytest.mark.parametrize("error", [ProcessLookupError, PermissionError])
def test_a_worker_that_is_gone_already_is_not_killed_again(
    error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a process of another user that has got its process ID."""
    kill = Mock(side_effect=error)
    monkeypatch.setattr(os, "kill", kill)
    kill_process(12345)
    kill.assert_called_once_with(12345, signal.SIGKILL)


class EndsWhileTheQueueIsRead(RayWorkers):
    """One rank, which sends its exception and ends after the queue was read, before all else."""

    def __init__(self) -> None:
        super().__init__(Mock())
        self.queue.drain = self.drain  # type: ignore[method-assign]
        self.sent: list[bytes] = []
        job = Mock()
        job.layout.dims.world_size = 1
        self.begin_attempt(job)

    def drain(self, stop: bool) -> Any:
        """What was sent until now; then the rank fails."""
        report = SimpleNamespace(beats={}, silent=None, events=self.sent)
        line = SourceLine(file="mine.py", line=7, function="loss", text="return labels[0]")
        self.sent = [cloudpickle.dumps([WorkerFailed(rank=0, error=IndexError("0"), line=line)])]
        return report

    def wait(self) -> None:
        """The test does not wait."""

    def lost(self) -> Failures:
        """Ray has an exception of its own for the call, which has no traceback."""
        return {0: IndexError("0")} if self.sent else {}

    def _look_for_places(self) -> bool:
        return True


def test_a_rank_that_ends_while_the_queue_is_read_is_told_with_the_line_that_it_sent() -> None:
    workers = EndsWhileTheQueueIsRead()
    while (ended := workers.poll(stop=False).ended) is None:
        pass
    assert str(own_line(ended[0])).endswith("return labels[0]")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_allocator_reads_its_defaults_also_once_torch_is_imported() -> None:
    import subprocess  # not at the top, since the other tests start no process and are `pure`

    code = "import torch; from cluster.environment import set_defaults; set_defaults();"
    code += "torch.zeros(1, device='cuda');"
    code += "print([segment['is_expandable'] for segment in torch.cuda.memory_snapshot()])"
    env = {name: value for name, value in environment().items() if "ALLOC_CONF" not in name}
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env) == b"[True]\n"


@pytest.mark.parametrize("released", [True, False])
def test_a_run_that_does_not_end_by_itself_when_ray_is_gone_is_ended(
    released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort = Mock()
    driver = Mock()
    monkeypatch.setattr("app.launchers.ray_launch.abort", abort)
    monkeypatch.setattr("app.launchers.ray_launch.END_SECONDS", 0.0)
    driver.fail = lambda reason: setattr(driver, "failed", reason)
    driver.run.lease.released = released
    ray_is_gone(driver, "Ray's head is gone", private=False)
    assert driver.failed.endswith("run the same command again to continue")
    assert abort.called != released
    if abort.called:
        abort.assert_called_with(1, f"trireme: {driver.failed}", say=driver.console.error)


SECOND_NODE = {"SLURM_TASKS_PER_NODE": "16", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        ({**SECOND_NODE, "SLURM_STEP_TASKS_PER_NODE": "5,6"}, 6),
        ({}, 11),
    ],
)
def test_slurm_tells_how_many_processes_a_node_has(
    variables: dict[str, str], expected: int
) -> None:
    process = {"SLURM_PROCID": "7", "SLURM_NTASKS": "11", "SLURM_LOCALID": "1"}
    read = Environment.read(process | variables)
    assert read == Environment(rank=7, world_size=11, local_rank=1, local_world_size=expected)


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1")]
)
def test_a_store_for_one_machine_is_not_reachable_from_another(host: str, address: str) -> None:
    store = open_store(host)
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == store.port
    ]
    assert listening == [address]
    TCPStore(host, store.port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(("host", "expected"), [("here", [7]), ("there", [])])
def test_a_rank_ends_a_stopped_driver_of_its_host_of_which_it_has_no_heartbeat(
    host: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a driver that is stopped in the first second: other ranks find no heartbeat of it."""
    killed: list[int] = []
    sentences: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr("app.launchers.torchrun.kill_process", killed.append)
    monkeypatch.setattr("app.launchers.torchrun.SILENT_SECONDS", 0.0)
    monkeypatch.setattr("app.launchers.torchrun.SILENT", 0.0)
    monkeypatch.setattr("app.launchers.torchrun._heartbeat_store", lambda job, ranks: HashStore())
    ranks = Mock(
        place=Mock(rank=1),
        info=WorkerInfo(rank=1, pid=8, ip="here", node="", oom_kills=0),
        driver_info=WorkerInfo(rank=0, pid=7, ip=host, node="", oom_kills=0),
    )
    heartbeat = StoreHeartbeat(
        Mock(config=config()),
        ranks,
        Heartbeat(),
        on_lost=sentences.put,
    )
    assert "worker 0 is stopped or cannot be reached" in sentences.get(timeout=60)
    heartbeat.close()
    assert killed == expected


def worker_of(rank: int) -> Mock:
    """A worker's actor, whose call is known by the rank."""
    actor = Mock(rank=rank)
    actor.run.remote.return_value = f"call of {rank}"
    return actor


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        (ParallelDims(dp_replicate=2), "started ahead"),
        (ParallelDims(pp=2), "started ahead"),
        (ParallelDims(dp_replicate=4), "started now"),
        (None, "ended"),
    ],
)
def test_workers_that_were_started_ahead_train_where_they_fit(
    monkeypatch: pytest.MonkeyPatch, dims: ParallelDims | None, expected: str
) -> None:
    """Two of them, on a machine of four CPUs.

    Args:
        monkeypatch: Replaces Ray.
        dims: Of the layout; None if the run is refused.
        expected: What becomes of them.
    """
    started: list[Mock] = []
    ended: list[Mock] = []
    groups: list[list[dict[str, float]]] = []
    removed: list[object] = []

    def start_actor(resources: dict[str, float], group: object, bundle: int) -> Mock:
        assert resources == ONE
        started.append(worker_of(len(started)))
        return started[-1]

    def reserve(bundles: list[dict[str, float]], excluded: list[str]) -> str:
        groups.append(bundles)
        return f"group {len(groups)}"

    monkeypatch.setattr(actors, "_start_actor", start_actor)
    monkeypatch.setattr(actors, "reserve", reserve)
    monkeypatch.setattr(actors, "remove_placement_group", removed.append)
    monkeypatch.setattr(actors, "living_nodes", lambda excluded: nodes(4))
    monkeypatch.setattr(actors, "_is_intact", lambda group, nodes: True)
    monkeypatch.setattr(actors, "queue_for", lambda cluster: Mock(actor=None))
    monkeypatch.setattr(ray, "kill", ended.append)
    monkeypatch.setattr(ray, "put", lambda job: job)
    workers = ActorWorkers(ONE, NONE)
    workers.start_ahead(2, [])
    ahead = [*started]
    assert groups == [[ONE, ONE]] and all(actor.import_ahead.remote.called for actor in ahead)
    if dims is not None:
        layout = Mock(dims=dims)
        workers.start(Mock(layout=layout, config=config(), excluded_nodes=[], attempt="a"))
        assert len(workers.calls) == dims.world_size
    if expected == "started ahead":
        assert workers.actors == ahead and started == ahead
        assert not ended and len(groups) == 1 and not removed
    else:
        workers.close()
        assert ended[:2] == ahead and removed[0] == "group 1"
    if expected == "started now":
        assert len(started) == 6 and ended == started
