"""`trireme runs`, `watch`, `compare` and `profile`: runs seen from another shell or machine."""

import dataclasses

import click

from app.cli.common import Invocation, verb
from app.errors import Interrupted, RunFailed

LOCAL_POLL_SECONDS = 1.0
REMOTE_POLL_SECONDS = 5.0


@verb("runs")
@click.argument("folder", metavar="[FOLDER]", default="runs")
def runs(cli: Invocation, folder: str) -> None:
    """List runs with their state, last loss and age, the newest first.

    \b
    trireme runs                 those in ./runs
    trireme runs s3://team/runs  those in another run.storage
    trireme runs runs/sweep      the trials of a sweep

    A run is lost when its driver has died: the command that started it continues it.
    """
    from app.run.look import list_runs, table

    states = list_runs(folder)
    text = table(states) if states else f"there is no run in {folder}"
    cli.answer({"runs": states}, text)


@verb("watch")
@click.argument("run", metavar="RUN")
def watch(cli: Invocation, run: str) -> None:
    """Follow a run that trains in another shell or on another machine.

    \b
    trireme watch runs/gpt
    trireme watch s3://team/runs/gpt

    RUN is the run's folder, which this machine must be able to read. Ctrl-C ends the watching, not
    the run. The exit code is the run's own: 0 finished, 1 failed or lost, 130 stopped.
    """
    from app.console.terminal import evaluation_line
    from app.run.look import follow, open_run
    from app.training.events import StepsDone

    storage = open_run(run)
    poll_seconds = LOCAL_POLL_SECONDS if storage.is_local else REMOTE_POLL_SECONDS
    previous_driver = ""
    for state in follow(storage, poll_seconds):
        if state.driver and state.driver != previous_driver:
            cli.console.say(f"{state.name}: {state.state}, {state.driver}")
        previous_driver = state.driver
        if state.progress and state.state == "running":
            cli.console.progress(StepsDone.from_record(state.progress), state.evaluated)
        if cli.console.output_closed:
            return
    cli.answer(state)
    ending = f"{state.name} {state.state} after step {state.step:,} of {state.steps:,}"
    if state.state == "stopped":
        raise Interrupted(f"{ending}: the command that started it continues it")
    if state.state != "finished":
        raise RunFailed(f"{ending}; its logs are in {state.folder}/logs")
    text = f"{ending}: {evaluation_line(state.evaluated)}" if state.evaluated else ending
    cli.answer(state, text)


@verb("compare")
@click.argument("runs", metavar="RUN RUN…", nargs=-1)
@click.option("--metric", default="train/loss", show_default=True, help="Lower is better.")
@click.option(
    "--last",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.5,
    show_default=True,
    metavar="SHARE",
    help="Compare over this share of the samples that the runs have in common, at their end.",
)
def compare(cli: Invocation, runs: tuple[str, ...], metric: str, last: float) -> None:
    """Compare runs with the first one, and tell whether a difference is more than noise.

    \b
    trireme fork runs/gpt --at 3000 run.name=slow optimizer.lr=1e-4
    trireme fork runs/gpt --at 3000 run.name=fast optimizer.lr=4e-4
    trireme compare runs/slow runs/fast

    Values over the same samples are compared pair by pair, so forks of one checkpoint need few
    steps to differ. Runs of another seed or other data are compared less sharply.
    """
    from app.run.look import open_run

    storages = [open_run(run) for run in runs]
    from app.results.compare import compare_runs, sentence  # imports torch

    differences = compare_runs(storages, metric=metric, share=last)
    values = [{**dataclasses.asdict(each), "verdict": each.verdict} for each in differences]
    cli.answer({"comparisons": values}, "\n".join(map(sentence, differences)))


@verb("profile")
@click.argument("run", metavar="RUN")
def profile(cli: Invocation, run: str) -> None:
    """Show where the time of a run's profiled steps went: the longest operators, and exposed
    communication.

    \b
    trireme train experiments/gpt.yaml profile.steps=[20,25]
    trireme profile runs/gpt

    Per step: each operator without what it calls. Communication is exposed while nothing is
    computed. The traces beside the table open in https://ui.perfetto.dev.
    """
    from app.run.look import open_run

    storage = open_run(run)
    from app.training.profiler import read_profile, table  # imports torch

    profile_values, folder = read_profile(storage)
    url = f"{storage.url}/{folder}"
    cli.answer({**profile_values, "folder": url}, f"{table(profile_values)}traces are in {url}")
