"""What a task adds to training: a step of its own, optimizers, losses by name, pictures, an early end; and the average
of weights. The same under every layout, and to the last bit where workers are killed."""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.figure
import matplotlib.image
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
from app.training.hooks import EvaluationLog, check, stops_early
from strategies.layout import choose
from tests import running
from tests.app.kit import logged, training_of
from tests.pool import run_distributed
from tests.tasks import Gan, Points

GIVEN = ["train.global_batch_size=32", "train.log_every=1", "train.eval_every=2", "train.ema_decay=0.9"]


def config(*more: str) -> Config:
    return load_config([], ["task=tests.tasks:Gan", "run.name=gan", "train.steps=8", *GIVEN, *more])


def trained(rank: int, world: int, strategy: str, folder: str, *more: str) -> tuple[dict[int, Any], Any, Any]:
    """(metrics by step, weights, averages) of a whole training."""
    wanted = config(f"strategy={strategy}", "task_args.ends_at=3", *more)
    training, events = training_of(wanted, folder, rank, world, strategy)
    summary = training.run()
    metrics: dict[int, Any] = {}
    for event in logged(events):
        metrics.setdefault(event.step, {}).update(event.values)
    assert max(metrics) == summary["step"] == 6, "it ends at its third evaluation"
    weights = training.parallel.full_model_state()
    with training.average.in_place():
        return metrics, weights, training.parallel.full_model_state()


@pytest.mark.alone
def test_a_step_of_its_own_and_an_early_end_are_the_same_under_every_layout(tmp_path: Path) -> None:
    metrics, *models = trained(0, 1, "single", str(tmp_path / "single"))
    named = ("train/real", "train/false", "eval/loss", "eval/ema_loss", "eval/ink")
    assert all(metrics[6][name] > 0 for name in named) and metrics[6]["eval/ema_loss"] != metrics[6]["eval/loss"]
    rates = {"train/lr": 2e-3, "train/lr_generator": 2e-3, "train/lr_discriminator": 1e-3}
    for name, rate in rates.items():  # what the task's own optimizers have, not the configuration's
        assert metrics[1][name] == rate and metrics[6][name] == pytest.approx(rate * (1 - 5 / 16))
    for strategy in ("ddp", "fsdp"):
        folder = tmp_path / strategy
        found, *theirs = run_distributed(trained, 2, 2, strategy, str(folder), "train.micro_batch_size=5")[0]
        for step, values in metrics.items():
            for name in values:
                if "second" not in name:
                    assert found[step][name] == pytest.approx(values[name], rel=2e-4), (strategy, step, name)
        for mine, other in zip(models, theirs, strict=True):
            assert all(torch.allclose(mine[name], other[name], atol=2e-5) for name in mine)
        drawn = folder / "evaluation" / "step-00000006"
        assert matplotlib.image.imread(drawn / "digits.png").shape == (32, 32, 4)
        assert (drawn / "words.txt").read_text() == "sixteen digits"


