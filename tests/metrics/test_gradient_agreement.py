"""GradientAgreement: by hand, under absence, in a loop, of a regression."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from recorded import Line, Recorded
from torch import Tensor, nn
from toys import fit, toy_data

from flsv import FederatedLoop, Reporting
from flsv.data import FederatedDataModule, IIDPartitioner, Splits
from flsv.errors import ConfigurationError
from flsv.metrics import GradientAgreement
from flsv.models import build_network
from flsv.models.classifier import ClassifierClient


def by_hand(rounds: list[tuple[Tensor, Tensor, Tensor, Tensor]], n: int) -> np.ndarray:
    """The docstring's formulas, full participation, in NumPy."""
    u, a, count = np.zeros(n), np.zeros(n), np.zeros(n)
    for ids, slopes, updates, samples in rounds:
        i, s, d, m = (np.asarray(each, dtype=np.float64) for each in (ids, slopes, updates, samples))
        unit = d / np.linalg.norm(d, axis=1, keepdims=True)
        everybody = (m[:, None] * unit).sum(0)
        cosine = unit @ everybody / np.linalg.norm(everybody)
        for row, client in enumerate(i.astype(int)):
            u[client] -= m[row] * s[row]
            a[client] += m[row] * cosine[row]
            count[client] += 1
    a /= count
    u, a = np.maximum(u, 0), np.maximum(a, 0)
    return u / u.sum() / 2 + a / a.sum() / 2


def drawn(seed: int, n: int, size: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    updates = torch.randn(n, size, generator=draw) + 1
    return torch.arange(n), -torch.rand(n, generator=draw), updates, torch.arange(1, n + 1) * 10


def test_the_formulas() -> None:
    rounds = [drawn(seed, 4) for seed in range(3)]
    metric = GradientAgreement(num_clients=4)
    for each in rounds:
        metric.update(*each)
    np.testing.assert_allclose(metric.compute().numpy(), by_hand(rounds, 4), rtol=1e-5)


def test_who_is_absent_early_is_not_punished() -> None:
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
    network = build_network("softmax", data.num_classes, data.input_shape)
    rounds = []
    for ids, vector, updates, samples in recorded.seen:
        loop.space.write(module, vector)
        network.load_state_dict(module.network.state_dict())
        x, y = (torch.cat(parts) for parts in zip(*data.val_dataloader()))
        network.zero_grad()
        each = nn.functional.cross_entropy(network(x), y, reduction="none")
        classes = [each[y == c].mean() for c in y.unique()]
        assert y.bincount().unique().numel() > 1
        (torch.stack(classes).mean() if balanced else each.mean()).backward()
        slope = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
        rounds.append((ids, updates @ slope, updates, samples))
    np.testing.assert_allclose(loop.contributions["mine"].numpy(), by_hand(rounds, 3), rtol=1e-4)


def test_of_a_regression_by_the_loss_that_it_logs(tmp_path: Path) -> None:
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


def test_intervals_are_those_of_both_parts() -> None:
    """Three rounds, two steps: the standard errors of the sum and of the mean, as shares, added up."""
    rounds = [drawn(seed, 4) for seed in range(3)]
    metric = GradientAgreement(num_clients=4)
    for each in rounds:
        metric.update(*each)
    gains, cosines = np.zeros((2, 3, 4))
    for t, (_, slopes, updates, samples) in enumerate(rounds):
        s, d, m = (np.asarray(each, dtype=np.float64) for each in (slopes, updates, samples))
        unit = d / np.linalg.norm(d, axis=1, keepdims=True)
        everybody = (m[:, None] * unit).sum(0)
        gains[t], cosines[t] = -m * s, m * (unit @ everybody) / np.linalg.norm(everybody)
    of_gain, of_cosine = (np.sqrt(np.square(np.diff(x, axis=0)).mean(0) / 2) for x in (gains, cosines))
    half = 3**0.5 * of_gain / gains.sum() + 3**-0.5 * of_cosine / cosines.mean(0).sum()
    low, high = metric.intervals()
    value = metric.compute().numpy()
    half *= 3.484147 / 2  # Student's t, 1.6 degrees of freedom, 90 %; half of each kind
    np.testing.assert_allclose(low.numpy(), np.maximum(value - half, 0), rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(high.numpy(), np.minimum(value + half, 1), rtol=1e-3, atol=1e-6)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no classes to balance"):
        GradientAgreement(loss="val_loss", balanced=True)
    metric = GradientAgreement(num_clients=3)
    with pytest.raises(ValueError, match=r"client_updates \[k=2, P\]"):
        metric.update(torch.arange(2), torch.zeros(2), torch.zeros(3, 4), torch.ones(2))
    with pytest.raises(ValueError, match="gradient_products"):
        metric.update(torch.arange(2), torch.zeros(3), torch.zeros(2, 4), torch.ones(2))
