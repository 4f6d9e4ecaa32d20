"""Activation offloading: what a block saves for backward waits in host memory.

Backward uses what forward has saved in the reverse order. So the tensors of the first blocks lie on
the device, unused, for most of a step. Here a block's tensors are copied to the host while the next
block computes, and are copied back while backward computes the block after it. At most two blocks
have their tensors on the device at any time. Checkpointing recomputes the same tensors instead,
which takes a third more arithmetic. Copying takes no arithmetic, and costs time only where it takes
longer than the computation beside it. Rhu et al. 2016 (vDNN), https://arxiv.org/abs/1602.08124;
`torch.autograd.graph.saved_tensors_hooks`.

    forward    block k computes, block k - 1 is copied to the host, block k - 2 is freed
    backward   block k computes, block k - 1 is copied to the device

- *What is moved*: whole storages, each of them once, however many tensors share it. So every tensor
  comes back with its strides and still shares its memory with the same tensors, and backward
  computes the same bits.
- *What stays on the device*: parameters and buffers, 16-bit copies of weights that autocast keeps
  anyway, arguments that several blocks share (masks), small tensors (`SMALLEST_BYTES`), and the
  tensors of the last block, which backward needs first. (In a pipeline the forwards of other
  micro-batches come before that backward, so there the last block's tensors are moved too.)
- *With checkpointing* a block saves only its input, and that is moved. What `selective` keeps stays
  on the device.
- *On GPUs* copies run on a stream of their own, to and from pinned memory, and the computing stream
  waits for a copy only when it needs what was copied. *On CPUs*, whose memory is the host's, the
  copies are made all the same: this saves no memory, but it tests that the model trains with
  offloading.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from strategies.grad_sync import local
from strategies.tree import tree_leaves

SMALLEST_BYTES = {"cuda": 2**20, "cpu": 2**10}
"""Storages of fewer bytes stay, by the type of the device.

