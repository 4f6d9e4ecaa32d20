"""Connects to a Ray cluster, or starts Ray on this machine, and describes what the cluster has."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import ClusterError, ClusterUnavailable
from cluster.addresses import split_address
from cluster.detached import Guard, detached
from cluster.environment import home, set_defaults, set_home, shared_variables, temporary_home
from cluster.temporary import TemporaryFolder, private_folder

if TYPE_CHECKING:
    from cluster.shape import ClusterShape, NodeState

_ROOT = str(Path(__file__).resolve().parents[1])
OBJECT_STORE_BYTES = 100_000_000
"""Of a Ray of one command: tensors never go through it."""
SETTINGS = {
    # Without it ray.init refuses a variable that a submitted job has set too.
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
    # How soon a dead worker is noticed; 2 s by default.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # cluster/preemption.py does it, for clouds as well.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Without it, everything that a model prints appears twice.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}
"""Documented settings of Ray and Ray Train for the environment, where the user has set none."""
OPTIONS: dict[str, Any] = {
    "namespace": "trireme",
    # Workers write to files of their own; Ray would show every line of all of them.
    "log_to_driver": False,
    "logging_level": logging.ERROR,
}
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
TRIES = 3
"""To reach a cluster that runs already."""
START_TRIES = 5
"""To start Ray on this machine."""
PAUSE_SECONDS = 2.0
NOT_STARTED = "Ray did not start on this machine"
WITHOUT_RAY = (
    "training needs no Ray with launcher=local, which is one process, or with "
    "torchrun --nproc-per-node N -m trireme train …"
)
"""What to do on a machine where Ray does not start."""
BUSY = "Timed out waiting for file"
"""In the log of a raylet whose agents have not written their ports in time."""
FOLDER = "TRIREME_RAY_FOLDER"
"""The environment variable in which the processes of a command's own Ray find its folder."""
_FOLDERS: list[TemporaryFolder] = []
"""Of the Ray that this process has started."""
_GUARDS: list[Guard] = []
"""Of that Ray, from before it starts."""
_made = False
"""Whether `connect` has made this process's connection; otherwise it is a notebook's, say."""


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that this process is connected to, as it was at one moment.

    Attributes:
        nodes: Its living nodes.
        shape: Its node types, with limits and prices where its file is known. Without a file: the
            living nodes, and no more will come.
        folder: Where this process keeps the files of a Ray that it has started for itself, on this
            machine alone; None for another cluster.
    """

    nodes: tuple[NodeState, ...]
    shape: ClusterShape
    folder: Path | None = None

    @property
    def private(self) -> bool:
        """Whether this process has started it for itself."""
        return self.folder is not None

    @property
    def gpus(self) -> int:
        """GPUs of all living nodes."""
        return int(sum(node.total.get("GPU", 0) for node in self.nodes))

    @property
    def gpus_of_largest(self) -> int:
        """GPUs of the node that has the most."""
        return int(max(node.total.get("GPU", 0) for node in self.nodes))

    @property
    def max_resources(self) -> dict[str, float]:
        """CPUs and GPUs that an autoscaler may grow the cluster to; empty without an autoscaler."""
        shape = self.shape
        # All machines of an on-prem cluster are there from the start.
        if not shape.path or shape.provider == "local":
            return {}
        limits = {
            "CPU": shape.max_on_workers(lambda kind: kind.cpus),
            "GPU": shape.max_on_workers(lambda kind: kind.gpus),
        }
        return {name: amount for name, amount in limits.items() if amount}


def connect(
    *,
    worker_setup: str = "",
    say: Callable[[str], None] = lambda text: None,
    before_start: Callable[[], object] = lambda: None,
) -> Cluster:
    """Connects to RAY_ADDRESS or to the cluster that runs on this machine, or else starts Ray here.

    Workers import from this process's current folder too.

    Args:
        worker_setup: "module.function" that each worker's process calls first. It is needed where
            something else on Ray's search path has the name of one of Trireme's packages; "" where
            nothing has.
        say: Called with a sentence that says what did not work and is tried again.
        before_start: Called when Ray is imported, but not started or asked yet, at each try.

    Returns:
        The cluster with its living nodes.

    Raises:
        ClusterError: The address is wrong, the cluster there does not let this process in, or this
            machine lacks what Ray needs.
        ClusterUnavailable: The cluster does not answer, or Ray does not start here, after several
            tries.
    """
    global _made
    ray = sys.modules.get("ray")  # not imported here: whoever has connected has imported it
    if ray is not None and ray.is_initialized():
        return describe()
    set_home()
    variables = _share_environment(first=bool(worker_setup))
    cluster_address = address()
    tries = TRIES if cluster_address else START_TRIES
    for number in range(1, tries + 1):
        try:
            with _sigterm_handler_kept():
                if cluster_address:
                    _join(cluster_address, variables, worker_setup, before_start)
                else:
                    _start_here(worker_setup, before_start)
            break
        except ClusterUnavailable as error:
            _leave()
            advice = "" if cluster_address else f"; {WITHOUT_RAY}"
            if number == tries:
                raise ClusterUnavailable(f"{error} ({tries} tries){advice}") from error
            pause = PAUSE_SECONDS * number
            say(f"{error}; trying again in {pause:g} s ({number + 1} of {tries}){advice}")
            time.sleep(pause)
        except BaseException:
            _leave()
            raise
    _made = True
    return describe(None if cluster_address else _FOLDERS[-1].path)


def _join(
    cluster_address: str,
    variables: dict[str, str],
    worker_setup: str,
    before_start: Callable[[], object],
) -> None:
    """Connects to a cluster that runs already, without trying again.

    Args:
        cluster_address: As `address` returns it.
        variables: Environment variables of the workers.
        worker_setup: See `connect`.
        before_start: See `connect`.

    Raises:
        ClusterError: See `connect`.
        ClusterUnavailable: See `connect`.
    """
    _check_reachable(cluster_address)
    import ray

    before_start()
    runtime_env = {"env_vars": variables, **_setup(worker_setup)}
    try:
        # ray.init finds the address in the same way as `address`, and the token of the cluster.
        ray.init(runtime_env=runtime_env, **OPTIONS)
    except Exception as error:
        raise _explained(cluster_address, error) from error


def _explained(cluster_address: str, error: Exception) -> Exception:
    """What it means that ray.init has failed although the cluster's port is open.

    Returns:
        An error with a sentence for the user, or the error itself where it is not one of Ray's.
    """
    from ray.exceptions import AuthenticationError

    message = str(error)
    cause = first_line(error)
    where = f"the Ray cluster at {cluster_address}"
    if "version" in cause.lower() and "mismatch" in message.lower():
        return ClusterError(f"{where} is another version than what is installed here: {cause}")
    if isinstance(error, AuthenticationError) or "token" in message.lower():
        return ClusterError(
            f"{where} does not let this process in ({cause}): its token is missing here, wrong or "
            "expired (~/.ray/auth_token, RAY_AUTH_MODE=token)"
        )
    if "IP address" in message or "any running Ray instance" in message:
        return ClusterError(
            f"this machine is not a node of the Ray cluster at {cluster_address} ({cause}): "
            "`trireme submit` sends a job there"
        )
    if isinstance(error, OSError | RuntimeError | ValueError):
        problem = "does not answer, though something listens there"
        return ClusterUnavailable(f"{where} {problem}: {cause}")
    return error


def _start_here(worker_setup: str, before_start: Callable[[], object]) -> None:
    """Starts Ray on this machine for this process alone, without trying again.

    Args:
        worker_setup: See `connect`.
        before_start: See `connect`.

    Raises:
        ClusterError: See `connect`.
        ClusterUnavailable: See `connect`.
    """
    temporary = private_folder()
    _FOLDERS.append(temporary)
    guard = Guard(temporary.path)
    _GUARDS.append(guard)
    os.environ[FOLDER] = str(temporary.path)
    folder = temporary.for_ray
    _set_token()
    import ray

    from cluster import ray_internals

    before_start()
    # Ray's processes inherit the environment, so no runtime_env is needed; without one, the workers
    # that Ray starts ahead can be used.
    options = dict(OPTIONS)
    runtime_env = _setup(worker_setup)
    if runtime_env:
        options["runtime_env"] = runtime_env
    try:
        with detached(), ray_internals.patience():
            ray.init(
                "local",
                _temp_dir=str(folder),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **options,
            )
        ray_internals.kill_at_shutdown()
    except BaseException as error:
        # Ray raises nothing more precise where it does not start in time.
        reason = _reason_in_logs(folder) or first_line(error)
        # The next try then has the processors. Before ray.shutdown, which would wait for a second
        # for each process (`detached`), and after the logs were read, which it removes.
        guard.close()
        if not isinstance(error, Exception):  # the command is to end
            raise
        raise ClusterUnavailable(f"{NOT_STARTED}: {reason}") from error


def _reason_in_logs(folder: Path) -> str:
    """Why a process of a Ray that did not start has ended, by its log; "" where no log says it."""
    for log in sorted(folder.glob("session_*/logs/*")):
        if not log.name.startswith(("gcs_server", "raylet")):
            continue
        with contextlib.suppress(OSError):
            for line in log.read_text(errors="replace").splitlines():
                if BUSY in line:
                    return "its processes did not start within 30 s because this machine is busy"
                # A fatal message: [date time C pid tid] (process) file: text
                if re.match(r"\[[^\]]* [CF] ", line):
                    message = line.partition(") ")[2].strip()
                    return f"{log.stem}: {message[:300]}"
    return ""


def _set_token() -> None:
    """Gives Ray a token in a temporary folder where no home folder can be written to.

    https://docs.ray.io/en/latest/ray-security/token-auth.html
    """
    if "RAY_AUTH_TOKEN" in os.environ or TOKEN_PATH in os.environ or home() is not None:
        return
    if Path(os.environ["HOME"], ".ray", "auth_token").is_file():
        return
    path = temporary_home() / "auth_token"
    with contextlib.suppress(FileExistsError):  # an earlier command has written it
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    os.environ[TOKEN_PATH] = str(path)


def _leave() -> None:
    """Ends the connection that `connect` has made, and the Ray that it has started."""
    ray = sys.modules.get("ray")
    if ray is not None:
        with contextlib.suppress(Exception):  # Ray may not have started
            ray.shutdown()
    while _GUARDS:
        _GUARDS.pop().close()
    while _FOLDERS:
        _FOLDERS.pop().remove()
        os.environ.pop(FOLDER, None)


@contextlib.contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """In this context nobody replaces the handler of SIGTERM.

    ray.init does, twice, by one that ends the command with another exit code and without a
    sentence. So in this context signal.signal has no effect on SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # there Ray cannot replace it
        return
    set_handler = signal.signal

    def set_other_handler(number: int, handler: Any) -> Any:
        if number == signal.SIGTERM:
            return signal.getsignal(number)
        return set_handler(number, handler)

    try:  # around both, as a handler may raise between them
        signal.signal = set_other_handler  # type: ignore[assignment]
        yield
    finally:
        signal.signal = set_handler


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its class where it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def disconnect() -> None:
    """Leaves the cluster, and ends the Ray that `connect` started.

    A connection that was there before `connect` stays.
    """
    global _made
    if not _made:
        return
    _made = False
    _leave()


