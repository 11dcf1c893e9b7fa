"""FedEM: components are averaged, mixture weights stay at their client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from toys import fit, sgd, toy_data

from flsv.aggregation import FedAvg
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.models.mixture import MixtureClient
from flsv.personalization import FedEM
from flsv.sampling import UniformSampler


def mixture() -> MixtureClient:
    torch.manual_seed(0)
    return MixtureClient(num_components=3, network="mlp", network_args={"hidden": [8]}, optimizer=sgd)


NAME = "network.responsibility"


class Watched(FedEM):
    """Remembers the rounds, and how many samples the clients found each component responsible for."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[Any] = []
        self.counts: list[torch.Tensor] = []

    def keep(self, local: Any) -> None:
        self.counts.append(local.state[f"module.{NAME}"].clone())
        super().keep(local)

    def end_round(self, round: Any) -> None:
        self.rounds.append((round, self.counts, round.uploaded.tolist(), round.downloaded.tolist()))
        self.counts = []


class Begun(L.Callback):
    """Remembers what every client started from: the vector, and its mixture weights."""

    def __init__(self, loop: FederatedLoop) -> None:
        self.loop, self.models = loop, {}  # type: ignore[var-annotated]

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        visit = self.loop.round_index, self.loop.current_client
        self.models.setdefault(visit, (self.loop.space.read(module), module.network.responsibility.clone()))


def test_components_are_shared_and_weights_are_not(tmp_path: Path) -> None:
    personalizer = Watched()
    loop = FederatedLoop(FedAvg(), personalizer=personalizer, sampler=UniformSampler(2), seed=1)
    begun = Begun(loop)
    module = fit(loop, tmp_path, mixture(), toy_data((2, 3, 2, 3)), rounds=5, callbacks=[begun])
    # Nothing of the weights is in a vector, in the global model or in what the server side saves.
    assert not [name for name in loop.space.names if "responsibility" in name]
    assert module.network.responsibility.tolist() == [pytest.approx(1 / 3)] * 3
    assert loop.state_dict()["strategies"]["personalizer"] == loop.state.starts == {}
    weights: dict[int, torch.Tensor] = {}
    for round, counts, uploaded, downloaded in personalizer.rounds:
        assert round.start_vectors is None  # everybody starts from the global one
        for client, count, samples in zip(round.client_ids.tolist(), counts, round.num_samples.tolist()):
            vector, start = begun.models[round.round_index, client]
            assert torch.equal(vector, round.global_vector)
            torch.testing.assert_close(start, weights.get(client, torch.full((3,), 1 / 3)))
            # One for where it started, and one for every training sample.
            assert float(count.sum()) == pytest.approx(1 + samples, rel=1e-4)
            weights[client] = count / count.sum()
        assert uploaded == downloaded == [loop.space.size] * 2
        average = (round.num_samples.double() / round.num_samples.sum()) @ round.client_vectors.double()
        torch.testing.assert_close(round.server_vector.double(), average, rtol=1e-4, atol=1e-5)
    assert len(weights) > 2
    assert any(float(w.max()) > 0.4 for w in weights.values())
    kept = loop.state_dict()["clients"]
    assert kept.keys() == weights.keys()
    for client, weight in weights.items():
        assert torch.equal(kept[client][f"module.{NAME}"], weight)


def test_it_needs_a_mixture(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"train flsv\.models\.MixtureClient"):
        fit(FederatedLoop(personalizer=FedEM()), tmp_path)
