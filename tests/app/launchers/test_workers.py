"""What the workers of a run get: how many there are and with what, where they are placed and when there is less; CPU
threads beside GPUs, of which none is needed here; and their environment."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray
import torch

from app.config.io import with_values
from app.errors import UserError
from app.launchers import ray_workers, threads, train
from app.launchers.actors import Placement, placement, resources_of_stages
from app.launchers.ray_launch import ray_is_gone, resources_to_ask_for, when_over
from app.launchers.torchrun import Environment
from app.launchers.workers import kill_process
from app.run.prepare import Prepared, with_idle_gpus
from cluster import ClusterError
from cluster.connect import Cluster
from cluster.environment import set_defaults, shared_variables
from cluster.pending import Diagnosis
from cluster.shape import NodeState, shape_of_nodes
from strategies.layout import ParallelDims
from strategies.parallelize import choose
from tests.chain import config
from tests.cluster.test_pending import node
from tests.running import ROOT, environment

pytestmark = pytest.mark.pure

ONE, TWO = {"CPU": 1.0}, {"CPU": 2.0}


def nodes(*cpus: float, **used: float) -> list[NodeState]:
    return [node("", "", {"CPU": count}, **used) for count in cpus]


UNLIKE = "[{big: 1}, {small: 2, CPU: 0.5}]"
BIG, SMALL = {"CPU": 1.0, "big": 1.0}, {"CPU": 0.5, "small": 2.0}
BOTH, APART = ([node("", "", own | {"CPU": 8.0}) for own in owns] for owns in ([BIG | SMALL] * 2, [BIG, SMALL]))


@pytest.mark.parametrize(
    ("dims", "asked", "found", "expected"),
    [
        # a copy fits on a node: its stages together, the copies apart
        (ParallelDims(dp_replicate=2, pp=2), "[]", nodes(2, 2), Placement([TWO] * 2, [0, 1, 0, 1])),
        # it does not: a stage with its shards together
        (ParallelDims(dp_shard=2, pp=2), "[]", nodes(2, 2), Placement([TWO] * 2, [0, 0, 1, 1])),
        # one would, but not both: stages 3 + 3 on nodes of 4 and 2
        (ParallelDims(dp_replicate=2, pp=3), "[]", nodes(4, 2), Placement([ONE] * 6, [*range(6)])),
        # not even that
        (ParallelDims(tp=2, pp=2), "[]", nodes(1, 1, 1, 1), Placement([ONE] * 4, [*range(4)])),
        # room that others hold just now counts only if there is no other: now, on two nodes; later, on one
        (ParallelDims(pp=2), "[]", nodes(2, 2, CPU=1), Placement([ONE] * 2, [0, 1])),
        (ParallelDims(pp=2), "[]", nodes(2, 2, CPU=2), Placement([TWO], [0, 0])),
        # unlike stages; a whole copy would wait for ever where no node has both kinds
        (ParallelDims(dp_replicate=2, pp=2), UNLIKE, BOTH, Placement([Counter(BIG) + Counter(SMALL)] * 2, [0, 1] * 2)),
        (ParallelDims(pp=2), UNLIKE, APART, Placement([BIG, SMALL], [0, 1])),
    ],
)
def test_what_talks_most_is_placed_together(dims: ParallelDims, asked: str, found: Any, expected: Placement) -> None:
    stages = resources_of_stages(config(f"parallel.stage_resources={asked}"), dims, ONE)
    assert placement(dims, stages, found) == expected


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("[{CPU: 1}]", "has 1 entries, but there are 2 stages"),
        ("[{CPU: 1}, {CPU: 9}]", r"worker 2 \(stage 1 of 2\) asks for CPU 9, for which no node"),
        ("[{CPU: 1}, {disk: 1, net: 1}]", "asks for CPU 1, disk 1, net 1, for which no node"),
        ("[{GPU: 1}, {CPU: 1}]", "GPUs to some stages and none to others"),
        ("[{CPU: 3}, {CPU: 3}]", "asks for CPU 3, for which no node has room beside the others"),
    ],
)
def test_resources_that_cannot_be_given(asked: str, said: str) -> None:
    wanted, dims = config(f"parallel.stage_resources={asked}"), ParallelDims(pp=2, dp_replicate=2)
    there = [node("a", "", {"CPU": 4, "GPU": 1, "disk": 1}), node("b", "", {"CPU": 4, "GPU": 1, "net": 1})]
    with pytest.raises(UserError, match=said):
        placement(dims, resources_of_stages(wanted, dims, ONE), there)
    if "no node" in said:  # but one may yet come, or come back
        stages, everything = resources_of_stages(wanted, dims, ONE), dict.fromkeys(("CPU", "disk", "net"), 99.0)
        assert placement(dims, stages, there, returning=True).bundles
        assert placement(dims, stages, there, limits=everything).bundles


def cluster(nodes: int, **each: float) -> Cluster:
    head = {"node:__internal_head__": 1.0}
    totals = [each | head, *[each] * (nodes - 1)]
    found = tuple(NodeState(address="here", kind="", total=total, available={}) for total in totals)
    return Cluster(found, shape_of_nodes(found))


EIGHT, NONE = cluster(2, GPU=4.0, CPU=16.0), cluster(1, CPU=8.0)


@pytest.mark.parametrize(
    ("values", "found", "expected"),
    [
        (["strategy=single"], EIGHT, (1, {"GPU": 1.0})),
        (["strategy=dp"], EIGHT, (1, {"GPU": 4.0})),
        (["strategy=dp", "resources_per_worker.GPU=2"], EIGHT, (1, {"GPU": 2.0})),
        (["strategy=ddp_model_parallel"], EIGHT, (4, {"GPU": 2.0})),
        (["strategy=ddp"], EIGHT, (8, {"GPU": 1.0})),  # without CPUs, so that it is placed where none are free
        (["strategy=dp"], NONE, (1, {"CPU": 1.0})),
        (["strategy=ddp"], NONE, (2, {"CPU": 1.0})),
    ],
)
def test_the_one_key_is_enough(values: list[str], found: Cluster, expected: tuple[int, dict[str, float]]) -> None:
    asked = config(*values)
    assert resources_to_ask_for(asked, found) == expected
    assert choose(asked.strategy, expected[0]).dims.world_size == expected[0]


def test_at_the_deadline_it_shrinks_or_ends() -> None:
    held, limit = Diagnosis("bundle 6 of 8 is held", 5, True), Diagnosis("at its limit", 0, False)
    end, shrink = (config("train.global_batch_size=12", f"cluster.when_pending={key}") for key in ("end", "shrink"))
    assert when_over(shrink, held, 8) == 4, "the most that the batch divides by"
    with pytest.raises(ClusterError, match=r"there is room for 5 of 8 workers after 600 s: bundle 6 of 8"):
        when_over(end, held, 8)
    with pytest.raises(ClusterError, match=r"layout is 4, below cluster.min_workers=5\): bundle 6 of 8"):
        when_over(with_values(shrink, {"cluster.min_workers": 5}), held, 8)
    with pytest.raises(ClusterError, match="waiting would not help"):
        when_over(end, limit, 8)


def test_gpus_left_idle_are_named() -> None:
    """Those of this machine: test_bad_input.py."""
    prepared = Prepared(config=config(), layout=choose("ddp", 8), steps=1, samples=1)
    unused = with_idle_gpus(prepared, workers=8, gpus_per_worker=0, gpus=8, pool="the cluster")
    assert "computes on CPUs, but the cluster has 8 GPUs" in unused.notes[0]


def test_a_share_of_the_cores() -> None:
    assert [threads.share(*each) for each in ((96, 8, 0.5), (4, 8, 1), (8, 1, 2))] == [6, 1, 8]


Env = dict[str, str]
SET, THREE, TORCHRUN = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "3"}, {"TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("gpus", "own", "starter", "taken"),
    [
        # in Ray, started by its raylet
        (1.0, {}, {}, 2),
        (2.0, {}, {}, 4),
        (0.0, {}, {}, 1),  # it has the threads of its CPUs
        (1.0, THREE, {}, 3),
        (1.0, {}, SET, 1),  # where Ray was started
        # one of four processes on a node: torchrun gives each one thread, under Slurm it is the user's
        (None, SET | TORCHRUN, {}, 2),
        (None, SET | TORCHRUN, SET, 1),
        (None, SET, {}, 1),
        (None, {"SLURM_CPUS_PER_TASK": "4"}, {}, 4),
    ],
)
def test_a_worker_takes_its_share_unless_the_user_has_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: float | None, own: Env, starter: Env, taken: int
) -> None:
    """On a node of 8 cores and 4 GPUs. gpus: that a worker has in Ray. own, starter: the environment that is asked for,
    and that of the process which starts it, as Linux shows it."""
    for module in (ray_workers, threads):
        monkeypatch.setattr(module, "usable_cores", lambda: 8)
    has = {"get_node_id.return_value": "b", "get_assigned_resources.return_value": {"GPU": gpus} if gpus else {}}
    monkeypatch.setattr(ray, "get_runtime_context", Mock(return_value=Mock(runtime_env={"env_vars": own}, **has)))
    nodes = [{"NodeID": name, "Resources": {"GPU": gpus}} for name, gpus in (("a", 1.0), ("b", 4.0))]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    (tmp_path / "environ").write_text("".join(f"{name}={value}\0" for name, value in {"A": "1", **starter}.items()))
    monkeypatch.setattr(threads, "Path", {"/proc/77/environ": tmp_path / "environ"}.__getitem__)
    monkeypatch.setattr(os, "getppid", lambda: 77)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in ((SET if gpus is not None else {}) | own | {"RAY_RAYLET_PID": "77"}).items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        threads.take_share_of_node(4) if gpus is None else ray_workers.work_in("/nowhere")
        assert (os.environ["OMP_NUM_THREADS"], torch.get_num_threads()) == (str(taken), taken)
    finally:
        torch.set_num_threads(before)


def test_what_the_user_has_set_stays_and_the_rest_is_set() -> None:
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    set_defaults(environ := dict(own))
    assert environ == own | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}
    assert shared_variables(environ | SET | {"HOME": "/"}) == environ | SET
    assert shared_variables(SET | {"RAY_RAYLET_PID": "7"}) == {}, (
        "Ray has set it for the job's own process, which has no CPUs"
    )


def test_every_launcher_sets_it_before_its_first_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a cluster that runs have it too: test_launchers.py."""
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", list[str | None]()
    for function in ("_under_torchrun", "_in_a_run"):
        monkeypatch.setattr(train, function, lambda *_, **__: seen.append(os.environ.pop(name)))
    for launcher in ("torchrun", "local", "ray"):
        train.train(config(f"launcher={launcher}", "run.name=x"), Mock())
    assert seen == ["2"] * 3


