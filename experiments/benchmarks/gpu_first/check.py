"""One check: what it is, what it is given, and the process that runs it.

`python -m experiments.benchmarks.gpu_first.check FUNCTION ARGUMENTS DEVICE MODEL FILE LIMIT PIPE` calls a check's
function on DEVICE (cuda or cpu), with the name of a model of experiments/benchmarks/gpt.py, and writes what it expects
and finds to FILE, a JSON object a line, each as soon as it is known: of a check that hangs or crashes stays what it had
found. PIPE is the number of an inherited file descriptor: once nobody has its other end open, because the program was
killed, the check and all that it started are killed, too.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.environment import set_defaults

if TYPE_CHECKING:
    import torch

    from app.planner.device import Device


OURS = ("app", "cluster", "experiments", "strategies", "tests")
SAID = 3000
"""Characters that are kept of an error, and of the last words of a process that was killed or crashed."""


@dataclass(frozen=True)
class Check:
    """One question to the machine. function: its whole name; it is called with a `Here` and `arguments`."""

    name: str
    function: str
    seconds: float
    """What it takes on one H100: it is not begun where less is left of a budget."""
    limit: float
    """Seconds after which it is killed."""
    arguments: tuple[Any, ...] = ()
    needs: str = ""
    """"gpu", or "several": two GPUs, or two processes where there is no GPU; "": runs on a CPU too."""
    model: str = "124m"
    has_own_size: bool = False
    """Not changed by --model, and left out with it."""
    env: dict[str, str] = field(default_factory=dict)


class NotHere(Exception):
    """The check cannot be done on this machine; why, a few words."""


@dataclass
class Here:
    """What a check is given: where it runs, and where it says what it expects and finds."""

    kind: str
    """cuda or cpu."""
    model: str
    file: Any

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")

    def expect(self, what: str, low: float | None, high: float | None, why: str) -> None:
        """A prediction, said before anything is measured. None: no bound. why: where it comes from."""
        self._write({"predicted": {what: {"low": low, "high": high, "why": why}}})

    def expect_speed(self, what: str, low: float | None, high: float | None, why: str) -> None:
        """As `expect`; a CPU may be as slow or fast as it likes."""
        self.expect(what, *((low, high, why) if self.on_gpu else (0.0, None, "a CPU's speed is not predicted")))

    def found(self, **values: Any) -> None:
        self._write({"found": values})

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        import torch

        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def datasheet(self) -> Device:
        """The device as the planner knows it: datasheet's figures (cluster/hardware.yaml) and efficiencies."""
        from app.planner.machine import machine_of_run

        return machine_of_run(1).device

    def seconds_of(self, function: Callable[[], object]) -> float:
        """Seconds of one call: the fastest of a few blocks."""
        from app.planner.calibrate import seconds_of

        return seconds_of(function, self.device)


def misses(predicted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Predictions that do not hold, a sentence each. nan is in no range."""
    wrong = []
    for what, bound in predicted.items():
        low, high, value = bound["low"], bound["high"], found.get(what)
        if value is None:
            wrong.append(f"{what} was not found")
        elif not ((low is None or value >= low) and (high is None or value <= high)):
            wrong.append(f"{what} is {value:.6g}, outside of {low} to {high}")
    return wrong


def end_with_the_program(pipe: int) -> None:
    """Forks a process that waits for the program's end and then kills this process group. A process of its own, as one
    that hangs in a call of the driver runs no other thread; the program ends it together with the check."""
    if os.fork() == 0:
        os.read(pipe, 1)
        os.killpg(0, signal.SIGKILL)


def main(function: str, arguments: str, device: str, model: str, path: str, limit: str, pipe: str) -> None:
    """Ends well also where the check raises: that is in the file, too."""
    end_with_the_program(int(pipe))
    set_defaults()  # before CUDA starts, as in a run's workers
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.8 * float(limit))  # says where it hangs, just before it is killed
    module, _, name = function.rpartition(".")
    with Path(path).open("w") as file:
        try:
            getattr(importlib.import_module(module), name)(Here(device, model, file), *json.loads(arguments))
            ended = {}
        except NotHere as reason:
            ended = {"left_out": str(reason)}
        except ModuleNotFoundError as error:
            ended = {"lacks": str(error.name)}
            if (error.name or "").partition(".")[0] in OURS:
                raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[:SAID]
            ended = {"error": said, "trace": traceback.format_exc()[-SAID:]}
        file.write(json.dumps(ended) + "\n")


if __name__ == "__main__":
    # Checks import this module under its own name: the exceptions that they raise are that one's, not __main__'s.
    from experiments.benchmarks.gpu_first import check

    check.main(*sys.argv[1:])
