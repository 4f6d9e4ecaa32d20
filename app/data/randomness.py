"""Randomness as a function of (seed, step, data rank), and a sample's of (seed, position in the run's stream).

So a resumed run draws what it would have drawn, and ranks that share data draw the same.
"""

import pickle
import random
from typing import Any

import numpy as np
import torch

from strategies.parallel import seed_generators


def mix(*values: int) -> int:
    """A 63-bit number that depends on every value (NumPy's SeedSequence); none may be negative."""
    return int(np.random.SeedSequence(values).generate_state(1, np.uint64)[0]) >> 1


def seed_everything(seed: int) -> None:
    """Seeds torch (all devices), NumPy and Python: for making the task and building the model."""
    torch.manual_seed(seed)
    _seed_host(seed)


def seed_step(seed: int, step: int, data_rank: int, device: torch.device) -> None:
    """Seeds the generators of torch, NumPy and Python for one step (dropout, mix-up and the like); ranks that share
    data share them too.

    Costs a few microseconds: of the devices only `device` is touched.
    """
    value = mix(seed, step, data_rank)
    seed_generators(value, device)
    _seed_host(value)


def seed_sample(seed: int, position: int) -> None:
    """Seeds the host's generators for making the sample at this position of a stream; about 13 microseconds."""
    value = mix(seed, position)
    seed_generators(value, torch.device("cpu"))
    _seed_host(value)


def host_state() -> bytes:
    """Of the host's generators; equal where nothing was drawn in between."""
    return pickle.dumps((torch.get_rng_state().numpy(), np.random.get_state(), random.getstate()))


class Generators:
    """The generators of torch (the host's and one device's), NumPy and Python."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def state(self) -> tuple[Any, ...]:
        """What brings them back to where they are; the device is not waited for."""
        of_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return torch.get_rng_state(), of_device, np.random.get_state(), random.getstate()

    def restore(self, state: tuple[Any, ...]) -> None:
        """Brings them back."""
        of_torch, of_device, of_numpy, of_python = state
        torch.set_rng_state(of_torch)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, self.device)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def _seed_host(seed: int) -> None:
    np.random.seed(seed % 2**32)
    random.seed(seed)
