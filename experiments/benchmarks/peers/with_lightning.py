"""The training with Lightning's Trainer: `torchrun -m … with_lightning gpt ddp`."""

import os
import sys
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import MLFlowLogger
from torch import Tensor
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


class Module(LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = workload(name).build()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = loss_of(self.model(inputs), targets)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def main(name: str) -> None:
    seed_everything(0)
    work = workload(name)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORKERS,
        strategy="ddp",
        max_steps=work.steps,
        gradient_clip_val=CLIP_NORM,
        log_every_n_steps=LOG_EVERY,
        logger=MLFlowLogger(tracking_uri=os.environ["MLFLOW_TRACKING_URI"]),
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(work.data, work.batch_of_worker, shuffle=True, drop_last=True)
    trainer.fit(Module(name), loader)
    trainer.save_checkpoint("model.ckpt", weights_only=True)


if __name__ == "__main__":
    main(sys.argv[1])
