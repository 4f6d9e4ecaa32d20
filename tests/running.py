"""Runs `trireme` as a person would: a process of its own, its output and exit code looked at."""

import contextlib
import functools
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.run.stopping import SIGNALS

ROOT = Path(__file__).parents[1]
LONG = 300.0
"""Seconds to wait for what will come: twenty times what it takes, because other work may have the processors."""
POINTS = ["task=tests.tasks:Points", "train.global_batch_size=16", "tracking.log_model=false"]


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out.strip().splitlines()[-1])

    def expect(self, code: int = 0) -> Any:
        """Itself; it must have ended with this code."""
        assert self.code == code, self.out + self.err
        return self


def here(patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str], *words: str) -> Ended:
    """`trireme WORDS` in this process: for what is refused, or only printed, before anything starts."""
    from app.cli import main  # not above: the first 30 minutes on a GPU run tests where there is no Click

    patch.setattr(sys, "argv", ["trireme", *words])
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Ended(int(ended.value.code or 0), *capture.readouterr())


def invoke(*words: object, code: int = 0) -> Any:
    """`trireme WORDS` in this process too, which ends with `code`: without what `main` does around commands."""
    from click.testing import CliRunner  # not above: as there

    from app.cli import group

    result = CliRunner().invoke(group, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def environment(**more: str) -> dict[str, str]:
    """This environment without what would send a test's metrics, or its Ray, elsewhere."""
    drop = ("MLFLOW_", "RAY_ADDRESS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_TMPDIR": _ray_folder().name} | more


@functools.cache
def _ray_folder() -> tempfile.TemporaryDirectory[str]:
    """Where Ray notes which cluster runs on this machine: a test must not find another program's."""
    return tempfile.TemporaryDirectory(prefix="tests-", dir="/tmp", ignore_cleanup_errors=True)  # short: for sockets


@functools.cache
def _database() -> bytes:
    """An empty database of MLflow's, which takes it seconds of a processor to make: kept beside pytest's cache."""
    kept = ROOT / ".pytest_cache" / f"mlflow-{importlib.metadata.version('mlflow')}.db"
    if not kept.exists():
        from mlflow.tracking import MlflowClient

        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
            os.replace(f"{folder}/mlflow.db", kept)
    return kept.read_bytes()


def seed(arguments: list[str]) -> None:
    """Gives the storage of a run that is tracked beside it such a database, unless it has one."""
    words = dict(word.partition("=")[::2] for word in arguments)
    file = Path(words.get("run.storage", ""), "mlflow.db")
    if file.is_absolute() and not file.exists() and not {"tracking.uri", "tracking.enabled"} & words.keys():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_database())


def start(arguments: list[str], *, env: dict[str, str] | None = None, program: list[str] | None = None) -> Any:
    seed(arguments)
    command = [*(program or [sys.executable, "-m", "app"]), *arguments]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # It heeds Ctrl-C also where the tests were started in the background, whose processes ignore it.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=ROOT, env=env or environment(), preexec_fn=heed, **streams)


def trireme(*arguments: str, env: dict[str, str] | None = None, timeout: float = LONG) -> Ended:
    """Runs the command to its end."""
    return finish(start(list(arguments), env=env), timeout)


def torchrun(*arguments: str, env: dict[str, str] | None = None) -> Ended:
    return finish(start(list(arguments), program=torchrun_program(), env=env))


def torchrun_program(*more: str) -> list[str]:
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    return [*program, *more, "-m", "app"]


