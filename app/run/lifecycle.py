"""One start of a run, from taking its lease to its end in the manifest, MLflow and the terminal."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from app.console.terminal import duration, evaluation_line, quantity, size
from app.errors import Interrupted, RunFailed
from app.run.driver import Driver
from app.run.fork import adopt, find_origin
from app.run.manifest import Outcome
from app.run.prepare import Prepared
from app.run.versions import newer
from app.tasks.by_value import write_task_file
from app.tracking.settings import ui_command
from app.tracking.tracker import Delivery
from app.training.job import Job
from cluster.files import cluster_file
from cluster.preemption import provider_of


def train_run(
    driver: Driver, prepared: Prepared, where: str, train: Callable[[Job], None]
) -> Outcome:
    """Opens the run, trains it, and writes down how it ended.

    Args:
        driver: Of this start.
        prepared: What was decided and checked before.
        where: The processes that train, for a person.
        train: Trains a job to its end.

    Raises:
        UserError: See `train` in app/launchers/train.py.
        RunFailed: See there.
        Interrupted: See there.
    """
    run = driver.run
    console = driver.console
    earlier_outcome = run.outcome_if_finished(prepared.steps, console.say)
    if earlier_outcome is not None:
        return earlier_outcome
    origin = find_origin(prepared.config, run, prepared.steps)
    run.manifest.sources = prepared.sources
    run.open(prepared.config, prepared.steps, console.say)
    if origin is not None:
        adopt(origin, run, driver.note)
    write_task_file(prepared.config.task, run.storage)
    _announce(driver, prepared, where)
    driver.begin_tracking()
    driver.tracker.inputs(prepared.inputs)
    # If a file changes later, MLflow keeps both: the first digest as the parameter, the newest one
    # as a tag.
    digests = {f"code.{name}": digest for name, digest in prepared.sources.items()}
    driver.tracker.params(digests)
    # Signals stay caught until the end is written down, because torchrun sends SIGTERM as soon as
    # one rank has failed.
    with driver.signals():
        with _end_recorded(driver):
            console.waits_for("the workers to start")
            train(_job_of(driver, prepared))
        _compare_with_plan(driver)
        return _finished(driver, prepared)


def _announce(driver: Driver, prepared: Prepared, where: str) -> None:
    """Prints what is trained, and the notes about it."""
    run = driver.run
    data = "a stream" if not prepared.samples else f"{prepared.samples:,} samples"
    driver.console.say(f"training {run.manifest.name} on {data}")
    driver.console.say(
        f"{prepared.layout} on {where}; {prepared.steps:,} steps; "
        f"everything else is in {run.local_folder / 'logs'}"
    )
    for note in (*newer(), *prepared.notes):
        driver.note(note)


def _job_of(driver: Driver, prepared: Prepared) -> Job:
    run = driver.run
    return Job(
        config=prepared.config,
        layout=prepared.layout,
        folder=run.folder,
        attempt=run.attempt,
        run_uid=run.manifest.uid,
        steps=prepared.steps,
        cwd=os.getcwd(),
        leased=True,
        spot_provider=provider_of(cluster_file(prepared.config.cluster.file)),
        sources=prepared.sources,
        samples=prepared.samples,
        fork=driver.run.manifest.fork,
        widths=prepared.widths,
    )


def _compare_with_plan(driver: Driver) -> None:
    """Logs what the planner predicted of the layout that it chose, beside what was measured."""
    seconds_per_step = driver.seconds_per_step
    # After a resize no single layout was measured.
    if driver.prediction is None or not seconds_per_step or driver.resized:
        return
    summary = driver.summary
    memory = summary.get("memory_bytes", 0.0) - summary.get("memory_bytes_before", 0.0)
    plan = driver.prediction.compare(seconds_per_step, memory)
    driver.add_to_summary(plan={**plan, **driver.plan_parts})
    driver.tracker.metrics(summary["step"], plan)


# --- the end --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _end_recorded(driver: Driver) -> Iterator[None]:
    """Whatever is raised inside, the manifest and MLflow say how the run ended."""
    try:
        yield
    except BaseException as error:
        driver.console.waits_for("")
        with contextlib.suppress(OSError):
            if driver.run.lease.is_superseded():
                driver.tracker.leave()
                driver.run.lease.release()
                raise RunFailed(driver.run.lease.superseded_message()) from error
        _record_error(driver, error)
        raise


def _record_error(driver: Driver, error: BaseException) -> None:
    """Ends the run as stopped or failed.

    Raises:
        Interrupted: A person or a scheduler has ended the run; says what to do next.
    """
    if isinstance(error, Interrupted | KeyboardInterrupt):
        message = str(error) or "stopped at once"
        _end(driver, "stopped", "KILLED", message)
        raise Interrupted(f"{message}: run the same command again to continue") from None
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    _end(driver, "failed", "FAILED", first_line)


def _end(driver: Driver, status: str, mlflow_status: str, message: str) -> Delivery:
    """Ends the MLflow run and the manifest.

    Args:
        driver: Of this start.
        status: For the manifest.
        mlflow_status: FINISHED, FAILED or KILLED.
        message: One sentence for MLflow.

    Returns:
        What has reached MLflow.
    """
    driver.begin_end()
    driver.console.status("sending the last metrics to MLflow")
    driver.console.waits_for("MLflow to have the last metrics and files")
    driver.settle_cost()
    try:
        delivery = driver.tracker.finish(
            mlflow_status, message=message, timeout=driver.config.tracking.flush_timeout
        )
    except KeyboardInterrupt:  # a second signal ends the wait, and not what is written down here
        delivery = driver.tracker.finish(mlflow_status)
        delivery = replace(delivery, problem=delivery.problem or "the wait for it was stopped")
    driver.console.waits_for("")
    driver.progress.close()
    manifest = driver.run.manifest
    manifest.mlflow_run_id = delivery.run_id or manifest.mlflow_run_id
    manifest.seconds += time.monotonic() - driver.start_clock
    driver.run.end(status, driver.summary or None)
    if not delivery.complete:
        driver.note(
            f"some metrics have not reached MLflow yet ({delivery.problem}); they wait in "
            f"{driver.tracker.folder}: `trireme sync {driver.run.folder}` delivers them"
        )
    if delivery.left_out:
        driver.note(
            f"MLflow has no model of this run, only its weights are kept: {delivery.left_out}"
        )
    for sentence in delivery.trackers:
        driver.note(sentence)
    return delivery


def _finished(driver: Driver, prepared: Prepared) -> Outcome:
    """Logs the model, ends the run as finished, and prints its summary."""
    now = time.monotonic()
    driver.add_to_summary(
        first_step_seconds=(driver.first_step_clock or now) - driver.console.start_clock,
        total_seconds=now - driver.console.start_clock,
    )
    run = driver.run
    config = driver.config
    summary = driver.summary
    if config.tracking.log_model and config.tracking.enabled:
        weights = driver.weights()
        if weights is not None:
            recipe = {
                "task": config.task,
                "task_args": config.task_args,
                "weights": str(weights),
                "folder": run.folder,
                "metrics": summary["metrics"],
            }
            driver.console.waits_for("the model's files to be written")
            driver.tracker.model(recipe, prepared.task)
    delivery = _end(driver, "finished", "FINISHED", f"finished after step {summary['step']:,}")
    mlflow = {"run_id": delivery.run_id, "url": delivery.url, "complete": delivery.complete}
    outcome = Outcome("finished", run.manifest.name, run.folder, summary, mlflow)
    _print_summary(driver, outcome)
    return outcome


def _trained_share(summary: Mapping[str, Any]) -> str:
    """How many of a model's parameters are trained, as with LoRA; "" for all of them."""
    trained = summary.get("trained_parameters")
    if trained is None or trained == summary["parameters"]:
        return ""
    return f", of which {trained:,} train ({trained / summary['parameters']:.2%})"


