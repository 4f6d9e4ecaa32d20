"""What Trireme needs of torch's internals, because torch documents no way to it.

No other file uses internals of torch. Each entry says why there is no public way, and what happens
if the name is missing (in another version of torch): the program continues, slower or with less
information. tests/strategies/test_torch_internals.py removes each name.
"""

import contextlib
import importlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def fake_mode() -> Any | None:
    """A mode in which tensors have shapes, types and devices but no numbers.

    Why: on the `meta` device, which is public, a tensor's device is `meta`. Code that looks at the
    device takes another branch there, and kernels that are chosen by device are not seen.

    Missing: None. The planner then runs the model with real numbers once, and an export reads its
    file twice.
    """
    with contextlib.suppress(ImportError, AttributeError):
        module = importlib.import_module("torch._subclasses.fake_tensor")
        return module.FakeTensorMode(allow_non_fake_inputs=True)
    return None


def _operation_mode() -> type:
    """The base of a context manager that sees every operation.

    A subclass defines `__torch_dispatch__(func, types, args, kwargs)`.

    Why: `torch.overrides.TorchFunctionMode`, which is public, sees what Python calls, but not what
    autograd's backward and composite functions call.

    Missing: a context manager that sees nothing. The planner's times then lack what it would have
    counted.
    """
    with contextlib.suppress(ImportError, AttributeError):
        return importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
    return contextlib.nullcontext


OperationMode: Any = _operation_mode()


# The first name exists from torch 2.13 on, the second before.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- collectives ----------------------------------------------------------------------------------


class _FunctionalCollectives(NamedTuple):
    """Collectives that return a new tensor.

    Attributes:
        all_reduce: (x, "sum" or "max", group).
        all_gather: (x, group), along dimension 0.
        reduce_scatter: (x, group), the sum, along dimension 0.
        start_all_reduce: (x, group), the sum; returns a function that waits for it.
        start_reduce_scatter: Likewise.
        summing_operators: The operators of torch.ops behind those that sum.
    """

    all_reduce: Callable[[Tensor, str, dist.ProcessGroup], Tensor]
    all_gather: Callable[[Tensor, dist.ProcessGroup], Tensor]
    reduce_scatter: Callable[[Tensor, dist.ProcessGroup], Tensor]
    start_all_reduce: Callable[[Tensor, dist.ProcessGroup], Callable[[], Tensor]]
    start_reduce_scatter: Callable[[Tensor, dist.ProcessGroup], Callable[[], Tensor]]
    summing_operators: tuple[Any, ...]


def functional_collectives() -> _FunctionalCollectives:
    """Collectives whose results selective activation checkpointing can keep.

    Why: `dist.all_reduce` and its like write into their arguments, so that their results cannot be
    kept instead of being recomputed. The functional ones have no public name.

    Missing: those of `dist`, which send again when a block is recomputed.
    """
    ops = getattr(torch.ops, "_c10d_functional", None)
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")
    if ops is None or not all(hasattr(ops, name) for name in names):
        return _FunctionalCollectives(
            all_reduce=_all_reduce,
            all_gather=_all_gather,
            reduce_scatter=_reduce_scatter,
            start_all_reduce=_start_all_reduce,
            start_reduce_scatter=_start_reduce_scatter,
            summing_operators=(),
        )

    def all_reduce(x: Tensor, operation: str, group: dist.ProcessGroup) -> Tensor:
        return ops.wait_tensor(ops.all_reduce(x, operation, group.group_name))

    def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        started = ops.all_reduce(x, "sum", group.group_name)
        return lambda: ops.wait_tensor(started)

    def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        started = ops.reduce_scatter_tensor(x, "sum", group.size(), group.group_name)
        return lambda: ops.wait_tensor(started)

    def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        gather = _all_gather_operator if torch.compiler.is_compiling() else _gather_and_wait
        return gather(x, group.size(), group.group_name)

    def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", group.size(), group.group_name))

    return _FunctionalCollectives(
        all_reduce=all_reduce,
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
        start_all_reduce=start_all_reduce,
        start_reduce_scatter=start_reduce_scatter,
        summing_operators=(ops.all_reduce.default, ops.reduce_scatter_tensor.default),
    )


def _gather_and_wait(x: Tensor, size: int, group_name: str) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, size, group_name))


