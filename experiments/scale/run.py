"""`trireme scale`: measures an experiment at several numbers of workers and says what more of them would bring."""

import os
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app import names
from app.config import Config
from app.config.io import flatten, to_dict, with_values
from app.console.terminal import Console
from app.errors import UserError
from app.run.cost import rate_here
from app.run.prepare import Prepared, prepare, read_task
from app.tracking.tracker import Tracker
from app.training.job import Job
from cluster.connect import connect, disconnect
from cluster.pending import check_feasible
from experiments.report.page import write
from experiments.scale import answer, laws
from experiments.study import open_head, own_folder, save_head, tracked


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    workers: tuple[int, ...]
    strategies: tuple[str, ...]
    weak: bool
    repeats: int
    blocks: int
    steps: int  # in each block

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Strategy and number of workers of each point."""
        return [(strategy, n) for strategy in self.strategies for n in sorted(set(self.workers))]

    def check(self, batch: int) -> None:
        """Raises UserError for a plan that no cluster could carry out. batch: the experiment's."""
        if not self.workers or any(n < 1 for n in self.workers):
            raise UserError("--workers needs numbers greater than 0: write for instance --workers 1,2,4")
        if len(set(self.workers)) < 2:
            raise UserError(f"--workers {self.workers[0]} is one point, which shows no scaling: write for instance 1,2")
        odd = [n for n in self.workers if batch % n]
        if odd and not self.weak:
            reason = f"which {odd[0]} workers cannot share evenly: write a multiple of {odd[0]}, or --weak"
            raise UserError(f"train.global_batch_size is {batch}, {reason}")


@dataclass
class Outcome:
    """What became of `trireme scale`; `--json` prints it."""

    status: str
    study: str
    folder: str
    points: list[dict[str, Any]]
    laws: dict[str, Any]
    verdicts: dict[str, str]
    recommended: str
    page: str


def scale(config: Config, plan: Plan, console: Console, *, verbose: bool = False) -> Outcome:
    """Measures what is not measured yet, fits, writes the page.

    Raises:
        UserError, LayoutError, ClusterError: before anything starts.
        RunFailed: a point could not be measured.
        Interrupted: stopped by Ctrl-C; what was measured is kept.
    """
    plan.check(config.train.global_batch_size)
    console.status("reading the data")
    task = read_task(config)
    prepared = {key: _prepared(config, plan, task, *key) for key in plan.keys}
    name = f"{config.run.name}-{'weak' if plan.weak else 'strong'}-scaling"
    about = {k: v for k, v in to_dict(config).items() if k not in ("run", "tracking", "fault", "checkpoint")}
    with own_folder(config, name, "study", console, verbose=verbose) as folder:
        head = {"points": []} | open_head(folder, "study", name, {"experiment": about, "weak": plan.weak})
        with tracked(config, folder, head, "study", console) as tracker:
            tracker.params(flatten(to_dict(config)))
            _measure(config, plan, task, prepared, head, folder, console, tracker)
            _conclude(head, console)
            save_head(folder, "study", head)
            written = write(folder, answer.content(head, folder))
            for strategy, law in head["laws"].items():
                tracker.metrics(0, {f"scale/{strategy}/{name}": value for name, value in law["values"].items()})
            tracker.tags({f"trireme.verdict.{strategy}": text for strategy, text in head["verdicts"].items()})
            tracker.tags({"trireme.recommended": head["recommended"]})
            tracker.artifact(written)
            tracker.artifact(folder / "study.json")
    found = (head["points"], head["laws"], head["verdicts"], head["recommended"])
    return Outcome("finished", name, str(folder), *found, str(written))


def _prepared(config: Config, plan: Plan, task: Any, strategy: str, workers: int) -> Prepared:
    """What a point trains. Raises UserError, LayoutError: it cannot be trained so."""
    batch = config.train.global_batch_size * (workers if plan.weak else 1)
    values: dict[str, Any] = {"workers": str(workers), "strategy": strategy, "train.global_batch_size": batch}
    if workers == 1:
        values |= {"strategy": "single", "parallel": type(config.parallel)()}
    return prepare(with_values(config, values), task, workers, devices_per_node=None)


