"""pFedHN: what the hypernetwork writes, and that it follows the vector-Jacobian product."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from toys import Plain, fit, network, toy_data

from flsv.loop import FederatedLoop
from flsv.personalization import PFedHN
from flsv.sampling import UniformSampler


class Watched(PFedHN):
    """Remembers rounds and networks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Any] = []

    def personalize(self, round: Any, contributions: Any, models: Any) -> Any:
        before = deepcopy(self._network)
        own = super().personalize(round, contributions, models)
        self.seen.append((round, before, deepcopy(self._network)))
        return own


def run(folder: Path, personalizer: PFedHN, rounds: int = 3, **kwargs: Any) -> FederatedLoop:
    loop = FederatedLoop(personalizer=personalizer, seed=6, **kwargs)
    fit(loop, folder, Plain(network(batch_norm=True)), toy_data((2, 3, 2, 3)), rounds=rounds)
    return loop


def test_start_points_are_what_the_network_writes_and_the_global_statistics(tmp_path: Path) -> None:
    personalizer = Watched(hidden=10)
    run(tmp_path, personalizer)
    round, before, _ = personalizer.seen[-1]
    cut = round.space.num_parameters
    assert cut < round.space.size
    for client, start in zip(round.client_ids, round.start_vectors):
        torch.testing.assert_close(start[:cut], before(client).detach())
        assert torch.equal(start[cut:], round.global_vector[cut:])
    assert not torch.equal(round.start_vectors[0], round.start_vectors[1])


def test_one_step_per_client_along_the_vector_jacobian_product(tmp_path: Path) -> None:
    """Against an optimizer on the inner product of h(v_i) with delta_i, whose gradient is that product."""
    personalizer = Watched(lr=0.02, embedding_dim=5, hidden=7)
    run(tmp_path, personalizer, sampler=UniformSampler(3))
    for round, reference, after in personalizer.seen[1:]:
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.02)
        cut = round.space.num_parameters
        for client, start, trained in zip(round.client_ids, round.start_vectors, round.client_vectors):
            optimizer.zero_grad()
            (reference(client) * (start - trained)[:cut]).sum().backward()
            optimizer.step()
        absent = next(c for c in range(4) if c not in round.client_ids)
        for name, value in after.state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-6)
        moved = after.embedding.weight - personalizer.seen[0][1].embedding.weight
        if all(absent not in seen[0].client_ids for seen in personalizer.seen):
            assert not moved[absent].any()
