"""The same kills on Accelerate's and Lightning's own resume, with their documented settings.

Both ranks of a job under torchrun are killed (as a lost machine does), either at a random moment or while a checkpoint
is being written (something has just appeared in the checkpoints' folder); then the same command again, without cleaning
anything up by hand. What is held against the undisturbed run: which samples each step of the final weights came from,
and the weights' bits. A start that fails is counted, and from then on the newest checkpoint is removed by hand.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from experiments.benchmarks.chaos import record
from experiments.benchmarks.chaos.kills import BATCH, WORKERS
from experiments.benchmarks.chaos.session import ROOT, end_tree, environment

PEERS = {"Accelerate": "peer_accelerate", "Lightning": "peer_lightning"}
END_SECONDS = 120.0
BY_HAND = "a start that fails until the newest checkpoint is removed by hand"


@dataclass
class Found:
    kills: int = 0
    runs: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    """What went wrong, and how often."""


def measure(python: str, peer: str, kills: int, each: int, seed: int) -> Found:
    """python: of the peers' environment. each: kills of one run."""
    found, chance = Found(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="peers-") as place:
        calm = Path(place, "calm")
        calm.mkdir()
        process = start(python, peer, calm)
        if process.wait(END_SECONDS) != 0:
            raise RuntimeError(f"undisturbed, {peer} fails: {(calm / 'log').read_text()[-500:]}")
        while found.kills < kills:
            folder = Path(place, f"run-{found.runs}")
            folder.mkdir()
            one(python, peer, folder, min(each, kills - found.kills), chance, found)
            judge(folder, calm, found)
            found.runs += 1
    return found


def start(python: str, peer: str, folder: Path) -> subprocess.Popen[bytes]:
    program = [python, "-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}", "--standalone"]
    with (folder / "log").open("ab") as log:
        command = [*program, "-m", f"experiments.benchmarks.chaos.{PEERS[peer]}", str(folder)]
        own = environment(CUDA_VISIBLE_DEVICES="")
        return subprocess.Popen(command, cwd=ROOT, env=own, stdout=log, stderr=log, start_new_session=True)


def one(python: str, peer: str, folder: Path, kills: int, chance: random.Random, found: Found) -> None:
    """One run with its kills, to its end."""
    (folder / "slow").touch()
    process = start(python, peer, folder)
    for _ in range(kills):
        began = time.time()
        if not _trains(process, folder, began):
            process = _again(python, peer, folder, process, found)
            continue
        _wait(folder, chance)
        end_tree(process.pid)
        process.wait()
        found.kills += 1
        process = start(python, peer, folder)
    (folder / "slow").unlink()
    for _ in range(3):
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.wait(END_SECONDS) == 0:
                return
        end_tree(process.pid)
        process = _again(python, peer, folder, process, found)
    found.wrong["a run that does not come to its end"] += 1
    end_tree(process.pid)


def _again(
    python: str, peer: str, folder: Path, process: subprocess.Popen[bytes], found: Found
) -> subprocess.Popen[bytes]:
    """The same command after a start that failed; without the newest checkpoint, for else it would fail again."""
    process.wait()
    found.wrong[BY_HAND] += 1
    saved = sorted(folder.glob("checkpoints/*"), key=lambda path: path.stat().st_mtime)
    for path in saved[-1:]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return start(python, peer, folder)


def _trains(process: subprocess.Popen[bytes], folder: Path, since: float) -> bool:
    """Waits until steps are taken; False if the command ends before."""
    while process.poll() is None:
        newest = [s for s in record.read(folder, 2 * WORKERS) if s.lines and s.lines[-1][0] > since]
        if len(newest) >= WORKERS:
            return True
        time.sleep(0.05)
    return False


def _wait(folder: Path, chance: random.Random) -> None:
    """Until the moment of a kill: a random one, or while a checkpoint is being written."""
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0.0, 1.2))
        return
    until = time.monotonic() + 20
    before = _look(folder)
    while _look(folder) == before and time.monotonic() < until:
        time.sleep(0.0005)
    time.sleep(chance.uniform(0.0, 0.02))


def _look(folder: Path) -> set[tuple[str, int]]:
    seen = set()
    for path in folder.glob("checkpoints/**/*"):
        with contextlib.suppress(FileNotFoundError):
            seen.add((str(path), path.stat().st_size))
    return seen


def judge(folder: Path, calm: Path, found: Found) -> None:
    """What the finished run has other than the undisturbed one."""
    ours, theirs = (record.survivors(record.read(f), BATCH)[0] for f in (folder, calm))
    if ours != theirs:
        found.wrong["a run with samples lost, repeated or exchanged"] += 1
    weights = [folder / "weights.pt", calm / "weights.pt"]
    if not weights[0].exists():
        return
    one, other = (torch.load(path, weights_only=True) for path in weights)
    if not all(torch.equal(one[name], other[name]) for name in other):
        found.wrong["a run with other final weights"] += 1


def table(results: dict[str, Found]) -> str:
    """The results as Markdown."""
    what = sorted({name for found in results.values() for name in found.wrong})
    lines = ["| | kills | runs | " + " | ".join(what) + " |", "|---" * (3 + len(what)) + "|"]
    for peer, found in results.items():
        cells = [str(found.kills), str(found.runs), *(str(found.wrong[name]) for name in what)]
        lines.append(f"| {peer} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
