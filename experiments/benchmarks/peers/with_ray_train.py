"""The training with plain Ray Train: `python -m … with_ray_train gpt ddp`."""

import itertools
import os
import sys

import mlflow
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
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


def train_worker(config: dict[str, str]) -> None:
    torch.manual_seed(0)
    work = workload(config["name"])
    model = prepare_model(work.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    loader = prepare_data_loader(
        DataLoader(work.data, work.batch_of_worker, shuffle=True, drop_last=True)
    )
    is_first = ray.train.get_context().get_world_rank() == 0
    if is_first:
        mlflow.set_tracking_uri(config["tracking_uri"])
        mlflow.start_run()
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, (inputs, targets) in enumerate(itertools.islice(batches, work.steps), start=1):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if is_first and step % LOG_EVERY == 0:
            mlflow.log_metric("train/loss", loss.item(), step=step)
    if is_first:
        torch.save(model.state_dict(), os.path.join(config["folder"], "model.pt"))
        mlflow.end_run()


def main(name: str) -> None:
    folder = os.getcwd()
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={
            "name": name,
            "folder": folder,
            "tracking_uri": os.environ["MLFLOW_TRACKING_URI"],
        },
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=folder),
    )
    trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1])
