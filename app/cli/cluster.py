"""`trireme cluster`."""

from __future__ import annotations

import dataclasses
import time

import click

from app.cli.common import Invocation, verb
from app.errors import RunFailed


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
    from cluster.shape import table

    shape = read_cluster(file)
    cli.answer(shape, table(shape))


@verb("validate", group=cluster)
@click.argument("files", metavar="FILE…", nargs=-1, required=True)
def validate(cli: Invocation, files: tuple[str, ...]) -> None:
    """Find mistakes in cluster files, without credentials or network. Exit code 2 if there are any."""
    from cluster import ClusterError
    from cluster.files import validate_file

    found: dict[str, list[str]] = {}
    for file in files:
        try:
            found[file] = [str(fault) for fault in validate_file(file)]
        except ClusterError as error:
            found[file] = [str(error)]
        for fault in found[file]:
            cli.console.error(fault)
    cli.answer(found, "\n".join(f"{name} is valid" for name, faults in found.items() if not faults))
    if any(found.values()):
        raise click.exceptions.Exit(2)


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

    left = end(file, cli.console.say)
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
