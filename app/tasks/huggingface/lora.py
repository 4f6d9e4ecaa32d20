"""Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685), by the library peft.

A linear layer's weight W stays as it was learnt, and a product of two thin matrices is trained
beside it,

    y = W·x + (alpha / r)·B·(A·x)        A (r, in) begins random, B (out, r) at 0

so gradients and optimizer state are needed for r·(in + out) parameters instead of in·out. A
classifier's new head is trained without an adapter.

`use_rslora` scales by alpha / √r, so that large ranks learn as fast as small ones (Kalajdzievski
2023, 2312.03732). `use_dora` trains the length of each of W's rows beside its direction (Liu et al.
2024, 2402.09353). `quantize` keeps W in 4 or 8 bits, and with `quantize_layers: all` also
the layers without adapters (quantized.py).
"""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from app.errors import UserError
from app.tasks.huggingface.quantized import LAYERS, METHODS, without_warnings_of_torchao
from app.tasks.huggingface.quantized import library as quantization_library
from app.tasks.parts import one_of, require_known, whole_number
from strategies.module_copy import copy_module

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

OPTIONS = (
    *("r", "alpha", "targets", "dropout", "use_rslora", "use_dora"),
    *("quantize", "quantize_layers"),
)


def library() -> ModuleType:
    """The peft package.

    Raises:
        UserError: It is not installed.
    """
    try:
        with without_warnings_of_torchao():  # peft imports it if it is there
            import peft
    except ImportError as error:
        raise UserError(
            "task_args.lora needs the package peft, which is not installed: "
            "run pip install 'trireme[finetuning]'"
        ) from error
    return peft


def adapter_config(options: Any, task_type: str | None, folder: Path | None) -> LoraConfig:
    """The configuration of adapters.

    Args:
        options: `task_args.lora`.
        task_type: What peft calls the kind of the model; None if it has no name for it.
        folder: The folder of the weights that are adapted; None if there are none.

    Raises:
        UserError: The options do not fit, there are no weights, or peft is not installed.
    """
    if not isinstance(options, Mapping):
        raise UserError(
            f"task_args.lora is {options!r}; "
            "write a mapping such as {r: 16, alpha: 32, targets: auto}"
        )
    require_known(options, OPTIONS, key="task_args.lora", owner="lora")
    if folder is None:
        raise UserError(
            "task_args.lora adapts learnt weights: "
            "write task_args.pretrained=true and a folder as model"
        )
    rank = whole_number("lora.r", options.get("r", 16))
    alpha = options.get("alpha", 2 * rank)
    if not _is_number(alpha) or alpha <= 0:
        raise UserError(f"task_args.lora.alpha is {alpha!r}; it must be a number above 0")
    dropout = options.get("dropout", 0.0)
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise UserError(f"task_args.lora.dropout is {dropout!r}; it must be at least 0 and below 1")
    targets = options.get("targets", "auto")
    if targets != "auto" and not _is_list_of_names(targets):
        raise UserError(
            f"task_args.lora.targets is {targets!r}; "
            "write auto, or a list of names such as [q_proj, v_proj]"
        )
    for name in ("use_rslora", "use_dora"):
        if not isinstance(options.get(name, False), bool):
            raise UserError(f"task_args.lora.{name} is {options[name]!r}; it must be true or false")
    if options.get("use_dora") and quantize_method(options) is not None:
        raise UserError(
            "task_args.lora.use_dora and quantize do not work together: DoRA starts from the "
            "lengths of unrounded rows; leave one of the two out"
        )
    return library().LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="all-linear" if targets == "auto" else list(targets),
        use_rslora=options.get("use_rslora", False),
        use_dora=options.get("use_dora", False),
        task_type=task_type,
        base_model_name_or_path=str(folder.resolve()),
    )


def quantize_method(options: Mapping[str, Any] | None) -> str | None:
    """`task_args.lora.quantize`; None if frozen layers are not quantized.

    Raises:
        UserError: There is no such method, or torchao is not installed.
    """
    method = (options or {}).get("quantize")
    if method is None:
        return None
    one_of("lora.quantize", method, METHODS)
    quantization_library()
    return str(method)


