"""Layouts, batches and models that cannot work are refused before a worker starts."""

from pathlib import Path

import psutil
import pytest
from torch import Tensor, nn

from app.errors import UserError
from app.run.prepare import Prepared, prepare, read_task
from app.run.rehearse import PICK_BYTES
from app.tasks.base import EvaluationLog
from app.training.job import strategy_options
from strategies.layout import LayoutError, check, choose
from tests.chain import config
from tests.tasks import Points

pytestmark = pytest.mark.pure

PIPELINE = ["strategy=pipeline", "parallel.pp=2"]
INTERLEAVED = [
    "parallel.schedule=interleaved_1f1b",
    "parallel.chunks=2",
    "train.micro_batch_size=6",
]
TRACED = ["parallel.trace_step=50", "train.steps=5", "train.micro_batch_size=4"]
WRONG = "task=tests.chain:Wrong"
SPLIT = ["strategy=context", "parallel.cp=2"]
RING = [*SPLIT, "parallel.context=ring"]
GPT = ["task=language_modelling", "task_args={data: strategies/fsdp.py, n_layers: 1, d_model: 96}"]
TOO_MANY = int(psutil.virtual_memory().total / PICK_BYTES * 2 / 3) // 2 * 2
"""A batch whose order of samples would take two thirds of this machine's memory."""


def prepared(*overrides: str) -> Prepared:
    """The run prepared for two workers, or one per stage of its pipeline."""
    run_config = config(*overrides)
    return prepare(
        run_config, read_task(run_config), run_config.parallel.pp or 2, devices_per_node=2
    )


class LogsNumbers(Points):
    """Logs a number of its own at each evaluation."""

    def on_evaluation(self, model: nn.Module, log: EvaluationLog) -> None:
        log("spread", 1.0)


def test_a_checkpoint_that_cannot_be_reached_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(path: str) -> None:
        raise ConnectionError(f"no route to {path}")

    monkeypatch.setattr("app.run.prepare.find", find)
    message = "checkpoint.load is 's3://a/b', which cannot be read: no route to s3://a/b"
    with pytest.raises(UserError, match=message):
        read_task(config("checkpoint.load=s3://a/b"))


class NeedsNumbers(Points):
    """Has metrics that ask the batch for a number, which the meta device does not have."""

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        assert batch[0].abs().max().item() < 100
        return super().metrics(model, batch)


class DerivesOdds(Points):
    """Derives a metric that the numbers of an evaluation have, and others may not have."""

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        return {"odds": means["accuracy"] / (1 - means["accuracy"])}


class DerivesOddsOfNothing(DerivesOdds):
    """Has no held-out data either."""

    def eval_data(self) -> None:  # type: ignore[override]
        return None


