"""Fixtures of all tests, among them one Ray head for all that need one, since it starts slowly."""

import contextlib
import copy
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest

from app.launchers import crash_notice
from app.tracking.tracker import WriterProcess
from cluster.connect import connect, disconnect
from tests import running
from tests.pool import restore
from tests.ray_heads import ray_head
from tests.running import environment
from tests.warm import import_nothing_ahead, spawn_writer

hypothesis.settings.register_profile(
    "busy", deadline=None
)  # a machine with other work on it is slow at times
hypothesis.settings.load_profile("busy")


HEAD = contextlib.ExitStack()
"""Keeps the session's Ray head, once it is started."""
LAST_IN_RAY = pytest.StashKey[pytest.Item | None]()
MODULES = pytest.StashKey[int]()
"""The number of modules when objects were frozen last."""
ALONE = " and alone"
"""The end of the mark expression that selects the second half of `make test`."""
MARK_ALONE = "pytest.mark.alone"
COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All collected tests before `-m` selects some; tests/test_marks.py checks their marks."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Lets the second half of `make test` import only files that may have tests for it."""
    only_alone = config.option.markexpr.endswith(ALONE) and collection_path.suffix == ".py"
    return True if only_alone and MARK_ALONE not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders tests so that the two processes of `make test` end at about the same time.

    One of them begins with all tests that need the Ray head, which mostly wait. Tests that are
    `pure` are short, and come last.
    """
    config.stash[COLLECTED] = list(items)
    asks = [item for item in items if "ray_environment" in getattr(item, "fixturenames", ())]
    in_ray = {item.path for item in asks if not item.get_closest_marker("slow")}
    for item in items:
        # A file stays together, so that its fixtures are made once, and so do the planner's files,
        # which share the models that they have read.
        name = "planner" if item.path.parent.name == "planner" else item.path.stem
        item.add_marker(pytest.mark.xdist_group("ray" if item.path in in_ray else name))
    items.sort(
        key=lambda item: (item.path not in in_ray, item.get_closest_marker("pure") is not None)
    )


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints tables, a line per test that called `record_property(HEAD, LINE)`, in any process."""
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
    """Restores the environment of this process after each test."""
    before = dict(os.environ)
    yield
    if before != os.environ:
        restore(before)


@pytest.fixture(autouse=True)
def no_command_stays() -> Iterator[None]:
    """Ends what a test that fails has started, which would slow down all after it."""
    count = len(running.STARTED)
    yield
    running.end_started(count)


@pytest.fixture(scope="session")
def ray_environment() -> Iterator[dict[str, str]]:
    """Variables with which `trireme` uses the session's Ray head."""
    with HEAD:
        yield environment(RAY_ADDRESS=HEAD.enter_context(ray_head()), RAY_AUTH_MODE="disabled")


def pytest_collection_finish(session: pytest.Session) -> None:
    # Every training run in this process collects garbage, which need not look at modules again.
    freeze(session.config)
    asks = [
        item for item in session.items if "ray_environment" in getattr(item, "fixturenames", ())
    ]
    session.config.stash[LAST_IN_RAY] = asks[-1] if asks else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Ends the head after the last test that needs it; idle, it takes a tenth of a processor.

    Objects of the modules that a test has imported are frozen, as those of collection are: each
    training would look at all of them several times, in up to a second.
    """
    if item is item.config.stash[LAST_IN_RAY]:
        HEAD.close()
    if len(sys.modules) > item.config.stash[MODULES] + 50:
        freeze(item.config)


def freeze(config: pytest.Config) -> None:
    """Keeps the garbage collector from all objects that there are."""
    gc.collect()
    gc.freeze()
    config.stash[MODULES] = len(sys.modules)


@pytest.fixture
def connected(ray_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connects this process to the session's Ray head."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_TMPDIR", "PYTHONPATH"):
        monkeypatch.setenv(name, ray_environment[name])
    connect()
    yield
    disconnect()


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for this test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def readers() -> dict[tuple[str, ...], Any]:
    """What the planner has read of models, by all that it depends on (`models_read_once`)."""
    return {}


@pytest.fixture
def models_read_once(readers: dict[tuple[str, ...], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the plans of a module read each model once, which takes most of a plan's time.

    It is for modules whose plans are of one model for many machines. That a model is read anew
    is what tests/app/planner shows.
    """
    from app.planner import plan

    read = plan.reader_of

    def read_once(config: Any, task: Any, machine: Any, *, splits: bool = True) -> Any:
        keys = (
            config.task,
            config.task_args,
            config.parallel.sequence_parallel,
            config.parallel.loss_parallel,
            config.train.weight_dtype,
            config.optimizer.args,
            machine.device.is_cpu,
            splits,
        )
        key = tuple(map(str, keys))
        if key not in readers:
            readers[key] = read(config, task, machine, splits=splits)
        return copy.copy(readers[key])  # with the same costs; a plan writes its notes into it

    monkeypatch.setattr(plan, "reader_of", read_once)


REAL_STARTS = (
    (WriterProcess, "_spawn", WriterProcess._spawn),
    (WriterProcess, "import_ahead", WriterProcess.import_ahead),
    (crash_notice, "_start_second_process", crash_notice._start_second_process),
)
"""What `warm_start` replaces."""


@pytest.fixture(autouse=True, scope="session")
def warm_start() -> Iterator[None]:
    """Lets commands and MLflow's writers start at once (tests/warm.py), also in modules' fixtures.

    A run in this process starts none that would announce its crash, which takes as long as the rest
    of a short run: commands do, and tests/app/launchers/test_crash.py shows what it says.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        for (owner, name, _), warm in zip(
            REAL_STARTS, (spawn_writer, import_nothing_ahead, start_none), strict=True
        ):
            monkeypatch.setattr(owner, name, warm)
        yield


def start_none(*_: Any) -> NoReturn:
    """In place of the process that announces a crash, as where there is no room for a process."""
    raise OSError


@pytest.fixture
def real_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how a command or a writer starts: each is a program of its own."""
    monkeypatch.setattr(running, "is_warm", False)
    for owner, name, real in REAL_STARTS:
        monkeypatch.setattr(owner, name, real)


@pytest.fixture
def text(tmp_path: Path) -> str:
    """The path of a short text."""
    path = tmp_path / "text.txt"
    path.write_text("a penny saved is a penny earned; " * 60)
    return str(path)


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A table with y = 3·a + 10 for kind x and 3·a - 10 for kind z, and missing values."""
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
