"""DivergenceWeighted: weights from what the clients report, and nothing but a number crosses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flsv.aggregation import DivergenceWeighted
from flsv.parameters import ParameterSpace
from flsv.round import Round


def test_without_a_federation() -> None:
    space = ParameterSpace(nn.Linear(3, 2))
    round = Round(0, torch.arange(2), torch.tensor([1, 2]), torch.zeros(8), torch.randn(2, 8), space)
    with pytest.raises(RuntimeError, match="have not reported"):
        DivergenceWeighted().weights(round, {})
