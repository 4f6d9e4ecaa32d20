"""One worker alone with its state in host memory, for which it shards over a group of one."""

from pathlib import Path

import torch
import torch.distributed as dist

from tests.running import POINTS, committed, invoke, weights


def test_one_worker_with_its_state_in_host_memory_trains_as_one_device_and_resumes(
    tmp_path: Path,
) -> None:
    words = [
        "train",
        *POINTS,
        "launcher=local",
        f"run.storage={tmp_path}",
        "tracking.enabled=false",
    ]
    words += ["checkpoint.every_steps=4"]
    invoke(*words, "run.name=one", "strategy=single", "train.steps=8")
    offload = ["run.name=moved", "strategy=fsdp", "parallel.offload=true"]
    invoke(*words, *offload, "train.steps=4")
    assert not dist.is_initialized(), "the group ends with the run"
    invoke(*words, *offload, "train.steps=8")
    one, moved = weights(tmp_path / "one"), weights(tmp_path / "moved")
    assert committed(tmp_path / "moved") == [4, 8] and one.keys() == moved.keys()
    assert all(torch.allclose(one[name], moved[name], atol=1e-6) for name in one)
