"""What a task may add to training, and the average of weights.

A task may have a training step, optimizers, named losses, pictures and an early end. All are the
same under every layout, and to the last bit where workers are killed.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import app.results.trained
from app.config import Config
from app.config.io import load_config
from app.errors import UserError
from app.run.rehearse import rehearse
from app.storage.storage import Storage
from app.tasks import load_task
from app.training.hooks import EvaluationLog, check, require_metric, stops_early
from strategies.layout import choose
from tests import running
from tests.app.kit import logged, training_of
from tests.pool import run_distributed
from tests.tasks import Gan, Points

OVERRIDES = [
    "train.global_batch_size=32",
    "train.log_every=1",
    "train.eval_every=2",
    "train.ema_decay=0.9",
]


def config(*overrides: str) -> Config:
    return load_config(
        [], ["task=tests.tasks:Gan", "run.name=gan", "train.steps=8", *OVERRIDES, *overrides]
    )


def trained(
    rank: int, world: int, strategy: str, folder: str, *overrides: str
) -> tuple[dict[int, Any], Any, Any]:
    """The metrics by step, the weights and the averaged weights of a training run."""
    run_config = config(f"strategy={strategy}", "task_args.ends_at=3", *overrides)
    training, events = training_of(run_config, folder, rank, world, strategy)
    summary = training.run()
    metrics: dict[int, Any] = {}
    for event in logged(events):
        metrics.setdefault(event.step, {}).update(event.values)
    assert max(metrics) == summary["step"] == 6, "it ends at its third evaluation"
    weights = training.parallel.full_model_state()
    with training.average.in_place():
        return metrics, weights, training.parallel.full_model_state()


@pytest.mark.alone
def test_a_tasks_step_and_an_early_end_are_the_same_under_every_layout(tmp_path: Path) -> None:
    metrics, *models = trained(0, 1, "single", str(tmp_path / "single"))
    logged_names = ("train/real", "train/false", "eval/loss", "eval/ema_loss", "eval/ink")
    assert all(metrics[6][name] > 0 for name in logged_names)
    assert metrics[6]["eval/ema_loss"] != metrics[6]["eval/loss"]
    rates = {"train/lr": 2e-3, "train/lr_generator": 2e-3, "train/lr_discriminator": 1e-3}
    for name, rate in rates.items():  # of the task's optimizers, not of the configuration
        assert metrics[1][name] == rate and metrics[6][name] == pytest.approx(rate * (1 - 5 / 16))
    for strategy in ("ddp", "fsdp"):
        folder = tmp_path / strategy
        extra = "train.micro_batch_size=5"
        results = run_distributed(trained, 2, 2, strategy, str(folder), extra)
        layout_metrics, *layout_models = results[0]
        for step, values in metrics.items():
            for name in values:
                if "second" not in name:
                    expected = pytest.approx(values[name], rel=2e-4)
                    assert layout_metrics[step][name] == expected, (strategy, step, name)
        for model, layout_model in zip(models, layout_models, strict=True):
            for name in model:
                assert torch.allclose(model[name], layout_model[name], atol=2e-5), name
        evaluation = folder / "evaluation" / "step-00000006"
        assert Image.open(evaluation / "digits.png").size == (32, 32)
        assert Image.open(evaluation / "digits.png").mode == "RGBA"
        assert (evaluation / "words.txt").read_text() == "sixteen digits"


def test_averaged_weights_follow_the_formula(tmp_path: Path) -> None:
    training, _ = training_of(config(), tmp_path)
    expected = {name: p.detach().clone() for name, p in training.parallel.named_parameters()}
    batches = training.batches()
    for step in range(1, 5):
        training.step(next(batches))
        decay = min(0.9, (1 + step) / (10 + step))
        for name, p in training.parallel.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * p.detach()
    for name, value in expected.items():
        assert torch.allclose(training.average.values[name], value, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_run_that_ends_early_is_the_same_to_the_last_bit(
    tmp_path: Path, strategy: str
) -> None:
    arguments = [
        "train",
        "task=tests.tasks:Gan",
        "task_args={ends_at: 8, step_seconds: 0.05}",
        "train.steps=200",
        "train.eval_every=10",
        "train.log_every=1",
        "train.ema_decay=0.9",
        "checkpoint.every_steps=10",
        f"strategy={strategy}",
        f"run.storage={tmp_path}",
        "tracking.log_model=false",
    ]
    uninterrupted = running.kill_and_run_again(tmp_path, arguments)
    assert "training ends early, after step 80" in uninterrupted.out
    assert running.committed(tmp_path / "run")[-1] == 80
    weights = running.weights(tmp_path / "run")
    for metric in ("train/real", "eval/ema_loss", "eval/ink"):
        assert running.curve(tmp_path, "run", metric) == running.curve(tmp_path, "truth", metric)
    run_id = running.mlflow_run(tmp_path, "run").info.run_id
    assert running.mlflow_text(tmp_path, run_id, "evaluation/step-00000080") == ["sixteen digits"]
    model = app.results.trained.trained(Storage(str(tmp_path / "run"))).model
    assert running.same_bits(dict(model.state_dict()), weights)
    assert (
        running.torchrun(*arguments, "run.name=run", "--json").json["status"] == "already_finished"
    )


GPT2 = "tokenizer: bytes, model: gpt2, config: {n_embd: 16, n_layer: 1, n_head: 2}"
T5_SIZES = "d_model: 16, d_kv: 8, d_ff: 16, num_layers: 1, num_heads: 2"
T5 = f"tokenizer: bytes, model: t5, config: {{{T5_SIZES}}}"
ANSWER = r"asked: .*a\?.*\nwritten: .*\nwanted: b.*"


@pytest.mark.parametrize(
    ("task", "args", "pattern"),
    [
        ("language_modelling", "data: text.txt, d_model: 16", "{prompt} → .*"),
        pytest.param(
            "huggingface", f"data: text.txt, {GPT2}", "{prompt} → .*", marks=pytest.mark.slow
        ),
        pytest.param(
            "huggingface",
            f"data: talk.jsonl, kind: instructions, {GPT2}",
            ANSWER,
            marks=pytest.mark.slow,
        ),
        pytest.param("huggingface", f"data: pairs.csv, {T5}", ANSWER, marks=pytest.mark.slow),
    ],
)
def test_a_language_model_shows_what_it_writes(
    task: str,
    args: str,
    pattern: str,
    tmp_path: Path,
    text: str,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that answers shows the expected answer too."""
    monkeypatch.chdir(tmp_path)
    question = {"role": "user", "content": "a?"}
    conversations = [[question, {"role": "assistant", "content": f"b{n}"}] for n in range(20)]
    Path("talk.jsonl").write_text(
        "\n".join(json.dumps({"messages": messages}) for messages in conversations)
    )
    Path("pairs.csv").write_text("text,target\n" + "".join(f"a?,b{n}\n" for n in range(20)))
    overrides = [
        f"task={task}",
        f"task_args={{sequence_length: 24, {args}}}",
        "train.steps=1",
        "run.name=x",
    ]
    training, _ = training_of(load_config([], [*overrides, "train.global_batch_size=4"]), tmp_path)
    training.run()
    (shown,) = Path("evaluation", "step-00000001").glob("*.txt")
    data: Any = training.task.eval_data()
    prompt = re.escape(bytes(data[0][0][:16].tolist()).decode()) if "{" in pattern else ""
    assert re.fullmatch(pattern.replace("{prompt}", prompt), shown.read_text(), re.DOTALL)