def _share_environment(*, first: bool) -> dict[str, str]:
    """Sets the environment variables that all processes of a job are to have.

    Args:
        first: Whether Trireme's own folder comes before the current one, which has packages of the
            same names.

    Returns:
        The variables that Ray is to pass on to workers.
    """
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [os.getcwd(), *inherited, _ROOT]
    if first:
        folders.insert(0, _ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, folders)))
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    set_defaults()
    return shared_variables()


def _setup(worker_setup: str) -> dict[str, Any]:
    """The field of a runtime environment that has workers call a function first.

    Empty without a function, and where a submitted job has such a function of its own.
    https://docs.ray.io/en/latest/ray-core/api/doc/ray.runtime_env.RuntimeEnv.html
    """
    job_config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    job_runtime_env = job_config.get("runtime_env") or {}
    if not worker_setup or job_runtime_env.get("worker_process_setup_hook"):
        return {}
    return {"worker_process_setup_hook": worker_setup}


# --- which cluster --------------------------------------------------------------------------------


def address() -> str | None:
    """The address of the cluster that `connect` joins; None where it would start Ray here.

    Raises:
        ClusterError: RAY_ADDRESS is `auto`, but no cluster runs on this machine.
    """
    written = os.environ.get("RAY_ADDRESS", "").strip()
    if written == "local":
        return None
    if written == "auto" and running_here() is None and not _runs_here():
        raise ClusterError(
            "RAY_ADDRESS=auto, but no Ray cluster of this user runs on this machine: "
            "`ray start --head` starts one, or unset RAY_ADDRESS, and the command starts Ray itself"
        )
    return written or running_here()


