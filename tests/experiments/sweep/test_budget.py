"""What all trials of a sweep together may take is said before they start, and never exceeded."""

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.console.terminal import Console
from app.errors import UserError
from app.run.stopping import stop_signals
from app.storage.storage import Storage
from cluster.shape import NodeState
from experiments.sweep.budget import (
    AHEAD_SECONDS,
    FILE,
    POLL_SECONDS,
    Budget,
    BudgetSpent,
    Ledger,
    read_budget,
    watched,
)
from experiments.sweep.run import _check_samples
from experiments.sweep.spec import read_sweep
from tests.running import finish, start, trireme, wait_until

SLOW: dict[str, Any] = {
    "experiment": {
        "task": "tests.tasks:Points",
        "task_args": {"step_seconds": 0.2},
        "train": {"steps": 40, "global_batch_size": 16},
        "checkpoint": {"every_steps": 10, "weights": False},
        "tracking": {"enabled": False},
    },
    "space": {"optimizer.lr": [0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]},
    "reports": 4,
    "concurrent": 1,
    "confirm": 0,
}


def write(tmp_path: Path, **keys: Any) -> list[str]:
    """Writes a sweep's file, and returns the arguments that run it."""
    (tmp_path / "s.yaml").write_text(json.dumps({**SLOW, **keys}))
    return [str(tmp_path / "s.yaml"), f"run.storage={tmp_path}"]


def test_a_budget_is_read_and_what_is_wrong_with_it_is_said(tmp_path: Path) -> None:
    assert read_budget(None) == Budget() and not str(read_budget(None))
    assert read_budget(2.5) == Budget(dollars=2.5)
    file, storage = write(tmp_path, budget={"samples": 9000, "seconds": 600})
    sweep = read_sweep(file, [storage, "budget.seconds=60"])
    assert sweep.budget == Budget(samples=9000, seconds=60.0)
    assert str(sweep.budget) == "9,000 samples, 60 seconds"
    assert read_sweep(file, [storage, "budget=3"]).budget == Budget(dollars=3.0)
    with pytest.raises(UserError, match=r"budget has 'second' .did you mean 'seconds'"):
        read_budget({"second": 3})
    with pytest.raises(UserError, match=r"budget\.dollars is 0, but it must be a number greater"):
        read_budget({"dollars": 0})


