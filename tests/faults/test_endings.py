"""However a run ends, nothing of it is left seconds later.

Neither a process, nor a socket, shared memory or a temporary file.
"""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.host import PACE, RUN, TWO, Host, Started, kill, reached
from tests.lab import NEEDS_LAB, Lab
from tests.running import wait_until

pytestmark = NEEDS_LAB
Act = Callable[[Host, Started, Path], object]
"""Something that is done with (host, run, storage)."""


# --- when a run is ended --------------------------------------------------------------------------


def while_it_starts(host: Host, run: Started, storage: Path) -> None:
    run.lines.when("")
    time.sleep(2)


def while_it_trains(host: Host, run: Started, storage: Path) -> None:
    reached(storage / "run", 10)


def while_it_compares(host: Host, run: Started, storage: Path) -> None:
    """Of `trireme parity`: when its temporary folder is there."""
    wait_until(lambda: any("trireme-parity-" in path for path in host.left()["temporary"]))


def at_once(host: Host, run: Started, storage: Path) -> None:
    pass


# --- how a run is ended ---------------------------------------------------------------------------


def by_itself(host: Host, run: Started, storage: Path) -> None:
    pass


def by_signal(number: int, times: int = 1) -> Act:
    def act(host: Host, run: Started, storage: Path) -> None:
        for _ in range(times):
            run.process.send_signal(number)
            if times > 1:
                time.sleep(0.2)

    return act


def by_killing_a_worker(host: Host, run: Started, storage: Path) -> None:
    kill(host.worker(storage, 1))


def by_taking_over(*words: str, while_stopped: bool = False) -> Act:
    """Let another command take the run over.

    Args:
        words: The command.
        while_stopped: Whether the first command is stopped meanwhile.
    """

    def act(host: Host, run: Started, storage: Path) -> None:
        if while_stopped:
            run.process.send_signal(signal.SIGSTOP)
        second_run = host.start(*words, f"run.storage={storage}", "--take-over")
        second_run.lines.when("taking the run over from process")
        second_run.lines.when("continuing after step")
        if while_stopped:
            # What entered the host has stopped too, and lets the command continue.
            run.popen.send_signal(signal.SIGCONT)
        assert second_run.wait() == 0, second_run.lines.text

    return act


# --- the table ------------------------------------------------------------------------------------

