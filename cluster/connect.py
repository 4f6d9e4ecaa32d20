"""Reaches the Ray cluster that is meant, or starts Ray on this machine, and says what the cluster has."""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import ClusterError, ClusterUnavailable
from cluster.addresses import split_address
from cluster.detached import detached
from cluster.environment import home, set_defaults, set_home, shared, temporary_home
from cluster.temporary import TemporaryFolder, private_folder

if TYPE_CHECKING:
    from cluster.shape import ClusterShape, NodeState

_ROOT = str(Path(__file__).resolve().parents[1])
OBJECT_STORE_BYTES = 100_000_000  # of a Ray of one command: tensors never go through it
SETTINGS = {
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",  # else ray.init refuses a variable that a submitted job has set too
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how soon a dead worker is noticed; 2 s by default
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # cluster/preemption.py does it, for clouds as well
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else what a model prints appears twice
}
"""Documented settings of Ray and Ray Train, which are read from the environment, where the user has set none."""
OPTIONS: dict[str, Any] = {
    "namespace": "trireme",
    "log_to_driver": False,  # workers write to files of their own; Ray would show every line of all of them
    "logging_level": logging.ERROR,
}
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
TRIES = 3  # to reach a cluster that runs already
START_TRIES = 5  # to start Ray here, which gives up after 30 s each time
PAUSE_SECONDS = 2.0
BUSY = "Timed out waiting for file"  # of the ports of a raylet's agents
_FOLDERS: list[TemporaryFolder] = []  # of the Ray that this process has started
_log = logging.getLogger(__name__)
_made = False  # whether `connect` has made this process's connection; else it is a notebook's, say


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that this process is connected to, as it was when it was asked.

    shape: with limits and prices where its file is known; else what is alive, and stays so.
    private: this process has started it, for itself.
    """

    nodes: tuple[NodeState, ...]
    shape: ClusterShape
    private: bool = False

    @property
    def gpus(self) -> int:
        return int(sum(node.total.get("GPU", 0) for node in self.nodes))

    @property
    def gpus_of_largest(self) -> int:
        """The most that one node has."""
        return int(max(node.total.get("GPU", 0) for node in self.nodes))

    @property
    def max_resources(self) -> dict[str, float]:
        """What an autoscaler may grow the cluster to; empty where there is none."""
        shape = self.shape
        if not shape.path or shape.provider == "local":  # all on-prem machines are there from the start
            return {}
        most = {
            "CPU": shape.max_on_workers(lambda kind: kind.cpus),
            "GPU": shape.max_on_workers(lambda kind: kind.gpus),
        }
        return {name: amount for name, amount in most.items() if amount}


def connect(
    preload: str = "",
    *,
    worker_setup: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> Cluster:
    """Connects to RAY_ADDRESS, else to the cluster running on this machine, else starts Ray here. Workers import from
    this process' current folder too.

    Args:
        preload: Module with what workers need, from processes with which they are forked where `cluster/fast_start`
            can be used; "": workers start by themselves.
        worker_setup: "module.function" that each worker's process calls first, where something else on Ray's search
            path has the name of one of Trireme's packages; "": nothing has.
        say: Told, in a sentence, what did not work and is tried again.
    Raises:
        ClusterError: The address is wrong, the cluster there does not let this process in, or this machine lacks what
            Ray needs.
        ClusterUnavailable: The cluster does not answer, or Ray does not start here, though it was tried again.
    """
    global _made
    if getattr(sys.modules.get("ray"), "is_initialized", bool)():  # without importing it
        return describe()
    set_home()
    variables = _share_environment(first=bool(worker_setup))
    cluster_address = address()
    tries = TRIES if cluster_address else START_TRIES
    for number in range(1, tries + 1):
        try:
            with _signal_handlers_kept():
                if cluster_address:
                    _join(cluster_address, variables, preload, worker_setup)
                else:
                    _start_here(preload, worker_setup)
            break
        except ClusterUnavailable as error:
            _leave(forget=number == tries)
            if number == tries:
                raise ClusterUnavailable(f"{error} ({tries} tries)") from error
            pause = PAUSE_SECONDS * number
            say(f"{error}; trying again in {pause:g} s ({number + 1} of {tries})")
            time.sleep(pause)
        except BaseException:
            _leave()
            raise
    _made = True
    return describe(private=not cluster_address)


def _join(cluster_address: str, variables: dict[str, str], preload: str, worker_setup: str) -> None:
    """Connects to a cluster that runs already.

    Raises: see `connect`; once, without trying again.
    """
    _check_reachable(cluster_address)
    warm = _fast_start() if preload else None
    if warm:  # others import, while this process does
        warm.warm_up_node(cluster_address, preload)
    import ray

    runtime_env = {
        "env_vars": variables,
        **(warm.runtime_env(preload) if warm else {}),
        **_setup(worker_setup),
    }
    try:  # ray.init finds the address as `address` does, and its token
        ray.init(runtime_env=runtime_env, **OPTIONS)
    except Exception as error:
        raise _refused(cluster_address, error) from error


def _refused(cluster_address: str, error: Exception) -> Exception:
    """What it means that ray.init has failed at a port that is open: the error itself where it is none of Ray's."""
    from ray.exceptions import AuthenticationError

    cause = first_line(error)
    where = f"the Ray cluster at {cluster_address}"
    if "version" in cause.lower() and "mismatch" in str(error).lower():
        return ClusterError(f"{where} is another version than what is installed here: {cause}")
    if isinstance(error, AuthenticationError) or "token" in str(error).lower():
        return ClusterError(
            f"{where} does not let this process in ({cause}): its token is missing here, wrong or expired "
            "(~/.ray/auth_token, RAY_AUTH_MODE=token)"
        )
    if "IP address" in str(error) or "any running Ray instance" in str(error):
        return ClusterError(
            f"this machine is not a node of the Ray cluster at {cluster_address} ({cause}): `trireme submit` sends a "
            "job there"
        )
    if isinstance(error, OSError | RuntimeError | ValueError):
        return ClusterUnavailable(f"{where} does not answer, though something listens there: {cause}")
    return error


