"""`cluster`: from `up` to ready and from submit to the first step, beside plain `ray up` and `ray job submit`; doctor.

In a lab of three hosts and a desk from which they are started and given jobs (tests/lab.py, which says what it needs).
Both sides take the same file and the same training, in turns. Ready is when the head's state API names every node.
Plain `ray up` runs with autoscaler v1: with v2, Ray 2.60's default, one on-prem worker never comes. Plain
`ray job submit` finds an SSH tunnel open already; ours opens its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from app.submit.package import EXCLUDES
from experiments.benchmarks.machine import machine
from tests.lab import Lab, onprem, unavailable
from tests.running import POINTS, ROOT, end_tree

HEAD, DESK = 0, 3
NODES = 3
PARTS = ("up", "submit", "doctor")
PLAIN_UP = """
import os, subprocess, sys, time
from cluster.launch import load
from cluster.status import status_of
data, file = load(sys.argv[1])
begun = time.time()
ray_up = ["ray", "up", "--yes", "--no-config-cache", "--disable-usage-stats", file]
done = subprocess.run(ray_up, env=os.environ | {"RAY_UP_enable_autoscaler_v2": "0"}, capture_output=True, text=True)
assert not done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
while len(status_of(data, file).alive) < int(sys.argv[2]):
    time.sleep(1.0)
print("seconds", time.time() - begun)
"""


class Site:
    """The lab with its cluster's file, and a copy of this project that does not change while it is measured."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.file = lab, onprem(lab)
        self.project = lab.folder / "project"
        left_out = shutil.ignore_patterns(*EXCLUDES, "*.egg-info")
        self.project.mkdir()
        for part in ("app", "cluster", "strategies", "tests"):
            shutil.copytree(ROOT / part, self.project / part, ignore=left_out)
        self.number = 0

    def run(self, command: list[str], timeout: float = 240, **env: str) -> str:
        """A command at the desk; its output. Raises RuntimeError if it fails."""
        return self._checked(self.lab.run(DESK, command, env, timeout))

    def trireme(self, *arguments: str, host: int = DESK, **env: str) -> str:
        return self._checked(self.lab.trireme(host, *arguments, timeout=240, **env))

    def _checked(self, done: Any) -> str:
        if done.returncode:
            raise RuntimeError(f"{done.args[-1][-300:]}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
        return done.stdout

    # --- up ---------------------------------------------------------------------------------------------------------

    def up(self) -> float:
        begun = time.time()
        self.trireme("cluster", "up", str(self.file), "--json")
        return time.time() - begun

    def plain_up(self) -> float:
        out = self.run([sys.executable, "-c", PLAIN_UP, str(self.file), str(NODES)])
        return float(out.split("seconds")[-1])

    def down(self) -> None:
        self.trireme("cluster", "down", str(self.file))

    # --- submit -----------------------------------------------------------------------------------------------------

    def training(self) -> list[str]:
        self.number += 1
        cpus = f"resources_per_worker.CPU={os.cpu_count()}"  # every worker on a host of its own
        run = ["strategy=ddp", "workers=2", cpus, "train.steps=5", f"run.name=run-{self.number}"]
        return [*POINTS, *run, f"run.storage={self.lab.shared}/runs"]

    def submit(self) -> float:
        where = ["--cluster", str(self.file), "--working-dir", str(self.project)]
        begun = time.time()
        self.trireme("submit", *self.training(), *where)
        return self._first_step() - begun

    def plain_submit(self) -> float:
        command = ["ray", "job", "submit", "--address=http://127.0.0.1:8265", f"--working-dir={self.project}"]
        begun = time.time()
        self.run([*command, "--", "python", "-m", "app", "train", *self.training()], RAY_AUTH_MODE="token")
        return self._first_step() - begun

    def _first_step(self) -> float:
        manifest = self.lab.shared / "runs" / f"run-{self.number}" / "run.json"
        return float(json.loads(manifest.read_text())["summary"]["first_step_at"])

    @contextlib.contextmanager
    def tunnel(self) -> Iterator[None]:
        """From the desk to the head's job server, as somebody without Trireme would open it."""
        ssh = ["ssh", "-N", "-o", "StrictHostKeyChecking=accept-new", "-i", "/root/.ssh/id_ed25519"]
        to = ["-L", "8265:127.0.0.1:8265", f"root@{self.lab.address(HEAD)}"]
        process = self.lab.start(DESK, [*ssh, *to], quiet=True)
        try:
            time.sleep(2)
            yield
        finally:
            end_tree(process.pid)  # what runs on the host is a child of the process that entered it
            process.wait()

    # --- doctor -----------------------------------------------------------------------------------------------------

    def doctor(self) -> float:
        """On a node of the cluster."""
        ray = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": f"{self.lab.address(HEAD)}:6379"}
        begun = time.time()
        self.trireme("doctor", "--storage", str(self.lab.shared), host=HEAD, **ray)
        return time.time() - begun

    def doctor_from_afar(self) -> float:
        """From the desk: a job that is shipped, run, and its report brought back."""
        begun = time.time()
        self.trireme("doctor", "--cluster", str(self.file), "--storage", str(self.lab.shared))
        return time.time() - begun


def in_turns(rounds: int, **measures: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each, every other round in the other order."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds):
        names = list(measures) if number % 2 == 0 else list(reversed(measures))
        for name in names:
            seconds[name].append(measures[name]())
            click.echo(f"{name}: {seconds[name][-1]:.1f} s", err=True)
    return seconds


def run(rounds: int, parts: tuple[str, ...]) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round, by part and by who did it."""
    found: dict[str, dict[str, list[float]]] = {}
    with Lab(4) as lab:
        site = Site(lab)
        site.up()  # makes the token, and warms the file cache

        def fresh(up: Callable[[], float]) -> Callable[[], float]:
            def once() -> float:
                site.down()
                return up()

            return once

        if "up" in parts:
            found["up"] = in_turns(rounds, trireme=fresh(site.up), plain=fresh(site.plain_up))
        if "submit" in parts:
            with site.tunnel():
                site.plain_submit()
                site.submit()
                found["submit"] = in_turns(rounds, trireme=site.submit, plain=site.plain_submit)
        if "doctor" in parts:
            found["doctor"] = in_turns(rounds, **{"on a node": site.doctor, "from the desk": site.doctor_from_afar})
        site.down()
    return found


WORDS = {
    ("up", "trireme"): "`trireme cluster up` to ready",
    ("up", "plain"): "`ray up` to ready",
    ("submit", "trireme"): "`trireme submit` to first step",
    ("submit", "plain"): "`ray job submit` to first step",
    ("doctor", "on a node"): "`trireme doctor`, 3 nodes, on one of them",
    ("doctor", "from the desk"): "`trireme doctor --cluster`, from the desk",
}


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds of each, in turns.")
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="Only this part; may be given several times.")
@click.option("--json", "as_json", is_flag=True)
def main(rounds: int, only: tuple[str, ...], as_json: bool) -> None:
    """Three hosts and a desk in namespaces of this machine: up, submit and doctor."""
    if why := unavailable():
        raise click.ClickException(why)
    found = run(rounds, only or PARTS)
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"{machine()}, {rounds} rounds\n\n| | median, s | from | to |\n|---|---|---|---|")
    for part, rows in found.items():
        for who, seconds in rows.items():
            low, high = min(seconds), max(seconds)
            click.echo(f"| {WORDS[part, who]} | {statistics.median(seconds):.1f} | {low:.1f} | {high:.1f} |")


if __name__ == "__main__":
    main()
