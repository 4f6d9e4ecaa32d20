"""Configuration: precedence, documentation, round trips, completion."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from click.shell_completion import ShellComplete

from app.cli import group, usage_error
from app.config import Config
from app.config.check import OPTIMIZERS, unfit_for_training, validate
from app.config.io import documentation, explain, flatten, from_dict, load_config, to_dict, to_yaml
from app.config.words import OTHER_NAMES
from app.errors import UserError
from app.training.optimizer import BUILT_IN
from cluster.addresses import split_address
from strategies import registry
from strategies.dims import LayoutError, checkpoint_every
from strategies.options import STRATEGIES
from tests.running import ROOT

EXPERIMENTS = sorted(
    p for p in (ROOT / "experiments").glob("*.yaml") if not p.name.startswith("sweep_")
)


def test_files_override_defaults_and_the_command_line_overrides_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text("train: {steps: 1, seed: 1, log_every: 7}\nrun: {name: first}")
    (tmp_path / "b.yaml").write_text("train: {steps: 2, seed: 2}")
    config = load_config([tmp_path / "a.yaml", tmp_path / "b.yaml"], ["train.steps=3"])
    assert (config.train.steps, config.train.seed, config.train.log_every) == (3, 2, 7)
    assert config.train.global_batch_size == Config().train.global_batch_size
    assert config.run.name == "first" and load_config([tmp_path / "b.yaml"]).run.name == "b"
    monkeypatch.setenv("TRIREME_TEST_NAME", "from-the-environment")
    from_environment = load_config([], ["run.name=${oc.env:TRIREME_TEST_NAME}"])
    assert from_environment.run.name == "from-the-environment"
    with pytest.raises(UserError, match="TRIREME_NOT_THERE"):
        load_config([], ["run.name=${oc.env:TRIREME_NOT_THERE}"])


@pytest.mark.parametrize(
    ("override", "other_key"), [("train.steps=5", "epochs"), ("train.epochs=2", "steps")]
)
def test_the_length_given_last_counts(tmp_path: Path, override: str, other_key: str) -> None:
    (tmp_path / "a.yaml").write_text(f"train: {{{other_key}: 1}}")
    assert getattr(load_config([tmp_path / "a.yaml"], [override]).train, other_key) is None


def test_every_key_is_documented() -> None:
    docs = documentation()
    assert set(flatten(to_dict(Config()))) <= set(docs)
    assert not [key for key, text in docs.items() if len(text) < 10]


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda p: p.name)
def test_what_config_prints_is_the_same_experiment(file: Path, tmp_path: Path) -> None:
    config = load_config([file], ["train.log_every=3"])
    (tmp_path / "again.yaml").write_text(explain(config))
    assert to_dict(load_config([tmp_path / "again.yaml"])) == to_dict(config)
    assert to_dict(from_dict(yaml.safe_load(to_yaml(config)))) == to_dict(config)


def test_completion_offers_keys_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    complete = ShellComplete(group, {}, "trireme", "_TRIREME_COMPLETE").get_completions
    for typed, completion in (
        ("train.glo", "global_batch_size="),
        ("exp", "experiments/"),
        ("train.precision=b", "bf16"),
    ):
        assert any(offer.value.endswith(completion) for offer in complete(["train"], typed))


def test_words_of_other_trainers_are_answered_with_the_key() -> None:
    """Each key that is named instead exists."""
    keys = {key: documentation() for key in OTHER_NAMES}
    assert all(
        key in docs or key.startswith(("task_args.", "optimizer.args."))
        for key, docs in keys.items()
    )
    words = [word for words in OTHER_NAMES.values() for word in words.split()]
    assert len(words) == len(set(words)), "a word means one key"
    for other_name, key in (
        ("batch_size", "train.global_batch_size"),
        ("gpus", "workers"),
        ("max_epochs", "train.epochs"),
    ):
        with pytest.raises(
            UserError, match=f"there is no key '{other_name}'.*did you mean '{key}'?"
        ):
            load_config([], [f"{other_name}=1"])
    for option, key in (
        ("--workers", "workers"),
        ("--per-device-train-batch-size", "train.micro_batch_size"),
    ):
        with pytest.raises(click.NoSuchOption) as refused:
            group.main(["train", option, "4"], standalone_mode=False)
        expected = f"there is no option {option}: write {key}=VALUE, without dashes"
        assert usage_error(refused.value) == expected


def test_a_digit_that_is_not_a_number_is_refused_in_one_sentence() -> None:
    """str.isdigit accepts ², which int does not read."""
    with pytest.raises(UserError, match="workers is '²', but it must be auto or a whole number"):
        load_config([], ["workers=²"])
    with pytest.raises(LayoutError, match="activation_checkpointing is 'every_²': write"):
        checkpoint_every("every_²")
    assert split_address("host:²") is None


def test_names_that_are_checked_without_torch_are_those_that_exist() -> None:
    assert set(STRATEGIES) == set(registry.STRATEGIES)
    assert set(OPTIMIZERS) == set(BUILT_IN)
    code = "import sys, app.config.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.patience=3"], "train.patience is 3 evaluations, .* write train.eval_every too"),
        (["checkpoint.mode=max"], "checkpoint.metric is loss, of which the highest value is not"),
        (["checkpoint.metric=accuracy"], "lowest value is not the best: write checkpoint.mode=max"),
        (["checkpoint.metric=ema_accuracy"], "lowest value is not the best"),
        (
            ["train.eval_separate=true", "train.eval_every=150", "checkpoint.every_steps=100"],
            "train.eval_every=150 means: write checkpoint.every_steps=150, or a divisor of it",
        ),
        (["train.eval_separate=true", "train.eval_every=5"], "write checkpoint.every_steps=5,"),
        (["train.eval_resources.GPU=1"], "write train.eval_separate=true too"),
    ],
)
def test_evaluations_that_cannot_be_meant_so_are_refused(
    overrides: list[str], message: str
) -> None:
    named = ["task=tabular", "run.name=first", "train.steps=9"]
    (sentence,) = unfit_for_training(load_config([], [*named, *overrides]))
    assert re.search(message, sentence)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optimizer.state_dtype=bf16", "optimizer.name=sgd"],
            "optimizer.state_dtype=bf16 is for adamw, but optimizer.name is sgd",
        ),
        (
            ["train.weight_dtype=bf16", "train.precision=bf16", "optimizer.name=muon"],
            "needs an optimizer that rounds at random, but optimizer.name is muon",
        ),
        (["train.weight_dtype=bf16"], "train.precision is fp32: write train.precision=bf16"),
        (
            ["train.weight_dtype=bf16", "train.precision=bf16", "train.ema_decay=0.9"],
            "train.ema_decay averages weights in float32, but train.weight_dtype is bf16",
        ),
    ],
)
def test_weights_and_moments_in_16_bits_are_refused_where_they_cannot_be(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        validate(load_config([], overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=fsdp"], "strategy is fsdp, which no plan has chosen: write strategy=auto"),
        (["parallel.stage_resources=[{CPU: 1}]"], "leave one of the two out"),
        (
            [f"parallel.{name}=1" for name in ("dp_replicate", "dp_shard", "tp", "pp")],
            "leave out those of parallel that may change",
        ),
    ],
)
def test_a_plan_that_nothing_has_chosen_cannot_be_followed(
    overrides: list[str], message: str
) -> None:
    named = ["task=tabular", "run.name=first", "train.steps=9", "strategy=auto"]
    follows = [*named, "plan.follow=true"]
    (sentence,) = unfit_for_training(load_config([], [*follows, *overrides]))
    assert message in sentence
    assert not unfit_for_training(load_config([], follows))
    assert not unfit_for_training(load_config([], [*named, *overrides]))


def test_separate_evaluations_at_steps_with_checkpoints_are_accepted() -> None:
    named = ["task=tabular", "run.name=first", "train.steps=9", "train.eval_separate=true"]
    for overrides in ([], ["train.eval_every=150", "checkpoint.every_steps=50"]):
        assert not unfit_for_training(load_config([], [*named, *overrides]))


def test_a_metric_of_unknown_meaning_may_have_either_mode() -> None:
    named = ["task=tabular", "run.name=first", "train.steps=9"]
    for mode in ("min", "max"):
        metric = ["checkpoint.metric=temperature", f"checkpoint.mode={mode}"]
        assert not unfit_for_training(load_config([], [*named, *metric]))