TRAIN = ["train", *RUN, PACE, *TWO]
RAY_TRAIN = [*TRAIN, "launcher=ray"]
LOCAL = ["train", *RUN, PACE, "launcher=local"]
FAILING = ["train", *RUN, *TWO, "task_args.good_steps=3"]
PARITY = [
    "parity",
    "task=tests.tasks:Points",
    "train.global_batch_size=16",
    "--rows=ddp,fsdp",
    "--steps=500",
]
KILLED = {137, -signal.SIGKILL}
INTERRUPTED = {130}
HOW_TO_CONTINUE = "run the same command again"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A way in which a run ends.

    Attributes:
        words: The command.
        when: Waits until the run is ended.
        how: Ends it.
        codes: The exit codes that the command may have.
        says: What the command must print.
        never_says: What it must not print; "" for nothing.
    """

    words: list[str]
    when: Act
    how: Act
    codes: set[int]
    says: str = ""
    never_says: str = ""


def _ending(
    words: list[str],
    when: Act,
    how: Act,
    *,
    codes: set[int],
    says: str = "",
    never_says: str = "",
) -> Ending:
    return Ending(words=words, when=when, how=how, codes=codes, says=says, never_says=never_says)


def _train(when: Act, how: Act, *, codes: set[int], says: str = "") -> Ending:
    return _ending(TRAIN, when, how, codes=codes, says=says)


ENDINGS = {
    "finishes": _train(while_it_trains, by_itself, codes={0}),
    "finishes, under Ray Train": _ending(RAY_TRAIN, while_it_trains, by_itself, codes={0}),
    "an error in the user's code": _ending(
        [*FAILING, "task=tests.tasks:Raises"],
        at_once,
        by_itself,
        codes={1},
        says="would not help",
    ),
    "not finite": _ending(
        [*FAILING, "task=tests.tasks:Infinite"],
        at_once,
        by_itself,
        codes={1},
        says="not finite at step 4 on rank 1",
        never_says="starting again",  # it would not be finite again
    ),
    "a wrong key": _ending(
        [*TRAIN, "optimizer.lrr=1"],
        at_once,
        by_itself,
        codes={2},
        says="did you mean",
    ),
    "a layout that cannot be": _ending(
        [*TRAIN, "strategy=tensor", "parallel.tp=3"],
        at_once,
        by_itself,
        codes={2},
        says="product is 2",
    ),
    "Ctrl-C": _train(
        while_it_trains, by_signal(signal.SIGINT), codes=INTERRUPTED, says=HOW_TO_CONTINUE
    ),
    "Ctrl-C twice": _train(while_it_trains, by_signal(signal.SIGINT, times=2), codes=INTERRUPTED),
    "Ctrl-C while it starts": _train(while_it_starts, by_signal(signal.SIGINT), codes=INTERRUPTED),
    "SIGTERM": _train(
        while_it_trains, by_signal(signal.SIGTERM), codes=INTERRUPTED, says=HOW_TO_CONTINUE
    ),
    "SIGTERM while it starts": _train(
        while_it_starts, by_signal(signal.SIGTERM), codes=INTERRUPTED, says="stopped"
    ),
    "SIGHUP": _train(
        while_it_trains, by_signal(signal.SIGHUP), codes=INTERRUPTED, says=HOW_TO_CONTINUE
    ),
    "the driver is killed": _train(while_it_trains, by_signal(signal.SIGKILL), codes=KILLED),
    "the driver is killed while it starts": _train(
        while_it_starts, by_signal(signal.SIGKILL), codes=KILLED
    ),
    "the driver is killed, under Ray Train": _ending(
        RAY_TRAIN, while_it_trains, by_signal(signal.SIGKILL), codes=KILLED
    ),
    "a worker is killed": _train(
        while_it_trains, by_killing_a_worker, codes={0}, says="starting again"
    ),
    "taken over": _train(
        while_it_trains, by_taking_over(*TRAIN), codes={1}, says="was taken over by process"
    ),
    "taken over while it is stopped": _ending(
        LOCAL,
        while_it_trains,
        by_taking_over(*LOCAL, while_stopped=True),
        codes={1},
        says="was taken over by",
    ),
    "one process, SIGTERM": _ending(
        LOCAL, while_it_trains, by_signal(signal.SIGTERM), codes=INTERRUPTED, says=HOW_TO_CONTINUE
    ),
    "one process, killed": _ending(LOCAL, while_it_trains, by_signal(signal.SIGKILL), codes=KILLED),
    "parity, Ctrl-C": _ending(
        PARITY, while_it_compares, by_signal(signal.SIGINT), codes=INTERRUPTED
    ),
    "parity, SIGTERM": _ending(
        PARITY, while_it_compares, by_signal(signal.SIGTERM), codes=INTERRUPTED
    ),
}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Lab(1) as lab:
        yield Host(lab)


@pytest.fixture(autouse=True)
def end_processes(host: Host) -> Iterator[None]:
    yield
    host.end_processes()


KINDS = "processes, sockets, shared memory, temporary files: during, after"
HEAD = f"{'how the run ended':<40} {'code':>5}  {KINDS}; seconds"


@pytest.mark.parametrize("name", ENDINGS)
def test_nothing_is_left(
    name: str, host: Host, record_property: Callable[[str, object], None]
) -> None:
    ending = ENDINGS[name]
    storage = host.lab.shared / "".join(filter(str.isalnum, name))
    before = host.left()
    run = host.start(*ending.words, f"run.storage={storage}")
    ending.when(host, run, storage)
    ending.how(host, run, storage)
    during = host.left()
    code = run.wait()
    left, seconds = host.settled(before)
    counts = []
    for kind in left:
        count_during = len(during[kind]) - len(before[kind])
        counts.append(f"{count_during:>3} {len(left[kind])}")
    record_property(HEAD, f"{name:<40} {code:>5}  {'   '.join(counts)}  {seconds:>4.1f}")
    output = run.lines.text
    assert not any(left.values()), f"{left}\n{output}"
    assert code in ending.codes, output
    assert ending.says in output, output
    if ending.never_says:
        assert ending.never_says not in output, output
