"""`trireme cluster` and `trireme doctor`: the machines, and whether they are fit to train on."""

from __future__ import annotations

import dataclasses
import os
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from app import names
from app.cli.common import Invocation, NamedGroup, experiment_arguments, read_experiment, verb
from app.errors import EXIT_FAILED, EXIT_REFUSED, RunFailed
from app.run.endings import USER_ERRORS
from app.run.versions import TESTED

if TYPE_CHECKING:
    from app.doctor.checks import ClusterFacts, Finding, RingFacts
    from app.submit.client import Server


@click.group("cluster", cls=NamedGroup)
def cluster() -> None:
    """Define, check, start and stop clusters: one laptop, machines over SSH, clouds, Kubernetes.

    \b
    trireme cluster list
    trireme cluster show aws
    trireme cluster validate my-cluster.yaml
    trireme cluster up my-cluster.yaml
    trireme cluster status my-cluster.yaml
    trireme cluster down my-cluster.yaml

    FILE is a cluster file for Ray's launcher, a KubeRay manifest, or the name of one of Trireme's
    own.
    """


@verb("list", group=cluster)
def list_(cli: Invocation) -> None:
    """List the cluster files that come with Trireme."""
    from cluster.files import own_files, read_cluster

    shapes = {name: read_cluster(path) for name, path in own_files().items()}
    lines = []
    for name, shape in shapes.items():
        gpus = f"up to {shape.max_gpus} GPUs" if shape.max_gpus else "the GPUs it has"
        lines.append(f"{name:<22} {shape.provider:<8} {gpus:<18} {shape.path}")
    cli.answer({"clusters": shapes}, "\n".join(lines))


@verb("show", group=cluster)
@click.argument("file", metavar="FILE")
def show(cli: Invocation, file: str) -> None:
    """Show node types, GPUs, memory, links, prices and limits."""
    from cluster.files import read_cluster
    from cluster.shape import shape_table

    shape = read_cluster(file)
    cli.answer(shape, shape_table(shape))


@verb("validate", group=cluster)
@click.argument("files", metavar="FILE…", nargs=-1, required=True)
def validate(cli: Invocation, files: tuple[str, ...]) -> None:
    """Find mistakes in cluster files, without credentials or network. Exit code 2 if there are
    any."""
    mistakes_of = {file: _mistakes(file) for file in files}
    for mistakes in mistakes_of.values():
        for mistake in mistakes:
            cli.console.error(mistake)
    valid = [file for file, mistakes in mistakes_of.items() if not mistakes]
    answer: dict[str, Any] = {"mistakes": mistakes_of}
    first = next((mistakes[0] for mistakes in mistakes_of.values() if mistakes), "")
    if first:
        answer["error"] = first
    cli.answer(answer, "\n".join(f"{file} is valid" for file in valid))
    if first:
        raise click.exceptions.Exit(EXIT_REFUSED)


def _mistakes(file: str) -> list[str]:
    from cluster import ClusterError
    from cluster.files import validate_file

    try:
        mistakes = [str(problem) for problem in validate_file(file)]
        return mistakes or list(_entrypoint_mistakes(file))
    except ClusterError as error:
        return [str(error)]


def _entrypoint_mistakes(file: str) -> Iterator[str]:
    """What is wrong with the keys that the entrypoint of a RayJob gives to `trireme train`.

    The experiment file itself is in the job's image, and cannot be checked.
    """
    from app.config.io import load_config
    from cluster.document import read_documents
    from cluster.files import find
    from cluster.kuberay_rules import trireme_arguments

    for document in read_documents(find(file)):
        if document.data.get("kind") != "RayJob":
            continue
        spec = document.data.get("spec") or {}
        words = trireme_arguments(shlex.split(spec.get("entrypoint", "")))
        if words[:1] != ["train"]:
            continue
        try:
            config = load_config([], [word for word in words if "=" in word])
            if config.strategy != "auto":
                from strategies.registry import records

                records(config.strategy)
        except USER_ERRORS as error:
            yield str(document.problem(("spec", "entrypoint"), f"its entrypoint: {error}"))


