"""Each name of torch's that nobody promised is taken away, and the program continues. What the entries do where the
name is there: test_state.py watches operations, test_parity.py trains a recurrent model, test_read.py reads a fake one,
context/test_context.py attends by the kernel.
"""

import json
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from app.launchers.blame import rank_behind
from app.training.step_sync import StepSync
from strategies import torch_internals
from tests.pool import run_distributed

NAMES = (
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._C._distributed_c10d._dump_nccl_trace_json",
    "torch._C._distributed_c10d._dump_fr_trace_json",
)


@pytest.mark.pure
def test_each_entry_where_torch_has_none_of_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 1, 4, 8)
    assert torch_internals.flash_attention(q, q)
    for other in (q.to("meta"), q[..., :6]):  # no kernel there; values of another size than keys
        assert torch_internals.flash_attention(q if other.is_cpu else other, other) is None
    for name in NAMES:
        monkeypatch.delattr(name, raising=False)  # the recorder's depend on how torch was built
    monkeypatch.setattr(torch.nn, "RNN", lambda *_: object())
    monkeypatch.setattr(dist.distributed_c10d, "_world", None)
    assert torch_internals.fake_mode() is None and torch_internals.failed_groups() == []
    with torch_internals._operation_mode()():
        torch.zeros(1)
    assert torch_internals.flight_recorder() == "" and torch_internals.rnn_reading_its_parameters() == {}
    monkeypatch.setattr(torch, "ops", mock.Mock(aten=object()))
    assert torch_internals.flash_attention(q, q) is None


def _collectives(rank: int, operators: Any) -> list[list[float]]:
    with mock.patch.object(torch, "ops", operators or torch.ops):
        reduce, gather, scatter, found = torch_internals.functional_collectives()
    assert (found == ()) == bool(operators)
    group, x = dist.group.WORLD, torch.arange(4.0) + rank
    found = [reduce(x, "sum", group), reduce(x, "max", group), gather(x, group), scatter(x, group)]
    assert torch.equal(x, torch.arange(4.0) + rank)
    return [t.tolist() for t in found]


@pytest.mark.alone
def test_collectives_that_write_nothing_over() -> None:
    assert run_distributed(_collectives, 2, "lacks them") == run_distributed(_collectives, 2, None)


def _stands_still(rank: int) -> str:
    """Rank 1 gives its record before it asks for what rank 0 waits in already."""
    dist.barrier()
    x = torch.ones(1)
    waits = dist.all_reduce(x, async_op=True) if rank == 0 else None
    said = torch_internals.flight_recorder()
    (waits or dist.all_reduce(x, async_op=True)).wait()
    return said


@pytest.mark.alone
def test_the_flight_recorder_names_the_rank_that_stands_still() -> None:
    records = dict(enumerate(run_distributed(_stands_still, 2)))
    found = rank_behind(records)
    assert (found and found.rank) == (1 if records[0] else None), "as torch itself writes records"


@pytest.mark.pure
def test_the_flight_recorders_of_nccl_and_gloo_are_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, backend in (("_dump_nccl_trace_json", "nccl"), ("_dump_fr_trace_json", "gloo")):
        said = json.dumps({"entries": [backend], "pg_config": backend})
        monkeypatch.setattr(torch._C._distributed_c10d, name, lambda said=said: said, raising=False)
    found = json.loads(torch_internals.flight_recorder())
    assert found == {"entries": ["nccl", "gloo"], "pg_config": "nccl"}


@pytest.mark.pure
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nccl_tells_that_a_group_has_not_failed() -> None:
    """Without `get_error` nothing would be found however it ended."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1, device="cuda"))
        backend: Any = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
        assert backend.get_error().name == "SUCCESS" and torch_internals.failed_groups() == []
    finally:
        dist.destroy_process_group()


@pytest.mark.pure
def test_a_group_whose_collective_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's backend is a stand-in, in the state that it is in after torch has aborted its communicators."""
    good, bad, of_cpus = mock.Mock(), mock.Mock(), mock.Mock()
    good._get_backend.return_value.get_error.return_value.name = "SUCCESS"
    bad._get_backend.return_value.get_error.return_value.name = "COMM_ERROR"
    of_cpus._get_backend.side_effect = RuntimeError("No backend type associated with device type cuda")
    sync = StepSync(1, first_step=1)
    sync.add(torch.tensor(1.0))
    groups = {good: "0", bad: "dp", of_cpus: "cpu"}
    monkeypatch.setattr(dist.distributed_c10d, "_world", mock.Mock(pg_names=groups))
    assert torch_internals.failed_groups() == ["dp"]
    with pytest.raises(dist.DistBackendError, match="a collective of group dp has failed"):
        sync.agree(1, stop=False, save=True)