def test_an_average_is_what_its_formula_says(tmp_path: Path) -> None:
    training, _ = training_of(config(), tmp_path)
    expected = {name: p.detach().clone() for name, p in training.parallel.named_parameters()}
    batches = training.batches()
    for step in range(1, 5):
        training.step(next(batches))
        decay = min(0.9, (1 + step) / (10 + step))
        for name, p in training.parallel.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * p.detach()
    assert all(torch.allclose(training.average.values[name], expected[name], atol=1e-6) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_to_the_last_bit_after_a_kill_and_an_early_end(tmp_path: Path, strategy: str) -> None:
    given = ["train", "task=tests.tasks:Gan", "train.steps=200", "train.eval_every=10", "train.ema_decay=0.9"]
    given += ["task_args={ends_at: 8, step_seconds: 0.05}", "checkpoint.every_steps=10", "train.log_every=1"]
    given += [f"strategy={strategy}", f"run.storage={tmp_path}", "tracking.log_model=false"]
    truth = running.kill_and_run_again(tmp_path, given)
    assert "training ends early, after step 80" in truth.out and running.committed(tmp_path / "run")[-1] == 80
    found = running.weights(tmp_path / "run")
    for metric in ("train/real", "eval/ema_loss", "eval/ink"):
        assert running.curve(tmp_path, "run", metric) == running.curve(tmp_path, "truth", metric)
    logged = running.mlflow_run(tmp_path, "run").info.run_id
    assert running.mlflow_text(tmp_path, logged, "evaluation/step-00000080") == ["sixteen digits"]
    kept = app.results.trained.trained(Storage(str(tmp_path / "run"))).model
    assert running.same_bits(dict(kept.state_dict()), found)
    assert running.torchrun(*given, "run.name=run", "--json").json["status"] == "already_finished"


GPT2 = "tokenizer: bytes, model: gpt2, config: {n_embd: 16, n_layer: 1, n_head: 2}"
T5 = "tokenizer: bytes, model: t5, config: {d_model: 16, d_kv: 8, d_ff: 16, num_layers: 1, num_heads: 2}"


@pytest.mark.parametrize(
    ("task", "args", "says"),
    [
        ("language_modelling", "data: text.txt, d_model: 16", "{begins} → .*"),
        ("huggingface", f"data: text.txt, {GPT2}", "{begins} → .*"),
        ("huggingface", f"data: talk.jsonl, kind: instructions, {GPT2}", r"asked: .*a\?.*\nwritten: .*\nwanted: b.*"),
        ("huggingface", f"data: pairs.csv, {T5}", r"asked: .*a\?.*\nwritten: .*\nwanted: b.*"),
    ],
)
def test_a_language_model_shows_what_it_writes(
    task: str, args: str, says: str, tmp_path: Path, text: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that answers shows what it should have written too."""
    monkeypatch.chdir(tmp_path)
    talk = [[{"role": "user", "content": "a?"}, {"role": "assistant", "content": f"b{n}"}] for n in range(20)]
    Path("talk.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in talk))
    Path("pairs.csv").write_text("text,target\n" + "".join(f"a?,b{n}\n" for n in range(20)))
    given = [f"task={task}", f"task_args={{sequence_length: 24, {args}}}", "train.steps=1", "run.name=x"]
    training, _ = training_of(load_config([], [*given, "train.global_batch_size=4"]), tmp_path)
    training.run()
    (said,) = Path("evaluation", "step-00000001").glob("*.txt")
    data: Any = training.task.eval_data()
    begins = re.escape(bytes(data[0][0][:16].tolist()).decode()) if "{" in says else ""
    assert re.fullmatch(says.replace("{begins}", begins), said.read_text(), re.DOTALL)


def test_when_patience_or_the_task_ends_it() -> None:
    evaluations = [{"loss": value} for value in (0.5, 0.3, 0.4, 0.3, float("nan"), 0.2)]
    patient = config("train.patience=3")
    assert [stops_early(patient, Points(), evaluations[:n]) for n in range(1, 7)] == [False] * 4 + [True, False]
    upward = config("train.patience=1", "checkpoint.mode=max")
    assert [stops_early(upward, Points(), evaluations[:n]) for n in (1, 2)] == [False, True]
    assert not stops_early(config(), Points(), evaluations) and stops_early(config(), Gan(ends_at=6), evaluations)


class Logs(Points):
    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        found = super().loss(model, batch)
        self.log("part", found)
        return found


def test_what_a_layout_cannot_is_one_sentence_and_what_it_does_not_show_is_told() -> None:
    gan, ddp, pipeline = load_task("tests.tasks:Gan", {}), choose("ddp", 2), choose("pipeline", 2, pp=2)
    with pytest.raises(UserError, match="training_step of its own, but the stages of a pipeline take the steps: use"):
        list(check(config(), gan, pipeline))
    with pytest.raises(UserError, match=r"train.ema_decay is not for deepspeed"):
        list(check(config(), Points(), choose("deepspeed", 2)))
    with pytest.raises(UserError, match=r"write train.eval_every"):
        list(check(config("train.patience=2", "train.eval_every=null"), Points(), ddp))
    task = Logs()
    logged = rehearse(config(), task, samples_per_worker=8, workers_per_machine=1)
    assert logged == ["part"] and task.recorded is None
    said = "train/part: not logged under pipeline or context parallelism"
    assert list(check(config(), task, pipeline, logged)) == [said]
    assert list(check(config(), task, ddp, logged)) == list(check(config(), gan, ddp)) == []


def test_images_of_every_kind(tmp_path: Path) -> None:
    log, grey = EvaluationLog(str(tmp_path), 1, True), torch.linspace(0, 1, 48).view(6, 8)
    pixels = (grey * 255).to(torch.uint8)
    kinds = {"grey": grey, "chw": grey.expand(3, 6, 8), "hwc": pixels[:, :, None].expand(6, 8, 3), "one": pixels[None]}
    others = {"pil": Image.fromarray(pixels.numpy()), "figure": matplotlib.figure.Figure(figsize=(1, 1))}
    for name, value in {**kinds, **others}.items():
        log(name, value)
    read = {name: matplotlib.image.imread(tmp_path / log.folder / f"{name}.png") for name in (*kinds, *others)}
    assert all(torch.allclose(torch.from_numpy(read[name])[..., 0], grey, atol=0.01) for name in kinds)
    with pytest.raises(UserError, match=r"of shape \(2, 2, 2, 2\)"):
        log("wrong", torch.zeros(2, 2, 2, 2))
