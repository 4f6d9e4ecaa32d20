"""The same with Accelerate: `accelerate launch --num_processes 4 before_accelerate.py`."""

import torch
from accelerate import Accelerator
from before_loop import digits, network
from torch import nn
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    train, held_out = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # 15 for each of 4 processes: what a process takes at once, not the batch of a step.
    loader = DataLoader(train, batch_size=60 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(20):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    x, y = held_out[:]
    right = (model(x.to(accelerator.device)).argmax(1).cpu() == y).float().mean()
    accelerator.print(f"accuracy on held-out digits: {right:.1%}")


if __name__ == "__main__":
    main()
