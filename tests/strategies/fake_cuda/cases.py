"""What is tried on fake CUDA devices, what cannot be, and which waits of the host are known."""

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
from unittest import mock

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
from strategies import activation_offloading, one_process, registry
from strategies.context.apply import METHODS
from strategies.context.attention import register_group
from strategies.parallelize import Options
from tests.strategies.fake_cuda import device as fake
from tests.strategies.fake_cuda.loops import adapters, gpt, run_loop
from tests.strategies.models import ZOO, gpt_trial, mixture_trial, seeded

DEVICES = 8
Wait = tuple[str, str]
"""(what the host waits for, file:function)."""
Result = dict[str, Any]
"""What a rank has found: `waits`, `first_step_waits`, `numbers`, `on_host`, or `error`."""
Work = Callable[[int], Result]
OPTIMIZER = OptimizerConfig(name="adamw", lr=1e-2, eps=1e-5, weight_decay=1e-2)

# --- known waits ----------------------------------------------------------------------------------

_SHAPES = "once for a kind of batch: shapes decide which memory is asked for"
FIRST_STEP_WAITS = {
    "strategies/pipeline/p2p.py:decode": _SHAPES,
    "strategies/pipeline/runtime.py:_send_outputs": _SHAPES,
    "strategies/tensor/apply.py:_require_same_gradients": "it may end the run with a sentence",
}
"""By file:function, why the host may wait there in the first step."""
_NO_KERNEL = "the fake device has no such kernel"
WAITS = {
    "torch/nn/parallel/distributed.py:_pre_forward": "DDP makes its buckets anew in step 2",
    "strategies/expert/exchange.py:__call__": "the host must know how many rows arrive",
    "app/models/grouped_linear.py:_spans": "without a kernel, as in float32, the host cuts groups",
    "app/models/grouped_linear.py:_forward": _NO_KERNEL,
    "app/models/grouped_linear.py:_weight_gradient": _NO_KERNEL,
}
"""By file:function, why the host may wait there in any step."""
_FSDP_PARAM_GROUP = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
OFFLOAD_WAITS = {
    f"{_FSDP_PARAM_GROUP}:finalize_backward": "gradients go to the host",
    "strategies/clip.py:_norm": "gradients are measured on the host",
    "strategies/clip.py:__call__": "gradients are scaled on the host",
}
"""The same with parallel.offload."""
CANNOT_RUN = {
    "dp": "only torch's CUDA build has what DataParallel copies with (torch._C._scatter)",
    DEEPSPEED.name: "an optional extra with kernels of its own",
}
"""Why rows cannot run here, by strategy."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something that is tried.

    Attributes:
        name: Its name as a test.
        workers: The number of ranks.
        work: What every rank does.
        reference: The same on one CPU, whose numbers a rank's must be; None if there are none.
        tolerance: The relative difference of the loss that is allowed.
        slow: Whether `make test` leaves it out.
        known_waits: By file:function, why the host may wait there.
        imports: Modules that each rank would import otherwise.
    """

    name: str
    workers: int
    work: Work
    reference: Work | None = None
    tolerance: float = 1e-5
    slow: bool = False
    known_waits: dict[str, str] = field(default_factory=lambda: WAITS)
    imports: tuple[str, ...] = ()


def problems(case: Case, results: list[Result], reference: Result | None) -> list[str]:
    """What is wrong with the results of a case.

    Args:
        case: The case.
        results: The result of each rank.
        reference: The result of the case's reference.
    """
    errors = [result["error"] for result in (*results, reference or {}) if "error" in result]
    if errors:
        return errors
    problems = []
    for rank, result in enumerate(results):
        waits: list[Wait] = list(result.get("waits", ()))
        for what, where in result.get("first_step_waits", ()):
            if where not in FIRST_STEP_WAITS:
                waits.append((what, where))
        unknown = {f"{where} ({what})" for what, where in waits if where not in case.known_waits}
        problems += [f"rank {rank} waits for the device in {wait}" for wait in sorted(unknown)]
        problems += [
            f"rank {rank} has its state on {device}" for device in result.get("on_host", ())
        ]
        if reference and not _are_equal(result["numbers"], reference["numbers"], case.tolerance):
            problems.append(
                f"rank {rank} has losses and norms {result['numbers']} where a CPU has "
                f"{reference['numbers']}"
            )
    return problems


