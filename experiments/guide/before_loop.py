"""A plain loop on one GPU, as most trainings begin."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def digits():
    images, labels = load_digits(return_X_y=True)
    whole = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    return random_split(whole, [1500, 297], torch.Generator().manual_seed(0))


def network():
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    train, held_out = digits()
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20):
        for x, y in DataLoader(train, batch_size=60, shuffle=True):
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    x, y = held_out[:]
    right = (model(x.to(device)).argmax(1).cpu() == y).float().mean()
    print(f"accuracy on held-out digits: {right:.1%}")


if __name__ == "__main__":
    main()
