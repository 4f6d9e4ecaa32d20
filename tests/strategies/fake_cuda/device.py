"""A CPU build of torch that has CUDA devices: device.cpp, and the face of torch.cuda over it.

Numbers are real: an operation on a device's tensors is the CPU's own on the same memory, a collective is gloo's. So
what a layout computes can be compared with the CPU's. An operation on tensors of several devices is refused, and what
would make the host wait for a GPU is noted in `waits` with the place in our code that asked for it. What it cannot
show: what streams and NCCL do at the same time, speed, and memory.
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
"""What would have made the host wait, and where: file:function of ours, or of torch where none of ours called it."""
_library: Any = None


class NoFakeCUDA(Exception):
    """One sentence: why there is no fake CUDA here."""


def library() -> Path:
    """The compiled device.cpp, made once for it and a version of torch.

    Raises:
        NoFakeCUDA: there is none, it cannot compile this, or torch has real CUDA.
    """
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise NoFakeCUDA("fake CUDA needs a C++ compiler, and there is none")
    found = importlib.util.find_spec("torch")
    home, version = Path(found.origin).parent, importlib.metadata.version("torch")
    if Path(home, "lib", "libtorch_cuda.so").exists():
        raise NoFakeCUDA("fake CUDA needs a torch without CUDA of its own")
    name = hashlib.sha256(SOURCE.read_bytes() + f"{home} {version}".encode()).hexdigest()[:16]
    made = Path(tempfile.gettempdir(), f"trireme-fake-cuda-{os.getuid()}", f"{name}.so")
    if not made.exists():
        made.parent.mkdir(mode=0o700, exist_ok=True)
        part = made.with_suffix(f".{os.getpid()}")
        line = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", str(part), f"-I{home}/include"]
        line += [f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-lc10", "-ltorch_cpu"]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            wrong = next((said for said in done.stderr.splitlines() if "error" in said), "")
            raise NoFakeCUDA(f"fake CUDA does not compile with torch {version}: {wrong}")
        part.rename(made)
    return made


def install(devices: int) -> None:
    """Gives this process, which has not imported torch yet, that many devices. Not to be undone.

    Raises:
        NoFakeCUDA: see `library`.
    """
    global _library
    assert "torch" not in sys.modules, "torch asks once, when it is imported, whether there are devices"
    compiled = str(library())
    with _quiet():  # torch says that collectives are registered a second time
        _library = ctypes.CDLL(compiled, mode=ctypes.RTLD_GLOBAL)
    _library.told = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda what: waits.append((what.decode(), _place())))
    _library.fake_cuda_begin(devices, _library.told)
    _library.fake_cuda_pinned.restype = ctypes.c_size_t
    for taking in (_library.fake_cuda_resize, _library.fake_cuda_register):
        taking.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _library.fake_cuda_unregister.argtypes = (ctypes.c_void_p,)
    _face(devices)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def show_only(first: int, count: int) -> None:
    """From here on this process sees `count` devices, the machine's from `first` on, as CUDA_VISIBLE_DEVICES would."""
    import torch

    _library.fake_cuda_begin(count, _library.told)
    names = [f"GPU-{first + index}" for index in range(count)]
    torch.cuda.device_count = lambda: count  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(  # type: ignore[assignment]
        **vars(PROPERTIES), uuid=names[torch.device(device or "cuda").index or 0]
    )


def refuse_page_locks() -> None:
    """From here on cudaHostRegister refuses, and the CUDA runtime remembers that it did."""
    _library.fake_cuda_refuse(1)


def pinned_bytes() -> int:
    return _library.fake_cuda_pinned()


def _place() -> str:
    """Torch's own where its distributed layers or optimizers ask, else the innermost of ours."""
    frame = sys._getframe(2) if sys._getframe(1).f_back else None
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        inside = file.rpartition("site-packages/")[2]
        if file.startswith(ROOT) and inside == file and name != "__torch_function__":  # which passes on what was asked
            return f"{os.path.relpath(file, ROOT)}:{name}"
        if inside.startswith(("torch/distributed/", "torch/nn/parallel/", "torch/optim/")):
            return f"{inside}:{name}"
        frame = frame.f_back
    return "torch's backward"


# --- the face -----------------------------------------------------------------------------------------------------


