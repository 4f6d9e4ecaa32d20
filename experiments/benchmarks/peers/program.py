"""`peers`: the same training by hand, with other libraries and with Trireme, as whole commands.

All of them train the models of workload.py on two CPU workers, clip, log a loss every ten steps to
one MLflow database that exists already, and store the weights. They take turns, in the order
A B … B A. The steps' times are those that the models write down, the same for all.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import click

from cluster.remote import free_port
from experiments.benchmarks.harness import interval, ratios, show
from experiments.benchmarks.peers.workload import (
    CLIP_NORM,
    FOLDER,
    LOG_EVERY,
    LR,
    RECORD,
    WEIGHT_DECAY,
    WORKERS,
    WORKLOADS,
    workload,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BY_HAND = "by hand"
FIRST_STEPS = 10
"""Steps that warm up and are not in the median."""
TIMEOUT = 600.0
Measurements = dict[str, list["Measurement"]]
"""The measurements of each peer, in the order of the turns."""
Steps = list[tuple[float, float]]
"""When each step of a process began, in seconds since 1970, and its memory, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way to write and start the training.

    Attributes:
        name: For a person.
        file: In this folder.
        strategies: Those that it can apply to CPUs.
        package: What it needs to be installed.
        uses_torchrun: Whether torchrun starts its workers.
        includes: Other files of this folder whose lines a user writes too.
    """

    name: str
    file: str
    strategies: tuple[str, ...]
    package: str
    uses_torchrun: bool = True
    includes: tuple[str, ...] = ()

    def command(self, *, model: str, strategy: str, folder: Path) -> list[str]:
        """The command of a training in a folder."""
        launcher = [sys.executable, "-m"]
        if self.uses_torchrun:
            launcher += ["torch.distributed.run", "--nproc-per-node", str(WORKERS), "-m"]
        if self.file == "with_trireme.py":
            return [*launcher, "app", "train", *_trireme_keys(model, strategy, folder)]
        module = f"experiments.benchmarks.peers.{self.file.removesuffix('.py')}"
        return [*launcher, module, model, strategy]

    @property
    def lines(self) -> int:
        """The lines of its files that are code."""
        return sum(lines_of_code((HERE / file).read_text()) for file in (self.file, *self.includes))


PEERS = (
    Peer(name=BY_HAND, file="by_hand.py", strategies=("ddp", "fsdp"), package="torch"),
    Peer(
        name="Accelerate",
        file="with_accelerate.py",
        strategies=("ddp",),
        package="accelerate",
    ),
    Peer(
        name="Lightning Fabric",
        file="with_fabric.py",
        strategies=("ddp",),
        package="lightning",
    ),
    Peer(
        name="Lightning Trainer",
        file="with_lightning.py",
        strategies=("ddp",),
        package="lightning",
    ),
    Peer(
        name="Hugging Face Trainer",
        file="with_transformers.py",
        strategies=("ddp",),
        package="transformers",
    ),
    Peer(
        name="Ray actors",
        file="with_ray_actors.py",
        strategies=("ddp", "fsdp"),
        package="ray",
        uses_torchrun=False,
        includes=("by_hand.py",),
    ),
    Peer(
        name="Ray Train",
        file="with_ray_train.py",
        strategies=("ddp",),
        package="ray",
        uses_torchrun=False,
    ),
    Peer(
        name="Trireme",
        file="with_trireme.py",
        strategies=("ddp", "fsdp"),
        package="ray",
        uses_torchrun=False,
    ),
    Peer(
        name="Trireme under torchrun",
        file="with_trireme.py",
        strategies=("ddp", "fsdp"),
        package="torch",
    ),
)


def peers_named(only: str) -> list[Peer]:
    """The peers with these names, in the order of `PEERS`.

    Args:
        only: Their names in any case, with commas between.

    Raises:
        click.ClickException: No peer has one of the names.
    """
    names = {name.strip().lower() for name in only.split(",")}
    peers = [peer for peer in PEERS if peer.name.lower() in names]
    unknown = names - {peer.name.lower() for peer in peers}
    if unknown:
        known = ", ".join(peer.name for peer in PEERS)
        raise click.ClickException(f"--only: no peer is called {min(unknown)!r}: write {known}")
    return peers


def _trireme_keys(model: str, strategy: str, folder: Path) -> list[str]:
    work = workload(model)
    return [
        "task=experiments.benchmarks.peers.with_trireme:Peer",
        f"task_args.name={model}",
        f"strategy={strategy}",
        f"workers={WORKERS}",
        f"run.storage={folder}",
        "run.name=peer",
        f"train.steps={work.steps}",
        f"train.global_batch_size={work.batch}",
        f"train.log_every={LOG_EVERY}",
        f"train.clip_norm={CLIP_NORM}",
        f"optimizer.lr={LR}",
        f"optimizer.weight_decay={WEIGHT_DECAY}",
    ]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One training, from its command to its end.

    Attributes:
        whole: Seconds from the command to its end.
        start: Seconds from the command to the first step.
        end: Seconds from the beginning of the last step to the end.
        step: The median seconds of a step.
        memory: The most memory of a worker, bytes.
    """

    whole: float
    start: float
    end: float
    step: float
    memory: float


