"""The program continues without each internal name of torch.

Other tests show what the entries do where the names exist: test_state.py records operations,
test_parity.py trains a recurrent model, tests/app/planner/test_read.py reads a fake one, and
context/test_context.py attends by the kernel.
"""

import json
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from app.launchers.blame import rank_behind, summary
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
def test_there_is_no_attention_kernel_for_some_devices_and_shapes() -> None:
    q = torch.randn(1, 1, 4, 8)
    assert torch_internals.flash_attention(q, q)
    on_meta = q.to("meta")
    assert torch_internals.flash_attention(on_meta, on_meta) is None
    narrower_values = q[..., :6]
    assert torch_internals.flash_attention(q, narrower_values) is None


@pytest.mark.pure
def test_each_entry_has_an_answer_if_torch_has_none_of_the_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in NAMES:
        # Which flight recorders exist depends on how torch was built.
        monkeypatch.delattr(name, raising=False)
    monkeypatch.setattr(torch.nn, "RNN", lambda *_: object())
    monkeypatch.setattr(dist.distributed_c10d, "_world", None)
    assert torch_internals.fake_mode() is None
    assert torch_internals.failed_groups() == []
    with torch_internals._operation_mode()():
        torch.zeros(1)
    assert torch_internals.flight_recorder() == ""
    assert torch_internals.rnn_reading_its_parameters() == {}
    monkeypatch.setattr(torch, "ops", mock.Mock(aten=object()))
    q = torch.randn(1, 1, 4, 8)
    assert torch_internals.flash_attention(q, q) is None


def _collective_results(rank: int, has_operators: bool) -> list[list[float]]:
    ops: Any = torch.ops if has_operators else "has no operators"
    with mock.patch.object(torch, "ops", ops):
        collectives = torch_internals.functional_collectives()
    assert bool(collectives.summing_operators) == has_operators
    group: Any = dist.group.WORLD
    x = torch.arange(4.0) + rank
    results = [
        collectives.all_reduce(x, "sum", group),
        collectives.all_reduce(x, "max", group),
        collectives.all_gather(x, group),
        collectives.reduce_scatter(x, group),
        collectives.start_all_reduce(x, group)(),
        collectives.start_reduce_scatter(x, group)(),
    ]
    assert torch.equal(x, torch.arange(4.0) + rank), "the argument has changed"
    return [result.tolist() for result in results]


@pytest.mark.alone
def test_functional_collectives_are_the_same_without_their_operators() -> None:
    with_operators = run_distributed(_collective_results, 2, True)
    without_operators = run_distributed(_collective_results, 2, False)
    assert with_operators == without_operators


# --- flight recorders -----------------------------------------------------------------------------


def _record_before_a_collective(rank: int) -> str:
    """The record while rank 0 waits in a collective that rank 1 has not started."""
    dist.barrier()
    x = torch.ones(1)
    work = dist.all_reduce(x, async_op=True) if rank == 0 else None
    record = torch_internals.flight_recorder()
    if work is None:
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    return record


@pytest.mark.alone
def test_the_flight_recorder_shows_the_rank_that_is_behind() -> None:
    records = dict(enumerate(run_distributed(_record_before_a_collective, 2)))
    if records[0]:
        behind = rank_behind({rank: summary(rank, record) for rank, record in records.items()})
        assert behind is not None
        assert behind.rank == 1
    else:
        assert not summary(0, records[0])  # this torch writes no records


@pytest.mark.pure
def test_the_flight_recorders_of_nccl_and_gloo_become_one_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = torch._C._distributed_c10d
    for name, backend in (("_dump_nccl_trace_json", "nccl"), ("_dump_fr_trace_json", "gloo")):
        record = json.dumps({"entries": [backend], "pg_config": backend})
        monkeypatch.setattr(module, name, lambda record=record: record, raising=False)
    merged = json.loads(torch_internals.flight_recorder())
    assert merged == {"entries": ["nccl", "gloo"], "pg_config": "nccl"}


# --- failed groups --------------------------------------------------------------------------------


@pytest.mark.pure
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nccls_groups_say_whether_they_have_failed() -> None:
    """Without `get_error` no failure would ever be found."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1, device="cuda"))
        group: Any = dist.group.WORLD
        backend = group._get_backend(torch.device("cuda"))
        assert backend.get_error().name == "SUCCESS"
        assert torch_internals.failed_groups() == []
    finally:
        dist.destroy_process_group()


@pytest.mark.pure
def test_a_group_with_a_failed_collective_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mocks have the state of NCCL's backend after torch has aborted its communicators."""
    good = mock.Mock()
    good._get_backend.return_value.get_error.return_value.name = "SUCCESS"
    failed = mock.Mock()
    failed._get_backend.return_value.get_error.return_value.name = "COMM_ERROR"
    of_cpus = mock.Mock()
    of_cpus._get_backend.side_effect = RuntimeError(
        "No backend type associated with device type cuda"
    )
    sync = StepSync(1, first_step=1)
    sync.add(torch.tensor(1.0))
    world = mock.Mock(pg_names={good: "0", failed: "dp", of_cpus: "cpu"})
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    assert torch_internals.failed_groups() == ["dp"]
    with pytest.raises(dist.DistBackendError, match="a collective of group dp has failed"):
        sync.agree(1, stop=False, save=True)
