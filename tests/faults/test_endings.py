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


def send(number: int, times: int = 1) -> Act:
    def act(host: Host, run: Started, storage: Path) -> None:
        for _ in range(times):
            run.process.send_signal(number)
            time.sleep(0.2 * (times > 1))

    return act


def taken_over(host: Host, run: Started, storage: Path) -> None:
    again = host.start("train", *RUN, PACE, *TWO, f"run.storage={storage}", "--take-over")
    assert again.wait() == 0, again.lines.text


def nothing(host: Host, run: Started, storage: Path) -> None:
    """It ends by itself."""


LOCAL = ["launcher=local"]
TERM, KILL, INT, HUP = signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP
STARTS, TRAINS, NEVER = range(3)  # when it happens; never: it ends before it has trained
ROWS: dict[str, tuple[list[str], int, Act, set[int]]] = {
    "finishes": (TWO, TRAINS, nothing, {0}),
    "finishes, under Ray Train": ([*TWO, "launcher=ray"], TRAINS, nothing, {0}),
    "an error in the user's code": ([*TWO, "task=tests.tasks:Raises", "task_args.good_steps=3"], NEVER, nothing, {1}),
    "a loss that is not finite": ([*TWO, "task=tests.tasks:Infinite", "task_args.good_steps=3"], NEVER, nothing, {1}),
    "a wrong key": ([*TWO, "optimizer.lrr=1"], NEVER, nothing, {2}),
    "a layout that cannot be": ([*TWO, "strategy=tensor", "parallel.tp=3"], NEVER, nothing, {2}),
    "Ctrl-C": (TWO, TRAINS, send(INT), {130}),
    "Ctrl-C twice": (TWO, TRAINS, send(INT, times=2), {130}),
    "Ctrl-C while it starts": (TWO, STARTS, send(INT), {130}),
    "SIGTERM": (TWO, TRAINS, send(TERM), {130}),
    "SIGTERM while it starts": (TWO, STARTS, send(TERM), {130, 143}),
    "SIGHUP": (TWO, TRAINS, send(HUP), {129, -HUP}),
    "the driver is killed": (TWO, TRAINS, send(KILL), {137, -KILL}),
    "the driver is killed while it starts": (TWO, STARTS, send(KILL), {137, -KILL}),
    "the driver is killed, under Ray Train": ([*TWO, "launcher=ray"], TRAINS, send(KILL), {137, -KILL}),
    "a worker is killed": (TWO, TRAINS, lambda host, run, storage: kill(host.worker(storage, 1)), {0}),
    "taken over": (TWO, TRAINS, taken_over, {1}),
    "one process, SIGTERM": (LOCAL, TRAINS, send(TERM), {130}),
    "one process, killed": (LOCAL, TRAINS, send(KILL), {137, -KILL}),
}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Lab(1) as lab:
        yield Host(lab)


KINDS = "processes, sockets, shared memory, temporary files: during, after"
HEAD = f"{'how the run ended':<40} {'code':>5}  {KINDS}; seconds"
Note = Callable[[str, object], None]


@pytest.mark.parametrize("how", ROWS)
def test_nothing_is_left(how: str, host: Host, record_property: Note) -> None:
    more, when, act, codes = ROWS[how]
    storage = host.lab.shared / how.replace(" ", "-").replace(",", "").replace("'", "")
    before = host.left()
    own_task = any(word.startswith("task=") for word in more)
    run = host.start("train", *RUN, *([] if own_task else [PACE]), *more, f"run.storage={storage}")
    if when == STARTS:
        run.lines.when("")
        time.sleep(2)
    elif when == TRAINS:
        reached(storage / "run", 10)
    act(host, run, storage)
    during = {kind: len(ones) - len(before[kind]) for kind, ones in host.left().items()}
    code = run.wait()
    left, seconds = host.settled(before)
    counts = [f"{during[kind]:>3} {len(left[kind])}" for kind in left]
    record_property(HEAD, f"{how:<40} {code:>5}  {'   '.join(counts)}  {seconds:>4.1f}")
    assert not any(left.values()), f"{left}\n{run.lines.text}"
    assert code in codes, run.lines.text


@pytest.mark.parametrize("number", [INT, TERM])
def test_parity_leaves_nothing(host: Host, record_property: Note, number: int) -> None:
    before = host.left()
    words = ["task=tests.tasks:Points", "train.global_batch_size=16", "--rows", "ddp,fsdp", "--workers", "2"]
    run = host.start("parity", *words, "--steps", "500")
    wait_until(lambda: any("trireme-parity-" in path for path in host.left()["temporary"]))
    run.process.send_signal(number)
    code = run.wait()
    left, seconds = host.settled(before)
    record_property(HEAD, f"{f'parity, {signal.Signals(number).name}':<40} {code:>5}  {left}  {seconds:>4.1f}")
    assert not any(left.values()), f"{left}\n{run.lines.text}"
    assert code in (130, 143)
