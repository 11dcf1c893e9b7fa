"""FedAvg's and ShapFed-WA's weights."""

import pytest
import torch
from torch import nn

from flsv.aggregation import FedAvg, ShapFedWA
from flsv.errors import ConfigurationError
from flsv.functional import participant_weights
from flsv.parameters import ParameterSpace
from flsv.round import Round


def make_round(ids: list[int], samples: list[int]) -> Round:
    space = ParameterSpace(nn.Linear(3, 2))
    k = len(ids)
    return Round(0, torch.tensor(ids), torch.tensor(samples), torch.zeros(8), torch.randn(k, 8), space)


def test_fedavg() -> None:
    round = make_round([0, 1, 2], [10, 30, 60])
    torch.testing.assert_close(FedAvg().weights(round, {}).float(), torch.tensor([0.1, 0.3, 0.6]))
    torch.testing.assert_close(FedAvg("uniform").weights(round, {}).float(), torch.full((3,), 1 / 3))
    vector, weights = FedAvg().aggregate(round, {})
    torch.testing.assert_close(vector, weights @ round.client_vectors)
    with pytest.raises(ConfigurationError, match='"samples" or "uniform"'):
        FedAvg("median")  # type: ignore[arg-type]


def test_shapfed_weighs_the_cohort_by_its_share() -> None:
    cssv = torch.tensor([[0.9, 0.5], [-0.2, 0.1], [0.3, 0.3], [-1.0, -1.0]])
    weights = ShapFedWA("cssv").weights(make_round([0, 2], [1, 1]), {"cssv": cssv})
    torch.testing.assert_close(weights, participant_weights(cssv[[0, 2]].double())[1])


def test_shapfed_without_contributions_is_uniform() -> None:
    assert ShapFedWA().weights(make_round([0, 1, 2, 3], [1, 2, 3, 4]), {}).tolist() == [0.25] * 4
    nothing = torch.full((4, 2), float("nan"))
    assert ShapFedWA().weights(make_round([0, 1], [1, 2]), {"cssv": nothing}).tolist() == [0.5] * 2


def test_shapfed_counts_a_newcomer_as_the_mean_of_the_known() -> None:
    cssv = torch.tensor([[1.0], [float("nan")], [0.0]])  # gamma 1, unknown, 0.5
    weights = ShapFedWA().weights(make_round([0, 1, 2], [1, 1, 1]), {"cssv": cssv})
    torch.testing.assert_close(weights.float(), torch.tensor([1.0, 0.75, 0.5]) / 2.25)


def test_shapfed_with_all_weights_zero_is_uniform() -> None:
    assert ShapFedWA().weights(make_round([0, 1], [1, 1]), {"cssv": -torch.ones(2, 3)}).tolist() == [0.5, 0.5]
