"""`trireme sweep`, `scale`, `parity`, `coordinate-check` and `report`: many runs together."""

import click

from app.cli.common import (
    Invocation,
    experiment_arguments,
    files_and_overrides,
    read_experiment,
    refuse_spaces,
    verb,
)
from app.cli.document import with_units
from app.config.task_source import refuse_wrong_task
from app.errors import Interrupted, RunFailed, UserError
from strategies.options import STRATEGIES

COUNT = click.IntRange(min=1)


@verb("sweep", verbose=True)
@click.argument("arguments", nargs=-1, metavar="SWEEP.yaml [key=value]…")
def sweep(cli: Invocation, arguments: tuple[str, ...]) -> None:
    """Search batch size, learning rate and other keys of an experiment; every trial is a full run.

    \b
    trireme sweep experiments/sweep_mnist.yaml
    trireme sweep experiments/sweep_gpt.yaml searcher=optuna trials=32 scheduler=asha

    Run it again to continue after a crash or Ctrl-C: trials that have ended are kept, the others
    continue, failed ones are tried again. Exit code 1 if some failed, 130 if the budget is spent.
    """
    files, overrides = files_and_overrides(arguments)
    if len(files) != 1:
        raise UserError(
            "give one sweep file: write for instance trireme sweep experiments/sweep_mnist.yaml"
        )
    from experiments.sweep import run, spec

    outcome = run.sweep(spec.read_sweep(files[0], overrides), cli.console, verbose=cli.verbose)
    cli.answer(outcome)
    if outcome.status == "stopped":
        raise Interrupted(outcome.message)
    if outcome.message:
        raise RunFailed(outcome.message)


@verb("scale", verbose=True)
@experiment_arguments
@click.option("--workers", required=True, metavar="1,2,4", help="Numbers of workers to measure.")
@click.option(
    "--strategy",
    metavar="NAME,NAME",
    help="Strategies to measure. Default: the experiment's.",
)
@click.option(
    "--strong/--weak",
    default=True,
    help="Strong: the same batch on more workers. Weak: it grows with them.",
)
@click.option(
    "--repeats",
    type=COUNT,
    metavar="N",
    default=3,
    show_default=True,
    help="Measurements of every point, in turns.",
)
@click.option(
    "--steps", type=COUNT, metavar="N", default=10, show_default=True, help="Steps in a block."
)
@click.option(
    "--blocks", type=COUNT, metavar="N", default=5, show_default=True, help="Blocks per point."
)
def scale(
    cli: Invocation,
    arguments: tuple[str, ...],
    workers: str,
    strategy: str | None,
    strong: bool,
    repeats: int,
    steps: int,
    blocks: int,
) -> None:
    """Measure an experiment on several numbers of workers; show what more of them would gain, and
    whether it pays.

    \b
    trireme scale experiments/gpt.yaml --workers 1,2,4,8 --strategy ddp,fsdp
    trireme scale experiments/mnist.yaml --workers 1,2 --weak

    Every point runs alone, in a placement group of its own. No weights are kept. Run it again to
    continue.
    """
    refuse_spaces("--workers", workers, arguments, is_item=str.isdecimal)
    refuse_spaces("--strategy", strategy, arguments, is_item=_is_strategy)
    config = read_experiment(arguments)
    refuse_wrong_task(config.task, config.task_args)
    worker_counts = _whole_numbers("--workers", workers, example="1,2,4")
    from experiments.scale import run

    strategies = run.strategies_to_measure(
        config, strategy.split(",") if strategy else None, most_workers=max(worker_counts)
    )
    plan = run.StudyPlan(
        workers=worker_counts,
        strategies=strategies,
        weak=not strong,
        repeats=repeats,
        blocks=blocks,
        steps=steps,
    )
    outcome = run.scale(config, plan, cli.console, verbose=cli.verbose)
    points = [with_units("Point", point) for point in outcome.points]
    laws = {name: with_units("Law", law) for name, law in outcome.laws.items()}
    cli.answer({**vars(outcome), "points": points, "laws": laws})


