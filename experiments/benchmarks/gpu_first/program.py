"""The first minutes on a GPU: a list of checks, each in a process of its own with a time limit.

It needs PyTorch, and for checks that train NumPy, PyYAML and psutil; neither Ray nor MLflow,
OmegaConf or Click. This file imports only Python's own library, so that whatever breaks, breaks in
the process of a check.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.gpu_first.check import MAX_MESSAGE, Check, misses
from experiments.benchmarks.gpu_first.table import CHECKS, MACHINE, ROW_PREFIX, row_check

ROOT = Path(__file__).parents[3]
MODELS = ("124m", "1.3b", "tiny")
OUT = "gpu_first.jsonl"
STATUS_WORDS = {True: "ok", False: "FAILED", None: "left out"}
MAX_REMARK = 400
"""Characters of an error that are printed."""
Line = dict[str, Any]
"""The result of a check, as it is written to the file."""


@dataclass(frozen=True)
class Session:
    """What all checks of a program have in common.

    Attributes:
        folder: For what is compiled, which all checks share.
        deadline: The end of the budget, on time.monotonic; None for no budget.
        limit: Seconds of every check, instead of its own limit.
    """

    folder: Path
    deadline: float | None = None
    limit: float | None = None

    @property
    def seconds_left(self) -> float:
        """Seconds of the budget that are left."""
        return math.inf if self.deadline is None else self.deadline - time.monotonic()


def main(arguments: Sequence[str], prog_name: str = "gpu first") -> None:
    """Print a line for each check, and then a table of what was predicted and found.

    The exit code is 1 if a check failed, a prediction did not hold, or a package was missing.
    """
    options = _parse(arguments, prog_name)
    start = time.monotonic()
    # As an exception, SIGTERM ends the running check too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="trireme-gpu-", ignore_cleanup_errors=True) as folder:
        deadline = None if options.budget is None else start + options.budget
        session = Session(Path(folder), deadline=deadline, limit=options.limit)
        machine = run(MACHINE, "cuda", "tiny", session)  # it finds itself how many GPUs there are
        gpus = _count_gpus(machine)
        if not gpus and options.model is None:
            sys.exit("there is no GPU here: on a CPU write --model tiny")
        rows = machine["measured"].get("rows", ())
        checks = chosen([*CHECKS, *map(row_check, rows)], options.only)
        lines = []
        with open(options.out, "w") as file:
            results = run_all(checks, gpus=gpus, model=options.model, session=session)
            for line in itertools.chain([machine], results):
                file.write(json.dumps(_without_nan(line)) + "\n")
                file.flush()
                print(_printed(line), flush=True)
                lines.append(line)
            summary = _summary(lines, seconds=time.monotonic() - start)
            file.write(json.dumps(summary) + "\n")
    print("", *_table(lines), "", sep="\n")
    print(f"All that was found is in {options.out}.", flush=True)
    sys.exit(0 if summary["ok"] else 1)


def _count_gpus(machine: Line) -> int:
    """How many GPUs the machine's own check has found; ends the program if it has not."""
    if "gpus" not in machine["measured"]:
        sys.exit(f"what GPUs there are could not be found{_remark(machine)}")
    return machine["measured"]["gpus"]


def _summary(lines: list[Line], *, seconds: float) -> Line:
    """The last line of the file."""

    def names(ok: bool | None) -> list[str]:
        return [line["name"] for line in lines if line["ok"] is ok]

    missing_packages = sorted({line["lacks"] for line in lines if line["lacks"]})
    return {
        "name": "summary",
        "ok": not names(False) and not missing_packages,
        "passed": names(True),
        "failed": names(False),
        "left_out": names(None),
        "lacks": missing_packages,
        "seconds": round(seconds, 1),
    }


def _without_nan(value: Any) -> Any:
    """A value with words in place of inf and nan, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_without_nan(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- what is printed ------------------------------------------------------------------------------


def _printed(line: Line) -> str:
    status = STATUS_WORDS[line["ok"]]
    return f"{line['seconds']:7.1f} s  {status:8}  {line['name']}{_remark(line)}"


def _remark(line: Line) -> str:
    """The first and the last line of why a check is not ok; a traceback's last names the error."""
    error_lines = (line["error"] or "").strip().splitlines()
    if not error_lines:
        return ""
    different_lines = dict.fromkeys((error_lines[0], error_lines[-1]))
    return f": {' … '.join(different_lines)}"[:MAX_REMARK]


def _table(lines: Iterable[Line]) -> Iterator[str]:
    """What was predicted and what was found, a line for each figure."""
    yield f"{'check':28} {'figure':26} {'predicted':>23}  {'found':>10}"
    for line in lines:
        for figure, bounds in line["predicted"].items():
            value = line["measured"].get(figure)
            range_text = f"{_bound_text(bounds['low'])} to {_bound_text(bounds['high'])}"
            value_text = "-" if value is None else f"{value:.4g}"
            is_missed = value is not None and bool(misses({figure: bounds}, line["measured"]))
            remark = "  outside" if is_missed else ""
            yield f"{line['name']:28} {figure:26} {range_text:>23}  {value_text:>10}{remark}"


def _bound_text(bound: float | None) -> str:
    return "any" if bound is None else f"{bound:.4g}"


# --- the command line -----------------------------------------------------------------------------


