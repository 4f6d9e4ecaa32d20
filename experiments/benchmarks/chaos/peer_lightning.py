"""The same training with Lightning, resumed as its documentation says: `ModelCheckpoint(every_n_train_steps, …)`
and `fit(ckpt_path="last")` (https://lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html). Runs in
the peers' environment, under torchrun."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from experiments.benchmarks.chaos.kills import BATCH, EVERY, STEPS, WORKERS
from experiments.benchmarks.chaos.task import Net, Numbered, note, open_record


class Module(lightning.LightningModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.net, self.folder, self.record = Net(16, 4), folder, -1

    def on_train_start(self) -> None:
        self.record = open_record(self.folder, self.global_rank)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x, y, samples = batch
        loss = F.cross_entropy(self.net(x), y)
        begin = self.global_step * BATCH + self.global_rank * (BATCH // WORKERS)
        note(self.record, list(range(begin, begin + len(samples))), samples.tolist())
        time.sleep(0.02 if Path(self.folder, "slow").exists() else 0.0)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main(folder: str) -> None:
    lightning.seed_everything(0, workers=True, verbose=False)
    saving = ModelCheckpoint(dirpath=f"{folder}/checkpoints", every_n_train_steps=EVERY, save_top_k=1, save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORKERS,
        strategy="ddp",
        max_steps=STEPS,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Module(folder)
    loader = DataLoader(Numbered(256), batch_size=BATCH // WORKERS, shuffle=True)
    there = any(Path(folder, "checkpoints").glob("*.ckpt"))
    trainer.fit(module, loader, ckpt_path="last" if there else None)
    if trainer.is_global_zero:
        torch.save(module.net.state_dict(), f"{folder}/weights.pt")


if __name__ == "__main__":
    main(sys.argv[1])
