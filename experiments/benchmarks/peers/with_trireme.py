"""The training with Trireme: `trireme train task=with_trireme.py:Peer task_args.name=gpt …`."""

import trireme
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from experiments.benchmarks.peers.workload import loss_of, workload


class Peer(trireme.Task):
    def __init__(self, name: str) -> None:
        self.work = workload(name)

    def build_model(self) -> nn.Module:
        return self.work.build()

    def train_data(self) -> TensorDataset:
        return self.work.data

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return loss_of(model(inputs), targets)
