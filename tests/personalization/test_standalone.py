"""Standalone: everybody alone, whenever they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from toys import Plain, fit

from flsv.loop import FederatedLoop
from flsv.parameters import ParameterSpace
from flsv.personalization import Standalone
from flsv.sampling import ClientSampler


class OneByOne(ClientSampler):
    """Client 0 in the first two rounds, then client 1, then client 2."""

    def __init__(self) -> None:
        self.order = [0, 0, 1, 2]

    def sample(
        self, num_clients: int, contributions: Any, generator: torch.Generator, round_index: int = 0
    ) -> torch.Tensor:
        return torch.tensor([self.order.pop(0)])

    def inclusion_probabilities(self, num_clients: int, contributions: Any, round_index: int = 0) -> torch.Tensor:
        return torch.ones(num_clients)


def test_a_latecomer_knows_nothing_of_those_before(tmp_path: Path) -> None:
    starts: list[torch.Tensor] = []

    class Watched(Standalone):
        def personalize(self, round: Any, contributions: Any, models: Any) -> Any:
            starts.append(round.matrix.starts[0])
            return super().personalize(round, contributions, models)

    module = Plain()
    initial = ParameterSpace(module).read(module)
    loop = FederatedLoop(personalizer=Watched(), sampler=OneByOne(), seed=0)
    fit(loop, tmp_path, module, rounds=4)
    for round_index in (0, 2, 3):
        assert torch.equal(starts[round_index], initial)
    assert not torch.equal(starts[1], initial)