def _are_equal(numbers: list[float], expected: list[float], tolerance: float) -> bool:
    """Whether losses, and after them as many gradient norms, differ by no more than allowed."""
    errors = [abs(a - b) / abs(b) for a, b in zip(numbers, expected, strict=True)]
    half = len(errors) // 2
    return max(errors[:half]) <= tolerance and max(errors[half:]) <= 10 * tolerance


# --- rows of the parity matrix --------------------------------------------------------------------


def _convolutions() -> torch.nn.Module:
    """Without GroupNorm, so that a GPU reads images with their channels last."""
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


_image_trial = partial(replace, ZOO["residual"], build=seeded(_convolutions))


def _row_case(
    row: Row,
    *,
    slow: bool = False,
    precision: str = "fp32",
    has_images: bool = False,
    is_profiled: bool = False,
    **options: Any,
) -> Case:
    """Two steps of a row.

    Args:
        row: The row.
        slow: Whether `make test` leaves it out.
        precision: The arithmetic.
        has_images: Whether the model is one of images.
        is_profiled: Whether the second step of a pipeline is profiled.
        options: Options of parallelism.
    """
    dims = row.layout.dims
    make_trial: Callable[..., Trial]
    if has_images:
        make_trial = _image_trial
    elif dims.ep > 1:
        make_trial = mixture_trial
    else:
        make_trial = partial(gpt_trial, tied=True, layers=4 if dims.pp > 1 else 2)
    words = [str(row), precision]
    if has_images:
        words.append("images")
    if is_profiled:
        words.append("profiled")
    # A CPU has no products in 8 bits.
    reference_options = {"precision": "bf16" if precision == "fp8" else precision}
    return Case(
        name=" ".join([*words, *options]),
        workers=row.workers,
        work=partial(
            _train_two_steps,
            make_trial,
            row,
            {"precision": precision, **options},
            "cuda",
            is_profiled=is_profiled,
        ),
        reference=partial(_train_two_steps, make_trial, SINGLE, reference_options, "cpu"),
        tolerance={"fp32": 1e-5, "fp8": 3e-2}.get(precision, 3e-3),
        slow=slow,
        known_waits=WAITS | OFFLOAD_WAITS if options.get("offload") else WAITS,
    )


def _train_two_steps(
    make_trial: Callable[..., Trial],
    row: Row,
    options: dict[str, Any],
    device_type: str,
    rank: int,
    *,
    is_profiled: bool = False,
) -> Result:
    """Two steps, an evaluation, and the copies of a save.

    Args:
        make_trial: Makes what is trained.
        row: The layout.
        options: How the layout behaves.
        device_type: cuda or cpu.
        rank: This rank.
        is_profiled: Whether the second step is profiled, of a pipeline.
    """
    trial = make_trial(micro_batches=2, clip=0.5)
    trial, parallel_options = row.adapt(trial, Options(**options))
    device = _device_of_rank(row, rank) if device_type == "cuda" else torch.device(device_type)
    parallel = parallelize_trial(trial, row.layout, parallel_options, device)
    optimizer = parallel.prepare_optimizer(build_optimizer(OPTIMIZER, parallel.parameters()))
    waits_by_step: list[list[Wait]] = []
    numbers: list[float] = []

    def step(number: int) -> None:
        fake.waits.clear()
        losses, norms = run_steps(trial, parallel, optimizer, [number])
        numbers[:] = [losses[0], norms[0]]
        waits_by_step.append([wait for wait in fake.waits if not _is_of_measurement(wait)])

    step(0)
    if is_profiled:
        _check_profile(parallel, partial(step, 1))
    else:
        step(1)
    _evaluate(parallel, trial, device)
    _stage_save(parallel, optimizer)
    tensors = [*parallel.parameters(), *parallel.inner.buffers()]
    for state in optimizer.state.values():
        tensors += state.values()
    devices_of_host_tensors = sorted({str(t.device) for t in tensors if not t.is_cuda})
    return {
        "first_step_waits": waits_by_step[0],
        "waits": waits_by_step[1],
        "numbers": numbers,
        "on_host": [] if parallel_options.offload else devices_of_host_tensors,
    }