def test_an_evaluation_without_the_metric_that_is_watched_ends_the_run() -> None:
    watching = config("checkpoint.metric=bleu", "checkpoint.mode=max")
    require_metric(watching, {"loss": 0.5, "bleu": 0.2})
    require_metric(watching, {})  # without held-out data
    require_metric(config(), {"perplexity": 3.0})  # nobody has written a metric
    unwatched = config("checkpoint.metric=score", "checkpoint.keep_best=false")
    require_metric(unwatched, {"loss": 0.5})
    with pytest.raises(UserError, match=r"'bleu', which .* \(did you mean 'belu'\?\)"):
        require_metric(watching, {"loss": 0.5, "belu": 0.2})


def test_patience_or_the_task_ends_training_early() -> None:
    evaluations = [{"loss": value} for value in (0.5, 0.3, 0.4, 0.3, float("nan"), 0.2)]
    patient = config("train.patience=3")
    stops = [stops_early(patient, Points(), evaluations[:count]) for count in range(1, 7)]
    assert stops == [False, False, False, False, True, False]
    upward = config("train.patience=1", "checkpoint.metric=accuracy", "checkpoint.mode=max")
    falling = [{"accuracy": value} for value in (0.5, 0.3)]
    assert [stops_early(upward, Points(), falling[:count]) for count in (1, 2)] == [False, True]
    assert not stops_early(config(), Points(), evaluations)
    assert stops_early(config(), Gan(ends_at=6), evaluations)


