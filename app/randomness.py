"""Randomness as a function of (seed, step, data rank), so that a resumed run draws what it would have drawn."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def mix(*values: int) -> int:
    """A 63-bit number that depends on every value (splitmix64, Steele et al. 2014)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def seed_everything(seed: int) -> None:
    """Seeds torch (all devices), NumPy and Python: for building the model."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_step(seed: int, step: int, data_rank: int, device: torch.device) -> None:
    """Seeds torch's generator for one step (dropout and the like); ranks that share data share it too.

    Costs a few microseconds: only the generator of `device` is touched.
    """
    value = mix(seed, step, data_rank)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)


def random_state() -> dict[str, Any]:
    """NumPy's and Python's generators, for code of the user's that draws from them; kept per rank."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    # As tensors, which torch.load takes with weights_only=True.
    numpy = (kind, torch.tensor(np.asarray(keys).tolist()), *rest)
    return {"numpy": numpy, "python": (version, torch.tensor(numbers), gauss)}


def set_random_state(state: dict[str, Any]) -> None:
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