def _runs_here() -> bool:
    """Whether a node of a Ray cluster of this user runs on this machine."""
    return any(user == os.getuid() for _, user in _raylets())


def _raylets() -> Iterator[tuple[list[str], int]]:
    """The command line and the user id of each raylet of this machine."""
    import psutil

    for process in psutil.process_iter(["cmdline", "uids"]):
        command = process.info["cmdline"] or [""]
        if command[0].endswith("/raylet"):
            yield command, process.info["uids"].real


def running_here() -> str | None:
    """The address of the cluster that this user's `ray start` joined this machine to.

    None where there is none, or it does not answer any more. Another user's processes of Ray on
    this machine let nobody else in: Ray ends a process that tries, without a message.
    """
    try:
        note = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
        if note.stat().st_uid != os.getuid():
            return None
        noted_address = note.read_text().strip()
        host_and_port = split_address(noted_address)
        if host_and_port is None:
            return None
        with socket.create_connection(host_and_port, timeout=1.0):
            return noted_address
    except (OSError, ValueError):
        return None  # there is no note, or a cluster that is gone has left it behind


def _check_reachable(cluster_address: str) -> None:
    """Checks what ray.init would try for minutes.

    Raises:
        ClusterError: The address cannot be that of a cluster, or another user has started the
            cluster.
        ClusterUnavailable: Nothing listens there.
    """
    if cluster_address.startswith(("http://", "https://")):
        raise ClusterError(
            f"RAY_ADDRESS={cluster_address} is a job server: `trireme submit` sends jobs there; "
            "for this command unset it, or write the HOST:PORT that `ray start` printed"
        )
    host_and_port = split_address(cluster_address.removeprefix("ray://"))
    if host_and_port is None:
        return  # `auto`, and other words that only Ray understands
    host, port = host_and_port
    try:
        socket.create_connection(host_and_port, timeout=5.0).close()
    except socket.gaierror as error:
        raise ClusterError(
            f"RAY_ADDRESS={cluster_address}: no machine is called {host} ({error.strerror}): write "
            "the HOST:PORT that `ray start` printed, or unset RAY_ADDRESS"
        ) from error
    except OSError as error:
        raise ClusterUnavailable(
            f"no Ray cluster answers at {cluster_address} ({error}): `ray start --head` starts "
            "one, or unset RAY_ADDRESS"
        ) from error
    if _is_of_another_user(port):
        raise ClusterError(
            f"the Ray of {cluster_address} on this machine was started by another user, and lets "
            "nobody else in: `trireme submit` sends a job there, or unset RAY_ADDRESS"
        )


