"""What Trireme needs of torch's internals, because torch documents no way to it. No other file touches them.

Each entry says why there is no public way and what happens where the name is missing (another torch
version): the program continues, slower or with less information.
tests/strategies/test_torch_internals.py takes each name away.
"""

import contextlib
import importlib
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def fake_mode() -> Any | None:
    """A mode under which tensors have shapes, types and devices but no numbers; None where torch has none.

    Why: on the `meta` device, which is public, a tensor's device is `meta`, so code that looks at
    it takes another way, and kernels chosen by device are not seen. Missing: None, and the caller
    does without (the planner runs the model
    for real once, an export reads its file twice).
    """
    with contextlib.suppress(ImportError, AttributeError):
        return importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode(
            allow_non_fake_inputs=True
        )
    return None


def _operation_mode() -> type:
    """Base of a context manager whose `__torch_dispatch__(func, types, args, kwargs)` sees every operation under it.

    Why: `torch.overrides.TorchFunctionMode`, which is public, sees what Python calls, not what
    autograd's backward and composite functions do. Missing: sees nothing, so that the planner's
    times lack what it would have counted.
    """
    with contextlib.suppress(ImportError, AttributeError):
        return importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
    return contextlib.nullcontext


OperationMode: Any = _operation_mode()


# Their names from torch 2.13 on, and before.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def functional_collectives() -> tuple[Callable, Callable, Callable, tuple[Any, ...]]:
    """(all_reduce(x, "sum" or "max", group), all_gather(x, group) along dimension 0, reduce_scatter(x, group) along
    dimension 0, the operators behind those that sum), each giving a new tensor.

    Why: `dist.all_reduce` and its like write into their arguments, which selective activation
    checkpointing cannot keep instead of recomputing; the functional ones have no public name.
    Missing: those of `dist`, which are sent again when
    a block is recomputed.
    """
    ops = getattr(torch.ops, "_c10d_functional", None)
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")
    if ops is None or not all(hasattr(ops, name) for name in names):
        return _all_reduce, _all_gather, _reduce_scatter, ()

    def all_reduce(x: Tensor, operation: str, group: dist.ProcessGroup) -> Tensor:
        return ops.wait_tensor(ops.all_reduce(x, operation, group.group_name))

    def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        gather = _all_gather_as_one if torch.compiler.is_compiling() else _gather_and_wait
        return gather(x, group.size(), group.group_name)

    def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", group.size(), group.group_name))

    return (
        all_reduce,
        all_gather,
        reduce_scatter,
        (ops.all_reduce.default, ops.reduce_scatter_tensor.default),
    )


def _gather_and_wait(x: Tensor, size: int, group_name: str) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, size, group_name))


# From torch 2.14 on the compiler makes one of several gatherings of the same tensor, as queries,
# keys and values have it, but not of the waits for it; and what waits in several recomputed parts
# it keeps.
_all_gather_as_one = torch.library.custom_op(
    "trireme::all_gather", _gather_and_wait, mutates_args=()
)
_all_gather_as_one.register_fake(
    lambda x, size, group_name: x.new_empty((size * x.size(0), *x.shape[1:]))
)


