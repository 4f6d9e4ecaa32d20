"""The same training as an expert would write it by hand, which is what ours is compared with.

It has nothing of Trireme but the model's class and the arrays. Each strategy is applied as in
PyTorch's own tutorials; the optimizer is fused, data are in memory and indexed by a permutation,
and nothing is synchronised but the loss that is logged.
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
from app.models.gpt import GPT, rotary_table
from app.models.mixture import MixtureGPT

LOG_EVERY = 10
"""Steps between two logged losses."""
MICRO_BATCHES = 8
"""Micro-batches of a pipeline's step."""
Data = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets of all samples."""


class Plain:
    """A training that is advanced one step at a time.

    Args:
        build: Makes the model.
        data: What it is trained on.
        batch: The samples of a step, over all workers.
        lr: The learning rate at the start of a cosine over `steps`.
        steps: The number of steps.
        wrap: The strategy, a key of `WRAPS`; for `Pipelined`, of `SCHEDULES`.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        data: Data,
        *,
        batch: int,
        lr: float,
        steps: int,
        wrap: str = "ddp",
    ) -> None:
        torch.manual_seed(0)
        is_data_parallel = wrap not in ("tensor", "context", *SCHEDULES)
        self.data_workers = dist.get_world_size() if is_data_parallel else 1
        self.model = self.parallelize(build(), wrap)
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        not_decayed = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": 0.01},
            {"params": not_decayed, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
        self.inputs, self.targets = data
        self.batch = batch
        self.lr = lr
        self.steps = steps
        self.steps_done = 0
        self.indices = self._indices()

    def parallelize(self, model: nn.Module, wrap: str) -> nn.Module:
        """The model under the strategy."""
        return WRAPS[wrap](model)

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Computes the loss and the gradients.

        Returns:
            The loss.
        """
        is_tensor_parallel = isinstance(next(self.model.parameters()), DTensor)
        with loss_parallel() if is_tensor_parallel else contextlib.nullcontext():
            loss = cross_entropy(self.model(inputs), targets)
            loss.backward()
        return loss

    def _indices(self) -> Iterator[torch.Tensor]:
        """This rank's samples of each batch, without end; a last smaller batch is left out."""
        share = self.batch // self.data_workers
        data_rank = dist.get_rank() % self.data_workers
        generator = torch.Generator().manual_seed(0)
        while True:
            order = torch.randperm(len(self.inputs), generator=generator)
            for samples in order.split(self.batch):
                if len(samples) == self.batch:
                    yield samples[data_rank * share : (data_rank + 1) * share]

    def advance(self) -> None:
        """Trains for one step."""
        index = next(self.indices)
        rate = self.lr * (1 + math.cos(math.pi * self.steps_done / self.steps)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.forward_backward(self.inputs[index], self.targets[index])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        if self.steps_done % LOG_EVERY == 0:
            whole_loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            logged_loss = whole_loss.detach().clone()
            dist.all_reduce(logged_loss)
            logged_loss.item()


class Pipelined(Plain):
    """A GPT in stages on two workers, as torch.distributed.pipelining's documentation has it."""

    def parallelize(self, model: nn.Module, wrap: str) -> nn.Module:
        assert isinstance(model, GPT)
        schedule_name, chunks = SCHEDULES[wrap]
        rank = dist.get_rank()
        parts = 2 * chunks
        parts_of_rank = [rank]
        if chunks > 1:
            # zbv places stages in the shape of a V, the others in turns.
            parts_of_rank.append(parts - 1 - rank if wrap == "zbv" else 2 + rank)
        device = torch.device("cpu")
        stages = []
        for part in parts_of_rank:
            stage_module = GptStage(model, part=part, parts=parts)
            stages.append(pipelining.PipelineStage(stage_module, part, parts, device))
        schedule_class = getattr(pipelining, schedule_name)
        stage_or_stages = stages if chunks > 1 else stages[0]
        self.schedule = schedule_class(stage_or_stages, MICRO_BATCHES, loss_fn=cross_entropy)
        self.has_first = 0 in parts_of_rank
        self.has_last = parts - 1 in parts_of_rank
        return nn.ModuleList([stage.submod for stage in stages])

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.has_first else ()
        if self.has_last:
            self.schedule.step(*arguments, target=targets, losses=losses)
        else:
            self.schedule.step(*arguments)
        return torch.stack(losses).mean() if losses else torch.zeros(())


class InContext(Plain):
    """Each worker has its part of every sequence; attention exchanges tokens for heads (Ulysses).

    torch's own `context_parallel` (torch.distributed.tensor.experimental) cannot be used: it knows
    only CUDA's three attention kernels, and says of the CPU's that
    "_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy
    registered" (torch 2.13, NotImplementedError).
    """

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        workers = dist.get_world_size()
        rank = dist.get_rank()
        positions = torch.arange(inputs.size(1)).chunk(workers)[rank].unsqueeze(0)
        part_of_inputs = inputs.chunk(workers, 1)[rank]
        part_of_targets = targets.chunk(workers, 1)[rank]
        with mock.patch.object(F, "scaled_dot_product_attention", ulysses):
            logits = self.model(part_of_inputs, position_ids=positions)
            loss = cross_entropy(logits, part_of_targets)
            loss.backward()
        return loss


ATTENTION = F.scaled_dot_product_attention


def ulysses(*qkv: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention over the whole sequence, for this worker's share of the heads.

    Shapes: B samples, H heads, T tokens, K features of a head, C workers.

    Args:
        qkv: Queries, keys and values of this worker's tokens, (B, H, T/C, K) each.
        options: Those of torch's attention.

    Returns:
        (B, H, T/C, K)
    """
    workers = dist.get_world_size()
    # (C, 3, B, H/C, T/C, K)
    sent = torch.stack(qkv).unflatten(2, (workers, -1)).movedim(2, 0).contiguous()
    received = all_to_all_single(torch.empty_like(sent), sent)
    query, key, value = received.movedim(0, 3).flatten(3, 4).unbind()
    y = ATTENTION(query, key, value, **options)
    # (C, B, H/C, T/C, K)
    sent_back = y.unflatten(2, (workers, -1)).movedim(2, 0).contiguous()
    received_back = all_to_all_single(torch.empty_like(sent_back), sent_back)
    return received_back.movedim(0, 1).flatten(1, 2)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss over all tokens or samples."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


# --- strategies by hand ---------------------------------------------------------------------------


def single(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _blocks(model: nn.Module) -> nn.ModuleDict:
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleDict)
    return blocks


def fsdp(model: nn.Module, reshard: bool = True) -> nn.Module:
    """Parameters sharded.

    Args:
        model: The model.
        reshard: Whether they are freed after forward.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in _blocks(model).values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


class HandExperts(nn.Module):
    """This worker's share of a mixture's experts; tokens travel by all-to-all.

    Args:
        experts: All experts.
    """

    gate: Any
    up: Any
    down: Any

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        for name, parameter in experts.named_parameters():
            share = parameter.detach().chunk(dist.get_world_size())[dist.get_rank()]
            parameter_of_rank = nn.Parameter(share.clone())
            parameter_of_rank.register_post_accumulate_grad_hook(_average_gradient)
            setattr(self, name, parameter_of_rank)

    def forward(
        self,
        x: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """The weighted sum of what each token's experts compute.

        Args:
            x: (…, D)
            index: (…, k), the chosen experts.
            weights: (…, k), their weights.
        """
        workers = dist.get_world_size()
        experts_of_rank = len(self.gate)
        experts_per_token = index.size(-1)
        # Tokens are sent in the order of their experts, which is that of the workers too.
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        sent_to_expert = chosen.bincount(minlength=workers * experts_of_rank)
        received_of_expert = torch.empty_like(sent_to_expert)
        dist.all_to_all_single(received_of_expert, sent_to_expert)
        sent_counts = sent_to_expert.view(workers, experts_of_rank).sum(1).tolist()
        received_counts = received_of_expert.view(workers, experts_of_rank).sum(1).tolist()
        sent = x.flatten(0, -2)[order // experts_per_token]
        received = all_to_all_single(
            sent.new_empty(sum(received_counts), sent.size(1)), sent, received_counts, sent_counts
        )
        # They arrive sorted by worker, and are computed sorted by expert.
        expert_of_row = torch.arange(experts_of_rank).repeat(workers)
        expert_of_row = expert_of_row.repeat_interleave(received_of_expert)
        by_expert = expert_of_row.argsort(stable=True)
        counts = expert_of_row.bincount(minlength=experts_of_rank).tolist()
        outputs = []
        for expert, rows in enumerate(received[by_expert].split(counts)):
            hidden = F.silu(F.linear(rows, self.gate[expert])) * F.linear(rows, self.up[expert])
            outputs.append(F.linear(hidden, self.down[expert]))
        results = torch.cat(outputs)[by_expert.argsort()]
        returned = all_to_all_single(torch.empty_like(sent), results, sent_counts, received_counts)
        in_order = returned[order.argsort()].view(*index.shape, -1)
        return (in_order * weights.unsqueeze(-1)).sum(-2)


def _average_gradient(parameter: torch.Tensor) -> None:
    """Divides the sum over all workers' samples by the number of workers, as DDP does."""
    assert parameter.grad is not None
    parameter.grad.div_(dist.get_world_size())


def experts(model: nn.Module) -> nn.Module:
    """Experts divided over all workers, everything else under DDP."""
    for block in _blocks(model).values():
        mlp: Any = block.mlp
        mlp.experts = HandExperts(mlp.experts)
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return ddp(model)


def tensor(model: nn.Module) -> nn.Module:
    """Megatron's split with sequence parallelism and a parallel loss.

    https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = Replicate()
    split = Shard(1)
    attention_input = PrepareModuleInput(
        input_layouts=(split, None), desired_input_layouts=(whole, None)
    )
    mlp_input = PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,))
    rowwise = RowwiseParallel(output_layouts=split)
    plan_of_block = {
        "attn_norm": SequenceParallel(),
        "attn": attention_input,
        "attn.q": ColwiseParallel(),
        "attn.k": ColwiseParallel(),
        "attn.v": ColwiseParallel(),
        "attn.out": rowwise,
        "mlp_norm": SequenceParallel(),
        "mlp": mlp_input,
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": rowwise,
    }
    plan = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=split, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for block in _blocks(model):
        for name, style in plan_of_block.items():
            plan[f"blocks.{block}.{name}"] = style
    return parallelize_module(model, mesh, plan)


class GptStage(nn.Module):
    """A stage of a GPT: its share of the blocks; the first has the embedding, the last the head.

    Args:
        model: The whole model.
        part: The stage's number.
        parts: The number of stages.
    """

    def __init__(self, model: GPT, *, part: int, parts: int) -> None:
        super().__init__()
        size = len(model.blocks) // parts
        blocks = list(model.blocks.values())
        self.head_dim = model.head_dim
        self.embed = model.embed if part == 0 else None
        self.blocks = nn.ModuleList(blocks[part * size : (part + 1) * size])
        self.head = nn.Sequential(model.norm, model.head) if part == parts - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (B, T) or the stage before's (B, T, D), to logits (B, T, V) or (B, T, D)."""
        tables = rotary_table(x, self.head_dim)
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x, tables)
        return x if self.head is None else self.head(x)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "single": single,
    "ddp": ddp,
    "zero2": functools.partial(fsdp, reshard=False),
    "zero3": fsdp,
    "fsdp": fsdp,
    "tensor": tensor,
    "context": ddp,
    "ddp+expert": experts,
    "ddp+expert 4": experts,
}
"""Strategies by hand."""
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
}
"""Schedules of a pipeline: torch's class, and stages per worker."""


# --- models ---------------------------------------------------------------------------------------


def mnist(steps: int, wrap: str = "ddp") -> Plain:
    from app.tasks.vision import ImageClassification

    data = fetch(ImageClassification(data="mnist").train_data(), [(i, i) for i in range(4000)])
    return Plain(lambda: CNN(1, 28, 28, 10), data, batch=64, lr=2e-3, steps=steps, wrap=wrap)


SHAPE: dict[str, Any] = {"d_model": 128, "n_layers": 4, "n_heads": 4}


def _text() -> Data:
    from app.tasks.language import LanguageModelling

    task = LanguageModelling(data="python", sequence_length=128, **SHAPE)
    return fetch(task.train_data(), [(i, i) for i in range(4096)])


def gpt(steps: int, wrap: str = "ddp") -> Plain:
    training_class = Plain
    if wrap in SCHEDULES:
        training_class = Pipelined
    elif wrap == "context":
        training_class = InContext

    def build() -> nn.Module:
        return GPT(vocab_size=256, **SHAPE)

    return training_class(build, _text(), batch=16, lr=1e-3, steps=steps, wrap=wrap)


class PlainMixture(Plain):
    """A mixture of experts, which has a loss of its own.

    After each step, routers are told the load of their experts.
    """

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.model(inputs, targets)
        loss.backward()
        return loss

    def advance(self) -> None:
        loads: list[torch.Tensor] = []

        def count(router: nn.Module, args: Any, output: Any) -> None:
            loads.append(output[2].flatten().bincount(minlength=8))

        model: Any = self.model
        routers = [block.mlp.router for block in model.module.blocks.values()]
        hooks = [router.register_forward_hook(count) for router in routers]
        super().advance()
        load = torch.stack(loads).float()
        dist.all_reduce(load)
        shares = load / load.sum(1, keepdim=True)
        for router, share, hook in zip(routers, shares, hooks):
            router.update(share)
            hook.remove()


def mixture(steps: int, wrap: str = "ddp+expert") -> Plain:
    def build() -> nn.Module:
        return MixtureGPT(256, **SHAPE)

    return PlainMixture(build, _text(), batch=16, lr=1e-3, steps=steps, wrap=wrap)


MODELS = {"mnist": mnist, "gpt": gpt, "mixture": mixture}
"""By name, what makes a training of some steps under a strategy."""
