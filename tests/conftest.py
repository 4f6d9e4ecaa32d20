"""One Ray head for all tests that need one: starting Ray costs more than the trainings that tests do."""

import contextlib
import gc
import inspect
import os
import types
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
WHOLE = ("trireme", "torchrun", "start", "subprocess", "invoke", "CliRunner", "Reader", "load_task", "mlflow", "ROWS")
"""What a module's tests begin processes with, or whole commands, models and trainings."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The second half of `make test` imports only what can be in it."""
    only_alone = config.option.markexpr.endswith(ALONE) and collection_path.suffix == ".py"
    return True if only_alone and "run_distributed" not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What trains on the pool's ranks has the machine to itself (`alone`). The rest runs in two processes, and one of
    them begins with all that needs the Ray head, which mostly waits. What is `pure` runs by itself too (Makefile)."""
    order = {}
    known: dict[Any, bool] = {}
    asks = {item: "ray_environment" in getattr(item, "fixturenames", ()) for item in items}
    in_ray = {item.path for item in items if asks[item] and not item.get_closest_marker("slow")}
    for item in items:
        names = dir(getattr(item, "module", None))
        ray = item.path in in_ray  # with all of its file, whose fixtures are then made once
        item.add_marker(pytest.mark.xdist_group("ray" if ray else item.path.stem))
        pure = not ray and not any(name in names for name in WHOLE)
        order[item] = not ray, pure  # what is short comes last, so that neither process ends long before the other
        if not asks[item] and "run_distributed" in names and _reaches_pool(getattr(item, "function", None), known):
            item.add_marker("alone")
        elif pure:
            item.add_marker("pure")
    items.sort(key=order.__getitem__)


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


def _reaches_pool(function: Any, known: dict[Any, bool]) -> bool:
    """Whether it names `run_distributed`, or a function of its module does that it names."""
    function = getattr(function, "__wrapped__", function)
    if not inspect.isfunction(function):
        return False
    if function not in known:
        names, around = _names(function.__code__), function.__globals__
        known[function] = "run_distributed" in names
        known[function] |= any(_reaches_pool(around[name], known) for name in names & around.keys())
    return known[function]


def _names(code: types.CodeType) -> set[str]:
    """Also those of functions and generators inside."""
    inside = (_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inside)


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
