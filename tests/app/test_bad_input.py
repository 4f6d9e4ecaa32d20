"""Every user's mistake gets one sentence and exit code 2, and leaves nothing behind."""

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

# The arguments after BASE, and words of the sentence.
ROWS: list[tuple[str, ...]] = [
    ("steps=3", "steps", "train.steps"),
    ("train.steps=many", "train.steps", "many", "a whole number"),
    ("train=3", "train", "section"),
    ("fast", "fast", "there is no file"),
    ("train.steps=null", "train.steps", "train.epochs"),
    ("train.epochs=1", "train.steps and train.epochs"),
    ("task=image_clasification", "image_clasification", "image_classification"),
    ("task=image_classification task_args.data=/nowhere", "/nowhere"),
    (f"{DIGITS} task_args.augment_shift=100", "augment_shift is 100"),
    ("task_args.samples=0", "training data is empty"),
    ("checkpoint.metric=banana", "banana", "loss, accuracy"),
    (
        "task=tests.tasks:Odd task_args.what=unevaluated checkpoint.metric=score",
        "score",
        "no eval_data",
    ),
    ("task=tests.tasks:WithoutLoss", "WithoutLoss has no loss"),
    ("task=tests.tasks:Odd task_args.what=vector", "loss has shape ("),
    ("task=tests.tasks:Odd task_args.what=ragged", "do not make a batch"),
    ("task=tests.tasks:Odd task_args.what=stream", "Stream", "yields no samples"),
    ("optimizer.name=nowhere:Adam", "optimizer.name", "import"),
    ("optimizer.name=adm", "optimizer.name", "adamw"),
    ("parallel.deepspeed=nowhere", "parallel.deepspeed", "cannot be read"),
    ("parallel.deepspeed=file", "no JSON object"),
    ("train.global_batch_size=100000000", "global_batch_size", "GB"),
    ("strategy=dpp", "did you mean ddp"),
    ("train.precision=fp8", "train.precision", "fp8", "bf16"),
    ("workers=2", "launcher=local", "workers=1"),
    ("launcher=torchrun", "torchrun --nproc-per-node"),
    (
        "resources_per_worker.GPU=1",
        "resources_per_worker.GPU is 1",
        "torch sees no GPUs",
        "trireme doctor",
    ),
    ("parallel.dp_shard=3", "dp_shard", "1"),
    (STAGES, "launcher=ray", "strategy=model_parallel"),
    (f"{STAGES} parallel.schedule=1f2b", "did you mean '1f1b'"),
    ("budget=1", "costs are not counted with launcher=local"),
    ("plan.follow=true strategy=auto", "which launcher=local cannot do: write launcher=ray"),
    ("train.eval_separate=true", "there is no Ray with launcher=local: write launcher=ray"),
    ("checkpoint.load=/nowhere", "/nowhere"),
    ("run.storage=/proc/x", "/proc/x/refused cannot be written (No"),
    ("run.storage=file/runs", "file/runs", "cannot be read", "Not a directory"),
    ("run.storage=s4://b", "kind (s4://): use a local path, s3://"),
    ("run.storage=gs://bucket", "pip install 'trireme[gs]'"),
    ("tracking.uri=htp://host", "tracking.uri", "http"),
    ("optimizer.betas=0.9", "optimizer.betas", "must be a list", "[0.9, 0.999]"),
    ("optimizer.name=AdamW", "did you mean 'adamw'?"),
]

# All arguments, the text of x.yaml, and words of the sentence.
FILES: list[tuple[str, str, tuple[str, ...]]] = [
    ("", "", ("experiments/mnist.yaml",)),
    ("nothere.yaml", "", ("nothere.yaml",)),
    ("mnst.yaml", "", ("mnist.yaml",)),
    ("x.yaml", "optimiser: {lr: 1}", ("x.yaml", "optimiser", "optimizer")),
    ("x.yaml", "task: a\n  b: : c", ("x.yaml", "line 2")),
    ("x.yaml", "- a\n- b", ("x.yaml", "keys")),
    ("x.yaml", "task: a\ntask: b", ("x.yaml", "line 2", "task", "twice")),
]

# Mistakes that are all told at once, and words of their sentences.
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
    "train.eval_resources.gpu=1": "write train.eval_resources.GPU=1",
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(*arguments: str, code: int = 2) -> Any:
    return invoke("train", *arguments, code=code)


