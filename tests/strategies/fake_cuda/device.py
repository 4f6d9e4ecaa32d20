"""Fake CUDA devices for a CPU build of torch: device.cpp, and what torch.cuda needs above it.

Numbers are real: an operation on a device's tensors is the CPU's own on the same memory, and a
collective is gloo's. So what a layout computes can be compared with a CPU. An operation on tensors
of several devices is refused. What would make the host wait for a GPU is recorded in `waits`, with
the place in our code that asked for it. Fake devices cannot show what streams and NCCL do at the
same time, speed, or memory.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
ROOT = str(SOURCE.parents[3])
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    is_integrated=False,
)
waits: list[tuple[str, str]] = []
"""What would have made the host wait, and where.

The place is a file:function of ours, or of torch if none of ours called it.
"""
cudnn_calls: list[str] = []
"""Which of cuDNN's operators were called: forward or backward."""
_library: Any = None


class NoFakeCUDA(Exception):
    """There are no fake CUDA devices here; one sentence says why."""


def library() -> Path:
    """The compiled device.cpp, compiled once for itself and a version of torch.

    Raises:
        NoFakeCUDA: There is no compiler, it cannot compile this, or torch has real CUDA.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise NoFakeCUDA("fake CUDA needs a C++ compiler, and there is none")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder = Path(spec.origin).parent
    version = importlib.metadata.version("torch")
    if Path(torch_folder, "lib", "libtorch_cuda.so").exists():
        raise NoFakeCUDA("fake CUDA needs a torch without CUDA of its own")
    key = SOURCE.read_bytes() + f"{torch_folder} {version}".encode()
    name = hashlib.sha256(key).hexdigest()[:16]
    compiled = Path(tempfile.gettempdir(), f"trireme-fake-cuda-{os.getuid()}", f"{name}.so")
    if not compiled.exists():
        compiled.parent.mkdir(mode=0o700, exist_ok=True)
        partial_file = compiled.with_suffix(f".{os.getpid()}")
        _compile(compiler, torch_folder, version, output=partial_file)
        partial_file.rename(compiled)
    return compiled


def _compile(compiler: str, torch_folder: Path, version: str, *, output: Path) -> None:
    command = [
        compiler,
        "-O0",
        "-shared",
        "-fPIC",
        "-std=c++20",
        str(SOURCE),
        "-o",
        str(output),
        f"-I{torch_folder}/include",
        f"-L{torch_folder}/lib",
        f"-Wl,-rpath,{torch_folder}/lib",
        "-lc10",
        "-ltorch_cpu",
    ]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        first_error = next((line for line in process.stderr.splitlines() if "error" in line), "")
        raise NoFakeCUDA(f"fake CUDA does not compile with torch {version}: {first_error}")


def install(devices: int) -> None:
    """Give this process fake devices, for good; it must not have imported torch yet.

    Args:
        devices: How many.

    Raises:
        NoFakeCUDA: See `library`.
    """
    global _library
    assert "torch" not in sys.modules, "torch looks for devices only when it is imported"
    compiled = str(library())
    with _without_stderr():  # torch warns that collectives are registered a second time
        _library = ctypes.CDLL(compiled, mode=ctypes.RTLD_GLOBAL)
    _library.record_wait = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_record_wait)
    _library.fake_cuda_begin(devices, _library.record_wait)
    _library.fake_cuda_pinned.restype = ctypes.c_size_t
    _library.fake_cuda_resize.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _library.fake_cuda_register.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _library.fake_cuda_unregister.argtypes = (ctypes.c_void_p,)
    _patch_torch(devices)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def show_only(first: int, count: int) -> None:
    """Let this process see only some of the devices, as CUDA_VISIBLE_DEVICES would.

    Args:
        first: The machine's number of the first one.
        count: How many.
    """
    import torch

    def get_device_properties(device: Any = None) -> SimpleNamespace:
        index = torch.device(device or "cuda").index or 0
        return SimpleNamespace(**vars(PROPERTIES), uuid=f"GPU-{first + index}")

    _library.fake_cuda_begin(count, _library.record_wait)
    torch.cuda.device_count = lambda: count  # type: ignore[assignment]
    torch.cuda.get_device_properties = get_device_properties  # type: ignore[assignment]


def refuse_page_locks() -> None:
    """Let cudaHostRegister fail from now on; the CUDA runtime remembers the failure."""
    _library.fake_cuda_refuse(1)


def pinned_bytes() -> int:
    """The bytes of the host's page-locked memory."""
    return _library.fake_cuda_pinned()


