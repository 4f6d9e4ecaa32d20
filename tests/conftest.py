"""One Ray head for all tests that need one: starting Ray costs more than the trainings that tests do."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from cluster.connect import connect, disconnect
from tests.pool import restore
from tests.ray_heads import ray_head
from tests.running import environment

hypothesis.settings.register_profile("busy", deadline=None)  # a machine with other work on it is slow at times
hypothesis.settings.load_profile("busy")


HEAD = contextlib.ExitStack()
"""Holds the session's Ray head."""
LAST_IN_RAY = pytest.StashKey[pytest.Item | None]()
ALONE = " and alone"
"""How the expression ends that chooses the second half of `make test`."""
MARK_ALONE = "pytest.mark.alone"
COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All that was collected, before `-m` selects, whose marks tests/test_marks.py checks."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The second half of `make test` imports only what can be in it."""
    only_alone = config.option.markexpr.endswith(ALONE) and collection_path.suffix == ".py"
    return True if only_alone and MARK_ALONE not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One of the two processes of `make test` begins with all that needs the Ray head, which mostly waits; what is
    `pure` is short and comes last, so that neither process ends long before the other."""
    config.stash[COLLECTED] = list(items)
    asks = [item for item in items if "ray_environment" in getattr(item, "fixturenames", ())]
    in_ray = {item.path for item in asks if not item.get_closest_marker("slow")}
    for item in items:
        # With all of its file, whose fixtures are then made once.
        item.add_marker(pytest.mark.xdist_group("ray" if item.path in in_ray else item.path.stem))
    items.sort(key=lambda item: (item.path not in in_ray, item.get_closest_marker("pure") is not None))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The tables, a line for each test that noted one with `record_property(HEAD, LINE)`, from whichever process."""
    tables: dict[str, list[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                for head, line in report.user_properties:
                    tables.setdefault(head, []).append(line)
    for head, lines in tables.items():
        terminalreporter.write_line("\n".join(["", head, *sorted(lines), ""]))


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """What a test, or a library that it calls, sets in this process's environment is gone after it."""
    before = dict(os.environ)
    yield
    if before != os.environ:
        restore(before)


@pytest.fixture(scope="session")
def ray_environment() -> Iterator[dict[str, str]]:
    """Environment in which `trireme` uses the session's Ray head."""
    with HEAD:
        yield environment(RAY_ADDRESS=HEAD.enter_context(ray_head()), RAY_AUTH_MODE="disabled")


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # every training in this process collects garbage: what modules hold is not looked at again
    asks = [item for item in session.items if "ray_environment" in getattr(item, "fixturenames", ())]
    session.config.stash[LAST_IN_RAY] = asks[-1] if asks else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After the last test that needs it the head ends: idle, it takes a tenth of a processor."""
    if item is item.config.stash[LAST_IN_RAY]:
        HEAD.close()


@pytest.fixture
def connected(ray_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is connected to the session's Ray head."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_TMPDIR", "PYTHONPATH"):
        monkeypatch.setenv(name, ray_environment[name])
    connect()
    yield
    disconnect()


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("a penny saved is a penny earned; " * 60)
    return str(path)


@pytest.fixture
def table(tmp_path: Path) -> str:
    """y = 3·a + 10 for kind x, - 10 for kind z; some values missing."""
    lines = ["a,kind,y,class,code"]
    for i in range(200):
        a = (i * 37 % 100) / 10
        kind = "xz"[i % 2]
        shown = "" if i % 17 == 0 else str(a)
        target = "" if i == 5 else str(3 * a + (10 if kind == "x" else -10))
        lines.append(f"{shown},{kind},{target},{'low' if a < 5 else 'high'},{i % 3}")
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)