A copy of 1 MiB over PCIe takes 40 µs, about as long as launching two copies and waiting for them.
"""
ON_DEVICE = 2
"""Blocks whose tensors are on the device at a time."""


@dataclass
class Moved:
    """What has been moved to host memory since the start, counted once for each copy.

    Attributes:
        tensors: How many storages.
        bytes: Their bytes.
    """

    tensors: int = 0
    bytes: int = 0


def apply(
    module: nn.Module, blocks: list[str], device: torch.device, *, is_pipeline: bool = False
) -> Moved:
    """Make blocks keep what they save for backward in host memory, by replacing their forward.

    Args:
        module: The model.
        blocks: The names of its repeating blocks. Without any, the whole module is one block.
        device: Where the model computes.
        is_pipeline: Whether forwards of other micro-batches come between a forward and its
            backward.

    Returns:
        The count of what is moved, which grows as the model trains.
    """
    moves = _Moves(device)
    names = list(dict.fromkeys(blocks)) or [""]
    for index, name in enumerate(names):
        block = module.get_submodule(name)
        is_moved = is_pipeline or len(names) == 1 or index < len(names) - 1
        block.forward = _moving_forward(
            block, block.forward, moves=moves, index=index, is_moved=is_moved
        )
    return moves.count


def moved_blocks(blocks: int, *, is_pipeline: bool) -> int:
    """How many of a model's blocks, or of a stage's, have their tensors moved."""
    return blocks if is_pipeline or blocks == 1 else blocks - 1


def _moving_forward(
    block: nn.Module, forward: Callable[..., Any], *, moves: _Moves, index: int, is_moved: bool
) -> Callable[..., Any]:
    """A forward of a block that moves what it saves.

    Args:
        block: The block.
        forward: Its forward.
        moves: What the blocks of a model share.
        index: The block's place among them.
        is_moved: Whether its own tensors are moved; if not, it only frees those of blocks before.
    """

    # Compiled code may call this forward, and must not trace the copies into its graph.
    @torch.compiler.disable(recursive=False)
    @functools.wraps(forward)
    def moving_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        moves.free_before(index)
        if not is_moved:
            return forward(*args, **kwargs)
        shared = moves.shared_with_last_call(tree_leaves((args, kwargs)))
        call = moves.begin(index, _KeptOnDevice(block, shared))
        with saved_tensors_hooks(call.pack, _unpack):
            return forward(*args, **kwargs)

    return moving_forward


class _KeptOnDevice:
    """What a block may save but does not move: its weights, and arguments of the block before it.

    It is made anew for each forward, because sharded parameters are gathered into other memory each
    time.

    Args:
        block: The block.
        shared: Tensors that other blocks use too, such as masks and rotary tables. If they were
            moved, each block would copy them, and they would stay on the device all the same.
    """

    def __init__(self, block: nn.Module, shared: list[Tensor]) -> None:
        self._block = block
        self._shared = shared
        # Experts that are sharded by themselves are gathered only when the block calls them.
        self._gathers_later = any(
            isinstance(part, FSDPModule) for part in block.modules() if part is not block
        )
        self._read()

    def _read(self) -> None:
        tensors = [*self._block.parameters(), *self._block.buffers()]
        with torch.no_grad():
            weights = [local(tensor) for tensor in tensors]
        self._addresses = {
            tensor.untyped_storage().data_ptr()
            for tensor in [*weights, *self._shared]
            if _is_plain(tensor)
        }
        self._shapes = {
            tuple(tensor.shape)
            for tensor in weights
            if tensor.dtype == torch.float32 and tensor.dim() > 1
        }

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of one of these, or of the 16-bit copy of a weight.

        Autocast's copies are recognised by their shape: a layer saves the copy of its matrix
        transposed, as it multiplies by it. Another tensor of that shape and layout hardly ever
        occurs; it would stay on the device.
        """
        if self._gathers_later:
            self._read()
        if tensor.untyped_storage().data_ptr() in self._addresses:
            return True
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            return False
        if tensor.dim() == 2:
            return tuple(tensor.shape[::-1]) in self._shapes and tensor.stride(0) == 1
        return tuple(tensor.shape) in self._shapes


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has a storage of its own with its numbers in it as they are."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
    )


class _Moves:
    """What the blocks of a model share.

    Args:
        device: Where the model computes.

    Attributes:
        count: What has been moved.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = Moved()
        self._type = device.type
        self._smallest = SMALLEST_BYTES.get(device.type, 0)
        self._copies: dict[torch.device, _Copies] = {}
        self._arguments: list[weakref.ref[Tensor]] = []
        """Those of the latest call."""
        self._on_device: deque[_Call] = deque()
        """The calls whose tensors are still on the device as well, the latest last."""

    def shared_with_last_call(self, arguments: list[Any]) -> list[Tensor]:
        """The tensors among a call's arguments that the call before it had as arguments too."""
        before = {id(tensor) for tensor in (reference() for reference in self._arguments)}
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        self._arguments = [weakref.ref(tensor) for tensor in tensors]
        return [tensor for tensor in tensors if id(tensor) in before]

    def begin(self, index: int, kept: _KeptOnDevice) -> _Call:
        """A call of a block's forward."""
        before = self._on_device[-1] if self._on_device else None
        if before is not None and before.index != index - 1:
            before = None
        call = _Call(self, index=index, kept=kept, before=before)
        self._on_device.append(call)
        return call

    def free_before(self, index: int) -> None:
        """Free, on the device, what calls before the latest one have saved.

        Args:
            index: The place of the block that begins.
        """
        while len(self._on_device) >= ON_DEVICE or (index == 0 and self._on_device):
            for storage in self._on_device.popleft().storages():
                storage.free()

    def is_moved(self, tensor: Tensor, kept: _KeptOnDevice) -> bool:
        """Whether a saved tensor is moved."""
        if tensor.device.type != self._type or not _is_plain(tensor):
            return False
        size = tensor.untyped_storage().nbytes()
        is_whole = size % tensor.element_size() == 0
        return size >= self._smallest and is_whole and not kept.has(tensor)

    def copies_of(self, device: torch.device) -> _Copies:
        """The copies from and to a device; a model in one process may be on several."""
        if device not in self._copies:
            make = _StreamCopies if device.type == "cuda" else _Copies
            self._copies[device] = make(device)
        return self._copies[device]


