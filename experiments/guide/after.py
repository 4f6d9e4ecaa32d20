"""The same with Trireme: model, data and loss stay; the loop, the devices and the launcher go."""

import sys

import trireme
from before_loop import digits, network
from torch import nn


class Digits(trireme.Task):
    def build_model(self):
        return network()

    def train_data(self):
        return digits()[0]

    def eval_data(self):
        return digits()[1]

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        return {
            "loss": self.loss(model, batch),
            "accuracy": (model(x).argmax(1) == y).float().mean(),
        }


if __name__ == "__main__":
    settings = [
        "run.name=after",
        "train.epochs=20",
        "train.global_batch_size=60",
        "optimizer.weight_decay=0.01",
    ]
    trireme.train(*settings, *sys.argv[1:], task=Digits)  # python after.py workers=4 strategy=fsdp
