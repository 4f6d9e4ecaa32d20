"""The promises of SECURITY.md: no code runs from files, secrets stay hidden, files stay private."""

import contextlib
import hashlib
import json
import os
import pickle
import stat
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from app import checkpoint
from app.checkpoint import Weights
from app.checkpoint.commit import MARKER, File, encode
from app.config.check import unfit_for_training
from app.config.io import load_config
from app.console.masking import is_secret, mask_text, mask_tree
from app.data.files import cache_folder
from app.errors import UserError
from app.run.manifest import run_folder
from app.tasks import load_task
from cluster.files import FOLDER
from tests.app.checkpoint.kit import save, state_of
from tests.ray_heads import ray_head_with_jobs
from tests.running import POINTS, environment, finish, start
from tests.test_fuzz import LAUGHS


class Attack:
    """Unpickling it makes a folder."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def test_no_file_that_is_read_runs_code(tmp_path: Path) -> None:
    """Not the metadata of a checkpoint, nor its other objects, nor a file of tensors."""
    created = tmp_path / "made"
    save(tmp_path / "c", 1)
    (commit,) = checkpoint.commits(str(tmp_path / "c"))
    for content, message in [
        (pickle.dumps(Attack(created)), r"its \.metadata names posix\.mkdir"),
        (pickle.dumps({"a": 1}), "is no table"),
        (b"\x80\x05.", "is not read"),
    ]:
        # The commit marker is made to match.
        Path(commit.path, ".metadata").write_bytes(content)
        file = File(len(content), hashlib.sha256(content).hexdigest())
        tampered = replace(commit, files=commit.files | {".metadata": file})
        Path(commit.path, MARKER).write_bytes(encode(tampered))
        for read in (partial(checkpoint.load, tampered, state_of(0.0)), partial(Weights, tampered)):
            with pytest.raises(UserError, match=message):
                read()
    state = state_of(1.0)
    state["scheduler"]["last_epoch"] = Attack(created)
    save(tmp_path / "d", 1, state=state)
    with pytest.raises(UserError, match="could not be read"):
        checkpoint.load(checkpoint.find(str(tmp_path / "d")), state_of(0.0))
    torch.save(Attack(created), tmp_path / "x.pt")
    with pytest.raises(UserError):
        load_task("image_classification", {"data": str(tmp_path / "x.pt")}).train_data()
    assert not created.exists()


def test_torchs_files_are_read_as_data_only() -> None:
    """Two files are exceptions.

    Parity reads the results of its own processes, in a folder of its own. app/models/prediction.py
    is part of an MLflow model, which is a pickle as a whole.
    """
    root = Path(__file__).parents[2]
    texts = {}
    for folder in ("app", "cluster", "strategies", "experiments"):
        for file in (root / folder).rglob("*.py"):
            texts[str(file.relative_to(root))] = file.read_text()
    unsafe = {name for name, text in texts.items() if "weights_only=False" in text}
    assert unsafe == {"app/models/prediction.py", "experiments/parity/matrix.py"}
    # Between the ranks of a run, which torch connects, for a run whose config.yaml says that its
    # task is a pickle, and of what a simulation, the reader of configurations, which copies trees
    # so, a benchmark of plans, in Trireme's cache, or the driver of a run, for that run's writer,
    # has pickled itself.
    unpickling = {
        name
        for name, text in texts.items()
        if "pickle.load" in text.replace("cloudpickle.load", "")
    }
    assert unpickling == {
        "strategies/pipeline/p2p.py",
        "app/checkpoint/table.py",
        "app/config/io.py",
        "app/tasks/by_value.py",
        "app/tracking/model.py",
        "experiments/benchmarks/compared.py",
        "experiments/benchmarks/scale_out.py",
    }


@pytest.mark.parametrize(
    "name", ["..", "../x", "/tmp/x", "a/b", ".hidden", "", "a\nb", "~root", "a" * 129, "x\x00"]
)
def test_a_runs_name_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    overrides = ["task=a", "train.steps=1", f"run.storage={tmp_path}", f"run.name='{name}'"]
    try:
        (sentence,) = unfit_for_training(load_config([], overrides))
    except UserError as error:
        sentence = str(error)
    assert "run.name" in sentence
    config = load_config([], ["task=a", f"run.storage={tmp_path}", "run.name=a..b-1"])
    assert Path(run_folder(config).url).parent == tmp_path


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        b"a: &a [*a]",
        b"task: !!python/object/apply:os.mkdir [made]",
        b"task: !!python/name:os.mkdir",
    ],
)
def test_an_experiment_file_runs_no_code_and_takes_little_memory(
    tmp_path: Path, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_bytes(text)
    before = psutil.Process().memory_info().rss
    with pytest.raises(UserError, match="cannot be read as YAML"):
        load_config([tmp_path / "x.yaml"])
    assert psutil.Process().memory_info().rss - before < 50e6
    assert not (tmp_path / "made").exists()


def test_temporary_files_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # not a folder
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    cache_folder().chmod(0o777)
    with pytest.raises(UserError, match="can be written by others"):
        cache_folder()


# --- secrets --------------------------------------------------------------------------------------

SECRETS = [
    "password",
    "db.Password",
    "hf_token",
    "apiKey",
    "AWS_SECRET_ACCESS_KEY",
    "x.credentials.user",
]
OTHERS = [
    "tokenizer",
    "train/tokens_per_second",
    "monkey",
    "task_args.d_model",
    "pad_token",
    "label_key",
    "key",
]
MASKED = {
    "http://me:pa55@host:5000/x": "http://***@host:5000/x",
    "postgresql+psycopg2://u:p@ss@db/x and more": "postgresql+psycopg2://***@db/x and more",
    "https://h/a?x=1&api_token=abc&y=2": "https://h/a?x=1&api_token=***&y=2",
    "s3://bucket/path": "s3://bucket/path",
    "mail me@example.org": "mail me@example.org",
    "hf_token: abc\nuri: http://u:p@h\ntokenizer: bpe\n": (
        "hf_token: ***\nuri: http://***@h\ntokenizer: bpe\n"
    ),
    "train x.yaml task_args.password='a b' a=b": "train x.yaml task_args.password=*** a=b",
    '{"password": "a b", "n": 1}': '{"password": ***, "n": 1}',
}


def test_secrets_are_hidden_and_similar_values_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are known by name, in texts and in a configuration."""
    assert [name for name in (*SECRETS, *OTHERS, "token.x") if is_secret(name)] == SECRETS
    assert {text: mask_text(text) for text in MASKED} == MASKED
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "runs")
    assert mask_text("said runs twice") == "said *** twice"
    masked = mask_tree({"a": "runs", "storage": "./runs"})
    assert masked == {"a": "***", "storage": "./runs"}, "a part of a word is not masked"
    inner = {"b": 1, "secret": "x", "none": None, "empty": {}}
    tree = {"a": inner, "list": ["http://u:p@h", 2], "token": 5, "key": "c", "hf_token": "abc"}
    masked_inner = inner | {"secret": "***"}
    masked_values = {"a": masked_inner, "list": ["http://***@h", 2], "hf_token": "***"}
    assert mask_tree(tree) == tree | masked_values


