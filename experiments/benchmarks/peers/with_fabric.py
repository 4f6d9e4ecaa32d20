"""The training with Lightning Fabric: `torchrun -m … with_fabric gpt ddp`."""

import itertools
import sys

import mlflow
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from experiments.benchmarks.peers.workload import (
    CLIP_NORM,
    LOG_EVERY,
    LR,
    WEIGHT_DECAY,
    WORKERS,
    loss_of,
    workload,
)


def main(name: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    work = workload(name)
    model = work.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(
        DataLoader(work.data, work.batch_of_worker, shuffle=True, drop_last=True)
    )
    if fabric.is_global_zero:
        mlflow.start_run()
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, (inputs, targets) in enumerate(itertools.islice(batches, work.steps), start=1):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
        optimizer.step()
        if fabric.is_global_zero and step % LOG_EVERY == 0:
            mlflow.log_metric("train/loss", loss.item(), step=step)
    fabric.save("model.pt", {"model": model})
    if fabric.is_global_zero:
        mlflow.end_run()


if __name__ == "__main__":
    main(sys.argv[1])
