"""A process group that sends nothing, so that training takes as long as its computing: torch's `fake` backend, whose
collectives return at once, and what else has to know of it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


@contextlib.contextmanager
def nothing_sent(world_size: int) -> Iterator[None]:
    """Within it this process is the first of a world in which no other is there: the first says to others what they are
    to do, and so needs no answers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from app.persistence import Persistence

    make_group = dist.new_group

    def fake_group(*args: Any, **more: Any) -> Any:
        return make_group(*args, **{**more, "backend": "fake"})

    def nothing(*args: Any, **more: Any) -> None:
        """For what would wait for an answer: the hook of a compression, the agreement on a checkpoint to go on from."""

    replaced: list[tuple[Any, str, Any]] = [
        (dist, "new_group", fake_group),
        (DDP, "register_comm_hook", nothing),
        (DDP, "_register_builtin_comm_hook", nothing),
        (Persistence, "resume", nothing),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    for owner, name, value in replaced:
        setattr(owner, name, value)
    torch.set_flush_denormal(True)  # tiny numbers, which the real steps do not meet, are slow
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        for owner, name, value in kept:
            setattr(owner, name, value)
        dist.destroy_process_group()


_REGISTER = DDP.register_comm_hook


def fit(parallel: Any) -> None:
    """To be called once a model is made: DDP takes its buckets as reduced, and weights have values of the
    usual size."""
    for module in parallel.module.modules():
        if isinstance(module, DDP):
            _REGISTER(module, None, _as_it_is)
    for parameter in parallel.parameters():
        getattr(parameter, "_local_tensor", parameter).data.normal_(0.0, 0.02)


def _as_it_is(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # torch reads these types
    buffer = bucket.buffer()
    devices: Any = [buffer.device] if buffer.is_cuda else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future