EVALUATED = ["task=tests.tasks:Points", "train.eval_every=2"]
UNEVALUATED = ["task=tests.tasks:Odd", "task_args.what=unevaluated", "train.eval_every=2"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*EVALUATED, "checkpoint.metric=accurate"], r"did you mean 'accuracy'\?\): write one of"),
        ([*EVALUATED, "checkpoint.metric=ema_loss"], "write one of loss, accuracy$"),
        (
            [
                *EVALUATED,
                "checkpoint.metric=score",
                "task=tests.app.run.test_prepare:NeedsNumbers",
            ],
            "write one of loss, accuracy$",
        ),
        ([*UNEVALUATED, "checkpoint.metric=score"], "no eval_data to measure it on"),
        (
            [*UNEVALUATED, "train.patience=2"],
            "train.patience is 2 evaluations, but .* no eval_data",
        ),
        (
            [*UNEVALUATED, "train.eval_separate=true"],
            "train.eval_separate evaluates checkpoints, but the task has no eval_data: leave it",
        ),
    ],
)
def test_what_an_evaluation_does_not_give_is_told_with_the_task(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_task(config(*overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [*EVALUATED, "checkpoint.metric=ema_loss", "train.ema_decay=0.9"],
        [*EVALUATED, "checkpoint.metric=spread", "task=tests.app.run.test_prepare:LogsNumbers"],
        [*EVALUATED, "checkpoint.metric=nothing", "checkpoint.keep_best=false"],
        [*EVALUATED, "train.patience=2"],
        [*EVALUATED, "checkpoint.metric=odds", "task=tests.app.run.test_prepare:DerivesOdds"],
        ["train.eval_every=2", "task=tests.app.run.test_prepare:DerivesOddsOfNothing"],
        [*GPT, "task_args.eval_samples=0"],
    ],
)
def test_what_an_evaluation_gives_or_may_give_is_accepted(overrides: list[str]) -> None:
    read_task(config(*overrides))
    prepared("strategy=ddp", "train.global_batch_size=16", *overrides)


def test_patience_that_cannot_run_out_is_noted() -> None:
    sizes = ["strategy=ddp", "train.global_batch_size=16", "train.steps=10"]
    (note,) = prepared(*sizes, *EVALUATED, "train.patience=5").notes
    assert "train.patience is 5 evaluations, but the run has 5: it cannot end early" in note
    assert not prepared(*sizes, *EVALUATED, "train.patience=4").notes
    (note,) = prepared(*sizes, *UNEVALUATED).notes
    assert "train.eval_every is 2, but the task has no eval_data: nothing is evaluated" in note


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=ddp", "train.global_batch_size=2"], "computes one sample per step"),
        (["strategy=ddp", "train.global_batch_size=10000"], "but the data has"),
        (
            [*PIPELINE, *TRACED],
            "parallel.trace_step is 50, but the run has 5 steps: no step is traced",
        ),
        (
            ["strategy=ddp", "train.steps=5", "schedule.warmup_steps=9"],
            "is 9, but the run has 5 steps: the learning",
        ),
        (
            ["strategy=ddp", "optimizer.name=sgd", "optimizer.betas=[0.8,0.9]"],
            "optimizer.betas is [0.8, 0.9], but it is for adam, adamw, adamw8bit, "
            "nadam, radam, adamax, muon",
        ),
    ],
)
def test_an_odd_batch_or_length_gets_a_note(overrides: list[str], message: str) -> None:
    (note,) = prepared(*overrides).notes
    assert message in note
    assert not prepared("strategy=ddp", "train.global_batch_size=16").notes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*PIPELINE, "parallel.pp=5"],
            "parallel.pp is 5, but the model has only 4 blocks: write at most 4",
        ),
        (
            [*PIPELINE, *INTERLEAVED],
            "groups of 2, one per stage, but a step has 3: .*schedule=1f1b, which takes any",
        ),
        ([WRONG, "task_args.what=empty", "strategy=ddp"], "Sequential has no parameters"),
        (
            [WRONG, "task_args.what=misnamed", "strategy=fsdp"],
            r"names the block 'bloks.1'.*did you mean blocks.1",
        ),
        (
            [WRONG, "task_args.what=fork", "strategy=tensor"],
            r"'blocks.\*.upp' matches no module of Net",
        ),
        ([WRONG, "task_args.what=fork", *PIPELINE], "blocks.1 does not use the output of blocks.0"),
        ([WRONG, "task_args.what=misnamed", *PIPELINE, "parallel.schedule=zbv"], "names the block"),
        ([WRONG, "task_args.what=twice", *PIPELINE], "the task calls the model twice"),
        ([WRONG, "task_args.what=twice in metrics", *PIPELINE], "the task calls the model twice"),
        (
            [*GPT, *RING, "task_args.sequence_length=130"],
            "130 tokens.*4 equal pieces: write a sequence length of 128",
        ),
        (
            [*GPT, "strategy=fsdp", "parallel.ep=2"],
            "parallel.ep is 2, but GPT has no experts that can be split",
        ),
        (
            [*GPT, *SPLIT, "parallel.context=ulysses", "task_args.n_heads=3"],
            "3 heads over .* = 2 .*context=ring",
        ),
        (
            [WRONG, "task_args.what=fork", *SPLIT],
            "Net cannot be told where in the sequence its tokens are",
        ),
        (
            [WRONG, "task_args.what=own generator", *PIPELINE],
            "a random generator of its own.*2 workers need the same",
        ),
        (
            ["strategy=ddp", f"train.global_batch_size={TOO_MANY}"],
            "samples on a machine take .* GB, and this one",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises((LayoutError, UserError), match=message):
        prepared(*overrides)


def test_a_deepspeed_file_is_read_before_a_worker_starts(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}')
    run_config = config(f"parallel.deepspeed={file}", "strategy=ddp")
    message = "the DeepSpeed configuration sets optimizer, which the experiment decides"
    with pytest.raises(LayoutError, match=message):
        check(choose("deepspeed", 2), strategy_options(run_config))
