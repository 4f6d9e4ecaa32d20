"""The first minutes on a GPU: a list of checks, each in a process of its own with a time limit.

Needs PyTorch, and for checks that train, NumPy, PyYAML and psutil; neither Ray nor MLflow, OmegaConf or Click. This
file imports nothing but Python's own library, so that whatever breaks, breaks in a check's process.
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
from pathlib import Path
from typing import Any

from experiments.benchmarks.gpu_first.check import SAID, Check, misses
from experiments.benchmarks.gpu_first.table import CHECKS, MACHINE, ROW, row_check

ROOT = Path(__file__).parents[3]
MODELS = ("124m", "1.3b", "tiny")
OUT = "gpu_first.jsonl"
MARKS = {True: "ok", False: "FAILED", None: "left out"}


def main(arguments: Sequence[str], prog_name: str = "gpu first") -> None:
    """Prints a line per check, then a table of what was predicted and found. Ends with 1 if a check failed, a
    prediction did not hold, or a package was not there."""
    options = _options(arguments, prog_name)
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running check is ended, too
    with tempfile.TemporaryDirectory(prefix="trireme-gpu-", ignore_cleanup_errors=True) as folder:
        shared = Shared(Path(folder), None if options.budget is None else begun + options.budget, options.limit)
        machine = run(MACHINE, "cuda", "tiny", shared)  # it says itself how many GPUs there are
        if "gpus" not in machine["found"]:
            sys.exit(f"what GPUs there are could not be found{_remark(machine)}")
        gpus, names = machine["found"]["gpus"], machine["found"].get("rows", ())
        if not gpus and options.model is None:
            sys.exit("there is no GPU here: on a CPU write --model tiny")
        checks = chosen([*CHECKS, *map(row_check, names)], options.only)
        lines = []
        with open(options.out, "w") as file:
            for line in itertools.chain([machine], run_all(checks, gpus, options.model, shared)):
                file.write(json.dumps(_plain(line)) + "\n")
                file.flush()
                print(f"{line['seconds']:7.1f} s  {MARKS[line['ok']]:8}  {line['name']}{_remark(line)}", flush=True)
                lines.append(line)
            by = {ok: [line["name"] for line in lines if line["ok"] is ok] for ok in (True, False, None)}
            lacks = sorted({line["lacks"] for line in lines if line["lacks"]})
            right = not by[False] and not lacks
            summary = {"name": "summary", "ok": right, "passed": by[True], "failed": by[False], "left_out": by[None]}
            summary |= {"lacks": lacks, "seconds": round(time.monotonic() - begun, 1)}
            file.write(json.dumps(summary) + "\n")
    print("", *_table(lines), "", f"All that was found is in {options.out}.", sep="\n", flush=True)
    sys.exit(0 if right else 1)


def _remark(line: dict[str, Any]) -> str:
    """The first line of why a check is not ok, and the last, which of a traceback names the error."""
    error = (line["error"] or "").strip().splitlines()
    return f": {' … '.join(dict.fromkeys((error[0], error[-1])))}"[:400] if error else ""


def _table(lines: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What was predicted and what was found, a line each."""
    yield f"{'check':28} {'figure':26} {'predicted':>23}  {'found':>10}"
    for line in lines:
        for what, bound in line["predicted"].items():
            value = line["found"].get(what)
            shown = " to ".join("any" if bound[end] is None else f"{bound[end]:.4g}" for end in ("low", "high"))
            known = "-" if value is None else f"{value:.4g}"
            wrong = "" if value is None or not misses({what: bound}, line["found"]) else "  outside"
            yield f"{line['name']:28} {what:26} {shown:>23}  {known:>10}{wrong}"


class Shared:
    """What all checks of a program have in common."""

    def __init__(self, folder: Path, end: float | None = None, limit: float | None = None) -> None:
        """folder: for what is compiled, once for all of them. end: of the budget, on time.monotonic. limit: seconds of
        every check, instead of its own."""
        self.folder, self.end, self.limit = folder, end, limit

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return math.inf if self.end is None else self.end - time.monotonic()


def run_all(checks: Iterable[Check], gpus: int, model: str | None, shared: Shared) -> Iterator[dict[str, Any]]:
    """What is to be said of each, one after another. model: for all of them; None: what each has."""
    for check in checks:
        if reason := left_out(check, gpus, model, shared.left):
            yield _line(check.name, None, error=reason)
        else:
            yield run(check, "cuda" if gpus else "cpu", model or check.model, shared)


