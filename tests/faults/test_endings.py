"""However a run ends, nothing of it is left seconds later: no process, socket, shared memory or temporary file."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.host import PACE, RUN, TWO, Host, Started, kill, reached
from tests.lab import NEEDS_LAB, Lab
from tests.running import wait_until

pytestmark = NEEDS_LAB
Act = Callable[[Host, Started, Path], object]


def starts(host: Host, run: Started, storage: Path) -> None:
    run.lines.when("")
    time.sleep(2)


def trains(host: Host, run: Started, storage: Path) -> None:
    reached(storage / "run", 10)


def compares(host: Host, run: Started, storage: Path) -> None:
    wait_until(lambda: any("trireme-parity-" in path for path in host.left()["temporary"]))


def nothing(host: Host, run: Started, storage: Path) -> None:
    """It ends by itself."""


def send(number: int, times: int = 1) -> Act:
    def act(host: Host, run: Started, storage: Path) -> None:
        for _ in range(times):
            run.process.send_signal(number)
            time.sleep(0.2 * (times > 1))

    return act


def take_over(*words: str, stopped: bool = False) -> Act:
    def act(host: Host, run: Started, storage: Path) -> None:
        if stopped:
            run.process.send_signal(signal.SIGSTOP)
        again = host.start(*words, f"run.storage={storage}", "--take-over")
        again.lines.when("taking the run over from process")
        again.lines.when("continuing after step")
        if stopped:
            run.popen.send_signal(
                signal.SIGCONT
            )  # the way in has stopped with it, and lets it go on
        assert again.wait() == 0, again.lines.text

    return act


TRAIN = ["train", *RUN, PACE, *TWO]
IN_RAY_TRAIN = [*TRAIN, "launcher=ray"]
LOCAL = ["train", *RUN, PACE, "launcher=local"]
FAILS = ["train", *RUN, *TWO, "task_args.good_steps=3"]
PARITY = [
    "parity",
    "task=tests.tasks:Points",
    "train.global_batch_size=16",
    "--rows=ddp,fsdp",
    "--steps=500",
]
TERM, KILL, INT, HUP = signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP
ROWS: dict[str, tuple[list[str], Act, Act, set[int], str]] = {
    "finishes": (TRAIN, trains, nothing, {0}, ""),
    "finishes, under Ray Train": (IN_RAY_TRAIN, trains, nothing, {0}, ""),
    "an error in the user's code": (
        [*FAILS, "task=tests.tasks:Raises"],
        nothing,
        nothing,
        {1},
        "would not help",
    ),
    "not finite": (
        [*FAILS, "task=tests.tasks:Infinite"],
        nothing,
        nothing,
        {1},
        "not finite at step 4 on rank 1",
    ),
    "a wrong key": ([*TRAIN, "optimizer.lrr=1"], nothing, nothing, {2}, "did you mean"),
    "a layout that cannot be": (
        [*TRAIN, "strategy=tensor", "parallel.tp=3"],
        nothing,
        nothing,
        {2},
        "product is 2",
    ),
    "Ctrl-C": (TRAIN, trains, send(INT), {130}, "run the same command again"),
    "Ctrl-C twice": (TRAIN, trains, send(INT, times=2), {130}, ""),
    "Ctrl-C while it starts": (TRAIN, starts, send(INT), {130}, ""),
    "SIGTERM": (TRAIN, trains, send(TERM), {130}, "run the same command again"),
    "SIGTERM while it starts": (TRAIN, starts, send(TERM), {130}, "stopped"),
    "SIGHUP": (TRAIN, trains, send(HUP), {130}, "run the same command again"),
    "the driver is killed": (TRAIN, trains, send(KILL), {137, -KILL}, ""),
    "the driver is killed while it starts": (TRAIN, starts, send(KILL), {137, -KILL}, ""),
    "the driver is killed, under Ray Train": (IN_RAY_TRAIN, trains, send(KILL), {137, -KILL}, ""),
    "a worker is killed": (
        TRAIN,
        trains,
        lambda host, _, at: kill(host.worker(at, 1)),
        {0},
        "starting again",
    ),
    "taken over": (TRAIN, trains, take_over(*TRAIN), {1}, "was taken over by process"),
    "taken over while it is stopped": (
        LOCAL,
        trains,
        take_over(*LOCAL, stopped=True),
        {1},
        "was taken over by",
    ),
    "one process, SIGTERM": (LOCAL, trains, send(TERM), {130}, "run the same command again"),
    "one process, killed": (LOCAL, trains, send(KILL), {137, -KILL}, ""),
    "parity, Ctrl-C": (PARITY, compares, send(INT), {130}, ""),
    "parity, SIGTERM": (PARITY, compares, send(TERM), {130}, ""),
}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Lab(1) as lab:
        yield Host(lab)


KINDS = "processes, sockets, shared memory, temporary files: during, after"
HEAD = f"{'how the run ended':<40} {'code':>5}  {KINDS}; seconds"


@pytest.mark.parametrize("how", ROWS)
def test_nothing_is_left(
    how: str, host: Host, record_property: Callable[[str, object], None]
) -> None:
    words, until, act, codes, says = ROWS[how]
    storage, before = host.lab.shared / "".join(filter(str.isalnum, how)), host.left()
    run = host.start(*words, f"run.storage={storage}")
    until(host, run, storage)
    act(host, run, storage)
    during = {kind: len(ones) - len(before[kind]) for kind, ones in host.left().items()}
    code = run.wait()
    left, seconds = host.settled(before)
    counts = [f"{during[kind]:>3} {len(left[kind])}" for kind in left]
    record_property(HEAD, f"{how:<40} {code:>5}  {'   '.join(counts)}  {seconds:>4.1f}")
    assert not any(left.values()), f"{left}\n{run.lines.text}"
    assert code in codes and says in run.lines.text, run.lines.text
    assert how != "not finite" or "starting again" not in run.lines.text, "it would be so again"