class Logs(Points):
    """Logs a part of its loss."""

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        self.log("part", loss)
        return loss


def test_what_a_layout_cannot_do_is_refused_and_what_it_does_not_log_is_noted() -> None:
    gan = load_task("tests.tasks:Gan", {})
    ddp = choose("ddp", 2)
    pipeline = choose("pipeline", 2, pp=2)
    message = "training_step of its own, but the stages of a pipeline take the steps: use"
    with pytest.raises(UserError, match=message):
        list(check(config(), gan, pipeline))
    with pytest.raises(UserError, match=r"train.ema_decay does not work with deepspeed"):
        list(check(config(), Points(), choose("deepspeed", 2)))
    with pytest.raises(UserError, match=r"train.weight_dtype=bf16 does not work with deepspeed"):
        narrow = config("train.weight_dtype=bf16", "train.precision=bf16", "train.ema_decay=null")
        list(check(narrow, Points(), choose("deepspeed", 2)))
    with pytest.raises(UserError, match=r"optimizer.state_dtype=bf16 is for adamw, but the task"):
        list(check(config("optimizer.state_dtype=bf16"), gan, ddp))
    task = Logs()
    logged = rehearse(config(), task, samples_per_worker=8, workers_per_machine=1)
    assert logged == ["part"] and task.recorded is None
    note = "train/part: not logged under pipeline or context parallelism"
    assert list(check(config(), task, pipeline, logged)) == [note]
    assert list(check(config(), task, ddp, logged)) == list(check(config(), gan, ddp)) == []


def test_images_of_every_kind(tmp_path: Path) -> None:
    # Imported here because each process of `make test` imports this file.
    import matplotlib.figure
    import matplotlib.image

    log = EvaluationLog(str(tmp_path), 1, True)
    grey = torch.linspace(0, 1, 48).view(6, 8)
    pixels = (grey * 255).to(torch.uint8)
    arrays = {
        "grey": grey,
        "chw": grey.expand(3, 6, 8),
        "hwc": pixels[:, :, None].expand(6, 8, 3),
        "one": pixels[None],
    }
    objects = {
        "pil": Image.fromarray(pixels.numpy()),
        "figure": matplotlib.figure.Figure(figsize=(1, 1)),
    }
    for name, value in {**arrays, **objects}.items():
        log(name, value)
    folder = tmp_path / log.folder
    images = {name: matplotlib.image.imread(folder / f"{name}.png") for name in (*arrays, *objects)}
    for name in arrays:
        image = torch.from_numpy(images[name])
        assert torch.allclose(image[..., 0], grey, atol=0.01), name


@pytest.mark.parametrize("library", [int, float, np.float32, np.int64, np.bool_, torch.tensor])
def test_a_number_of_any_library_is_logged_as_a_number(
    tmp_path: Path, library: Callable[[int], Any]
) -> None:
    for is_first_rank in (True, False):
        log = EvaluationLog(str(tmp_path), 1, is_first_rank)
        log("it", library(1))
        assert log.numbers == {"it": 1.0} and type(log.numbers["it"]) is float
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.int64, torch.bfloat16])
def test_pixels_of_any_type_are_an_image(tmp_path: Path, dtype: torch.dtype) -> None:
    log = EvaluationLog(str(tmp_path), 1, True)
    for name, shape in {"grey": (4, 5), "hwc": (4, 5, 3), "chw": (3, 4, 5)}.items():
        log(name, torch.ones(shape, dtype=dtype))
        assert Image.open(tmp_path / log.folder / f"{name}.png").size == (5, 4)


LOGGED: dict[str, Any] = {
    r"a tensor of shape \(2, 2, 2, 2\)": torch.zeros(2, 2, 2, 2),
    r"a tensor of shape \(5, 4, 7\)": torch.zeros(5, 4, 7),
    r"a tensor of shape \(0, 4\)": torch.zeros(0, 4),
    r"an array of shape \(3,\)": np.zeros(3),
    "a list": [0.5, 0.25],
    "a dict": {"a": 1},
    "a bytes": b"png",
    "an Image": Image.new("CMYK", (2, 2)),
    "nothing": None,
}


@pytest.mark.parametrize(("shown", "value"), LOGGED.items(), ids=LOGGED)
def test_what_cannot_be_logged_is_refused(tmp_path: Path, shown: str, value: Any) -> None:
    message = rf"^on_evaluation logs 'it' with {shown} \(.+\), but it must be a number, a text, a "
    with pytest.raises(UserError, match=message):
        EvaluationLog(str(tmp_path), 1, True)("it", value)