@verb("parity")
@experiment_arguments
@click.option(
    "--steps", metavar="N", default=20, show_default=True, help="Training steps of each row."
)
@click.option("--rows", "names", metavar="NAME,NAME", help="Only these strategies. Default: all.")
@click.option(
    "--workers", metavar="2,4", help="Only rows with these numbers of workers. Default: all."
)
@click.option(
    "--checkpoints", is_flag=True, help="Also continue every row's checkpoint under every row."
)
def parity(
    cli: Invocation,
    arguments: tuple[str, ...],
    names: str | None,
    workers: str | None,
    steps: int,
    checkpoints: bool,
) -> None:
    """Train an experiment's model under every strategy, and compare each loss curve with one
    device's.

    \b
    trireme parity experiments/gpt.yaml
    trireme parity experiments/mnist.yaml --rows ddp,fsdp --workers 2
    trireme parity experiments/gpt.yaml train.precision=bf16

    Starts processes on this machine, on its GPUs where there are enough for all rows. The columns
    are the largest relative differences: of a step's loss, of its gradient norm, and of a weight
    tensor at the end. In bf16 the bound is twice how far one device is from itself with the samples
    of a batch in other orders, over the first 8 steps. A row that cannot train the model is
    REFUSED, with the reason. A model with dropout differs under every row: set it to 0. Exit code 1
    if a row differs or fails.
    """
    refuse_spaces("--rows", names, arguments, is_item=_is_strategy)
    refuse_spaces("--workers", workers, arguments, is_item=str.isdecimal)
    config = read_experiment(arguments)
    refuse_wrong_task(config.task, config.task_args)
    from experiments.parity import experiment

    rows = experiment.choose_rows(names, workers, has_experts=experiment.has_experts(config))
    cli.console.status(f"training {len(rows)} rows")
    progress = experiment.Progress(begins=cli.console.waits_for, ends=cli.console.say)
    try:
        results = experiment.measure(
            config, steps=steps, rows=rows, checkpoints=checkpoints, progress=progress
        )
    finally:
        cli.console.waits_for("")
    cli.answer({"rows": experiment.as_dicts(results)}, experiment.table(results))
    for verdict, outcome in (("FAILED", "failed"), ("DIFFERS", "differ from one device")):
        bad_rows = [result.row for result in results if result.verdict == verdict]
        if bad_rows:
            raise RunFailed(
                f"{len(bad_rows)} of {len(results)} rows {outcome}, the first {bad_rows[0]}"
            )
    if all(result.verdict == "REFUSED" for result in results):
        raise RunFailed(f"every row was refused, the first because {results[0].refused}")


@verb("coordinate-check")
@experiment_arguments
@click.option(
    "--widths",
    required=True,
    metavar="64,128,256",
    help="Values of the first number in optimizer.width_transfer.base; its others grow with it.",
)
@click.option(
    "--steps", type=COUNT, metavar="N", default=5, show_default=True, help="Steps of each model."
)
def coordinate_check(cli: Invocation, arguments: tuple[str, ...], widths: str, steps: int) -> None:
    """Train an experiment's model at several widths for a few steps, and test whether its learning
    rate holds at all of them.

    \b
    trireme coordinate-check experiments/gpt.yaml --widths 32,64,128 \\
        'optimizer.width_transfer={base: {d_model: 32, n_heads: 2}}'

    Trains in this process on one batch, with optimizer.width_transfer and without. For each block
    it prints the mean absolute activation at each width and step, the power of the width that it
    follows, and that of its change since the first step. The rate holds if no change grows with the
    width (µP, arXiv 2203.03466). Exit code 1 if it does not hold.
    """
    refuse_spaces("--widths", widths, arguments, is_item=str.isdecimal)
    config = read_experiment(arguments)
    from experiments import coordinate_check as study

    outcome = study.check(config, _whole_numbers("--widths", widths, example="64,128"), steps=steps)
    cli.answer(outcome, study.table(outcome))
    if not outcome.holds:
        raise RunFailed(outcome.verdict)


def _is_strategy(word: str) -> bool:
    """Whether a word is the name of a strategy, or several that are combined."""
    return set(word.split("+")) <= {"auto", *STRATEGIES}


def _whole_numbers(option: str, text: str, *, example: str) -> tuple[int, ...]:
    """The numbers of an option.

    Raises:
        UserError: It has something else.
    """
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UserError(
            f"{option} is {text!r}: write numbers with commas, such as {example}"
        ) from None


@verb("report")
@click.argument("folders", nargs=-1, metavar="FOLDER…", required=True)
@click.option(
    "--out",
    metavar="FILE.html",
    help="The page to write. Default: report.html, or comparison.html of several runs.",
)
def report(cli: Invocation, folders: tuple[str, ...], out: str | None) -> None:
    """Write one self-contained page about runs, a sweep or a scaling study.

    \b
    trireme report runs/mnist                 one run
    trireme report runs/mnist runs/mnist-2    several, and where they differ
    trireme report runs/sweep_mnist           a sweep, or a study

    The page reads offline, on a phone and on paper, and is stored with the run in MLflow.
    """
    from experiments.report import runs

    cli.console.status("reading what was logged")
    page, note = runs.report(list(folders), out)
    if note:
        cli.console.say(f"note: {note}")
    cli.answer({"status": "complete", "page": str(page)}, str(page))