def _measure(
    config: Config,
    plan: Plan,
    task: Any,
    prepared: Any,
    head: dict[str, Any],
    folder: Path,
    console: Console,
    tracker: Tracker,
) -> None:
    """Measures what is missing, the repeats in alternating order, so that drift cancels."""
    console.status("starting Ray")
    save_head(folder, "study", head)
    cluster = connect(worker_setup=names.worker_setup())
    try:
        most = max(plan.workers)
        each = dict(config.resources_per_worker) or ({"GPU": 1.0} if cluster.gpus >= most else {"CPU": 1.0})
        check_feasible(cluster.shape, most, each)
        head["price"] = rate_here(config, 1, each)
        for number in range(plan.repeats):
            for key in plan.keys if number % 2 == 0 else plan.keys[::-1]:
                if (*key, number) in ((p["strategy"], p["workers"], p["repeat"]) for p in head["points"]):
                    continue
                point = _point(key, number, plan, prepared[key], each, folder, console)
                head["points"].append(point)
                save_head(folder, "study", head)
                known = {name: value for name, value in point.items() if isinstance(value, float)}
                tracker.metrics(number, {f"scale/{key[0]}/{key[1]}/{name}": value for name, value in known.items()})
        head["curves"] = _curves(config, plan, task, on_gpu="GPU" in each)  # while it is known what the cluster has
    finally:
        disconnect()


def _point(
    key: tuple[str, int], number: int, plan: Plan, prepared: Prepared, each: Any, folder: Path, console: Console
) -> dict[str, Any]:
    from experiments.scale import point

    (strategy, workers), config = key, prepared.config
    console.status(f"measuring {strategy} on {workers} workers, {number + 1} of {plan.repeats}")
    steps, batch = (plan.blocks + 2) * plan.steps, config.train.global_batch_size
    job = Job(
        config=config,
        layout=prepared.layout,
        folder=str(folder),
        attempt="",
        run_uid="scale",
        steps=steps,
        cwd=os.getcwd(),
    )
    found = point.measured(point.run(job, workers, each, plan.blocks, plan.steps), config)
    rate = f"{1e3 * found.step:.1f} ms per step, {batch / found.step:,.0f} samples/s"
    console.say(f"{strategy}, {workers} worker{'s' if workers > 1 else ''}, {number + 1}: {rate}")
    for note in found.notes:
        console.say(f"  note: {note}")
    known = {"strategy": strategy, "workers": workers, "repeat": number, "batch": batch}
    return known | asdict(found) | {"layout": str(prepared.layout), "samples": prepared.steps * batch}


def _curves(config: Config, plan: Plan, task: Any, *, on_gpu: bool) -> dict[str, dict[int, float]]:
    """Of strong scaling, what a plan says of each strategy: samples per second by number of workers, those that were
    measured and those that the page asks about. A strategy that cannot be planned has none."""
    if plan.weak:
        return {}
    try:
        curves = {strategy: _curve(config, plan, task, strategy, on_gpu) for strategy in plan.strategies}
    except Exception:  # whatever is wrong with a plan, what was measured is right
        return {}
    return {strategy: curve for strategy, curve in curves.items() if curve}


def _curve(config: Config, plan: Plan, task: Any, strategy: str, on_gpu: bool) -> dict[int, float]:
    from app.planner.advice import predict
    from app.planner.machine import cpus, running
    from app.planner.plan import reader_of

    largest, batch = max(plan.workers), config.train.global_batch_size
    wanted = {*plan.workers, *(factor * largest for factor in answer.AHEAD)}
    if any(batch % n for n in wanted):
        return {}
    machine = running(largest) if on_gpu else cpus(largest)
    reader, curve = reader_of(config, task, machine), dict[int, float]()
    for n in sorted(wanted):
        prepared = _prepared(config, plan, task, strategy, n)
        there = replace(machine, world=n, per_node=min(n, machine.per_node))
        curve[n] = batch / predict(prepared.config, task, prepared.layout, there, reader).step_seconds
    return curve


def _conclude(head: dict[str, Any], console: Console) -> None:
    """Fits, and says what that means."""
    speeds: dict[str, dict[int, list[float]]] = {}
    for p in sorted(head["points"], key=lambda p: p["workers"]):
        speeds.setdefault(p["strategy"], {}).setdefault(p["workers"], []).append(p["batch"] / p["step"])
    curves = {s: {int(n): speed for n, speed in curve.items()} for s, curve in head.get("curves", {}).items()}
    found = {
        strategy: laws.fit(own, is_weak=head["about"]["weak"], curve=curves.get(strategy))
        for strategy, own in speeds.items()
    }
    verdicts = {strategy: answer.verdict(law) for strategy, law in found.items() if law is not None}
    head |= {"speeds": speeds, "laws": {strategy: law.data() for strategy, law in found.items() if law is not None}}
    head |= {"verdicts": verdicts, "recommended": answer.recommend(speeds)}
    for strategy, own in speeds.items():
        base = statistics.median(own[min(own)]) / min(own)
        for n, repeats in own.items():
            rate = statistics.median(repeats)
            console.say(f"  {strategy} on {n}: {rate:,.0f} samples/s, efficiency {rate / base / n:.0%}")
        console.say(f"  {strategy}: {verdicts.get(strategy, 'one number of workers shows no scaling')}")
    console.say(f"  {head['recommended']}")
