"""Run `trireme` as a user does, in a process of its own, and look at what it leaves."""

import contextlib
import functools
import gc
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
from tests.warm import WarmCommand

ROOT = Path(__file__).parents[1]
LONG = 300.0
"""Seconds to wait for an event: twenty times what it takes, because the machine may be busy."""
POINTS = ["task=tests.tasks:Points", "train.global_batch_size=16", "tracking.log_model=false"]


@dataclass
class Ended:
    """A command that has ended.

    Attributes:
        code: Its exit code.
        out: What it wrote to stdout.
        err: What it wrote to stderr.
    """

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of its output."""
        return json.loads(self.out.strip().splitlines()[-1])

    def expect(self, code: int = 0) -> Any:
        """This object; the command must have ended with an exit code."""
        assert self.code == code, self.out + self.err
        return self


# --- commands -------------------------------------------------------------------------------------


def here(patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str], *words: str) -> Ended:
    """Run `trireme WORDS` in this process.

    This is for commands that are refused, or only print something, before anything starts.
    """
    # Imported here because the first 30 minutes on a GPU run tests where there is no Click.
    from app.cli import main

    patch.setattr(sys, "argv", ["trireme", *words])
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        # This process goes on after the command: it would have to unfreeze all objects, and every
        # later collection would look at those of all modules.
        with patch.context() as during, pytest.raises(SystemExit) as ended:
            if gc.freeze is FREEZE:  # and not what a test looks at
                during.setattr(gc, "freeze", lambda: None)
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = capture.readouterr()
    return Ended(int(ended.value.code or 0), out, err)


def invoke(*words: object, code: int = 0) -> Any:
    """Run `trireme WORDS` in this process, without what `main` does around commands.

    Args:
        words: The command line.
        code: The exit code that the command must have.
    """
    from click.testing import CliRunner  # imported here for the same reason as above

    from app.cli import group

    arguments = [str(word) for word in words]
    if arguments[:1] == ["train"]:
        with contextlib.suppress(OSError):  # a storage that cannot be written, which is refused
            seed(arguments)
    result = CliRunner().invoke(group, arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result


FREEZE = gc.freeze
STARTED: list[Any] = []
"""The commands that `start` has started; a test ends those that it leaves running."""
is_warm = True
"""Whether commands are forks of a process that has imported what they need (tests/warm.py)."""


def environment(**more: str) -> dict[str, str]:
    """This environment, changed so that a test's metrics and its Ray stay with the test."""
    dropped = ("MLFLOW_", "RAY_ADDRESS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        # Ray's workers would yield to the tests that run beside them, and take twice as long.
        "RAY_worker_niceness": "0",
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": _ray_folder().name,
        **more,
    }


@functools.cache
def _ray_folder() -> tempfile.TemporaryDirectory[str]:
    """Where Ray notes the cluster of this machine, so that tests do not find another program's."""
    # The paths of Ray's sockets may not be long.
    return tempfile.TemporaryDirectory(prefix="tests-", dir="/tmp", ignore_cleanup_errors=True)


@functools.cache
def _empty_database() -> bytes:
    """An empty database of MLflow.

    Making one takes seconds of a processor, so it is kept beside pytest's cache.
    """
    version = importlib.metadata.version("mlflow")
    cached = ROOT / ".pytest_cache" / f"mlflow-{version}.db"
    if not cached.exists():
        from mlflow.tracking import MlflowClient

        cached.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
            os.replace(f"{folder}/mlflow.db", cached)
    return cached.read_bytes()


def seed(arguments: list[str]) -> None:
    """Put an empty database into the storage of a run that is tracked there, unless it has one.

    Args:
        arguments: The run's arguments.
    """
    values = dict(argument.partition("=")[::2] for argument in arguments)
    file = Path(values.get("run.storage", ""), "mlflow.db")
    is_tracked_elsewhere = "tracking.uri" in values or "tracking.enabled" in values
    if file.is_absolute() and not file.exists() and not is_tracked_elsewhere:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_empty_database())