@verb("up", group=cluster)
@click.argument("file", metavar="FILE")
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up after this long.",
)
def up(cli: Invocation, file: str, timeout: float) -> None:
    """Start a cluster and wait until it is ready. Machines that exist already are checked first."""
    from cluster.launch import up as start_cluster

    started_at = time.monotonic()
    status = start_cluster(file, cli.console.say, timeout=timeout)
    seconds = time.monotonic() - started_at
    text = "\n".join([*status.lines(), f"  ready     after {seconds:.0f} s"])
    cli.answer({"status": "up", "seconds": seconds, **dataclasses.asdict(status)}, text)


@verb("down", group=cluster)
@click.argument("file", metavar="FILE")
def down(cli: Invocation, file: str) -> None:
    """Stop a cluster, and leave nothing of it running."""
    from cluster.launch import down as stop_cluster

    unreachable = stop_cluster(file)
    if unreachable:
        raise RunFailed(
            f"the cluster is down except for what could not be reached: {unreachable[0]}"
        )
    cli.answer({"status": "down"}, "the cluster is down")


@verb("status", group=cluster)
@click.argument("file", metavar="FILE")
def status(cli: Invocation, file: str) -> None:
    """Show what runs, starts or has failed, and the cost per hour."""
    from cluster.files import read_ray_file
    from cluster.launch import status_of

    data, path = read_ray_file(file)
    cluster_status = status_of(data, path)
    answer = dataclasses.asdict(cluster_status)
    if not cluster_status.reachable:
        answer["error"] = "the cluster's head does not answer"
    cli.answer(answer, "\n".join(cluster_status.lines()))
    if not cluster_status.reachable:
        raise click.exceptions.Exit(EXIT_FAILED)


# --- doctor ---


@verb("doctor")
@experiment_arguments
@click.option(
    "--cluster",
    default="",
    metavar="FILE",
    help="The cluster's file: it says how fast the links should be.",
)
@click.option(
    "--storage",
    default="",
    metavar="FOLDER",
    help="Where every node must write. Default: run.storage.",
)
@click.option(
    "--all-reduce/--no-all-reduce",
    default=None,
    help="Also measure all-reduce. Default: where GPUs are.",
)
@click.option(
    "--exclude-bad",
    is_flag=True,
    help="Print only the key that keeps a run off the bad nodes.",
)
def doctor(
    cli: Invocation,
    arguments: tuple[str, ...],
    cluster: str,
    storage: str,
    all_reduce: bool | None,
    exclude_bad: bool,
) -> None:
    """Check every node and GPU at once; say what is wrong and what to do. Exit code 1 if a node is
    not usable.

    \b
    trireme doctor
    trireme doctor experiments/gpt.yaml                 its storage too
    trireme train experiments/gpt.yaml $(trireme doctor --exclude-bad)
    """
    from app.doctor.checks import judge
    from app.doctor.look import remote_server

    cli.console.quiet = exclude_bad
    server = remote_server(cluster)
    if server is not None:
        options = _remote_options(cli, storage, all_reduce, exclude_bad=exclude_bad)
        _run_remotely(cli, server, arguments, options=options, exclude_bad=exclude_bad)
        return
    if not storage and arguments:
        storage = read_experiment(arguments).run.storage
    facts = _gather_facts(cli, cluster, storage, all_reduce=all_reduce)
    findings = judge(facts)
    if exclude_bad:
        key = _exclusion(facts, findings)
        if not cli.as_json:
            cli.console.result(key)
        cli.answer({"keys": [key] if key else []})
        return
    rows = [{**dataclasses.asdict(finding), "critical": finding.critical} for finding in findings]
    text = "\n".join(report(facts, findings))
    critical = [finding for finding in findings if finding.critical]
    answer: dict[str, Any] = {"findings": rows, "facts": facts}
    if critical:
        answer["error"] = critical[0].sentence
    cli.answer(answer, text)
    if critical:
        raise click.exceptions.Exit(EXIT_FAILED)


def _remote_options(
    cli: Invocation, storage: str, all_reduce: bool | None, *, exclude_bad: bool
) -> list[str]:
    """The options of this call of doctor, for its call on another machine."""
    options = ["--storage", storage] if storage else []
    if exclude_bad:
        options.append("--exclude-bad")
    if cli.as_json:
        options.append("--json")
    if all_reduce is not None:
        options.append("--all-reduce" if all_reduce else "--no-all-reduce")
    return options