def _all_reduce(x: Tensor, operation: str, group: dist.ProcessGroup) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM, group=group)
    return x


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = x.new_empty((x.size(0) * group.size(), *x.shape[1:]))
    all_gather_into(found, x, group=group)
    return found


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = x.new_empty((x.size(0) // group.size(), *x.shape[1:]))
    reduce_scatter_into(found, x, group=group)
    return found


def flight_recorder() -> str:
    """The last collectives of this process as JSON, in torch's own words; "" where there is no record. NCCL's `entries`
    come first, then gloo's; of what else both have, NCCL's.

    Why: torch writes it to a file when NCCL's own watchdog fires, and has no documented call for
    it; gloo's is asked for in no other way. Missing: "", and a hang's report names ranks and stacks
    only.
    """
    found: dict[str, Any] = {}
    with contextlib.suppress(ImportError):
        module = importlib.import_module("torch._C._distributed_c10d")
        for name in (
            "_dump_nccl_trace_json",
            "_dump_fr_trace_json",
        ):  # the first where torch was built with NCCL
            with contextlib.suppress(AttributeError, RuntimeError, ValueError):
                if entries := (said := json.loads(getattr(module, name)())).get("entries"):
                    found = said | found | {"entries": [*found.get("entries", ()), *entries]}
    return json.dumps(found, indent=1) if found else ""


def failed_groups() -> list[str]:
    """Names of this process's groups in which a collective on a GPU has failed. What was computed from it is wrong.

    Why: where torch aborts communicators and lets the process go on
    (TORCH_NCCL_ASYNC_ERROR_HANDLING=2), what waits for the device returns as if all were well, and
    only the next collective of the same group raises. Neither the list of
    groups nor a backend's state is documented. Missing: [], and wrong numbers are believed until that collective.
    """
    failed = []
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    for group, name in dict(getattr(world, "pg_names", None) or {}).items():
        with contextlib.suppress(RuntimeError, AttributeError):  # of CPUs only; another torch
            if group._get_backend(torch.device("cuda")).get_error().name != "SUCCESS":
                failed.append(str(name))
    return failed


def rnn_reading_its_parameters() -> dict[str, Any]:
    """Members of a subclass of an RNN that computes with its parameters as they are when it is called.

    Why: an RNN keeps a second list of its parameters, to which nothing public leads. Missing: none, and under tensor
    parallelism an RNN fails in its first forward.
    """
    if not hasattr(torch.nn.RNN(1, 1), "_flat_weights_names"):
        return {}
    flat = property(
        lambda self: [getattr(self, n, None) for n in self._flat_weights_names],
        lambda self, value: None,
    )
    return {"_flat_weights": flat}


def flash_attention(q: Tensor, v: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """For such (B, H, T, K) tensors: (q, k, v, causal, scale) → (output, log-sum-exp (B, H, T)), and its (gradient, q,
    k, v, output, log-sum-exp, causal, scale) → (dq, dk, dv), whose output and log-sum-exp may be those of more keys
    than these. None where torch has no such kernel for them.

    On GPUs for which `scaled_dot_product_attention` prefers it, that of cuDNN (on an H100 half the time of flash).

    Why: `scaled_dot_product_attention` keeps the log-sum-exp, without which partial results cannot be joined.
    flex_attention and varlen_attn return it, but their backward is that of their own output alone: of a joined one it
    would have to compute forward again, or to keep every worker's keys. Missing: None, and attention.py multiplies.
    """
    ops, kind = torch.ops.aten, q.device.type
    name = "_scaled_dot_product_flash_attention" + ("_for_cpu" if kind == "cpu" else "")
    known = kind in ("cpu", "cuda") and hasattr(ops, name) and hasattr(ops, f"{name}_backward")
    if not known or q.size(-1) != v.size(-1):
        return None
    on_gpu = kind == "cuda"
    if on_gpu and (
        q.dtype not in (torch.float16, torch.bfloat16) or q.size(-1) % 8 or q.size(-1) > 256
    ):
        return None
    if on_gpu and torch.cuda.get_device_capability(q.device) < (8, 0):
        return None
    forward_op, backward_op = getattr(ops, name), getattr(ops, f"{name}_backward")

    def forward(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        if on_gpu and _prefers_cudnn(q, k, v, causal):
            found = ops._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal, scale=scale
            )
            return found[0], found[1].squeeze(-1)
        found = forward_op(q, k, v, 0.0, causal, scale=scale)
        return found[0], found[1]

    def backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, causal, scale = given
        if not on_gpu:
            return backward_op(*tensors, 0.0, causal, scale=scale)
        grad, q, k, v, out, lse = tensors
        if _prefers_cudnn(q, k, v, causal):
            return ops._scaled_dot_product_cudnn_attention_backward(
                grad_out=grad,
                query=q,
                key=k,
                value=v,
                out=out,
                logsumexp=lse.unsqueeze(-1),
                philox_seed=torch.empty(
                    (), dtype=torch.int64, device=q.device
                ),  # no dropout draws any numbers
                philox_offset=torch.empty((), dtype=torch.int64, device=q.device),
                attn_bias=None,
                cum_seq_q=None,
                cum_seq_k=None,
                max_q=q.size(2),
                max_k=k.size(2),
                dropout_p=0.0,
                is_causal=causal,
                scale=scale,
            )
        lengths = (None, None, k.size(2), v.size(2))
        drawn = torch.empty(
            2, dtype=torch.uint64, device=q.device
        )  # the state of random numbers: no dropout draws any
        return backward_op(*tensors, *lengths, 0.0, causal, drawn, drawn[:0], scale=scale)

    return forward, backward


def _prefers_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether cuDNN attends, forward and backward, as `scaled_dot_product_attention` has it on Hopper and Blackwell."""
    name = "_scaled_dot_product_cudnn_attention"
    if not (hasattr(torch.ops.aten, name) and hasattr(torch.ops.aten, f"{name}_backward")):
        return False
    major, minor = torch.cuda.get_device_capability(q.device)
    if (major, minor) not in ((9, 0), (10, 0), (10, 3)) or q.size(-1) > 128:
        return False
    trained = q.detach().requires_grad_()  # the kernel that is asked for is one that has a backward
    params = torch.backends.cuda.SDPAParams(trained, k, v, None, 0.0, causal, False)
    return torch.backends.cuda.can_use_cudnn_attention(params)
