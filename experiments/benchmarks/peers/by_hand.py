"""The training as PyTorch's tutorials write it, with MLflow: `torchrun -m … by_hand gpt ddp`."""

import itertools
import sys

import mlflow
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from experiments.benchmarks.peers.workload import (
    CLIP_NORM,
    LOG_EVERY,
    LR,
    WEIGHT_DECAY,
    loss_of,
    workload,
)


def main(name: str, strategy: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    work = workload(name)
    model: nn.Module = work.build()
    if strategy == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    else:
        for block in model.get_submodule("blocks").children():
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    sampler: DistributedSampler = DistributedSampler(work.data)
    loader = DataLoader(work.data, work.batch_of_worker, sampler=sampler, drop_last=True)
    is_first = dist.get_rank() == 0
    if is_first:
        mlflow.start_run()
    step = 0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            step += 1
            if is_first and step % LOG_EVERY == 0:
                mlflow.log_metric("train/loss", loss.item(), step=step)
            if step == work.steps:
                break
        if step == work.steps:
            break
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if is_first:
        torch.save(weights, "model.pt")
        mlflow.end_run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
