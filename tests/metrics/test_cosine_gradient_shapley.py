"""CosineGradientShapley against the paper's formulas: floor, absent and late clients, and in a loop."""

from typing import Any

import pytest
import torch

from flsv import FederatedLoop
from flsv.aggregation import CGSV
from flsv.functional.cgsv import updated_reputation
from flsv.metrics import CosineGradientShapley
from helpers.fits import fit


def reputation_by_hand(
    updates: torch.Tensor,
    reputation: torch.Tensor | None,
    alpha: float,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """The reputations after a round as in the paper; reputations of None remember nothing, as in the authors' code."""
    lengths = updates.double().norm(dim=1, keepdim=True)
    u = updates.double() / (lengths + 1e-7)
    shares = (reputation if weights is None else weights).double()
    aggregate = shares / shares.sum() @ u
    phi = u @ aggregate / (u.norm(dim=1) * aggregate.norm())
    memory = 0
    if reputation is not None:
        memory = alpha * reputation.double() / reputation.double().sum()

    updated = (memory + (1 - alpha) * phi).clamp_min(1e-3)
    return updated / updated.sum()


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
        pytest.param([-1.0, 1.0], "not negative", id="negative"),
        pytest.param([0.0, 0.0], "not all 0", id="all zero"),
    ],
)
def test_reputations_that_share_out_nothing_are_refused(reputation, message):
    with pytest.raises(ValueError, match=message):
        updated_reputation(torch.tensor(reputation), torch.ones(2))


def test_cohort_redistributes_its_reputation_and_absent_clients_keep_theirs():
    metric = CosineGradientShapley(num_clients=4, alpha=0.5)

    metric.update(
        client_ids=torch.tensor([0, 1, 3]),
        client_updates=torch.eye(3),
        num_samples=torch.tensor([1, 1, 2]),
    )

    values_of_round_1 = metric.compute()
    assert values_of_round_1[2].isnan()
    # The data shares weigh in the first aggregate.
    assert values_of_round_1[3] > values_of_round_1[0]
    assert values_of_round_1.nansum().item() == pytest.approx(1)

    metric.update(
        client_ids=torch.tensor([0, 1]),
        client_updates=torch.tensor([[1.0, 0], [-1.0, 0.1]]),
        num_samples=torch.tensor([1, 1]),
        aggregation_weights=torch.tensor([0.7, 0.3]),
    )

    values_of_round_2 = metric.compute()
    torch.testing.assert_close(values_of_round_2[3], values_of_round_1[3])
    torch.testing.assert_close(values_of_round_2[:2].sum(), values_of_round_1[:2].sum())
    assert values_of_round_2[0] > values_of_round_2[1]


def test_zero_updates_have_cosine_0_and_share_the_reputation_equally():
    metric = CosineGradientShapley(num_clients=3)

    metric.update(
        client_ids=torch.tensor([0, 1]),
        client_updates=torch.zeros(2, 2),
        num_samples=torch.tensor([10, 10]),
    )

    assert metric.diagnostics()["phi"][:2].tolist() == [0, 0]
    assert metric.compute()[:2].tolist() == [0.5, 0.5]


def test_newcomer_gets_the_mean_reputation():
    """A cohort keeps the sum of its reputations, so samples and updates of one that trains alone make no difference."""
    num_clients = 3
    metric = CosineGradientShapley(num_clients=num_clients)
    metric.update(
        client_ids=torch.tensor([0, 1]),
        client_updates=torch.eye(2),
        num_samples=torch.tensor([3, 1]),
    )

    metric.update(
        client_ids=torch.tensor([2]),
        client_updates=torch.ones(1, 2),
        num_samples=torch.tensor([500]),
    )

    assert metric.compute()[2].item() == pytest.approx(1 / num_clients)


@pytest.mark.parametrize("init", ["zero", "shares"])
def test_cgsv_metric_is_updated_after_aggregation_with_its_weights(tmp_path, init):
    rounds: list[Any] = []
    values_read: list[torch.Tensor | None] = []

    class Watch(CGSV):
        def aggregate(self, round: Any, contributions: Any) -> Any:
            rounds.append(round)
            values_read.append(contributions.get("cgsv"))
            return super().aggregate(round, contributions)

    metric = CosineGradientShapley(alpha=0.7, init=init)
    loop = FederatedLoop(
        Watch(scale=0.5),
        {"cgsv": metric},
        seed=1,
    )

    fit(loop, tmp_path, rounds=3)

    shares = rounds[0].num_samples / rounds[0].num_samples.sum()
    reputation = shares if init == "shares" else None
    weights = shares  # of the first aggregate; later it is the reputations

    for round, values in zip(rounds, values_read):
        if round is rounds[0]:
            assert values is None
        else:
            torch.testing.assert_close(values, reputation.float())
            weights = None
        updates = round.client_updates[:, : round.space.num_parameters]
        reputation = reputation_by_hand(updates, reputation, 0.7, weights)

    torch.testing.assert_close(
        loop.contributions["cgsv"],
        reputation.float(),
    )
