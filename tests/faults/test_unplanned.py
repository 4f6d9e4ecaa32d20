"""Faults that nobody planned, at steps drawn from a seed: the run ends with the same bits, or with a clear sentence;
nobody waits for a minute without one; nothing is left behind. The table is shown at the end."""

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.host import PACE, RUN, TORCHRUN, TWO, Host, Started, kill, memory_group, reached
from tests.lab import NEEDS_LAB, Lab
from tests.running import committed, curve, flip, same_bits, weights

pytestmark = NEEDS_LAB
SEED = int(os.environ.get("SEED", "24"))
SILENCE_SECONDS = 60.0
ADDRESS = "127.0.0.1:6399"
HEAD = [
    str(Path(sys.executable).with_name("ray")),
    "start",
    "--head",
    "--block",
    "--port=6399",
    "--num-cpus=2",
]
HEAD += [
    "--include-dashboard=false",
    "--object-store-memory=100000000",
    "--node-ip-address=127.0.0.1",
]


TABLE = f"{f'fault (seed {SEED})':<52} {'how the run ended':<34} {'silent':>7}   left behind"


class Site:
    """host: where runs are disturbed. truth: weights of the run that was not. note: takes a line of the table."""

    def __init__(self, host: Host, truth: Path) -> None:
        self.host, self.truth = host, weights(truth / "run")
        self.before = host.left()
        self.note: Callable[[str, object], None]

    def run(self, commands: str) -> None:
        """The host's shell, to its end; in its own mounts and network."""
        done = self.host.lab.run(0, ["timeout", "20", "sh", "-c", commands])
        assert done.returncode == 0, done.stdout + done.stderr

    def begin(self, storage: Path, *more: str, env: dict[str, str] | None = None) -> Started:
        return self.host.start("train", *RUN, PACE, *TWO, f"run.storage={storage}", *more, env=env)

    def two_ranks(self, storage: Path, *more: str, env: dict[str, str] | None = None) -> Started:
        """The same without Ray, for faults of which Ray has no part."""
        words = ["train", *RUN, PACE, "strategy=ddp", f"run.storage={storage}", *more]
        return self.host.start(*words, program=TORCHRUN, env=env)

    def row(
        self, fault: str, run: Started, storage: Path, end: str = "same bits", code: int = 0
    ) -> None:
        """Waits for the run's end, holds what every fault must hold, and notes it. end: for the table."""
        assert run.wait() == code, run.lines.text
        quiet, (left, _) = run.silence(), self.host.settled(self.before)
        nothing = "nothing" if not any(left.values()) else str(left)
        self.note(TABLE, f"{fault:<52} {end:<34} {quiet:>5.1f} s   {nothing}")
        assert not end.endswith("same bits") or same_bits(weights(storage / "run"), self.truth), (
            run.lines.text
        )
        assert quiet <= SILENCE_SECONDS, run.lines.heard
        assert nothing == "nothing", left


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Lab(1) as lab:
        host, truth = Host(lab), lab.shared / "truth"
        run = host.start("train", *RUN, "strategy=ddp", f"run.storage={truth}", program=TORCHRUN)
        assert run.wait() == 0, run.lines.text
        host.settled()
        yield Site(host, truth)


@pytest.fixture
def storage(site: Site, request: pytest.FixtureRequest) -> Path:
    """A new folder for the runs of one test, that the host and this process see."""
    return site.host.lab.shared / f"{re.sub(r'[^a-z0-9]+', '-', request.node.name)}"


@pytest.fixture(autouse=True)
def alone(site: Site, record_property: Callable[[str, object], None]) -> Iterator[None]:
    """What a test that failed has left does not disturb the next one."""
    site.note = record_property
    yield
    for process in site.host.processes():
        if process.pid not in site.host.own:
            with contextlib.suppress(psutil.Error):
                process.kill()


def some_step(fault: str) -> int:
    """When it happens: always the same for a seed."""
    return 5 * random.Random(f"{SEED} {fault}").randint(1, 6)


@pytest.mark.parametrize("seconds", [5, 60])
def test_a_worker_is_stopped_and_continued(site: Site, storage: Path, seconds: int) -> None:
    """After 5 s it goes on; after 60 s it has been replaced, and can do nothing."""
    run = site.begin(storage)
    reached(storage / "run", some_step(f"stop {seconds}"))
    victim = site.host.worker(storage, 1)
    victim.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.send_signal(signal.SIGCONT)
    site.row(f"a worker stopped for {seconds} s and continued", run, storage)
    assert seconds < 10 or "does not answer" in run.lines.text, run.lines.text


@pytest.mark.parametrize("victim", ["/raylet", "/gcs_server", "ray::RuntimeEnvAgent"])
def test_the_runs_own_ray_breaks(site: Site, storage: Path, victim: str) -> None:
    run = site.begin(storage)
    reached(storage / "run", some_step(victim))
    kill(site.host.find(victim))
    site.row(f"{victim.strip('/')} of the run's own Ray killed", run, storage)


