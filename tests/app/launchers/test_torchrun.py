"""What ranks of torchrun tell one another through a store; one process plays all ranks."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from app.config_io import load_config
from app.errors import UserError
from app.heartbeat import Heartbeat
from app.job import Place
from app.launchers import torchrun
from app.launchers.torchrun import Environment, StoreHeartbeat, TorchrunWorkers
from tests.running import wait_until


def test_who_has_started_this_process() -> None:
    ours = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Environment.read(ours) == Environment(3, 4, 1, 2)
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    assert Environment.read(slurm) == Environment(3, 4, 1, 4)
    with pytest.raises(UserError, match="finds neither RANK nor SLURM_PROCID"):
        Environment.read({"RANK": "3"})


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the three ranks of a job whose store is here."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr("app.launchers.heartbeats.PERIOD_SECONDS", 0.05)

    def rank(number: int) -> Any:
        return SimpleNamespace(store=store, place=Place(number, 3, number, torch.device("cpu")))

    return rank


def job(hang_seconds: float) -> Any:
    config = load_config([], ["task=tests.tasks:Points", f"fault.hang_seconds={hang_seconds}"])
    return SimpleNamespace(config=config, attempt="x")


def test_the_driver_hears_and_asks_every_rank_and_has_one_ended(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(torchrun, "_kill", ended.append)
    made, main = job(10.0), threading.get_ident()
    hearts = [Heartbeat("training", 3 + rank) for rank in range(3)]
    workers: Any = TorchrunWorkers(ranks(0), lambda job: None)
    workers.training, workers.watched = SimpleNamespace(ended=lambda: None), True
    beats = [StoreHeartbeat(made, ranks(rank), hearts[rank], main) for rank in range(3)]
    workers.heartbeat, workers.store = beats[0], torchrun._watch_store(made, ranks(0))
    try:
        events: list[Any] = []
        found = wait_until(lambda: _all_three(workers, events), 20)
        assert {rank: status.step for rank, status in found.statuses.items()} == {0: 3, 1: 4, 2: 5}
        assert [event["info"].rank for event in events] == [0, 1, 2] and events[0]["info"].pid == os.getpid()
        hearts[2].step = 9
        wait_until(lambda: workers.poll(False).statuses[2].step == 9, 20)
        stacks = workers.ask("stack")
        assert set(stacks) == {0, 1, 2} and all("test_torchrun.py" in stack for stack in stacks.values())
        workers.kill([event["info"] for event in events[2:]])
        wait_until(lambda: ended, 20)
        assert set(ended) == {os.getpid()}, "a rank's neighbour on its host ends it"
    finally:
        for beat in beats:
            beat.close()


def _all_three(workers: Any, events: list[Any]) -> Any:
    found = workers.poll(False)
    events += found.events
    return found if len(found.statuses) == 3 else None


def test_the_first_rank_is_watched_by_the_others(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(torchrun, "_kill", ended.append)
    monkeypatch.setattr(torchrun.os, "_exit", lambda code: ended.append(-code))
    monkeypatch.setattr(torchrun, "SILENT_SECONDS", 1.0)
    made = job(0.3)
    first, second = (StoreHeartbeat(made, ranks(rank), Heartbeat()) for rank in (0, 1))
    time.sleep(1.5)
    assert not ended
    first.close()  # as if it were stopped
    wait_until(lambda: -1 in ended, 20)
    second.close()
    assert ended[0] == os.getpid(), "it may hold up what waits for its end"
