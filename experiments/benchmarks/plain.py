"""The same training as an expert would write it by hand, for torchrun: the measure of ours.

Nothing of Trireme but the model's class and the arrays. Each strategy as PyTorch's own tutorials apply it, a fused
optimizer, data in memory and indexed by a permutation, no synchronisation but for the loss that is logged.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from app.data.loader import fetch
from app.models.feedforward import CNN
from app.models.gpt import GPT
from app.models.mixture import MixtureGPT

LOG_EVERY = 10
MICRO_BATCHES = 8


class Plain:
    """A training that is advanced one step at a time.

    batch: samples per step over all workers. lr: at the start of a cosine over `steps`. wrap: which parallelism, of
    WRAPS (of SCHEDULES in `Pipelined`).
    """

    def __init__(
        self,
        build: Any,
        data: tuple[torch.Tensor, torch.Tensor],
        batch: int,
        lr: float,
        steps: int,
        wrap: str = "ddp",
    ) -> None:
        torch.manual_seed(0)
        self.ways = 1 if wrap in ("tensor", "context", *SCHEDULES) else dist.get_world_size()
        self.model = self.parallel(build(), wrap)
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": 0.01},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
        (self.inputs, self.targets), self.batch, self.lr, self.steps = data, batch, lr, steps
        self.done = 0
        self.indices = self._indices()

    def parallel(self, model: nn.Module, wrap: str) -> nn.Module:
        return WRAPS[wrap](model)

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        with (
            loss_parallel()
            if isinstance(next(self.model.parameters()), DTensor)
            else contextlib.nullcontext()
        ):
            loss = cross_entropy(self.model(inputs), targets)
            loss.backward()
        return loss

    def _indices(self) -> Iterator[torch.Tensor]:
        """This rank's share of each batch."""
        share, mine = self.batch // self.ways, dist.get_rank() % self.ways
        generator = torch.Generator().manual_seed(0)
        while True:
            for part in torch.randperm(len(self.inputs), generator=generator).split(self.batch):
                if len(part) == self.batch:
                    yield part[mine * share : (mine + 1) * share]

    def advance(self) -> None:
        index = next(self.indices)
        rate = self.lr * (1 + math.cos(math.pi * self.done / self.steps)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.forward_backward(self.inputs[index], self.targets[index])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        if self.done % LOG_EVERY == 0:
            value = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach().clone()
            dist.all_reduce(value)
            value.item()


class Pipelined(Plain):
    """A GPT in stages on two workers, as torch.distributed.pipelining's documentation has it."""

    def parallel(self, model: nn.Module, wrap: str) -> nn.Module:
        kind, chunks = SCHEDULES[wrap]
        rank, parts = dist.get_rank(), 2 * chunks
        own = [rank] if chunks == 1 else [rank, parts - 1 - rank if wrap == "zbv" else 2 + rank]
        stages = [
            pipelining.PipelineStage(_part(model, i, parts), i, parts, torch.device("cpu"))
            for i in own
        ]
        made = stages if chunks > 1 else stages[0]
        self.schedule = getattr(pipelining, kind)(made, MICRO_BATCHES, loss_fn=cross_entropy)
        self.is_first, self.is_last = 0 in own, parts - 1 in own
        return nn.ModuleList([stage.submod for stage in stages])

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        given = (inputs,) if self.is_first else ()
        self.schedule.step(
            *given, **({"target": targets, "losses": losses} if self.is_last else {})
        )
        return torch.stack(losses).mean() if losses else torch.zeros(())


class InContext(Plain):
    """Each worker has its part of every sequence; Ulysses' two exchanges stand around torch's attention.

    torch's own `context_parallel` (torch.distributed.tensor.experimental) cannot stand here: it knows CUDA's three
    attention kernels only, and of the CPU's says "_scaled_dot_product_flash_attention_for_cpu.default does not have a
    sharding strategy registered" (torch 2.13, NotImplementedError)."""

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ways, rank = dist.get_world_size(), dist.get_rank()
        positions = torch.arange(inputs.size(1)).chunk(ways)[rank].unsqueeze(0)
        own, wanted = (x.chunk(ways, 1)[rank] for x in (inputs, targets))
        with mock.patch.object(F, "scaled_dot_product_attention", ulysses):
            loss = cross_entropy(self.model(own, position_ids=positions), wanted)
            loss.backward()
        return loss


ATTENTION = F.scaled_dot_product_attention


def ulysses(*qkv: torch.Tensor, **options: Any) -> torch.Tensor:
    ways = dist.get_world_size()
    parts = (
        torch.stack(qkv).unflatten(2, (ways, -1)).movedim(2, 0).contiguous()
    )  # (C, 3, B, H/C, T/C, K)
    whole = all_to_all_single(torch.empty_like(parts), parts)
    y = ATTENTION(*whole.movedim(0, 3).flatten(3, 4).unbind(), **options)
    back = y.unflatten(2, (ways, -1)).movedim(2, 0).contiguous()  # (C, B, H/C, T/C, K)
    return all_to_all_single(torch.empty_like(back), back).movedim(0, 1).flatten(1, 2)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


# --- what a strategy is, by hand --------------------------------------------------------------------------------


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: nn.Module, reshard: bool = True) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.values():  # type: ignore[operator, union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


