"""Work in the background, whose failure ends what the main thread waits for."""

import contextlib
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from app.run.background import SIGNAL, BackgroundWork

pytestmark = pytest.mark.pure
LONG = 60.0
"""Seconds that nothing here may take."""


def fail() -> None:
    raise ValueError("the data is wrong")


def test_a_failure_ends_what_the_main_thread_waits_for() -> None:
    work = BackgroundWork(fail)
    handler = signal.getsignal(SIGNAL)
    began = time.monotonic()
    with pytest.raises(ValueError, match="the data is wrong"):
        with work.failure_interrupts():
            work.start()
            with contextlib.suppress(Exception):  # as Ray does in places
                time.sleep(LONG)
    assert time.monotonic() - began < LONG / 2
    assert signal.getsignal(SIGNAL) == handler


def test_a_failure_that_is_lost_is_raised_again() -> None:
    work = BackgroundWork(fail)
    began = time.monotonic()
    with pytest.raises(ValueError, match="the data is wrong"):
        with work.failure_interrupts():
            work.start()
            with contextlib.suppress(BaseException):
                time.sleep(LONG)
            time.sleep(LONG)
    assert time.monotonic() - began < LONG / 2


def test_a_failure_that_came_before_is_raised_at_once() -> None:
    work = BackgroundWork(fail)
    work.start()
    with pytest.raises(ValueError, match="the data is wrong"):
        work.result()
    with pytest.raises(ValueError, match="the data is wrong"), work.failure_interrupts():
        raise AssertionError("this was reached")


def test_an_import_is_not_interrupted_but_what_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_import.py").write_text(
        "import time\nuntil = time.monotonic() + 1\n"
        "while time.monotonic() < until:\n    time.sleep(0.01)\ncomplete = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "slow_import", raising=False)

    def fail_during_the_import() -> None:
        while "slow_import" not in sys.modules:
            time.sleep(0.01)
        fail()

    work = BackgroundWork(fail_during_the_import)
    began = time.monotonic()
    with pytest.raises(ValueError, match="the data is wrong"):
        with work.failure_interrupts():
            work.start()
            import slow_import  # type: ignore[import-not-found]

            assert slow_import.complete
            time.sleep(LONG)
    assert time.monotonic() - began < LONG / 2
    assert sys.modules["slow_import"].complete


def test_work_that_succeeds_interrupts_nothing() -> None:
    work = BackgroundWork(lambda: 3)
    with work.failure_interrupts():
        work.start()
        work.start()  # a second time does nothing
        time.sleep(0.3)
    assert work.result() == 3


def test_in_another_thread_the_failure_is_raised_at_the_end() -> None:
    reached: list[str] = []

    def wait_in_a_thread() -> None:
        work = BackgroundWork(fail)
        try:
            with work.failure_interrupts():
                with contextlib.suppress(ValueError):
                    work.result()
                reached.append("the end of the context")
        except ValueError as error:
            reached.append(str(error))

    thread = threading.Thread(target=wait_in_a_thread)
    thread.start()
    thread.join(LONG)
    assert reached == ["the end of the context", "the data is wrong"]