def start(
    arguments: list[str],
    *,
    env: dict[str, str] | None = None,
    program: list[str] | None = None,
) -> Any:
    """Start a command.

    Args:
        arguments: Its arguments.
        env: Its environment; by default `environment()`.
        program: What to run in place of `trireme`.
    """
    seed(arguments)
    env = env or environment()
    process: Any
    if program is None and is_warm and str(ROOT) in env["PYTHONPATH"].split(os.pathsep):
        process = WarmCommand(arguments, env)
    else:
        process = subprocess.Popen(
            [*(program or [sys.executable, "-m", "app"]), *arguments],
            cwd=ROOT,
            env=env,
            preexec_fn=_end_on_ctrl_c,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    STARTED.append(process)
    return process


def end_started(count: int) -> None:
    """End the commands that still run, but for the first ones.

    Args:
        count: How many of `STARTED` stay as they are.
    """
    for process in STARTED[count:]:
        if process.poll() is None:
            end_tree(process.pid)
            process.wait()
    del STARTED[count:]


def _end_on_ctrl_c() -> None:
    """In the new process: react to SIGINT, which processes in the background ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def trireme(*arguments: str, env: dict[str, str] | None = None, timeout: float = LONG) -> Ended:
    """Run `trireme` to its end."""
    return finish(start(list(arguments), env=env), timeout)


def torchrun(*arguments: str, env: dict[str, str] | None = None) -> Ended:
    """Run `trireme` under torchrun, on two ranks, to its end."""
    return finish(start(list(arguments), program=torchrun_program(), env=env))


def torchrun_program(*more: str) -> list[str]:
    """What runs `trireme` under torchrun on two ranks, with more arguments of torchrun's."""
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    return [*program, *more, "-m", "app"]


def finish(process: Any, timeout: float = LONG) -> Ended:
    """Wait for a command's end; it is killed after the timeout."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end_tree(process.pid)
        out, err = process.communicate()
        raise AssertionError(f"did not end within {timeout} s:\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


def end_tree(pid: int) -> None:
    """Kill a process of ours and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def tree_without(*paths: str) -> Iterator[str]:
    """A folder with a copy of this checkout, without some of its files or folders.

    It is for PYTHONPATH.

    Args:
        paths: What is left out: names, relative to the checkout, that begin with one of these.
    """
    command = ["git", "ls-files", "-z"]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, process.stdout.split("\0")):
            if not name.startswith(paths) and Path(name).exists():
                copy = Path(folder, name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(name, copy)
        # If Trireme is installed in editable mode, its finder would find the missing files in the
        # checkout.
        finders = "[finder for finder in sys.meta_path if 'Editable' not in repr(finder)]"
        customization = f"import sys; sys.meta_path[:] = {finders}"
        Path(folder, "sitecustomize.py").write_text(customization)
        yield folder


def wait_until(condition: Callable[[], Any], timeout: float = LONG) -> Any:
    """The first true value of a condition."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"did not happen within {timeout} s: {condition}")


# --- what a run leaves ----------------------------------------------------------------------------


def committed(folder: Path) -> list[int]:
    """The steps of a run's committed checkpoints, in ascending order."""
    markers = folder.glob("checkpoints/step-*/COMMIT.json")
    return sorted(int(marker.parent.name.split("-")[1]) for marker in markers)


def weights(folder: Path) -> dict[str, Any]:
    """The weights that a run has exported."""
    # Imported here because a process that only hands out tests starts sooner without torch.
    import torch

    return torch.load(folder / "model" / "weights.pt", weights_only=True)


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two states have the same names and equal tensors."""
    import torch

    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_unbroken(storage: Path, truth: Path, ended: Ended) -> None:
    """Check that the run `run` has every step once, and the same bits as an undisturbed run.

    Args:
        storage: The storage of the run.
        truth: The folder of the undisturbed run.
        ended: The end of the run.
    """
    ended.expect()
    assert same_bits(weights(storage / "run"), weights(truth))
    for metric in ("train/loss", "eval/loss"):
        assert curve(storage, "run", metric) == curve(truth.parent, truth.name, metric)
    assert mlflow_run(storage, "run").info.status == "FINISHED"


def kill_and_run_again(storage: Path, given: list[str]) -> Ended:
    """Kill both workers of the run `run` under torchrun, and check that it continues.

    Args:
        storage: The storage of the run.
        given: The run's arguments, without its name.

    Returns:
        The end of an undisturbed run `truth`.
    """
    # What the runs have logged is compared, and a busy machine is slow to deliver it.
    given = [*given, f"tracking.flush_timeout={LONG}"]
    truth = torchrun(*given, "run.name=truth").expect()
    process = start([*given, "run.name=run"], program=torchrun_program())
    wait_until(lambda: committed(storage / "run"))
    end_tree(process.pid)
    process.wait()
    second_start = torchrun(*given, "run.name=run")
    assert_unbroken(storage, storage / "truth", second_start)
    assert "continuing after step" in second_start.out
    return truth


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file; flipping it twice restores the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


# --- a run that is going on -----------------------------------------------------------------------


class Lines:
    """What a process prints, and when; it is read to its end.

    Attributes:
        heard: (time, line) of each line so far.
    """

    def __init__(self, process: Any) -> None:
        self.heard: list[tuple[float, str]] = []
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.heard.append((time.time(), line))

    @property
    def text(self) -> str:
        """All lines so far."""
        return "".join(line for _, line in self.heard)

    def when(self, part: str, timeout: float = LONG) -> float:
        """When a line with this part was printed first; waits for it."""

        def find() -> float | None:
            return next((at for at, line in self.heard if part in line), None)

        try:
            return wait_until(find, timeout)
        except AssertionError:
            message = f"{part!r} was not printed within {timeout:g} s, but: {self.text}"
            raise AssertionError(message) from None


def disturb(folder: Path, rank: int, number: int) -> float:
    """Signal the process that writes the log of a rank.

    Args:
        folder: The run's folder.
        rank: The rank.
        number: The signal.

    Returns:
        When the signal was sent.
    """
    log = str(folder / "logs" / f"rank-{rank}.log")
    (process,) = [process for process in psutil.process_iter() if writes(process, log)]
    sent_at = time.time()
    process.send_signal(number)
    return sent_at


def writes(process: psutil.Process, log: str) -> bool:
    """Whether a process writes its output to a file."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1") == log
    except OSError:
        return False