def test_trials_that_would_see_more_samples_are_refused_before_they_start(tmp_path: Path) -> None:
    file, storage = write(tmp_path, confirm=2, confirm_seeds=3)
    sweep = read_sweep(file, [storage])
    samples = (8 + 2 * 3) * 40 * 16
    assert sweep.all_samples() == samples
    _check_samples(read_sweep(file, [storage, f"budget.samples={samples}"]))
    sentence = "s would see 8,960 samples, and budget.samples is 8,959: leave values out"
    with pytest.raises(UserError, match=sentence):
        _check_samples(read_sweep(file, [storage, f"budget.samples={samples - 1}"]))
    drawn = read_sweep(
        file,
        [
            storage,
            "searcher=random",
            "trials=5",
            "confirm=0",
            "space.train.steps={randint: [10, 99]}",
        ],
    )
    assert drawn.all_samples() == 5 * 99 * 16


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """A storage that need not wait for a disk."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def read_bytes(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def write_bytes(self, name: str, content: bytes) -> None:
        self.files[name] = content


@given(
    starts=st.lists(
        st.tuples(
            st.integers(1, 400),
            st.booleans(),
            st.lists(st.floats(0.0, 40.0), min_size=1, max_size=5),
        ),
        min_size=1,
        max_size=12,
    ),
    seconds=st.floats(10.0, 300.0),
    dollars=st.floats(0.05, 3.0),
)
def test_kills_at_any_moment_never_make_a_sweep_take_more_than_its_budget(
    starts: list[tuple[int, bool, list[float]]],
    seconds: float,
    dollars: float,
) -> None:
    storage: Any = Memory()
    budget = Budget(seconds=seconds, dollars=dollars)
    clock = Clock()
    true_seconds = 0.0
    true_dollars = 0.0
    for polls, is_killed, rates in starts:
        ledger = Ledger(budget, storage, clock)
        if ledger.is_ending(max(rates)):
            continue
        ledger.begin()
        ledger.count(rates[0])
        for poll in range(polls):
            rate = rates[poll % len(rates)]
            clock.now += POLL_SECONDS
            true_seconds += POLL_SECONDS
            true_dollars += POLL_SECONDS * rate / 3600
            ledger.count(rate)
            if ledger.is_spent(rate):
                break
        if not is_killed:
            ledger.close()
        written = json.loads(storage.read_bytes(FILE))
        assert written["seconds"] >= true_seconds - 1e-6
        assert written["dollars"] >= true_dollars - 1e-9
        assert true_seconds <= seconds + 1e-6
        assert true_dollars <= dollars + 1e-9


def test_trials_are_asked_to_save_before_they_are_ended(tmp_path: Path) -> None:
    clock = Clock()
    ledger = Ledger(Budget(seconds=100.0, dollars=1.0), Storage(tmp_path), clock)
    assert ledger.left_seconds(0.0) == 100.0
    assert ledger.left_seconds(72.0) == pytest.approx(50.0), "a dollar lasts 50 s at 72 an hour"
    clock.now += 91.0
    ledger.count(0.0)
    assert ledger.is_ending(0.0) and not ledger.is_spent(0.0)
    assert ledger.sentence() == "91 of 100 seconds and 0 of 1 dollars"
    clock.now += 5.0
    ledger.count(0.0)
    assert ledger.is_spent(0.0)
    assert ledger.written.seconds == 96.0 + AHEAD_SECONDS
    ledger.close()
    assert Ledger(ledger.budget, Storage(tmp_path)).taken.seconds == 96.0
    assert Ledger(Budget(), Storage(tmp_path)).left_seconds(1e6) == math.inf


def test_what_is_taken_is_counted_until_all_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.sweep.budget.POLL_SECONDS", 0.01)
    ledger = Ledger(Budget(seconds=0.4), Storage(tmp_path))
    calls: list[str] = []
    ends: list[threading.Event] = []

    def end(is_over: threading.Event) -> None:
        calls.append("end")
        ends.append(is_over)
        is_over.wait(30)

    with watched(ledger, lambda: 0.0, ask=lambda: calls.append("ask"), end=end):
        wait_until(lambda: bool(ends))
        assert ledger.taken.seconds < 0.4
        taken = ledger.taken.seconds
        wait_until(lambda: ledger.taken.seconds > taken)
    assert calls == ["ask", "end"], "once each"
    assert ends[0].is_set()
    assert json.loads((tmp_path / FILE).read_text())["seconds"] == ledger.taken.seconds


class WaitsWhenItGoes:
    """An object in whose finalizer exceptions are lost."""

    def __del__(self) -> None:
        time.sleep(20)


def wait_and_lose_interrupts() -> None:
    """As a library may that catches every exception, and as finalizers do."""
    with contextlib.suppress(BaseException):
        time.sleep(20)
    WaitsWhenItGoes()
    with contextlib.suppress(BaseException):
        time.sleep(20)


@pytest.mark.parametrize("asked_before", [True, False])
def test_trials_end_with_the_budget_though_interrupts_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_before: bool
) -> None:
    """Also if a person has asked the sweep to stop before."""
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)  # pytest's keeps the exceptions
    ledger = Ledger(Budget(seconds=0.4), Storage(tmp_path))
    asked: list[int] = []
    disconnected: list[int] = []
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), stop_signals(lambda: asked.append(1)) as signals:
        if asked_before:
            os.kill(os.getpid(), signal.SIGINT)
        end = partial(signals.end, last_resort=lambda: disconnected.append(1))
        with watched(ledger, lambda: 0.0, ask=lambda: None, end=end):
            wait_and_lose_interrupts()
            time.sleep(20)
    assert time.monotonic() - start < 8
    assert asked == [1] * asked_before and not disconnected


def test_a_sweep_that_no_interrupt_reaches_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are lost, or it is in another thread than the main one, where signals are not ours."""
    monkeypatch.setattr("app.run.stopping.BLOCK_SECONDS", 0.3)
    is_disconnected = threading.Event()

    def sweep(*, loses: bool) -> None:
        ledger = Ledger(Budget(seconds=0.4), Storage(tmp_path / str(loses)))
        with stop_signals(lambda: None) as signals:
            end = partial(signals.end, last_resort=is_disconnected.set)
            with watched(ledger, lambda: 0.0, ask=lambda: None, end=end):
                while not is_disconnected.is_set():
                    with contextlib.suppress(KeyboardInterrupt):
                        is_disconnected.wait(20)

    with contextlib.suppress(KeyboardInterrupt):
        sweep(loses=True)
    assert is_disconnected.is_set()
    is_disconnected.clear()
    thread = threading.Thread(target=sweep, kwargs={"loses": False})
    thread.start()
    thread.join(20)
    assert is_disconnected.is_set() and not thread.is_alive()


