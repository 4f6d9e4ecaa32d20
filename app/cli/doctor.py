"""`trireme doctor`."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click

from app.cli.common import Invocation, experiment_arguments, read, verb
from app.errors import RunFailed


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

    cli.console.say(f"asking {server}")
    code, printed = look.ask(server, arguments, options, cli.console.say)
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
        connect()
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
    """The nodes, the links, then what is wrong; for a person."""
    lines = []
    for node in facts.nodes:
        kinds = Counter(gpu.name for gpu in node.gpus)
        has = ", ".join(f"{count} × {name}" for name, count in kinds.items()) or "no GPUs"
        lines.append(f"{node}{' (head)' if node.head else ''}: {'does not answer' if node.problem else has}")
    for ring in (ring for ring in facts.rings if ring.rate is not None):
        where = f"within {facts.node(ring.nodes[0])}" if len(ring.nodes) == 1 else f"over {len(ring.nodes)} nodes"
        lines.append(f"all-reduce {where}, {ring.ranks} workers: {ring.rate / 1e9:.3g} GB/s")
    for finding in findings:
        lines += [f"{'✗' if finding.critical else '!'} {finding.sentence}", f"    {finding.remedy}"]
    count = f"{len(findings)} finding{'s' if len(findings) != 1 else ''}" if findings else "nothing is wrong"
    nodes = f"{len(facts.nodes)} node{'s' if len(facts.nodes) != 1 else ''}"
    return [*lines, f"{nodes} checked in {facts.seconds:.1f} s: {count}"]
