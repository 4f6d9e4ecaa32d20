"""The training with Hugging Face's Trainer: `torchrun -m … with_transformers gpt ddp`."""

import sys

from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from experiments.benchmarks.peers.workload import (
    CLIP_NORM,
    LOG_EVERY,
    LR,
    WEIGHT_DECAY,
    Workload,
    loss_of,
    workload,
)


class WithLoss(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.model = work.build()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.model(inputs), labels)}


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, work: Workload) -> None:
        self.data = work.data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, labels = self.data[index]
        return {"inputs": inputs, "labels": labels}


def main(name: str) -> None:
    work = workload(name)
    arguments = TrainingArguments(
        output_dir=".",
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=work.steps,
        per_device_train_batch_size=work.batch_of_worker,
        optim="adamw_torch_fused",
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP_NORM,
        logging_steps=LOG_EVERY,
        report_to="mlflow",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(WithLoss(work), arguments, train_dataset=Rows(work))
    trainer.train()
    trainer.save_model("model")


if __name__ == "__main__":
    main(sys.argv[1])
