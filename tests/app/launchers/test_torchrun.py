"""Who has started a process of torchrun or Slurm; its ranks that stop and die: test_faults.py."""

from __future__ import annotations

import pytest

from app.errors import UserError
from app.launchers.torchrun import Environment


def test_who_has_started_this_process() -> None:
    ours = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Environment.read(ours) == Environment(3, 4, 1, 2)
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    assert Environment.read(slurm) == Environment(3, 4, 1, 4)
    with pytest.raises(UserError, match="finds neither RANK nor SLURM_PROCID"):
        Environment.read({"RANK": "3"})
