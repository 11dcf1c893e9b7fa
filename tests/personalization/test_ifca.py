"""IFCA: initial models, choice by training loss, averages inside a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from toys import Plain, fit, toy_sets

from flsv.data import FederatedDataModule, Loader, ProportionPartitioner, Splits
from flsv.loop import FederatedLoop
from flsv.personalization import IFCA
from flsv.sampling import UniformSampler


class Watched(IFCA):
    """Remembers rounds and clusters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Any] = []

    def personalize(self, round: Any, contributions: Any, models: Any) -> Any:
        self.before = self._clusters.clone()
        return super().personalize(round, contributions, models)

    def end_round(self, round: Any) -> None:
        traffic = round.uploaded.tolist(), round.downloaded.tolist()
        assert round.start_vectors is not None  # the clients are asked for them, which is not counted any more
        self.seen.append((round, self.before, self._clusters.clone(), traffic))


def two_groups() -> FederatedDataModule:
    """Four clients, two and two with the same classes."""
    train, test = toy_sets(200)
    return FederatedDataModule(
        (train, test),
        ProportionPartitioner(TWO_GROUPS),
        batch_size=8,
        splits=Splits(client_test=0.2),
        loader=Loader(drop_last=True),
    )


TWO_GROUPS = [[0.5, 0.0, 0.0], [0.5, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]


def test_algorithm_1(tmp_path: Path) -> None:
    personalizer, data = Watched(3), two_groups()
    loop = FederatedLoop(personalizer=personalizer, sampler=UniformSampler(3), seed=0)
    fit(loop, tmp_path, data=data, rounds=4)
    used = set()
    for round, before, after, (uploaded, downloaded) in personalizer.seen:
        members: dict[int, list[torch.Tensor]] = {}
        for row, client in enumerate(round.client_ids.tolist()):
            x, y = (part[data.client_indices(client)] for part in data.source[0].tensors)
            losses = []
            for cluster in before:
                module = Plain().eval()
                loop.space.write(module, cluster)
                with torch.no_grad():
                    losses.append(float(torch.nn.functional.cross_entropy(module(x), y)))
            best = losses.index(min(losses))
            assert torch.equal(round.start_vectors[row], before[best])
            assert int(round.reports["cluster"][row]) == best
            members.setdefault(best, []).append(round.client_vectors[row])
        for index in range(3):
            expected = torch.stack(members[index]).mean(0) if index in members else before[index]
            torch.testing.assert_close(after[index], expected)
        used |= set(members)
        # Up: a model, and which cluster it belongs to. Down: all clusters.
        assert uploaded == [loop.space.size + 1] * 3
        assert downloaded == [3 * loop.space.size] * 3
    assert len(used) > 1
