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
from experiments.benchmarks.gpu_first.program import Shared
from experiments.benchmarks.gpu_first.speed import larger
from experiments.benchmarks.gpu_first.table import CHECKS, HERE, ROW
from experiments.benchmarks.gpu_first.training import config, planned
from tests.experiments.benchmarks.bad_checks import NOT_THERE
from tests.running import ROOT, environment, wait_until

FIELDS = ["name", "ok", "seconds", "predicted", "found", "error", "lacks"]
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
def test_the_program_runs_on_a_cpu_with_little_but_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "experiments.benchmarks", "gpu", "first"]
    command += ["--model=tiny", f"--out={out}"]
    env = environment(PYTHONPATH=str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    *lines, summary = map(json.loads, out.read_text().splitlines())
    line_of = {line["name"]: line for line in lines}
    assert list(line_of)[:-1] == ["machine", *(check.name for check in CHECKS)]
    assert list(line_of)[-1].startswith(ROW)
    assert all(list(line) == FIELDS for line in lines)
    for name, line in line_of.items():
        if line["ok"]:
            assert line["found"]
            assert line["found"].keys() >= line["predicted"].keys()
            assert line["seconds"] > 0
            assert line["error"] is None
            if name != "machine":
                assert all(figure["why"] for figure in line["predicted"].values())
        else:
            assert line["ok"] is None
            assert line["error"] in ("needs a GPU", "has a size of its own: leave --model out")
    need_gpu = {check.name for check in CHECKS if check.needs == "gpu"}
    not_run = {name for name, line in line_of.items() if not line["ok"]}
    assert not_run == need_gpu == set(summary["left_out"])
    figures = [(name, quantity) for name, line in line_of.items() for quantity in line["predicted"]]
    rows = done.stdout.splitlines()[-2 - len(figures) : -2]
    assert [tuple(row.split()[:2]) for row in rows] == figures
    assert summary["ok"] and summary["failed"] == [] and summary["name"] == "summary"
    assert line_of["resume"]["found"]["resumed_from"] == 3
    assert line_of["gpu_tests"]["found"]["skipped"] > 0


BAD = "tests.experiments.benchmarks.bad_checks."


@pytest.mark.slow
def test_a_check_that_hangs_crashes_or_fails_is_ended_and_the_later_ones_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each check has the environment of a run's workers."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in (*NCCL, *ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    checks = [Check("hangs", BAD + "hangs", 1.0, 4.0)]
    checks += [
        Check(name, BAD + name, 1.0, 30.0)
        for name in ("crashes", "raises", "is_not_for_here", "says_its_environment")
    ]
    checks += [
        Check(name, BAD + "lacks", 1.0, 30.0, (name,))
        for name in ("no_such_package", "app.no_such_module")
    ]
    checks += [
        Check(str(value), BAD + "is_wrong", 1.0, 30.0, (value,))
        for value in (1.5, 3.0, float("nan"), None)
    ]
    checks.append(Check("gpu", "", 1.0, 1.0, needs="gpu"))
    line_of = {line["name"]: line for line in program.run_all(checks, 0, "tiny", Shared(tmp_path))}
    assert list(line_of) == [check.name for check in checks]
    assert all(list(line) == FIELDS for line in line_of.values())
    failed = [name for name, line in line_of.items() if line["ok"] is False]
    assert failed == ["hangs", "crashes", "raises", "app.no_such_module", "3.0", "nan", "None"]
    assert 4.0 <= line_of["hangs"]["seconds"] < 20.0 and line_of["hangs"]["found"] == {"before": 1}
    assert line_of["hangs"]["predicted"]["never"]["why"] == "it does not get that far"
    assert "killed" in line_of["hangs"]["error"]
    assert "in hangs" in line_of["hangs"]["error"], "the function that hung is named"
    assert "SIGSEGV" in line_of["crashes"]["error"] and line_of["crashes"]["found"] == {"before": 1}
    assert "MemoryError: out of memory" in line_of["raises"]["error"]
    assert line_of["is_not_for_here"]["ok"] is None
    assert line_of["is_not_for_here"]["error"] == "there is no such thing here"
    assert line_of["no_such_package"]["error"] == "needs no_such_package: pip install it"
    assert line_of["gpu"]["error"] == "needs a GPU"
    assert line_of["3.0"]["error"] == "value is 3, outside of 1.0 to 2.0"
    assert line_of["None"]["error"] == "value was not found"
    assert line_of["1.5"]["predicted"]["least"]["high"] is None
    expected: dict[str, str] = {}
    set_defaults(expected)
    assert expected and line_of["says_its_environment"]["found"] == expected
    assert not sleeping()


def sleeping() -> bool:
    """Whether the process that `hangs` starts still runs."""
    processes = psutil.process_iter(["cmdline"])
    return ["sleep", "1234.5"] in [process.info["cmdline"] for process in processes]


ONE_THAT_HANGS = f"""import sys
from pathlib import Path
from experiments.benchmarks.gpu_first.check import Check
from experiments.benchmarks.gpu_first.program import Shared
from experiments.benchmarks.gpu_first.program import Shared, run
run(Check("hangs", "{BAD}hangs", 1.0, 600.0), "cpu", "tiny", Shared(Path(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_check_and_its_processes_end_with_the_program(
    number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", ONE_THAT_HANGS, str(tmp_path)]
    program = subprocess.Popen(command, env=environment(PYTHONPATH=str(ROOT)))
    wait_until(sleeping, 60)
    program.send_signal(number)
    program.wait(30)
    wait_until(lambda: not sleeping(), 30)


@pytest.mark.parametrize(
    ("seconds_left", "runs"), [(9.9, []), (10.0, ["short"]), (25.0, ["short", "long"])]
)
def test_checks_that_do_not_fit_the_budget_are_left_out_and_named(
    seconds_left: float, runs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The time left counts when a check's turn comes, and limits how long it may run."""
    clock = [100.0]
    monkeypatch.setattr(program.time, "monotonic", lambda: clock[0])

    def run(check: Check, *_: object) -> dict[str, object]:
        clock[0] += check.seconds
        return program._line(check.name, True)

    monkeypatch.setattr(program, "run", run)
    checks = [Check("short", "", 10.0, 60.0), Check("long", "", 15.0, 60.0)]
    lines = list(program.run_all(checks, 1, None, Shared(tmp_path, end=100.0 + seconds_left)))
    assert [line["name"] for line in lines if line["ok"]] == runs
    assert all("of --budget" in line["error"] for line in lines if not line["ok"])


@pytest.mark.parametrize(("lacks", "code"), [("omegaconf", 1), (None, 0)])
def test_a_missing_package_is_a_failure_and_a_missing_gpu_is_not(
    lacks: str | None, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts = {"gpus": 0, "most": [float("inf"), 1.5]}
    monkeypatch.setattr(program, "run", lambda *_: program._line("machine", True, found=facts))
    line = program._line("a", None, error="why", lacks=lacks)
    monkeypatch.setattr(program, "run_all", lambda *_: iter([line]))
    with pytest.raises(SystemExit) as ended:
        program.main(["--model", "tiny", "--out", str(tmp_path / "out")])
    machine, *_, summary = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert ended.value.code == code
    assert summary["ok"] == (code == 0)
    assert summary["left_out"] == ["a"]
    assert summary["lacks"] == ([lacks] if lacks else [])
    assert machine["found"]["most"] == ["inf", 1.5]


@pytest.mark.parametrize(
    ("facts", "ended", "words"),
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
def test_the_reason_why_no_gpu_was_found_is_told(
    facts: dict[str, int],
    ended: dict[str, str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "found").write_text(json.dumps({"found": facts}) + "\n" + json.dumps(ended) + "\n")
    line = program._judged("machine", tmp_path / "found", "", "")
    monkeypatch.setattr(program, "run", lambda *_: line)
    with pytest.raises(SystemExit) as raised:
        program.main([])
    sentence = str(raised.value)
    assert all(word in sentence for word in words), sentence
    assert facts or "no GPU here" not in sentence


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--limit", "0"], ["--budget", "-1"]])
def test_wrong_options_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(arguments)
    assert ended.value.code == 2 and arguments[1] in capsys.readouterr().err


def test_each_check_exists_and_is_chosen_by_the_beginning_of_its_name() -> None:
    for check in CHECKS:
        module, _, name = check.function.rpartition(".")
        assert check.function.startswith(HERE)
        assert callable(getattr(importlib.import_module(module), name))
        assert check.model in SHAPES and check.seconds < check.limit <= 400
    names = [check.name for check in program.chosen(CHECKS, ["copy", "memory_1"])]
    assert names[:2] == ["copy", "memory_1.3b"]


def test_one_memory_check_fits_80_gb_and_one_fits_no_gpu(tmp_path: Path) -> None:
    checks = {check.name: check for check in CHECKS if check.name.startswith("memory")}
    cases = [("memory_1.3b", "h100-80gb", True), ("memory_1.3b_runs_out", "b200", False)]
    for name, gpu, fits in cases:
        check = checks[name]
        mode, times = check.arguments
        shape = larger(SHAPES[check.model], times)
        run_config = config(shape, str(tmp_path), activation_checkpointing=mode)
        machine = of_shape(shape_of_gpus(1, gpu, 1, None), 1)
        assert planned(run_config, machine).fits == fits, check.name
