"""The hooks that a model puts on gradients, and whether they change them linearly.

A linear function of gradients commutes with averaging them over workers; any other does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Hook = Callable[..., Any]

_MODULE_HOOKS = (
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
)


class HookRecorder(TorchFunctionMode):
    """Notes the hooks that are put on gradients while it is the current mode."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor_hooks: list[tuple[Tensor, Hook]] = []
        self.hooked_after_accumulation: list[Tensor] = []
        self.module_hooks: list[tuple[nn.Module, Hook]] = []

    def __enter__(self) -> HookRecorder:
        super().__enter__()
        self._original = {name: getattr(nn.Module, name) for name in _MODULE_HOOKS}
        for name, register in self._original.items():
            setattr(nn.Module, name, self._recording(register))
        return self

    def __exit__(self, *error: Any) -> None:
        for name, register in self._original.items():
            setattr(nn.Module, name, register)
        super().__exit__(*error)

    def _recording(self, register: Callable[..., Any]) -> Callable[..., Any]:
        def register_and_record(module: nn.Module, hook: Hook, *args: Any, **kwargs: Any) -> Any:
            self.module_hooks.append((module, hook))
            return register(module, hook, *args, **kwargs)

        return register_and_record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "register_hook":
            tensor, hook = args[:2]
            self.tensor_hooks.append((tensor, hook))
        elif name == "register_post_accumulate_grad_hook":
            self.hooked_after_accumulation.append(args[0])
        return func(*args, **(kwargs or {}))


def is_linear(hook: Callable[[Tensor], Tensor | None], tensor: Tensor) -> bool:
    """Whether a hook maps a sum of gradients to the sum of what it maps each to.

    Args:
        hook: A gradient → what replaces it, or None.
        tensor: A tensor of the gradient's shape and type; on meta the answer is False.
    """
    if tensor.is_meta:
        return False
    generator = torch.Generator().manual_seed(0)

    def random_gradient() -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)

    def replaced(gradient: Tensor) -> Tensor:
        replacement = hook(gradient.clone())
        return gradient if replacement is None else replacement

    first = random_gradient()
    second = random_gradient()
    try:
        sum_of_each = replaced(first) + replaced(second)
        return torch.allclose(sum_of_each, replaced(first + second), rtol=1e-4, atol=1e-5)
    except Exception:
        # The hook may read what only a real step has left somewhere.
        return False


def as_hook_of_one_gradient(
    hook: Hook,
    module: nn.Module,
    *,
    grad_inputs: tuple[Any, ...],
    grad_outputs: tuple[Any, ...],
    index: int,
) -> Callable[[Tensor], Tensor | None]:
    """A module's backward hook as a function of the gradient of one of its inputs.

    Args:
        hook: The module's hook.
        module: The module.
        grad_inputs: The gradients of all its inputs.
        grad_outputs: The gradients of all its outputs.
        index: Which input.
    """

    def replaced(gradient: Tensor) -> Tensor | None:
        gradients = (*grad_inputs[:index], gradient, *grad_inputs[index + 1 :])
        replacement = hook(module, gradients, grad_outputs)
        if replacement is None or isinstance(replacement, Tensor):
            return replacement
        return replacement[index]

    return replaced
