"""CosineGradientShapley where tests/replay does not lead: its floor, zero updates, other first reputations."""

import pytest
import torch

from flsv.functional.cgsv import updated_reputation
from flsv.metrics import CosineGradientShapley


def test_reputations_have_a_floor_and_sum_to_one():
    floor = 0.01
    phi = torch.tensor([1.0, 1, 1, 1, -1])
    reputation = None

    for _ in range(50):
        reputation = updated_reputation(reputation, phi, alpha=0.5, floor=floor)
        assert reputation.sum().item() == pytest.approx(1)

    assert 0 < reputation[4] < 1.1 * floor


@pytest.mark.parametrize(
    ("reputation", "message"),
    [
        pytest.param([-1.0, 1.0], "reputations of at least 0", id="negative"),
        pytest.param([0.0, 0.0], "not all 0", id="all zero"),
    ],
)
def test_reputations_that_share_out_nothing_are_refused(reputation, message):
    with pytest.raises(ValueError, match=message):
        updated_reputation(torch.tensor(reputation), torch.ones(2))


def test_zero_updates_have_cosine_0_and_share_the_reputation_equally():
    metric = CosineGradientShapley(num_clients=3)

    metric.update(
        client_ids=torch.tensor([0, 1]),
        client_updates=torch.zeros(2, 2),
        num_samples=torch.tensor([10, 10]),
    )

    assert metric.diagnostics()["phi"][:2].tolist() == [0, 0]
    assert metric.compute()[:2].tolist() == [0.5, 0.5]


def test_first_reputations_may_be_the_shares_of_samples():
    alpha = 0.7
    metric = CosineGradientShapley(num_clients=2, alpha=alpha, init="shares")

    metric.update(
        client_ids=torch.tensor([0, 1]),
        client_updates=torch.eye(2),
        num_samples=torch.tensor([3, 1]),
        aggregation_weights=torch.tensor([0.5, 0.5]),
    )

    shares = torch.tensor([0.75, 0.25])  # of 3 + 1 samples
    cosines = torch.full((2,), 0.5**0.5)  # of the two axes with their sum
    reputations = alpha * shares + (1 - alpha) * cosines
    expected = reputations / reputations.sum()
    torch.testing.assert_close(metric.compute(), expected)