# From torch 2.14 on, the compiler replaces several gathers of one tensor, such as those of queries,
# keys and values, by a single gather. It does not do so with their waits, and it keeps the results
# of waits that several recomputed parts use. As a single operator, a gather and its wait stay
# together.
_all_gather_operator = torch.library.custom_op(
    "trireme::all_gather", _gather_and_wait, mutates_args=()
)


@_all_gather_operator.register_fake
def _fake_all_gather(x: Tensor, size: int, group_name: str) -> Tensor:
    return x.new_empty((size * x.size(0), *x.shape[1:]))


def _all_reduce(x: Tensor, operation: str, group: dist.ProcessGroup) -> Tensor:
    result = x.clone()
    reduction = dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM
    dist.all_reduce(result, reduction, group=group)
    return result


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = x.new_empty((x.size(0) * group.size(), *x.shape[1:]))
    all_gather_into(gathered, x, group=group)
    return gathered


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    shard = x.new_empty((x.size(0) // group.size(), *x.shape[1:]))
    reduce_scatter_into(shard, x, group=group)
    return shard


def _start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    result = x.clone()
    work = dist.all_reduce(result, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return result

    return finish


def _start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    shard = x.new_empty((x.size(0) // group.size(), *x.shape[1:]))
    work = reduce_scatter_into(shard, x, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return shard

    return finish


# --- collectives that hang or fail ----------------------------------------------------------------

_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""NCCL's flight recorder, which exists if torch was built with NCCL, and gloo's."""


def flight_recorder() -> str:
    """The last collectives of this process as JSON, as torch records them.

    NCCL's `entries` come first, then gloo's. Of the other keys that both have, NCCL's values are
    taken. "" if there is no record.

    Why: torch writes NCCL's record to a file when NCCL's own watchdog fires, and documents no call
    that returns it. It documents no way at all to gloo's.

    Missing: "". The report of a hang then names ranks and stacks only.
    """
    merged: dict[str, Any] = {}
    with contextlib.suppress(ImportError):
        module = importlib.import_module("torch._C._distributed_c10d")
        for recorder in _RECORDERS:
            with contextlib.suppress(AttributeError, RuntimeError, ValueError):
                record = json.loads(getattr(module, recorder)())
                if record.get("entries"):
                    entries = [*merged.get("entries", ()), *record["entries"]]
                    merged = {**record, **merged, "entries": entries}
    return json.dumps(merged, indent=1) if merged else ""


def failed_groups() -> list[str]:
    """The names of this process's groups in which a collective on a GPU has failed.

    What was computed from such a collective is wrong.

    Why: if torch aborts communicators and lets the process continue
    (TORCH_NCCL_ASYNC_ERROR_HANDLING=2), waiting for the device returns as if nothing had happened,
    and only the next collective of the same group raises. Neither the list of groups nor the state
    of a backend is documented.

    Missing: []. Wrong numbers are then believed until that next collective.
    """
    failed = []
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    group_names = getattr(world, "pg_names", None) or {}
    for group, name in dict(group_names).items():
        # A group of CPUs has no such backend, and another torch may not have these methods.
        with contextlib.suppress(RuntimeError, AttributeError):
            backend = group._get_backend(torch.device("cuda"))
            if backend.get_error().name != "SUCCESS":
                failed.append(str(name))
    return failed


# --- layers ---------------------------------------------------------------------------------------


def rnn_reading_its_parameters() -> dict[str, Any]:
    """The members of a subclass of an RNN that reads its parameters anew in each call.

    Why: an RNN keeps a second list of its parameters, which no public API reaches.

    Missing: {}. Under tensor parallelism an RNN then fails in its first forward.
    """
    if not hasattr(torch.nn.RNN(1, 1), "_flat_weights_names"):
        return {}

    def get(rnn: Any) -> list[Any]:
        return [getattr(rnn, name, None) for name in rnn._flat_weights_names]

    def ignore(rnn: Any, value: list[Any]) -> None:
        """Do not keep the list that the RNN's own code assigns."""

    return {"_flat_weights": property(get, ignore)}


# --- attention ------------------------------------------------------------------------------------

_CUDNN_ATTENTION = "_scaled_dot_product_cudnn_attention"
_FLASH_ATTENTION = "_scaled_dot_product_flash_attention"
_CPU_FLASH_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class _AttentionKernel:
    """torch's attention with its log-sum-exp, on one kind of device.

    Tensors are (B, H, T, K), and log-sum-exps (B, H, T).

    Args:
        name: The operator of torch.ops.aten.
        on_gpu: Whether the device is a GPU. There cuDNN's kernel is used for inputs for which
            `scaled_dot_product_attention` prefers it (on an H100 it takes half the time of flash).
    """

    def __init__(self, name: str, *, on_gpu: bool) -> None:
        self._forward = getattr(torch.ops.aten, name)
        self._backward = getattr(torch.ops.aten, f"{name}_backward")
        self._on_gpu = on_gpu

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the output and the log-sum-exp."""
        if self._on_gpu and _prefers_cudnn(q, k, v, is_causal=is_causal):
            out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                query=q,
                key=k,
                value=v,
                attn_bias=None,
                compute_log_sumexp=True,
                dropout_p=0.0,
                is_causal=is_causal,
                scale=scale,
            )
            return out, lse.squeeze(-1)
        out, lse, *_ = self._forward(q, k, v, dropout_p=0.0, is_causal=is_causal, scale=scale)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v.

        Args:
            grad: The gradient of `out`.
            q: The queries.
            k: The keys.
            v: The values.
            out: The output, which may be that of more keys than these.
            lse: The log-sum-exp, likewise.
            is_causal: Whether query i sees keys 0 to i only.
            scale: Factor of the scores.
        """
        if not self._on_gpu:
            return self._backward(
                grad, q, k, v, out, lse, dropout_p=0.0, is_causal=is_causal, scale=scale
            )
        # The kernels ask for the random state of a dropout. Without a dropout they do not use it.
        if _prefers_cudnn(q, k, v, is_causal=is_causal):
            return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                grad_out=grad,
                query=q,
                key=k,
                value=v,
                out=out,
                logsumexp=lse.unsqueeze(-1),
                philox_seed=torch.empty((), dtype=torch.int64, device=q.device),
                philox_offset=torch.empty((), dtype=torch.int64, device=q.device),
                attn_bias=None,
                cum_seq_q=None,
                cum_seq_k=None,
                max_q=q.size(2),
                max_k=k.size(2),
                dropout_p=0.0,
                is_causal=is_causal,
                scale=scale,
            )
        philox_seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        return self._backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.size(2),
            max_k=k.size(2),
            dropout_p=0.0,
            is_causal=is_causal,
            philox_seed=philox_seed,
            philox_offset=philox_seed[:0],
            scale=scale,
        )


def flash_attention(q: Tensor, v: Tensor) -> _AttentionKernel | None:
    """A kernel that returns the log-sum-exp beside the output, for such tensors.

    Why: partial results can only be joined with their log-sum-exps, which
    `scaled_dot_product_attention` does not return. flex_attention and varlen_attn return it, but
    their backward is that of their own output alone: for a joined output they would have to compute
    forward again, or to keep every worker's keys.

    Missing: None, as for tensors for which torch has no such kernel, and attention.py multiplies
    matrices instead.

    Args:
        q: The queries, (B, H, T, K).
        v: The values, (B, H, S, K).
    """
    if q.device.type not in ("cpu", "cuda") or q.size(-1) != v.size(-1):
        return None
    on_gpu = q.device.type == "cuda"
    name = _FLASH_ATTENTION if on_gpu else _CPU_FLASH_ATTENTION
    if not _has_operators(name):
        return None
    if on_gpu:
        is_narrow = q.dtype in (torch.float16, torch.bfloat16)
        width = q.size(-1)
        if not is_narrow or width % 8 != 0 or width > 256:
            return None
        if torch.cuda.get_device_capability(q.device) < (8, 0):
            return None
    return _AttentionKernel(name, on_gpu=on_gpu)


def _has_operators(name: str) -> bool:
    return hasattr(torch.ops.aten, name) and hasattr(torch.ops.aten, f"{name}_backward")


def _prefers_cudnn(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> bool:
    """Whether cuDNN attends, forward and backward.

    The answer is that of `scaled_dot_product_attention` on Hopper and Blackwell.
    """
    if not _has_operators(_CUDNN_ATTENTION):
        return False
    capability = torch.cuda.get_device_capability(q.device)
    if capability not in ((9, 0), (10, 0), (10, 3)) or q.size(-1) > 128:
        return False
    trained_q = q.detach().requires_grad_()  # asks for a kernel that has a backward
    attention_mask = None
    dropout = 0.0
    enable_gqa = False
    params = torch.backends.cuda.SDPAParams(
        trained_q, k, v, attention_mask, dropout, is_causal, enable_gqa
    )
    return torch.backends.cuda.can_use_cudnn_attention(params)
