"""One run, disturbed several times: each time the same command again where it has ended, and in the end the truth."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from experiments.benchmarks.chaos import record
from experiments.benchmarks.chaos.boundaries import operations
from experiments.benchmarks.chaos.kills import BATCH, EVERY, LAYOUTS, STEPS, WORKERS, Kill
from experiments.benchmarks.chaos.session import Session, end_tree, until, writer_of

HANG_SECONDS = 60.0
SAMPLES = 250
COMMON = ["task=experiments.benchmarks.chaos.task:Recorded", f"train.global_batch_size={BATCH}", f"train.steps={STEPS}"]
COMMON += [f"checkpoint.every_steps={EVERY}", "train.log_every=1", "tracking.log_model=false", f"workers={WORKERS}"]
COMMON += ["tracking.system_metrics_every=0", "fault.max_restarts=100", "fault.hang_seconds=2", "task_args.width=16"]
COMMON += ["tracking.flush_timeout=60", "task_args.step_seconds=0.01"]
OPERATION_SECONDS = 20.0
NOTHING: dict[str, Any] = {"committed": 0, "recovered_seconds": None, "resumed_from": None}
"""What is known of a kill before it is done."""
REFUSED = 2  # the command line's exit code for what cannot be started


class Hung(Exception):
    """The run did not get on within a minute."""


@dataclass
class Truth:
    """What a run that nobody disturbs leaves."""

    weights: dict[str, torch.Tensor]
    curve: list[tuple[int, float]]


class Trial:
    """name: of the run. layout: of `LAYOUTS`. tell: hears of each kill once training goes on."""

    def __init__(
        self,
        session: Session,
        name: str,
        layout: str,
        *more: str,
        tell: Callable[[dict[str, Any]], None] = lambda found: None,
    ) -> None:
        self.session, self.name, self.layout, self.tell = session, name, layout, tell
        self.folder = session.folder / "trials" / name  # what the task writes
        self.run = session.folder / "runs" / name  # what Trireme writes
        self.log = self.folder / "driver.log"
        self.folder.mkdir(parents=True)
        own = [f"run.name={name}", f"run.storage={session.folder}/runs", f"task_args.folder={self.folder}"]
        self.command = [*COMMON, *LAYOUTS[layout], *own, *more]
        self.driver: Any = None
        self.commands = 0

    # --- undisturbed --------------------------------------------------------------------------------------------

    def calm(self) -> tuple[Truth, list[tuple[int, int, str]]]:
        """Trains to the end; what it leaves, and the file operations of a save."""
        (self.folder / "list").touch()
        self.start()
        try:
            self._finish()
        finally:
            self.give_up()
        if problems := self.judge(None):
            raise RuntimeError(f"undisturbed, {self.layout} goes wrong: {problems}; see {self.log}")
        _, points = self.session.curve(self.name)
        return Truth(self._weights(), points), operations(self.folder)

    # --- disturbed ----------------------------------------------------------------------------------------------

    def disturb(self, kills: list[Kill], truth: Truth) -> list[dict[str, Any]]:
        """A record for each kill that was done before the run came to its end; of one that the run did not survive,
        too."""
        (self.folder / "slow").touch()
        done: list[dict[str, Any]] = []
        problems: list[str] = []
        self.start()
        try:
            for kill in kills:
                if not self._once(kill, done):
                    break
            (self.folder / "slow").unlink()
            self._finish()
            problems = self.judge(truth)
            problems += [
                f"went on before step {row['forgot']:,}, which was committed" for row in done if "forgot" in row
            ]
        except Hung as error:
            problems = [str(error)]
            done = done or [kills[0].as_dict() | NOTHING]  # it did not even begin
        finally:
            self.give_up()
            self.session.mend()
        for found in done:
            found |= {"run": self.name, "layout": self.layout, "problems": problems}
        return done

    def start(self) -> None:
        self.commands += 1
        self.driver = self.session.train(self.command, self.log)

    def _once(self, kill: Kill, done: list[dict[str, Any]]) -> bool:
        """One kill and what came of it, added to `done`; False if the run had ended before it could be done."""
        struck = self._strike_once(kill)
        if struck is None:
            return False
        found = kill.as_dict() | NOTHING | struck
        before = found["committed"]
        done.append(found)
        resumed = self._gets_on(found["time"], again=kill.ends_workers)
        found["recovered_seconds"] = round(resumed - found["time"], 2) if resumed else None
        starts = [s for s in record.read(self.folder) if s.began > found["time"] and s.lines]
        found["resumed_from"] = starts[0].first_step(BATCH) - 1 if starts else None
        if found["resumed_from"] is not None and found["resumed_from"] < before:
            found["forgot"] = before
        self.tell(found)
        self.session.mend()
        return True

    def _strike_once(self, kill: Kill) -> dict[str, Any] | None:
        """Kills as soon as there is what is to be killed; None if the run had come to its end."""
        deadline = time.time() + HANG_SECONDS
        while time.time() < deadline:
            if self.driver.exitcode == 0 or (not kill.starting and not self._gets_on(time.time())):
                return None
            time.sleep(kill.delay)
            before = self._committed()
            if struck := self._strike(kill):
                return {"committed": before} | struck
            time.sleep(0.05)
        raise Hung(f"there was nothing for {kill.words()} within {HANG_SECONDS:.0f} s")

    def _strike(self, kill: Kill) -> dict[str, Any] | None:
        if kill.victim == "boundary":
            return self._at_operation(kill)
        if kill.victim == "server":
            self.session.kill_server()
            return {"time": time.time()}
        pid = self._victim(kill)
        if pid is None:
            return None
        at = time.time()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, kill.signal)
            return {"time": at, "pid": pid}
        return None

    def _victim(self, kill: Kill) -> int | None:
        """The process to be killed; None: the run has ended."""
        if kill.victim == "driver":
            return self.driver.pid if self.driver.exitcode is None else None
        if kill.victim == "writer":
            found = writer_of(self.run)
            return found.pid if found else None
        worker = self.worker(kill.rank)
        if worker is None or kill.victim == "worker":
            return worker
        raylet = self.session.raylet_of(worker)
        return raylet.pid if raylet else None

    def worker(self, rank: int) -> int | None:
        """The newest process that had this rank, if it lives."""
        for path in sorted(self.folder.glob(f"seen/*-{rank}-*.jsonl"), reverse=True):
            pid = int(path.stem.split("-")[2])
            return pid if psutil.pid_exists(pid) else None
        return None

    def _at_operation(self, kill: Kill) -> dict[str, Any] | None:
        struck = self.folder / "struck.json"
        struck.unlink(missing_ok=True)
        order = {"boundary": kill.boundary, "signal": int(kill.signal), "torn": kill.torn}
        part = self.folder / "order.part"
        part.write_text(json.dumps(order))
        part.rename(self.folder / f"order-{kill.rank}.json")
        try:
            until(lambda: struck.exists() or self.driver.exitcode is not None, OPERATION_SECONDS)
        except TimeoutError:
            raise Hung(f"no save came to {kill.words()} within {OPERATION_SECONDS:.0f} s") from None
        (self.folder / f"order-{kill.rank}.json").unlink(missing_ok=True)
        return json.loads(struck.read_text()) if struck.exists() else None

    def _gets_on(self, since: float, *, again: bool = False) -> float | None:
        """When the loss of a step was computed after `since` (Unix time); starts the command again where it has ended
        without finishing. again: by workers that have begun since then. None: the run has come to its end."""
        deadline = time.time() + HANG_SECONDS
        while time.time() < deadline:
            if self.driver.exitcode is not None:
                if self.driver.exitcode == 0:
                    return None
                self._again()
            if found := self._step_after(since, again):
                return found
            time.sleep(0.03)
        raise Hung(f"no step within {HANG_SECONDS:.0f} s; the driver said last: {self._last_words()}")

    def _step_after(self, since: float, again: bool) -> float | None:
        """The time of a fifth line that a process wrote after `since`: the step of the first one is finished then."""
        newest = sorted(self.folder.glob("seen/*.jsonl"), reverse=True)[: 2 * WORKERS]
        for path in newest:
            if again and int(path.stem.split("-")[0]) / 1e9 < since:
                continue
            times = [json.loads(line)[0] for line in path.read_bytes().split(b"\n")[-60:-1]]
            after = [when for when in times if when > since]
            if len(after) > 4:  # a pipeline's step is four micro-batches
                return float(after[4])
        return None

    def _again(self) -> None:
        """The same command again, after it ended without finishing; where it was refused (a node is being started
        anew), not at once."""
        if self.driver.exitcode == REFUSED:
            time.sleep(1.0)
        with self.log.open("a") as log:
            log.write(f"--- ended with {self.driver.exitcode}; the same command again\n")
        self.start()

    def _finish(self) -> None:
        """Until the command has finished, started again where it ended otherwise."""
        tries = 0
        while True:
            self.session.mend()
            self.driver.join(2 * HANG_SECONDS)
            if self.driver.exitcode is None:
                raise Hung(f"did not finish within {2 * HANG_SECONDS:.0f} s; it said last: {self._last_words()}")
            if self.driver.exitcode == 0:
                return
            tries += 1
            if tries > 3:
                raise Hung(f"ended four times with {self.driver.exitcode}: {self._last_words()}")
            self._again()

    def give_up(self) -> None:
        """Ends what is left of the run."""
        if self.driver.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.driver.pid, signal.SIGCONT)
            end_tree(self.driver.pid)
            self.driver.join(10)
        for start in record.read(self.folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(start.pid)
                if process.create_time() <= start.began:
                    process.kill()

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text().splitlines() if line.strip("- ")] if self.log.exists() else []
        return lines[-1] if lines else "nothing"

    # --- the truth ----------------------------------------------------------------------------------------------

    def judge(self, truth: Truth | None) -> list[str]:
        """What is wrong with the finished run, a sentence each."""
        starts = record.read(self.folder)
        problems = record.lost_or_repeated(starts, STEPS, BATCH, SAMPLES, 0)
        statuses, points = self.session.curve(self.name)
        if statuses != ["FINISHED"]:
            problems.append(f"MLflow has {len(statuses)} runs of it: {', '.join(statuses)}")
        if len({step for step, _ in points}) != len(points):
            problems.append("a step of the curve is twice in MLflow")
        if "is passed over" in self.log.read_text():
            problems.append("a damaged checkpoint was met")
        if truth is None:
            return problems
        if points != truth.curve:
            problems.append(f"the curve differs from the undisturbed one ({_first_difference(points, truth.curve)})")
        weights = self._weights()
        if weights.keys() != truth.weights.keys() or not all(
            torch.equal(weights[n], truth.weights[n]) for n in weights
        ):
            problems.append("the final weights are not those of the undisturbed run")
        return problems

    def _weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.run / "model" / "weights.pt", weights_only=True)
        return found

    def _committed(self) -> int:
        """The newest committed step."""
        markers = self.run.glob("checkpoints/*/COMMIT.json")
        return max((int(marker.parent.name.split("-")[1]) for marker in markers), default=0)


def _first_difference(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> str:
    here, there = dict(one), dict(other)
    step = min(step for step in here.keys() | there.keys() if here.get(step) != there.get(step))
    return f"{len(one)} points instead of {len(other)}; step {step}: {here.get(step)} instead of {there.get(step)}"
