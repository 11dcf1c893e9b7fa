"""CGSV's reward: who receives which entries."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import fit

from flsv.aggregation import CGSV
from flsv.loop import FederatedLoop
from flsv.metrics import CosineGradientShapley
from flsv.personalization import SparsifiedReward
from flsv.personalization.cgsv import layer_ranks, ranks_below
from flsv.sampling import UniformSampler


class Watched(SparsifiedReward):
    """Remembers what it was given and gave."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Any] = []

    def personalize(self, round: Any, contributions: Any, models: Any) -> Any:
        own = super().personalize(round, contributions, models)
        held = {c: m.clone() for c, m in models.items()}
        self.seen.append((round, contributions["cgsv"].clone(), held, {c: m.clone() for c, m in own.items()}))
        return own


def run(folder: Path, personalizer: SparsifiedReward, **kwargs: Any) -> FederatedLoop:
    loop = FederatedLoop(
        CGSV(scale=0.5), {"cgsv": CosineGradientShapley(alpha=0.5)}, personalizer=personalizer, seed=2, **kwargs
    )
    fit(loop, folder, rounds=4)
    return loop


def test_every_layer_gives_its_largest_entries(tmp_path: Path) -> None:
    personalizer = Watched(beta=1.0)
    loop = run(tmp_path, personalizer)
    for round, reputation, held, own in personalizer.seen:
        merit = [math.tanh(float(r)) for r in reputation.double()]
        shares = [m / max(merit) for m in merit]
        assert min(shares) < 0.999  # so that the test says something
        step = loop.space.unflatten(round.server_vector - round.global_vector)
        for client in range(3):
            start = loop.space.unflatten(held.get(client, round.global_vector))
            new, server = loop.space.unflatten(own[client]), loop.space.unflatten(round.server_vector)
            for name in loop.space.names:
                if "running" in name:
                    torch.testing.assert_close(new[name], server[name])
                    continue
                flat = step[name].flatten()
                count = min(math.ceil(shares[client] * len(flat)), len(flat) - 1)
                best = sorted(range(len(flat)), key=lambda i, flat=flat: -abs(float(flat[i])))[:count]
                expected = start[name].flatten().clone()
                expected[best] += flat[best]
                torch.testing.assert_close(new[name].flatten(), expected, msg=name)


def authors_mask(layer: torch.Tensor, q: float) -> torch.Tensor:
    """``mask_grad_update_by_order`` with ``mode="layer"``, as in the authors' ``utils.py``."""
    magnitude = layer.abs()
    order = math.ceil(len(layer) * q)
    if order == 0:
        return torch.zeros_like(layer)
    least = magnitude.topk(min(order, len(layer) - 1)).values[-1]
    return torch.where(magnitude < least, torch.zeros_like(layer), layer)


@pytest.mark.parametrize("q", [0.0, 1e-6, 0.1, 1 / 3, 0.5, 0.7, 0.999, 1.0])
def test_the_count_is_the_authors(q: float) -> None:
    sizes = [2, 3, 10, 57]
    update = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0))
    kept = ranks_below(layer_ranks(update, sizes), sizes, q)
    expected = torch.cat([authors_mask(layer, q) for layer in update.split(sizes)])
    assert torch.equal(update * kept, expected)


def test_absent_clients_receive_nothing(tmp_path: Path) -> None:
    personalizer = Watched()
    run(tmp_path, personalizer, sampler=UniformSampler(2))
    assert any(len(held) > 2 for _, _, held, _ in personalizer.seen) or len(personalizer.seen[0][3]) == 2
    for round, _, _, own in personalizer.seen:
        assert sorted(own) == sorted(round.client_ids.tolist())
