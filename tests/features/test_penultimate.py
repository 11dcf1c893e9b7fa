"""The input of the head, against the network cut by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flsv.errors import ConfigurationError
from flsv.features import Penultimate
from flsv.features.base import BATCH


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3)).eval()


def test_it_is_the_network_without_its_last_layer() -> None:
    module = net()
    x = torch.randn(BATCH + 5, 3, 2, 2)
    torch.testing.assert_close(Penultimate()(x, module), module[:3](x).detach())
    torch.testing.assert_close(Penultimate(head="1")(x, module), x.flatten(1))
    assert not module[3]._forward_pre_hooks


def test_wrong_use() -> None:
    x = torch.randn(4, 3, 2, 2)
    with pytest.raises(ConfigurationError, match="needs a model, and there is none before training"):
        Penultimate()(x)
    with pytest.raises(ConfigurationError, match="has no linear layer"):
        Penultimate()(x, nn.Flatten())
    with pytest.raises(ConfigurationError, match="not a layer"):
        Penultimate(head="nope")(x, net())

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(12, 3)

        def forward(self, x):
            return self.head(x.flatten(1)) + self.head(x.flatten(1))

    module = Twice()
    with pytest.raises(ConfigurationError, match="given 8 rows for 4 samples"):
        Penultimate()(x, module)
    assert not module.head._forward_pre_hooks  # taken off whatever happens
