"""Each name of torch's that nobody promised is taken away in turn, and the program continues."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from strategies import torch_internals
from tests.pool import run_distributed

SOURCE = Path(torch_internals.__file__)


def test_there_are_few_entries_and_each_says_why_and_what_then() -> None:
    entries = [n for n in ast.parse(SOURCE.read_text()).body if isinstance(n, ast.FunctionDef)]
    reasons = [ast.get_docstring(entry) or "" for entry in entries]
    said = [text for text in reasons if "Why:" in text]
    assert len(said) <= 6 and all("Missing:" in text for text in said)


def test_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = torch_internals.fake_mode()
    with mode:
        fake = torch.empty(2)
    assert type(fake) is not torch.Tensor
    monkeypatch.delattr(importlib.import_module("torch._subclasses.fake_tensor"), "FakeTensorMode")
    assert torch_internals.fake_mode() is None


def test_watching_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it watches where the name is there: test_state.py."""
    monkeypatch.delattr(importlib.import_module("torch.utils._python_dispatch"), "TorchDispatchMode")
    with torch_internals._operation_mode()():
        torch.zeros(1)


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
    module = importlib.import_module("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        monkeypatch.delattr(module, name, raising=False)
    assert torch_internals.flight_recorder() == ""


def test_rnns_that_read_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one computes where the name is there: the recurrent model of test_parity.py."""
    monkeypatch.setattr(torch.nn, "RNN", lambda *_: object())
    assert torch_internals.rnn_reading_its_parameters() == {}
