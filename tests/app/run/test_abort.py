"""A process that is ended at once says why, and flushes what it has printed."""

import subprocess
import sys
from pathlib import Path

from tests.running import ROOT, environment

FROM_A_THREAD = """
import threading, time
from app.run.abort import abort
print("printed before", end="")
threading.Thread(target=abort, args=(7, "the sentence")).start()
try:
    time.sleep(60)
finally:
    print("cleaned up")
"""

# The main thread waits in print() with the stream's lock, for which a flush would wait for ever.
LOCKED = """
import sys, threading, time
from app.run.abort import abort
threading.Timer(1.0, abort, args=(7, "the sentence")).start()
while True:
    print("x" * 100_000)
"""

TWICE = """
import threading, time
from app.run.abort import abort
def slowly(sentence):
    time.sleep(0.5)
    print(sentence)
for name in ("first", "second"):
    threading.Thread(target=abort, args=(7, name), kwargs={"say": slowly}).start()
    time.sleep(0.1)
time.sleep(60)
"""

SUPERSEDED = """
import sys, time
from app.config.io import load_config
from app.run.manifest import Run
from app.storage import lease
lease.OWN_SECONDS, lease.END_SECONDS = 0.1, 0.5
first, second = (Run(load_config([], ["run.name=run", f"run.storage={sys.argv[1]}"])) for _ in "12")
first.open(first.config, 5, print)
second.lease.take(lease.read_lease(second.storage))
try:
    time.sleep(60)
finally:
    print("cleaned up")
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a program whose output is buffered."""
    buffered = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=buffered,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_output_is_flushed_and_no_cleanup_runs() -> None:
    process = start(FROM_A_THREAD)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (7, "printed before", "the sentence\n")


def test_a_pipe_that_nobody_reads_keeps_no_process_alive() -> None:
    process = start(LOCKED)
    assert process.wait(60) == 7
    assert process.stderr is not None
    assert process.stderr.read() == "the sentence\n"


def test_of_two_threads_that_end_the_process_the_first_says_why() -> None:
    process = start(TWICE)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, "first\n")


def test_a_start_whose_run_is_taken_over_is_ended(tmp_path: Path) -> None:
    process = start(SUPERSEDED, str(tmp_path))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert out.startswith("the run 'run' was taken over by process ")
    assert out.endswith("this start ends, and leaves everything to it\n")
