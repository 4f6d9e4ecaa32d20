"""The same training with Accelerate, resumed as its guide on checkpointing says: `save_state` with automatic names,
`load_state`, `skip_first_batches` and a seedable sampler
(https://huggingface.co/docs/accelerate/usage_guides/checkpoint). Runs in the peers' environment, under torchrun."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader

from experiments.benchmarks.chaos.kills import BATCH, EVERY, STEPS, WORKERS
from experiments.benchmarks.chaos.task import Net, Numbered, note, open_record


class Done:
    """Steps done, saved with everything else."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def main(folder: str) -> None:
    naming = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, project_config=naming, dataloader_config=loading)
    set_seed(0)
    model: Any = Net(16, 4)
    loader: Any = DataLoader(Numbered(256), batch_size=BATCH // WORKERS, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    done = Done()
    accelerator.register_for_checkpointing(done)
    if any(Path(folder, "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
        naming.iteration = 1 + max(int(p.name.split("_")[1]) for p in Path(folder, "checkpoints").iterdir())
    record = open_record(folder, accelerator.process_index)
    per_epoch = len(loader)
    while done.steps < STEPS:
        epoch = done.steps // per_epoch
        loader.set_epoch(epoch)
        skipped = done.steps - epoch * per_epoch
        for x, y, samples in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            loss = F.cross_entropy(model(x), y)
            begin = done.steps * BATCH + accelerator.process_index * (BATCH // WORKERS)
            note(record, list(range(begin, begin + len(samples))), samples.tolist())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done.steps += 1
            time.sleep(0.02 if Path(folder, "slow").exists() else 0.0)
            if done.steps % EVERY == 0:
                accelerator.save_state()
            if done.steps == STEPS:
                break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{folder}/weights.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
