"""Unplanned faults, at steps that are drawn from a seed.

A run ends with the same bits, or with a clear sentence. Nobody waits for a minute without one, and
nothing is left behind. A table of all faults is printed at the end.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.faults.host import (
    PACE,
    RUN,
    TORCHRUN,
    TWO,
    Host,
    Started,
    kill,
    memory_group,
    reached,
)
from tests.lab import NEEDS_LAB, Lab
from tests.running import committed, curve, flip, same_bits, weights

pytestmark = NEEDS_LAB
SEED = int(os.environ.get("SEED", "24"))
SILENCE_SECONDS = 60.0
"""How long a user may see nothing new."""
ADDRESS = "127.0.0.1:6399"
RAY = str(Path(sys.executable).with_name("ray"))
RAY_HEAD = [
    RAY,
    "start",
    "--head",
    "--block",
    "--port=6399",
    "--num-cpus=2",
    "--include-dashboard=false",
    "--object-store-memory=100000000",
    "--node-ip-address=127.0.0.1",
]
HOW_TO_CONTINUE = "run the same command again to continue"
SAME_BITS = "same bits"
TABLE = f"{f'fault (seed {SEED})':<52} {'how the run ended':<34} {'silent':>7}   left behind"


class Site:
    """Where runs are disturbed.

    Args:
        host: The host.
        truth: The storage of a run that was not disturbed.

    Attributes:
        left_before: What is on the host when a test begins.
        note: Takes a line of the table.
    """

    def __init__(self, host: Host, truth: Path) -> None:
        self.host = host
        self.truth = weights(truth / "run")
        self.left_before = host.left()
        self.note: Callable[[str, object], None]

    def run_shell(self, commands: str) -> None:
        """Run shell commands in the host's mounts and network."""
        shell = self.host.lab.run(0, ["timeout", "20", "sh", "-c", commands])
        assert shell.returncode == 0, shell.stdout + shell.stderr

    def seen_from_here(self, path: Path) -> Path:
        """Where this process finds what the host has at a path."""
        return Path(f"/proc/{self.host.lab.first_process(0)}/root{path}")

    def start(self, storage: Path, *more: str, env: dict[str, str] | None = None) -> Started:
        """Start a run with two workers on Ray."""
        words = ["train", *RUN, PACE, *TWO, f"run.storage={storage}", *more]
        return self.host.start(*words, env=env)

    def start_without_ray(
        self, storage: Path, *more: str, env: dict[str, str] | None = None
    ) -> Started:
        """Start a run with two ranks under torchrun, for faults that do not concern Ray."""
        words = ["train", *RUN, PACE, "strategy=ddp", f"run.storage={storage}", *more]
        return self.host.start(*words, program=TORCHRUN, env=env)

    def check(
        self,
        fault: str,
        run: Started,
        storage: Path,
        *,
        outcome: str = SAME_BITS,
        code: int = 0,
    ) -> None:
        """Wait for a run's end, check what holds for every fault, and add a line to the table.

        Args:
            fault: What was done.
            run: The run, of which no longer silence is allowed than SILENCE_SECONDS.
            storage: Its storage.
            outcome: How it ended, for the table. If it ends with SAME_BITS, the weights must be
                those of the undisturbed run.
            code: The exit code.
        """
        assert run.wait() == code, run.lines.text
        silence = run.longest_silence()
        left, _ = self.host.settled(self.left_before)
        remains = str(left) if any(left.values()) else "nothing"
        self.note(TABLE, f"{fault:<52} {outcome:<34} {silence:>5.1f} s   {remains}")
        if outcome.endswith(SAME_BITS):
            assert same_bits(weights(storage / "run"), self.truth), run.lines.text
        assert silence <= SILENCE_SECONDS, run.lines.heard
        assert remains == "nothing"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Lab(1) as lab:
        host = Host(lab)
        truth = lab.shared / "truth"
        words = ["train", *RUN, "strategy=ddp", f"run.storage={truth}"]
        run = host.start(*words, program=TORCHRUN)
        assert run.wait() == 0, run.lines.text
        host.settled()
        yield Site(host, truth)


