"""Epsilon by client over rounds with partial participation, and the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Plain, fit, network, toy_data

from flsv import Reporting
from flsv.filters import OutlierFilter
from flsv.loop import FederatedLoop
from flsv.metrics.cost import PrivacyLoss
from flsv.privacy import GaussianPrivacy, gaussian_epsilon
from flsv.sampling import UniformSampler
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


def test_without_noise_nothing_is_private() -> None:
    metric = run(PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=0.0), num_clients=4))
    assert metric.compute()[[0, 2, 3]].isinf().all()
    assert metric.compute()[1].isnan()


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


def test_states_survive_and_merge() -> None:
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=1.0)
    metric = run(PrivacyLoss(privacy, num_clients=4))
    other = PrivacyLoss(privacy, num_clients=4)
    other.load_state_dict(metric.state_dict())
    torch.testing.assert_close(other.compute(), metric.compute(), equal_nan=True)
    if hasattr(other, "merge_state"):  # torchmetrics 1.5
        other.merge_state(metric)
        assert other.participations.tolist() == [4, 0, 8, 2]
        assert int(other.rounds) == 8
    metric.reset()
    assert not metric.participations.any()


def test_forward_gives_this_round_and_compute_all() -> None:
    metric = PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=1.0), num_clients=2)
    now = [metric(torch.tensor([0])) for _ in range(3)]
    assert all(value[0].item() == pytest.approx(gaussian_epsilon(1.0, 1)) for value in now)
    assert metric.compute()[0].item() == pytest.approx(gaussian_epsilon(1.0, 3))


def test_plot() -> None:
    metric = run(PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=1.0), num_clients=4))
    figure, axis = metric.plot()
    assert axis.figure is figure
    assert axis.patches[0].get_height() == pytest.approx(gaussian_epsilon(1.0, 2), rel=1e-5)


def test_in_a_loop_it_follows_the_cohorts(tmp_path: Path) -> None:
    cohorts: list[list[int]] = []

    class Watched(UniformSampler):
        def sample(self, *args: Any) -> torch.Tensor:
            cohort = super().sample(*args)
            cohorts.append(cohort.tolist())
            return cohort

    metric = PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=1.0))
    loop = FederatedLoop(metrics={"loss": metric}, sampler=Watched(2), seed=3)
    fit(loop, tmp_path, rounds=4)
    taken = [sum(client in cohort for cohort in cohorts) for client in range(3)]
    expected = torch.tensor([gaussian_epsilon(1.0, rounds) if rounds else float("nan") for rounds in taken])
    torch.testing.assert_close(loop.contributions["loss"], expected, equal_nan=True)


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


def test_errors() -> None:
    metric = PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=1.0), num_clients=2)
    with pytest.raises(ValueError, match="client_ids must lie"):
        metric.update(torch.tensor([2]))
    with pytest.raises(ValueError, match="appears twice"):
        metric.update(torch.tensor([1, 1]))
