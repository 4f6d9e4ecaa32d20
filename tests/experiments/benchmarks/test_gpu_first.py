"""The first minutes on a GPU, run on a CPU: its lines, its imports, and checks that fail."""

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from app.planner.machine import of_shape
from cluster.environment import ALLOCATOR, NCCL, set_defaults
from cluster.shape import shape_of_gpus
from experiments.benchmarks.gpt import SHAPES
from experiments.benchmarks.gpu_first import program
from experiments.benchmarks.gpu_first.check import Check
from experiments.benchmarks.gpu_first.program import Session
from experiments.benchmarks.gpu_first.speed import with_larger_batch
from experiments.benchmarks.gpu_first.table import CHECKS, PACKAGE, ROW_PREFIX
from experiments.benchmarks.gpu_first.training import estimate_of, make_config
from tests.experiments.benchmarks.bad_checks import NOT_THERE
from tests.running import ROOT, environment, wait_until

FIELDS = ["name", "ok", "seconds", "predicted", "measured", "error", "lacks"]
REFUSES = f"""import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_spec(cls, name, *rest):
    return None if name.partition(".")[0] in {NOT_THERE} else find(name, *rest)
PathFinder.find_spec = classmethod(find_spec)
"""
"""A sitecustomize.py that hides packages; test_house.py checks the imports too."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_program_runs_on_a_cpu_where_there_is_little_but_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    out = tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "experiments.benchmarks",
        "gpu",
        "first",
        "--model",
        "tiny",
        "--out",
        str(out),
    ]
    env = environment(PYTHONPATH=str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    *lines, summary = map(json.loads, out.read_text().splitlines())
    by = {line["name"]: line for line in lines}
    assert list(by)[:-1] == ["machine", *(check.name for check in CHECKS)] and list(by)[
        -1
    ].startswith(ROW_PREFIX)
    assert all(list(line) == FIELDS for line in lines)
    for name, line in by.items():
        if line["ok"]:
            assert (
                line["measured"]
                and line["measured"].keys() >= line["predicted"].keys()
                and line["seconds"] > 0
            )
            assert line["error"] is None and (
                name == "machine" or all(p["why"] for p in line["predicted"].values())
            )
        else:
            assert line["ok"] is None and line["error"] in (
                "needs a GPU",
                "has a size of its own: leave --model out",
            )
    needs = {check.name for check in CHECKS if check.needs == "gpu"}
    assert (
        {name for name, line in by.items() if not line["ok"]} == needs == set(summary["left_out"])
    )
    figures = [(name, what) for name, line in by.items() for what in line["predicted"]]
    assert [
        tuple(row.split()[:2]) for row in done.stdout.splitlines()[-2 - len(figures) : -2]
    ] == figures
    assert summary["ok"] and summary["failed"] == [] and summary["name"] == "summary"
    assert (
        by["resume"]["measured"]["resumed_from"] == 3 and by["gpu_tests"]["measured"]["skipped"] > 0
    )


BAD = "tests.experiments.benchmarks.bad_checks."


def bad_check(name: str, function: str, *arguments: object, limit: float = 30.0) -> Check:
    return Check(name=name, function=BAD + function, seconds=1.0, limit=limit, arguments=arguments)


@pytest.mark.slow
def test_a_check_that_hangs_crashes_or_fails_is_ended_and_the_later_ones_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each has the environment of a run's workers."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in (*NCCL, *ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    checks = [bad_check("hangs", "hangs", limit=4.0)]
    checks += [
        bad_check(name, name)
        for name in ("crashes", "raises", "is_not_for_here", "says_its_environment")
    ]
    checks += [bad_check(name, "lacks", name) for name in ("no_such_package", "app.no_such_module")]
    checks += [bad_check(str(value), "is_wrong", value) for value in (1.5, 3.0, float("nan"), None)]
    checks.append(Check(name="gpu", function="", seconds=1.0, limit=1.0, needs="gpu"))
    by = {
        line["name"]: line
        for line in program.run_all(checks, gpus=0, model="tiny", session=Session(tmp_path))
    }
    assert list(by) == [check.name for check in checks] and all(
        list(line) == FIELDS for line in by.values()
    )
    failed = [name for name, line in by.items() if line["ok"] is False]
    assert failed == ["hangs", "crashes", "raises", "app.no_such_module", "3.0", "nan", "None"]
    assert 4.0 <= by["hangs"]["seconds"] < 20.0 and by["hangs"]["measured"] == {"before": 1}
    assert by["hangs"]["predicted"]["never"]["why"] == "it does not get that far"
    assert "killed" in by["hangs"]["error"] and "in hangs" in by["hangs"]["error"], (
        "and where it hung"
    )
    assert "SIGSEGV" in by["crashes"]["error"] and by["crashes"]["measured"] == {"before": 1}
    assert "MemoryError: out of memory" in by["raises"]["error"]
    assert (
        by["is_not_for_here"]["ok"] is None
        and by["is_not_for_here"]["error"] == "there is no such thing here"
    )
    assert by["no_such_package"]["error"] == "needs no_such_package: pip install it"
    assert (
        by["gpu"]["error"] == "needs a GPU"
        and by["3.0"]["error"] == "value is 3, outside of 1.0 to 2.0"
    )
    assert (
        by["None"]["error"] == "value was not found"
        and by["1.5"]["predicted"]["least"]["high"] is None
    )
    set_defaults(wanted := {})
    assert wanted and by["says_its_environment"]["measured"] == wanted
    assert not sleeping()


def sleeping() -> bool:
    """Whether what `hangs` starts is still there."""
    return ["sleep", "1234.5"] in [
        process.info["cmdline"] for process in psutil.process_iter(["cmdline"])
    ]


ONE_THAT_HANGS = f"""import sys
from pathlib import Path
from experiments.benchmarks.gpu_first.check import Check
from experiments.benchmarks.gpu_first.program import Session, run
check = Check(name="hangs", function="{BAD}hangs", seconds=1.0, limit=600.0)
run(check, "cpu", "tiny", Session(Path(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_check_ends_with_the_program_however_that_is_ended(
    how: signal.Signals, tmp_path: Path
) -> None:
    """With all that it has started."""
    program = subprocess.Popen(
        [sys.executable, "-c", ONE_THAT_HANGS, str(tmp_path)], env=environment(PYTHONPATH=str(ROOT))
    )
    wait_until(sleeping, 60)
    program.send_signal(how)
    program.wait(30)
    wait_until(lambda: not sleeping(), 30)


@pytest.mark.parametrize(
    ("left", "runs"), [(9.9, []), (10.0, ["short"]), (25.0, ["short", "long"])]
)
def test_what_does_not_fit_the_budget_is_left_out_and_named(
    left: float, runs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By what is left when its turn comes; none may run for longer than that."""
    clock = [100.0]
    monkeypatch.setattr(program.time, "monotonic", lambda: clock[0])

    def run(check: Check, *_: object) -> dict[str, object]:
        clock[0] += check.seconds
        return program.make_line(check.name, True)

    monkeypatch.setattr(program, "run", run)
    checks = [
        Check(name="short", function="", seconds=10.0, limit=60.0),
        Check(name="long", function="", seconds=15.0, limit=60.0),
    ]
    session = Session(tmp_path, deadline=100.0 + left)
    lines = list(program.run_all(checks, gpus=1, model=None, session=session))
    assert [line["name"] for line in lines if line["ok"]] == runs
    assert all("of --budget" in line["error"] for line in lines if not line["ok"])


@pytest.mark.parametrize(("lacks", "code"), [("omegaconf", 1), (None, 0)])
def test_a_missing_package_ends_the_program_badly_and_what_a_gpu_needs_does_not(
    lacks: str | None, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = {"gpus": 0, "most": [float("inf"), 1.5]}
    monkeypatch.setattr(
        program, "run", lambda *_: program.make_line("machine", True, measured=measured)
    )
    left_out = program.make_line("a", None, error="why", lacks=lacks)
    monkeypatch.setattr(program, "run_all", lambda *_, **__: iter([left_out]))
    with pytest.raises(SystemExit) as ended:
        program.main(["--model", "tiny", "--out", str(tmp_path / "out")])
    machine, *_, summary = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert (
        ended.value.code == code and summary["ok"] == (code == 0) and summary["left_out"] == ["a"]
    )
    assert summary["lacks"] == ([lacks] if lacks else []) and machine["measured"]["most"] == [
        "inf",
        1.5,
    ]


@pytest.mark.parametrize(
    ("measured", "ended", "words"),
    [
        ({"gpus": 0}, {}, ["there is no GPU here"]),
        ({}, {"lacks": "torch"}, ["what GPUs there are could not be found: needs torch"]),
        (
            {},
            {"error": "ImportError: no libcudart.so.13", "trace": ""},
            ["could not be found", "no libcudart.so.13"],
        ),
    ],
)
def test_it_is_said_why_no_gpu_was_found(
    measured: dict[str, int],
    ended: dict[str, str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "measured").write_text(
        json.dumps({"measured": measured}) + "\n" + json.dumps(ended) + "\n"
    )
    line = program.judge("machine", tmp_path / "measured")
    monkeypatch.setattr(program, "run", lambda *_: line)
    with pytest.raises(SystemExit) as why:
        program.main([])
    assert all(word in str(why.value) for word in words), why.value
    assert measured or "no GPU here" not in str(why.value)


@pytest.mark.parametrize("words", [["--only", "nothing"], ["--limit", "0"], ["--budget", "-1"]])
def test_what_is_written_wrongly_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(words)
    assert ended.value.code == 2 and words[1] in capsys.readouterr().err


def test_each_check_is_found_and_only_names_begin_with_what_is_asked_for() -> None:
    for check in CHECKS:
        module, _, name = check.function.rpartition(".")
        assert check.function.startswith(PACKAGE) and callable(
            getattr(importlib.import_module(module), name)
        )
        assert check.model in SHAPES and check.seconds < check.limit <= 400
    assert [check.name for check in program.chosen(CHECKS, ["copy", "memory_1"])][:2] == [
        "copy",
        "memory_1.3b",
    ]


@pytest.mark.slow
def test_one_memory_shape_runs_out_on_every_gpu_and_one_beside_it_fits_80_gb(
    tmp_path: Path,
) -> None:
    rows = {check.name: check for check in CHECKS if check.name.startswith("memory")}
    for name, gpu, fits in (
        ("memory_1.3b", "h100-80gb", True),
        ("memory_1.3b_runs_out", "b200", False),
    ):
        check = rows[name]
        mode, times = check.arguments
        shape = with_larger_batch(SHAPES[check.model], times)
        config = make_config(shape, str(tmp_path), activation_checkpointing=mode)
        assert estimate_of(config, of_shape(shape_of_gpus(1, gpu, 1, None), 1)).fits == fits, (
            check.name
        )
