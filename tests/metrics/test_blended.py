"""BlendedContribution: its two halves by hand, under absence, in a loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from toys import Plain, fit, toy_data

from flsv import FederatedLoop, Reporting
from flsv.functional import exact_shapley
from flsv.metrics import BlendedContribution, DecayedShapley


def additive(gains: list[float]) -> object:
    return lambda masks: masks.double() @ torch.tensor(gains, dtype=torch.float64)


def shares(values: np.ndarray) -> np.ndarray:
    positive = np.maximum(values, 0)
    return positive / positive.sum()


def test_both_halves_by_hand_with_somebody_absent() -> None:
    """Client 2 misses the first round: it gains nothing there, and its cosine is that of its own round."""
    rounds = [([0, 1], [3.0, 1.0], [[2.0, 0.0], [1.0, 1.0]], [0.75, 0.25])]
    rounds += [([0, 1, 2], [1.0, -4.0, 2.0], [[1.0, 0.0], [0.0, -1.0], [3.0, 4.0]], [0.5, 0.25, 0.25])]
    metric = BlendedContribution(num_clients=4, decay=0.5)
    gain, cosine, seen = np.zeros(4), np.zeros(4), np.zeros(4)
    for index, (ids, gains, updates, weights) in enumerate(rounds):
        game = additive(gains)
        metric.update(torch.tensor(ids), index, game, torch.tensor(updates), aggregation_weights=torch.tensor(weights))
        unit = np.array(updates) / np.linalg.norm(updates, axis=1, keepdims=True)
        everybody = np.array(weights) @ unit
        gain[ids] += 0.5 ** (index + 1) * exact_shapley(game, len(ids)).values.numpy()
        cosine[ids] += unit @ everybody / np.linalg.norm(everybody)
        seen[ids] += 1
    expected = shares(gain[:3]) / 2 + shares(cosine[:3] / seen[:3]) / 2
    np.testing.assert_allclose(metric.compute()[:3].numpy(), expected, rtol=1e-5)
    assert metric.compute()[3].isnan()
    np.testing.assert_allclose(metric.diagnostics()["gain"][:3].numpy(), gain[:3], rtol=1e-5)


def test_in_a_loop_it_has_the_decayed_game_and_the_aggregates_directions(tmp_path: Path) -> None:
    metrics = {"blended": BlendedContribution(), "decayed": DecayedShapley(normalize=False)}
    loop = FederatedLoop(metrics=metrics, reporting=Reporting(table=False), seed=0)
    fit(loop, tmp_path, Plain(), toy_data(), rounds=2)
    found: dict[str, Tensor] = loop.metrics["blended"].diagnostics()
    torch.testing.assert_close(found["gain"], loop.contributions["decayed"], rtol=1e-5, atol=1e-7)
    assert bool(found["cosine"].isfinite().all())
    torch.testing.assert_close(loop.contributions["blended"].sum(), torch.tensor(1.0))