def _parse(arguments: Sequence[str], prog_name: str) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog=prog_name, description=description)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="these checks; or all whose names begin so",
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        help="for all checks; default: 124m, and 1.3b where it says so",
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="for every check, instead of its own",
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="for all of them: what does not fit is named",
    )
    parser.add_argument(
        "--out",
        default=OUT,
        metavar="FILE",
        help=f"for all that is found, JSON lines; default: {OUT}",
    )
    options = parser.parse_args(arguments)
    for name in ("limit", "budget"):
        seconds = getattr(options, name)
        if seconds is not None and not seconds > 0:
            parser.error(f"--{name} is {seconds:g}: write a number of seconds above 0")
    names = [*(check.name for check in CHECKS), ROW_PREFIX]
    for word in options.only or ():
        if not any(name.startswith(word) for name in names):
            parser.error(f"no check is called {word!r}: write {', '.join(names)}")
    return options


def chosen(checks: Iterable[Check], only: Sequence[str] | None) -> list[Check]:
    """The checks that --only names.

    Args:
        checks: All checks.
        only: Names of checks, or beginnings of names that no check has; None for all checks.
    """
    checks = list(checks)
    if only is None:
        return checks
    names = {check.name for check in checks}.intersection(only)
    beginnings = tuple(word for word in only if word not in names)
    return [check for check in checks if check.name in names or check.name.startswith(beginnings)]


# --- running checks -------------------------------------------------------------------------------


def run_all(
    checks: Iterable[Check], *, gpus: int, model: str | None, session: Session
) -> Iterator[Line]:
    """Run checks one after another.

    Args:
        checks: The checks.
        gpus: How many GPUs there are.
        model: The model of all checks; None for the model of each.
        session: What they have in common.

    Yields:
        The result of each check, as soon as it is there.
    """
    for check in checks:
        reason = _reason_to_leave_out(
            check, gpus=gpus, model=model, seconds_left=session.seconds_left
        )
        if reason:
            yield make_line(check.name, None, error=reason)
        else:
            yield run(check, "cuda" if gpus else "cpu", model or check.model, session)


def _reason_to_leave_out(check: Check, *, gpus: int, model: str | None, seconds_left: float) -> str:
    """Why a check does not run; "" if it does."""
    if check.needs == "gpu" and not gpus:
        return "needs a GPU"
    if check.needs == "several" and gpus == 1:
        return "needs two GPUs"
    if check.has_own_size and model:
        return "has a size of its own: leave --model out"
    if seconds_left < check.seconds:
        left = max(0.0, seconds_left)
        return f"takes {check.seconds:g} s, and {left:.0f} s are left of --budget"
    return ""


def run(check: Check, device_type: str, model: str, session: Session) -> Line:
    """Run a check in a process of its own, which ends at its limit and with this program.

    All that the process has started ends with it.
    """
    limit = min(session.limit or check.limit, max(1.0, session.seconds_left))
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir=session.folder, ignore_cleanup_errors=True)
        )
        results = Path(folder, "measured")
        output = Path(folder, "said")
        reading_end, writing_end = os.pipe()
        # The kernel closes the writing end too when this process is killed.
        stack.callback(os.close, reading_end)
        stack.callback(os.close, writing_end)
        arguments = [
            check.function,
            json.dumps(check.arguments),
            device_type,
            model,
            str(results),
            str(limit),
            str(reading_end),
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.benchmarks.gpu_first.check", *arguments],
            cwd=ROOT,
            env=_environment(check, folder, session),
            stdout=stack.enter_context(output.open("w")),
            stderr=subprocess.STDOUT,
            pass_fds=[reading_end],
            start_new_session=True,
        )
        problem = ""
        try:
            code = process.wait(limit)
            if code != 0:
                problem = f"its process ended with {_exit_text(code)}"
        except subprocess.TimeoutExpired:
            problem = f"it was not done after {limit:.0f} s and was killed"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # kills what it has started too
            process.wait()
        last_output = output.read_text(errors="replace")[-MAX_MESSAGE:] if problem else ""
        if last_output:
            problem = f"{problem}; it said last: {last_output.strip()}"
        line = judge(check.name, results, problem)
        line["seconds"] = round(time.monotonic() - start, 1)
        return line


def _environment(check: Check, folder: str, session: Session) -> dict[str, str]:
    """The environment of a check: a temporary folder of its own, and caches that checks share."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "TMPDIR": folder,
    }
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    for name, cache_folder in caches.items():
        environment[name] = os.environ.get(name) or str(session.folder / cache_folder)
    return environment | check.env


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def judge(name: str, results: Path, problem: str = "") -> Line:
    """The line of a check that has ended.

    Args:
        name: The check.
        results: The file with what it expected and found.
        problem: How its process ended badly; "" if it ended well.
    """
    predicted: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    end: dict[str, Any] = {}
    texts = results.read_text().splitlines() if results.exists() else []
    for text in texts:
        with contextlib.suppress(ValueError):  # the process was killed while it wrote a line
            entry = json.loads(text)
            predicted |= entry.pop("predicted", {})
            measured |= entry.pop("measured", {})
            end |= entry
    ok: bool | None
    missing_package = None
    if problem:
        ok = False
        error = problem
    elif end.get("lacks"):
        ok = None
        missing_package = end["lacks"]
        error = f"needs {missing_package}: pip install it"
    elif "left_out" in end:
        ok = None
        error = end["left_out"]
    elif "error" in end:
        ok = False
        error = f"{end['error']}\n{end['trace']}"
    else:
        sentences = misses(predicted, measured)
        ok = not sentences
        error = "; ".join(sentences)
    return make_line(
        name, ok, predicted=predicted, measured=measured, error=error, lacks=missing_package
    )


def make_line(
    name: str,
    ok: bool | None,
    *,
    predicted: dict[str, Any] | None = None,
    measured: dict[str, Any] | None = None,
    error: str = "",
    lacks: str | None = None,
) -> Line:
    """The result of a check; README.md describes the fields."""
    return {
        "name": name,
        "ok": ok,
        "seconds": 0.0,
        "predicted": predicted or {},
        "measured": measured or {},
        "error": error or None,
        "lacks": lacks,
    }