def _trial_of_many_blocks(row: Row) -> Callable[..., Trial]:
    """So many that the tensors of some, on every stage, leave the device and return."""
    return partial(gpt_trial, layers=8 if row.layout.dims.pp > 1 else 4)


def _move_activations(row: Row, rank: int, **options: Any) -> Result:
    """Two steps in which blocks keep what they save in pinned memory of the host."""
    values = {"activation_offloading": True, **options}
    make_trial = _trial_of_many_blocks(row)
    copies = activation_offloading._StreamCopies
    counted = mock.patch.object(copies, "to_device", autospec=True, side_effect=copies.to_device)
    with mock.patch.dict(activation_offloading.SMALLEST_BYTES, {"cuda": 1}), counted as to_device:
        result = _train_two_steps(make_trial, row, values, "cuda", rank)
    assert to_device.call_count > 0, "nothing has come back from the host"
    return result


def _moving_case(row: Row, *, slow: bool = False, **options: Any) -> Case:
    """Activation offloading, whose copies nothing may wait for on the host.

    Args:
        row: The layout.
        slow: Whether `make test` leaves it out.
        options: Other options of parallelism.
    """
    make_trial = _trial_of_many_blocks(row)
    return Case(
        name=" ".join([str(row), "activations to host", *options]),
        workers=row.workers,
        work=partial(_move_activations, row, **options),
        reference=partial(_train_two_steps, make_trial, SINGLE, {}, "cpu"),
        slow=slow,
    )


def _is_of_measurement(wait: Wait) -> bool:
    """Whether the host waits only to read a number for this test."""
    _, where = wait
    return where.startswith("experiments/parity/curves.py")


def _check_profile(parallel: Any, step: Callable[[], None]) -> None:
    """Profile a step of a pipeline, and check its spans."""
    start = time.monotonic()
    spans = parallel.profile(step)
    seconds = time.monotonic() - start
    assert {span.kind for span in spans} >= {"F", "B", "SEND", "RECV", "REDUCE"}, spans
    for span in spans:
        assert 0 <= span.start <= span.end <= seconds, spans
    blocks = [span for span in spans if span.kind == "BLOCK"]
    forwards = [span for span in spans if span.kind == "F"]
    for block in blocks:
        assert any(each.start <= block.start and block.end <= each.end for each in forwards), spans
    for span, next_span in pairwise(span for span in spans if span not in blocks):
        assert span.end <= next_span.start, spans
    assert blocks, spans
    assert spans[-1].end > 1e-3, spans


def _evaluate(parallel: Any, trial: Trial, device: torch.device) -> None:
    """Compute the loss of two samples."""
    samples = tuple(tensor[:2].to(device) for tensor in trial.batch(0))
    parallel.module.eval()
    parallel.forward(lambda module, batch: {"loss": trial.loss(module, batch)}, samples)
    parallel.module.train()


def _stage_save(parallel: Any, optimizer: torch.optim.Optimizer) -> None:
    """Copy the training state to the host, as a save does."""
    state = {
        "model": parallel.model_state(),
        "optimizer": parallel.optimizer_state(optimizer),
    }
    Stager(Ranks()).stage(state)
    for tensor in parallel.full_model_state().values():
        assert tensor.is_contiguous()


def _device_of_rank(row: Row, rank: int) -> torch.device:
    several = any(record.several_devices for record in registry.known_records(row.name))
    first_gpu = one_process.first_gpu_of_worker(several, rank, row.workers, DEVICES)
    device = torch.device("cuda", first_gpu % DEVICES)
    torch.cuda.set_device(device)
    return device


