"""Frozen layers in 4 and 8 bits: torchao's numbers, and the options of adapters beside them."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from app.errors import UserError
from app.models.mixture import Experts
from app.tasks.huggingface import quantized
from app.tasks.huggingface.lora import quantize_method
from app.tasks.huggingface.quantized import METHODS, QuantizedLinear
from app.tasks.huggingface.task import HuggingFace
from app.training.flops import multiplied_parameters
from tests.app.tasks.test_tasks import built_model, one_batch
from tests.app.tasks.test_tasks_huggingface import arguments
from tests.running import same_bits


def _layer(rows: int = 48, columns: int = 64) -> nn.Linear:
    torch.manual_seed(rows)
    return nn.Linear(columns, rows).requires_grad_(False)


def _of_torchao(layer: nn.Linear, method: str) -> torch.Tensor:
    """The weight that torchao itself makes of the bytes that it keeps."""
    # Imported here because each process of `make test` imports this file.
    import torchao.quantization

    if method == "nf4":
        block = 16 if layer.weight.numel() == 48 * 64 else 256
        return torchao.quantization.to_nf4(layer.weight, 64, block).get_original_weight()
    same = copy.deepcopy(layer)
    torchao.quantization.quantize_(same, torchao.quantization.Int8WeightOnlyConfig(version=2))
    return same.weight.dequantize()


@pytest.mark.pure
@pytest.mark.parametrize(
    ("method", "bytes_per_weight", "error"), [("nf4", 0.54, 0.12), ("int8", 1.07, 0.01)]
)
def test_a_layer_has_the_numbers_of_torchao_in_fewer_bytes(
    method: str, bytes_per_weight: float, error: float
) -> None:
    for layer in (_layer(), _layer(256, 128)):
        expected = _of_torchao(layer, method)
        small = QuantizedLinear(layer, method)
        assert torch.equal(small.weight, expected)
        assert (expected - layer.weight).norm() < error * layer.weight.norm()
        assert small.packed.nbytes <= bytes_per_weight * layer.weight.numel() + 4 * 17
        assert small.multiplied_numel == layer.weight.numel()
        with torch.device("meta"):
            on_meta = QuantizedLinear(nn.Linear(layer.in_features, layer.out_features), method)
        assert on_meta.packed.shape == small.packed.shape
        restored = small.restored()
        for dtype in (None, torch.bfloat16):
            gradients = []
            outputs = []
            for each in (small, restored):
                x = torch.linspace(-1, 1, 3 * layer.in_features).view(3, -1).requires_grad_()
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    y = each(x)
                y.float().square().sum().backward()
                outputs.append(y)
                gradients.append(x.grad)
            assert outputs[0].dtype == outputs[1].dtype == (dtype or torch.float32)
            tolerance = 1e-5 if dtype is None else 0.02
            assert torch.allclose(*outputs, atol=tolerance, rtol=tolerance)
            assert (gradients[0] - gradients[1]).norm() <= tolerance * gradients[1].norm()


@pytest.mark.pure
def test_backward_keeps_bytes_and_not_the_weight() -> None:
    small = QuantizedLinear(_layer(), "nf4")
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        small(torch.ones(2, 64, requires_grad=True))
    assert [tensor.dtype for tensor in kept] == [torch.uint8]


@pytest.mark.pure
def test_the_layers_with_adapters_are_quantized_alike_in_every_build(base: Path) -> None:
    for method in METHODS:
        args: dict[str, Any] = arguments("lora", base)
        task = HuggingFace(**args | {"lora": {"r": 2, "quantize": method, "use_rslora": True}})
        model = built_model(task)
        assert same_bits(model.state_dict(), built_model(task).state_dict())
        structure = task.structure()
        assert {n: p.shape for n, p in structure.named_parameters()} == {
            n: p.shape for n, p in model.named_parameters()
        }
        layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
        assert len(layers) == 2 * 7
        assert type(model.lm_head) is nn.Linear
        plain = built_model(HuggingFace(**args))
        assert multiplied_parameters(model) == multiplied_parameters(plain)
        task.loss(model, one_batch(task)).backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == ("lora_" in name), name


@pytest.mark.pure
def test_layers_without_adapters_are_quantized_too_where_it_is_written(base: Path) -> None:
    args: dict[str, Any] = arguments("lora", base)
    lora = {"r": 2, "targets": ["q_proj"], "quantize": "nf4"}
    counts = {}
    for layers in (None, "adapted", "all"):
        written = lora | ({} if layers is None else {"quantize_layers": layers})
        task = HuggingFace(**args | {"lora": written})
        model = built_model(task)
        counts[layers] = sum(isinstance(m, QuantizedLinear) for m in model.modules())
        assert type(model.lm_head) is nn.Linear
    assert counts == {None: 2, "adapted": 2, "all": 2 * 7}
    task.loss(model, one_batch(task)).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name
    with_adapters = task.recipe.build_with_adapters()
    quantized.restore_layers(with_adapters)
    merged = with_adapters.merge_and_unload()
    assert not [m for m in merged.modules() if isinstance(m, QuantizedLinear)]


@pytest.mark.pure
def test_a_model_with_experts_is_not_said_to_be_quantized_as_a_whole() -> None:
    model = nn.Module()
    model.experts = Experts(8, 2, 16)
    with pytest.raises(UserError, match="quantize_layers is all, but the experts of experts"):
        quantized.quantize_layers(model, "nf4", "all")


@pytest.mark.pure
def test_merged_layers_have_the_rounded_weights_and_the_adapters(base: Path) -> None:
    args: dict[str, Any] = arguments("lora nf4", base)
    task = HuggingFace(**args)
    model = task.recipe.build_with_adapters()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    tokens = one_batch(task)[0]
    expected = model(input_ids=tokens).logits
    quantized.restore_layers(model)
    merged = model.merge_and_unload()
    assert not [m for m in merged.modules() if isinstance(m, QuantizedLinear)]
    assert torch.allclose(merged(input_ids=tokens).logits, expected, atol=1e-5)


@pytest.mark.pure
def test_dora_trains_the_lengths_of_rows(base: Path) -> None:
    args: dict[str, Any] = arguments("lora", base)
    task = HuggingFace(**args | {"lora": {"r": 2, "use_dora": True}})
    model = built_model(task)
    lengths = [p for name, p in model.named_parameters() if "magnitude" in name]
    assert len(lengths) == 2 * 7
    plain = built_model(HuggingFace(**args))
    batch = one_batch(task)
    loss = task.loss(model, batch)
    assert loss.item() == pytest.approx(task.loss(plain, batch).item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in lengths)


@pytest.mark.pure
def test_mistakes_are_one_sentence(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args: dict[str, Any] = arguments("lora", base)
    for options, message in (
        ({"quantize": "int4"}, "lora.quantize is 'int4'.*nf4"),
        ({"use_dora": 1}, "use_dora is 1; it must be true or false"),
        ({"use_dora": True, "quantize": "nf4"}, "do not work together"),
        ({"quantize": "nf4", "quantize_layers": "most"}, "quantize_layers is 'most'.*adapted"),
        ({"quantize_layers": "all"}, "quantize_layers is all, but nothing is quantized"),
    ):
        with pytest.raises(UserError, match=message):
            HuggingFace(**args | {"lora": options})
    odd = nn.Module()
    odd.layer = nn.Module()
    odd.layer.base_layer = _layer(3, 5)
    with pytest.raises(UserError, match="no linear layer with adapters can be quantized"):
        quantized.quantize_layers(odd, "nf4")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UserError, match=r"needs the package torchao.*trireme\[finetuning\]"):
        quantize_method({"quantize": "nf4"})