def test_a_clusters_head_is_killed_and_comes_back(site: Site, storage: Path) -> None:
    """The run ends with a sentence; the same command goes on at the new head."""
    env = {"RAY_ADDRESS": ADDRESS, "RAY_AUTH_MODE": "disabled"}
    with cluster_head(site) as head:
        run = site.begin(storage, env=env)
        reached(storage / "run", some_step("head"))
        for process in (*head.children(recursive=True), head):
            with contextlib.suppress(psutil.NoSuchProcess):
                kill(process)
        assert run.wait() == 1 and run.lines.when("run the same command again to continue", 10), (
            run.lines.text
        )
    with cluster_head(site):
        again = site.begin(storage, env=env)
        assert again.wait() == 0 and "continuing after step" in again.lines.text, again.lines.text
    site.row(
        "a cluster's head killed, and brought back", run, storage, "clear end; then same bits", 1
    )


@contextlib.contextmanager
def cluster_head(site: Site) -> Iterator[psutil.Process]:
    """A Ray head on the host."""
    started = site.host.start(program=HEAD, env={"RAY_AUTH_MODE": "disabled"})
    started.lines.when("Ray runtime started", 90)
    try:
        yield started.process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            started.process.send_signal(signal.SIGTERM)
        started.wait()
        shutil.rmtree(f"/proc/{site.host.lab.first_process(0)}/root/tmp/ray", ignore_errors=True)


STORAGES = {  # what is done to it, for how many seconds, and what undoes it
    "full": ("head -c 64M /dev/zero > {0}/ballast || true", 4, "rm {0}/ballast"),
    "read-only": (
        "mount --bind {0} {0}; until mount -o remount,bind,ro {0}; do sleep 0.05; done",
        4,
        "umount -l {0}",
    ),
    "hanging": ("fsfreeze -f {0}", 12, "fsfreeze -u {0}"),
    "gone": (
        "mount -t tmpfs tmpfs {0}",
        8,
        "umount {0}",
    ),  # as where a server went: an empty folder is in its place
}


@pytest.mark.parametrize("how", STORAGES)
def test_the_storage(site: Site, storage: Path, how: str) -> None:
    """It is a file system of its own on a loop device."""
    (disturb, seconds, mend), image, kept = (
        STORAGES[how],
        storage.with_suffix(".img"),
        storage.with_suffix(".kept"),
    )
    storage.mkdir()
    site.run(f"truncate -s 64M {image} && mkfs.ext4 -q {image} && mount -o loop {image} {storage}")
    seen = Path(
        f"/proc/{site.host.lab.first_process(0)}/root{storage}"
    )  # where it is for this process
    try:
        run = site.two_ranks(storage)
        reached(seen / "run", some_step(how))
        site.run(disturb.format(storage))
        time.sleep(seconds)
        site.run(mend.format(storage))
        assert run.wait() == 0, run.lines.text
        shutil.copytree(seen / "run" / "model", kept / "run" / "model")
    finally:
        site.run(f"umount -l {storage}")
    site.row(f"the storage: {how} for a while", run, kept)


FILES = {
    ".metadata",
    "COMMIT.json",
    "__0_0.distcp",
    "__1_0.distcp",
}  # the table, the marker, each rank's shards


def test_the_newest_checkpoint_is_damaged(site: Site, storage: Path) -> None:
    """A bit in each of its files: all ranks go on from the one before."""
    half = site.two_ranks(storage)
    reached(storage / "run", 30)
    half.process.send_signal(signal.SIGTERM)
    assert half.wait() != 0 and "run the same command again to continue" in half.lines.text, (
        half.lines.text
    )
    before, last = committed(storage / "run")[-2:]
    (newest,) = (storage / "run" / "checkpoints").glob(f"step-{last:08}-*")
    assert {file.name for file in newest.iterdir()} == FILES
    for file in newest.iterdir():
        copy = shutil.copytree(storage, storage.with_name(f"flipped-{file.name}"))
        flip(copy / file.relative_to(storage))
        run = site.two_ranks(copy)
        site.row(f"the newest checkpoint: a bit flipped in {file.name}", run, copy)
        assert (
            f"continuing after step {before}" in run.lines.text and "is skipped" in run.lines.text
        ), run.lines.text


def test_two_drivers_at_once(site: Site, storage: Path) -> None:
    """One of them trains, whichever it is; the other ends and says who does."""
    both = [site.begin(storage) for _ in range(2)]
    codes = [run.wait() for run in both]
    assert sorted(codes) == [0, 2], [run.lines.text for run in both]
    refused = both[codes.index(2)]
    assert "is being trained by process" in refused.lines.text, refused.lines.text
    site.row("two drivers at once", both[codes.index(0)], storage)