def _is_of_another_user(port: int) -> bool:
    """Whether this machine's raylet of the cluster with that port was started by another user.

    Its sockets are closed to others, and Ray ends a process that tries, without a message. Root may
    open all sockets.
    """
    if os.getuid() == 0:
        return False
    for command, user in _raylets():
        heads = [argument for argument in command if argument.startswith("--gcs-address=")]
        if user != os.getuid() and any(head.endswith(f":{port}") for head in heads):
            return True
    return False


def describe_own() -> Cluster:
    """The cluster of this process, which its Ray has started."""
    folder = os.environ.get(FOLDER)
    return describe(Path(folder) if folder else None)


def describe(folder: Path | None = None) -> Cluster:
    """The cluster that this process is connected to.

    Its file is TRIREME_CLUSTER, or what `ray up` leaves on the head, where jobs run.

    Args:
        folder: See `Cluster`; a Ray that this process has started for itself has no file.
    """
    from cluster.files import bootstrap_config, cluster_file, read_cluster
    from cluster.shape import living_nodes, shape_of_nodes

    nodes = tuple(living_nodes())
    if folder is not None:
        return Cluster(nodes, shape_of_nodes(nodes), folder)
    file = cluster_file()
    shape = read_cluster(file) if file else bootstrap_config()
    return Cluster(nodes, shape or shape_of_nodes(nodes))