def refused(*arguments: str) -> list[str]:
    """The sentences of a refused command, which leaves the current folder as it was."""
    Path("file").write_text("[]")
    Path("mnist.yaml").write_text("")
    before = set(os.listdir())
    result = train(*arguments)
    assert "Traceback" not in result.output, result.output
    assert result.stderr.startswith("trireme: "), result.stderr
    assert set(os.listdir()) - before <= {"runs"} and not list(Path().glob("runs/*"))
    return result.stderr.strip().splitlines()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(arguments, words) for arguments, *words in ROWS],
    ids=[row[0] for row in ROWS],
)
def test_a_mistake_gets_one_sentence(arguments: str, words: list[str]) -> None:
    (sentence,) = refused(*BASE, "run.name=refused", *shlex.split(arguments))
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(("arguments", "text", "words"), FILES)
def test_a_mistake_in_a_file_gets_one_sentence(
    arguments: str, text: str, words: tuple[str, ...]
) -> None:
    Path("x.yaml").write_text(text)
    (sentence,) = refused(*arguments.split())
    assert all(word in sentence for word in words), sentence


def test_all_that_training_lacks_is_told_at_once_and_the_task_first() -> None:
    Path("x.yaml").write_text("")
    later_sentences = refused("x.yaml")[1:]
    assert [sentence.partition(":")[0] for sentence in later_sentences] == [
        "give train.steps or train.epochs, one of the two"
    ]
    sentences = refused("task=tabulr")
    assert "there is no task 'tabulr' (did you mean 'tabular'?)" in sentences[0]
    assert len(sentences) == 3
    sentences = refused("task=tests.tasks:Poinst", "train.steps=1")
    assert "has no Poinst (did you mean 'Points'?)" in sentences[0]
    assert sentences[1].startswith("run.name is empty")


def test_several_mistakes_are_told_at_once_also_as_json() -> None:
    sentences = refused(*BASE, *SEVERAL)
    assert len(sentences) == len(SEVERAL), sentences
    for words in SEVERAL.values():
        assert sum(words in sentence for sentence in sentences) == 1, (words, sentences)
    answer = json.loads(train(*BASE, "train.stepz=3", "--json").stdout)
    assert answer["status"] == "refused" and "train.stepz" in answer["error"]


def test_config_lists_the_arguments_of_the_task() -> None:
    result = invoke("config", "task=tabular")
    task_args = result.stdout.partition("# task_args of tabular:")[2]
    assert "ignore: 'list[str] | None' = None" in task_args
    assert "ignore: Columns to leave out." in task_args


@pytest.mark.slow
def test_under_torchrun_every_rank_refuses_a_batch_that_does_not_divide(tmp_path: Path) -> None:
    variables = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    arguments = [
        "train",
        *BASE[:2],
        "train.global_batch_size=9",
        "strategy=ddp",
        "run.name=x",
        f"run.storage={tmp_path}",
        "tracking.enabled=false",
    ]
    ranks = [
        start(arguments, env=environment(**variables, RANK=rank, LOCAL_RANK=rank))
        for rank in ("0", "1")
    ]
    for ended in map(finish, ranks):
        assert ended.code == 2
        assert "train.global_batch_size is 9" in ended.err
        assert "8 or 10" in ended.err
        assert "Traceback" not in ended.err


def test_more_workers_than_the_cluster_has_are_refused(tmp_path: Path, connected: None) -> None:
    ended = train(*BASE[:2], "run.name=x", f"run.storage={tmp_path}", "workers=64")
    assert "64 workers" in ended.stderr and "workers=4" in ended.stderr, ended.output
    assert not (tmp_path / "x").exists()


def test_checkpoints_of_another_model_are_refused_and_damaged_ones_skipped(
    tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    """A stopped run has two checkpoints; it is refused only if both are damaged."""
    arguments = [*BASE, "run.name=a", f"run.storage={tmp_path}", "tracking.enabled=false"]
    result = train(*arguments, "checkpoint.every_steps=2", "checkpoint.weights=false", code=0)
    assert committed(tmp_path / "a") == [2, 4], result.output
    for name in ("events.jsonl", "mlflow.db", "weights.pt"):
        assert not [*tmp_path.rglob(name)]
    manifest = tmp_path / "a" / "run.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"status": "stopped"}))
    for overrides, words in (
        (["run.name=b", f"checkpoint.load={tmp_path}/a"], ("another model", "16", "32")),
        (["run.name=a"], ("task_args.width", "run.name")),
    ):
        result = train(*arguments, *overrides, "task_args.width=32")
        assert all(word in result.stderr for word in words), result.output
    last = next(tmp_path.glob("a/checkpoints/step-00000004*/*.distcp"))
    first = next(tmp_path.glob("a/checkpoints/step-00000002*/*.distcp"))
    last.write_bytes(last.read_bytes()[:-10])
    flip(first)
    result = train(*arguments)
    assert "step-0000000" in result.stderr and "Traceback" not in result.output
    flip(first)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    result = train(*arguments, code=0)
    output = result.output + capfd.readouterr().out
    assert last.name in output and "continuing after step 2" in output
    assert "1 of this machine's 2 GPUs are not used: workers=1 takes 1" in output
