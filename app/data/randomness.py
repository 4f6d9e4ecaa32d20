"""Random numbers as a function of (seed, step, data rank), or for a sample of (seed, position).

A resumed run therefore draws what it would have drawn without the interruption, and ranks that
share data draw the same numbers. The position is that of the sample in the run's stream.
"""

import pickle
import random
from typing import Any

import numpy as np
import torch

from strategies.seeding import seed_generators


def mix(*values: int) -> int:
    """A 63-bit number that depends on every value (NumPy's SeedSequence).

    Args:
        values: Numbers, none of them negative.
    """
    return int(np.random.SeedSequence(values).generate_state(1, np.uint64)[0]) >> 1


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), NumPy and Python before the task and the model are built."""
    torch.manual_seed(seed)
    _seed_host(seed)


def seed_step(seed: int, step: int, *, data_rank: int, device: torch.device) -> None:
    """Seed torch, NumPy and Python for one training step (dropout, mix-up and so on).

    Takes a few microseconds, because only one device is seeded.

    Args:
        seed: The run's seed.
        step: The training step.
        data_rank: Ranks that share data have the same number, and draw the same random numbers.
        device: The device whose generator to seed.
    """
    value = mix(seed, step, data_rank)
    seed_generators(value, device)
    _seed_host(value)


def seed_sample(seed: int, position: int) -> None:
    """Seed the host's generators for the sample at this position; takes about 13 microseconds."""
    value = mix(seed, position)
    seed_generators(value, torch.device("cpu"))
    _seed_host(value)


def host_state() -> bytes:
    """The state of the host's generators, which is the same as long as nothing is drawn."""
    return pickle.dumps((torch.get_rng_state().numpy(), np.random.get_state(), random.getstate()))


class Generators:
    """The generators of torch (those of the host and one device), NumPy and Python."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def state(self) -> tuple[Any, ...]:
        """The state of all generators, for `restore`; does not wait for the device."""
        is_cuda = self.device.type == "cuda"
        device_state = torch.cuda.get_rng_state(self.device) if is_cuda else None
        return torch.get_rng_state(), device_state, np.random.get_state(), random.getstate()

    def restore(self, state: tuple[Any, ...]) -> None:
        """Put all generators back into a state that `state` returned."""
        torch_state, device_state, numpy_state, python_state = state
        torch.set_rng_state(torch_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, self.device)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _seed_host(seed: int) -> None:
    np.random.seed(seed % 2**32)
    random.seed(seed)
