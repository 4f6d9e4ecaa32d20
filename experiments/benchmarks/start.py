"""`start`: from the command to the first finished step, as whole programs, in turns.

The same training by hand under torchrun; ours under torchrun; by Ray Train and by actors, each in a Ray that the
command starts, and the first and second time on a cluster that is there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psutil

from cluster.remote import free_port
from experiments.benchmarks.harness import TORCHRUN, show, trained, tree_without

STEPS = 5
LAUNCHERS = {"ray": "Ray Train", "actors": "actors"}


def run(rounds: int, without: str = "") -> dict[str, list[float]]:
    """Seconds of each round, by side; one more warms the file cache. without: a path; every round a second time in a
    copy of the checkout without it."""
    seconds: dict[str, list[float]] = {}
    with tree_without(without) if without else contextlib.nullcontext() as copy:
        trees = {"": os.getcwd()} | ({f", without {without}": copy} if copy else {})
        for number, (words, tree) in itertools.product(range(-1, rounds), trees.items()):
            for name, value in _round(tree, backwards=bool(number % 2)):
                if number >= 0:
                    seconds.setdefault(name + words, []).append(value)
    return seconds


def _round(tree: str, *, backwards: bool) -> Iterator[tuple[str, float]]:
    """Each side once, by the code in the folder `tree`; those on a cluster in their order, each launcher on a cluster
    of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": tree}
    env.pop("RAY_ADDRESS", None)
    order = ["by hand", "torchrun", *LAUNCHERS]
    for side in reversed(order) if backwards else order:
        if side == "by hand":
            command = [*TORCHRUN, "experiments.benchmarks.plain", "mnist", str(STEPS)]
            begun = time.time()
            done = subprocess.run(command, check=True, cwd=tree, env=env, capture_output=True, text=True)
            yield "torchrun, by hand", float(done.stdout.split()[-1]) - begun
        elif side == "torchrun":
            yield "torchrun", _trireme([*TORCHRUN, "app"], env)
        else:
            command, name = [sys.executable, "-m", "app"], LAUNCHERS[side]
            yield f"{name}, a Ray of its own", _trireme(command, env, f"launcher={side}")
            with contextlib.closing(RayCluster(env, head_cpus=2)) as cluster:
                there = cluster.env | {"RAY_ADDRESS": cluster.address}
                time.sleep(4)  # its agents are still importing
                for which in ("first", "second"):
                    yield f"{name}, a running cluster, {which} run", _trireme(command, there, f"launcher={side}")


def _trireme(program: list[str], env: dict[str, str], *more: str) -> float:
    """From this moment until the first step was done."""
    begun, keys = time.time(), ["experiments/mnist.yaml", f"train.steps={STEPS}", *more]
    return float(trained(program, keys, env["PYTHONPATH"], env)["first_step_at"]) - begun


# --- a cluster of our own ---------------------------------------------------------------------------------------


class RayCluster:
    """A Ray head as `ray start` makes it, and nodes of two CPUs, all on this machine; ends only what it started."""

    def __init__(self, env: dict[str, str], head_cpus: int, nodes: int = 0) -> None:
        self.env, self.folder = env | {"RAY_AUTH_MODE": "disabled"}, Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.processes: list[subprocess.Popen[bytes]] = []
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        try:
            self._start("--head", f"--port={port}", f"--num-cpus={head_cpus}", "--include-dashboard=false")
            self.nodes = [self._node() for _ in range(nodes)]
            deadline = time.monotonic() + 90
            while not all(b"Ray runtime started" in log.read_bytes() for log in self.folder.glob("*/log")):
                if time.monotonic() > deadline:
                    raise TimeoutError("Ray did not start within 90 s")
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise

    def _start(self, *flags: str) -> subprocess.Popen[bytes]:
        folder = self.folder / str(len(self.processes))  # nodes of one folder that start together share sockets
        folder.mkdir()
        program = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-gpus=0"]
        place = ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--object-store-memory=100000000"]
        with (folder / "log").open("wb") as log:
            streams: dict[str, Any] = {"stdout": log, "stderr": log, "start_new_session": True}
            self.processes.append(subprocess.Popen([*program, *place, *flags], env=self.env, **streams))
        return self.processes[-1]

    def _node(self) -> subprocess.Popen[bytes]:
        return self._start(f"--address={self.address}", "--num-cpus=2")

    def mend(self) -> None:
        """A new node for each that has ended."""
        self.nodes = [self._node() if node.poll() is not None else node for node in self.nodes]

    def close(self) -> None:
        for process in self.processes:
            end_tree(process.pid)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def end_tree(pid: int) -> None:
    """Kills a process of ours and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@click.command()
@click.option("--rounds", default=5, type=click.IntRange(1), show_default=True, help="Rounds of whole programs.")
@click.option("--without", default="", metavar="PATH", help="Also without this folder, such as cluster/fast_start.")
@click.option("--json", "as_json", is_flag=True)
def main(rounds: int, without: str, as_json: bool) -> None:
    """Whole programs, from the command to the first finished step."""
    found = run(rounds, without=without)
    rows = [
        {"command to first step": name, "median, s": f"{statistics.median(s):.1f}"}
        | {"least to most": f"{min(s):.1f} to {max(s):.1f}"}
        for name, s in found.items()
    ]
    show("start", found, rows, as_json)
