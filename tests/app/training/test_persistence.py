"""When a save is due, by the interval that loses the least time; the host memory of a save."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from app.checkpoint import Checkpointer, latest_good
from app.checkpoint.commit import MARKER, encode
from app.config.io import load_config, with_values
from app.data.mixture import SEED_PLUS_NUMBER, Mixture
from app.launchers.failure_policy import mean_time_between_failures
from app.storage.lease import write_lease
from app.storage.storage import Storage
from app.training import persistence
from app.training.persistence import checkpoint_interval
from strategies.state import host_copy
from tests.app.kit import logged, training_of
from tests.chain import config
from tests.tasks import Plain

pytestmark = pytest.mark.pure


def test_the_interval_loses_the_least_time() -> None:
    def lost(seconds: float, stall: float, mean: float) -> float:
        """Share of the time lost to failures (a Poisson process) if a restart costs nothing."""
        return 1 - seconds / (mean * math.expm1((seconds + stall) / mean))

    for stall, mean in ((0.5, 60.0), (2.0, 3600.0), (30.0, 3600.0)):
        best = checkpoint_interval(stall, 0.0, mean)
        around = [lost(best * factor, stall, mean) for factor in (0.8, 0.9, 1.0, 1.1, 1.25)]
        assert min(around) == around[2], (stall, mean, around)
    assert checkpoint_interval(0.001, 5.0, 60.0) == 5.0, "no sooner than the one before is written"
    assert checkpoint_interval(100.0, 1.0, 10.0) == 10.0, "saving costs more than failing"
    assert mean_time_between_failures(0, 0.0, 1) == 30 * 86400
    assert mean_time_between_failures(0, 0.0, 30) == 86400
    assert mean_time_between_failures(9, 3600.0, 2592000) == pytest.approx(360.1)


def test_a_save_is_due_by_the_measured_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    saving: Any = object.__new__(persistence.Persistence)
    config = load_config([], ["task=tests.tasks:Points", "checkpoint.auto=true"])
    saving.job = SimpleNamespace(config=config, mtbf_seconds=60.0)
    saving.checkpointer = SimpleNamespace(last_total_seconds=0.1, last_stall_seconds=0.0)
    saving.longest_stall = None
    saving.saved_at = 100.0
    monkeypatch.setattr(persistence.time, "monotonic", lambda: 107.0)
    assert not saving.is_overdue(), "nothing is measured yet: a minute"
    saving.longest_stall = 0.3
    assert 7 > saving.interval() == pytest.approx(checkpoint_interval(0.3, 0.1, 60.0))
    assert saving.is_overdue()
    # The time of a GPU's copy is known only after save() has returned.
    saving.checkpointer.last_stall_seconds = 0.4
    assert saving.interval() == pytest.approx(checkpoint_interval(0.4, 0.1, 60.0))
    saving.job.config = with_values(config, {"checkpoint.auto": False})
    assert saving.interval() == 300.0


def resident(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since the peak was reset."""
    line = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert line
    return int(line[1]) * 1024


def test_trained_weights_are_in_host_memory_once_while_they_are_written(tmp_path: Path) -> None:
    weights = {f"block.{number}": torch.randn(1 << 22) for number in range(4)}
    nbytes = sum(weight.nbytes for weight in weights.values())
    saving: Any = object.__new__(persistence.Persistence)
    saving.job = SimpleNamespace(
        config=load_config([], ["task=tests.tasks:Points"]), folder=str(tmp_path)
    )
    saving.place = SimpleNamespace(rank=0)
    saving.parallel = SimpleNamespace(
        full_model_state=lambda: {name: host_copy(weight) for name, weight in weights.items()}
    )
    saving.checkpointer = Checkpointer(str(tmp_path / "checkpoints"))
    before = resident("VmRSS")
    saving.checkpointer.save({"model": weights}, meta={"step": 1})
    saving.checkpointer.wait()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on: man 5 proc
    saving.keep_weights()
    copies = (resident("VmHWM") - before) / nbytes
    assert copies < 1.4
    written = torch.load(tmp_path / "model" / "weights.pt", weights_only=True)
    assert all(torch.equal(written[name], weight) for name, weight in weights.items())


class MixedPoints(Plain):
    """Points of two sets that are mixed."""

    def train_data(self) -> Mixture:  # type: ignore[override]
        points = super().train_data()
        return Mixture([Subset(points, range(100)), Subset(points, range(100, 256))], [1, 1])


def test_a_run_that_began_with_the_former_order_of_a_mixture_keeps_it(tmp_path: Path) -> None:
    def losses(folder: str, steps: int, version: int | None = None) -> dict[int, float]:
        """Of each step, in a run that begins with a version of the order, or continues."""
        (tmp_path / folder).mkdir(exist_ok=True)
        write_lease(Storage(str(tmp_path / folder)), "attempt", 0)
        run_config = config(
            f"task={__name__}:MixedPoints",
            f"train.steps={steps}",
            "train.log_every=1",
            "tracking.log_model=false",
        )
        training, events = training_of(
            run_config, tmp_path / folder, persistence_class=persistence.Persistence
        )
        if version is not None:
            training.progress.order_version = version
        try:
            training.run()
        finally:
            training.close()
        return {event.step: event.values["train/loss"] for event in logged(events, "train/loss")}

    former = losses("former", 6, SEED_PLUS_NUMBER)
    assert losses("new", 6) != former
    assert losses("parts", 2, SEED_PLUS_NUMBER) == {step: former[step] for step in (1, 2)}
    commit, _ = latest_good(str(tmp_path / "parts" / "checkpoints"))
    assert commit is not None
    del commit.meta["order_version"]  # as the former program wrote it
    Path(commit.path, MARKER).write_bytes(encode(commit))
    continued = losses("parts", 4)
    assert {step: continued[step] for step in (3, 4)} == {step: former[step] for step in (3, 4)}
    continued = losses("parts", 6)
    assert continued[6] == former[6], "checkpoints since then have the version"


def test_a_file_whose_writing_fails_leaves_what_was_there(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    storage.write_bytes("model/weights.pt", b"whole")
    with pytest.raises(ValueError, match="half"), storage.writing("model/weights.pt") as file:
        file.write(b"torn")
        raise ValueError("half")
    assert storage.list("model") == ["weights.pt"]
    assert storage.read_bytes("model/weights.pt") == b"whole"
    with storage.writing("model/weights.pt") as file:
        file.write(b"ne")
        file.write(b"w")
    storage.download("model/weights.pt", tmp_path / "far" / "copy.pt")
    assert (tmp_path / "far" / "copy.pt").read_bytes() == b"new"
