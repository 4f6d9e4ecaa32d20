"""Which process uses the processors when (experiments/benchmarks/peers/timeline.py)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from experiments.benchmarks.peers import timeline
from experiments.benchmarks.peers.program import Measurement

WORKER = "python -u -m experiments.benchmarks.peers.by_hand gpt ddp"


@pytest.fixture
def two_processes() -> timeline.Timeline:
    """Ten seconds: a first step after four, the last one seven after the beginning."""
    worker = timeline.Usage(title=WORKER, samples=[(101.0, 0.5), (104.0, 2.0), (107.0, 5.0)])
    server = timeline.Usage(title="/ray/gcs_server --a", samples=[(102.0, 0.25), (109.0, 1.0)])
    measurement = Measurement(whole=10.0, start=4.0, end=3.0, step=0.1, memory=1e8)
    return timeline.Timeline(
        peer="by hand", began=100.0, measurement=measurement, usages=[server, worker]
    )


def test_what_a_role_uses_is_divided_by_the_first_and_the_last_step(
    two_processes: timeline.Timeline,
) -> None:
    assert two_processes.by_role() == {
        "workers": (2.0, 3.0, 0.0),
        "Ray's server (gcs_server)": (0.25, 0.0, 0.75),
    }
    rows = timeline.rows_of({"by hand": [two_processes]})
    assert rows[0]["training"] == "3.0"
    assert rows[1]["whole"] == "5.0"


def test_the_load_over_time_adds_up_to_what_was_used(two_processes: timeline.Timeline) -> None:
    loads = two_processes.load_of("workers", [2.0, 4.0, 10.0])
    assert loads == [0.25, 0.75, 0.5]


def test_a_picture_has_a_panel_for_each_command(
    two_processes: timeline.Timeline, tmp_path: Path
) -> None:
    file = tmp_path / "timeline.png"
    timeline.draw([two_processes, two_processes], file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_processes_of_the_command_are_sampled_also_if_their_parent_has_ended() -> None:
    busy = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    # The shell ends at once; the process that it has started goes on, with its own parent gone.
    command = '"$0" -c "$1" >/dev/null 2>&1 & echo $!'
    environment = {**os.environ, "TRIREME_TIMELINE_TEST": "here"}
    with timeline.Sampler("TRIREME_TIMELINE_TEST", "here") as sampler:
        answer = subprocess.run(
            ["sh", "-c", command, sys.executable, busy],
            env=environment,
            capture_output=True,
            text=True,
        )
        pid = int(answer.stdout)
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
    assert sampler.usages[pid].samples[-1][1] > 0.3
    assert os.getpid() not in sampler.usages
