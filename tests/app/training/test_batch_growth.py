"""A run whose batch grows is the same run on every layout, and refused where it cannot be."""

import functools

import pytest
from torch import nn

from app.config import Config
from app.errors import UserError
from app.run.prepare import prepare, read_task
from strategies.layout import LayoutError
from tests.app.kit import logged, training_of
from tests.chain import Chain, Net, config
from tests.pool import run_distributed


class Steady(Chain):
    """The chain without dropout."""

    def build_model(self) -> nn.Module:
        return Net(self.width, 4, 0.0)


GROWING = (
    "task=tests.app.training.test_batch_growth:Steady",
    "train.batch_schedule=[[0,8],[24,12],[50,24]]",
    "train.steps=8",
    "train.log_every=1",
    "optimizer.lr=0.05",
    "optimizer.lr_scaling=sqrt",
    "optimizer.lr_batch_size=8",
    "schedule.name=cosine",
)
BATCHES = [8, 8, 8, 12, 12, 12, 24, 24]


def prepared(world: int, strategy: str, *more: str) -> Config:
    """The configuration that the workers of a run get."""
    run = config(*GROWING, f"strategy={strategy}", *more)
    return prepare(run, read_task(run), world, devices_per_node=None).config


def trained(rank: int, world: int, strategy: str, run: Config) -> dict[int, dict[str, float]]:
    """What a run logs in each step."""
    training, events = training_of(run, "/nowhere", rank, world, strategy)
    training.run()
    return {event.step: dict(event.values) for event in logged(events, "train/loss")}


@functools.cache
def trained_alone() -> dict[int, dict[str, float]]:
    """What the run of one device logs in each step."""
    return trained(0, 1, "single", prepared(1, "single"))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        pytest.param("ddp", ["train.micro_batch_size=4"], marks=pytest.mark.slow),
        ("fsdp", ["train.micro_batch_size=3"]),
        pytest.param("pipeline", [], marks=pytest.mark.slow),
    ],
)
def test_every_layout_follows_the_same_curve_through_steps_up(
    strategy: str, more: list[str]
) -> None:
    alone = trained_alone()
    (values, _) = run_distributed(trained, 2, 2, strategy, prepared(2, strategy, *more))
    assert [alone[step]["train/global_batch_size"] for step in alone] == BATCHES
    assert alone[8]["train/samples_seen"] == sum(BATCHES)
    for metric, tolerance in (
        ("train/loss", 5e-6),
        ("train/lr", 0.0),
        ("train/samples_seen", 0.0),
        ("train/global_batch_size", 0.0),
    ):
        expected = [alone[step][metric] for step in alone]
        assert [values[step][metric] for step in alone] == pytest.approx(expected, rel=tolerance)


@pytest.mark.pure
def test_the_rate_rises_with_the_batch_and_falls_with_the_samples() -> None:
    constant = trained(0, 1, "single", prepared(1, "single", "schedule.name=constant"))
    rates = [constant[step]["train/lr"] for step in constant]
    assert rates == pytest.approx([0.05 * (batch / 8) ** 0.5 for batch in BATCHES])


@pytest.mark.pure
@pytest.mark.parametrize(
    ("workers", "keys", "sentence"),
    [
        (
            2,
            ["strategy=ddp", "train.batch_schedule=[[0,8],[24,13]]"],
            "train.batch_schedule has a batch of 13, which does not divide by the 2 data-parallel "
            "workers: write 12 or 14",
        ),
        (
            2,
            [
                "strategy=pipeline",
                "parallel.schedule=interleaved_1f1b",
                "parallel.chunks=2",
                "train.batch_schedule=[[0,8],[24,12]]",
                "train.micro_batch_size=4",
            ],
            "micro-batches",
        ),
    ],
)
def test_a_schedule_that_a_layout_cannot_take_is_refused(
    workers: int, keys: list[str], sentence: str
) -> None:
    run = config(*GROWING, *keys)
    with pytest.raises((UserError, LayoutError), match=sentence):
        prepare(run, read_task(run), workers, devices_per_node=None)


@pytest.mark.pure
def test_a_run_says_when_its_batch_grows_and_what_it_does_not_come_to() -> None:
    run = config(*GROWING)
    *_, note = prepare(run, read_task(run), 1, devices_per_node=None).notes
    assert note == "the global batch is 8, 12 from step 4, 24 from step 7"
    short = config(*GROWING, "train.steps=5")
    *_, note = prepare(short, read_task(short), 1, devices_per_node=None).notes
    assert note.startswith("train.batch_schedule reaches a batch of 24 after 50 samples, but 5 ")


@pytest.mark.pure
def test_auto_chooses_workers_that_share_every_batch() -> None:
    run = config(*GROWING, "strategy=auto", "train.batch_schedule=[[0,6],[24,12]]")
    prepared = prepare(run, read_task(run), 4, devices_per_node=None)
    assert 6 % prepared.layout.dims.dp == 0
