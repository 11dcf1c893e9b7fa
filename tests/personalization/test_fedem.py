"""FedEM: components are averaged, mixture weights stay at their client."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import assert_resumes
from toys import fit, sgd, toy_data

from flsv.aggregation import FedAvg
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.mixture import MixtureClient
from flsv.personalization import FedEM
from flsv.sampling import UniformSampler


def mixture() -> MixtureClient:
    torch.manual_seed(0)
    return MixtureClient(num_components=3, network="mlp", network_args={"hidden": [8]}, optimizer=sgd)


class Watched(FedEM):
    """Remembers the rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[Any] = []

    def personalize(self, round: Any, contributions: Any, models: Any) -> Any:
        self.rounds.append(round)
        return super().personalize(round, contributions, models)


def test_components_are_shared_and_weights_are_not(tmp_path: Path) -> None:
    personalizer = Watched()
    loop = FederatedLoop(FedAvg(), personalizer=personalizer, sampler=UniformSampler(2), seed=1)
    fit(loop, tmp_path, mixture(), toy_data((2, 3, 2, 3)), rounds=5)
    weights: dict[int, torch.Tensor] = {}
    for round in personalizer.rounds:
        starts = round.space.unflatten(round.start_vectors)
        trained = round.space.unflatten(round.client_vectors)
        shared = round.space.unflatten(round.global_vector)
        for row, client in enumerate(round.client_ids.tolist()):
            for name, value in starts.items():
                if name == "network.responsibility":
                    torch.testing.assert_close(value[row], weights.get(client, torch.full((3,), 1 / 3)))
                else:
                    assert torch.equal(value[row], shared[name])
            counts = trained["network.responsibility"][row]
            # One for where it started, and one for every training sample.
            assert float(counts.sum()) == pytest.approx(1 + int(round.num_samples[row]), rel=1e-4)
            weights[client] = counts / counts.sum()
        exchange = personalizer.exchanged(round)
        assert exchange.uploaded.tolist() == exchange.downloaded.tolist() == [loop.space.size - 3] * 2
        average = (round.num_samples.double() / round.num_samples.sum()) @ round.client_vectors.double()
        torch.testing.assert_close(round.server_vector.double(), average, rtol=1e-4, atol=1e-5)
    assert len(weights) > 2
    assert any(float(w.max()) > 0.4 for w in weights.values())


def test_resumes(tmp_path: Path) -> None:
    loop = assert_resumes(
        lambda: FederatedLoop(
            personalizer=FedEM(), sampler=UniformSampler(2), evaluate_clients_every=2, local_epochs=2, seed=1
        ),
        tmp_path,
        module=mixture,
        data=partial(toy_data, (2, 3, 2, 3)),
    )
    assert loop.client_accuracy is not None
    assert loop.client_accuracy.mean() > 0.6


def test_it_needs_a_mixture(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"train a flsv.mixture.MixtureClient"):
        fit(FederatedLoop(personalizer=FedEM()), tmp_path)
