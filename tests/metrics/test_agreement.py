"""ClassSpecificShapley, CosineGradientShapley, GradientAgreement: by hand, absent clients, in a loop."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flsv import FederatedLoop, Reporting
from flsv.aggregation import CGSV
from flsv.data import FederatedDataModule, IIDPartitioner, Splits
from flsv.functional import class_specific_shapley, participant_weights
from flsv.functional.cgsv import updated_reputation
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley, GradientAgreement
from flsv.models.classifier import ClassifierClient
from flsv.utilities.errors import ConfigurationError
from helpers.data import toy_data
from helpers.fits import Recorded, fit
from helpers.models import Line

Rounds = list[tuple[list[int], int]]
ROUNDS: Rounds = [([0, 1, 3], 0), ([1, 3], 1), ([0, 1], 2), ([3], 3)]


def heads(seed: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(k, 2, 4, generator=generator), torch.randn(2, 4, generator=generator)


def expected(momentum: float = 0.9) -> torch.Tensor:
    value = torch.full((5, 2), float("nan"))
    for ids, seed in ROUNDS:
        now = class_specific_shapley(*heads(seed, len(ids)))
        for row, i in enumerate(ids):
            value[i] = now[row] if value[i].isnan().all() else momentum * value[i] + (1 - momentum) * now[row]
    return value


def fed(**kwargs: Any) -> ClassSpecificShapley:
    metric = ClassSpecificShapley(num_clients=5, num_classes=2, **kwargs)
    for ids, seed in ROUNDS:
        metric.update(torch.tensor(ids), *heads(seed, len(ids)), torch.tensor(ids) + 10 * (seed + 1))
    return metric


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_class_specific_shapley_running_value_is_algorithm_1(momentum: float) -> None:
    metric, wanted = fed(momentum=momentum), expected(momentum)
    torch.testing.assert_close(metric.compute(), wanted, equal_nan=True)
    overall = metric.per_client(metric.compute())
    torch.testing.assert_close((1 + overall) / 2, participant_weights(wanted)[0], equal_nan=True)  # eq. 6


def test_class_specific_shapley_of_two_classes_warns() -> None:
    with pytest.warns(UserWarning, match="two classes both have the same value"):
        ClassSpecificShapley().bind(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ClassSpecificShapley().bind(3, 3)


def test_weighed_by_samples_over_rounds_and_in_the_interval() -> None:
    found = fed(weighting="samples", momentum=0.5)
    torch.testing.assert_close(found.compute(), expected(momentum=0.5), equal_nan=True)
    # Client 1 had 11, 21 and 31 samples.
    mean = expected(momentum=0.5).mean(-1)
    torch.testing.assert_close(found.per_client(found.compute())[1], mean[1] * (0.25 * 11 + 0.25 * 21 + 0.5 * 31))
    low, high = found.intervals()
    known = ~low.isnan()
    assert known.any()
    middle = (low + high) / 2
    torch.testing.assert_close(middle[known], found.per_client(found.compute())[known])  # no bound of cosines


def reputation_by_hand(
    updates: torch.Tensor, reputation: torch.Tensor | None, alpha: float, weights: torch.Tensor | None
) -> torch.Tensor:
    """The reputations after a round as in the paper; reputations of None remember nothing, as in the authors' code."""
    u = updates.double() / (updates.double().norm(dim=1, keepdim=True) + 1e-7)
    shares = reputation if weights is None else weights
    aggregate = shares.double() / shares.double().sum() @ u
    phi = u @ aggregate / (u.norm(dim=1) * aggregate.norm())
    memory = 0 if reputation is None else alpha * reputation.double() / reputation.double().sum()
    after = (memory + (1 - alpha) * phi).clamp_min(1e-3)
    return after / after.sum()


def test_the_floor_holds_and_reputations_sum_to_one() -> None:
    reputation = None
    for _ in range(50):
        reputation = updated_reputation(reputation, torch.tensor([1.0, 1, 1, 1, -1]), alpha=0.5, floor=0.01)
        assert reputation.sum().item() == pytest.approx(1)
    assert 0 < reputation[4] < 0.011
    for wrong, message in ((torch.tensor([-1.0, 1.0]), "not negative"), (torch.zeros(2), "not all 0")):
        with pytest.raises(ValueError, match=message):
            updated_reputation(wrong, torch.ones(2))


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


def test_updates_of_nothing_have_cosine_0_and_a_newcomer_starts_from_the_mean() -> None:
    metric = CosineGradientShapley(num_clients=3, alpha=0.99)
    metric.update(torch.arange(2), torch.zeros(2, 2), torch.full((2,), 10))
    assert metric.diagnostics()["phi"][:2].tolist() == [0, 0]
    assert metric.compute()[:2].tolist() == [0.5, 0.5]
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
        reputation = reputation_by_hand(updates, reputation, 0.7, weights)
    torch.testing.assert_close(loop.contributions["cgsv"], reputation.float())


def parts_by_hand(rounds: list[tuple[Tensor, Tensor, Tensor, Tensor]], n: int) -> tuple[np.ndarray, np.ndarray]:
    """What each of ``n`` clients gains in each round, and its cosine by samples; full participation, in NumPy."""
    gains, cosines = np.zeros((2, len(rounds), n))
    for t, (_, slopes, updates, samples) in enumerate(rounds):
        s, d, m = (np.asarray(each, dtype=np.float64) for each in (slopes, updates, samples))
        unit = d / np.linalg.norm(d, axis=1, keepdims=True)
        everybody = (m[:, None] * unit).sum(0)
        gains[t], cosines[t] = -m * s, m * (unit @ everybody) / np.linalg.norm(everybody)
    return gains, cosines