def lines_of_code(source: str) -> int:
    """The lines that have a token which is neither a comment nor a text of its own."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    previous = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and previous in ignored
        if token.type not in (*ignored, tokenize.ENDMARKER) and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        previous = token.type
    return len(lines)


def environment_of(records: Path, uri: str) -> dict[str, str]:
    """The environment variables of a training's processes.

    Args:
        records: The folder in which they write down their steps.
        uri: MLflow's.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "MLFLOW_TRACKING_URI": uri,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RAY_AUTH_MODE": "disabled",
        "RAY_TRAIN_V2_ENABLED": "1",
        FOLDER: str(records),
    }
    # Where it is set, as in many images, each process would compile its modules again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


@dataclass(frozen=True, kw_only=True)
class RunningRay:
    """A Ray that runs before the commands do, and stays.

    Attributes:
        address: What `RAY_ADDRESS` is.
        records: The folder in which its workers write down their steps.
    """

    address: str
    records: Path


@contextlib.contextmanager
def running_ray(uri: str) -> Iterator[RunningRay]:
    """Starts a Ray on this machine with a CPU for each worker, and ends it.

    Its workers have the environment variables of this Ray, not those of the commands.

    Args:
        uri: MLflow's.

    Raises:
        click.ClickException: Ray does not start.
    """
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as name:
        records = Path(name, "steps")
        records.mkdir()
        log = Path(name, "ray.log")
        port = free_port()
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--head",
            "--block",
            f"--port={port}",
            f"--num-cpus={WORKERS}",
            "--include-dashboard=false",
            "--node-ip-address=127.0.0.1",
            f"--temp-dir={name}",
        ]
        with log.open("w") as out:
            process = subprocess.Popen(
                command,
                cwd=name,
                env=environment_of(records, uri),
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            while "Ray runtime started" not in log.read_text():
                if process.poll() is not None:
                    raise click.ClickException(f"Ray does not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.1)
            yield RunningRay(address=f"127.0.0.1:{port}", records=records)
        finally:
            # `ray start --block` ends what it has started before it ends itself.
            process.terminate()
            process.wait()


def measure(
    command: Sequence[str],
    *,
    steps: int,
    folder: Path,
    uri: str,
    cluster: RunningRay | None = None,
) -> Measurement:
    """Runs a command to its end.

    Args:
        command: Of a peer.
        steps: How many steps it trains.
        folder: Where it runs, empty.
        uri: MLflow's.
        cluster: The Ray that runs already; None if a command starts its own.

    Raises:
        click.ClickException: The command failed, or its steps are not those that were asked for.
    """
    if cluster is None:
        records = folder / "steps"
        records.mkdir()
        environment = environment_of(records, uri)
    else:
        records = cluster.records
        for earlier in records.iterdir():
            earlier.unlink()
        environment = environment_of(records, uri) | {"RAY_ADDRESS": cluster.address}
    began = time.time()
    try:
        process = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise click.ClickException(f"{' '.join(command)} took longer than {TIMEOUT:g} s") from None
    ended = time.time()
    if process.returncode:
        raise click.ClickException(f"{' '.join(command)} failed:\n{process.stdout[-3000:]}")
    processes = [steps_of(file.read_bytes()) for file in sorted(records.iterdir())]
    workers = trained_steps(processes, steps)
    if workers is None:
        counts = [len(process) for process in processes]
        raise click.ClickException(
            f"{' '.join(command)}: {WORKERS} workers were to train {steps} steps each, and its "
            f"processes have called the model {counts} times"
        )
    starts = [worker[0][0] for worker in workers]
    last_steps = [worker[-1][0] for worker in workers]
    return Measurement(
        whole=ended - began,
        start=max(starts) - began,
        end=ended - max(last_steps),
        step=statistics.median(step_seconds(workers[0])),
        memory=max(worker[-1][1] for worker in workers),
    )


def steps_of(record: bytes) -> Steps:
    """The steps of one process: when each began, in seconds, and its memory, in bytes."""
    return [(began, memory) for began, memory in RECORD.iter_unpack(record)]


def trained_steps(processes: Sequence[Steps], steps: int) -> list[Steps] | None:
    """The steps of each worker; None if some worker has not trained as many as it should.

    Trireme calls the model before it trains, to read it: in the driver, which is no worker, or
    under torchrun in one of the workers, whose last steps are those that it trains.

    Args:
        processes: The steps of each process.
        steps: How many each worker trains.
    """
    workers = [process for process in processes if len(process) >= steps]
    readers = [process for process in processes if len(process) != steps]
    if len(workers) != WORKERS or len(readers) > 1:
        return None
    return [worker[-steps:] for worker in workers]


def step_seconds(steps: Steps) -> list[float]:
    """How long the steps took that do not warm up."""
    times = [began for began, _ in steps[FIRST_STEPS:]]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def take_turns(
    peers: Sequence[Peer],
    *,
    model: str,
    strategy: str,
    turns: int,
    uri: str,
    cluster: RunningRay | None = None,
) -> Iterator[tuple[str, Measurement]]:
    """Measures all peers, and as often as there are turns; every second turn backwards.

    Args:
        peers: In the order of the first turn.
        model: A workload's name.
        strategy: ddp or fsdp.
        turns: How often.
        uri: MLflow's.
        cluster: The Ray that runs already; None if each command starts its own.
    """
    for turn in range(turns):
        for peer in peers if turn % 2 == 0 else reversed(peers):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                command = peer.command(model=model, strategy=strategy, folder=Path(folder))
                steps = workload(model).steps
                measurement = measure(
                    command, steps=steps, folder=Path(folder), uri=uri, cluster=cluster
                )
                yield peer.name, measurement


def rows_of(measurements: Measurements, lines: Mapping[str, int]) -> list[dict[str, str]]:
    """The table: a row for each peer, medians over the turns.

    Args:
        measurements: Of each peer.
        lines: The lines of code of each peer.
    """
    base = [measurement.step for measurement in measurements[BY_HAND]]
    rows = []
    for name, peer in measurements.items():
        steps = [measurement.step for measurement in peer]
        low, high = interval(base, steps)
        rows.append(
            {
                "": name,
                "whole, s": _median_and_range([m.whole for m in peer]),
                "to the first step, s": f"{statistics.median(m.start for m in peer):.1f}",
                "after the last, s": f"{statistics.median(m.end for m in peer):.1f}",
                "step, ms": f"{1e3 * statistics.median(steps):.1f}",
                # Of turns that follow one another, as the interval is: a machine's speed varies.
                "beside by hand": f"{statistics.median(ratios(base, steps)):.3f} "
                f"({low:.3f} to {high:.3f})",
                "memory of a worker, MB": f"{max(m.memory for m in peer) / 1e6:.0f}",
                "lines of code": str(lines[name]),
            }
        )
    return rows


def _median_and_range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


@contextlib.contextmanager
def mlflow_database() -> Iterator[str]:
    """An MLflow database that exists already, as a user's does after the first run."""
    with tempfile.TemporaryDirectory() as folder:
        uri = f"sqlite:///{folder}/mlflow.db"
        create = f"import mlflow; mlflow.MlflowClient({uri!r}).search_experiments()"
        subprocess.run([sys.executable, "-c", create], check=True, capture_output=True)
        yield uri


@click.command()
@click.option("--model", type=click.Choice(list(WORKLOADS)), default="gpt", show_default=True)
@click.option("--strategy", type=click.Choice(["ddp", "fsdp"]), default="ddp", show_default=True)
@click.option("--turns", default=5, show_default=True, help="Trainings of each peer.")
@click.option("--only", help="Names of peers, with commas between; by hand is always among them.")
@click.option(
    "--running-ray",
    "uses_running_ray",
    is_flag=True,
    help="Commands of Ray join one that runs already, instead of starting their own.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, every measurement.")
def main(
    model: str,
    strategy: str,
    turns: int,
    only: str | None,
    uses_running_ray: bool,
    as_json: bool,
) -> None:
    """Measures whole commands: the same training by hand, with other libraries, with Trireme.

    The extra `benchmarks` installs the others. A turn takes four minutes on two cores.
    """
    named = [peer.name for peer in peers_named(only)] if only else None
    peers = []
    for peer in PEERS:
        is_chosen = named is None or peer.name in (BY_HAND, *named)
        if not is_chosen or strategy not in peer.strategies:
            continue
        if find_spec(peer.package) is None:
            raise click.ClickException(
                f"{peer.name} is not installed: pip install '.[benchmarks]', or leave it out "
                "with --only"
            )
        peers.append(peer)
    measurements: Measurements = defaultdict(list)
    with contextlib.ExitStack() as stack:
        uri = stack.enter_context(mlflow_database())
        cluster = stack.enter_context(running_ray(uri)) if uses_running_ray else None
        for name, measurement in take_turns(
            peers, model=model, strategy=strategy, turns=turns, uri=uri, cluster=cluster
        ):
            measurements[name].append(measurement)
            print(f"{name}: {measurement.whole:.1f} s", file=sys.stderr)
    in_order = {peer.name: measurements[peer.name] for peer in peers}
    results = {name: [asdict(m) for m in peer] for name, peer in in_order.items()}
    lines = {peer.name: peer.lines for peer in peers}
    show("peers", json.loads(json.dumps(results)), rows_of(in_order, lines), as_json=as_json)
