"""DivergenceWeighted: weights from what the clients report, and nothing but a number crosses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import fit, toy_sets

from flsv.aggregation import DivergenceWeighted
from flsv.data import FederatedDataModule, ProportionPartitioner
from flsv.errors import ConfigurationError
from flsv.functional import divergence_weights, label_divergence
from flsv.loop import FederatedLoop
from flsv.parameters import ParameterSpace
from flsv.round import Round
from flsv.sampling import UniformSampler


class Remember(DivergenceWeighted):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rounds: list[Any] = []
        self.told: list[dict[str, float]] = []

    def report(self, local: Any) -> dict[str, float]:
        self.told.append(super().report(local))
        return self.told[-1]

    def weights(self, round: Any, contributions: Any) -> torch.Tensor:
        self.rounds.append(round)
        return super().weights(round, contributions)


def one_sided() -> FederatedDataModule:
    """The third client has a single class."""
    matrix = [[8.0, 1, 1], [1, 1, 1], [0, 1, 0], [1, 5, 4]]
    partitioner = ProportionPartitioner(matrix, of="client", sizes=[2, 3, 1, 1])
    return FederatedDataModule(toy_sets(), partitioner, batch_size=8)


@pytest.mark.parametrize("kind", ["kl", "l2"])
@pytest.mark.parametrize("reference", ["uniform", "global"])
@pytest.mark.parametrize("normalize", [True, False])
def test_in_a_federation(tmp_path: Path, kind: Any, reference: Any, normalize: bool) -> None:
    data = one_sided()
    aggregator = Remember(a=0.4, b=0.05, kind=kind, reference=reference, normalize_divergence=normalize)
    loop = FederatedLoop(aggregator, sampler=UniformSampler(3), seed=2)
    fit(loop, tmp_path, data=data, rounds=2)
    q = data.class_counts.sum(0) if reference == "global" else reference
    everybody = label_divergence(data.class_counts, kind, q)
    for round in aggregator.rounds:
        torch.testing.assert_close(round.reports["label_divergence"], everybody[round.client_ids])
    expected = divergence_weights(round.num_samples, everybody[round.client_ids], 0.4, 0.05, normalize)
    assert loop.weights is not None
    torch.testing.assert_close(loop.weights[round.client_ids], expected.float())
    # What crosses is one number per client and round.
    assert [list(report) for report in aggregator.told] == [["label_divergence"]] * 6
    assert all(type(report["label_divergence"]) is float for report in aggregator.told)


def test_without_a_federation() -> None:
    space = ParameterSpace(nn.Linear(3, 2))
    round = Round(0, torch.arange(2), torch.tensor([1, 2]), torch.zeros(8), torch.randn(2, 8), space)
    with pytest.raises(RuntimeError, match="have not reported"):
        DivergenceWeighted().weights(round, {})


def test_errors() -> None:
    with pytest.raises(ConfigurationError, match='kind=\'js\'.*"kl" or "l2"'):
        DivergenceWeighted(kind="js")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="reference='mean'"):
        DivergenceWeighted(reference="mean")  # type: ignore[arg-type]
