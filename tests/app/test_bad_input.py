"""Every mistake a person can make gets one sentence, exit code 2, no traceback, and leaves nothing behind."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from cluster.remote import free_port
from tests.running import committed, environment, finish, flip, invoke, start

BASE = ["task=tests.tasks:Points", "train.steps=4", "train.global_batch_size=8", "launcher=local"]
DIGITS = "task=image_classification task_args.data=digits"
STAGES = "strategy=pipeline parallel.pp=2"

# What is written after BASE, and words of the sentence.
ROWS: list[tuple[str, ...]] = [
    ("steps=3", "steps", "train.steps"),
    ("train.steps=many", "train.steps", "many", "Integer"),
    ("train=3", "train", "section"),
    ("fast", "fast", "there is no file"),
    ("train.steps=null", "train.steps", "train.epochs"),
    ("train.epochs=1", "train.steps and train.epochs"),
    ("task=image_clasification", "image_clasification", "image_classification"),
    ("task=image_classification task_args.data=/nowhere", "/nowhere"),
    (f"{DIGITS} task_args.augment_shift=100", "augment_shift is 100"),
    ("task_args.samples=0", "training data is empty"),
    ("checkpoint.metric=banana", "banana", "loss, accuracy"),
    ("task=tests.tasks:Odd task_args.what=unevaluated checkpoint.metric=accuracy", "accuracy", "no eval_data"),
    ("task=tests.tasks:WithoutLoss", "WithoutLoss has no loss"),
    ("task=tests.tasks:Odd task_args.what=vector", "loss has shape ("),
    ("task=tests.tasks:Odd task_args.what=ragged", "do not make a batch"),
    ("task=tests.tasks:Odd task_args.what=stream", "Stream", "gives no sample"),
    ("optimizer.name=nowhere:Adam", "optimizer.name", "import"),
    ("optimizer.name=adm", "optimizer.name", "adamw"),
    ("parallel.deepspeed=nowhere", "parallel.deepspeed", "cannot be read"),
    ("parallel.deepspeed=file", "no JSON object"),
    ("train.global_batch_size=100000000", "global_batch_size", "GB"),
    ("strategy=dpp", "did you mean ddp"),
    ("train.precision=fp8", "train.precision", "fp8", "bf16"),
    ("workers=2", "launcher=local", "workers=1"),
    ("launcher=torchrun", "torchrun --nproc-per-node"),
    ("resources_per_worker.GPU=1", "resources_per_worker.GPU is 1", "torch sees no GPUs", "trireme doctor"),
    ("parallel.dp_shard=3", "dp_shard", "1"),
    (STAGES, "launcher=ray", "strategy=model_parallel"),
    (f"{STAGES} parallel.schedule=1f2b", "did you mean '1f1b'"),
    ("budget=1", "costs are not counted with launcher=local"),
    ("checkpoint.load=/nowhere", "/nowhere"),
    ("run.storage=/proc/x", "/proc/x/refused cannot be written (No"),
    ("run.storage=file/runs", "file/runs", "cannot be read", "Not a directory"),
    ("run.storage=s4://b", "kind (s4://): use a local path, s3://"),
    ("run.storage=gs://bucket", "pip install 'trireme[gs]'"),
    ("tracking.uri=htp://host", "tracking.uri", "http"),
    ("optimizer.betas=0.9", "optimizer.betas", "must be a list", "[0.9, 0.999]"),
    ("optimizer.name=AdamW", "did you mean 'adamw'?"),
]

# What is written alone, the text of x.yaml, and words of the sentence.
FILES: list[tuple[str, str, tuple[str, ...]]] = [
    ("", "", ("experiments/mnist.yaml",)),
    ("nothere.yaml", "", ("nothere.yaml",)),
    ("mnst.yaml", "", ("mnist.yaml",)),
    ("x.yaml", "optimiser: {lr: 1}", ("x.yaml", "optimiser", "optimizer")),
    ("x.yaml", "task: a\n  b: : c", ("x.yaml", "line 2")),
    ("x.yaml", "- a\n- b", ("x.yaml", "keys")),
    ("x.yaml", "", ("task is empty",)),
    ("x.yaml", "task: a\ntask: b", ("x.yaml", "line 2", "task", "twice")),
]

# All of what no run could use is told at once.
SEVERAL = {
    "trian.steps=3": "there is no key 'trian",
    "train.stepz=2": "did you mean 'train.steps'",
    "train.clip_norm=-1": "train.clip_norm is -1.0, but it must be greater than 0",
    "budget=-1": "budget is -1.0, but it must be greater than 0",
    "optimizer.lr=-1": "optimizer.lr is -1.0, but it must not be negative",
    "train.precision=fp8x": "train.precision is 'fp8x', but it must be one of fp32, bf16",
    "train.ema_decay=1": "between 0 and 1",
    "optimizer.lr_scaling=linear": "write for instance optimizer.lr_batch_size=256",
    "run.name=a/b": "letters, digits",
    "workers=some": "workers is 'some'",
    "profile.steps=[9,5]": "profile.steps is [9, 5]",
    "profile.ranks=[-1]": "profile.ranks is [-1]",
    "optimizer.betas=[0.9]": "two numbers",
    "resources_per_worker.CPU=-1": "resources_per_worker.CPU is -1",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(*words: str, code: int = 2) -> Any:
    return invoke("train", *words, code=code)


def refused(*words: str) -> list[str]:
    """What it says, a sentence a line; the folder of now is left as it was."""
    Path("file").write_text("[]")
    Path("mnist.yaml").write_text("")
    before = set(os.listdir())
    result = train(*words)
    assert "Traceback" not in result.output, result.output
    assert result.stderr.startswith("trireme: "), result.stderr
    assert set(os.listdir()) - before <= {"runs"} and not list(Path().glob("runs/*"))
    return result.stderr.strip().splitlines()


@pytest.mark.parametrize(("given", "says"), [(given, says) for given, *says in ROWS], ids=[row[0] for row in ROWS])
def test_one_sentence(given: str, says: list[str]) -> None:
    (said,) = refused(*BASE, "run.name=refused", *shlex.split(given))
    assert all(word in said for word in says), said


@pytest.mark.parametrize(("given", "text", "says"), FILES)
def test_one_sentence_on_a_file(given: str, text: str, says: tuple[str, ...]) -> None:
    Path("x.yaml").write_text(text)
    (said,) = refused(*given.split())
    assert all(word in said for word in says), said


def test_several_mistakes_are_told_at_once_and_to_programs_too() -> None:
    said = refused(*BASE, *SEVERAL)
    assert len(said) == len(SEVERAL), said
    for words in SEVERAL.values():
        assert sum(words in sentence for sentence in said) == 1, (words, said)
    told = json.loads(train(*BASE, "train.stepz=3", "--json").stdout)
    assert told["status"] == "refused" and "train.stepz" in told["error"]


def test_config_lists_the_arguments_of_the_task() -> None:
    result = invoke("config", "task=tabular")
    said = result.stdout.partition("# task_args of tabular:")[2]
    assert "ignore: 'list[str] | None' = None" in said and "ignore: Columns to leave out." in said


@pytest.mark.slow
def test_a_batch_that_does_not_divide_under_torchrun(tmp_path: Path) -> None:
    own = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ["train", *BASE[:2], "train.global_batch_size=9", "strategy=ddp", "run.name=x", f"run.storage={tmp_path}"]
    words.append("tracking.enabled=false")
    ranks = [start(words, env=environment(**own, RANK=rank, LOCAL_RANK=rank)) for rank in ("0", "1")]
    for ended in map(finish, ranks):
        assert ended.code == 2 and "train.global_batch_size is 9" in ended.err and "8 or 10" in ended.err
        assert "Traceback" not in ended.err


def test_more_workers_than_the_cluster_has(tmp_path: Path, connected: None) -> None:
    ended = train(*BASE[:2], "run.name=x", f"run.storage={tmp_path}", "workers=64")
    assert "64 workers" in ended.stderr and "workers=4" in ended.stderr, ended.output
    assert not (tmp_path / "x").exists()


def test_checkpoints_that_are_damaged_or_of_another_model(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    """A stopped run with two checkpoints: damaged ones are skipped, and only damaged ones end it."""
    again = [*BASE, "run.name=a", f"run.storage={tmp_path}", "tracking.enabled=false"]
    result = train(*again, "checkpoint.every_steps=2", "checkpoint.weights=false", code=0)
    assert committed(tmp_path / "a") == [2, 4], result.output
    assert not [*tmp_path.rglob("events.jsonl"), *tmp_path.rglob("mlflow.db"), *tmp_path.rglob("weights.pt")]
    manifest = tmp_path / "a" / "run.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"status": "stopped"}))
    for more, says in (
        (["run.name=b", f"checkpoint.load={tmp_path}/a"], ("another model", "16", "32")),
        (["run.name=a"], ("task_args.width", "run.name")),
    ):
        result = train(*again, *more, "task_args.width=32")
        assert all(word in result.stderr for word in says), result.output
    last, first = (next(tmp_path.glob(f"a/checkpoints/step-0000000{step}*/*.distcp")) for step in (4, 2))
    last.write_bytes(last.read_bytes()[:-10])
    flip(first)
    result = train(*again)
    assert "step-0000000" in result.stderr and "Traceback" not in result.output
    flip(first)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    result = train(*again, code=0)
    said = result.output + capfd.readouterr().out
    assert last.name in said and "continuing after step 2" in said
    assert "1 of this machine's 2 GPUs are not used: workers=1 takes 1" in said