def _batches_in_words(batch: Mapping[str, Any]) -> str:
    """What a run that decides on its batch has decided, and what that has cost."""
    sizes = [f"{batch['first']:,}"]
    for decision in batch["decisions"]:
        if decision["doubled"]:
            sizes.append(f"{2 * decision['batch']:,} at {decision['samples']:,} samples")
    refused = sum(not decision["doubled"] for decision in batch["decisions"])
    words = " → ".join(sizes)
    if refused:
        how_often = "once" if refused == 1 else f"{refused} times"
        words += f"; twice the batch was refused {how_often}"
    samples = f"{batch['dropped_samples']:,} samples ({batch['dropped_share']:.0%})"
    return (
        f"{words}; trying took {samples}, "
        f"{batch['dropped_steps']:,} steps and {duration(batch['dropped_seconds'])}"
    )


def _plan_in_words(metrics: Mapping[str, float]) -> str:
    """The time of a step and the memory of a run beside what was planned.

    Args:
        metrics: Those of `Estimate.compare`.
    """
    seconds = metrics["plan/step_seconds_measured"]
    planned_seconds = metrics["plan/step_seconds"]
    words = (
        f"a step took {quantity(seconds)} s; {quantity(planned_seconds)} s were planned "
        f"({seconds / planned_seconds - 1:+.0%})"
    )
    if "plan/memory_error" in metrics:
        memory = metrics["plan/memory_bytes_measured"]
        # The plan's margin for fragmentation is not among the bytes that are measured.
        planned_memory = memory * (1 + metrics["plan/memory_error"])
        words += (
            f"; tensors took {size(memory)}; {size(planned_memory)} were planned "
            f"({memory / planned_memory - 1:+.0%})"
        )
    return words


def _print_summary(driver: Driver, outcome: Outcome) -> None:
    console = driver.console
    summary = outcome.summary
    frozen = _trained_share(summary)
    trained = f"{outcome.run}: {summary['parameters']:,} parameters{frozen}"
    trained += f", {summary['step']:,} steps"
    if summary["resumed_from"]:
        trained += f", continued after step {summary['resumed_from']:,}"
    now = time.monotonic()
    ending_seconds = now - (driver.last_step_clock or now)
    speed = (
        f"mean {quantity(summary['rate'])} {summary['unit']}/s; "
        f"{duration(summary['seconds'])} of training in {duration(now - console.start_clock)} "
        f"(first step after {duration(summary['first_step_seconds'])}, "
        f"{duration(ending_seconds)} after the last)"
    )
    manifest = driver.run.manifest
    if manifest.starts > 1:
        speed += f"; {duration(manifest.seconds)} in all {manifest.starts} starts"
    evaluated = {
        name.removeprefix("eval/"): value
        for name, value in summary["metrics"].items()
        if name.startswith("eval/")
    }
    console.say("")
    console.say(f"  trained   {trained}")
    if evaluated:
        console.say(f"  held out  {evaluation_line(evaluated)}")
    if "batch" in summary:
        console.say(f"  batch     {_batches_in_words(summary['batch'])}")
    console.say(f"  speed     {speed}")
    if "plan" in summary:
        console.say(f"  plan      {_plan_in_words(summary['plan'])}")
    if driver.meter is not None and driver.meter.rate:
        console.say(f"  cost      {driver.meter.total()}")
    console.say(f"  stored    {outcome.folder}")
    if driver.config.tracking.enabled:
        console.say(f"  MLflow    {ui_command(driver.settings)}")
        if outcome.mlflow["url"]:
            console.say(f"            then open {outcome.mlflow['url']}")
