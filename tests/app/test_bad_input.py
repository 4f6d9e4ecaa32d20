"""Every mistake a person can make gets one sentence, exit code 2, no traceback, and leaves nothing behind."""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.cli import group
from cluster.remote import free_port
from tests.running import committed, environment, finish, flip, start


@dataclass(frozen=True)
class Row:
    """What is written, and what the sentence must name."""

    name: str
    arguments: list[str]
    says: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)


BASE = ["task=tests.tasks:Points", "train.steps=4", "train.global_batch_size=8", "launcher=local"]
PIPELINE = ["strategy=pipeline", "parallel.pp=2"]

DIGITS = ["task=image_classification", "task_args.data=digits"]
SEVERAL = "trian: {a: 1}\noptimizer: {betas: [1]}\ntrain: {clip_norm: -1, stepz: 2}\n"

ROWS = [
    Row("unknown key", [*BASE, "train.stepz=3"], ("train.stepz", "train.steps")),
    Row("unknown section", [*BASE, "trian.steps=3"], ("trian", "train")),
    Row("key in the wrong section", [*BASE, "steps=3"], ("steps", "train.steps")),
    Row("unknown key in the file", ["x.yaml"], ("x.yaml", "optimiser", "optimizer"), {"x.yaml": "optimiser: {lr: 1}"}),
    Row("word for a number", [*BASE, "train.steps=many"], ("train.steps", "many", "Integer")),
    Row("fraction for a whole number", [*BASE, "train.seed=1.5"], ("train.seed", "1.5", "Integer")),
    Row("value for a section", [*BASE, "train=3"], ("train", "section")),
    Row("neither file nor key", [*BASE, "fast"], ("fast", "there is no file")),
    Row("unknown choice", [*BASE, "train.precision=fp8"], ("train.precision", "fp8", "bf16")),
    Row("out of range", [*BASE, "train.global_batch_size=0"], ("train.global_batch_size", "greater than 0")),
    Row("negative", [*BASE, "optimizer.lr=-1"], ("optimizer.lr", "negative")),
    Row("missing file", ["nothere.yaml"], ("nothere.yaml",)),
    Row("missing file with a near one", ["mnst.yaml"], ("mnist.yaml",), {"mnist.yaml": ""}),
    Row("no YAML", ["x.yaml"], ("x.yaml", "line 2"), {"x.yaml": "task: a\n  b: : c"}),
    Row("YAML without keys", ["x.yaml"], ("x.yaml", "keys"), {"x.yaml": "- a\n- b"}),
    Row("empty file", ["x.yaml"], ("task is empty",), {"x.yaml": ""}),
    Row("no experiment", [], ("experiments/mnist.yaml",)),
    Row("no length", ["task=tests.tasks:Points", "run.name=x"], ("train.steps", "train.epochs")),
    Row("name that is no name", [*BASE, "run.name=a/b"], ("run.name", "letters")),
    Row("workers", [*BASE, "workers=some"], ("workers", "some")),
    Row("unknown task", [*BASE, "task=image_clasification"], ("image_clasification", "image_classification")),
    Row("missing data", [*BASE, "task=image_classification", "task_args.data=/nowhere"], ("/nowhere",)),
    Row("a metric that is not measured", [*BASE, "checkpoint.metric=banana"], ("banana", "loss, accuracy")),
    Row(
        "a metric and nothing to measure it on",
        [*BASE, "task=tests.tasks:Odd", "task_args.what=unevaluated", "checkpoint.metric=accuracy"],
        ("accuracy", "no eval_data"),
    ),
    Row("two lengths", [*BASE, "train.epochs=1"], ("train.steps and train.epochs",)),
    Row("a key twice", ["x.yaml"], ("x.yaml", "line 2", "task", "twice"), {"x.yaml": "task: a\ntask: b"}),
    Row("an average that never moves", [*BASE, "train.ema_decay=1"], ("train.ema_decay", "between 0 and 1")),
    Row("less than no resource", [*BASE, "resources_per_worker.CPU=-1"], ("resources_per_worker.CPU is -1",)),
    Row("an optimizer that is not there", [*BASE, "optimizer.name=nowhere:Adam"], ("optimizer.name", "import")),
    Row("no such file of DeepSpeed's", [*BASE, "parallel.deepspeed=x"], ("parallel.deepspeed", "cannot be read")),
    Row("a file of DeepSpeed's that is none", [*BASE, "parallel.deepspeed=x"], ("no JSON object",), {"x": "[]"}),
    Row("one beta", [*BASE, "optimizer.betas=[0.9]"], ("optimizer.betas", "two numbers")),
    Row("a batch that fits nowhere", [*BASE, "train.global_batch_size=100000000"], ("global_batch_size", "GB")),
    Row("no loss", [*BASE, "task=tests.tasks:Odd", "task_args.what=no loss"], ("WithoutLoss has no loss",)),
    Row("a loss of many numbers", [*BASE, "task=tests.tasks:Odd", "task_args.what=vector"], ("loss has shape (",)),
    Row("ragged samples", [*BASE, "task=tests.tasks:Odd", "task_args.what=ragged"], ("do not make a batch",)),
    Row("a stream", [*BASE, "task=tests.tasks:Odd", "task_args.what=stream"], ("Stream", "gives no sample")),
    Row("several mistakes", ["x.yaml"], ("trian", "betas", "clip_norm", "stepz"), {"x.yaml": SEVERAL}),
    Row("a swap", [*BASE, "strategy=dpp"], ("did you mean ddp",)),
    Row("too far a shift", [*BASE, *DIGITS, "task_args.augment_shift=100"], ("augment_shift is 100",)),
    Row("empty data", [*BASE, "task_args.samples=0"], ("training data is empty",)),
    Row("unknown strategy", [*BASE, "strategy=fsdpp"], ("fsdpp", "fsdp")),
    Row("two workers in one process", [*BASE, "workers=2"], ("launcher=local", "workers=1")),
    Row("torchrun without torchrun", [*BASE, "launcher=torchrun"], ("torchrun --nproc-per-node",)),
    Row("degrees that do not multiply", [*BASE, "parallel.dp_shard=3"], ("dp_shard", "1")),
    Row("unknown optimizer", [*BASE, "optimizer.name=adm"], ("optimizer.name", "adamw")),
    Row("storage that cannot be made", [*BASE, "run.storage=/proc/x"], ("/proc/x/refused cannot be written (No",)),
    Row("storage in a file", [*BASE, "run.storage=x/runs"], ("x/runs", "cannot be read", "Not a directory"), {"x": ""}),
    Row("storage of an unknown kind", [*BASE, "run.storage=s4://b"], ("kind (s4://): use a local path, s3://",)),
    Row("MLflow URI of an unknown scheme", [*BASE, "tracking.uri=htp://host"], ("tracking.uri", "http")),
    Row("storage without its package", [*BASE, "run.storage=gs://bucket"], ("pip install 'trireme[gs]'",)),
    Row("stages in one process", [*BASE, *PIPELINE], ("launcher=ray", "strategy=model_parallel")),
    Row("unknown schedule", [*BASE, *PIPELINE, "parallel.schedule=1f2b"], ("did you mean '1f1b'",)),
    Row("budget that is not counted", [*BASE, "budget=1"], ("costs are not counted with launcher=local",)),
    Row("negative budget", [*BASE, "budget=-1"], ("budget is -1",)),
    Row("scaling without a reference", [*BASE, "optimizer.lr_scaling=linear"], ("optimizer.lr_batch_size",)),
    Row("checkpoint that is not there", [*BASE, "checkpoint.load=/nowhere"], ("/nowhere",)),
    Row("steps to profile that go backwards", [*BASE, "profile.steps=[9,5]"], ("profile.steps",)),
    Row("one step to profile", [*BASE, "profile.steps=[5]"], ("profile.steps",)),
    Row("no rank to profile", [*BASE, "profile.ranks=[-1]"], ("profile.ranks",)),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_one_sentence(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in row.files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    arguments = row.arguments
    if row.arguments and not row.arguments[0].endswith(".yaml") and "run.name" not in " ".join(row.arguments):
        arguments = [*row.arguments, "run.name=refused"]
    result = CliRunner().invoke(group, ["train", *arguments], catch_exceptions=False)
    assert result.exit_code == 2, result.output
    said = result.stderr.strip()
    assert said.startswith("trireme: ") and (row.name == "several mistakes") == ("\n" in said), said
    assert all(word in said for word in row.says), said
    assert "Traceback" not in result.output
    left = [name for name in sorted(os.listdir(tmp_path)) if name not in before]
    assert left in ([], ["runs"]) and not list(tmp_path.glob("runs/*")), left


def test_config_lists_the_arguments_of_the_task() -> None:
    result = CliRunner().invoke(group, ["config", "task=tabular"], catch_exceptions=False)
    said = result.stdout.partition("# task_args of tabular:")[2]
    assert "ignore: 'list[str] | None' = None" in said and "ignore: columns to leave out." in said


def test_json_says_it_too() -> None:
    result = CliRunner().invoke(group, ["train", *BASE, "train.stepz=3", "--json"], catch_exceptions=False)
    said = json.loads(result.stdout)
    assert result.exit_code == 2 and said["status"] == "refused" and "train.stepz" in said["error"]


def test_a_batch_that_does_not_divide_under_torchrun(tmp_path: Path) -> None:
    given = ["task=tests.tasks:Points", "strategy=ddp", "train.steps=2", "train.global_batch_size=9"]
    own = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ["train", *given, "run.name=x", f"run.storage={tmp_path}"]
    ranks = [start(words, env=environment(**own, RANK=rank, LOCAL_RANK=rank)) for rank in ("0", "1")]
    for ended in map(finish, ranks):
        assert ended.code == 2 and "train.global_batch_size is 9" in ended.err and "8 or 10" in ended.err
        assert "Traceback" not in ended.err


def test_more_workers_than_the_cluster_has(tmp_path: Path, connected: None) -> None:
    arguments = ["task=tests.tasks:Points", "train.steps=2", "run.name=x", f"run.storage={tmp_path}", "workers=64"]
    ended = CliRunner().invoke(group, ["train", *arguments])
    assert ended.exit_code == 2 and "64 workers" in ended.stderr and "workers=4" in ended.stderr, ended.output
    assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of a stopped run `a` with two checkpoints."""
    storage = tmp_path_factory.mktemp("trained")
    more = ["checkpoint.every_steps=2", "tracking.enabled=false", "run.name=a", f"run.storage={storage}"]
    result = CliRunner().invoke(group, ["train", *BASE, *more, "checkpoint.weights=false"])
    assert result.exit_code == 0, result.output
    assert committed(storage / "a") == [2, 4]
    assert not [*storage.rglob("events.jsonl"), *storage.rglob("mlflow.db"), *storage.rglob("weights.pt")], "disabled"
    manifest = storage / "a" / "run.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"status": "stopped"}))
    return storage


def test_damaged_checkpoints_are_skipped_and_only_damaged_ones_end_it(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained / "a", tmp_path / "a")
    train = ["train", *BASE, "run.name=a", f"run.storage={tmp_path}", "tracking.enabled=false"]
    last, first = (next(tmp_path.glob(f"a/checkpoints/step-0000000{step}*/*.distcp")) for step in (4, 2))
    last.write_bytes(last.read_bytes()[:-10])
    flip(first)
    result = CliRunner().invoke(group, train)
    assert result.exit_code == 2 and "step-0000000" in result.stderr and "Traceback" not in result.output
    flip(first)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    ended = CliRunner().invoke(group, train)
    said = ended.output + capfd.readouterr().out
    assert ended.exit_code == 0 and last.name in said and "continuing after step 2" in said
    assert "1 of this machine's 2 GPUs are not used: workers=1 takes 1" in said


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["run.name=b", "checkpoint.load={trained}/a"], ("another model", "16", "32")),
        (["run.name=a"], ("task_args.width", "run.name")),
    ],
)
def test_a_run_or_checkpoint_of_another_model(trained: Path, more: list[str], says: tuple[str, ...]) -> None:
    train = ["train", *BASE, "tracking.enabled=false", *(word.format(trained=trained) for word in more)]
    result = CliRunner().invoke(group, [*train, f"run.storage={trained}", "task_args.width=32"])
    assert result.exit_code == 2 and all(word in result.stderr for word in says), result.output