def _face(devices: int) -> None:
    """What torch.cuda asks of the part of torch that only its CUDA build has."""
    import torch

    accelerator, cuda = torch.accelerator, torch.cuda

    def of(device: Any = None) -> torch.device:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return found if found.index is not None else torch.device("cuda", accelerator.current_device_index())

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **told: int) -> Any:
            given = told or {"device": of(device), "priority": priority}
            return super().__new__(cls, **given)

    def event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event("cuda", enable_timing=enable_timing)

    @contextlib.contextmanager
    def stream(chosen: Any) -> Any:
        if chosen is None:
            yield
            return
        before = accelerator.current_stream(chosen.device)
        accelerator.set_stream(chosen)
        try:
            yield
        finally:
            accelerator.set_stream(before)

    def current_stream(device: Any = None) -> Any:
        found = accelerator.current_stream(of(device))
        return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)

    def exchange(index: int) -> int:
        before = accelerator.current_device_index()
        if index >= 0:
            accelerator.set_device_index(index)
        return before

    def set_device(device: Any) -> None:
        index = cuda._utils._get_device_index(device)  # which refuses a device without an index, as torch has it
        accelerator.set_device_index(index)

    def is_not(*_: Any) -> int:
        return 0

    given: dict[str, Any] = {
        "_initialized": True,
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "current_device": accelerator.current_device_index,
        "set_device": set_device,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda memory, size, flags: _library.fake_cuda_register(memory, size),
            cudaHostUnregister=_library.fake_cuda_unregister,
        ),
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "synchronize": lambda device=None: accelerator.synchronize(of(device)),
        "Stream": Stream,
        "Event": event,
        "stream": stream,
        "set_stream": accelerator.set_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(stream_id=0, device_index=of(device).index, device_type=1),
        "default_generators": tuple(torch.Generator() for _ in range(devices)),
        "manual_seed": is_not,
        "manual_seed_all": is_not,
        "get_device_properties": lambda device=None: PROPERTIES,
        "mem_get_info": lambda device=None: (PROPERTIES.total_memory - (1 << 30), PROPERTIES.total_memory),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), is_not),
        **dict.fromkeys(("reset_peak_memory_stats", "empty_cache"), is_not),
    }
    for name, value in given.items():
        setattr(cuda, name, value)
    torch.empty(1, pin_memory=True)  # from here on torch takes CUDA to be initialised
    torch.version.cuda = "13.0"  # type: ignore[assignment]

    resized = torch.UntypedStorage.resize_

    def resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resized(self, size)
        _library.fake_cuda_resize(self._cdata, size)
        return self

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    # It picks a kernel by a table that the CPU build has no column in for CUDA.
    operators = torch.library.Library("aten", "IMPL")
    _library.kept = operators
    for key in ("CUDA", "AutogradCUDA"):
        operators.impl("scaled_dot_product_attention", _attention, key)
    operators.impl("addmm.dtype_out", _product_in_float32, "CUDA")  # which there is on CUDA alone
    operators.impl("_scaled_dot_product_cudnn_attention", _cudnn_attention, "CUDA")
    operators.impl("_scaled_dot_product_cudnn_attention_backward", _cudnn_attention_backward, "CUDA")
    torch.backends.cuda.can_use_cudnn_attention = lambda params, debug=False: (  # type: ignore[assignment]
        params.query.dtype in (torch.bfloat16, torch.float16) and params.query.requires_grad
    )


def _product_in_float32(
    total: Any, left: Any, right: Any, out_dtype: Any, *, beta: float = 1, alpha: float = 1, out: Any
) -> Any:
    return out.copy_(beta * total + alpha * (left.to(out_dtype) @ right.to(out_dtype)))


def _attention(q: Any, k: Any, v: Any, *given: Any, **named: Any) -> Any:
    import torch

    named |= dict(zip(("attn_mask", "dropout_p", "is_causal"), given, strict=False))
    mask = named.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:  # this one would add it to the scores as 0 and 1
        named["attn_mask"] = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    return torch.ops.aten._scaled_dot_product_attention_math.default(q, k, v, **named)[0]


cudnn: list[str] = []
"""Which of cuDNN's operators were called."""


def _shares(q: Any, k: Any, causal: bool, scale: float | None, lse: Any = None) -> Any:
    """(what each query takes of each key, log-sum-exp with a last dimension of 1, as cuDNN has it), float32."""
    import torch

    scores = (q @ k.mT).float() * (scale or q.size(-1) ** -0.5)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(hidden, -torch.inf)
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

    assert bias is None and compute_log_sumexp and dropout_p == 0.0 and q.dtype == torch.bfloat16, "as it is called"
    cudnn.append("forward")
    shares, lse = _shares(q, k, is_causal, scale)
    nothing = torch.empty((), dtype=torch.int64, device=q.device)
    return (shares.to(v.dtype) @ v), lse, nothing, nothing, q.size(2), k.size(2), nothing, nothing, nothing


def _cudnn_attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seed: Any, offset: Any, bias: Any, *given: Any, scale: float
) -> Any:
    *_, is_causal = given
    assert lse.shape == (*q.shape[:-1], 1) and out.dtype == grad.dtype == q.dtype, "as cuDNN has them"
    cudnn.append("backward")
    shares, _ = _shares(q, k, is_causal, scale, lse)
    slopes = shares * ((grad @ v.mT).float() - (grad.float() * out.float()).sum(-1, keepdim=True)) * scale
    narrow = slopes.to(q.dtype)
    return narrow @ k, narrow.mT @ q, shares.to(v.dtype).mT @ grad
