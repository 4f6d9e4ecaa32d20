"""`trireme scale`: measures an experiment on numbers of workers; says what more would bring."""

import os
import re
import statistics
from collections.abc import Mapping, Sequence
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
from app.tasks.base import Task
from app.tracking.tracker import Tracker
from app.training.job import Job
from cluster.connect import connect, disconnect
from cluster.pending import check_feasible
from experiments.report.page import write_page
from experiments.scale import answer, laws
from experiments.scale.manifest import Point, ScalingManifest
from experiments.scale.page import AHEAD, content
from experiments.study import load_manifest, locked_folder, save_manifest, tracked_study
from strategies.dims import DEGREES
from strategies.registry import automatic

KIND = "study"
"""The name of the manifest and of the log in a study's folder."""
NOT_OF_IDENTITY = ("run", "tracking", "fault", "checkpoint")
"""Sections of an experiment that may change from one start of a study to the next."""
WARM_UP_AND_PROFILE = 2
"""Blocks of steps besides those that are timed."""


def strategies_to_measure(
    config: Config, names: Sequence[str] | None, *, most_workers: int
) -> tuple[str, ...]:
    """The strategies of a study.

    Args:
        config: The experiment.
        names: As they are written; None means the experiment's.
        most_workers: The largest number of workers that is measured.
    """
    strategies = tuple(name.strip() for name in names or config.strategy.split(","))
    if strategies != ("auto",):
        return strategies
    # Without a planner, so that every point has the same strategy.
    degrees: dict[str, int | None] = {name: getattr(config.parallel, name) for name in DEGREES}
    return (automatic(most_workers, degrees).name,)


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """What is to be measured.

    Attributes:
        workers: Numbers of workers.
        strategies: Names of strategies.
        weak: Whether the batch grows with the workers.
        repeats: How often each point is measured.
        blocks: How many blocks of steps are timed in each measurement.
        steps: The number of steps in a block.
    """

    workers: tuple[int, ...]
    strategies: tuple[str, ...]
    weak: bool
    repeats: int
    blocks: int
    steps: int

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Strategy and number of workers of each point."""
        counts = sorted(set(self.workers))
        return [(strategy, count) for strategy in self.strategies for count in counts]

    def check(self, batch: int) -> None:
        """Checks that the points can be measured on some cluster.

        Args:
            batch: The experiment's global batch size.

        Raises:
            UserError: They cannot.
        """
        if not self.workers or any(count < 1 for count in self.workers):
            example = "write for instance --workers 1,2,4"
            raise UserError(f"--workers needs numbers greater than 0: {example}")
        if len(set(self.workers)) < 2:
            problem = f"--workers {self.workers[0]} is one point, which shows no scaling"
            raise UserError(f"{problem}: write for instance 1,2")
        unfit = [count for count in self.workers if batch % count]
        if unfit and not self.weak:
            count = unfit[0]
            problem = f"train.global_batch_size is {batch}, which {count} workers cannot share"
            raise UserError(f"{problem} evenly: write a multiple of {count}, or --weak")


@dataclass(kw_only=True)
class Outcome:
    """The outcome of `trireme scale`; `--json` prints it.

    Attributes:
        status: "finished".
        study: The study's name.
        folder: Its folder.
        points: All measurements.
        laws: The law of each strategy.
        verdicts: For each strategy, whether twice the workers pay.
        recommended: Which strategy to use on how many workers.
        page: The path of the page.
    """

    status: str
    study: str
    folder: str
    points: list[Point]
    laws: dict[str, dict[str, Any]]
    verdicts: dict[str, str]
    recommended: str
    page: str


def study_name(config: Config, *, weak: bool) -> str:
    """The name of a study's folder: after the run, or after the task where the run has no name.

    Args:
        config: The experiment.
        weak: Whether the batch grows with the workers.
    """
    task = re.split(r"[:./]", config.task)[-1].lower()
    return f"{config.run.name or task}-{'weak' if weak else 'strong'}-scaling"


def scale(config: Config, plan: StudyPlan, console: Console, *, verbose: bool = False) -> Outcome:
    """Measures what is not measured yet, fits the laws, and writes the page.

    Args:
        config: The experiment.
        plan: What is to be measured.
        console: Writes to the terminal.
        verbose: Whether Ray's and the workers' output goes to the terminal too.

    Raises:
        UserError: Nothing was started.
        LayoutError: Nothing was started.
        ClusterError: Nothing was started.
        RunFailed: A point could not be measured.
        Interrupted: Stopped by Ctrl-C; what was measured is kept.
    """
    plan.check(config.train.global_batch_size)
    console.status("reading the data")
    task = read_task(config)
    prepared = {
        (strategy, workers): _prepare_point(config, plan, task, strategy=strategy, workers=workers)
        for strategy, workers in plan.keys
    }
    name = study_name(config, weak=plan.weak)
    with locked_folder(config, name, kind=KIND, console=console, verbose=verbose) as folder:
        manifest = _load_manifest(config, plan, folder, name)
        with tracked_study(config, folder, manifest, kind=KIND, console=console) as tracker:
            tracker.params(flatten(to_dict(config)))
            study = Study(
                config=config,
                plan=plan,
                task=task,
                prepared=prepared,
                manifest=manifest,
                folder=folder,
                console=console,
                tracker=tracker,
            )
            study.measure()
            _conclude(manifest, console)
            save_manifest(folder, KIND, manifest)
            page = write_page(folder, content(manifest, folder))
            _track(manifest, tracker)
            tracker.artifact(page)
            tracker.artifact(folder / f"{KIND}.json")
    return Outcome(
        status="finished",
        study=name,
        folder=str(folder),
        points=manifest["points"],
        laws=manifest["laws"],
        verdicts=manifest["verdicts"],
        recommended=manifest["recommended"],
        page=str(page),
    )


def _load_manifest(config: Config, plan: StudyPlan, folder: Path, name: str) -> ScalingManifest:
    """The study's manifest, with the points of earlier starts.

    Raises:
        UserError: The folder holds another study.
    """
    experiment = to_dict(config)
    for section in NOT_OF_IDENTITY:
        del experiment[section]
    about = {"experiment": experiment, "weak": plan.weak}
    stored = load_manifest(folder, kind=KIND, name=name, about=about)
    return {"points": [], **stored}


def _prepare_point(
    config: Config,
    plan: StudyPlan,
    task: Task,
    *,
    strategy: str,
    workers: int,
) -> Prepared:
    """What a point trains.

    Raises:
        UserError: It cannot be trained on so many workers.
        LayoutError: Likewise.
    """
    batch = config.train.global_batch_size
    values: dict[str, Any] = {
        "workers": str(workers),
        "strategy": strategy,
        "train.global_batch_size": batch * workers if plan.weak else batch,
        "train.batch_schedule": [],  # every step that is measured has the same batch
    }
    if workers == 1:
        values["strategy"] = "single"
        values["parallel"] = type(config.parallel)()
    return prepare(with_values(config, values), task, workers, devices_per_node=None)


# --- measuring ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Study:
    """A study that is under way.

    Attributes:
        config: The experiment.
        plan: What is to be measured.
        task: The experiment's task.
        prepared: What each point trains.
        manifest: Keeps what was measured.
        folder: The study's folder.
        console: Writes to the terminal.
        tracker: Logs what was measured.
    """

    config: Config
    plan: StudyPlan
    task: Task
    prepared: Mapping[tuple[str, int], Prepared]
    manifest: ScalingManifest
    folder: Path
    console: Console
    tracker: Tracker

    def measure(self) -> None:
        """Measures the points that are missing, and plans what the laws need.

        Repeats are measured in alternating order, so that drift of the machines cancels.

        Raises:
            ClusterError: The cluster has no room for the workers.
            RunFailed: A point could not be measured.
        """
        self.console.status("starting Ray")
        self._save()
        cluster = connect(worker_setup=names.worker_setup())
        try:
            most_workers = max(self.plan.workers)
            per_worker = dict(self.config.resources_per_worker)
            if not per_worker:
                per_worker = {"GPU": 1.0} if cluster.gpus >= most_workers else {"CPU": 1.0}
            check_feasible(cluster.shape, most_workers, per_worker)
            self.manifest["price"] = rate_here(self.config, 1, per_worker)
            for repeat in range(self.plan.repeats):
                is_even = repeat % 2 == 0
                for strategy, workers in self.plan.keys if is_even else reversed(self.plan.keys):
                    if not self._has_point(strategy, workers, repeat):
                        point = self._measure_point(
                            strategy, workers, repeat, per_worker=per_worker
                        )
                        self._keep(point)
            # While Ray is connected it is known what the cluster has.
            self.manifest["curves"] = self._planned_curves(on_gpu="GPU" in per_worker)
        finally:
            disconnect()

    def _save(self) -> None:
        save_manifest(self.folder, KIND, self.manifest)

    def _has_point(self, strategy: str, workers: int, repeat: int) -> bool:
        wanted = (strategy, workers, repeat)
        points = self.manifest["points"]
        return wanted in [(p["strategy"], p["workers"], p["repeat"]) for p in points]

    def _measure_point(
        self,
        strategy: str,
        workers: int,
        repeat: int,
        *,
        per_worker: Mapping[str, float],
    ) -> Point:
        from experiments.scale import point  # it imports Ray, which must be connected first

        plan = self.plan
        prepared = self.prepared[strategy, workers]
        config = prepared.config
        batch = config.train.global_batch_size
        progress = f"{repeat + 1} of {plan.repeats}"
        self.console.status(f"measuring {strategy} on {workers} workers, {progress}")
        job = Job(
            config=config,
            layout=prepared.layout,
            folder=str(self.folder),
            attempt="",
            run_uid="scale",
            steps=(plan.blocks + WARM_UP_AND_PROFILE) * plan.steps,
            cwd=os.getcwd(),
        )
        worker_times = point.measure_point(
            job, workers, per_worker, blocks=plan.blocks, steps=plan.steps
        )
        measurement = point.combine(worker_times, config)
        seconds = measurement.step
        plural = "s" if workers > 1 else ""
        speed = f"{1e3 * seconds:.1f} ms per step, {batch / seconds:,.0f} samples/s"
        self.console.say(f"{strategy}, {workers} worker{plural}, {repeat + 1}: {speed}")
        for note in measurement.notes:
            self.console.say(f"  note: {note}")
        return {
            "strategy": strategy,
            "workers": workers,
            "repeat": repeat,
            "batch": batch,
            **asdict(measurement),  # type: ignore[typeddict-item]
            "layout": str(prepared.layout),
            "samples": prepared.steps * batch,
        }

    def _keep(self, point: Point) -> None:
        """Stores and logs a measurement."""
        self.manifest["points"].append(point)
        self._save()
        prefix = f"scale/{point['strategy']}/{point['workers']}"
        metrics = {}
        for name, value in point.items():
            if isinstance(value, float):
                metrics[f"{prefix}/{name}"] = value
        self.tracker.metrics(point["repeat"], metrics)

    def _planned_curves(self, *, on_gpu: bool) -> dict[str, dict[int, float]]:
        """By strategy, the planned samples per second by number of workers, for strong scaling.

        A strategy that cannot be planned has none.
        """
        if self.plan.weak:
            return {}
        curves = {}
        try:
            for strategy in self.plan.strategies:
                curve = self._planned_curve(strategy, on_gpu=on_gpu)
                if curve:
                    curves[strategy] = curve
        except Exception:  # whatever is wrong with a plan, what was measured is right
            return {}
        return curves

    def _planned_curve(self, strategy: str, *, on_gpu: bool) -> dict[int, float]:
        """Planned samples per second, on the numbers of workers measured and on those of the page.

        Empty if the batch cannot be divided by one of them.
        """
        from app.planner.advice import predict
        from app.planner.machine import cpus, machine_of_run
        from app.planner.plan import reader_of

        largest = max(self.plan.workers)
        counts = {*self.plan.workers, *(factor * largest for factor in AHEAD)}
        batch = self.config.train.global_batch_size
        if any(batch % count for count in counts):
            return {}
        machine = machine_of_run(largest) if on_gpu else cpus(largest)
        reader = reader_of(self.config, self.task, machine)
        curve = {}
        for count in sorted(counts):
            prepared = _prepare_point(
                self.config, self.plan, self.task, strategy=strategy, workers=count
            )
            machine_of_count = replace(machine, world=count, per_node=min(count, machine.per_node))
            prediction = predict(
                prepared.config, self.task, prepared.layout, machine_of_count, reader
            )
            curve[count] = batch / prediction.step_seconds
        return curve


# --- concluding -----------------------------------------------------------------------------------


def _conclude(manifest: ScalingManifest, console: Console) -> None:
    """Fits the laws, and puts them, the verdicts and the recommendation into the manifest."""
    speeds: dict[str, dict[int, list[float]]] = {}
    for point in sorted(manifest["points"], key=lambda point: point["workers"]):
        by_workers = speeds.setdefault(point["strategy"], {})
        by_workers.setdefault(point["workers"], []).append(point["batch"] / point["step"])
    fitted: dict[str, laws.Law] = {}
    for strategy, measured in speeds.items():
        curve = manifest["curves"].get(strategy)
        law = laws.choose_law(measured, is_weak=manifest["about"]["weak"], curve=curve)
        if law is not None:
            fitted[strategy] = law
    manifest["speeds"] = speeds
    manifest["laws"] = {strategy: law.to_json() for strategy, law in fitted.items()}
    manifest["verdicts"] = {strategy: answer.verdict(law) for strategy, law in fitted.items()}
    manifest["recommended"] = answer.recommend(speeds)
    _say(manifest, console)


def _say(manifest: ScalingManifest, console: Console) -> None:
    """Says what was concluded."""
    for strategy, measured in manifest["speeds"].items():
        base = min(measured)
        speed_of_one = statistics.median(measured[base]) / base
        for workers, repeats in measured.items():
            speed = statistics.median(repeats)
            efficiency = speed / speed_of_one / workers
            rate = f"{speed:,.0f} samples/s, efficiency {efficiency:.0%}"
            console.say(f"  {strategy} on {workers}: {rate}")
        default = "one number of workers shows no scaling"
        console.say(f"  {strategy}: {manifest['verdicts'].get(strategy, default)}")
    console.say(f"  {manifest['recommended']}")


def _track(manifest: ScalingManifest, tracker: Tracker) -> None:
    """Logs what was concluded."""
    for strategy, law in manifest["laws"].items():
        metrics = {f"scale/{strategy}/{name}": value for name, value in law["values"].items()}
        tracker.metrics(0, metrics)
    for strategy, verdict in manifest["verdicts"].items():
        tracker.tags({f"trireme.verdict.{strategy}": verdict})
    tracker.tags({"trireme.recommended": manifest["recommended"]})
