"""Measuring things beside each other in one run, so that whatever else the machine does falls on all of them.

Sides take turns, block by block, in the order A B B A. The figure is the median over the blocks A B B A of B's time
over A's, with a bootstrap interval: a machine that is slower for a minute is slower in both.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from app.config import Config

Times = dict[str, list[float]]
"""Seconds per step of each block, by side."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
ANSWER = "TRIREME_BENCHMARK_ANSWER"
"""In the environment of the processes that `torchrun` starts: where rank 0 writes its answer."""


def measured(
    steps: Mapping[str, Callable[[], object]], blocks: int, each: int, together: Callable[[], object] = lambda: None
) -> Times:
    """`blocks` blocks of `each` steps per side; one more of each warms up and is left out.

    steps: by side, what takes a step. together: called before each block, and after it, in its time.
    """
    times: Times = {name: [] for name in steps}
    for number in range(-1, blocks):
        for name in list(steps) if number % 2 else list(reversed(list(steps))):
            together()
            begun = time.perf_counter()
            for _ in range(each):
                steps[name]()
            together()
            if number >= 0:
                times[name].append((time.perf_counter() - begun) / each)
    return times


def beside(times: Times, base: str) -> dict[str, dict[str, Any]]:
    """Median milliseconds of each side, and its ratio to the side `base` with a 95 % interval."""
    found = {}
    for name, own in times.items():
        ratio, ms = statistics.median(ratios(times[base], own)), 1e3 * statistics.median(own)
        found[name] = {"ms": ms, "ratio": ratio, "interval": interval(times[base], own)}
    return found


def ratios(a: list[float], b: list[float]) -> list[float]:
    """b over a, of each two blocks that follow one another; of an odd number the last stands alone."""
    return [sum(b[at : at + 2]) / sum(a[at : at + 2]) for at in range(0, len(a), 2)]


def interval(a: list[float], b: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the ratios' median."""
    draw, known = random.Random(0), ratios(a, b)
    found = sorted(statistics.median(draw.choices(known, k=len(known))) for _ in range(draws))
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


# --- in processes -----------------------------------------------------------------------------------------------


def torchrun(module: str, *arguments: object, processes: int = 2) -> Any:
    """Runs `python -m MODULE ARGUMENTS` in several processes, one thread each; what rank 0 gave to `answer`.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.getcwd()}
        env[ANSWER] = f"{folder}/answer.json"
        command = [*TORCHRUN[:-1], f"--nproc-per-node={processes}", "-m", module, *map(str, arguments)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{module} ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
        return json.loads(Path(env[ANSWER]).read_text())


def answer(value: Any) -> NoReturn:
    """Ends one of those processes, at once: gloo's threads sometimes abort an interpreter that shuts down."""
    import torch.distributed as dist

    if os.environ["RANK"] == "0":
        Path(os.environ[ANSWER]).write_text(json.dumps(value))
    dist.barrier()
    os._exit(0)


def trained(program: list[str], keys: Sequence[str], tree: str, env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The summary of a whole `trireme train KEYS`, by the code in the folder `tree`. program: what starts Trireme."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", *keys, "run.name=benchmark", f"run.storage={folder}", "tracking.log_model=false", "--json"]
        own = {**env, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": tree}
        done = subprocess.run([*program, *words], env=own, capture_output=True, text=True, cwd=tree)
    if done.returncode:
        sys.exit(f"the run ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1])["summary"])


class Ours:
    """What one worker of a run has, in a benchmark's own process: the rank of this process in its process group, or the
    only one. The one place where benchmarks use the application's inside; all others run its commands.

    Preparing reads the data; `build` makes the model and all else that training needs. Events go nowhere.
    """

    def __init__(self, config: Config, device: Any = "cpu") -> None:
        import torch
        import torch.distributed as dist

        from app.job import Job
        from app.run.prepare import prepare, read_task

        grouped = dist.is_available() and dist.is_initialized()
        self.device = torch.device(device)
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        prepared = prepare(config, read_task(config), self.world, devices_per_node=None)
        self.config, folder = prepared.config, f"{config.run.storage}/{config.run.name}"
        self.job = Job(prepared.config, prepared.layout, folder, "benchmark", "benchmark", prepared.steps, os.getcwd())

    def build(self) -> Ours:
        from app.job import Place, SilentChannel
        from app.loop import Training

        self.training = Training(self.job, Place(self.rank, self.world, self.rank, self.device), SilentChannel())
        self.batches: Any = self.training.batches()
        return self

    def advance(self) -> None:
        """One step, and all that a run does between two."""
        self.training.advance(self.batches)

    def close(self) -> None:
        """Ends the data's threads."""
        self.batches.close()


@contextlib.contextmanager
def tree_without(*paths: str) -> Iterator[str]:
    """A folder with a copy of this checkout, in which these files or folders are not: for PYTHONPATH."""
    with tempfile.TemporaryDirectory() as folder:
        tracked = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
        for name in filter(None, tracked.split("\0")):
            if not name.startswith(paths) and Path(name).exists():
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(name, Path(folder, name))
        # Where Trireme is installed in editable mode, its finder would find in the checkout what is not here.
        finders = "[finder for finder in sys.meta_path if 'Editable' not in repr(finder)]"
        Path(folder, "sitecustomize.py").write_text(f"import sys; sys.meta_path[:] = {finders}")
        yield folder


# --- what is printed --------------------------------------------------------------------------------------------


def show(name: str, found: Any, rows: Sequence[dict[str, str]], as_json: bool) -> None:
    """Prints a table in Markdown, or `found` with where it was measured: machine, load, versions, command."""
    command = shlex.join(["python", "-m", "experiments.benchmarks", name, *sys.argv[2:]])
    machine = f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[1]:.1f}"
    versions = {"Python": platform.python_version()}
    for package in ("torch", "ray", "mlflow"):  # one GPU needs neither Ray nor MLflow
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    if as_json:
        here = {"benchmark": name, "command": command, "machine": machine, "versions": versions}
        print(json.dumps({**here, "found": found}))
        return
    print(f"`{command}`: {machine}; {', '.join(f'{key} {number}' for key, number in versions.items())}\n")
    for line in [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)] if rows else []:
        print(f"| {' | '.join(line)} |")


def ratio_row(name: str, found: dict[str, Any], base: str, side: str) -> dict[str, str]:
    """Of what `beside` gives: a row for one side beside the other."""
    low, high = found[side]["interval"]
    figures = {"beside, ms": f"{found[base]['ms']:.2f}", "ms": f"{found[side]['ms']:.2f}"}
    return {"": name, **figures, "ratio": f"{found[side]['ratio']:.3f}", "95 % interval": f"{low:.3f} to {high:.3f}"}
