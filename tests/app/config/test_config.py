"""Configuration: precedence, documentation, round trips, completion."""

from pathlib import Path

import pytest
import yaml
from click.shell_completion import ShellComplete

from app.cli import group
from app.config import Config
from app.config.io import documentation, explain, flatten, from_dict, load_config, to_dict, to_yaml
from app.errors import UserError
from tests.running import ROOT

EXPERIMENTS = sorted(p for p in (ROOT / "experiments").glob("*.yaml") if not p.name.startswith("sweep_"))


def test_defaults_then_files_then_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text("train: {steps: 1, seed: 1, log_every: 7}\nrun: {name: first}")
    (tmp_path / "b.yaml").write_text("train: {steps: 2, seed: 2}")
    config = load_config([tmp_path / "a.yaml", tmp_path / "b.yaml"], ["train.steps=3"])
    assert (config.train.steps, config.train.seed, config.train.log_every) == (3, 2, 7)
    assert config.train.global_batch_size == Config().train.global_batch_size
    assert config.run.name == "first" and load_config([tmp_path / "b.yaml"]).run.name == "b"
    monkeypatch.setenv("TRIREME_TEST_NAME", "from-the-environment")
    assert load_config([], ["run.name=${oc.env:TRIREME_TEST_NAME}"]).run.name == "from-the-environment"
    with pytest.raises(UserError, match="TRIREME_NOT_THERE"):
        load_config([], ["run.name=${oc.env:TRIREME_NOT_THERE}"])


@pytest.mark.parametrize(("given", "left"), [("train.steps=5", "epochs"), ("train.epochs=2", "steps")])
def test_the_length_given_last_counts(tmp_path: Path, given: str, left: str) -> None:
    (tmp_path / "a.yaml").write_text(f"train: {{{left}: 1}}")
    assert getattr(load_config([tmp_path / "a.yaml"], [given]).train, left) is None


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
    for begun, word in ("train.glo", "global_batch_size="), ("exp", "experiments/"), ("train.precision=b", "bf16"):
        assert any(found.value.endswith(word) for found in complete(["train"], begun))