def _record_wait(what: bytes) -> None:
    waits.append((what.decode(), _place_of_wait()))


def _place_of_wait() -> str:
    """file:function of the innermost caller that is ours.

    If torch's distributed layers or optimizers are further in, it is theirs.
    """
    # The two innermost frames are this function and `_record_wait`.
    frame = sys._getframe(2) if sys._getframe(1).f_back else None
    while frame is not None:
        file = frame.f_code.co_filename
        name = frame.f_code.co_name
        _, _, file_in_package = file.rpartition("site-packages/")
        is_ours = file.startswith(ROOT) and file_in_package == file
        # `__torch_function__` only passes calls on.
        if is_ours and name != "__torch_function__":
            return f"{os.path.relpath(file, ROOT)}:{name}"
        if file_in_package.startswith(("torch/distributed/", "torch/nn/parallel/", "torch/optim/")):
            return f"{file_in_package}:{name}"
        frame = frame.f_back
    return "torch's backward"


# --- torch.cuda -----------------------------------------------------------------------------------


def _patch_torch(devices: int) -> None:
    """Replace what only torch's CUDA build has."""
    import torch

    _patch_cuda_module(devices)
    torch.empty(1, pin_memory=True)  # after this, torch takes CUDA to be initialised
    torch.version.cuda = "13.0"  # type: ignore[assignment]

    cpu_resize = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return cpu_resize(storage, size)
        _library.fake_cuda_resize(storage._cdata, size)
        return storage

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    operators = torch.library.Library("aten", "IMPL")
    _library.operators = operators  # they exist as long as this object
    # torch chooses a kernel by a table that has no column for CUDA in the CPU build.
    for key in ("CUDA", "AutogradCUDA"):
        operators.impl("scaled_dot_product_attention", _attention, key)
    operators.impl("addmm.dtype_out", _float32_addmm, "CUDA")  # exists on CUDA only
    operators.impl("_scaled_dot_product_cudnn_attention", _cudnn_attention, "CUDA")
    operators.impl(
        "_scaled_dot_product_cudnn_attention_backward", _cudnn_attention_backward, "CUDA"
    )

    def can_use_cudnn_attention(params: Any, debug: bool = False) -> bool:
        query = params.query
        return query.dtype in (torch.bfloat16, torch.float16) and query.requires_grad

    setattr(torch.backends.cuda, "can_use_cudnn_attention", can_use_cudnn_attention)  # noqa: B010


