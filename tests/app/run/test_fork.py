"""A fork continues another run's checkpoint to the bit, and the checkpoint stays meanwhile."""

import json
from pathlib import Path

import pytest

from app.checkpoint import commits
from app.checkpoint.forks import hold, needed_by_forks
from app.cli.fork import fork_config
from app.run.fork import origin_name
from app.run.look import RunState, table
from tests.running import POINTS, committed, curve, invoke, mlflow_run, same_bits, weights

pytestmark = pytest.mark.usefixtures("own_cache")
UNTRACKED = "tracking.enabled=false"
"""For what is not about MLflow: its writer takes seconds to start."""
STEPS = ["train.steps=6", "train.log_every=1", "checkpoint.every_steps=2", "checkpoint.keep_last=3"]


def train_base(folder: Path, *more: str) -> Path:
    """A run of six steps with checkpoints of steps 2, 4 and 6."""
    words = ["launcher=local", "strategy=single", "run.name=base", f"run.storage={folder}", *STEPS]
    invoke("train", *POINTS, *words, *more)
    return folder / "base"


def test_a_fork_without_other_keys_repeats_the_rest_of_its_run_to_the_bit(tmp_path: Path) -> None:
    base = train_base(tmp_path)
    invoke("fork", base, "--at", "4")
    fork = tmp_path / "base-fork-4"
    assert same_bits(weights(fork), weights(base))
    assert list(curve(tmp_path, "base-fork-4")) == [5, 6]
    assert curve(tmp_path, "base-fork-4")[6] == curve(tmp_path, "base")[6]
    tags = mlflow_run(tmp_path, "base-fork-4").data.tags
    assert tags["trireme.fork"] == "base@4"
    assert tags["mlflow.parentRunId"] == mlflow_run(tmp_path, "base").info.run_id
    shown = invoke("runs", tmp_path).stdout.splitlines()
    assert [line.split("  ")[0] for line in shown[1:]] == ["base", "└ base-fork-4 (from 4)"]


def test_a_fork_with_another_batch_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    base = train_base(tmp_path, UNTRACKED)
    invoke(
        "fork", base, "--at", "4", "train.global_batch_size=32", "run.name=wide", "train.steps=5"
    )
    (newest, *_) = commits(str(tmp_path / "wide" / "checkpoints"))
    assert newest.meta["samples_seen"] == 4 * 16 + 32


def test_the_same_command_continues_a_fork_from_its_first_choice(tmp_path: Path) -> None:
    base = train_base(tmp_path, "train.steps=4")
    words = ["fork", base, "optimizer.lr=0.01", "run.name=warm"]
    invoke(*words, "train.steps=6", "checkpoint.every_steps=1")
    fork_of = json.loads((tmp_path / "warm" / "run.json").read_text())["fork"]
    assert origin_name(fork_of) == "base@4"
    invoke(
        "train",
        *POINTS,
        "launcher=local",
        "strategy=single",
        "run.name=base",
        f"run.storage={tmp_path}",
        *STEPS,
    )
    assert committed(base)[-1] == 6
    invoke(*words, "train.steps=8")
    assert json.loads((tmp_path / "warm" / "run.json").read_text())["fork"] == fork_of
    assert list(curve(tmp_path, "warm")) == [5, 6, 7, 8]


def test_a_fork_goes_over_to_its_own_rate_smoothly_also_when_it_is_continued(
    tmp_path: Path,
) -> None:
    base = train_base(tmp_path)
    words = ["fork", base, "--at", "4", "optimizer.lr=0.016", "schedule.join_samples=64"]
    invoke(*words, "train.steps=10", "run.name=smooth")
    rates = curve(tmp_path, "smooth", "train/lr")
    expected = [0.001, 0.002, 0.004, 0.008, 0.016, 0.016]
    assert rates == pytest.approx(dict(zip(range(5, 11), expected, strict=True)))
    invoke(*words, "train.steps=7", "run.name=halting")
    invoke(*words, "train.steps=10", "run.name=halting")
    assert curve(tmp_path, "halting", "train/lr") == rates
    assert same_bits(weights(tmp_path / "halting"), weights(tmp_path / "smooth"))


def test_a_checkpoint_stays_until_its_fork_has_one_of_its_own(tmp_path: Path) -> None:
    base = train_base(tmp_path, "train.steps=2", UNTRACKED)
    (origin,) = commits(str(base / "checkpoints"))
    hold(origin, str(tmp_path / "unborn"))
    one = ["checkpoint.keep_last=1", "checkpoint.keep_best=false", UNTRACKED]
    train_base(tmp_path, *one)
    assert committed(base) == [2, 6]
    assert needed_by_forks(str(base / "checkpoints")) == {Path(origin.path).name}
    invoke("fork", base, "--at", "2", "run.name=unborn")
    assert needed_by_forks(str(base / "checkpoints")) == set()
    train_base(tmp_path, *one, "train.steps=8")
    assert committed(base) == [8]


REFUSED = [
    (["--at", "3"], "there is no checkpoint of step 3"),
    (["train.steps=6"], "the fork is to train until step 6: write train.steps=12 or another"),
    (["train.steps=9", "run.name=base"], "checkpoint.fork is a checkpoint of the run base itself"),
    (["other.yaml"], "other.yaml is not of the form key=value"),
    (["train.stepz=9"], "did you mean 'train.steps'"),
]


def test_what_cannot_be_forked_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    base = train_base(tmp_path, UNTRACKED)
    before = sorted(tmp_path.rglob("*"))
    for words, sentence in REFUSED:
        assert sentence in invoke("fork", base, *words, code=2).stderr
        assert sorted(tmp_path.rglob("*")) == before
    first = fork_config(str(base), ("optimizer.lr=0.01", "train.steps=9"))
    same = fork_config(str(base), ("train.steps=9", "optimizer.lr=0.01"))
    other = fork_config(str(base), ("train.steps=9",))
    assert first.run.name == same.run.name != other.run.name


def test_forks_stand_below_the_run_that_they_continue() -> None:
    def state(name: str, fork: str = "") -> RunState:
        checkpoint = f"/runs/{fork}/checkpoints/step-00000300-a" if fork else ""
        return RunState(
            name=name,
            folder=f"/runs/{name}",
            state="finished",
            created=0.0,
            updated=None,
            step=1,
            steps=1,
            loss=None,
            fork=checkpoint,
        )

    runs = [state("c", "b"), state("other"), state("b", "a"), state("a"), state("lone", "gone")]
    names = [line.split("  finished")[0].rstrip() for line in table(runs).splitlines()[1:]]
    assert names == ["other", "a", "└ b (from 300)", "  └ c (from 300)", "lone"]
