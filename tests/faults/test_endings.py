"""However a run ends, nothing of it is left seconds later: no process, socket, shared memory or temporary file."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.host import PACE, RUN, TWO, Host, Started, kill, reached
from tests.lab import NEEDS_LAB, Lab
from tests.running import wait_until

pytestmark = NEEDS_LAB
Act = Callable[[Host, Started, Path], object]


def send(number: int, step: int = 10, times: int = 1) -> Act:
    """Sends the command a signal once that step is committed; step 0: while it starts."""

    def act(host: Host, run: Started, storage: Path) -> None:
        if step:
            reached(storage / "run", step)
        else:
            run.lines.when("")
            time.sleep(2)
        for _ in range(times):
            run.process.send_signal(number)
            time.sleep(0.2 * (times > 1))

    return act


def killed(part: str, rank: int | None = None) -> Act:
    def act(host: Host, run: Started, storage: Path) -> None:
        reached(storage / "run", 10)
        kill(host.find(part) if rank is None else host.worker(storage, rank))

    return act


def taken_over(host: Host, run: Started, storage: Path) -> None:
    reached(storage / "run", 10)
    again = host.start("train", *RUN, PACE, *TWO, f"run.storage={storage}", "--take-over")
    assert again.wait() == 0, again.lines.text


def trained(host: Host, run: Started, storage: Path) -> None:
    reached(storage / "run", 10)


def nothing(host: Host, run: Started, storage: Path) -> None:
    """It ends before it has trained."""


LOCAL = ["launcher=local"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "app"]
TERM, KILL, INT, HUP = signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP
ROWS: dict[str, tuple[list[str], Act, set[int]]] = {
    "finishes": (TWO, trained, {0}),
    "finishes, under Ray Train": ([*TWO, "launcher=ray"], trained, {0}),
    "an error in the user's code": ([*TWO, "task=tests.tasks:Raises", "task_args.good_steps=3"], nothing, {1}),
    "a loss that is not finite": ([*TWO, "task=tests.tasks:Infinite", "task_args.good_steps=3"], nothing, {1}),
    "a wrong key": ([*TWO, "optimizer.lrr=1"], nothing, {2}),
    "a layout that cannot be": ([*TWO, "strategy=tensor", "parallel.tp=3"], nothing, {2}),
    "Ctrl-C": (TWO, send(INT), {130}),
    "Ctrl-C twice": (TWO, send(INT, times=2), {130}),
    "Ctrl-C while it starts": (TWO, send(INT, 0), {130}),
    "SIGTERM": (TWO, send(TERM), {130}),
    "SIGTERM while it starts": (TWO, send(TERM, 0), {130, 143}),
    "SIGHUP": (TWO, send(HUP), {129, -HUP}),
    "the driver is killed": (TWO, send(KILL), {137, -KILL}),
    "the driver is killed while it starts": (TWO, send(KILL, 0), {137, -KILL}),
    "the driver is killed, under Ray Train": ([*TWO, "launcher=ray"], send(KILL), {137, -KILL}),
    "a worker is killed": (TWO, killed("", 1), {0}),
    "the raylet is killed": (TWO, killed("/raylet"), {0}),
    "the GCS is killed": (TWO, killed("/gcs_server"), {0}),
    "taken over": (TWO, taken_over, {1}),
    "one process, SIGTERM": (LOCAL, send(TERM), {130}),
    "one process, killed": (LOCAL, send(KILL), {137, -KILL}),
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
    more, act, codes = ROWS[how]
    storage = host.lab.shared / how.replace(" ", "-").replace(",", "").replace("'", "")
    before = host.left()
    own_task = any(word.startswith("task=") for word in more)
    run = host.start("train", *RUN, *([] if own_task else [PACE]), *more, f"run.storage={storage}")
    during = dict.fromkeys(before, 0)
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