def quantized_layers(options: Mapping[str, Any] | None) -> str:
    """`task_args.lora.quantize_layers`: which layers are quantized, one of `LAYERS`.

    Raises:
        UserError: It is neither, or nothing is quantized.
    """
    layers = (options or {}).get("quantize_layers")
    if layers is None:
        return "adapted"
    one_of("lora.quantize_layers", layers, LAYERS)
    if quantize_method(options) is None:
        raise UserError(
            f"task_args.lora.quantize_layers is {layers}, but nothing is quantized: "
            "write lora.quantize too, or leave it out"
        )
    return str(layers)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def with_adapters(model: nn.Module, config: LoraConfig, *, trains_head: bool) -> PeftModel:
    """peft's model around a model, whose linear layers then have adapters.

    Args:
        model: The model.
        config: The configuration of the adapters.
        trains_head: Whether what comes after the model's body is new, and trained as it is.

    Raises:
        UserError: The model does not have the layers that are to have adapters.
    """
    # peft writes this into its configuration: an absolute path serves from any current folder.
    model.name_or_path = config.base_model_name_or_path
    config = copy.deepcopy(config)  # peft changes it
    if trains_head and config.task_type != "SEQ_CLS":  # of which peft itself knows the head
        heads = _names_after_body(model)
        config.modules_to_save = heads
        config.exclude_modules = rf"({'|'.join(map(re.escape, heads))})(\..*)?"
    try:
        # transformers warns of how peft calls it.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            adapted = library().get_peft_model(model, config)
    except ValueError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"task_args.lora does not fit the model: {reason}") from error
    # Dropout and the lengths of DoRA are computed in the type that the input is cast to.
    if not config.use_dora and not config.lora_dropout:
        _cast_inputs_once(adapted)
    return adapted


def _cast_inputs_once(model: nn.Module) -> None:
    """Makes layers with adapters cast their input once while autocast is on.

    Otherwise autocast casts it for the layer itself, peft casts it to the adapter's float32, and
    autocast casts that back for the adapter's first matrix, which keeps the last copy for backward.
    The outputs are the same to the last bit. The gradients of the layer and of its adapter add up
    in 16 bits, as they do under sharded strategies, whose numbers all have 16 bits.
    """
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.register_forward_pre_hook(_cast_input)


def _cast_input(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of a layer with adapters, the first in the type that autocast computes in.

    Outside autocast they stay as they are, and peft casts for adapters of another type.
    """
    x, *others = inputs
    device_type = x.device.type
    can_autocast = torch.amp.is_autocast_available(device_type)
    has_autocast = can_autocast and torch.is_autocast_enabled(device_type)
    # The attribute that peft.helpers.disable_input_dtype_casting sets.
    layer.cast_input_dtype_enabled = not has_autocast
    if has_autocast:
        x = x.to(torch.get_autocast_dtype(device_type))
    return (x, *others)


class Adapted(NamedTuple):
    """Where the parts of a layer with adapters are, as names of modules.

    Args:
        base: The layer itself.
        first: A of each of its adapters.
        second: B of each.
    """

    base: str
    first: tuple[str, ...]
    second: tuple[str, ...]


def adapted_layers(model: nn.Module) -> dict[str, Adapted] | None:
    """The linear layers of a model that have adapters.

    Args:
        model: A model that `with_adapters` has changed.

    Returns:
        By the layer's name without adapters; None if other layers have some too.
    """
    library()
    from peft.tuners.lora import Linear, LoraLayer

    layers: dict[str, Adapted] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if not isinstance(module, Linear):
            return None
        layers[name] = Adapted(
            base=f"{name}.base_layer",
            first=tuple(f"{name}.lora_A.{adapter}" for adapter in module.lora_A),
            second=tuple(f"{name}.lora_B.{adapter}" for adapter in module.lora_B),
        )
    return layers


def without_adapters(model: nn.Module, layers: Mapping[str, Adapted]) -> nn.Module:
    """A copy of a model, of the same parameters, in which layers have lost their adapters.

    Args:
        model: The model, which stays as it is.
        layers: What `adapted_layers` returns of it.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    bare = copy_module(model, {id(tensor): tensor for tensor in tensors})
    for name, parts in layers.items():
        bare.set_submodule(name, bare.get_submodule(parts.base))
    return bare


def _names_after_body(model: nn.Module) -> list[str]:
    """The names of the children with parameters, but for the body that pretrained weights have."""
    body = getattr(model, "base_model_prefix", "")
    return [
        name
        for name, child in model.named_children()
        if name != body and any(True for _ in child.parameters())
    ]