# --- single parts ---------------------------------------------------------------------------------


def _stage_saves(rank: int) -> Result:
    """Two saves of a state that a step changes in between, and one without page-locked memory."""
    shapes: dict[str, tuple[int, ...]] = {
        "large": (3, 1 << 20),
        "odd": (1000003,),
        "number": (),
        "empty": (0, 4),
    }
    state = {name: torch.randn(shape, device="cuda:0") for name, shape in shapes.items()}
    state["host's"] = torch.randn(5)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    stager = Stager(Ranks())
    waits: list[Wait] = []

    def save(stager: Stager) -> dict[str, torch.Tensor]:
        fake.waits.clear()
        staged = stager.stage(state)
        waits[:] = fake.waits
        staged.wait()
        for name, tensor in state.items():
            assert torch.equal(staged.values[name], tensor.cpu()), name
        return staged.values

    addresses = set()
    for _ in range(2):
        values = save(stager)
        padding = 64 * len(state)
        assert stager.locked_bytes == fake.pinned_bytes()
        assert nbytes <= stager.locked_bytes < nbytes + padding, "as much as needed, and once"
        assert values["odd"].is_pinned()
        assert values["odd"].untyped_storage().nbytes() == 4 * 1000003
        addresses.add(values["large"].data_ptr())
        for tensor in state.values():
            tensor.add_(1)
    assert len(addresses) == 1, "the second save uses the memory of the first"
    stager.close()
    waits_with_page_locks = list(waits)
    assert fake.pinned_bytes() == 0
    fake.refuse_page_locks()
    save(Stager(Ranks()))
    return {"waits": waits_with_page_locks}


def _choose_visible_devices(rank: int) -> Result:
    """Two of four processes of a node, which see their own GPUs, all GPUs, or the same GPU."""
    store = dist.FileStore(f"{tempfile.gettempdir()}/visible", 2)

    def choose_devices(
        strategy: str, *, first_visible: int, visible: int, key: str
    ) -> list[int | None]:
        environment = Environment(rank=rank, world_size=2, local_rank=2 + rank, local_world_size=4)
        os.environ["LOCAL_RANK"] = str(environment.local_rank)
        os.environ["LOCAL_WORLD_SIZE"] = str(environment.local_world_size)
        fake.show_only(first_visible, visible)
        device = own_device(environment, strategy)
        assert torch.ones(1, device="cuda").device == device
        require_own_gpu(device, environment, dist.PrefixStore(key, store))
        return [worker_device.index for worker_device in one_process.worker_devices(device)]

    only_visible = choose_devices("fsdp", first_visible=rank, visible=1, key="own")
    assert only_visible == [0]
    both_visible = choose_devices(
        "ddp_model_parallel", first_visible=2 * rank, visible=2, key="own two"
    )
    assert both_visible == [0, 1]
    one_of_all = choose_devices("fsdp", first_visible=0, visible=4, key="all")
    assert one_of_all == [2 + rank]
    two_of_all = choose_devices("ddp_model_parallel", first_visible=0, visible=8, key="all")
    assert two_of_all == [4 + 2 * rank, 5 + 2 * rank]
    try:
        choose_devices("fsdp", first_visible=0, visible=1, key="the same")
    except UserError as error:
        assert "2 processes would use one GPU" in str(error), error
    else:
        raise AssertionError("two processes on one GPU were not noticed")
    return {}


def _normalise_under_autocast(rank: int) -> Result:
    """A norm and its gradient keep the type of the input; CUDA's autocast has a rule for norms."""
    norm = RMSNorm(8).cuda()
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for input_dtype, autocast_dtype in itertools.product(dtypes, repeat=2):
        x = torch.randn(2, 8, device="cuda", dtype=input_dtype, requires_grad=True)
        is_enabled = autocast_dtype != torch.float32
        with torch.autocast("cuda", autocast_dtype, enabled=is_enabled):
            normalised = norm(x)
        assert normalised.dtype == input_dtype, (input_dtype, autocast_dtype)
        normalised.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == input_dtype
    return {}


