"""What a training process sets for all that it does, in a process of its own."""

import os
import subprocess
import sys

FAULTS = """
import os, resource, threading
import numpy as np
import torch
from app.training.process import freed_memory_stays

def train():
    before = 0
    for step in range(20):
        if step == 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [np.ones(300_000, np.float32) for _ in range(100)]
        del activations
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

def pages():
    return int(open("/proc/self/statm").read().split()[1])

train()
before = pages()
with freed_memory_stays(torch.device("cpu")):
    train()
    thread = threading.Thread(target=train)  # as Ray Train does
    thread.start()
    thread.join()
print(pages() - before)
os.environ["MALLOC_TRIM_THRESHOLD_"] = "100000"  # who chooses settings, keeps them
with freed_memory_stays(torch.device("cpu")):
    train()
"""
"""Prints how many pages ten steps get anew, and how many more the process has at the end."""


def test_freed_memory_stays_for_the_next_step_and_is_returned_at_the_end() -> None:
    program = [sys.executable, "-c", FAULTS]
    chosen = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    result = subprocess.run(program, env=variables, capture_output=True, text=True, check=True)
    by_default, kept, kept_in_thread, more_pages, chosen_otherwise = map(int, result.stdout.split())
    assert by_default > 10_000, "glibc has changed: this is not needed any more"
    assert kept < 100 and kept_in_thread < 100
    assert more_pages < 10_000, "of 30,000 that one step needs"
    assert chosen_otherwise > 10_000
