"""The first 30 minutes on a GPU: a list of checks, each in a process of its own with a time limit, a JSON line each.

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


def main(arguments: Sequence[str], prog_name: str = "gpu first") -> None:
    """Prints a line per check and one that sums up. Ends with 1 if a check failed, a prediction did not hold, or a
    package was not there."""
    options = _options(arguments, prog_name)
    begun = time.monotonic()
    machine = run(MACHINE, "cuda", "tiny", options.limit)  # it says itself how many GPUs there are
    gpus, names = machine["found"].get("gpus", 0), machine["found"].get("rows", ())
    if not gpus and options.model is None:
        sys.exit("there is no GPU here: on a CPU write --model tiny")
    checks = chosen([*CHECKS, *map(row_check, names)], options.only)
    lines = []
    for line in itertools.chain([machine], run_all(checks, gpus, options.model, options.limit)):
        print(json.dumps(_plain(line)), flush=True)
        lines.append(line)
    by = {ok: [line["name"] for line in lines if line["ok"] is ok] for ok in (True, False, None)}
    lacks = sorted({line["lacks"] for line in lines if line["lacks"]})
    right = not by[False] and not lacks
    summary = {"name": "summary", "ok": right, "passed": by[True], "failed": by[False], "left_out": by[None]}
    print(json.dumps({**summary, "lacks": lacks, "seconds": round(time.monotonic() - begun, 1)}), flush=True)
    sys.exit(0 if right else 1)


def run_all(checks: Iterable[Check], gpus: int, model: str | None, limit: float | None) -> Iterator[dict[str, Any]]:
    """What to print of each, one after another. model, limit: for all of them; None: what each has."""
    for check in checks:
        if reason := left_out(check, gpus, model):
            yield _line(check.name, None, error=reason)
        else:
            yield run(check, "cuda" if gpus else "cpu", model or check.model, limit)


def _plain(value: Any) -> Any:
    """Without inf and nan, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _options(arguments: Sequence[str], prog_name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog_name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks; a name's beginning will do")
    parser.add_argument("--model", choices=MODELS, help="for all checks; default: 124m, and 1.3b where it says so")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="for every check, instead of its own")
    options = parser.parse_args(arguments)
    if options.limit is not None and options.limit <= 0:
        parser.error(f"--limit is {options.limit:g}: write a number of seconds above 0")
    known = [*(check.name for check in CHECKS), ROW]
    if wrong := [word for word in options.only or () if not any(name.startswith(word) for name in known)]:
        parser.error(f"no check is called {wrong[0]!r}: write {', '.join(known)}")
    return options


def chosen(checks: Iterable[Check], only: Sequence[str] | None) -> list[Check]:
    """only: beginnings of their names."""
    return [check for check in checks if only is None or check.name.startswith(tuple(only))]


def left_out(check: Check, gpus: int, model: str | None) -> str:
    """Why a check is not run; "" if it is."""
    if check.needs == "gpu" and not gpus:
        return "needs a GPU"
    if check.needs == "several" and gpus == 1:
        return "needs two GPUs"
    return "has a size of its own: leave --model out" if check.has_own_size and model else ""


def run(check: Check, device: str, model: str, limit: float | None = None) -> dict[str, Any]:
    """The check in a process of its own, all of which is ended at its limit: what to print of it."""
    limit, begun = limit or check.limit, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trireme-gpu-", ignore_cleanup_errors=True) as folder:
        path, said = Path(folder, "found"), Path(folder, "said")
        about = [check.function, json.dumps(check.arguments), device, model, str(path), str(limit)]
        words = ["-m", "experiments.benchmarks.gpu_first.check", *about]
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "TMPDIR": folder, **check.env}
        with said.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True
            )
            ended = ""
            try:
                code = process.wait(limit)
                ended = "" if code == 0 else f"its process ended with {_code(code)}"
            except subprocess.TimeoutExpired:
                ended = f"it was not done after {limit:g} s and was killed"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
                process.wait()
        last = said.read_text(errors="replace")[-SAID:] if ended else ""
        return _judged(check.name, path, ended, last) | {"seconds": round(time.monotonic() - begun, 1)}


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
