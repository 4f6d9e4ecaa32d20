"""What a run costs: its share of the nodes, its budget, and what was wasted."""

from pathlib import Path

import pytest

from app.errors import UserError
from app.run.cost import Meter, check_budget, must_stop, rate_of
from app.storage import Storage
from tests.cluster.test_pending import HEAD_NODE, SHAPE, node
from tests.running import POINTS, ROOT, Lines, committed, mlflow_run, start_soon, trireme, wait_until


def test_the_rate_is_the_share_of_the_nodes() -> None:
    nodes = [HEAD_NODE, node("", "big", {"CPU": 96.0, "GPU": 8.0}), node("", "small", {"GPU": 1.0})]
    assert rate_of(4, {"GPU": 1.0}, nodes, SHAPE) == pytest.approx(4 * 55 / 8)
    assert rate_of(9, {"GPU": 1.0}, nodes, SHAPE) == pytest.approx(56.0)
    listed = rate_of(8, {"GPU": 1.0}, [node("", "big", {"GPU": 8.0, "accelerator_type:H100": 1.0})], None)
    assert listed and 10 < listed < 200, "the list price"
    assert rate_of(8, {"GPU": 1.0}, nodes[1:2], None) is None, "the price is not known"
    with pytest.raises(UserError, match=r"cluster\.file"):
        check_budget(5.0, None)


def test_a_budget_is_stopped_before_it_is_overspent() -> None:
    assert not must_stop(9.0, 60.0, None)
    assert not must_stop(8.9, 60.0, 10.0) and must_stop(9.1, 60.0, 10.0), "a minute at $60 an hour is kept for the end"
    assert must_stop(0.0095, 60.0, 0.01) and not must_stop(0.0, 60.0, 0.01), "but never more than a tenth"


def test_the_meter_goes_on_over_starts_and_knows_what_was_wasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("app.run.cost.time.time", lambda: now[0])

    def meter() -> Meter:
        return Meter(1800.0, 100.0, Storage(str(tmp_path)), lambda workers: 900.0 * workers)

    first = meter()
    first.resize(4)  # a dollar a second
    for seconds, stepping in ((10, False), (20, True), (5, False)):
        now[0] += seconds
        assert not first.look(stepping=stepping)
    assert (first.spent.total, first.spent.wasted) == (35.0, 15.0)
    first.save()
    later = meter()
    now[0] += 100
    assert later.spent.total == 35.0 and not later.look(stepping=True), "half a dollar a second"
    now[0] += 12
    assert later.look(stepping=True)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "starting"), [("actors", False), ("actors", True), ("ray", True)])
def test_a_run_stops_when_its_budget_is_spent_with_a_checkpoint_if_it_has_begun(
    tmp_path: Path, ray_environment: dict[str, str], launcher: str, starting: bool
) -> None:
    """Two of the four CPUs cost a quarter of a dollar a second."""
    file, text = tmp_path / "cluster.yaml", (ROOT / "cluster" / "laptop.yaml").read_text()
    file.write_text(text.replace("price_per_hour: 0", "price_per_hour: 1800"))
    budget, slow, folder = 8 if starting else 25, tmp_path / "slow", tmp_path / "dear"
    own = ["train", *POINTS, f"run.storage={tmp_path}", "strategy=ddp", f"launcher={launcher}"]
    run = [*own, "train.steps=1000000", "run.name=dear", "workers=2", f"cluster.file={file}", f"budget={budget}"]
    run += ["task_args.step_seconds=300", f"task_args.slow_while={slow}"]
    process = start_soon(run, env=ray_environment)
    lines = Lines(process)
    wait_until((folder / "run.json").exists)  # the driver has tried a step by then
    if starting:
        slow.touch()
    assert process.wait() == 130, lines.text
    slow.unlink(missing_ok=True)
    how = "stopping before training begins" if starting else "saving a checkpoint and stopping"
    lines.when(f"of a budget of ${budget}.00: {how}")
    assert ("stopped before training began" in lines.text) == starting and bool(committed(folder)) != starting
    metrics = mlflow_run(tmp_path, "dear").data.metrics
    assert 0.87 * budget < metrics["cost/dollars"] <= budget and metrics["cost/wasted_dollars"] > 0
    assert (metrics["cost/wasted_dollars"] == metrics["cost/dollars"]) == starting
    again = trireme(*run, env=ray_environment)
    assert again.code == 2 and "budget is spent" in again.err, again.err
    after = trireme(*own, "train.steps=2", "run.name=next", "workers=4", env=ray_environment)
    assert after.code == 0, f"all four CPUs are free again: {after.out + after.err}"
