"""The same with Lightning: `python before_lightning.py`, with Trainer(devices=4) on four GPUs."""

import lightning
import torch
from before_loop import digits, network
from torch import nn
from torch.utils.data import DataLoader


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = network()

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def test_step(self, batch, _):
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    lightning.seed_everything(0)
    train, held_out = digits()
    task = Digits()
    trainer = lightning.Trainer(
        max_epochs=20, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(task, DataLoader(train, batch_size=60, shuffle=True))
    trainer.test(task, DataLoader(held_out, batch_size=297))


if __name__ == "__main__":
    main()