NAMES = ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY")
PLANTED = {name: f"planted-{uuid.uuid4().hex}" for name in NAMES}


def look(command_lines: set[str], over: threading.Event) -> None:
    """Collects the command lines of all processes, as `ps` shows them, until `over` is set."""
    while not over.wait(0.05):
        for process in psutil.process_iter(["cmdline"]):
            command_lines.add(" ".join(process.info["cmdline"] or ()))


@pytest.mark.slow
def test_planted_secrets_appear_nowhere(tmp_path: Path) -> None:
    """They are planted in a job on a real job server.

    Searched are the run's folder, MLflow, Ray's session, the job's information and the command
    lines of all processes.
    """
    home = tmp_path / "home"
    experiment = tmp_path / "work" / "x.yaml"
    home.mkdir()
    experiment.parent.mkdir()
    experiment.write_text("task: tests.tasks:Points\ntrain: {global_batch_size: 16, steps: 20}\n")
    command_lines = set[str]()
    over = threading.Event()
    with (
        ray_head_with_jobs() as (address, dashboard),
        ThreadPoolExecutor() as pool,
        contextlib.ExitStack() as at_end,
    ):
        pool.submit(look, command_lines, over)
        at_end.callback(over.set)
        text = (FOLDER / "laptop.yaml").read_text().replace("6379", address.rpartition(":")[2])
        (tmp_path / "c.yaml").write_text(text.replace("8265", dashboard.rpartition(":")[2]))
        env = environment(HOME=str(home), RAY_AUTH_MODE="disabled", **PLANTED)
        arguments = [
            "submit",
            *POINTS,
            "train.steps=20",
            "run.name=kept",
            f"run.storage={tmp_path}/runs",
            "workers=2",
            f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
            f"--cluster={tmp_path / 'c.yaml'}",
            "--env=HF_TOKEN",
            "--env=AWS_SECRET_ACCESS_KEY",
        ]
        ended = finish(start(arguments, env=env)).expect()
        from ray.job_submission import JobSubmissionClient

        listed = JobSubmissionClient(dashboard).list_jobs()
        jobs = json.dumps([job.model_dump() for job in listed], default=str)
        port = f"--port={address.rpartition(':')[2]} "
        heads = [line for line in command_lines if port in line and "--temp-dir=" in line]
        session = Path(heads[0].partition("--temp-dir=")[2].split()[0])
        files = [path for path in (*tmp_path.rglob("*"), *session.rglob("*")) if path.is_file()]
        assert "HF_TOKEN (secret)" in ended.out
        assert len(files) > 50
        assert (tmp_path / "runs" / "kept").is_dir()
        secrets = [value.encode() for value in PLANTED.values()]
        leaks = set()
        for path in files:
            content = path.read_bytes()
            if any(secret in content for secret in secrets):
                leaks.add(str(path))
    for value in PLANTED.values():
        assert value not in jobs + ended.out + ended.err + "\n".join(command_lines)
    assert not leaks
