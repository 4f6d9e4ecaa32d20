"""One start of a run: from taking its lease to its end, as the manifest, MLflow and the terminal tell it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from app.console.terminal import duration, evaluation_line, quantity
from app.errors import Interrupted, RunFailed
from app.run.driver import Driver
from app.run.manifest import Outcome
from app.run.prepare import Prepared
from app.run.versions import newer
from app.tasks.by_value import write_task_file
from app.tracking.settings import ui_command
from app.tracking.tracker import Delivery
from app.training.job import Job
from cluster.files import cluster_file
from cluster.preemption import provider_of


def train_run(driver: Driver, prepared: Prepared, where: str, train: Callable[[Job], None]) -> Outcome:
    """One start of the run, from taking its lease to its end in the manifest and in MLflow.

    where: for a person. train: trains a job to its end.
    """
    run, console = driver.run, driver.console
    if run.finished and run.manifest.steps >= prepared.steps:
        return _already_finished(driver)
    run.manifest.sources = prepared.sources
    run.open(prepared.config, prepared.steps, console.say)
    write_task_file(prepared.config.task, run.storage)
    console.say(
        f"training {run.manifest.name} on {f'{prepared.samples:,} samples' if prepared.samples else 'a stream'}"
    )
    console.say(
        f"{prepared.layout} on {where}; {prepared.steps:,} steps; everything else is in {run.local_folder / 'logs'}"
    )
    for note in (*newer(), *prepared.notes):
        driver.note(note)
    driver.begin_tracking()
    driver.tracker.inputs(prepared.inputs)
    # Of a file that changes later MLflow keeps both: the first digest as the parameter, the newest one as a tag.
    driver.tracker.params({f"code.{name}": digest for name, digest in prepared.sources.items()})
    # Signals stay caught until the end is written down: torchrun sends SIGTERM as soon as one rank has failed.
    with driver.signals():
        with _ending(driver):
            spot = provider_of(cluster_file(prepared.config.cluster.file))
            console.waits_for("the workers to start")
            train(
                Job(
                    config=prepared.config,
                    layout=prepared.layout,
                    folder=run.folder,
                    attempt=run.attempt,
                    run_uid=run.manifest.uid,
                    steps=prepared.steps,
                    cwd=os.getcwd(),
                    leased=True,
                    spot_provider=spot,
                    sources=prepared.sources,
                )
            )
        _compare_with_plan(driver, prepared)
        return _finished(driver)


def _compare_with_plan(driver: Driver, prepared: Prepared) -> None:
    """Logs what the planner predicted of the layout that it chose beside what was measured."""
    seconds, summary = driver.seconds_per_step, driver.summary
    if prepared.prediction is None or not seconds or driver.resized:  # resized: then no one layout was measured
        return
    memory = summary.get("memory_bytes", 0.0) - summary.get("memory_bytes_before", 0.0)
    plan = prepared.prediction.compare(seconds, memory)
    driver.add_to_summary(plan=plan)
    driver.tracker.metrics(summary["step"], plan)


@contextlib.contextmanager
def _ending(driver: Driver) -> Iterator[None]:
    """Whatever happens, the manifest and MLflow say how the run ended."""
    try:
        yield
    except BaseException as error:
        driver.console.waits_for("")
        with contextlib.suppress(OSError):
            if driver.run.lease.is_superseded():
                driver.tracker.leave()
                driver.run.lease.release()
                raise RunFailed(driver.run.lease.superseded_message()) from error
        _ended_by(driver, error)
        raise


def _ended_by(driver: Driver, error: BaseException) -> None:
    """Raises Interrupted, with what to do next, if a person or a scheduler has ended the run."""
    if isinstance(error, Interrupted | KeyboardInterrupt):
        _end(driver, "stopped", "KILLED", str(error) or "stopped at once")
        again = "run the same command again to continue"
        raise Interrupted(f"{error or 'stopped at once'}: {again}") from None
    _end(driver, "failed", "FAILED", str(error).splitlines()[0] if str(error) else type(error).__name__)


def _end(driver: Driver, status: str, mlflow_status: str, message: str = "") -> Delivery:
    config = driver.config
    driver.console.status("sending the last metrics to MLflow")
    driver.settle_cost()
    delivery = driver.tracker.finish(mlflow_status, message=message, timeout=config.tracking.flush_timeout)
    driver.progress.close()
    manifest = driver.run.manifest
    manifest.mlflow_run_id = delivery.run_id or manifest.mlflow_run_id
    manifest.seconds += time.monotonic() - driver.began
    driver.run.end(status, driver.summary or None)
    if not delivery.complete:
        driver.note(
            f"some metrics have not reached MLflow yet ({delivery.problem}); they wait in "
            f"{driver.tracker.folder}: `trireme sync {driver.run.folder}` delivers them"
        )
    if delivery.left_out:
        driver.note(f"MLflow has no model of this run, only its weights are kept: {delivery.left_out}")
    return delivery


def _finished(driver: Driver) -> Outcome:
    driver.add_to_summary(
        first_step_at=driver.first_step_at,
        first_step_seconds=(driver.first_step_at or driver.started) - driver.started,
        total_seconds=time.monotonic() - driver.began,
    )
    run, config, summary = driver.run, driver.config, driver.summary
    weights = driver.weights() if config.tracking.log_model and config.tracking.enabled else None
    if weights:
        recipe = {"task": config.task, "task_args": config.task_args, "weights": str(weights), "folder": run.folder}
        driver.tracker.model(recipe | {"metrics": summary["metrics"]})
    delivery = _end(driver, "finished", "FINISHED", f"finished after step {summary['step']:,}")
    mlflow = {"run_id": delivery.run_id, "url": delivery.url, "complete": delivery.complete}
    outcome = Outcome("finished", run.manifest.name, run.folder, summary, mlflow)
    _print_summary(driver, outcome)
    return outcome


def _print_summary(driver: Driver, outcome: Outcome) -> None:
    console, summary = driver.console, outcome.summary
    metrics = summary["metrics"]
    evaluated = {k.removeprefix("eval/"): v for k, v in metrics.items() if k.startswith("eval/")}
    console.say("")
    console.say(
        f"  trained   {outcome.run}: {summary['parameters']:,} parameters, {summary['step']:,} steps"
        + (f", continued after step {summary['resumed_from']:,}" if summary["resumed_from"] else "")
    )
    if evaluated:
        console.say(f"  held out  {evaluation_line(evaluated)}")
    starts = driver.run.manifest.starts
    whole = f"; {duration(driver.run.manifest.seconds)} in all {starts} starts" if starts > 1 else ""
    console.say(
        f"  speed     mean {quantity(summary['rate'])} {summary['unit']}/s; {duration(summary['seconds'])} of training "
        f"in {duration(summary['total_seconds'])} (first step after {summary['first_step_seconds']:.1f} s){whole}"
    )
    if driver.meter and driver.meter.rate:
        console.say(f"  cost      {driver.meter.total()}")
    console.say(f"  stored    {outcome.folder}")
    if driver.config.tracking.enabled:
        console.say(f"  MLflow    {ui_command(driver.settings)}")
        if outcome.mlflow["url"]:
            console.say(f"            then open {outcome.mlflow['url']}")


def _already_finished(driver: Driver) -> Outcome:
    run = driver.run
    driver.console.say(
        f"{run.manifest.name} has finished already ({run.manifest.steps:,} steps, {run.folder}): raise train.steps or "
        "train.epochs to train it further, or add --again to train it anew"
    )
    mlflow = {"run_id": run.manifest.mlflow_run_id, "url": "", "complete": True}
    return Outcome("already_finished", run.manifest.name, run.folder, run.manifest.summary, mlflow)