BROKEN = """
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
def test_mlflow_is_broken(site: Site, storage: Path, how: str) -> None:
    """The run finishes, and its metrics wait on disk."""
    server = site.host.start(program=[sys.executable, "-c", BROKEN, how])
    try:
        run = site.two_ranks(
            storage,
            "tracking.flush_timeout=5",
            env={"MLFLOW_TRACKING_URI": "http://127.0.0.1:5005"},
        )
        assert run.wait() == 0, run.lines.text
        assert "`trireme sync" in run.lines.text, run.lines.text
    finally:
        kill(server.process)
        server.popen.wait()
    site.row(f"MLflow: {how}", run, storage)


def test_a_workers_clock_is_an_hour_off(site: Site, storage: Path) -> None:
    """Two ranks as Slurm would start them, of which the driver's clock is behind."""
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not libraries:
        pytest.skip("needs Debian's faketime")
    wrong = {
        "LD_PRELOAD": str(libraries[0]),
        "FAKETIME": "+3600",
    }  # all clocks: else its sleep is refused (0.9.10)
    ranks = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29617",
    }
    own = [{**ranks, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
    words = ["train", *RUN, PACE, "strategy=ddp", "launcher=torchrun", f"run.storage={storage}"]
    both = [site.host.start(*words, env=own[0]), site.host.start(*words, env={**own[1], **wrong})]
    assert both[1].wait() == 0, both[0].lines.text + both[1].lines.text
    site.row("a worker's clock is an hour off", both[0], storage)
    assert len(curve(storage, "run")) > 5


def test_the_kernel_ends_a_worker_for_want_of_memory(site: Site, storage: Path) -> None:
    with memory_group(64 << 20) as group:
        hungry = [
            "task=tests.tasks:Hungry",
            f"task_args={{hungry: {storage}.hungry, step_seconds: 0.1}}",
        ]
        run = site.begin(storage, *hungry)
        reached(storage / "run", some_step("memory"))
        victim = site.host.worker(storage, 1)
        (group / "cgroup.procs").write_text(str(victim.pid))
        Path(f"{storage}.hungry").touch()
        assert run.wait() == 0, run.lines.text
    assert "killed by the kernel for memory" in run.lines.text, run.lines.text
    plain = site.begin(
        storage.with_suffix(".truth"), "task=tests.tasks:Plain", "task_args.step_seconds=0"
    )
    assert plain.wait() == 0, plain.lines.text
    assert same_bits(weights(storage / "run"), weights(storage.with_suffix(".truth") / "run"))
    site.row("out of memory, by the kernel", run, storage, "same bits as of its task")


@pytest.mark.parametrize("launcher", ["ray", "actors"])
def test_hosts_are_cut_off_and_come_back(site: Site, launcher: str) -> None:
    """The run goes on with three hosts, with two, and with all four when the others are back: one curve."""
    env = {"RAY_AUTH_MODE": "disabled", "RAY_health_check_period_ms": "1000"}
    env |= {"RAY_health_check_failure_threshold": "3", "RAY_health_check_timeout_ms": "2000"}
    with Lab(4) as lab:
        hosts, storage, address = (
            [Host(lab, n) for n in range(4)],
            lab.shared / "runs",
            f"{lab.address(0)}:6399",
        )

        def join(host: Host, *own: str) -> None:
            words = [
                "start",
                *own,
                f"--node-ip-address={lab.address(host.number)}",
                "--num-cpus=1",
                "--block",
            ]
            node = host.start(program=[HEAD[0], *words, "--object-store-memory=100000000"], env=env)
            node.lines.when("Ray runtime started", 90)

        join(hosts[0], "--head", "--port=6399", "--include-dashboard=false")
        for host in hosts[1:]:
            join(host, f"--address={address}")
        plain = [
            "task=tests.tasks:Plain",
            "train.global_batch_size=12",
        ]  # no dropout, which differs between workers
        words = [
            "train",
            *RUN,
            PACE,
            *plain,
            "strategy=ddp",
            "train.steps=600",
            "fault.elastic_seconds=5",
        ]
        own = [f"launcher={launcher}", "workers=4", f"run.storage={storage}"]
        run = hosts[0].start(*words, *own, env=env | {"RAY_ADDRESS": address})
        reached(storage / "run", some_step("partition"))
        for number in (3, 2):
            lab.cut(number)
            run.lines.when(f"continuing with {number} of 4 workers", 90)
            reached(storage / "run", committed(storage / "run")[-1] + 10)
        for number in (3, 2):
            lab.mend(number)
            join(hosts[number], f"--address={address}")
        run.lines.when("continuing with 4 of 4 workers", 90)
        assert run.wait() == 0, run.lines.text
        one = hosts[0].start(
            *words,
            "launcher=local",
            "task_args.step_seconds=0",
            f"run.storage={lab.shared / 'one'}",
        )
        assert one.wait() == 0, one.lines.text
        assert curve(storage, "run") == pytest.approx(
            curve(lab.shared / "one", "run"), rel=1e-4, abs=0
        )
        workers = list(curve(storage, "run", "fault/workers").values())
        assert workers[:2] == [3.0, 2.0] and workers[-1] == 4.0, (
            "the two that come may be taken one by one"
        )
        site.row(
            f"hosts cut off from each other, {launcher}",
            run,
            storage,
            "same curve, with 4, 3, 2, 4 workers",
        )
