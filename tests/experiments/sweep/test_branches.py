"""Sweeps whose trials continue from a checkpoint of a run: branches of one training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoint import commits
from app.checkpoint.forks import hold, needed_by_forks
from app.config import Config
from app.errors import UserError
from app.run.prepare import read_task
from app.training.hooks import curve_point, set_learning_rate
from experiments.sweep.spec import read_sweep
from tests.app.run.test_fork import train_base
from tests.running import mlflow_run, trireme

pytestmark = pytest.mark.usefixtures("own_cache")
SPACE: dict[str, Any] = {"train.global_batch_size": [16, 32], "optimizer.lr": [0.001]}
THREE_RATES: dict[str, Any] = {**SPACE, "optimizer.lr": [0.001, 0.01, 0.1]}


def write_sweep(folder: Path, **keys: Any) -> Path:
    """A sweep file beside the runs that it forks."""
    file = folder / "branch.yaml"
    sweep = {"fork": str(folder / "base"), "samples": 96, "space": SPACE, **keys}
    file.write_text(json.dumps(sweep))
    return file


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that sweeps fork."""
    return train_base(tmp_path_factory.mktemp("base"))


def test_each_trial_continues_the_checkpoint_for_the_same_samples(
    base: Path, tmp_path: Path
) -> None:
    here = [f"run.storage={tmp_path}"]
    sweep = read_sweep(str(write_sweep(tmp_path, fork=f"{base}@4")), here)
    small, large = sweep.configs
    assert (small.train.steps, large.train.steps) == (4 + 6, 4 + 3)
    assert small.task == "tests.tasks:Points"
    checkpoint = small.checkpoint.fork
    assert checkpoint is not None
    assert Path(checkpoint).name.startswith("step-00000004-")
    # The first start has decided: another one continues the same, whatever the run has saved since.
    folder = tmp_path / "branch"
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps({"about": sweep.identity()}))
    again = read_sweep(str(write_sweep(tmp_path, fork=str(base))), here)
    assert (again.fork, again.origin_step) == (checkpoint, 4)


def test_branches_of_every_batch_stay_on_the_curve_of_their_run(base: Path, tmp_path: Path) -> None:
    keys = {"fork": f"{base}@4", "set": {"schedule.name": "cosine", "train.steps": 40}}
    sweep = read_sweep(str(write_sweep(tmp_path, **keys)), [f"run.storage={tmp_path}"])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    task = read_task(sweep.experiment)

    def rate(config: Config, step: int, samples: int, steps: int) -> float:
        point = curve_point(config, step=step, steps=steps, samples=samples)
        rates = set_learning_rate(optimizer, config, task, step=step, steps=steps, point=point)
        return rates["lr"]

    small, large = sweep.configs
    of_run = replace(small, schedule=sweep.experiment.schedule)
    for step in range(4, 10):
        samples = step * 16
        expected = rate(of_run, step, samples, 40)
        assert rate(small, step, samples, small.train.steps or 0) == expected, "to the bit"
        if samples % 32 == 0:
            on_large = 4 + (samples - 64) // 32
            assert rate(large, on_large, samples, large.train.steps or 0) == expected
    # What a sweep recommends goes on to the end of the run, which is further than its branches.
    assert sweep.to_the_end().samples == 40 * 16 - 64
    assert read_sweep(str(write_sweep(tmp_path, fork=f"{base}@4")), []).to_the_end().samples == 96


def test_a_study_keeps_its_checkpoint_until_it_is_released_or_gone(
    base: Path, tmp_path: Path
) -> None:
    (newest, *_) = commits(str(base / "checkpoints"))
    study = tmp_path / "study"
    study.mkdir()
    hold(newest, str(study), until_released=True)
    assert needed_by_forks(str(base / "checkpoints")) == {Path(newest.path).name}
    study.rmdir()
    assert needed_by_forks(str(base / "checkpoints")) == set()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"samples": None}, "write samples: 10000"),
        ({"samples": 0}, "samples is 0, but it must be a whole number greater than 0"),
        ({"fork": "runs/none"}, "runs/none is not a run's folder"),
        ({"fork": None, "experiment": {"task": "tests.tasks:Points"}}, "fork is not given"),
        (
            {"scheduler": "paired"},
            "it needs a grid with 3 or more values of optimizer.lr",
        ),
        (
            {"scheduler": "paired", "space": THREE_RATES, "searcher": "random"},
            "paired, but it needs a grid",
        ),
        (
            {"scheduler": "paired", "space": THREE_RATES, "metric": "eval/accuracy"},
            "compares training losses, and this sweep compares eval/accuracy: write",
        ),
        (
            {"scheduler": {"name": "paired", "grace_period": 4}, "space": THREE_RATES},
            "takes no arguments: write scheduler: paired",
        ),
    ],
)
def test_a_branch_sweep_that_cannot_run_is_refused(
    base: Path, tmp_path: Path, keys: dict[str, Any], sentence: str
) -> None:
    keys = {"fork": str(base), **keys}
    with pytest.raises(UserError, match=sentence):
        read_sweep(str(write_sweep(tmp_path, **keys)), [])