def _run_remotely(
    cli: Invocation,
    server: Server,
    arguments: tuple[str, ...],
    *,
    options: list[str],
    exclude_bad: bool,
) -> None:
    """Run doctor on a cluster that this machine is not part of, and end with its exit code."""
    from app.doctor.look import answer_in_log
    from app.submit.submission import run_on_cluster

    cli.console.say(f"asking {server}")
    code, printed = run_on_cluster(
        server, "doctor", arguments, options=options, say=cli.console.say
    )
    if code and exclude_bad and not cli.as_json:
        error = answer_in_log(printed, prefix="trireme: ").removeprefix("trireme: ")
        raise RunFailed(error)
    if cli.as_json:
        cli.answer_of_job(printed)
    elif exclude_bad:
        cli.console.result(answer_in_log(printed, prefix="cluster.exclude_nodes="))
    else:
        cli.console.result(answer_in_log(printed))
    raise click.exceptions.Exit(code)


def _gather_facts(
    cli: Invocation, cluster: str, storage: str, *, all_reduce: bool | None
) -> ClusterFacts:
    from app.doctor.look import gather_facts
    from cluster.connect import connect, disconnect
    from cluster.files import cluster_file, read_cluster

    file = cluster_file(cluster)
    node_types = read_cluster(file).types if file else ()
    rates = [node_type.link_across for node_type in node_types if node_type.link_across]
    if storage and "://" not in storage:
        storage = os.path.abspath(os.path.expanduser(storage))
    cli.console.status("checking every node")
    with (
        tempfile.TemporaryDirectory() as folder,
        cli.console.capture(Path(folder) / "doctor.log"),
    ):
        connect(worker_setup=names.worker_setup())
        try:
            return gather_facts(
                storage=storage,
                link_expected=min(rates, default=None),
                all_reduce=all_reduce,
            )
        finally:
            disconnect()


def _exclusion(facts: ClusterFacts, findings: list[Finding]) -> str:
    """The key=value that keeps a run off the bad nodes; "" if no node is bad.

    Raises:
        RunFailed: Every node is bad.
    """
    from app.doctor.checks import bad_nodes

    bad = bad_nodes(findings)
    if len(bad) == len(facts.nodes):
        worst = findings[0]
        raise RunFailed(
            f"every node is bad, so none can be left out: {worst.sentence}: {worst.remedy}"
        )
    # Without spaces and quotes a shell hands it on as one word.
    return f"cluster.exclude_nodes=[{','.join(bad)}]" if bad else ""


def report(facts: ClusterFacts, findings: list[Finding]) -> list[str]:
    """Doctor's report for a person, in lines: the nodes, the links, and what is wrong."""
    lines = []
    for node in facts.nodes:
        gpu_counts = Counter(gpu.name for gpu in node.gpus)
        gpus = ", ".join(f"{count} × {name}" for name, count in gpu_counts.items()) or "no GPUs"
        role = " (head)" if node.head else ""
        lines.append(f"{node}{role}: {'does not answer' if node.problem else gpus}")
    lines += [_rate_line(facts, ring, ring.rate) for ring in facts.rings if ring.rate is not None]
    for finding in findings:
        mark = "✗" if finding.critical else "!"
        lines += [f"{mark} {finding.sentence}", f"    {finding.remedy}"]
    tested = [f"{name} {oldest} to {newest}" for name, (oldest, newest) in TESTED.items()]
    lines.append(f"Trireme was tested with {', '.join(tested)}")
    result = _counted(len(findings), "finding") if findings else "nothing is wrong"
    lines.append(f"{_counted(len(facts.nodes), 'node')} checked: {result}")
    return lines


def _rate_line(facts: ClusterFacts, ring: RingFacts, rate: float) -> str:
    if len(ring.nodes) == 1:
        place = f"within {facts.node(ring.nodes[0])}"
    else:
        place = f"over {len(ring.nodes)} nodes"
    line = f"all-reduce {place}, {ring.ranks} workers: {rate / 1e9:.3g} GB/s"
    if ring.exchange:
        line += f", all-to-all {ring.exchange / 1e9:.3g} GB/s"
    return line


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
