"""The launcher that `launcher=auto` chooses."""

import os

import pytest

from app.config import Config
from app.launchers.train import chosen_launcher

pytestmark = pytest.mark.pure

SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, "ray"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "4"}, "torchrun"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, "ray"),
        (SLURM, "ray"),
    ],
    ids=[
        "nothing",
        "torchrun",
        "srun of four tasks",
        "srun of one task",
        "the script of an sbatch job",
    ],
)
def test_auto_is_torchrun_where_several_processes_were_started(
    variables: dict[str, str], launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*os.environ]:
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert chosen_launcher(Config()) == launcher
