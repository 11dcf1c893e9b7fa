"""Attackers who look at each other's updates, against loops written from the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import norm
from torch import Tensor
from toys import fit, toy_data

from flsv import ClientEvaluation
from flsv.attacks import Collusion, MinMax
from flsv.attacks.collusion import largest_z
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import CommunicationCost
from flsv.personalization import Standalone
from flsv.privacy import GaussianPrivacy
from flsv.uploads import TopK

UPDATES = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("n", "m"), [(50, 24), (10, 3), (5, 1), (20, 4)])
def test_z_is_the_papers(n: int, m: int) -> None:
    s = n // 2 + 1 - m
    assert largest_z(n, m) == pytest.approx(norm.ppf((n - m - s) / (n - m)))


@pytest.mark.parametrize("direction", ["unit", "std", "sign"])
def test_min_max_against_the_papers_search(direction: Any) -> None:
    """Algorithm 1: halve the step, go up where the bound holds, down where it does not."""
    mean = UPDATES.mean(0)
    p = {"unit": -mean / mean.norm(), "std": -UPDATES.std(0, correction=0), "sign": -mean.sign()}[direction]
    bound = max((a - b).norm() for a in UPDATES for b in UPDATES)
    gamma, step, best = 50.0, 25.0, 0.0
    for _ in range(60):
        if max((mean + gamma * p - each).norm() for each in UPDATES) <= bound:
            best, gamma = gamma, gamma + step
        else:
            gamma -= step
        step /= 2
    sent = MinMax(direction, clients=[0, 3]).sent(range(7), UPDATES, 7, 0)
    torch.testing.assert_close(sent[0], mean + best * p, rtol=0, atol=1e-4)


class Quarter(Collusion):
    """A quarter of what the colluders know, and remembers what it has seen."""

    def collude(self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator) -> Tensor:
        self.seen = [*getattr(self, "seen", []), updates.clone()]
        return updates.mean(0) / 4


def run(folder: Path, *uploads: Any, **options: Any) -> FederatedLoop:
    loop = FederatedLoop(uploads=list(uploads), metrics={"cost": CommunicationCost()}, seed=1, **options)
    fit(loop, folder, data=toy_data((4, 3, 4, 3)), rounds=1)
    return loop


def test_what_colluders_have_trained_is_still_their_own(tmp_path: Path) -> None:
    keep = {"evaluation": ClientEvaluation(every=1, models="trained")}
    honest = run(tmp_path / "honest", **keep)
    loop = run(tmp_path / "attacked", Quarter(clients=[1, 2]), **keep)
    for client in range(4):
        assert torch.equal(loop.trained[client], honest.trained[client])


def test_colluders_come_last_and_send_dense_updates(tmp_path: Path) -> None:
    attack = Quarter(clients=[0], knows="all")
    loop = run(tmp_path, TopK(0.1), attack)
    uploaded = loop.contributions["cost"].by_class[:, 0]
    assert uploaded[0] == loop.space.size
    assert uploaded[1] < loop.space.size / 2
    assert (attack.seen[0] == 0).float().mean() > 0.5  # what the others are about to send
    with pytest.raises(ConfigurationError, match="then collusion"):
        FederatedLoop(uploads=[attack, GaussianPrivacy(1.0, 1.0)])


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="colluders compare updates where everybody starts"):
        FederatedLoop(uploads=[MinMax()], personalizer=Standalone())

    class Short(Collusion):
        def collude(self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator) -> Tensor:
            return updates[:, :2]

    with pytest.raises(ConfigurationError, match=r"made \[1, 2\]; expected \[40\] or \[1, 40\]"):
        Short(clients=[1]).sent(range(7), UPDATES, 7, 0)