class HandExperts(nn.Module):
    """This worker's share of a mixture's experts; tokens by all-to-all."""

    gate: Any
    up: Any
    down: Any

    def __init__(self, whole: Any) -> None:
        super().__init__()
        for name, parameter in whole.named_parameters():
            own = nn.Parameter(
                parameter.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
            )
            own.register_post_accumulate_grad_hook(_divide)
            setattr(self, name, own)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ways, own, times = dist.get_world_size(), len(self.gate), index.size(-1)
        chosen, order = index.flatten(), index.flatten().argsort(stable=True)
        counts = chosen.bincount(minlength=ways * own)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        gives, takes = (each.view(ways, own).sum(1).tolist() for each in (counts, arriving))
        rows = x.flatten(0, -2)[order // times]
        arrived = all_to_all_single(rows.new_empty(sum(takes), rows.size(1)), rows, takes, gives)
        local = torch.arange(own).repeat(ways).repeat_interleave(arriving)
        sort = local.argsort(stable=True)
        parts = arrived[sort].split(local.bincount(minlength=own).tolist())
        done = [
            F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            for part, gate, up, down in zip(parts, self.gate, self.up, self.down)
        ]
        results = torch.cat(done)[sort.argsort()]
        back = all_to_all_single(torch.empty_like(rows), results, gives, takes)
        return (back[order.argsort()].view(*index.shape, -1) * weights.unsqueeze(-1)).sum(-2)


def _divide(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.div_(dist.get_world_size())


def experts(model: nn.Module) -> nn.Module:
    """Experts over all workers, the rest under DDP."""
    for block in model.blocks.values():  # type: ignore[operator, union-attr]
        block.mlp.experts = HandExperts(block.mlp.experts)
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return ddp(model)


def tensor(model: nn.Module) -> nn.Module:
    """Megatron's split with sequence parallelism and a parallel loss, as the PyTorch tutorial has it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, split = Replicate(), Shard(1)
    rowwise = RowwiseParallel(output_layouts=split)
    block = {
        "attn_norm": SequenceParallel(),
        "attn": PrepareModuleInput(
            input_layouts=(split, None), desired_input_layouts=(whole, None)
        ),
        "attn.q": ColwiseParallel(),
        "attn.k": ColwiseParallel(),
        "attn.v": ColwiseParallel(),
        "attn.out": rowwise,
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": rowwise,
    }
    outside = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=split, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    plan = outside | {
        f"blocks.{name}.{key}": how for name in model.blocks for key, how in block.items()
    }  # type: ignore[union-attr]
    return parallelize_module(model, mesh, plan)


def _part(model: Any, part: int, parts: int) -> nn.Module:
    """Its share of the blocks, with the embedding before the first and the head after the last."""
    size = len(model.blocks) // parts
    layers = list(model.blocks.values())[part * size : (part + 1) * size]
    before, after = (
        [model.embed] if part == 0 else [],
        [model.norm, model.head] if part == parts - 1 else [],
    )
    return nn.Sequential(*before, *layers, *after)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "single": lambda model: model,
    "ddp": ddp,
    "zero2": functools.partial(fsdp, reshard=False),
    "zero3": fsdp,
    "fsdp": fsdp,
    "tensor": tensor,
    "context": ddp,
    "ddp+expert": experts,
    "ddp+expert 4": experts,
}
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
}
"""Of a pipeline: torch's class, and stages per worker."""


def mnist(steps: int, wrap: str = "ddp") -> Plain:
    from app.tasks.vision import ImageClassification

    data = fetch(ImageClassification(data="mnist").train_data(), [(i, i) for i in range(4000)])
    return Plain(lambda: CNN(1, 28, 28, 10), data, 64, 2e-3, steps, wrap)


SHAPE: dict[str, Any] = {"d_model": 128, "n_layers": 4, "n_heads": 4}


def _text() -> tuple[torch.Tensor, torch.Tensor]:
    from app.tasks.language import LanguageModelling

    task = LanguageModelling(data="python", sequence_length=128, **SHAPE)
    return fetch(task.train_data(), [(i, i) for i in range(4096)])


def gpt(steps: int, wrap: str = "ddp") -> Plain:
    kind = Pipelined if wrap in SCHEDULES else InContext if wrap == "context" else Plain
    return kind(lambda: GPT(vocab_size=256, **SHAPE), _text(), 16, 1e-3, steps, wrap)


class PlainMixture(Plain):
    """Its loss is the model's own; routers are told their load after each step."""

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.model(inputs, targets)
        loss.backward()
        return loss

    def advance(self) -> None:
        seen: list[torch.Tensor] = []
        routers = [block.mlp.router for block in self.model.module.blocks.values()]  # type: ignore[operator, union-attr]
        hooks = [
            r.register_forward_hook(
                lambda _, __, y: seen.append(y[2].flatten().bincount(minlength=8))
            )
            for r in routers
        ]
        super().advance()
        load = torch.stack(seen).float()
        dist.all_reduce(load)
        for router, own, hook in zip(routers, load / load.sum(1, keepdim=True), hooks):
            router.update(own)
            hook.remove()


def mixture(steps: int, wrap: str = "ddp+expert") -> Plain:
    return PlainMixture(lambda: MixtureGPT(256, **SHAPE), _text(), 16, 1e-3, steps, wrap)


MODELS = {"mnist": mnist, "gpt": gpt, "mixture": mixture}