def by_hand(rounds: list[tuple[Tensor, Tensor, Tensor, Tensor]], n: int) -> np.ndarray:
    """The docstring's formulas."""
    gains, cosines = parts_by_hand(rounds, n)
    u, a = np.maximum(gains.sum(0), 0), np.maximum(cosines.mean(0), 0)
    return u / u.sum() / 2 + a / a.sum() / 2


def drawn(seed: int, n: int, size: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    updates = torch.randn(n, size, generator=draw) + 1
    return torch.arange(n), -torch.rand(n, generator=draw), updates, torch.arange(1, n + 1) * 10


def test_gradient_agreement_and_its_intervals_equal_the_formulas() -> None:
    """Three rounds, two steps: the standard errors of the sum and of the mean, as shares, added up."""
    rounds = [drawn(seed, 4) for seed in range(3)]
    metric = GradientAgreement(num_clients=4)
    for each in rounds:
        metric.update(*each)
    value = by_hand(rounds, 4)
    np.testing.assert_allclose(metric.compute().numpy(), value, rtol=1e-5)
    gains, cosines = parts_by_hand(rounds, 4)
    of_gain, of_cosine = (np.sqrt(np.square(np.diff(x, axis=0)).mean(0) / 2) for x in (gains, cosines))
    half = 3**0.5 * of_gain / gains.sum() + 3**-0.5 * of_cosine / cosines.mean(0).sum()
    half *= 3.484147 / 2  # Student's t, 1.6 degrees of freedom, 90 %; half of each kind
    low, high = metric.intervals()
    np.testing.assert_allclose(low.numpy(), np.maximum(value - half, 0), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(high.numpy(), np.minimum(value + half, 1), rtol=1e-3, atol=1e-6)


def test_gradient_agreement_does_not_punish_early_absence() -> None:
    """Slopes fall by half from round to round; two equal clients, one of which misses the first round."""
    metric, plain = GradientAgreement(num_clients=3, blend=0.0), torch.zeros(3)
    update = torch.ones(3, 5)
    for index in range(4):
        ids = torch.tensor([0, 2] if index == 0 else [0, 1, 2])
        slopes = -torch.full((len(ids),), 0.5**index)
        metric.update(ids, slopes, update[: len(ids)], torch.full((len(ids),), 10))
        plain[ids] -= slopes
    assert torch.allclose(metric.compute(), torch.full((3,), 1 / 3))
    assert plain[1] < plain[0] / 2  # what a sum would say


@pytest.mark.parametrize("balanced", [False, True])
def test_in_a_loop_the_slopes_are_those_of_the_validation_loss(tmp_path: Path, balanced: bool) -> None:
    data, recorded = toy_data((4, 1, 2), server_val=0.3), Recorded()
    metric = GradientAgreement(balanced=balanced)
    loop = FederatedLoop(metrics={"mine": metric, "seen": recorded}, seed=1, reporting=Reporting(table=False))
    module = fit(loop, tmp_path, ClassifierClient("softmax"), data, rounds=2)
    rounds = []
    for ids, vector, updates, samples in recorded.seen:
        loop.space.write(module, vector)
        x, y = (torch.cat(parts) for parts in zip(*data.val_dataloader()))
        module.zero_grad()
        each = nn.functional.cross_entropy(module(x), y, reduction="none")
        classes = [each[y == c].mean() for c in y.unique()]
        assert y.bincount().unique().numel() > 1
        (torch.stack(classes).mean() if balanced else each.mean()).backward()
        slope = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
        rounds.append((ids, updates @ slope, updates, samples))
    np.testing.assert_allclose(loop.contributions["mine"].numpy(), by_hand(rounds, 3), rtol=1e-4)


def test_gradient_agreement_of_a_regression_uses_the_logged_loss(tmp_path: Path) -> None:
    splits = Splits(max_samples=200, server_val=0.3)
    data, recorded = FederatedDataModule("digits", IIDPartitioner(num_clients=3), splits=splits), Recorded()
    metrics = {"mine": GradientAgreement(loss="val_loss"), "seen": recorded}
    loop = FederatedLoop(metrics=metrics, seed=1, reporting=Reporting(table=False))
    line = fit(loop, tmp_path, Line(), data, rounds=1)
    ((ids, vector, updates, samples),) = recorded.seen
    loop.space.write(line, vector)
    batch = [torch.cat(parts) for parts in zip(*data.val_dataloader())]
    line.zero_grad()
    line.training_step(batch, 0).backward()
    slope = torch.cat([line.layer.weight.grad.flatten(), line.layer.bias.grad])
    # A difference quotient with a step of 5 %.
    np.testing.assert_allclose(
        loop.contributions["mine"].numpy(), by_hand([(ids, updates @ slope, updates, samples)], 3), rtol=0.02
    )


def test_agreement_metrics_with_wrong_input_raise() -> None:
    with pytest.raises(ConfigurationError, match="no classes to balance"):
        GradientAgreement(loss="val_loss", balanced=True)
    metric = GradientAgreement(num_clients=3)
    with pytest.raises(ValueError, match=r"client_updates \[k=2, P\]"):
        metric.update(torch.arange(2), torch.zeros(2), torch.zeros(3, 4), torch.ones(2))
    with pytest.raises(ValueError, match="gradient_products"):
        metric.update(torch.arange(2), torch.zeros(3), torch.zeros(2, 4), torch.ones(2))