def _plain(value: Any) -> Any:
    """Without inf and nan, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _options(arguments: Sequence[str], prog_name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog_name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks; or all whose names begin so")
    parser.add_argument("--model", choices=MODELS, help="for all checks; default: 124m, and 1.3b where it says so")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="for every check, instead of its own")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all of them: what does not fit is named")
    parser.add_argument("--out", default=OUT, metavar="FILE", help=f"for all that is found, JSON lines; default: {OUT}")
    options = parser.parse_args(arguments)
    for name in ("limit", "budget"):
        seconds = getattr(options, name)
        if seconds is not None and not seconds > 0:
            parser.error(f"--{name} is {seconds:g}: write a number of seconds above 0")
    known = [*(check.name for check in CHECKS), ROW]
    if wrong := [word for word in options.only or () if not any(name.startswith(word) for name in known)]:
        parser.error(f"no check is called {wrong[0]!r}: write {', '.join(known)}")
    return options


def chosen(checks: Iterable[Check], only: Sequence[str] | None) -> list[Check]:
    """only: names, or beginnings of names where no check is called so."""
    checks = list(checks)
    if only is None:
        return checks
    names = {check.name for check in checks}.intersection(only)
    beginnings = tuple(word for word in only if word not in names)
    return [check for check in checks if check.name in names or check.name.startswith(beginnings)]


def left_out(check: Check, gpus: int, model: str | None, left: float = math.inf) -> str:
    """Why a check is not run; "" if it is. left: seconds of the budget."""
    if check.needs == "gpu" and not gpus:
        return "needs a GPU"
    if check.needs == "several" and gpus == 1:
        return "needs two GPUs"
    if check.has_own_size and model:
        return "has a size of its own: leave --model out"
    return f"takes {check.seconds:g} s, and {max(0.0, left):.0f} s are left of --budget" if left < check.seconds else ""


def run(check: Check, device: str, model: str, shared: Shared) -> dict[str, Any]:
    """The check in a process of its own, all of which is ended at its limit and with this program."""
    limit, begun = min(shared.limit or check.limit, max(1.0, shared.left)), time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=shared.folder, ignore_cleanup_errors=True))
        path, said = Path(folder, "found"), Path(folder, "said")
        reading, writing = os.pipe()
        for end in (reading, writing):  # the kernel closes the other end, too, when this process is killed
            stack.callback(os.close, end)
        about = [check.function, json.dumps(check.arguments), device, model, str(path), str(limit), str(reading)]
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.benchmarks.gpu_first.check", *about],
            cwd=ROOT,
            env=_environment(check, folder, shared),
            stdout=stack.enter_context(said.open("w")),
            stderr=subprocess.STDOUT,
            pass_fds=[reading],
            start_new_session=True,
        )
        ended = ""
        try:
            code = process.wait(limit)
            ended = "" if code == 0 else f"its process ended with {_code(code)}"
        except subprocess.TimeoutExpired:
            ended = f"it was not done after {limit:.0f} s and was killed"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
            process.wait()
        last = said.read_text(errors="replace")[-SAID:] if ended else ""
        return _judged(check.name, path, ended, last) | {"seconds": round(time.monotonic() - begun, 1)}


def _environment(check: Check, folder: str, shared: Shared) -> dict[str, str]:
    """Its own temporary folder; one for all that torch.compile and Triton compile, which checks have in common."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    compiled = {name: os.environ.get(name) or str(shared.folder / place) for name, place in caches.items()}
    python = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PYTHONPATH": python, "TMPDIR": folder, **compiled, **check.env}


def _code(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def _judged(name: str, path: Path, ended: str, last: str) -> dict[str, Any]:
    predicted: dict[str, Any] = {}
    found: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # it was killed while it wrote
            line = json.loads(text)
            predicted |= line.pop("predicted", {})
            found |= line.pop("found", {})
            other |= line
    if ended:
        return _line(name, False, predicted, found, f"{ended}; it said last: {last.strip()}" if last else ended)
    if lacks := other.get("lacks"):
        return _line(name, None, predicted, found, f"needs {lacks}: pip install it", lacks)
    if "left_out" in other:
        return _line(name, None, predicted, found, other["left_out"])
    if "error" in other:
        return _line(name, False, predicted, found, f"{other['error']}\n{other['trace']}")
    wrong = misses(predicted, found)
    return _line(name, not wrong, predicted, found, "; ".join(wrong))


def _line(
    name: str,
    ok: bool | None,
    predicted: dict[str, Any] | None = None,
    found: Any = None,
    error: str = "",
    lacks: str | None = None,
) -> dict[str, Any]:
    made = {"name": name, "ok": ok, "seconds": 0.0, "predicted": predicted or {}, "found": found or {}}
    return made | {"error": error or None, "lacks": lacks}