# --- MLflow ---------------------------------------------------------------------------------------


def _mlflow(storage: Path) -> Any:
    """A client of the store inside a storage."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{storage}/mlflow.db")


def mlflow_run(storage: Path, name: str) -> Any:
    """The MLflow run of that name; there must be one."""
    client = _mlflow(storage)
    experiment = client.get_experiment_by_name("trireme")
    runs = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    assert len(runs) == 1, [run.info.run_id for run in runs]
    return runs[0]


def mlflow_text(storage: Path, run_id: str, folder: str, suffix: str = ".txt") -> list[str]:
    """The text artifacts of a run.

    Args:
        storage: The run's storage.
        run_id: The MLflow run.
        folder: The folder of the artifacts.
        suffix: How their names end.
    """
    client = _mlflow(storage)
    paths = [artifact.path for artifact in client.list_artifacts(run_id, folder)]
    texts = []
    for path in paths:
        if path.endswith(suffix):
            texts.append(Path(client.download_artifacts(run_id, path)).read_text())
    return texts


def curve(storage: Path, name: str, metric: str = "train/loss") -> dict[int, float]:
    """A metric by step, of which no step may be logged twice."""
    run_id = mlflow_run(storage, name).info.run_id
    history = _mlflow(storage).get_metric_history(run_id, metric)
    steps = [point.step for point in history]
    assert len(steps) == len(set(steps)), f"{metric} was logged twice at a step: {steps}"
    return {point.step: point.value for point in history}
