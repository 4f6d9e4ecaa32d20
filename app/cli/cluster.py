"""`trireme cluster`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from app.cli.common import sentences
from app.console import Console


@click.group("cluster")
def command() -> None:
    """Define, check, start and end clusters: one laptop, machines over SSH, clouds, Kubernetes.

    \b
    trireme cluster list
    trireme cluster show aws
    trireme cluster validate my-cluster.yaml
    trireme cluster up my-cluster.yaml
    trireme cluster status my-cluster.yaml
    trireme cluster down my-cluster.yaml

    FILE is a cluster file for Ray's launcher, a KubeRay manifest, or the name of one of Trireme's own.
    """


def _options(function: Any) -> Any:
    function = click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")(function)
    return click.option("--json", "as_json", is_flag=True, help="Print only the outcome, as JSON.")(function)


@command.command("list")
@_options
def list_(as_json: bool, traceback: bool) -> None:
    """The cluster files that come with Trireme."""
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from cluster.shape import own_files, read_cluster

        shapes = {name: read_cluster(path) for name, path in own_files().items()}
    if as_json:
        console.result(json.dumps({name: dataclasses.asdict(shape) for name, shape in shapes.items()}))
        return
    for name, shape in shapes.items():
        gpus = f"up to {shape.max_gpus} GPUs" if shape.max_gpus else "the GPUs it has"
        console.result(f"{name:<22} {shape.provider:<8} {gpus:<18} {shape.path}")


@command.command("show")
@click.argument("file", metavar="FILE")
@_options
def show(file: str, as_json: bool, traceback: bool) -> None:
    """What a cluster is made of: node types, GPUs, memory, links, prices, limits."""
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from cluster.picture import describe_shape
        from cluster.shape import read_cluster

        shape = read_cluster(file)
        text = json.dumps(dataclasses.asdict(shape)) if as_json else describe_shape(shape)
    console.result(text)


@command.command("validate")
@click.argument("files", metavar="FILE…", nargs=-1, required=True)
@_options
def validate(files: tuple[str, ...], as_json: bool, traceback: bool) -> None:
    """Find what is wrong in cluster files, without credentials or network. Exit code 2 if anything is."""
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from cluster.errors import ClusterError, Fault
        from cluster.provider_rules import botocore_is_installed
        from cluster.validate import validate_file

        found: dict[str, list[Fault]] = {}
        for file in files:
            try:
                found[file] = validate_file(file)
            except ClusterError as error:
                found[file] = [_unreadable(file, str(error))]
        if as_json:
            console.result(json.dumps({name: [dataclasses.asdict(f) for f in rows] for name, rows in found.items()}))
        for name, rows in found.items():
            for fault in rows:
                console.error(str(fault))
            if not rows and not as_json:
                console.result(f"{name} is valid")
        if not botocore_is_installed():
            console.say("note: node_config of AWS was not held against EC2's own description: pip install boto3")
    if any(found.values()):
        raise click.exceptions.Exit(2)


def _unreadable(file: str, said: str) -> Any:
    """What keeps a file from being read as one, as a fault of the line that it names."""
    import re

    from cluster.errors import Fault

    place = re.match(rf"{re.escape(file)}:(?:(\d+):)? ", said)
    return Fault(file, int(place[1] or 1) if place else 1, said[place.end() :] if place else said)


@command.command("up")
@click.argument("file", metavar="FILE")
@click.option("--timeout", default=600.0, show_default=True, metavar="SECONDS", help="Give up after this long.")
@_options
def up(file: str, timeout: float, as_json: bool, traceback: bool) -> None:
    """Start a cluster and wait until it is ready. Every machine that exists already is looked at first."""
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        import time

        from cluster.launch import up as start

        begun = time.monotonic()
        status = start(file, console.say, timeout=timeout)
        seconds = time.monotonic() - begun
    if as_json:
        console.result(json.dumps({"status": "up", "seconds": seconds, **dataclasses.asdict(status)}))
    else:
        console.result("\n".join([*status.lines(), f"  ready     after {seconds:.0f} s"]))


@command.command("down")
@click.argument("file", metavar="FILE")
@_options
def down(file: str, as_json: bool, traceback: bool) -> None:
    """End a cluster, and leave nothing of it running."""
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from app.errors import RunFailed
        from cluster.launch import down as end

        left = end(file, console.say)
        if left:
            raise RunFailed(f"the cluster is down but for what could not be reached: {left[0]}")
    console.result(json.dumps({"status": "down"}) if as_json else "the cluster is down")


@command.command("status")
@click.argument("file", metavar="FILE")
@_options
def status(file: str, as_json: bool, traceback: bool) -> None:
    """What is up, what is starting, what failed and why, and what it costs by the hour."""
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=traceback):
        from cluster.launch import load
        from cluster.status import status_of

        data, path = load(file)
        found = status_of(data, path)
    console.result(json.dumps(dataclasses.asdict(found)) if as_json else "\n".join(found.lines()))
    if not found.reachable:
        raise click.exceptions.Exit(1)
