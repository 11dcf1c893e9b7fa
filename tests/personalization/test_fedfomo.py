"""FedFomo: equation 3 from the clients' own samples, whom a client downloads, and what it costs."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from personalization.watched import watched

from flsv.federation import FederatedLoop
from flsv.personalization import FedFomo
from flsv.personalization.base import OWN_MODEL
from flsv.personalization.fedfomo import mix_models
from flsv.sampling import UniformSampler
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain, network

DATA = partial(toy_data, (3, 2, 3, 2), client_val=0.3, drop_last=True)


def kept(round: Any) -> tuple[Any, dict[int, torch.Tensor]]:
    """What has crossed, and the models that the clients go on from."""
    traffic = round.uploaded, round.downloaded
    assert len(round.matrix.starts) == len(
        round
    )  # the clients are asked for them, which is not counted any more
    return traffic, {
        client.id: client.ask(lambda local: local.state[OWN_MODEL].clone())
        for client in round.clients
    }


def losses(loop: FederatedLoop, data: Any, client: int, vectors: list[torch.Tensor]) -> list[float]:
    """Mean cross-entropy on the client's validation samples, without flsv's evaluator."""
    module = Plain(network(batch_norm=True)).eval()
    x, y = (part[data.client_indices(client, "val")] for part in data.source[0].tensors)
    result = []
    for vector in vectors:
        loop.space.write(module, vector)
        with torch.no_grad():
            log = module(x).double().log_softmax(1)
        result.append(-float(log[torch.arange(len(y)), y].mean()))
    return result


@pytest.mark.parametrize("sampler", [None, UniformSampler(2)])
def test_fedfomo_weights_follow_equation_3(tmp_path: Path, sampler: Any) -> None:
    personalizer, data = FedFomo(num_downloads=2), DATA()
    seen = watched(
        personalizer, lambda *_: deepcopy((personalizer._uploads, personalizer._affinity)), kept
    )
    loop = FederatedLoop(personalizer=personalizer, sampler=sampler, seed=3)
    fit(loop, tmp_path, data=data, rounds=4)
    moved = 0
    for round, (before, affinity), _, ((uploaded, downloaded), own) in seen:
        uploads = before | dict(zip(round.client_ids.tolist(), round.client_vectors))
        for row, client in enumerate(round.client_ids.tolist()):
            start = round.matrix.starts[row]
            values = round.peer_values[row]
            looked_at = (~values.isnan()).nonzero().flatten().tolist()
            assert client in looked_at
            assert len(looked_at) == 1 + min(2, len(uploads) - 1)
            # The first model that it starts from, and the others'; up a model, and what all these are worth to it.
            assert (
                downloaded[row] == ((client not in before) + len(looked_at) - 1) * loop.space.size
            )
            assert uploaded[row] == loop.space.size + len(looked_at)
            base, *others = losses(loop, data, client, [start, *(uploads[j] for j in looked_at)])
            cut = loop.space.num_parameters
            distance = [float((uploads[j] - start)[:cut].double().norm()) for j in looked_at]
            signed = (base - np.array(others)) / np.array(distance)
            np.testing.assert_allclose(
                values[looked_at], signed / abs(signed).sum(), rtol=1e-3, atol=1e-6
            )
            weights = np.maximum(signed, 0)
            if weights.sum() > 0:
                weights = weights / weights.sum()
                expected = start.double() + sum(
                    w * (uploads[j] - start).double() for w, j in zip(weights, looked_at)
                )
                moved += 1
            else:
                expected = start.double()
            torch.testing.assert_close(own[client].double(), expected, rtol=1e-4, atol=1e-5)
            affinity[client, looked_at] += values[looked_at]
        assert set(own) == set(round.client_ids.tolist())
    assert moved > 3
    torch.testing.assert_close(personalizer._affinity, affinity)


def test_fedfomo_gives_no_weight_to_the_start_model_or_a_nan_loss() -> None:
    start, other = torch.zeros(3), torch.tensor([1.0, 0.0, 0.0])
    losses = torch.tensor([1.0, 1.0, 0.5, float("nan"), float("inf")], dtype=torch.float64)
    local = SimpleNamespace(
        start=start, model=start, state={}, utility=lambda vectors, performance: -losses
    )
    values = mix_models(local, [other, 2 * other, 3 * other], 3)  # type: ignore[arg-type]
    assert torch.equal(local.state[OWN_MODEL], other)
    assert values.tolist() == [0, 1, 0, 0]


def chosen(personalizer: FedFomo, rounds: range) -> np.ndarray:
    """How often client 0, to whom only client 1 is worth something, downloads each of the others."""
    personalizer._uploads = {client: torch.zeros(1) for client in range(5)}
    personalizer._affinity = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]])
    counts = np.zeros(5)
    for index in rounds:
        counts[personalizer._choose(0, SimpleNamespace(seed=0, round_index=index))] += 1  # type: ignore[arg-type]
    return counts / len(rounds)


def test_fedfomo_downloads_at_random_by_epsilon_until_it_has_decayed() -> None:
    explored = chosen(FedFomo(1, epsilon=0.4, epsilon_decay=0), range(400))
    assert explored[1] == pytest.approx(0.6 + 0.4 / 4, abs=0.08)
    assert (explored[2:] > 0.04).all()
    assert chosen(FedFomo(1, epsilon=0.4, epsilon_decay=0.1), range(4, 200))[1] == 1


class Logs(Plain):
    """Its cross-entropy under a name of its own, on which it has a right."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("my/loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))


def test_fedfomo_by_a_logged_loss_equals_the_default(tmp_path: Path) -> None:
    runs = []
    for measure in ({}, {"performance": "my/loss", "mode": "min"}):
        seen = watched(personalizer := FedFomo(num_downloads=2, **measure))
        fit(FederatedLoop(personalizer=personalizer, seed=3), tmp_path, Logs(), DATA(), rounds=2)
        runs.append([round.peer_values for round, *_ in seen])
    for one, other in zip(*runs):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)