class _Call:
    """One call of a block's forward, and what it has saved.

    Args:
        moves: What the blocks share.
        index: The block's place among the blocks.
        kept: What is not moved.
        before: The call of the block before it, for the same micro-batch, if that has moved what it
            saved.
    """

    def __init__(
        self, moves: _Moves, *, index: int, kept: _KeptOnDevice, before: _Call | None
    ) -> None:
        self.index = index
        self._moves = moves
        self._kept = kept
        self._before = before
        self._is_backward = False
        # Weak, so that a storage lives as long as backward needs a tensor of it, and no longer.
        self._storages: list[weakref.ref[_Storage]] = []
        self._by_address: weakref.WeakValueDictionary[int, _Storage]
        self._by_address = weakref.WeakValueDictionary()

    def storages(self) -> Iterator[_Storage]:
        """Those that are still needed, in the order in which they were saved."""
        for reference in self._storages:
            storage = reference()
            if storage is not None:
                yield storage

    def pack(self, tensor: Tensor) -> _Packed:
        """The hook that is called with every tensor that is saved."""
        local_part = local(tensor.detach())
        if not self._moves.is_moved(local_part, self._kept):
            # Not the tensor itself: an operation that saves its own result would never be freed.
            return _Packed(call=self, kept=tensor.detach())
        split = tensor if isinstance(tensor, DTensor) else None
        return _Packed(
            call=self,
            storage=self._storage_of(local_part),
            dtype=local_part.dtype,
            offset=int(local_part.storage_offset()),
            size=local_part.size(),
            stride=local_part.stride(),
            distribute=_distribute_like(split) if split is not None else None,
        )

    def _storage_of(self, tensor: Tensor) -> _Storage:
        """The moved storage of a tensor, of which another tensor may have been saved before."""
        address = tensor.untyped_storage().data_ptr()
        # While a moved storage is on the device, no other memory has its address.
        storage = self._by_address.get(address)
        if storage is None or not storage.is_on_device:
            memory = _bytes_of_storage(tensor)
            storage = _Storage(memory, self._moves.copies_of(tensor.device))
            self._by_address[address] = storage
            self._storages.append(weakref.ref(storage))
            self._moves.count.tensors += 1
            self._moves.count.bytes += memory.numel()
        return storage

    def begin_backward(self) -> None:
        """Copy back what the block has saved, and begin to copy what the one before it has."""
        if self._is_backward:
            return
        self._is_backward = True
        self._copy_back()
        before = self._before
        self._before = None
        if before is not None:
            before._copy_back()

    def _copy_back(self) -> None:
        for storage in reversed(list(self.storages())):
            storage.begin_copying_back()


@dataclass(kw_only=True, slots=True)
class _Packed:
    """What autograd keeps in place of a tensor.

    Attributes:
        call: The call that has saved it.
        kept: The tensor itself, if it is not moved.
        storage: Where it is, if it is moved.
        dtype: Its type.
        offset: Its place in the storage, in numbers.
        size: Its shape.
        stride: Its strides.
        distribute: Makes a DTensor of this worker's part; None if it is an ordinary tensor.
    """

    call: _Call
    kept: Tensor | None = None
    storage: _Storage | None = None
    dtype: torch.dtype = torch.float32
    offset: int = 0
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    distribute: Callable[[Tensor], Tensor] | None = None


