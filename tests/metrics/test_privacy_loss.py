"""Epsilon by client over rounds with partial participation, and the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toys import Plain, fit, network, toy_data

from flsv import Reporting
from flsv.filters import OutlierFilter
from flsv.loop import FederatedLoop
from flsv.metrics.cost import PrivacyLoss
from flsv.privacy import GaussianPrivacy, gaussian_epsilon
from flsv.uploads import Upload, UploadContext

COHORTS = ([0, 2], [2], [2, 3], [0, 2])


def run(metric: PrivacyLoss) -> PrivacyLoss:
    for cohort in COHORTS:
        metric.update(torch.tensor(cohort))
    return metric


def test_epsilon_counts_the_rounds_of_each_client() -> None:
    metric = run(PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=1.5, delta=1e-4), num_clients=4))
    expected = torch.tensor(
        [gaussian_epsilon(1.5, rounds, 1e-4) if rounds else float("nan") for rounds in (2, 0, 4, 1)]
    )
    torch.testing.assert_close(metric.compute(), expected, equal_nan=True)
    assert metric.diagnostics().keys() == {"rounds"}
    assert metric.diagnostics()["rounds"].tolist() == [2, 0, 4, 1]
    assert metric.spent() is None


def test_the_budget_is_spent_by_whoever_took_part_most() -> None:
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=2.0, max_epsilon=4.5)
    assert privacy.affordable_rounds() == 4
    metric = PrivacyLoss(privacy, num_clients=4)
    for cohort in COHORTS:
        assert metric.spent() is None
        metric.update(torch.tensor(cohort))
    assert metric.diagnostics()["affordable"].tolist() == [2, 4, 0, 3]
    assert metric.spent() == (
        "client 2 has spent epsilon = 4.377 in 4 rounds, and one more would make it 4.983, above max_epsilon=4.5 "
        "(delta=1e-05)"
    )


class Swollen(Upload):
    """Makes client 1's update far larger than it may be, after the noise."""

    def apply(self, update: torch.Tensor, departure: UploadContext) -> torch.Tensor:
        return update * (1e6 if departure.client == 1 else 1)


def test_an_update_that_is_left_out_was_shared_all_the_same(tmp_path: Path) -> None:
    loop = FederatedLoop(
        uploads=[GaussianPrivacy(1.0, 2.0), Swollen()],
        filters=[OutlierFilter(exclude=True)],
        seed=1,
        reporting=Reporting(table=False),
    )
    with pytest.warns(UserWarning, match="client 1 .* left out of the round"):
        fit(loop, tmp_path, Plain(network(batch_norm=False)), toy_data((4, 3, 4, 3)), rounds=2)
    assert loop.participations.tolist() == [2, 0, 2, 2]
    assert loop.metrics["epsilon"].diagnostics()["rounds"].tolist() == [2, 2, 2, 2]
    assert loop.contributions["epsilon"].isfinite().all()
