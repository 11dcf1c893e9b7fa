"""ClassSpecificShapley and CosineGradientShapley: by hand over rounds, absent clients, in a loop."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import fit

from flsv.aggregation import CGSV
from flsv.functional import class_specific_shapley, participant_weights
from flsv.functional.agreement import updated_reputation
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley

ROUNDS = [([0, 1, 3], 0), ([1, 3], 1), ([0, 1], 2), ([3], 3)]


def heads(seed: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(k, 2, 4, generator=generator), torch.randn(2, 4, generator=generator)


def feed(metric: ClassSpecificShapley, rounds: list[tuple[list[int], int]] = ROUNDS) -> ClassSpecificShapley:
    for ids, seed in rounds:
        metric.update(torch.tensor(ids), *heads(seed, len(ids)))
    return metric


def expected(rounds: list[tuple[list[int], int]] = ROUNDS, momentum: float = 0.9) -> torch.Tensor:
    value = torch.full((5, 2), float("nan"))
    for ids, seed in rounds:
        now = class_specific_shapley(*heads(seed, len(ids)))
        for row, i in enumerate(ids):
            value[i] = now[row] if value[i].isnan().all() else momentum * value[i] + (1 - momentum) * now[row]
    return value


def metric(**kwargs: object) -> ClassSpecificShapley:
    return ClassSpecificShapley(num_clients=5, num_classes=2, **kwargs)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_running_value_is_algorithm_1(momentum: float) -> None:
    got = feed(metric(momentum=momentum)).compute()
    torch.testing.assert_close(got, expected(momentum=momentum), equal_nan=True)
    assert got[[2, 4]].isnan().all()  # never seen


def test_one_number_per_client_is_a_cosine_like_its_parts() -> None:
    live = feed(metric())
    overall = live.per_client(live.compute())
    torch.testing.assert_close(overall, expected().mean(-1), equal_nan=True)
    torch.testing.assert_close((1 + overall) / 2, participant_weights(expected())[0], equal_nan=True)  # eq. 6
    against = ClassSpecificShapley(num_clients=2, num_classes=2)
    against.update(torch.tensor([0, 1]), torch.tensor([-1.0, 1.0]).view(2, 1, 1).expand(2, 2, 3), torch.ones(2, 3))
    assert against.per_client(against.compute()).tolist() == pytest.approx([-1, 1])
    assert "from -1 to 1" in against.guide().lines()["sign"]


def test_two_classes_are_one_number_and_it_is_said() -> None:
    with pytest.warns(UserWarning, match="two classes both have the same number"):
        ClassSpecificShapley().bind(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ClassSpecificShapley().bind(3, 3)


def test_weighed_by_samples_two_halves_come_to_the_whole_and_cosines_stay() -> None:
    whole, server = heads(0, 1)
    rest = heads(1, 2)[0]
    one, two = metric(weighting="samples"), metric(weighting="samples")
    one.update(torch.tensor([0, 1, 2]), torch.cat([whole, rest]), server, torch.tensor([40, 10, 20]))
    two.update(torch.tensor([0, 1, 2, 3]), torch.cat([whole, rest, whole]), server, torch.tensor([20, 10, 20, 20]))
    plain = metric()
    plain.update(torch.tensor([0, 1, 2]), torch.cat([whole, rest]), server)
    torch.testing.assert_close(one.compute(), plain.compute(), equal_nan=True)
    paid, split = one.per_client(one.compute()), two.per_client(two.compute())
    torch.testing.assert_close(split[0] + split[3], paid[0])
    torch.testing.assert_close(paid[:3], plain.per_client(plain.compute())[:3] * torch.tensor([40.0, 10.0, 20.0]))
    assert paid[3:].isnan().all()


def test_weighed_by_samples_over_rounds_and_in_the_interval() -> None:
    def fed(rounds: list[tuple[list[int], int]]) -> ClassSpecificShapley:
        result = metric(weighting="samples", momentum=0.5)
        for ids, seed in rounds:
            result.update(torch.tensor(ids), *heads(seed, len(ids)), torch.tensor(ids) + 10 * (seed + 1))
        return result

    found = fed(ROUNDS)
    torch.testing.assert_close(found.compute(), expected(momentum=0.5), equal_nan=True)
    # Client 1 had 11, 21 and 31 samples.
    mean = expected(momentum=0.5).mean(-1)
    torch.testing.assert_close(found.per_client(found.compute())[1], mean[1] * (0.25 * 11 + 0.25 * 21 + 0.5 * 31))
    ends = found.intervals()
    assert ends is not None
    middle = (ends[0] + ends[1]) / 2
    known = ~ends[0].isnan()
    assert known.any()
    torch.testing.assert_close(middle[known], found.per_client(found.compute())[known])  # no bound of cosines


def by_hand(
    updates: torch.Tensor,
    reputation: torch.Tensor | None,
    alpha: float = 0.95,
    weights: torch.Tensor | None = None,
    floor: float = 1e-3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A round as in the paper; reputations of None remember nothing, as in the authors' code."""
    u = updates.double() / (updates.double().norm(dim=1, keepdim=True) + 1e-7)
    shares = reputation if weights is None else weights
    aggregate = shares.double() / shares.double().sum() @ u
    phi = u @ aggregate / (u.norm(dim=1) * aggregate.norm())
    memory = 0 if reputation is None else alpha * reputation.double() / reputation.double().sum()
    after = (memory + (1 - alpha) * phi).clamp_min(floor)
    return phi, after / after.sum()


