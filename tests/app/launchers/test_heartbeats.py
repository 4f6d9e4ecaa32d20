"""Which rank hangs, decided from heartbeats; no process is started."""

import pytest

from app.launchers.heartbeats import Hang, HangDetector
from app.launchers.workers import Status


def status(
    step: int = 7, phase: str = "training", *, ticks: int = 0, waiting: bool = False, age: float = 0.5
) -> Status:
    return Status(phase, step, ticks, waiting, age)


def first_hang(detector: HangDetector, statuses: dict[int, Status], begin: float, longest: float = 5000.0) -> tuple:
    """Seconds without a change until a hang is found, and which."""
    for tenth in range(int(longest * 10)):
        if found := detector.update(statuses, begin + tenth / 10):
            return tenth / 10, found
    return None, None


def trained(least: float, gaps: list[float]) -> tuple[HangDetector, float]:
    """A detector that has seen steps with these gaps between them, and when the last one was."""
    detector, now = HangDetector(least, 0.0), 0.0
    for step, gap in enumerate([100.0, *gaps]):  # loading takes as long as it takes
        now += gap
        assert detector.update({0: status(step), 1: status(step)}, now) is None
    return detector, now


@pytest.mark.parametrize(
    ("found", "after", "rank", "why"),
    [
        ({0: status(9, waiting=True), 1: status(9, age=4.0)}, 20, 1, "does not answer"),
        ({0: status(9, age=9.0), 1: status(9, age=9.0)}, 20, 0, "does not answer"),
        ({0: status(9, waiting=True), 1: status(9)}, 20, 1, "has been training after step 9"),
        ({0: status(9, waiting=True), 1: status(8, waiting=True)}, 20, 1, "after step 8"),
        ({0: status(9, "evaluating", waiting=True), 1: status(9, "evaluating")}, 70, 1, "has been evaluating"),
        ({0: status(9, waiting=True), 1: status(9, "reading")}, 70, 1, "has been reading"),
        ({0: status(9, "saving"), 1: status(9, "saving")}, 1810, 0, "has been saving"),
    ],
)
def test_who_holds_up_the_others(found: dict[int, Status], after: float, rank: int, why: str) -> None:
    detector, now = trained(10.0, [1.0] * 8)
    detector.update(found, now)
    seconds, hang = first_hang(detector, found, now)
    assert isinstance(hang, Hang) and hang.rank == rank and why in hang.why
    assert seconds == pytest.approx(after, abs=0.2)
    assert hang.silent == {rank for rank, status in found.items() if status.age > 3}


def test_a_pause_is_judged_by_those_before_it() -> None:
    for phase, least, gaps, after in (
        ("training", 2.0, [0.1] * 8, 2 + 2),
        ("training", 2.0, [3.0] * 8, 15 + 6),
        ("training", 2.0, [0.1, 0.1, 3.0, 0.1], 15 + 6),
        ("evaluating", 2.0, [6.0] * 8, 30 + 6 * 12),
        ("training", 0.0, [0.1] * 8, None),  # off
    ):
        stuck = {0: status(99, phase, waiting=True), 1: status(99, phase)}
        detector, now = trained(least, gaps)
        detector.update(stuck, now)
        assert first_hang(detector, stuck, now, 500.0)[0] == pytest.approx(after, abs=0.2), gaps


def test_before_the_second_step_only_a_silent_rank_hangs() -> None:
    for least, age, after in ((2.0, 30.0, 22.0), (10.0, 30.0, 40.0), (2.0, 0.5, None)):
        detector = HangDetector(least, 0.0)
        loading = {0: status(0, "starting"), 1: status(0, "starting", age=age)}
        detector.update(loading, 0.0)
        seconds, hang = first_hang(detector, loading, 0.0, 1700.0)
        assert seconds == pytest.approx(after, abs=0.2) and (hang is None or hang.rank == 1)


def test_any_sign_of_progress_ends_a_pause() -> None:
    for change in (status(10), status(9, "saving"), status(9, ticks=1)):
        detector, now = trained(2.0, [0.1] * 8)
        stands = {0: status(9), 1: status(9)}
        detector.update(stands, now)
        assert detector.update(stands, now + 3.9) is None
        assert detector.update({0: status(9), 1: change}, now + 3.95) is None
        assert detector.update({0: status(9), 1: change}, now + 7.5) is None
