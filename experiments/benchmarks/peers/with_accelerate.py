"""The training with Hugging Face Accelerate: `torchrun -m … with_accelerate gpt ddp`."""

import itertools
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from experiments.benchmarks.peers.workload import (
    CLIP_NORM,
    LOG_EVERY,
    LR,
    WEIGHT_DECAY,
    loss_of,
    workload,
)


def main(name: str) -> None:
    accelerator = Accelerator(cpu=True, log_with="mlflow")
    torch.manual_seed(0)
    work = workload(name)
    model = work.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    loader = DataLoader(work.data, work.batch_of_worker, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("peers")
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, (inputs, targets) in enumerate(itertools.islice(batches, work.steps), start=1):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if step % LOG_EVERY == 0:
            accelerator.log({"train/loss": loss.item()}, step=step)
    accelerator.save_model(model, ".")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
