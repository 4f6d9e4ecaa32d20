"""What every worker's process has in its environment, where the user has set nothing, under every launcher.

`cluster.connect` sets it before Ray starts, and passes it on to a cluster that runs already; `app.run.train` sets it in
the processes of torchrun and in its own. Either is before the first process group and before CUDA is initialised.

TORCH_NCCL_ASYNC_ERROR_HANDLING says what torch does once a collective has failed, because a peer is gone, say. By
default (3), and by Ray Train's own default (1), its watchdog throws out of its thread, which ends the process: every
survivor dies too, and a death on a sound node may be seen before the one that was the cause. With 2 it aborts the
communicators: what waits for the device returns, the next collective raises, and the process can begin another group.
What was computed from an aborted collective is wrong, so the loop asks `strategies.torch_internals.failed_groups`
before it believes a number. TORCH_NCCL_DUMP_ON_TIMEOUT=0: else another thread ends every process that is still there
eight minutes after any rank's failure; the supervisor reads the record of the last collectives itself. And
TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC: four times this long the watchdog leaves for that thread to write before it aborts,
a minute by default in which survivors hang (torch's ProcessGroupNCCL.cpp, Watchdog::runLoop); here a second. Who sets
the former sets the latter, too.
https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html

expandable_segments: the allocator grows segments in place of adding some of other sizes, so that less of a GPU's memory
is lost between them. https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
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
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The allocator's variable, and its older names, which go before it."""
THREADS = "OMP_NUM_THREADS"
SHARED = ("PYTHONPATH", "RAY_TRAIN_", "TORCH_NCCL_", *ALLOCATOR)
"""Beginnings of the variables that workers on a cluster that runs already get from the driver."""


def set_defaults(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets what is not set."""
    for name, value in NCCL.items():
        environ.setdefault(name, value)
    if not any(name in environ for name in ALLOCATOR):
        environ[ALLOCATOR[0]] = "expandable_segments:True"


def shared(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """What is passed on. The number of threads where the user has set it: in a job's process it is the one that Ray
    gives to processes without CPUs, 1, unless the job's own environment, which workers get anyway, has it."""
    found = {name: value for name, value in environ.items() if name.startswith(SHARED)}
    if THREADS in environ and not raylet_pid(environ):
        found[THREADS] = environ[THREADS]
    return found


# --- the person ---------------------------------------------------------------------------------------------------


def user_name() -> str:
    """Who runs this process; one that no name is known of, as in many containers, by number: `uid-4242`."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid-{os.getuid()}"


def home() -> Path | None:
    """The person's home; None where there is none that can be written to: HOME names a folder that is not there, is
    read-only, full or another user's (`/` in many containers), or nothing knows of one."""
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
    """A folder of this user's alone among the temporary ones, for what belongs into a home where there is none.

    Raises:
        ClusterError: another user has made it.
    """
    folder = Path(tempfile.gettempdir(), f"trireme-home-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ClusterError(
            f"there is no home folder, and {folder} is not this user's alone: set HOME to a folder that can be written"
        )
    return folder


def set_home(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets HOME where it is unset or empty, to the user's home or else to a temporary one: Ray's processes read
    nothing else, and `~` would otherwise be taken for a folder's name."""
    if not environ.get("HOME"):
        environ["HOME"] = _home_of_user() or str(temporary_home())


def below_home(variable: str, folder: str) -> Path:
    """A folder of a kind that the XDG specification names: $XDG_CACHE_HOME, say, or `.cache` in the home; where there
    is no home that can be written to, in a temporary one.

    Args:
        variable: The environment variable that names it, such as XDG_CACHE_HOME.
        folder: Where it is in the home, such as `.cache`.
    """
    if chosen := os.environ.get(variable):
        return Path(chosen)
    return (home() or temporary_home()) / folder


def _home_of_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""
