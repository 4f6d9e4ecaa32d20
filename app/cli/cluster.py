"""`trireme cluster` and `trireme doctor`: the machines, and whether they are fit to train on."""

import dataclasses
import os
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from app import names
from app.cli.common import Invocation, experiment_arguments, read, verb
from app.errors import RunFailed
from app.run.endings import USER_ERRORS
from app.run.versions import TESTED


@click.group("cluster")
def cluster() -> None:
    """Define, check, start and stop clusters: one laptop, machines over SSH, clouds, Kubernetes.

    \b
    trireme cluster list
    trireme cluster show aws
    trireme cluster validate my-cluster.yaml
    trireme cluster up my-cluster.yaml
    trireme cluster status my-cluster.yaml
    trireme cluster down my-cluster.yaml

    FILE is a cluster file for Ray's launcher, a KubeRay manifest, or the name of one of Trireme's own.
    """


@verb("list", group=cluster)
def list_(cli: Invocation) -> None:
    """List the cluster files that come with Trireme."""
    from cluster.files import own_files, read_cluster

    shapes = {name: read_cluster(path) for name, path in own_files().items()}
    rows = []
    for name, shape in shapes.items():
        gpus = f"up to {shape.max_gpus} GPUs" if shape.max_gpus else "the GPUs it has"
        rows.append(f"{name:<22} {shape.provider:<8} {gpus:<18} {shape.path}")
    cli.answer({name: dataclasses.asdict(shape) for name, shape in shapes.items()}, "\n".join(rows))


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
    """Find mistakes in cluster files, without credentials or network. Exit code 2 if there are any."""
    from cluster import ClusterError
    from cluster.files import validate_file

    found: dict[str, list[str]] = {}
    for file in files:
        try:
            found[file] = [str(fault) for fault in validate_file(file)] or list(_job_keys(file))
        except ClusterError as error:
            found[file] = [str(error)]
        for fault in found[file]:
            cli.console.error(fault)
    cli.answer(found, "\n".join(f"{name} is valid" for name, faults in found.items() if not faults))
    if any(found.values()):
        raise click.exceptions.Exit(2)


def _job_keys(file: str) -> Iterator[str]:
    """What is wrong with the keys that a RayJob gives `trireme train`; its experiment file is in its image."""
    from app.config.io import load_config
    from cluster.document import read_documents
    from cluster.files import find
    from cluster.kuberay_rules import trireme_arguments

    for document in read_documents(find(file)):
        spec = document.data.get("spec") if document.data.get("kind") == "RayJob" else None
        words = trireme_arguments(shlex.split((spec or {}).get("entrypoint", "")))
        try:
            if words[:1] == ["train"]:
                config = load_config([], [word for word in words if "=" in word])
                if config.strategy != "auto":
                    from strategies.registry import records

                    records(config.strategy)
        except USER_ERRORS as error:
            yield str(document.problem(("spec", "entrypoint"), f"its entrypoint: {error}"))


@verb("up", group=cluster)
@click.argument("file", metavar="FILE")
@click.option("--timeout", default=600.0, show_default=True, metavar="SECONDS", help="Give up after this long.")
def up(cli: Invocation, file: str, timeout: float) -> None:
    """Start a cluster and wait until it is ready. Machines that exist already are checked first."""
    from cluster.launch import up as start

    begun = time.monotonic()
    status = start(file, cli.console.say, timeout=timeout)
    seconds = time.monotonic() - begun
    text = "\n".join([*status.lines(), f"  ready     after {seconds:.0f} s"])
    cli.answer({"status": "up", "seconds": seconds, **dataclasses.asdict(status)}, text)


@verb("down", group=cluster)
@click.argument("file", metavar="FILE")
def down(cli: Invocation, file: str) -> None:
    """Stop a cluster, and leave nothing of it running."""
    from cluster.launch import down as end

    left = end(file)
    if left:
        raise RunFailed(f"the cluster is down except for what could not be reached: {left[0]}")
    cli.answer({"status": "down"}, "the cluster is down")


@verb("status", group=cluster)
@click.argument("file", metavar="FILE")
def status(cli: Invocation, file: str) -> None:
    """Show what runs, starts or has failed, and the cost per hour."""
    from cluster.files import read_ray_file
    from cluster.launch import status_of

    found = status_of(*read_ray_file(file))
    cli.answer(found, "\n".join(found.lines()))
    if not found.reachable:
        raise click.exceptions.Exit(1)


# --- doctor