def _patch_cuda_module(devices: int) -> None:
    """Replace functions and classes of torch.cuda."""
    import torch

    accelerator = torch.accelerator
    cuda = torch.cuda

    def full_device(device: Any = None) -> torch.device:
        """The device with its index."""
        if isinstance(device, int):
            return torch.device("cuda", device)
        device = torch.device(device or "cuda")
        if device.index is not None:
            return device
        return torch.device("cuda", accelerator.current_device_index())

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **identity: int) -> Any:
            if identity:
                return super().__new__(cls, **identity)
            return super().__new__(cls, device=full_device(device), priority=priority)

    def make_event(
        enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        return torch.Event("cuda", enable_timing=enable_timing)

    @contextlib.contextmanager
    def stream_context(stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        stream_before = accelerator.current_stream(stream.device)
        accelerator.set_stream(stream)
        try:
            yield
        finally:
            accelerator.set_stream(stream_before)

    def current_stream(device: Any = None) -> Any:
        stream = accelerator.current_stream(full_device(device))
        return Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )

    def default_stream(device: Any = None) -> Any:
        return Stream(stream_id=0, device_index=full_device(device).index, device_type=1)

    def exchange_device(index: int) -> int:
        index_before = accelerator.current_device_index()
        if index >= 0:
            accelerator.set_device_index(index)
        return index_before

    def set_device(device: Any) -> None:
        # As in torch, this refuses a device without an index.
        index = cuda._utils._get_device_index(device)
        accelerator.set_device_index(index)

    def cudart() -> SimpleNamespace:
        return SimpleNamespace(
            cudaHostRegister=lambda memory, size, flags: _library.fake_cuda_register(memory, size),
            cudaHostUnregister=_library.fake_cuda_unregister,
        )

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        total = PROPERTIES.total_memory
        return total - (1 << 30), total

    def zero(*_: Any) -> int:
        return 0

    replacements: dict[str, Any] = {
        "_initialized": True,
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "current_device": accelerator.current_device_index,
        "set_device": set_device,
        "cudart": cudart,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "synchronize": lambda device=None: accelerator.synchronize(full_device(device)),
        "Stream": Stream,
        "Event": make_event,
        "stream": stream_context,
        "set_stream": accelerator.set_stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "default_generators": tuple(torch.Generator() for _ in range(devices)),
        "manual_seed": zero,
        "manual_seed_all": zero,
        "get_device_properties": lambda device=None: PROPERTIES,
        "mem_get_info": mem_get_info,
        "memory_allocated": zero,
        "max_memory_allocated": zero,
        "memory_reserved": zero,
        "max_memory_reserved": zero,
        "reset_peak_memory_stats": zero,
        "empty_cache": zero,
    }
    for name, value in replacements.items():
        setattr(cuda, name, value)


# --- operators ------------------------------------------------------------------------------------


def _float32_addmm(
    total: Any,
    left: Any,
    right: Any,
    out_dtype: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Any,
) -> Any:
    product = left.to(out_dtype) @ right.to(out_dtype)
    return out.copy_(beta * total + alpha * product)


def _attention(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    kwargs |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False))
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        # The operator below would add a boolean mask to the scores as 0 and 1.
        bias = torch.zeros_like(mask, dtype=q.dtype)
        kwargs["attn_mask"] = bias.masked_fill_(mask.logical_not(), -torch.inf)
    output, *_ = torch.ops.aten._scaled_dot_product_attention_math.default(q, k, v, **kwargs)
    return output


def _probabilities(
    q: Any, k: Any, *, is_causal: bool, scale: float | None, lse: Any = None
) -> tuple[Any, Any]:
    """What each query takes from each key, in float32.

    Args:
        q: The queries.
        k: The keys.
        is_causal: Whether query i sees keys 0 to i only.
        scale: Factor of the scores.
        lse: The log-sum-exp, if it is known.

    Returns:
        The probabilities, and the log-sum-exp with a last dimension of 1, as cuDNN has it.
    """
    import torch

    scores = (q @ k.mT).float() * (scale or q.size(-1) ** -0.5)
    if is_causal:
        is_hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(is_hidden, -torch.inf)
    if lse is None:
        lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp(), lse


def _cudnn_attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    import torch

    assert bias is None
    assert compute_log_sumexp
    assert dropout_p == 0.0
    assert q.dtype == torch.bfloat16
    cudnn_calls.append("forward")
    probabilities, lse = _probabilities(q, k, is_causal=is_causal, scale=scale)
    output = probabilities.to(v.dtype) @ v
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    return output, lse, unused, unused, q.size(2), k.size(2), unused, unused, unused


def _cudnn_attention_backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    seed: Any,
    offset: Any,
    bias: Any,
    *args: Any,
    scale: float,
) -> Any:
    *_, is_causal = args
    assert lse.shape == (*q.shape[:-1], 1), "as cuDNN has it"
    assert out.dtype == grad.dtype == q.dtype
    cudnn_calls.append("backward")
    probabilities, _ = _probabilities(q, k, is_causal=is_causal, scale=scale, lse=lse)
    probability_gradients = (grad @ v.mT).float()
    row_sums = (grad.float() * out.float()).sum(-1, keepdim=True)
    score_gradients = (probabilities * (probability_gradients - row_sums) * scale).to(q.dtype)
    return score_gradients @ k, score_gradients.mT @ q, probabilities.to(v.dtype).mT @ grad