def test_a_sweep_that_a_person_has_stopped_still_ends_its_trials_with_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trials are told how long they may save, also if they were told to stop before."""
    from experiments.sweep import tuning
    from experiments.sweep.trial import STOP_FILE

    file, storage = write(tmp_path, budget={"seconds": 600})
    sweep = read_sweep(file, [storage])
    store = tuning.TrialStore(tmp_path, "sweep", {})
    texts: list[str] = []

    @contextlib.contextmanager
    def nearly_spent(
        ledger: Ledger, rate: object, *, ask: Callable[[], object], end: object
    ) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until((tmp_path / STOP_FILE).exists)
        texts.append((tmp_path / STOP_FILE).read_text())
        ask()
        texts.append((tmp_path / STOP_FILE).read_text())
        yield

    monkeypatch.setattr(tuning, "watched", nearly_spent)
    monkeypatch.setattr(tuning, "_make_tuner", lambda *_, **__: mock.Mock())
    tuner_settings: Any = mock.Mock(dollars_per_hour={}, room=1, earlier_trials=[])
    with pytest.raises(BudgetSpent):
        tuning.run_trials(sweep, store, Console(), tuning=tuner_settings)
    assert texts[0] == "" and 500 < float(texts[1]) < 600


class TuneTrialInState:
    """What the observer asks of a trial of Tune's."""

    def __init__(self, number: int) -> None:
        self.trial_id = str(number)
        self.status = "PENDING"
        self.config: dict[str, Any] = {"workers": 2}

    def __str__(self) -> str:
        return f"t{self.trial_id}-x"


def test_dollars_are_counted_from_when_a_trial_has_resources(tmp_path: Path) -> None:
    """And not of trials that wait for those of others."""
    from experiments.sweep.trials import TrialStore
    from experiments.sweep.tuning import Observer, Tuning, _room

    nodes = [
        NodeState(address="a", kind="", total={"CPU": 8.0}, available={"CPU": 3.0, "memory": 9.0}),
        NodeState(address="b", kind="", total={"CPU": 8.0}, available={"CPU": 2.5}),
    ]
    room = _room([{}, {"CPU": 1.0}, {"CPU": 1.0}], nodes)
    assert room == 2, "of two CPUs each, in five and a half"
    assert _room([{"GPU": 1.0}], nodes) == 0
    file, storage = write(tmp_path, concurrent=4)
    sweep = read_sweep(file, [storage])
    tuning = Tuning(
        searcher=None,  # type: ignore[arg-type]
        scheduler=None,  # type: ignore[arg-type]
        uses_gpus=False,
        earlier_trials=[],
        dollars_per_hour={2: 3.0},
        room=room,
    )
    store = TrialStore(tmp_path, "sweep", {})
    observer = Observer(sweep, store, Console(), tuning=tuning)
    trials: list[Any] = [TuneTrialInState(number) for number in range(4)]
    rates = []
    for started in range(4):
        observer.on_step_end(started, trials)
        rates.append(observer.rate())
        trials[started].status = "RUNNING"
        observer.on_trial_start(started, trials, trials[started])
    rates.append(observer.rate())
    assert rates == [6.0, 6.0, 6.0, 9.0, 12.0], "two start at once, and others later"


@pytest.mark.slow
def test_a_sweep_that_is_killed_stays_within_its_seconds_and_answers(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    arguments = ["sweep", *write(tmp_path, budget={"seconds": 45})]
    first = start(arguments, env=ray_environment)
    file = tmp_path / "s" / FILE

    def taken() -> float:
        return float(json.loads(file.read_text())["seconds"]) if file.exists() else 0.0

    wait_until(lambda: taken() > 10)
    first.send_signal(signal.SIGKILL)
    finish(first)
    before = taken()
    assert before <= 45
    second = trireme(*arguments, "--json", env=ray_environment)
    assert "budget: at most 45 seconds, over all starts together" in second.err + second.out
    assert before < taken() <= 45
    records = [json.loads(f.read_text()) for f in (tmp_path / "s").glob("*/trial.json")]
    assert second.code == 130 and "raise it to continue" in second.json["error"]
    if any(record["status"] == "finished" for record in records):  # unless the machine was too slow
        assert second.json["status"] == "stopped"
        assert (tmp_path / "s" / "answer.json").exists()
    spent = taken()
    third = trireme(*arguments, env=ray_environment)
    assert third.code == 130 and "the budget is spent" in third.err + third.out
    assert taken() == spent, "nothing has started"
