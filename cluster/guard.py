"""Ends the Ray that a command has started when the command ends, however that happens.

    python -I -S guard.py FOLDER SESSION

It waits until nobody can write to its standard input any more: the command, which alone holds the
other end, has closed it or is dead. Then it ends Ray's processes by SIGKILL and removes their
folder.

Ray's processes are those that have files open in FOLDER, where they log, and that have it among
their arguments or, as the agents and the workers, a title of Ray's. The processes of the command's
own SESSION are not meant: at an end in order the command itself is one, whose Ray logs there too.

It imports nothing of Trireme's, since it starts beside each Ray and waits as long as that lives.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator

TITLE = b"ray::"
"""What the titles of the processes that a raylet starts begin with."""
TRIES = 100
PAUSE_SECONDS = 0.05


def processes_of_ray(folder: str, session: int) -> Iterator[int]:
    """File descriptors of the processes (pidfd_open(2)); the caller closes them.

    Args:
        folder: Where that Ray keeps its files, without symbolic links.
        session: Whose processes are left out.
    """
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            process = os.pidfd_open(int(name))
        except OSError:
            continue  # it has ended
        if _is_of_ray(int(name), folder, session):
            yield process
        else:
            os.close(process)


def _is_of_ray(pid: int, folder: str, session: int) -> bool:
    try:
        if os.getsid(pid) == session:
            return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
        if not command.startswith(TITLE) and os.fsencode(folder) not in command:
            return False
        descriptors = f"/proc/{pid}/fd"
        files = [os.readlink(f"{descriptors}/{name}") for name in os.listdir(descriptors)]
    except OSError:
        return False  # it has ended, or is another user's
    return any(file.startswith(folder + os.sep) for file in files)


def end(folder: str, session: int) -> None:
    """Kills Ray's processes until none is left: while one lives, it may start another.

    Args:
        folder: See `processes_of_ray`.
        session: See `processes_of_ray`.
    """
    for _ in range(TRIES):
        processes = list(processes_of_ray(folder, session))
        if not processes:
            return
        for process in processes:
            try:
                signal.pidfd_send_signal(process, signal.SIGKILL)
            except OSError:
                pass  # it has ended meanwhile
            os.close(process)
        time.sleep(PAUSE_SECONDS)


def main() -> None:
    folder = os.path.realpath(sys.argv[1])
    sys.stdin.read()
    end(folder, session=int(sys.argv[2]))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