@pytest.mark.parametrize(
    ("keys", "scheduler"),
    [
        ({"space": THREE_RATES}, "paired"),
        ({"space": THREE_RATES, "scheduler": "none"}, "none"),
        ({"space": THREE_RATES, "metric": "eval/accuracy", "mode": "max"}, "none"),
        ({"space": THREE_RATES, "searcher": "random"}, "asha"),
        ({"space": SPACE}, "none"),
    ],
)
def test_a_grid_of_forks_stops_rates_early_where_they_can_be_compared(
    base: Path, tmp_path: Path, keys: dict[str, Any], scheduler: str
) -> None:
    file = str(write_sweep(tmp_path, fork=str(base), **keys))
    assert read_sweep(file, [f"run.storage={tmp_path}"]).scheduler == scheduler


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"reports": 4, "time": "samples"}, 24),
        ({"reports": None, "set": {"train.eval_every": 2}}, 2),
        ({"reports": None, "set": {"train.eval_every": 2}, "time": "samples"}, 2 * 16),
        ({"reports": None}, 96),
    ],
)
def test_the_distance_of_two_reports_is_in_what_schedulers_compare(
    base: Path, tmp_path: Path, keys: dict[str, Any], expected: int
) -> None:
    from experiments.sweep.tuning import _report_every

    file = str(write_sweep(tmp_path, fork=str(base), **keys))
    assert _report_every(read_sweep(file, [f"run.storage={tmp_path}"]), 96) == expected


@pytest.mark.slow
def test_a_branch_sweep_counts_from_its_checkpoint_and_lets_it_go(
    base: Path, tmp_path: Path
) -> None:
    file = write_sweep(tmp_path, fork=f"{base}@4", set={"launcher": "auto", "workers": 1})
    ended = trireme("sweep", str(file), f"run.storage={tmp_path}").expect()
    assert "2 trials continue base@4 for 96 samples each, 192 in all" in ended.out
    for trial, steps in (("t000-b16-lr0.001", 6), ("t001-b32-lr0.001", 3)):
        record = json.loads((tmp_path / "branch" / trial / "trial.json").read_text())
        assert record["status"] == "finished"
        assert record["reports"][-1]["step"] == record["reports"][-1]["steps"] == steps
        assert record["reports"][-1]["samples"] == 96
        tags = mlflow_run(tmp_path, trial).data.tags
        assert tags["trireme.fork"] == "base@4"
        assert tags["mlflow.parentRunId"] == mlflow_run(tmp_path, "branch").info.run_id
    assert needed_by_forks(str(base / "checkpoints")) == set()


@pytest.mark.slow
def test_a_real_sweep_says_that_it_goes_beyond_its_grid(base: Path, tmp_path: Path) -> None:
    space = {
        "train.global_batch_size": [16],
        "optimizer.lr": [1e-5, 2e-5],
        "train.seed": [0, 1],
    }
    file = write_sweep(
        tmp_path,
        fork=f"{base}@4",
        space=space,
        set={"launcher": "auto", "workers": 1, "tracking.enabled": False},
        budget={"samples": 6 * 96},
        reports=1,
    )
    ended = trireme("sweep", str(file), f"run.storage={tmp_path}").expect()
    assert "then up to 2 rates beyond" in ended.out
    assert "2 more trials, with 4e-05 at batch size 16" in ended.out
    assert "is the highest that was tried, 4e-05; 2 more trials at 8e-05 would decide" in ended.out
    assert len(list((tmp_path / "branch").glob("*/trial.json"))) == 6
    again = trireme("sweep", str(file), f"run.storage={tmp_path}").expect()
    assert "2 more trials, with" not in again.out, "the budget has no room for others"
