"""SECURITY.md, kept: no code from a file, no secret where others look, nothing that other users may open."""

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
from app.config.check import missing_for_training
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
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def test_no_file_that_is_read_runs_code(tmp_path: Path) -> None:
    """A checkpoint's table, what is no tensor in a checkpoint, a file of tensors."""
    made = tmp_path / "made"
    save(tmp_path / "c", 1)
    (good,) = checkpoint.commits(str(tmp_path / "c"))
    for content, said in [
        (pickle.dumps(Attack(made)), r"its \.metadata names posix\.mkdir"),
        (pickle.dumps({"a": 1}), "is no table"),
        (b"\x80\x05.", "is not read"),
    ]:
        Path(good.path, ".metadata").write_bytes(content)  # and a marker that vouches for it
        file = File(len(content), hashlib.sha256(content).hexdigest())
        bad = replace(good, files=good.files | {".metadata": file})
        Path(good.path, MARKER).write_bytes(encode(bad))
        for read in (partial(checkpoint.load, bad, state_of(0.0)), partial(Weights, bad)):
            with pytest.raises(UserError, match=said):
                read()
    state = state_of(1.0)
    state["scheduler"]["last_epoch"] = Attack(made)
    save(tmp_path / "d", 1, state=state)
    with pytest.raises(UserError, match="could not be read"):
        checkpoint.load(checkpoint.find(str(tmp_path / "d")), state_of(0.0))
    torch.save(Attack(made), tmp_path / "x.pt")
    with pytest.raises(UserError):
        load_task("image_classification", {"data": str(tmp_path / "x.pt")}).train_data()
    assert not made.exists()


def test_what_reads_torchs_files_reads_data_alone() -> None:
    """Parity reads its own processes' results, from a folder of its own; app/models/prediction.py is within an MLflow
    model, which is a pickle as a whole."""
    root = Path(__file__).parents[2]
    files = [file for part in ("app", "cluster", "strategies", "experiments") for file in (root / part).rglob("*.py")]
    unsafe = {str(f.relative_to(root)) for f in files if "weights_only=False" in f.read_text()}
    loads = {str(f.relative_to(root)) for f in files if "pickle.load" in f.read_text().replace("cloudpickle.load", "")}
    assert unsafe == {"app/models/prediction.py", "experiments/parity/matrix.py"}
    # Between the ranks of one run, which torch connects; and a run whose config.yaml says that its task is a pickle.
    assert loads == {"strategies/pipeline/p2p.py", "app/tasks/by_value.py"}


@pytest.mark.parametrize("name", ["..", "../x", "/tmp/x", "a/b", ".hidden", "", "a\nb", "~root", "a" * 129, "x\x00"])
def test_a_runs_name_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    try:
        config = load_config([], ["task=a", "train.steps=1", f"run.storage={tmp_path}", f"run.name='{name}'"])
        (said,) = missing_for_training(config)
    except UserError as error:
        said = str(error)
    assert "run.name" in said
    kept = load_config([], ["task=a", f"run.storage={tmp_path}", "run.name=a..b-1"])
    assert Path(run_folder(kept).url).parent == tmp_path


