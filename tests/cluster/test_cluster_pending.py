"""Why is it pending, what a run costs, and what is decided when resources do not come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config import ClusterConfig, Config, RunConfig, TrackingConfig, TrainConfig
from app.console import Console
from app.errors import Interrupted, UserError
from app.launchers.room import when_over
from app.run.cost import Meter, Rate, check_budget, must_stop, rate_of
from app.run.driver import Driver
from app.run.manifest import Run
from app.storage import Storage
from app.tracking.settings import resolve_tracking
from cluster.connect import limits_of
from cluster.errors import ClusterError
from cluster.pending import Diagnosis, Growth, Holder, NodeState, check_ever, diagnose
from cluster.shape import ClusterShape, NodeType, read_cluster
from tests.running import POINTS, ROOT, trireme

BIG = NodeType("big", 8, "h100-80gb", 96.0, 0, None, None, 55.0, False, 0, 2)
SMALL = NodeType("small", 1, "l4", 8.0, 0, None, None, 1.0, False, 0, 4)
HEAD = NodeType("head", 0, "", 4.0, 0, None, None, 0.2, False, 1, 1)
SHAPE = ClusterShape("c", "aws", HEAD, (BIG, SMALL), "my.yaml", 5)


def node(name: str, kind: str, total: dict[str, float], **used: float) -> NodeState:
    return NodeState(name, kind, total, {key: amount - used.get(key, 0.0) for key, amount in total.items()})


HEAD_NODE = node("10.0.0.1", "head", {"CPU": 4.0})
FULL = node("10.0.0.2", "big", {"CPU": 96.0, "GPU": 8.0}, GPU=8)
FREE = node("10.0.0.3", "big", {"CPU": 96.0, "GPU": 8.0})
HALF = node("10.0.0.4", "big", {"CPU": 96.0, "GPU": 8.0}, GPU=5)
OTHER = Holder("job 02 (trireme train b.yaml)", {"GPU": 8.0})


def why(demand: list[dict[str, float]], *nodes: NodeState, **more: Any) -> Diagnosis:
    found = diagnose(demand, nodes, **more)
    assert found is not None
    return found


def test_what_fits_is_not_explained() -> None:
    assert diagnose([{"GPU": 1.0}] * 8, [HEAD_NODE, FREE]) is None
    assert diagnose([{"GPU": 3.0}, {"GPU": 8.0}], [FREE, HALF]) is None, "the fuller node takes the smaller bundle"


def test_held_by_another_job() -> None:
    found = why([{"GPU": 4.0}], HEAD_NODE, FULL, holders=[OTHER])
    assert "bundle 1 of 1 (GPU 4) cannot be placed" in found.sentence and found.ever
    assert "8 of 8 GPU are held by job 02 (trireme train b.yaml)" in found.sentence and found.placed == 0


def test_which_bundle_and_how_many_find_room() -> None:
    found = why([{"GPU": 2.0}] * 3, HEAD_NODE, HALF)
    assert found.placed == 1 and "bundle 2 of 3" in found.sentence


def test_no_node_type_has_it() -> None:
    found = why([{"GPU": 16.0}], HEAD_NODE, FREE, shape=SHAPE)
    assert not found.ever and "no node type of my.yaml has it, the most is GPU 8" in found.sentence
    found = why([{"TPU": 4.0}], HEAD_NODE, FREE)
    assert not found.ever and "no node has it, the most is TPU 0" in found.sentence


def test_at_the_limit_of_the_file() -> None:
    found = why([{"GPU": 8.0}], HEAD_NODE, FULL, replace(FULL, name="x"), shape=SHAPE, growth=Growth(True))
    assert found.kinds == ("big",)
    assert "big is at its limit of 2 nodes (my.yaml)" in found.sentence
    assert "16 of 16 GPU are held" in found.sentence and found.ever, "who holds them may end"
    smalls = [node(f"s{i}", "small", {"GPU": 1.0, "CPU": 8.0}) for i in range(5)]
    found = why([{"GPU": 8.0}], HEAD_NODE, *smalls, shape=SHAPE, growth=Growth(True))
    assert "at its limit of 5 workers (max_workers in my.yaml)" in found.sentence and not found.ever


def test_a_node_is_starting_or_the_cloud_has_none() -> None:
    growth = Growth(True, starting=("small 10.0.0.8: waiting-for-ssh", "big 10.0.0.9: setting-up"))
    found = why([{"GPU": 8.0}], HEAD_NODE, shape=SHAPE, growth=growth)
    assert "still starting: big 10.0.0.9: setting-up" in found.sentence and found.ever
    growth = Growth(True, refusals=("big: InsufficientInstanceCapacity: no p5.48xlarge in us-east-1a",))
    found = why([{"GPU": 8.0}], HEAD_NODE, shape=SHAPE, growth=growth)
    assert "InsufficientInstanceCapacity" in found.sentence and found.ever
    found = why([{"GPU": 8.0}], HEAD_NODE, shape=SHAPE, growth=Growth(True))
    assert "it could be on big" in found.sentence and "has not asked for one yet" in found.sentence


def test_free_but_scattered() -> None:
    one = node("a", "", {"GPU": 4.0, "CPU": 1.0}, GPU=0, CPU=1)
    found = why([{"GPU": 2.0, "CPU": 1.0}], one)
    assert "1 of 1 CPU are held" in found.sentence


@pytest.mark.parametrize(
    ("workers", "per_worker", "room"),
    [("21", {"GPU": 1.0}, 19), ("3", {"GPU": 8.0}, 2), ("400", {"CPU": 1.0}, 220)],
)
def test_a_job_larger_than_the_cluster_can_ever_be(workers: str, per_worker: dict[str, float], room: int) -> None:
    with pytest.raises(ClusterError, match=f"room for {room}"):
        check_ever(SHAPE, workers, per_worker)
    check_ever(SHAPE, str(room), per_worker)


def test_a_worker_larger_than_any_machine() -> None:
    with pytest.raises(ClusterError, match=r"can ever hold a worker of GPU 9: the largest has 8 GPUs"):
        check_ever(SHAPE, "1", {"GPU": 9.0})


def config(**more: Any) -> Config:
    return Config(train=TrainConfig(global_batch_size=12), cluster=ClusterConfig(**more))


def test_at_the_deadline_it_waits_shrinks_or_ends() -> None:
    held = Diagnosis("bundle 6 of 8 is held", 5, True)
    with pytest.raises(ClusterError, match=r"there is no room for 8 workers after 600 s: bundle 6 of 8"):
        when_over(config(), held, 8)
    assert when_over(config(when_pending="wait"), held, 8) == 0
    assert when_over(config(when_pending="shrink"), held, 8) == 4, "the most that the batch divides by"
    with pytest.raises(ClusterError, match="min_workers=5"):
        when_over(config(when_pending="shrink", min_workers=5), held, 8)
    never = Diagnosis("at its limit", 0, False)
    with pytest.raises(ClusterError, match="waiting would not help"):
        when_over(config(when_pending="wait"), never, 8)


# --- cost -----------------------------------------------------------------------------------------------------------


def test_the_rate_is_the_share_of_the_nodes() -> None:
    head = {"CPU": 4.0, "node:__internal_head__": 1.0}
    nodes = [("head", head), ("big", {"CPU": 96.0, "GPU": 8.0}), ("small", {"GPU": 1.0})]
    found = rate_of(4, {"GPU": 1.0}, nodes, SHAPE)
    assert found and found.dollars_per_hour == pytest.approx(4 * 55 / 8) and found.source == "my.yaml"
    found = rate_of(9, {"GPU": 1.0}, nodes, SHAPE)
    assert found and found.dollars_per_hour == pytest.approx(56.0)
    listed = rate_of(8, {"GPU": 1.0}, [("big", {"GPU": 8.0, "accelerator_type:H100": 1.0})], None)
    assert listed and 10 < listed.dollars_per_hour < 200 and "list price" in listed.source
    assert rate_of(8, {"GPU": 1.0}, nodes[1:2], None) is None, "the price is not known"
    with pytest.raises(UserError, match=r"cluster\.file"):
        check_budget(5.0, None)
    check_budget(None, None)


def test_a_budget_that_nobody_would_count_is_refused(tmp_path: Path) -> None:
    ended = trireme(
        "train", *POINTS, "run.name=x", "train.steps=2", "launcher=local", "budget=1", f"run.storage={tmp_path}"
    )
    assert ended.code == 2 and "costs are not counted with launcher=local" in ended.err
    ended = trireme("train", *POINTS, "run.name=x", "train.steps=2", "budget=-1", f"run.storage={tmp_path}")
    assert ended.code == 2 and "budget is -1" in ended.err


def test_a_budget_is_stopped_before_it_is_overspent() -> None:
    assert not must_stop(9.0, 60.0, None)
    assert not must_stop(8.9, 60.0, 10.0) and must_stop(9.1, 60.0, 10.0), "a minute at $60 an hour is kept for the end"
    assert must_stop(0.0095, 60.0, 0.01) and not must_stop(0.0, 60.0, 0.01), "but never more than a tenth"


def test_the_meter_goes_on_over_starts_and_knows_what_was_wasted(tmp_path: Path) -> None:
    now = [0.0]
    storage = Storage(str(tmp_path))
    meter = Meter(Rate(3600.0, ""), 100.0, storage, lambda: now[0])  # a dollar a second
    for seconds, stepping, started in ((10, False, False), (20, True, True), (5, False, True)):
        now[0] += seconds
        assert not meter.look(stepping=stepping, started=started)
    assert (meter.spent.total, meter.spent.start, meter.spent.restarts) == (35.0, 10.0, 5.0)
    assert meter.metrics(70)["cost/dollars_per_million_samples"] == pytest.approx(5e5)
    meter.save()
    later = Meter(Rate(3600.0, ""), 100.0, storage, lambda: now[0])
    assert later.before == 35.0
    now[0] += 54
    assert not later.look(stepping=True, started=True)
    now[0] += 2
    assert later.look(stepping=True, started=True) and not later.look(stepping=True, started=True), "said once"


def test_workers_are_ended_at_once_where_nothing_would_be_lost(tmp_path: Path) -> None:
    made = Config(run=RunConfig(name="x", storage=str(tmp_path)), tracking=TrackingConfig(enabled=False))
    driver = Driver(Run(made), made, Console(quiet=True), resolve_tracking(made.tracking, str(tmp_path)))
    driver.check_start()
    driver.stopping = 1
    with pytest.raises(Interrupted, match=r"before training began$"):
        driver.check_start()
    driver.first_step_at, driver.progressed = 1.0, True
    driver.check_start()  # they hear of it themselves, and save
    driver.lost()
    with pytest.raises(Interrupted, match="before training began again"):
        driver.check_start()


@pytest.mark.slow
def test_a_run_stops_with_a_checkpoint_when_its_budget_is_spent(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    file = priced(tmp_path)
    run = ["train", *POINTS, "train.steps=100000", "run.name=dear", f"run.storage={tmp_path}", "workers=2"]
    ended = trireme(*run, f"cluster.file={file}", "budget=25", env=ray_environment, timeout=300)
    assert ended.code == 130, ended.out + ended.err
    assert "of a budget of $25.00: saving a checkpoint and stopping" in ended.out
    from tests.running import committed, mlflow_run

    assert committed(tmp_path / "dear"), "its checkpoint is there"
    metrics = mlflow_run(tmp_path, "dear").data.metrics
    assert 22 < metrics["cost/dollars"] <= 25 and 0 < metrics["cost/wasted_dollars"] < metrics["cost/dollars"]
    again = trireme(*run, f"cluster.file={file}", "budget=25", env=ray_environment, timeout=300)
    assert again.code == 2 and "budget is spent" in again.err, again.err


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ray", "actors"])
def test_workers_that_are_still_starting_spend_no_more_than_the_budget(
    tmp_path: Path, ray_environment: dict[str, str], launcher: str
) -> None:
    run = ["train", *POINTS, "train.steps=9", "run.name=slow", f"run.storage={tmp_path}", "workers=2"]
    run += [f"cluster.file={priced(tmp_path)}", "budget=8", f"launcher={launcher}", "task_args.step_seconds=300"]
    run += ["strategy=ddp"]  # the planner would measure a step
    ended = trireme(*run, env=ray_environment, timeout=300)
    assert ended.code == 130 and "stopped before training began" in ended.err, ended.out + ended.err
    assert "of a budget of $8.00: stopping before training begins" in ended.out
    from tests.running import committed, mlflow_run

    assert not committed(tmp_path / "slow")
    metrics = mlflow_run(tmp_path, "slow").data.metrics
    assert 7 < metrics["cost/dollars"] <= 8 and metrics["cost/wasted_dollars"] == metrics["cost/dollars"]
    after = trireme(
        "train", *POINTS, "train.steps=2", "run.name=next", f"run.storage={tmp_path}", "workers=4", env=ray_environment
    )
    assert after.code == 0, f"all four CPUs are free again: {after.out + after.err}"


def priced(folder: Path) -> str:
    """A cluster file by which two of the four CPUs cost a quarter of a dollar a second."""
    file = folder / "cluster.yaml"
    text = (ROOT / "cluster" / "laptop.yaml").read_text()
    file.write_text(text.replace("price_per_hour: 0", "price_per_hour: 1800"))
    return str(file)


@pytest.mark.slow
def test_a_run_says_who_holds_what_it_waits_for(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    import subprocess
    import sys

    hold = (
        "import ray, time; ray.init(address='auto', log_to_driver=False, namespace='x')\n"
        "group = ray.util.placement_group([{'CPU': 3}]); ray.get(group.ready())\n"
        "print('held', flush=True); time.sleep(120)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold], env=ray_environment, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout and holder.stdout.readline().strip() == "held"
        run = ["train", *POINTS, "train.steps=4", f"run.storage={tmp_path}", "workers=2", "cluster.wait_seconds=4"]
        ended = trireme(*run, "run.name=ends", env=ray_environment)
        assert ended.code == 2, ended.out + ended.err
        assert "there is no room for 2 workers after 4 s: bundle 2 of 2 (CPU 1) cannot be placed" in ended.err
        assert "3 of 4 CPU are held by job " in ended.err
        smaller = trireme(*run, "run.name=shrinks", "cluster.when_pending=shrink", env=ray_environment)
        assert smaller.code == 0, smaller.out + smaller.err
        assert "going on with 1 of 2 workers" in smaller.out
    finally:
        holder.kill()
        holder.wait()


def test_own_files_can_hold_what_they_say() -> None:
    check_ever(read_cluster("aws"), "64", {"GPU": 1.0})
    with pytest.raises(ClusterError, match="room for 64"):
        check_ever(read_cluster("aws"), "65", {"GPU": 1.0})


def test_a_run_gets_no_worker_on_an_excluded_node(tmp_path: Path, ray_environment: dict[str, str]) -> None:
    import subprocess
    import sys

    code = "import ray; ray.init(address='auto', log_to_driver=False); print(ray.nodes()[0]['NodeID'])"
    asked = subprocess.run(
        [sys.executable, "-c", code], env=ray_environment, capture_output=True, text=True, check=True
    )
    (only,) = asked.stdout.split()
    run = ["train", *POINTS, "train.steps=4", "run.name=out", f"run.storage={tmp_path}", "workers=2"]
    ended = trireme(*run, f"cluster.exclude_nodes=[{only}]", env=ray_environment)
    assert ended.code == 2 and "no node has it, the most is CPU 0" in ended.err, ended.out + ended.err


def test_what_an_autoscaler_may_grow_to() -> None:
    small, big = {"resources": {"CPU": 2}, "max_workers": 3}, {"resources": {"CPU": 8, "GPU": 4}, "max_workers": 2}
    config = {"max_workers": 4, "head_node_type": "head", "available_node_types": {"small": small, "big": big}}
    assert limits_of(config) == {"CPU": 20.0, "GPU": 8.0}, "two big ones and two small ones"
    assert limits_of(config | {"max_workers": 1}) == {"CPU": 8.0, "GPU": 4.0}
    assert limits_of({}) == {}
    head = {"resources": {"CPU": 4}, "max_workers": 0}
    assert limits_of({"max_workers": 4, "head_node_type": "h", "available_node_types": {"h": head}}) == {}


def test_from_no_workers_and_without_a_file_it_waits_for_the_autoscaler() -> None:
    found = why([{"CPU": 2.0}] * 2, node("head", "", {"CPU": 0.0}), growth=Growth(True))
    assert found.ever and "no node has it, but the autoscaler has not asked for one yet" in found.sentence
    found = why([{"CPU": 2.0}], node("head", "", {"CPU": 0.0}), growth=Growth(True, starting=("small × 1: asked for",)))
    assert found.ever and "still starting: small × 1: asked for" in found.sentence


def test_places_are_kept_where_an_autoscaler_would_take_idle_nodes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    from app.launchers import room as room_module
    from cluster.connect import Cluster

    group, removed = SimpleNamespace(wait=lambda seconds: True), list[Any]()
    monkeypatch.setattr(room_module, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(room_module, "remove_placement_group", removed.append)
    monkeypatch.setattr(room_module, "why_pending", lambda *_, **__: None)
    monkeypatch.setattr(room_module, "nodes_now", lambda excluded: [node("a", "", {"CPU": 4.0}, CPU=4.0)])

    def room(**limits: float) -> room_module.Reserved:
        there = Cluster("", 1, {"CPU": 4.0}, {"CPU": 4.0}, limits, False)
        return room_module.wait_for_room(Config(), there, 2, {"CPU": 1.0}, Console(quiet=True))

    assert room().group is None and not removed, "there is room, and it stays"
    kept = room(CPU=8.0)
    assert kept.workers == 2 and kept.group is group and not removed
    kept.give_back()
    kept.give_back()
    assert removed == [group], "when the workers ask for their own"