def _attend_across_workers(rank: int) -> Result:
    """Attention across workers on an H100 uses cuDNN's kernel, as on one device, and is right."""
    group = register_group(dist.group.WORLD)
    methods = (METHODS["ring"], METHODS["allgather"])
    for method, is_causal in itertools.product(methods, (True, False)):
        torch.manual_seed(rank)
        cpu_inputs = []
        for heads in (4, 2, 2):
            cpu_inputs.append(torch.randn(2, heads, 8, 16).bfloat16().requires_grad_())
        gpu_inputs = [tensor.detach().to("cuda").requires_grad_() for tensor in cpu_inputs]
        fake.cudnn_calls.clear()
        for inputs in (cpu_inputs, gpu_inputs):
            output = method.attention(*inputs, is_causal=is_causal, scale=0.3, group=group)
            output.square().sum().backward()
        assert set(fake.cudnn_calls) == {"forward", "backward"}
        for gpu_input, cpu_input in zip(gpu_inputs, cpu_inputs, strict=True):
            assert gpu_input.grad is not None
            assert cpu_input.grad is not None
            expected = cpu_input.grad.float()
            error = (gpu_input.grad.cpu().float() - expected).norm() / expected.norm()
            assert error < 0.02, (method, is_causal, error)
    return {}


# --- the loop and its parts -----------------------------------------------------------------------

_FP16_WAITS = {
    "app/training/optimizer.py:accepts": "whether gradients overflowed decides if the step counts"
}


def _loop_case(
    name: str,
    row: Row,
    changes: dict[str, Any],
    *,
    known_waits: dict[str, str] | None = None,
) -> Case:
    """A whole run of the training loop.

    Args:
        name: What the run has beside plain steps.
        row: The layout.
        changes: See `run_loop`.
        known_waits: Waits that only this run has.
    """
    imports: tuple[str, ...] = ()
    if changes.get("task") is adapters:
        imports = ("peft", "transformers.models.llama.modeling_llama")
    is_float32 = changes.get("precision", "fp32") == "fp32"
    return Case(
        name=f"loop {name}",
        workers=row.workers,
        work=partial(run_loop, row, changes, "cuda"),
        reference=partial(run_loop, SINGLE, {**changes, "profile": []}, "cpu"),
        tolerance=1e-5 if is_float32 else 3e-3,
        slow=name != "fp16",  # which reads a number more than the others
        known_waits=WAITS | (known_waits or {}),
        imports=imports,
    )


LOOP_CASES = [
    _loop_case("bf16, noise scale", SINGLE, {"precision": "bf16", "noise_scale_every": 2}),
    _loop_case("fp16", SINGLE, {"precision": "fp16"}, known_waits=_FP16_WAITS),
    _loop_case(
        "average of the weights, profile.steps",
        Row("fsdp", 2),
        {"ema_decay": 0.9, "eval_every": 2, "profile": [3, 4]},
    ),
    _loop_case("training_step with two optimizers", Row("fsdp", 2), {"task": "tests.tasks:Gan"}),
    _loop_case(
        "linear loss, 16 bits between blocks of mixtures",
        SINGLE,
        {"task": gpt, "precision": "bf16"},
    ),
    _loop_case("adapters, conversations", Row("fsdp", 2), {"task": adapters}),
    _loop_case(
        "adapters, stages",
        Row("pipeline", 2),
        {"task": adapters},
        known_waits=FIRST_STEP_WAITS,
    ),
]


# --- what must be noticed -------------------------------------------------------------------------