@pytest.mark.parametrize(
    "text", [LAUGHS, b"a: &a [*a]", b"task: !!python/object/apply:os.mkdir [made]", b"task: !!python/name:os.mkdir"]
)
def test_an_experiment_file_is_data_and_not_much(tmp_path: Path, text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_bytes(text)
    before = psutil.Process().memory_info().rss
    with pytest.raises(UserError, match="cannot be read as YAML"):
        load_config([tmp_path / "x.yaml"])
    assert psutil.Process().memory_info().rss - before < 50e6 and not (tmp_path / "made").exists()


def test_temporary_files_are_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # where no cache can be
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    cache_folder().chmod(0o777)
    with pytest.raises(UserError, match="can be written by others"):
        cache_folder()


# --- secrets ----------------------------------------------------------------------------------------------------------

SECRETS = ["password", "db.Password", "hf_token", "apiKey", "AWS_SECRET_ACCESS_KEY", "x.credentials.user"]
OTHERS = ["tokenizer", "train/tokens_per_second", "monkey", "task_args.d_model", "pad_token", "label_key", "key"]
MASKED = {
    "http://me:pa55@host:5000/x": "http://***@host:5000/x",
    "postgresql+psycopg2://u:p@ss@db/x and more": "postgresql+psycopg2://***@db/x and more",
    "https://h/a?x=1&api_token=abc&y=2": "https://h/a?x=1&api_token=***&y=2",
    "s3://bucket/path": "s3://bucket/path",
    "mail me@example.org": "mail me@example.org",
    "hf_token: abc\nuri: http://u:p@h\ntokenizer: bpe\n": "hf_token: ***\nuri: http://***@h\ntokenizer: bpe\n",
    "train x.yaml task_args.password='a b' a=b": "train x.yaml task_args.password=*** a=b",
    '{"password": "a b", "n": 1}': '{"password": ***, "n": 1}',
}


def test_secrets_are_hidden_and_what_only_looks_like_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, in texts, and in a configuration."""
    assert [name for name in (*SECRETS, *OTHERS, "token.x") if is_secret(name)] == SECRETS
    assert {text: mask_text(text) for text in MASKED} == MASKED
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "runs")
    assert mask_text("said runs twice") == "said *** twice"
    assert mask_tree({"a": "runs", "storage": "./runs"}) == {"a": "***", "storage": "./runs"}, "not as part of a word"
    inner = {"b": 1, "secret": "x", "none": None, "empty": {}}
    masked = mask_tree({"a": inner, "list": ["http://u:p@h", 2], "token": 5, "key": "c", "hf_token": "abc"})
    hidden = inner | {"secret": "***"}
    assert masked == {"a": hidden, "list": ["http://***@h", 2], "token": 5, "key": "c", "hf_token": "***"}


NAMES = ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY")
PLANTED = {name: f"planted-{uuid.uuid4().hex}" for name in NAMES}


def look(seen: set[str], over: threading.Event) -> None:
    """Command lines, as `ps` shows them to everyone, of all processes while it lasts."""
    while not over.wait(0.05):
        for process in psutil.process_iter(["cmdline"]):
            seen.add(" ".join(process.info["cmdline"] or ()))


@pytest.mark.slow
def test_planted_secrets_are_found_nowhere(tmp_path: Path) -> None:
    """A job with secrets, on a real job server: in the run's folder, MLflow, Ray's session, its job's information and
    every command line."""
    home, experiment = tmp_path / "home", tmp_path / "work" / "x.yaml"
    home.mkdir()
    experiment.parent.mkdir()
    experiment.write_text("task: tests.tasks:Points\ntrain: {global_batch_size: 16, steps: 20}\n")
    seen, over = set[str](), threading.Event()
    with ray_head_with_jobs() as (address, dashboard), ThreadPoolExecutor() as pool, contextlib.ExitStack() as at_end:
        pool.submit(look, seen, over)
        at_end.callback(over.set)
        text = (FOLDER / "laptop.yaml").read_text().replace("6379", address.rpartition(":")[2])
        (tmp_path / "c.yaml").write_text(text.replace("8265", dashboard.rpartition(":")[2]))
        env = environment(HOME=str(home), RAY_AUTH_MODE="disabled", **PLANTED)
        words = ["submit", *POINTS, "train.steps=20", "run.name=kept", f"run.storage={tmp_path}/runs", "workers=2"]
        words += [f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", "--cluster", str(tmp_path / "c.yaml")]
        ended = finish(start([*words, "--env", "HF_TOKEN", "--env", "AWS_SECRET_ACCESS_KEY"], env=env)).expect()
        from ray.job_submission import JobSubmissionClient

        jobs = json.dumps([job.model_dump() for job in JobSubmissionClient(dashboard).list_jobs()], default=str)
        head = next(line for line in seen if f"--port={address.rpartition(':')[2]} " in line and "--temp-dir=" in line)
        session = head.partition("--temp-dir=")[2].split()[0]
        places = [path for at in (tmp_path, Path(session)) for path in at.rglob("*") if path.is_file()]
        assert "HF_TOKEN (secret)" in ended.out and len(places) > 50 and (tmp_path / "runs" / "kept").is_dir()
        found = {str(path) for path in places for value in PLANTED.values() if value.encode() in path.read_bytes()}
    for value in PLANTED.values():
        assert value not in jobs + ended.out + ended.err + "\n".join(seen)
    assert not found