@pytest.fixture
def storage(site: Site, request: pytest.FixtureRequest) -> Path:
    """A new folder for the runs of one test, which the host and this process see."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)
    return site.host.lab.shared / name


@pytest.fixture(autouse=True)
def end_processes(site: Site, record_property: Callable[[str, object], None]) -> Iterator[None]:
    site.note = record_property
    site.left_before = site.host.left()  # what an earlier fault has left is not this one's
    yield
    site.host.end_processes()


def step_of(fault: str) -> int:
    """When a fault happens: always at the same step for a seed."""
    return 5 * random.Random(f"{SEED} {fault}").randint(1, 6)


# --- processes ------------------------------------------------------------------------------------


def _stop_a_worker(site: Site, storage: Path, seconds: int) -> Started:
    """Stop a worker for a while, and check the end of its run."""
    run = site.start(storage)
    reached(storage / "run", step_of(f"stop {seconds}"))
    worker = site.host.worker(storage, 1)
    worker.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.send_signal(signal.SIGCONT)
    site.check(f"a worker stopped for {seconds} s and continued", run, storage)
    return run


def test_a_worker_that_is_stopped_for_a_short_time_goes_on(site: Site, storage: Path) -> None:
    _stop_a_worker(site, storage, 5)


def test_a_worker_that_is_stopped_for_a_long_time_is_replaced(site: Site, storage: Path) -> None:
    """After 60 s it is continued, and can do nothing."""
    run = _stop_a_worker(site, storage, 60)
    assert "does not answer" in run.lines.text, run.lines.text


@pytest.mark.parametrize("process", ["/raylet", "/gcs_server", "ray::RuntimeEnvAgent"])
def test_a_process_of_the_runs_own_ray_is_killed(site: Site, storage: Path, process: str) -> None:
    run = site.start(storage)
    reached(storage / "run", step_of(process))
    kill(site.host.find(process))
    site.check(f"{process.strip('/')} of the run's own Ray killed", run, storage)


def test_a_clusters_head_is_killed_and_comes_back(site: Site, storage: Path) -> None:
    """The run ends with a sentence, and the same command continues it at the new head."""
    env = {"RAY_ADDRESS": ADDRESS, "RAY_AUTH_MODE": "disabled"}
    with cluster_head(site) as head:
        run = site.start(storage, env=env)
        reached(storage / "run", step_of("head"))
        for process in (*head.children(recursive=True), head):
            with contextlib.suppress(psutil.NoSuchProcess):
                kill(process)
        assert run.wait() == 1, run.lines.text
        run.lines.when(HOW_TO_CONTINUE, 10)
    with cluster_head(site):
        second_start = site.start(storage, env=env)
        assert second_start.wait() == 0, second_start.lines.text
        assert "continuing after step" in second_start.lines.text, second_start.lines.text
    site.check(
        "a cluster's head killed, and brought back",
        run,
        storage,
        outcome=f"clear end; then {SAME_BITS}",
        code=1,
    )


@contextlib.contextmanager
def cluster_head(site: Site) -> Iterator[psutil.Process]:
    """A Ray head on the host."""
    head = site.host.start(program=RAY_HEAD, env={"RAY_AUTH_MODE": "disabled"})
    head.lines.when("Ray runtime started", 90)
    try:
        yield head.process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            head.process.send_signal(signal.SIGTERM)
        head.wait()
        shutil.rmtree(site.seen_from_here(Path("/tmp/ray")), ignore_errors=True)


def test_of_two_drivers_one_trains_and_the_other_is_refused(site: Site, storage: Path) -> None:
    """Either may train; the other ends and says which process does."""
    runs = [site.start(storage) for _ in range(2)]
    codes = [run.wait() for run in runs]
    assert sorted(codes) == [0, 2], [run.lines.text for run in runs]
    training = runs[codes.index(0)]
    refused = runs[codes.index(2)]
    assert "is being trained by process" in refused.lines.text, refused.lines.text
    site.check("two drivers at once", training, storage)


# --- storage --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StorageFault:
    """What is done to a storage, for how many seconds, and what undoes it.

    {0} stands for the storage.
    """

    disturb: str
    seconds: int
    mend: str


STORAGE_FAULTS = {
    "full": StorageFault("head -c 64M /dev/zero > {0}/ballast || true", 4, "rm {0}/ballast"),
    "read-only": StorageFault(
        "mount --bind {0} {0}; until mount -o remount,bind,ro {0}; do sleep 0.05; done",
        4,
        "umount -l {0}",
    ),
    "hanging": StorageFault("fsfreeze -f {0}", 12, "fsfreeze -u {0}"),
    # As when a server goes away: an empty folder is in its place.
    "gone": StorageFault("mount -t tmpfs tmpfs {0}", 8, "umount {0}"),
}


@pytest.mark.parametrize("name", STORAGE_FAULTS)
def test_a_run_outlives_a_storage_that_fails_for_a_while(
    site: Site, storage: Path, name: str
) -> None:
    """The storage is a file system of its own on a loop device."""
    fault = STORAGE_FAULTS[name]
    image = storage.with_suffix(".img")
    storage_of_model = storage.with_suffix(".kept")
    storage.mkdir()
    site.run_shell(
        f"truncate -s 64M {image} && mkfs.ext4 -q {image} && mount -o loop {image} {storage}"
    )
    mounted = site.seen_from_here(storage)
    try:
        run = site.start_without_ray(storage)
        reached(mounted / "run", step_of(name))
        site.run_shell(fault.disturb.format(storage))
        time.sleep(fault.seconds)
        site.run_shell(fault.mend.format(storage))
        assert run.wait() == 0, run.lines.text
        shutil.copytree(mounted / "run" / "model", storage_of_model / "run" / "model")
    finally:
        site.run_shell(f"umount -l {storage}")
    site.check(f"the storage: {name} for a while", run, storage_of_model)


CHECKPOINT_FILES = {".metadata", "COMMIT.json", "__0_0.distcp", "__1_0.distcp"}
"""The table, the marker, and the shards of each rank."""


def test_ranks_continue_before_a_damaged_checkpoint(site: Site, storage: Path) -> None:
    """A bit is flipped in each file of the newest one."""
    first_run = site.start_without_ray(storage)
    reached(storage / "run", 30)
    first_run.process.send_signal(signal.SIGTERM)
    assert first_run.wait() != 0, first_run.lines.text
    assert HOW_TO_CONTINUE in first_run.lines.text, first_run.lines.text
    *_, previous_step, newest_step = committed(storage / "run")
    (newest,) = (storage / "run" / "checkpoints").glob(f"step-{newest_step:08}-*")
    assert {file.name for file in newest.iterdir()} == CHECKPOINT_FILES
    for file in newest.iterdir():
        copy = shutil.copytree(storage, storage.with_name(f"flipped-{file.name}"))
        flip(copy / file.relative_to(storage))
        run = site.start_without_ray(copy)
        site.check(f"the newest checkpoint: a bit flipped in {file.name}", run, copy)
        assert f"continuing after step {previous_step}" in run.lines.text, run.lines.text
        assert "is skipped" in run.lines.text, run.lines.text


# --- MLflow, clocks, memory -----------------------------------------------------------------------


BROKEN_SERVER = """
import http.server, sys, time
how = sys.argv[1]
class Answer(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(20 if how == "slow" else 0)
        self.send_response(503 if how == "503" else 200)
        self.send_header("Content-Length", "400")
        self.end_headers()
        self.wfile.write(b'{"experiment": {' + b" " * (384 if how == "503" else 20))
    do_GET = do_POST = answer
    def log_message(self, *words): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 5005), Answer).serve_forever()