def finish(process: Any, timeout: float = LONG) -> Ended:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end_tree(process.pid)
        out, err = process.communicate()
        raise AssertionError(f"did not end within {timeout} s:\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


def end_tree(pid: int) -> None:
    """Kills a process of ours and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def tree_without(*paths: str) -> Iterator[str]:
    """A folder with a copy of this checkout, in which these files or folders are not: for PYTHONPATH."""
    with tempfile.TemporaryDirectory() as folder:
        tracked = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
        for name in filter(None, tracked.split("\0")):
            if not name.startswith(paths) and Path(name).exists():
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(name, Path(folder, name))
        # Where Trireme is installed in editable mode, its finder would find in the checkout what is not here.
        finders = "[finder for finder in sys.meta_path if 'Editable' not in repr(finder)]"
        Path(folder, "sitecustomize.py").write_text(f"import sys; sys.meta_path[:] = {finders}")
        yield folder


def wait_until(condition: Callable[[], Any], timeout: float = LONG) -> Any:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"did not happen within {timeout} s: {condition}")


def committed(folder: Path) -> list[int]:
    """Steps of the committed checkpoints of a run, ascending."""
    return sorted(int(p.parent.name.split("-")[1]) for p in folder.glob("checkpoints/step-*/COMMIT.json"))


def weights(folder: Path) -> dict[str, Any]:
    import torch  # not above: the process that only hands tests out to others does without it, and begins sooner

    return torch.load(folder / "model" / "weights.pt", weights_only=True)


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_unbroken(storage: Path, truth: Path, ended: Ended) -> None:
    """No step is lost and none is there twice: to the last bit as in the run `truth`, which nothing has disturbed."""
    ended.expect()
    assert same_bits(weights(storage / "run"), weights(truth))
    for metric in ("train/loss", "eval/loss"):
        assert curve(storage, "run", metric) == curve(truth.parent, truth.name, metric)
    assert mlflow_run(storage, "run").info.status == "FINISHED"


def kill_and_run_again(storage: Path, given: list[str]) -> Ended:
    """Both workers of `run` under torchrun, which continues; how `truth`, undisturbed, ended."""
    truth = torchrun(*given, "run.name=truth").expect()
    process = start([*given, "run.name=run"], program=torchrun_program())
    wait_until(lambda: committed(storage / "run"))
    end_tree(process.pid)
    process.wait()
    again = torchrun(*given, "run.name=run")
    assert_unbroken(storage, storage / "truth", again)
    assert "continuing after step" in again.out
    return truth


def flip(path: Path) -> None:
    """Flips a bit in the middle of a file; a second time it is as before."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


class Lines:
    """What a process says, and when; it is read to its end."""

    def __init__(self, process: Any) -> None:
        self.heard: list[tuple[float, str]] = []
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.heard.append((time.time(), line))

    @property
    def text(self) -> str:
        return "".join(line for _, line in self.heard)

    def when(self, part: str, timeout: float = LONG) -> float:
        try:
            return wait_until(lambda: next((at for at, line in self.heard if part in line), None), timeout)
        except AssertionError:
            raise AssertionError(f"{part!r} was not said within {timeout:g} s, but: {self.text}") from None


def disturb(folder: Path, rank: int, number: int) -> float:
    """Signals the process that writes this rank's log; when."""
    log = str(folder / "logs" / f"rank-{rank}.log")
    (victim,) = [process for process in psutil.process_iter() if writes(process, log)]
    at = time.time()
    victim.send_signal(number)
    return at


def writes(process: psutil.Process, log: str) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1") == log
    except OSError:
        return False


def _mlflow(storage: Path) -> Any:
    """A client of the embedded store."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{storage}/mlflow.db")


def mlflow_run(storage: Path, name: str) -> Any:
    """The one MLflow run of that name."""
    client = _mlflow(storage)
    experiment = client.get_experiment_by_name("trireme")
    found = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    assert len(found) == 1, [run.info.run_id for run in found]
    return found[0]


def mlflow_text(storage: Path, run_id: str, folder: str, suffix: str = ".txt") -> list[str]:
    client = _mlflow(storage)
    paths = [artifact.path for artifact in client.list_artifacts(run_id, folder) if artifact.path.endswith(suffix)]
    return [Path(client.download_artifacts(run_id, path)).read_text() for path in paths]


def curve(storage: Path, name: str, metric: str = "train/loss") -> dict[int, float]:
    """A metric by step; fails if a step was logged twice."""
    history = _mlflow(storage).get_metric_history(mlflow_run(storage, name).info.run_id, metric)
    steps = [point.step for point in history]
    assert len(steps) == len(set(steps)), f"{metric} was logged twice at a step: {steps}"
    return {point.step: point.value for point in history}
