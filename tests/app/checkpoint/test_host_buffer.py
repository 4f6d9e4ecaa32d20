"""The memory that saves are copied into; on GPUs: tests/strategies/fake_cuda (the case "staging a save")."""

import torch

from app.checkpoint.host_buffer import HostBuffer


def test_one_piece_of_memory_serves_every_save() -> None:
    sources = {
        "a": torch.ones(3, 5),
        "number": torch.ones((), dtype=torch.int64),
        "none": torch.ones(0, 4),
        "bits": torch.ones(7, dtype=torch.bool),
        "narrow": torch.ones(33, dtype=torch.bfloat16).t(),
    }
    buffer = HostBuffer()
    made = buffer.like(sources)
    for name, source in sources.items():
        assert made[name].shape == source.shape and made[name].dtype == source.dtype
        assert made[name].untyped_storage().nbytes() == source.nbytes
        assert torch.equal(made[name].copy_(source), source), "none lies over another"
    assert all(torch.equal(made[name], source) for name, source in sources.items())
    ends = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in made.values() if tensor.nbytes)
    assert ends[-1][0] + ends[-1][1] - ends[0][0] <= 64 * len(sources) + sum(s.nbytes for s in sources.values())
    again = buffer.like(sources)
    assert [tensor.data_ptr() for tensor in again.values()] == [tensor.data_ptr() for tensor in made.values()]
    fewer = buffer.like({"a": torch.ones(2)})
    assert list(fewer) == ["a"] and fewer["a"].shape == (2,)