"""


@pytest.mark.parametrize("how", ["503", "slow", "half an answer"])
def test_a_run_finishes_although_mlflow_is_broken(site: Site, storage: Path, how: str) -> None:
    """Its metrics wait on disk."""
    server = site.host.start(program=[sys.executable, "-c", BROKEN_SERVER, how])
    try:
        env = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:5005"}
        run = site.start_without_ray(storage, "tracking.flush_timeout=5", env=env)
        assert run.wait() == 0, run.lines.text
        assert "`trireme sync" in run.lines.text, run.lines.text
    finally:
        kill(server.process)
        server.popen.wait()
    site.check(f"MLflow: {how}", run, storage)


def test_a_workers_clock_may_be_an_hour_ahead_of_the_drivers(site: Site, storage: Path) -> None:
    """Two ranks as Slurm would start them."""
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not libraries:
        pytest.skip("needs Debian's faketime")
    # All clocks are changed: otherwise libfaketime 0.9.10 makes sleep fail.
    fake_time = {"LD_PRELOAD": str(libraries[0]), "FAKETIME": "+3600"}
    slurm = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29617",
    }
    words = ["train", *RUN, PACE, "strategy=ddp", "launcher=torchrun", f"run.storage={storage}"]
    rank_0_env = {**slurm, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    rank_1_env = {**slurm, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", **fake_time}
    rank_0 = site.host.start(*words, env=rank_0_env)
    rank_1 = site.host.start(*words, env=rank_1_env)
    assert rank_1.wait() == 0, rank_0.lines.text + rank_1.lines.text
    site.check("a worker's clock is an hour off", rank_0, storage)
    assert len(curve(storage, "run")) > 5


def test_a_run_outlives_a_worker_that_the_kernel_kills_for_memory(
    site: Site, storage: Path
) -> None:
    trigger = Path(f"{storage}.hungry")
    truth = storage.with_suffix(".truth")
    with memory_group(64 << 20) as group:
        task = ["task=tests.tasks:Hungry", f"task_args={{hungry: {trigger}, step_seconds: 0.1}}"]
        run = site.start(storage, *task)
        reached(storage / "run", step_of("memory"))
        worker = site.host.worker(storage, 1)
        (group / "cgroup.procs").write_text(str(worker.pid))
        trigger.touch()
        assert run.wait() == 0, run.lines.text
    assert "killed by the kernel for lack of memory" in run.lines.text, run.lines.text
    undisturbed = site.start(truth, "task=tests.tasks:Plain", "task_args.step_seconds=0")
    assert undisturbed.wait() == 0, undisturbed.lines.text
    assert same_bits(weights(storage / "run"), weights(truth / "run"))
    site.check("out of memory, by the kernel", run, storage, outcome="same bits as of its task")


# --- hosts ----------------------------------------------------------------------------------------

IMPATIENT_RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_timeout_ms": "2000",
}


def _start_node(host: Host, *arguments: str) -> None:
    """Start Ray on a host, with one CPU."""
    command = [
        RAY,
        "start",
        *arguments,
        f"--node-ip-address={host.lab.address(host.number)}",
        "--num-cpus=1",
        "--block",
        "--object-store-memory=100000000",
    ]
    node = host.start(program=command, env=IMPATIENT_RAY)
    node.lines.when("Ray runtime started", 90)


@pytest.mark.parametrize("launcher", ["ray", "actors"])
def test_hosts_are_cut_off_and_come_back(site: Site, launcher: str) -> None:
    """The run continues with three hosts, with two, and with all four when the others are back.

    It has the curve of one process.
    """
    with Lab(4) as lab:
        hosts = [Host(lab, number) for number in range(4)]
        storage = lab.shared / "runs"
        truth = lab.shared / "one"
        address = f"{lab.address(0)}:6399"
        _start_node(hosts[0], "--head", "--port=6399", "--include-dashboard=false")
        for host in hosts[1:]:
            _start_node(host, f"--address={address}")
        words = [
            "train",
            *RUN,
            PACE,
            "task=tests.tasks:Plain",  # no dropout, which differs between numbers of workers
            "train.global_batch_size=12",
            "strategy=ddp",
            "train.steps=600",
            "fault.elastic_seconds=5",
        ]
        env = IMPATIENT_RAY | {"RAY_ADDRESS": address}
        run = hosts[0].start(
            *words, f"launcher={launcher}", "workers=4", f"run.storage={storage}", env=env
        )
        reached(storage / "run", step_of("partition"))
        for number in (3, 2):
            lab.cut(number)
            run.lines.when(f"continuing with {number} of 4 workers", 90)
            reached(storage / "run", committed(storage / "run")[-1] + 10)
        for number in (3, 2):
            lab.mend(number)
            _start_node(hosts[number], f"--address={address}")
        run.lines.when("continuing with 4 of 4 workers", 90)
        assert run.wait() == 0, run.lines.text
        undisturbed = hosts[0].start(
            *words, "launcher=local", "task_args.step_seconds=0", f"run.storage={truth}"
        )
        assert undisturbed.wait() == 0, undisturbed.lines.text
        assert curve(storage, "run") == pytest.approx(curve(truth, "run"), rel=1e-4, abs=0)
        workers = list(curve(storage, "run", "fault/workers").values())
        # The two hosts that come back may be taken one by one.
        assert workers[:2] == [3.0, 2.0]
        assert workers[-1] == 4.0
        site.check(
            f"hosts cut off from each other, {launcher}",
            run,
            storage,
            outcome="same curve, with 4, 3, 2, 4 workers",
        )