@verb("doctor")
@experiment_arguments
@click.option("--cluster", default="", metavar="FILE", help="The cluster's file: it says how fast the links should be.")
@click.option("--storage", default="", metavar="FOLDER", help="Where every node must write. Default: run.storage.")
@click.option("--all-reduce/--no-all-reduce", default=None, help="Also measure all-reduce. Default: where GPUs are.")
@click.option("--exclude-bad", "exclude", is_flag=True, help="Print only the key that keeps a run off the bad nodes.")
def doctor(
    cli: Invocation, arguments: tuple[str, ...], cluster: str, storage: str, all_reduce: bool | None, exclude: bool
) -> None:
    """Check every node and GPU at once; say what is wrong and what to do. Exit code 1 if a node is not usable.

    \b
    trireme doctor
    trireme doctor experiments/gpt.yaml                 its storage too
    trireme train experiments/gpt.yaml $(trireme doctor --exclude-bad)
    """
    from app.doctor import look
    from app.doctor.checks import judge

    cli.console.quiet = cli.as_json or exclude
    if server := look.server_of(cluster):
        flags: dict[str, bool | None] = {"--exclude-bad": exclude, "--json": cli.as_json}
        flags |= {"--all-reduce": all_reduce, "--no-all-reduce": all_reduce is False}
        options = [*(["--storage", storage] if storage else []), *(flag for flag, given in flags.items() if given)]
        _remote(cli, server, arguments, options, exclude)
    storage = storage or (read(arguments).run.storage if arguments else "")
    facts = _look(cli, cluster, storage, all_reduce)
    findings = judge(facts)
    if exclude:
        return cli.console.result(_excluded(facts, findings))
    rows = [{**dataclasses.asdict(finding), "critical": finding.critical} for finding in findings]
    cli.answer({"findings": rows, "facts": dataclasses.asdict(facts)}, "\n".join(report(facts, findings)))
    if any(finding.critical for finding in findings):
        raise click.exceptions.Exit(1)


def _remote(cli: Invocation, server: Any, arguments: tuple[str, ...], options: list[str], exclude: bool) -> None:
    """Shows what doctor says on a cluster that this machine is not part of, and ends with its exit code."""
    from app.doctor import look
    from app.submit.submission import run_on_cluster

    cli.console.say(f"asking {server}")
    code, printed = run_on_cluster(server, "doctor", arguments, options, say=cli.console.say)
    if code and exclude:
        raise RunFailed(look.result(printed, only="trireme: ").removeprefix("trireme: "))
    only = "cluster.exclude_nodes=" if exclude else "{" if cli.as_json else ""
    cli.console.result(look.result(printed, only=only))
    raise click.exceptions.Exit(code)


def _look(cli: Invocation, cluster: str, storage: str, all_reduce: bool | None) -> Any:
    from app.doctor.look import look
    from cluster.connect import connect, disconnect
    from cluster.files import cluster_file, read_cluster

    file = cluster_file(cluster)
    rates = [kind.link_across for kind in read_cluster(file).types if kind.link_across] if file else []
    if storage and "://" not in storage:
        storage = os.path.abspath(os.path.expanduser(storage))
    cli.console.status("checking every node")
    with tempfile.TemporaryDirectory() as folder, cli.console.capture(Path(folder) / "doctor.log"):
        connect(worker_setup=names.worker_setup())
        try:
            return look(storage=storage, link_expected=min(rates, default=None), all_reduce=all_reduce)
        finally:
            disconnect()


def _excluded(facts: Any, findings: list[Any]) -> str:
    from app.doctor.checks import bad_nodes

    bad = bad_nodes(findings)
    if len(bad) == len(facts.nodes):
        raise RunFailed(f"every node is bad, so none can be left out: {findings[0].sentence}: {findings[0].remedy}")
    # Without spaces and quotes, so that a shell hands it on as one word.
    return f"cluster.exclude_nodes=[{','.join(bad)}]" if bad else ""


def report(facts: Any, findings: list[Any]) -> list[str]:
    """The nodes, the links, and what is wrong; for a person."""
    lines = []
    for node in facts.nodes:
        kinds = Counter(gpu.name for gpu in node.gpus)
        has = ", ".join(f"{count} × {name}" for name, count in kinds.items()) or "no GPUs"
        lines.append(f"{node}{' (head)' if node.head else ''}: {'does not answer' if node.problem else has}")
    for ring in (ring for ring in facts.rings if ring.rate is not None):
        where = f"within {facts.node(ring.nodes[0])}" if len(ring.nodes) == 1 else f"over {len(ring.nodes)} nodes"
        exchange = f", all-to-all {ring.exchange / 1e9:.3g} GB/s" if ring.exchange else ""
        lines.append(f"all-reduce {where}, {ring.ranks} workers: {ring.rate / 1e9:.3g} GB/s{exchange}")
    for finding in findings:
        lines += [f"{'✗' if finding.critical else '!'} {finding.sentence}", f"    {finding.remedy}"]
    count = f"{len(findings)} finding{'s' if len(findings) != 1 else ''}" if findings else "nothing is wrong"
    nodes = f"{len(facts.nodes)} node{'s' if len(facts.nodes) != 1 else ''}"
    tested = ", ".join(f"{name} {oldest} to {newest}" for name, (oldest, newest) in TESTED.items())
    return [*lines, f"Trireme was tested with {tested}", f"{nodes} checked: {count}"]
