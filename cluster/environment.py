"""The environment of every worker's process under every launcher, where the user has set nothing.

`cluster.connect` sets it before Ray starts, and passes it on to a cluster that runs already;
`app.launchers.train` sets it in the processes of torchrun and in its own. Both happen before the
first process group is made and before CUDA is initialised.

TORCH_NCCL_ASYNC_ERROR_HANDLING says what torch does once a collective has failed, for instance
because a peer is gone. By default (3), and by Ray Train's own default (1), torch's watchdog
throws an exception out of its thread, which ends the process: every survivor dies too, and a
death on a sound node may be seen before the one that was the cause. With 2 the watchdog aborts
the communicators: what waits for the device returns, the next collective raises, and the process
can make another group. What was computed from an aborted collective is wrong, so the training
loop asks `strategies.torch_internals.failed_groups` before it believes a number.

TORCH_NCCL_DUMP_ON_TIMEOUT=0 turns off a thread that ends every process that is still there eight
minutes after any rank's failure; the supervisor reads the record of the last collectives itself.

TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC: before it aborts, the watchdog leaves that thread four times
this long to write, by default a minute in which survivors hang; here a second (torch's
ProcessGroupNCCL.cpp, Watchdog::runLoop). Whoever sets the former should set the latter, too.
https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html

TORCH_NCCL_HIGH_PRIORITY=1: a collective's kernel needs a few of the processors that products
occupy. On a stream of high priority it gets the next ones that are free, instead of waiting until
the products that were launched before it have started all their blocks; what waits for the
collective starts sooner, and products lose what it takes in either case.

expandable_segments: the allocator grows segments instead of adding segments of other sizes, so
that less of a GPU's memory is lost between them.
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""

import getpass
import os
import pwd
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from cluster import ClusterError
from cluster.ray_internals import raylet_pid

NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The allocator's variable, and its older names, which take precedence over it."""
THREADS = "OMP_NUM_THREADS"
SHARED = ("PYTHONPATH", "RAY_TRAIN_", "TORCH_NCCL_", *ALLOCATOR)
"""Beginnings of the variables that the driver passes on to workers of a running cluster."""


def set_defaults(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets NCCL's and the allocator's variables that are not set."""
    for name, value in NCCL.items():
        environ.setdefault(name, value)
    if not any(name in environ for name in ALLOCATOR):
        environ[ALLOCATOR[0]] = "expandable_segments:True"


def shared_variables(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that the driver passes on to workers.

    The number of threads is passed on where the user has set it. In the process of a submitted job
    Ray sets it to 1, as for all processes without CPUs; and where the job's own environment has it,
    workers get it anyway.
    """
    variables = {name: value for name, value in environ.items() if name.startswith(SHARED)}
    if THREADS in environ and not raylet_pid(environ):
        variables[THREADS] = environ[THREADS]
    return variables


# --- the user -------------------------------------------------------------------------------------


def user_name() -> str:
    """The name of the user who runs this process.

    A user without a name, as in many containers, is named by number: `uid-4242`.
    """
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid-{os.getuid()}"


def home() -> Path | None:
    """The user's home folder; None where there is none that can be written to.

    HOME may name a folder that does not exist, is read-only, full or another user's (`/` in many
    containers), and the user may have no home at all.
    """
    folder = os.environ.get("HOME") or _home_of_user()
    if not os.path.isabs(folder):
        return None
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError:
        return None
    return Path(folder)


def temporary_home() -> Path:
    """A temporary folder of this user's alone, in place of a home folder.

    Raises:
        ClusterError: The folder is another user's, or open to others.
    """
    folder = Path(tempfile.gettempdir(), f"trireme-home-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077
    if not stat.S_ISDIR(status.st_mode) or not is_private:
        problem = f"there is no home folder, and {folder} is not this user's alone"
        raise ClusterError(f"{problem}: set HOME to a folder that can be written")
    return folder


def set_home(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets HOME where it is unset or empty, to the user's home or else to a temporary folder.

    Ray's processes read nothing else, and would take `~` for the name of a folder.
    """
    if not environ.get("HOME"):
        environ["HOME"] = _home_of_user() or str(temporary_home())


def below_home(variable: str, folder: str) -> Path:
    """A folder for the user's files of one kind, as the XDG specification has it.

    Where there is no home folder that can be written to, it is in a temporary one.

    Args:
        variable: The environment variable that names it, such as XDG_CACHE_HOME.
        folder: Where it is in the home folder without that variable, such as `.cache`.
    """
    if chosen := os.environ.get(variable):
        return Path(chosen)
    return (home() or temporary_home()) / folder


def _home_of_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""
