"""`trireme doctor`."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import click

from app.cli.common import experiment_arguments, read, sentences
from app.console import Console


@click.command("doctor")
@experiment_arguments
@click.option("--cluster", metavar="FILE", help="The file the cluster was made from: says what links should give.")
@click.option("--storage", metavar="FOLDER", help="Look whether every node can write there. Default: run.storage.")
@click.option(
    "--all-reduce/--no-all-reduce",
    default=None,
    help="Measure all-reduce within and across nodes too. Default: where there are GPUs.",
)
@click.option("--exclude-bad", is_flag=True, help="Print only the keys that keep a run off the bad nodes.")
@click.option("--json", "as_json", is_flag=True, help="Print facts and findings as JSON.")
@click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
def command(
    arguments: tuple[str, ...],
    cluster: str | None,
    storage: str | None,
    all_reduce: bool | None,
    exclude_bad: bool,
    as_json: bool,
    traceback: bool,
) -> None:
    """Look at every node and GPU at once, and say what is wrong and what to do. Exit code 1 if anything grave is.

    \b
    trireme doctor
    trireme doctor experiments/gpt.yaml workers=8       the storage, MLflow and the job itself too
    trireme train experiments/gpt.yaml $(trireme doctor --exclude-bad)
    """
    console = Console(quiet=as_json or exclude_bad)
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.doctor import elsewhere
        from app.doctor.checks import judge
        from app.errors import RunFailed

        config = read(arguments) if arguments else None
        if there := elsewhere.where(cluster):
            given = {"--storage": storage, "--all-reduce": all_reduce, "--exclude-bad": exclude_bad, "--json": as_json}
            options = [word for name, value in given.items() for word in _words(name, value)]
            console.say(f"asking {there.words}")
            code, printed = elsewhere.ask(there, arguments, options, console.say)
            if code and exclude_bad:
                raise RunFailed(elsewhere.result(printed, only="trireme: ").removeprefix("trireme: "))
            console.result(elsewhere.result(printed, only=_line(exclude_bad, as_json)))
        else:
            facts = _look(config, console, cluster, storage, all_reduce)
            findings = judge(facts)
            code = int(not exclude_bad and any(finding.grave for finding in findings))
            _print(console, facts, findings, exclude_bad=exclude_bad, as_json=as_json)
    if code:
        raise click.exceptions.Exit(code)


def _print(console: Console, facts: Any, findings: list[Any], *, exclude_bad: bool, as_json: bool) -> None:
    from app.doctor.checks import bad_nodes
    from app.errors import RunFailed

    bad = bad_nodes(findings)
    if exclude_bad:
        if len(bad) == len(facts.nodes):
            raise RunFailed(f"every node is bad, so none can be left out: {findings[0]}")
        # Without spaces and quotes, so that a shell hands it on as one word.
        console.result(f"cluster.exclude_nodes=[{','.join(bad)}]" if bad else "")
    elif as_json:
        said = [dataclasses.asdict(finding) for finding in findings]
        console.result(json.dumps({"findings": said, "bad_nodes": bad, "facts": dataclasses.asdict(facts)}))
    else:
        for line in report(facts, findings):
            console.result(line)


def _line(exclude_bad: bool, as_json: bool) -> str:
    """How the one line begins that is the result; "" where it is all of them."""
    return "cluster.exclude_nodes=" if exclude_bad else "{" if as_json else ""


def _words(name: str, value: str | bool | None) -> list[str]:
    """An option as it is written on a command line; nothing where it was not given."""
    if value is False:
        return ["--no-all-reduce"] if name == "--all-reduce" else []
    return [] if value is None else [name] if value is True else [name, value]


def _look(config: Any, console: Console, cluster: str | None, storage: str | None, all_reduce: bool | None) -> Any:
    import ray

    from app.doctor.look import look
    from cluster.connect import connect
    from cluster.shape import cluster_file, read_cluster

    file = cluster_file(cluster)
    expected = None
    if file:
        rates = [kind.link_across for kind in read_cluster(file).types if kind.link_across]
        expected = min(rates, default=None)
    mlflow = os.environ.get("MLFLOW_TRACKING_URI", "")
    if config:
        mlflow = (config.tracking.uri or mlflow) if config.tracking.enabled else ""
        storage = storage or config.run.storage
    if storage and "://" not in storage:
        storage = os.path.abspath(os.path.expanduser(storage))
    console.status("looking at every node")
    log = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"trireme-doctor-{os.getpid()}.log")
    from pathlib import Path

    with console.capture(Path(log)):
        connect()
        try:
            facts = look(storage=storage or "", mlflow=mlflow, link_expected=expected, all_reduce=all_reduce)
        finally:
            ray.shutdown()
    Path(log).unlink(missing_ok=True)
    return facts


def report(facts: Any, findings: list[Any]) -> list[str]:
    """What was looked at in one line, then what is wrong; for a person."""
    gpus = sum(len(node.gpus) for node in facts.nodes)
    nodes = len(facts.nodes)
    head = f"{nodes} node{'s' if nodes != 1 else ''}, {gpus} GPUs, {len(facts.links)} links, {facts.seconds:.1f} s"
    worked = [ring for ring in facts.rings if ring.rate is not None]
    if worked:
        whole = max(worked, key=lambda ring: ring.ranks)
        head += f", all-reduce {whole.rate / 1e9:.3g} GB/s over {whole.ranks} workers"
    if not findings:
        return [f"{head}: nothing is wrong"]
    lines = [f"{head}: {len(findings)} finding{'s' if len(findings) != 1 else ''}"]
    for finding in findings:
        lines += [f"{'✗' if finding.grave else '!'} {finding.sentence}", f"    {finding.mend}"]
    return lines
