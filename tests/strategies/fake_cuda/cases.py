"""What is tried on fake CUDA devices, which waits of the host are known, and what cannot be tried."""

import itertools
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from app.checkpoint.dcp import Stager
from app.checkpoint.ranks import Ranks
from app.config import OptimizerConfig
from app.errors import UserError
from app.launchers.torchrun import Environment, own_device, require_own_gpu
from app.models.gpt import RMSNorm
from app.training.optimizer import build_optimizer
from experiments.parity.curves import Trial, parallelize_trial, run_steps
from experiments.parity.rows import (
    DEEPSPEED,
    MIXTURES,
    MIXTURES_OF_MORE_DIMENSIONS,
    ROWS,
    SINGLE,
    THREE_DIMENSIONS,
    Row,
)
from strategies import one_process, registry
from strategies.context.apply import METHODS
from strategies.context.attention import register_group
from strategies.parallelize import Options
from tests.strategies.fake_cuda import device as fake
from tests.strategies.fake_cuda.loops import adapters, gpt, loop
from tests.strategies.models import ZOO, gpt_trial, mixture_trial, seeded

DEVICES = 8
Work = Callable[[int], dict[str, Any]]
OPTIMIZER = OptimizerConfig(name="adamw", lr=1e-2, eps=1e-5, weight_decay=1e-2)

SHAPES = "once for a kind of batch: what it says decides which memory is asked for"
FIRST_STEP = {
    "strategies/pipeline/p2p.py:decode": SHAPES,
    "strategies/pipeline/runtime.py:_send_outputs": SHAPES,
    "strategies/tensor/apply.py:_require_same_gradients": "it may end the run with a sentence",
}
"""By file:function, why the host may wait there in the first step."""
WAITS = {
    "torch/nn/parallel/distributed.py:_pre_forward": "DDP's own: in the second step it makes its buckets anew",
    "strategies/expert/exchange.py:__call__": "how many rows come is for the host to know, once a layer and forward",
    "app/models/grouped_linear.py:_spans": "where no kernel multiplies groups, the host cuts them: in float32",
    "app/models/grouped_linear.py:_forward": "the stand-in's own, which has no such kernel",
    "app/models/grouped_linear.py:_weight_gradient": "the stand-in's own, which has no such kernel",
}
"""In any step."""
OFFLOADED = {
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:finalize_backward": "gradients are the host's then",
    "strategies/clip.py:_norm": "they are measured there",
    "strategies/clip.py:__call__": "and scaled",
}
"""The same with parallel.offload."""
CANNOT = {
    "dp": "what scatters, copies and gathers for DataParallel is in torch's CUDA build alone (torch._C._scatter)",
    DEEPSPEED.name: "an optional extra with kernels of its own",
}
"""Rows that cannot run here, and why."""


def convolutions() -> torch.nn.Module:
    """Without GroupNorm: on a GPU it reads images with their channels last."""
    nn = torch.nn
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


IMAGES = partial(replace, ZOO["residual"], build=seeded(convolutions))


@dataclass(frozen=True)
class Case:
    """work: called on every rank, gives what the rank found. truth: the same on a CPU, for the numbers to find. slow:
    not in `make test`. imports: what ranks would import one by one otherwise."""

    name: str
    workers: int
    work: Work
    truth: Work | None = None
    tolerance: float = 1e-5
    slow: bool = False
    waits: dict[str, str] = field(default_factory=lambda: WAITS)
    imports: tuple[str, ...] = ()


def of_row(
    row: Row, slow: bool = False, precision: str = "fp32", images: bool = False, profiled: bool = False, **options: Any
) -> Case:
    layers = 4 if row.layout.dims.pp > 1 else 2
    of_cpu = {"precision": "bf16" if precision == "fp8" else precision}  # where no product is in 8 bits
    trial = mixture_trial if row.layout.dims.ep > 1 else partial(gpt_trial, tied=True, layers=layers)
    trial = IMAGES if images else trial
    return Case(
        " ".join([str(row), precision, *["images"] * images, *["profiled"] * profiled, *options]),
        row.workers,
        partial(train, trial, row, {"precision": precision} | options, "cuda", profiled=profiled),
        partial(train, trial, SINGLE, of_cpu, "cpu"),
        {"fp32": 1e-5, "fp8": 3e-2}.get(precision, 3e-3),
        slow,
        WAITS | (OFFLOADED if options.get("offload") else {}),
    )