FAULTS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a number is read": (lambda t: t.sum().item(), "_local_scalar_dense"),
    "to the host": (lambda t: t.cpu(), "copy to the host"),
    "from the host": (lambda t: torch.ones(2).to("cuda:0"), "copy to the device"),
    "to memory that is not pinned": (
        lambda t: torch.empty(2, 2).copy_(t, non_blocking=True),
        "not pinned",
    ),
    "a mask": (lambda t: t[t > 0], "aten::nonzero"),
    "a device": (lambda t: torch.cuda.synchronize(), "device.synchronize"),
    "a stream": (lambda t: torch.cuda.current_stream().synchronize(), "stream.synchronize"),
    "an event": (
        lambda t: torch.cuda.current_stream().record_event().synchronize(),
        "event.synchronize",
    ),
    "the host's tensor": (lambda t: t @ torch.ones(2, 2), "same device"),
    "another GPU's tensor": (lambda t: t @ torch.ones(2, 2, device="cuda:1"), "same device"),
    "no such GPU": (lambda t: torch.cuda.set_device(DEVICES), "invalid device"),
}
"""What is wrong, and words of the problem that it must be."""


def _cause_faults(rank: int) -> Result:
    """Check that each fault is noticed, as one problem."""
    for name, (fault, words) in FAULTS.items():
        tensor = torch.ones(2, 2, device="cuda:0")
        fake.waits.clear()
        try:
            fault(tensor)
            result: Result = {"waits": list(fake.waits)}
        except RuntimeError:
            result = {"error": traceback.format_exc()}
        case = Case(name=name, workers=1, work=_cause_faults)
        (problem,) = problems(case, [result], None)
        assert words in problem, (name, problem)
    return {}


# --- the table ------------------------------------------------------------------------------------

FAST_IN_FLOAT32 = ("single", "model_parallel", "context", "ddp+expert")
"""Strategies that `make test` tries in float32, in the last of the rows with the fewest workers."""
FAST_IN_BF16 = ("ddp", "fsdp", "tensor")
"""Strategies that `make test` tries in bf16, to which each casts in its own way."""


def _row_cases() -> list[Case]:
    rows = [
        row for row in (SINGLE, *ROWS, *THREE_DIMENSIONS, *MIXTURES) if row.name not in CANNOT_RUN
    ]
    smallest_rows = {row.name: row for row in sorted(rows, key=lambda row: -row.workers)}
    float32_cases = []
    bf16_cases = []
    for row in rows:
        is_smallest = row in smallest_rows.values()
        is_fast = is_smallest and row.name in FAST_IN_FLOAT32
        float32_cases.append(_row_case(row, slow=not is_fast))
        is_fast = is_smallest and row.name in FAST_IN_BF16
        bf16_cases.append(_row_case(row, slow=not is_fast, precision="bf16"))
    zero_bubble_rows = [row for row in smallest_rows.values() if str(row) == "pipeline (pp 2) zbv"]
    return [
        *float32_cases,
        *bf16_cases,
        *(_row_case(row, slow=True) for row in MIXTURES_OF_MORE_DIMENSIONS),
        _row_case(SINGLE, precision="fp8"),
        _row_case(Row("fsdp", 2), offload=True),
        _moving_case(SINGLE),
        _moving_case(Row("fsdp", 2), slow=True),
        _moving_case(Row("pipeline", 2), slow=True),
        _moving_case(Row("model_parallel", 1), slow=True),
        _row_case(Row("tensor", 2), slow=True, sequence_parallel=False),
        _row_case(Row("ddp", 2), has_images=True),
        _row_case(Row("fsdp", 2), slow=True, has_images=True),
        *(_row_case(row, precision="bf16", is_profiled=True) for row in zero_bubble_rows),
    ]


CASES = [
    *_row_cases(),
    Case(name="what holds up or ends a GPU", workers=1, work=_cause_faults),
    Case(name="staging a save", workers=1, work=_stage_saves, known_waits={}),
    Case(name="which GPUs processes see", workers=2, work=_choose_visible_devices),
    Case(name="norms under autocast", workers=1, work=_normalise_under_autocast),
    Case(name="attention across workers", workers=2, work=_attend_across_workers),
    *LOOP_CASES,
]