def _unpack(packed: _Packed) -> Tensor:
    """The hook that is called when backward needs a tensor."""
    packed.call.begin_backward()
    if packed.storage is None:
        assert packed.kept is not None
        return packed.kept
    with torch.no_grad():
        memory = packed.storage.on_device()
        whole_numbers = memory.numel() // packed.dtype.itemsize * packed.dtype.itemsize
        numbers = memory[:whole_numbers].view(packed.dtype)
        tensor = numbers.as_strided(packed.size, packed.stride, packed.offset)
        return tensor if packed.distribute is None else packed.distribute(tensor)


def _distribute_like(tensor: DTensor) -> Callable[[Tensor], Tensor]:
    return functools.partial(
        DTensor.from_local,
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


# --- copies ---------------------------------------------------------------------------------------


@dataclass
class _Copy:
    """A copy that may still be under way.

    Attributes:
        target: The bytes that are written.
        done: The event after which they are there; None: they are.
    """

    target: Tensor
    done: torch.cuda.Event | None = None


class _Storage:
    """The memory of saved tensors, which is on the host and, at times, on the device.

    Args:
        memory: Its bytes on the device; the copy to the host begins at once.
        copies: Makes the copies.
    """

    def __init__(self, memory: Tensor, copies: _Copies) -> None:
        self._copies = copies
        self._host = copies.to_host(memory)
        self._memory: Tensor | None = memory
        self._returning: _Copy | None = None

    @property
    def is_on_device(self) -> bool:
        """Whether it has not left the device yet, or is there again."""
        return self._memory is not None

    def free(self) -> None:
        """Free it on the device, after the copy to the host; a no-op if that has happened."""
        if self._memory is not None:
            self._copies.wait(self._host)
            self._memory = None

    def begin_copying_back(self) -> None:
        """Begin to copy it to the device, unless it is there or on its way."""
        if self._memory is None and self._returning is None:
            self._returning = self._copies.to_device(self._host)

    def on_device(self) -> Tensor:
        """Its bytes on the device, for kernels that are launched from now on."""
        if self._memory is None:
            self.begin_copying_back()
            assert self._returning is not None
            self._copies.wait(self._returning)
            self._memory = self._returning.target
            self._returning = None
        return self._memory

    def __del__(self) -> None:
        if self._returning is not None:
            self._copies.abandon(self._returning)


class _Copies:
    """Copies in host memory, which are there at once.

    Args:
        device: The device, which here is the host's memory itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_host(self, memory: Tensor) -> _Copy:
        """Begin a copy of bytes on the device."""
        return _Copy(memory.clone())

    def to_device(self, host: _Copy) -> _Copy:
        """Begin a copy back."""
        return _Copy(host.target.clone())

    def wait(self, copy: _Copy) -> None:
        """Make kernels that are launched from now on wait for a copy."""

    def abandon(self, copy: _Copy) -> None:
        """Keep a copy's memory from other use until it is done; nobody will wait for it."""


class _StreamCopies(_Copies):
    """Copies between a GPU and pinned memory, on a stream beside the one that computes.

    All memory on the device is allocated on the computing stream. So the allocator may reuse it as
    soon as that stream has waited for the copy, which `wait` makes it do, and need not hold it back
    until another stream is done.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def to_host(self, memory: Tensor) -> _Copy:
        return self._copy(memory, torch.empty(memory.numel(), dtype=torch.uint8, pin_memory=True))

    def to_device(self, host: _Copy) -> _Copy:
        if host.done is not None:  # whoever reads the host's copy comes after it was written
            self._stream.wait_event(host.done)
        return self._copy(host.target, torch.empty_like(host.target, device=self._device))

    def wait(self, copy: _Copy) -> None:
        if copy.done is not None:
            torch.cuda.current_stream(self._device).wait_event(copy.done)

    def abandon(self, copy: _Copy) -> None:
        copy.target.record_stream(self._stream)

    def _copy(self, source: Tensor, target: Tensor) -> _Copy:
        # What is read has been computed by then, and what is overwritten is not needed any more.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return _Copy(target, self._stream.record_event())


def _bytes_of_storage(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as bytes."""
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((numel,), (1,), 0).view(torch.uint8)
