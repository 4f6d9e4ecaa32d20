"""Runs that nothing disturbs, beside which those of these tests are held; session-wide, as tests of other modules come
between."""

from pathlib import Path

import pytest

from tests.running import POINTS, Ended, torchrun, trireme

STEPS = 60
SLOW = [*POINTS, f"train.steps={STEPS}", "task_args.step_seconds=0.1", "checkpoint.every_steps=5", "train.log_every=1"]
LOCAL = ["launcher=local", "train.precision=fp16"]
TWO = ["strategy=ddp", "train.micro_batch_size=5", "train.noise_scale_every=2"]


def of_experts(data: str) -> list[str]:
    """A mixture whose experts each worker has half of."""
    return ["task=tests.tasks:OfExperts", f"strategy={data}+expert", "parallel.ep=2", "train.noise_scale_every=null"]


def command(storage: Path, *more: str) -> list[str]:
    """A run whose steps are slow as long as there is a file `slow` in its storage."""
    pace = f"task_args.slow_while={storage}/slow"
    return ["train", *SLOW, pace, "run.name=run", f"run.storage={storage}", *more]


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory, ray_environment: dict[str, str]) -> tuple[Path, Ended]:
    """The storage, and what was said, of one worker in half precision."""
    storage = tmp_path_factory.mktemp("one")
    return storage, trireme(*command(storage, *LOCAL, "tracking.log_model=true", "--json"), env=ray_environment)


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Of two workers under torchrun, whose micro-batches are uneven."""
    storage = tmp_path_factory.mktemp("two")
    return storage, torchrun(*command(storage, *TWO))