@pytest.mark.parametrize("error", [ProcessLookupError, PermissionError])
def test_a_worker_that_is_gone_already_is_not_killed_again(
    error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a process of another user has got its number."""
    kill = Mock(side_effect=error)
    monkeypatch.setattr(os, "kill", kill)
    kill_process(12345)
    kill.assert_called_once_with(12345, signal.SIGKILL)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_allocator_takes_it_also_once_torch_is_imported() -> None:
    import subprocess  # not above: what starts no process is `pure`

    code = "import torch; from cluster.environment import set_defaults; set_defaults(); torch.zeros(1, device='cuda');"
    code += "print([segment['is_expandable'] for segment in torch.cuda.memory_snapshot()])"
    env = {name: value for name, value in environment().items() if "ALLOC_CONF" not in name}
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env) == b"[True]\n"


@pytest.mark.parametrize("released", [True, False])
def test_a_run_that_does_not_end_by_itself_when_ray_is_gone_is_ended(
    released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort, driver = Mock(), Mock()
    monkeypatch.setattr("app.launchers.ray_launch.abort", abort)
    monkeypatch.setattr("app.launchers.ray_launch.END_SECONDS", 0.0)
    driver.fail = lambda reason: setattr(driver, "failed", reason)
    driver.run.lease.released = released
    ray_is_gone(driver, "Ray's head is gone", private=False)
    assert driver.failed.endswith("run the same command again to continue")
    assert abort.called != released
    if abort.called:
        abort.assert_called_with(1, f"trireme: {driver.failed}", say=driver.console.error)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        ({"SLURM_TASKS_PER_NODE": "16", "SLURM_STEP_TASKS_PER_NODE": "5,6", "SLURM_NODEID": "1"}, 6),
        ({}, 11),
    ],
)
def test_slurm_says_how_many_processes_a_node_has(written: dict[str, str], expected: int) -> None:
    here = Environment.read({"SLURM_PROCID": "7", "SLURM_NTASKS": "11", "SLURM_LOCALID": "1"} | written)
    assert here == Environment(rank=7, world_size=11, local_rank=1, local_world_size=expected)
