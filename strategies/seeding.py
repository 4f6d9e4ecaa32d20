"""Seeds generators of random numbers, for a step or for a part of a model.

It imports torch alone, because data and tasks need it in processes that apply no strategy.
"""

import torch


def seed_generators(value: int, device: torch.device) -> None:
    """Seeds the generators of the host and of one device.

    torch.manual_seed seeds those of all devices, which takes a millisecond if there are none.
    """
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
