"""One check: what it is, what it gets, and the process that runs it.

`python -m experiments.benchmarks.gpu_first.check FUNCTION ARGUMENTS DEVICE MODEL FILE LIMIT PIPE`
calls the function of a check on DEVICE (cuda or cpu), with the name of a model of
experiments/benchmarks/gpt.py. It writes what the check expects and finds to FILE, a JSON object per
line, each as soon as it is known, so that a check that hangs or crashes leaves what it had found.
PIPE is the number of an inherited file descriptor. When nobody has its other end open, because the
program was killed, the check and all that it started are killed too.
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
from typing import TYPE_CHECKING, Any, TextIO

from cluster.environment import set_defaults

if TYPE_CHECKING:
    import torch

    from app.planner.device import Device


OUR_PACKAGES = ("app", "cluster", "experiments", "strategies", "tests")
MAX_MESSAGE = 3000
"""Characters that are kept of an error, and of the last output of a process that was ended."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question to the machine.

    Attributes:
        name: Its name on the command line.
        function: The full name of its function, which is called with a `CheckContext` and
            `arguments`.
        seconds: What it takes on an H100. It does not start if less is left of a budget.
        limit: Seconds after which it is killed.
        arguments: Arguments of the function.
        needs: "gpu"; or "several" for two GPUs, or for two processes if there is no GPU; "" if it
            runs on a CPU too.
        model: The model that it uses.
        has_own_size: Whether --model does not change its model, and leaves it out.
        env: Environment variables of its process.
    """

    name: str
    function: str
    seconds: float
    limit: float
    arguments: tuple[Any, ...] = ()
    needs: str = ""
    model: str = "124m"
    has_own_size: bool = False
    env: dict[str, str] = field(default_factory=dict)


class CannotRun(Exception):
    """A check cannot run on this machine; the message is a few words that say why."""


@dataclass
class CheckContext:
    """What a check gets: where it runs, and where it writes what it expects and finds.

    Attributes:
        device_type: cuda or cpu.
        model: The name of a model.
        file: Gets a JSON object per line.
    """

    device_type: str
    model: str
    file: TextIO

    @property
    def on_gpu(self) -> bool:
        return self.device_type == "cuda"

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")

    def expect(self, figure: str, low: float | None, high: float | None, *, why: str) -> None:
        """Write a prediction, before anything is measured.

        Args:
            figure: The name of what is measured.
            low: The lower bound; None for no bound.
            high: The upper bound; None for no bound.
            why: Where the prediction comes from.
        """
        self._write({"predicted": {figure: {"low": low, "high": high, "why": why}}})

    def expect_speed(self, figure: str, low: float | None, high: float | None, *, why: str) -> None:
        """Write a prediction for a GPU. A CPU may be as slow or fast as it is."""
        if self.on_gpu:
            self.expect(figure, low, high, why=why)
        else:
            self.expect(figure, 0.0, None, why="a CPU's speed is not predicted")

    def measured(self, **values: Any) -> None:
        """Write what was measured."""
        self._write({"measured": values})

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        import torch

        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def datasheet(self) -> Device:
        """The device as the planner knows it: the figures of its datasheet, and efficiencies.

        They are in cluster/hardware.yaml.
        """
        from app.planner.machine import machine_of_run

        return machine_of_run(1).device

    def seconds_of(self, function: Callable[[], object]) -> float:
        """Seconds of one call, of the fastest of a few blocks of calls."""
        from app.planner.calibrate import seconds_of

        return seconds_of(function, self.device)


def misses(predicted: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """A sentence for each prediction that does not hold. nan is within no bounds.

    Args:
        predicted: The bounds of each figure.
        measured: The value of each figure.
    """
    sentences = []
    for figure, bounds in predicted.items():
        low = bounds["low"]
        high = bounds["high"]
        value = measured.get(figure)
        if value is None:
            sentences.append(f"{figure} was not found")
            continue
        is_high_enough = low is None or value >= low
        is_low_enough = high is None or value <= high
        if not (is_high_enough and is_low_enough):
            sentences.append(f"{figure} is {value:.6g}, outside of {low} to {high}")
    return sentences


# --- the process of a check -----------------------------------------------------------------------


def end_with_the_program(pipe: int) -> None:
    """Fork a process that waits for the end of the program and then kills this process group.

    It is a process because a check that hangs in a call of the driver runs no other thread. The
    program ends it together with the check.

    Args:
        pipe: A file descriptor whose other end the program has open.
    """
    if os.fork() == 0:
        os.read(pipe, 1)
        os.killpg(0, signal.SIGKILL)


def main(
    function: str, arguments: str, device_type: str, model: str, path: str, limit: str, pipe: str
) -> None:
    """Run a check.

    The process ends well even if the check raises, since the file has the error.
    """
    end_with_the_program(int(pipe))
    set_defaults()  # before CUDA starts, as in a run's workers
    faulthandler.enable()
    # Prints where the check hangs, shortly before it is killed.
    faulthandler.dump_traceback_later(0.8 * float(limit))
    module, _, name = function.rpartition(".")
    with Path(path).open("w") as file:
        context = CheckContext(device_type, model, file)
        try:
            check = getattr(importlib.import_module(module), name)
            check(context, *json.loads(arguments))
            end: dict[str, str] = {}
        except CannotRun as reason:
            end = {"left_out": str(reason)}
        except ModuleNotFoundError as error:
            missing = error.name or ""
            end = {"lacks": str(error.name)}
            if missing.partition(".")[0] in OUR_PACKAGES:
                raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
            end = {"error": message, "trace": traceback.format_exc()[-MAX_MESSAGE:]}
        file.write(json.dumps(end) + "\n")


if __name__ == "__main__":
    # Checks import this module by its own name, and raise the exceptions of that module.
    from experiments.benchmarks.gpu_first import check

    check.main(*sys.argv[1:])