def _start_here(preload: str, worker_setup: str) -> None:
    """Starts Ray on this machine, for this process alone.

    Raises: see `connect`; once, without trying again.
    """
    warm = _fast_start() if preload else None
    _FOLDERS.append(private_folder())
    folder = _FOLDERS[-1].path
    _set_token()
    if warm:  # others import, while this process does
        warm.PRIVATE.warm_up(preload)
    import ray

    # Its processes inherit the environment: without a runtime_env the workers that Ray starts ahead are used.
    options = dict(OPTIONS)
    if setup := _setup(worker_setup):
        options["runtime_env"] = setup
    try:
        head = None
        if warm:
            with detached():
                head = warm.PRIVATE.start(OBJECT_STORE_BYTES, str(folder))
        if warm and head:
            ray.init(address=head, **options)
            warm.PRIVATE.guard()
            return
        with detached(blocked=()):  # Ray ends these by SIGTERM first, and waits for a second
            ray.init(
                "local",
                _temp_dir=str(folder),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **options,
            )
    except Exception as error:  # where it does not start in time Ray raises just that
        _end_processes()
        reason = _last_words(folder) or first_line(error)
        raise ClusterUnavailable(f"Ray did not start on this machine: {reason}") from error


def _end_processes() -> None:
    """Ends what a Ray that did not start has left: another try is not to wait for its processors."""
    import psutil

    left = [child for child in psutil.Process().children() if child.name() in ("gcs_server", "raylet")]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=PAUSE_SECONDS)


def _last_words(folder: Path) -> str:
    """Why a process of a Ray that did not start has ended, by its own log; "" where none says so."""
    for log in sorted(folder.glob("session_*/logs/*")):
        if not log.name.startswith(("gcs_server", "raylet")):
            continue
        with contextlib.suppress(OSError):
            for line in log.read_text(errors="replace").splitlines():
                if BUSY in line:
                    return "its processes were not up within 30 s, this machine is too busy"
                if re.match(r"\[[^\]]* [CF] ", line):  # a fatal one: [date time C pid tid] (process) file: text
                    return f"{log.stem}: {line.partition(') ')[2].strip()[:300]}"
    return ""


