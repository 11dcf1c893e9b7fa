"""The app's network and data: random numbers, of which the last client's have other labels."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLIENTS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def made(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rule = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x @ rule).argmax(1)


def load(client: int) -> DataLoader:
    x, y = made(client + 1, 40 + 10 * client)
    return DataLoader(TensorDataset(x, y if client < CLIENTS - 1 else y.flip(0)), 10, shuffle=True)


def val_loader() -> DataLoader:
    return DataLoader(TensorDataset(*made(100, 60)), 20)


def train(net: nn.Module, batches: DataLoader) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
