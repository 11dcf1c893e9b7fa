"""PrivacyLoss: epsilon by client, and the budget."""

import torch

from flsv.metrics.costs import PrivacyLoss
from flsv.privacy import GaussianPrivacy, gaussian_epsilon

COHORTS = ([0, 2], [2], [2, 3], [0, 2])


def test_epsilon_of_each_client_follows_from_the_rounds_it_took_part_in() -> None:
    metric = PrivacyLoss(GaussianPrivacy(clip=1.0, noise_multiplier=1.5, delta=1e-4), num_clients=4)
    for cohort in COHORTS:
        metric.update(torch.tensor(cohort))
    expected = torch.tensor(
        [gaussian_epsilon(1.5, rounds, 1e-4) if rounds else float("nan") for rounds in (2, 0, 4, 1)]
    )
    torch.testing.assert_close(metric.compute(), expected, equal_nan=True)
    assert metric.diagnostics().keys() == {"rounds"}
    assert metric.diagnostics()["rounds"].tolist() == [2, 0, 4, 1]
    assert metric.spent() is None


def test_privacy_budget_is_exceeded_first_by_the_most_frequent_client() -> None:
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