def _set_token() -> None:
    """Where Ray could write its token nowhere, because there is no home folder that can be written to, it gets one in a
    temporary one. https://docs.ray.io/en/latest/ray-security/token-auth.html
    """
    if any(name in os.environ for name in ("RAY_AUTH_TOKEN", TOKEN_PATH)) or home() is not None:
        return
    if Path(os.environ["HOME"], ".ray", "auth_token").is_file():
        return
    path = temporary_home() / "auth_token"
    with contextlib.suppress(FileExistsError):  # of an earlier command
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    os.environ[TOKEN_PATH] = str(path)


def _leave(*, forget: bool = True) -> None:
    """Ends what `connect` has started, or its connection.

    Args:
        forget: False keeps the fork server, for another try: it has imported by then what it needs, and no longer takes
            the processors from Ray's own processes, which give up after 30 s.
    """
    ray = sys.modules.get("ray")
    if ray is not None:
        with contextlib.suppress(Exception):  # of a Ray that did not start
            ray.shutdown()
    if warm := _fast_start():
        if forget:
            warm.PRIVATE.end()
        else:
            warm.PRIVATE.end_head()
    while _FOLDERS:
        _FOLDERS.pop().remove()


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """ray.init replaces the handler of SIGTERM with one that ends the process without a word."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def disconnect() -> None:
    """Leaves the cluster, or ends the Ray that `connect` started; a connection that was there before stays."""
    global _made
    if not _made:
        return
    _made = False
    _leave()


# --- cluster/fast_start: this is the only place that knows of it -----------------------------------------------------


def _fast_start() -> Any:
    """The accelerator where its folder is there and was tested with what is installed, else None."""
    try:
        from cluster.fast_start import warm
    except ImportError:
        return None
    reason = warm.why_not()
    if reason:
        _log.info("Ray starts without cluster/fast_start: %s", reason)
    return None if reason else warm


def run_forked(words: Sequence[str], preload: str, worker_setup: str = "") -> int | None:
    """Runs `trireme WORDS` in a process that has everything imported, where it will use a cluster of which this machine
    is a node; its exit code, None where there is no such process and the command must run by itself. worker_setup: as
    `connect` has it."""
    found = address()
    warm = _fast_start() if found else None
    if warm is None:
        return None
    _share_environment(first=bool(worker_setup))
    return warm.run_forked(words, found, preload)


def kept_warm() -> list[dict[str, Any]]:
    """What is kept alive on this machine between commands, for this user: see `warm.kept`."""
    try:
        from cluster.fast_start import warm
    except ImportError:
        return []
    return warm.kept()


def end_warm(server: dict[str, Any]) -> bool:
    """Ends one of `kept_warm`, with workers that were forked from it; whether it is gone."""
    from cluster.fast_start import warm

    return warm.end(server)


def _share_environment(*, first: bool) -> dict[str, str]:
    """Sets what all processes of a job are to have (one fork server serves all); what Ray is to pass on.

    Args:
        first: Whether Trireme's own folder comes before the current one, which has packages of the same names.
    """
    folders = [_ROOT, os.getcwd()] if first else [os.getcwd()]
    parts = [*folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep), _ROOT]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, parts)))
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    set_defaults()
    return shared()


def _setup(worker_setup: str) -> dict[str, Any]:
    """The field of a runtime environment by which workers call a function first; empty where the job has its own.

    https://docs.ray.io/en/latest/ray-core/api/doc/ray.runtime_env.RuntimeEnv.html
    """
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}").get("runtime_env") or {}
    if not worker_setup or job.get("worker_process_setup_hook"):
        return {}
    return {"worker_process_setup_hook": worker_setup}


# --- which cluster ----------------------------------------------------------------------------------------------------


def address() -> str | None:
    """Where `connect` finds a cluster; None if there is none, and it would start Ray here.

    Raises:
        ClusterError: RAY_ADDRESS=auto, which means a cluster that runs on this machine, and there is none.
    """
    written = os.environ.get("RAY_ADDRESS", "").strip()
    if written == "local":
        return None
    if written == "auto" and running_here() is None and not _runs_here():
        raise ClusterError(
            "RAY_ADDRESS=auto, but no Ray cluster of this user runs on this machine: `ray start --head` starts one, or "
            "unset RAY_ADDRESS, and the command starts Ray for itself"
        )
    return written or running_here()


def _runs_here() -> bool:
    """Whether a node of a Ray cluster runs on this machine, as this user, wherever it keeps its files."""
    import psutil

    for process in psutil.process_iter(["cmdline", "uids"]):
        words = process.info["cmdline"] or [""]
        if words[0].endswith("/raylet") and process.info["uids"].real == os.getuid():
            return True
    return False


def running_here() -> str | None:
    """Address of the cluster that this user's `ray start` joined this machine to, if it still answers. Another user's
    processes of Ray on this machine let nobody else in: Ray ends a process that tries, without a word."""
    try:
        noted = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
        if noted.stat().st_uid != os.getuid():
            return None
        noted_address = noted.read_text().strip()
        where = split_address(noted_address)
        if where is None:
            return None
        with socket.create_connection(where, timeout=1.0):
            return noted_address
    except (OSError, ValueError):
        return None  # none was started, or it was left behind by a cluster that is gone


def _check_reachable(found: str) -> None:
    """Raises ClusterError or ClusterUnavailable where ray.init would try for minutes: nothing listens there, or it is
    not a Ray cluster."""
    if found.startswith(("http://", "https://")):
        raise ClusterError(
            f"RAY_ADDRESS={found} is a job server: `trireme submit` sends jobs there; for this command unset it, or "
            "write the HOST:PORT that `ray start` printed"
        )
    where = split_address(found.removeprefix("ray://"))
    if where is None:
        return  # auto, and what only Ray understands
    host, port = where
    try:
        socket.create_connection(where, timeout=5.0).close()
    except socket.gaierror as error:
        raise ClusterError(
            f"RAY_ADDRESS={found}: no machine is called {host} ({error.strerror}): write the HOST:PORT that "
            "`ray start` printed, or unset RAY_ADDRESS"
        ) from error
    except OSError as error:
        raise ClusterUnavailable(
            f"no Ray cluster answers at {found} ({error}): `ray start --head` starts one, or unset RAY_ADDRESS"
        ) from error
    if _is_of_another_user(str(port)):
        raise ClusterError(
            f"the Ray of {found} on this machine was started by another user, and lets nobody else in: "
            "`trireme submit` sends a job there, or unset RAY_ADDRESS"
        )


def _is_of_another_user(port: str) -> bool:
    """Whether this machine's raylet of the cluster with that port is not this user's: its sockets are closed to others,
    and Ray ends a process that tries, without a word."""
    import psutil

    for process in psutil.process_iter(["cmdline", "uids"]):
        words, uids = process.info["cmdline"] or [""], process.info["uids"]
        known = next((word for word in words if word.startswith("--gcs-address=")), "")
        if words[0].endswith("/raylet") and known.endswith(f":{port}") and os.getuid() not in (0, uids.real):
            return True
    return False


def describe(*, private: bool = False) -> Cluster:
    """The cluster that this process is connected to. Its file is TRIREME_CLUSTER, or what `ray up` leaves on the head,
    where jobs run.

    private: Ray was started by this process, and is of no file.
    """
    from cluster.files import bootstrap_config, cluster_file, read_cluster
    from cluster.shape import living_nodes, of_nodes

    nodes, file = living_nodes(), None if private else cluster_file()
    shape = read_cluster(file) if file else None if private else bootstrap_config()
    return Cluster(tuple(nodes), shape or of_nodes(nodes), private)