def train(
    trial: Callable[..., Trial], row: Row, options: dict[str, Any], on: str, rank: int, *, profiled: bool = False
) -> dict[str, Any]:
    """Two steps, an evaluation, and what a save copies. on: cuda, or cpu. profiled: a pipeline's second step."""
    made, chosen = row.adapt(trial(micro_batches=2, clip=0.5), Options(**options))
    device = _own_device(row, rank) if on == "cuda" else torch.device(on)
    parallel = parallelize_trial(made, row.layout, chosen, device)
    optimizer = parallel.prepare_optimizer(build_optimizer(OPTIMIZER, parallel.parameters()))
    waits: list[list[tuple[str, str]]] = []
    numbers: list[float] = []

    def step(number: int) -> None:
        fake.waits.clear()
        numbers[:] = [values[0] for values in run_steps(made, parallel, optimizer, [number])]
        waits.append([wait for wait in fake.waits if not wait[1].startswith("experiments/parity/curves.py")])

    step(0)
    if profiled:
        began = time.monotonic()
        spans = parallel.profile(partial(step, 1))
        assert {span.kind for span in spans} >= {"F", "B", "SEND", "RECV", "REDUCE"}, spans
        assert all(0 <= span.start <= span.end <= time.monotonic() - began for span in spans), spans
        assert all(a.end <= b.start for a, b in pairwise(spans)) and spans[-1].end > 1e-3, spans
    else:
        step(1)
    parallel.module.eval()
    few = tuple(tensor[:2].to(device) for tensor in made.batch(0))
    parallel.forward(lambda module, batch: {"loss": made.loss(module, batch)}, few)
    parallel.module.train()
    Stager(Ranks()).stage({"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)})
    assert all(value.is_contiguous() for value in parallel.full_model_state().values())
    held = [*parallel.parameters(), *parallel.inner.buffers()]
    held += [value for values in optimizer.state.values() for value in values.values()]
    on_host = sorted({str(tensor.device) for tensor in held if not tensor.is_cuda})
    return {"first": waits[0], "waits": waits[1], "numbers": numbers, "on_host": [] if chosen.offload else on_host}


def _own_device(row: Row, rank: int) -> torch.device:
    several = any(record.several_devices for record in registry.known_records(row.name))
    device = torch.device("cuda", one_process.first_gpu_of_worker(several, rank, row.workers, DEVICES) % DEVICES)
    torch.cuda.set_device(device)
    return device


def staging(rank: int) -> dict[str, Any]:
    """Two saves of a state that a step changes in between, and one where the host's memory cannot be locked."""
    sizes = {"whole": (3, 1 << 20), "odd": (1000003,), "number": (), "empty": (0, 4)}
    state = {name: torch.randn(shape, device="cuda:0") for name, shape in sizes.items()} | {"host's": torch.randn(5)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    stager, where, waits = Stager(Ranks()), set(), list[Any]()

    def save(stager: Stager) -> dict[str, torch.Tensor]:
        fake.waits.clear()
        staged = stager.stage(state)
        waits[:] = fake.waits
        staged.wait()
        assert all(torch.equal(staged.values[name], tensor.cpu()) for name, tensor in state.items())
        return staged.values

    for _ in range(2):
        data = save(stager)
        assert nbytes <= stager.locked_bytes == fake.pinned_bytes() < nbytes + 64 * len(state), "as needed, and once"
        assert data["odd"].is_pinned() and data["odd"].untyped_storage().nbytes() == 4 * 1000003
        where.add(data["whole"].data_ptr())
        for tensor in state.values():
            tensor.add_(1)
    assert len(where) == 1, "into the same memory"
    stager.close()
    known = list(waits)
    assert fake.pinned_bytes() == 0
    fake.refuse_page_locks()
    save(Stager(Ranks()))
    return {"waits": known}


def visible(rank: int) -> dict[str, Any]:
    """Each of the node's processes sees its own GPU only, or several of its own, or both see the same one."""
    store = dist.FileStore(f"{tempfile.gettempdir()}/visible", 2)

    def begin(first: int, count: int, strategy: str, shown_to: str) -> list[int | None]:
        here = Environment(rank=rank, world_size=2, local_rank=2 + rank, local_world_size=4)
        os.environ |= {"LOCAL_RANK": str(here.local_rank), "LOCAL_WORLD_SIZE": str(here.local_world_size)}
        fake.show_only(first, count)
        device = own_device(here, strategy)
        assert torch.ones(1, device="cuda").device == device
        require_own_gpu(device, here, dist.PrefixStore(shown_to, store))
        return [own.index for own in one_process.worker_devices(device)]

    assert begin(rank, 1, "fsdp", "own") == [0]
    assert begin(2 * rank, 2, "ddp_model_parallel", "own two") == [0, 1]
    assert begin(0, 4, "fsdp", "all") == [2 + rank]
    assert begin(0, 8, "ddp_model_parallel", "all") == [4 + 2 * rank, 5 + 2 * rank]
    try:
        begin(0, 1, "fsdp", "the same")
    except UserError as error:
        assert "2 processes would use one GPU" in str(error), error
    else:
        raise AssertionError("two processes on one GPU were not noticed")
    return {}


def norms(rank: int) -> dict[str, Any]:
    """A norm gives what it gets under autocast, which has one of its own for CUDA, and so does its gradient."""
    norm = RMSNorm(8).cuda()
    for given, chosen in itertools.product((torch.float32, torch.bfloat16, torch.float16), repeat=2):
        x = torch.randn(2, 8, device="cuda", dtype=given, requires_grad=True)
        with torch.autocast("cuda", chosen, enabled=chosen != torch.float32):
            normalised = norm(x)
        assert normalised.dtype == given, f"{given} under autocast to {chosen} became {normalised.dtype}"
        normalised.sum().backward()
        assert x.grad is not None and x.grad.dtype == given
    return {}


def ring(rank: int) -> dict[str, Any]:
    """Attention across workers on an H100 is cuDNN's, as it is on one, and its joined results are those of a CPU."""
    group = register_group(dist.group.WORLD)
    for method, causal in itertools.product((METHODS["ring"], METHODS["allgather"]), (True, False)):
        torch.manual_seed(rank)
        on_cpu = [torch.randn(2, heads, 8, 16).bfloat16().requires_grad_() for heads in (4, 2, 2)]
        on_gpu = [tensor.detach().to("cuda").requires_grad_() for tensor in on_cpu]
        fake.cudnn.clear()
        for tensors in (on_cpu, on_gpu):
            given = method.attention(*tensors, is_causal=causal, scale=0.3, group=group)
            given.square().sum().backward()
        assert {"forward", "backward"} == set(fake.cudnn), fake.cudnn
        for one, other in zip(on_gpu, on_cpu, strict=True):
            assert one.grad is not None and other.grad is not None
            off = (one.grad.cpu().float() - other.grad.float()).norm() / other.grad.float().norm()
            assert off < 0.02, (method, causal, off)
    return {}


# --- the loop and its parts ---------------------------------------------------------------------------------------

FP16 = {"app/training/optimizer.py:accepts": "whether the gradient overflowed decides whether this step counts"}
LOOPS: dict[str, tuple[Row, dict[str, Any], dict[str, str]]] = {
    "bf16, noise scale": (SINGLE, {"precision": "bf16", "noise_scale_every": 2}, {}),
    "fp16": (SINGLE, {"precision": "fp16"}, FP16),
    "average of the weights, profile.steps": (
        Row("fsdp", 2),
        {"ema_decay": 0.9, "eval_every": 2, "profile": [3, 4]},
        {},
    ),
    "training_step with two optimizers": (Row("fsdp", 2), {"task": "tests.tasks:Gan"}, {}),
    "linear loss, 16 bits between blocks of mixtures": (SINGLE, {"task": gpt, "precision": "bf16"}, {}),
    "adapters, conversations": (Row("fsdp", 2), {"task": adapters}, {}),
    "adapters, stages": (Row("pipeline", 2), {"task": adapters}, FIRST_STEP),
}
"""What a run may have beside plain steps: where, what it is given, and which waits are known."""


def of_loop(name: str) -> Case:
    row, made, waits = LOOPS[name]
    truth, of_others = partial(loop, SINGLE, {**made, "profile": []}, "cpu"), made.get("task") is adapters
    imports = ("peft", "transformers.models.llama.modeling_llama") if of_others else ()
    tolerance = 1e-5 if made.get("precision", "fp32") == "fp32" else 3e-3
    work = partial(loop, row, made, "cuda")
    return Case(f"loop {name}", row.workers, work, truth, tolerance, row.workers > 1, WAITS | waits, imports)


# --- what must be noticed -----------------------------------------------------------------------------------------


FAULTS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a number is read": (lambda t: t.sum().item(), "_local_scalar_dense"),
    "to the host": (lambda t: t.cpu(), "copy to the host"),
    "from the host": (lambda t: torch.ones(2).to("cuda:0"), "copy to the device"),
    "to memory that is not pinned": (lambda t: torch.empty(2, 2).copy_(t, non_blocking=True), "not pinned"),
    "a mask": (lambda t: t[t > 0], "aten::nonzero"),
    "a device": (lambda t: torch.cuda.synchronize(), "device.synchronize"),
    "a stream": (lambda t: torch.cuda.current_stream().synchronize(), "stream.synchronize"),
    "an event": (lambda t: torch.cuda.current_stream().record_event().synchronize(), "event.synchronize"),
    "the host's tensor": (lambda t: t @ torch.ones(2, 2), "same device"),
    "another GPU's tensor": (lambda t: t @ torch.ones(2, 2, device="cuda:1"), "same device"),
    "no such GPU": (lambda t: torch.cuda.set_device(DEVICES), "invalid device"),
}
"""What is wrong, and what is said of it."""


def faults(rank: int) -> dict[str, Any]:
    """Each is noticed, as one problem."""
    for name, (work, words) in FAULTS.items():
        tensor = torch.ones(2, 2, device="cuda:0")
        fake.waits.clear()
        try:
            work(tensor)
            gave = {"waits": list(fake.waits)}
        except RuntimeError:
            gave = {"error": traceback.format_exc()}
        found = problems(Case(name, 1, faults), [gave], None)
        assert len(found) == 1 and words in found[0], (name, found)
    return {}


# --- the table ----------------------------------------------------------------------------------------------------

FULL = ("single", "model_parallel", "context", "ddp+expert")
HALF = ("ddp", "fsdp", "tensor")
"""Which `make test` tries in float32, and in bf16, to which these cast in a way of their own: what a name does beside
the others, in the last of its rows with the fewest workers."""
TRIED = [row for row in (SINGLE, *ROWS, *THREE_DIMENSIONS, *MIXTURES) if row.name not in CANNOT]
FEWEST = {row.name: row for row in sorted(TRIED, key=lambda row: -row.workers)}.values()
CASES = [of_row(row, row not in FEWEST or row.name not in FULL) for row in TRIED]
CASES += [of_row(row, row not in FEWEST or row.name not in HALF, "bf16") for row in TRIED]
CASES += [of_row(row, slow=True) for row in MIXTURES_OF_MORE_DIMENSIONS]
CASES += [of_row(SINGLE, precision="fp8"), of_row(Row("fsdp", 2), offload=True)]
CASES += [of_row(Row("tensor", 2), sequence_parallel=False), *(of_row(Row(n, 2), images=True) for n in ("ddp", "fsdp"))]
CASES += [of_row(row, False, "bf16", profiled=True) for row in FEWEST if str(row) == "pipeline (pp 2) zbv"]
CASES += [Case("what holds up or ends a GPU", 1, faults), Case("staging a save", 1, staging, waits={})]
CASES += [Case("which GPUs processes see", 2, visible), Case("norms under autocast", 1, norms)]
CASES += [Case("attention across workers", 2, ring)]
CASES += map(of_loop, LOOPS)


def problems(case: Case, ranks: list[dict[str, Any]], truth: dict[str, Any] | None) -> list[str]:
    """What is wrong with what a case gave."""
    found = [rank["error"] for rank in (*ranks, truth or {}) if "error" in rank]
    for rank, gave in enumerate(ranks if not found else ()):
        waits = [*gave.get("waits", ()), *(w for w in gave.get("first", ()) if w[1] not in FIRST_STEP)]
        unknown = sorted({f"{where} ({what})" for what, where in waits if where not in case.waits})
        found += [f"rank {rank} waits for the device in {where}" for where in unknown]
        found += [f"rank {rank} has its state on {device}" for device in gave.get("on_host", ())]
        if truth:
            off = [abs(a - b) / abs(b) for a, b in zip(gave["numbers"], truth["numbers"], strict=True)]
            half = len(off) // 2
            if not (max(off[:half]) <= case.tolerance and max(off[half:]) <= 10 * case.tolerance):
                found.append(f"rank {rank} has losses and norms {gave['numbers']} where a CPU has {truth['numbers']}")
    return found
