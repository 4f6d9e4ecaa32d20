"""Each name of torch's that nobody promised is taken away, and the program continues. What the entries do where the
name is there: test_state.py watches operations, test_parity.py trains a recurrent model, test_read.py reads a fake one.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from strategies import torch_internals
from tests.pool import run_distributed

NAMES = (
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._C._distributed_c10d._dump_nccl_trace_json",
    "torch._C._distributed_c10d._dump_fr_trace_json",
)


def test_each_entry_where_torch_has_none_of_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delattr(name, raising=False)  # the recorder's depend on how torch was built
    monkeypatch.setattr(torch.nn, "RNN", lambda *_: object())
    assert torch_internals.fake_mode() is None
    with torch_internals._operation_mode()():
        torch.zeros(1)
    assert torch_internals.flight_recorder() == "" and torch_internals.rnn_reading_its_parameters() == {}


def _collectives(rank: int, operators: Any) -> list[list[float]]:
    with mock.patch.object(torch, "ops", operators or torch.ops):
        reduce, gather, scatter, found = torch_internals.functional_collectives()
    assert (found == ()) == bool(operators)
    group, x = dist.group.WORLD, torch.arange(4.0) + rank
    found = [reduce(x, "sum", group), reduce(x, "max", group), gather(x, group), scatter(x, group)]
    assert torch.equal(x, torch.arange(4.0) + rank)
    return [t.tolist() for t in found]


def test_collectives_that_write_nothing_over() -> None:
    assert run_distributed(_collectives, 2, "lacks them") == run_distributed(_collectives, 2, None)


def _records(rank: int) -> str:
    dist.all_reduce(torch.ones(1))
    return torch_internals.flight_recorder()


def test_the_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    for said in run_distributed(_records, 2):
        assert said == "" or json.loads(said)["entries"]