def test_lengths_do_not_matter_and_nothing_is_zero() -> None:
    def values(updates: torch.Tensor) -> tuple[list[float], list[float]]:
        metric = CosineGradientShapley(num_clients=len(updates))
        metric.update(torch.arange(len(updates)), updates, torch.full((len(updates),), 10))
        return metric.diagnostics()["phi"].tolist(), metric.compute().tolist()

    updates = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    for found, expected in zip(values(updates * torch.tensor([[1.0], [7.0], [100.0]])), values(updates)):
        assert found == pytest.approx(expected, rel=1e-5)
    updates[1] = 0
    assert values(updates)[0][1] == 0
    assert values(torch.zeros(2, 5)) == ([0, 0], [0.5, 0.5])


def test_the_floor_holds_and_reputations_sum_to_one() -> None:
    reputation = None
    for _ in range(50):
        reputation = updated_reputation(reputation, torch.tensor([1.0, 1, 1, 1, -1]), alpha=0.5, floor=0.01)
        assert reputation.sum().item() == pytest.approx(1)
    assert 0 < reputation[4] < 0.011
    for wrong, message in ((torch.tensor([-1.0, 1.0]), "not negative"), (torch.zeros(2), "not all 0")):
        with pytest.raises(ValueError, match=message):
            updated_reputation(wrong, torch.ones(2))


def alike(rho: float, n: int) -> torch.Tensor:
    """n updates of length 1, any two of which have the cosine rho."""
    return torch.cat([(1 - rho) ** 0.5 * torch.eye(n), torch.full((n, 1), rho**0.5)], dim=1)


@pytest.mark.parametrize(("init", "first"), [("zero", 0.447), ("shares", 0.617)])
def test_the_first_round_remembers_nothing_or_the_shares(init: Any, first: float) -> None:
    """One client with seven times the others' data: by hand from the cosines of updates that are all equally alike."""
    rho, sizes = 0.133, torch.tensor([70, 10, 10, 10, 10])
    metric = CosineGradientShapley(num_clients=5, init=init)
    metric.update(torch.arange(5), alike(rho, 5), sizes, sizes / sizes.sum())
    own, other = (7 + 4 * rho), (1 + 10 * rho)  # |u_N| phi, times 11
    length = (53 + (121 - 53) * rho) ** 0.5
    phi = torch.tensor([own, other, other, other, other]) / length
    expected = phi / phi.sum() if init == "zero" else (w := 0.95 * sizes / sizes.sum() + 0.05 * phi) / w.sum()
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-5, atol=1e-6)
    assert metric.compute()[0].item() == pytest.approx(first, abs=1e-3)


def test_the_cohort_shares_out_what_it_has_and_others_keep_theirs() -> None:
    metric = CosineGradientShapley(num_clients=4, alpha=0.5)
    samples = torch.tensor([1, 1, 2])
    metric.update(torch.tensor([0, 1, 3]), torch.eye(3), samples)
    before = metric.compute()
    assert before[2].isnan()
    assert before[3] > before[0]  # the data shares weigh in the first aggregate
    assert before.nansum().item() == pytest.approx(1)
    metric.update(torch.tensor([0, 1]), torch.tensor([[1.0, 0], [-1.0, 0.1]]), samples[:2], torch.tensor([0.7, 0.3]))
    after = metric.compute()
    torch.testing.assert_close(after[3], before[3])
    torch.testing.assert_close(after[:2].sum(), before[:2].sum())
    assert after[0] > after[1]


def test_a_newcomer_starts_from_the_mean() -> None:
    metric = CosineGradientShapley(num_clients=3, alpha=0.99)
    metric.update(torch.tensor([0, 1]), torch.eye(2), torch.tensor([3, 1]))
    metric.update(torch.tensor([2]), torch.ones(1, 2), torch.tensor([500]))
    assert metric.compute()[2].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("init", ["zero", "shares"])
def test_in_a_loop_it_is_updated_after_aggregation_with_the_weights_used(tmp_path: Path, init: Any) -> None:
    seen: list[tuple[Any, torch.Tensor | None]] = []

    class Watch(CGSV):
        def aggregate(self, round: Any, contributions: Any) -> Any:
            seen.append((round, contributions.get("cgsv")))
            return super().aggregate(round, contributions)

    loop = FederatedLoop(Watch(scale=0.5), {"cgsv": CosineGradientShapley(alpha=0.7, init=init)}, seed=1)
    fit(loop, tmp_path, rounds=3)
    shares = seen[0][0].num_samples / seen[0][0].num_samples.sum()
    reputation = shares if init == "shares" else None
    for r, (round, before) in enumerate(seen):
        if r == 0:
            assert before is None
        else:
            torch.testing.assert_close(before, reputation.float())
        cut = round.space.num_parameters
        weights = None if r else shares
        updates = round.client_updates[:, :cut]
        _, reputation = by_hand(updates, reputation, alpha=0.7, weights=weights)
    torch.testing.assert_close(loop.contributions["cgsv"], reputation.float())
