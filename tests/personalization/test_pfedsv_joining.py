"""PFedSV with the joining game, and with a start that all share."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from personalization.judged import Judged, begin_method, closeness, play_round, random_models
from torch import Tensor

from flsv import ClientEvaluation, Reporting
from flsv.core import FederationState, Instruction, LocalData, opened
from flsv.federation import FederatedLoop
from flsv.metrics import DomainRelevance
from flsv.personalization import PFedSV
from flsv.personalization.base import OWN_MODEL
from helpers.data import toy_data
from helpers.fits import fit, state_vector
from helpers.models import Plain, network


def joining_values(vectors: np.ndarray, accuracy: Any) -> np.ndarray:
    """The mean over all orders in which the others join the first."""
    values = np.zeros(len(vectors))
    values[0] = accuracy(vectors[0])
    orders = list(itertools.permutations(range(1, len(vectors))))
    for order in orders:
        worth = []
        for count in range(len(order) + 1):
            members = [0, *order[:count]]
            mean_model = vectors[members].mean(0)
            worth.append(float(accuracy(mean_model)))
        values[list(order)] += np.diff(worth) / len(orders)

    return values


def test_joining_game_values_equal_those_over_all_orders():
    vectors = random_models(4, seed=5)
    target = 0.5 * vectors[0] + 0.4 * vectors[1] + 0.1 * vectors[2]
    accuracy = closeness(target)
    idle_clients = [Judged(i, lambda vector: 0) for i in (1, 2, 3)]

    models, round = play_round(
        begin_method(4, PFedSV(game="joining")),
        [Judged(0, accuracy), *idle_clients],
        vectors,
    )

    values = joining_values(vectors.numpy(), accuracy)
    np.testing.assert_allclose(
        round.peer_values[0],
        values,
        atol=1e-6,
    )
    assert values[1] > values[2] > 0 > values[3]

    distances = np.linalg.norm(
        vectors.numpy() - vectors[0].numpy(),
        axis=1,
    )
    weights = np.maximum(values, 0) / distances.clip(1e-9)
    weights[0] = 0
    mixture = weights / weights.sum() @ vectors.numpy()
    # The best of eleven models between its own and the mixture.
    own_vector = vectors[0].numpy()
    path = []
    for share in np.linspace(0, 1, 11):
        path.append((1 - share) * own_vector + share * mixture)
    accuracies = [accuracy(model) for model in path]
    best = path[int(np.argmax(accuracies))]

    np.testing.assert_allclose(models[0], best, atol=1e-6)
    assert accuracy(best) > accuracy(own_vector)


@pytest.mark.parametrize("others_harm", [True, False])
def test_client_without_gain_from_others_keeps_its_own_model(others_harm):
    vectors = random_models(3)
    accuracy: Any = lambda vector: 0.5  # noqa: E731
    if others_harm:
        accuracy = closeness(vectors[0])
    clients = [
        Judged(0, accuracy),
        Judged(1, lambda v: 0),
        Judged(2, lambda v: 0),
    ]

    models, round = play_round(
        begin_method(3, PFedSV(game="joining")),
        clients,
        vectors,
    )

    assert torch.equal(models[0], vectors[0])
    assert (round.peer_values[0, 1:] <= 1e-9).all()


def test_client_with_nobody_to_download_plays_no_game():
    vectors = random_models(1)
    method = begin_method(3, PFedSV(game="joining"))

    models, round = play_round(method, [Judged(0, lambda v: 0.25)], vectors)

    assert torch.equal(models[0], vectors[0])
    assert round.peer_values[0, 0] == 0.25
    assert round.peer_values[0, 1:].isnan().all()


GLOBAL_MODEL = torch.arange(7.0)
STORED_MODEL = torch.full((7,), -1.0)


def models_of_client_1(method: PFedSV, stored_model: Tensor | None) -> tuple[Tensor, Tensor]:
    """The model from which client 1 trains, and the one that it uses."""
    state = FederationState(2, global_vector=GLOBAL_MODEL.clone())
    instruction = Instruction(
        round_index=4,
        client_id=1,
        seed=0,
        start=method.start(1, state),
    )
    local = Judged(1, lambda vector: 0).data
    with opened(local):
        if stored_model is not None:
            local.state[OWN_MODEL] = stored_model
        return method.receive(local, instruction), method.own(local, instruction)


@pytest.mark.parametrize("shared", [0.25, 1.0])
def test_pfedsv_with_shared_starts_between_the_own_and_the_global_model(shared):
    method = begin_method(2, PFedSV(shared=shared))

    model_to_train, model_in_use = models_of_client_1(method, STORED_MODEL)

    between = STORED_MODEL + shared * (GLOBAL_MODEL - STORED_MODEL)
    torch.testing.assert_close(model_to_train, between)
    assert torch.equal(model_in_use, STORED_MODEL)


@pytest.mark.parametrize("shared", [0.25, 1.0])
def test_pfedsv_newcomer_with_shared_has_the_global_model(shared):
    method = begin_method(2, PFedSV(shared=shared))

    model_to_train, model_in_use = models_of_client_1(method, stored_model=None)

    assert torch.equal(model_to_train, GLOBAL_MODEL)
    assert torch.equal(model_in_use, GLOBAL_MODEL)


def test_pfedsv_without_shared_trains_the_model_that_the_client_uses():
    method = begin_method(2, PFedSV())
    method._uploads = {1: torch.zeros(7)}  # client 1 has taken part

    model_to_train, model_in_use = models_of_client_1(method, STORED_MODEL)

    assert torch.equal(model_to_train, STORED_MODEL)
    assert torch.equal(model_in_use, STORED_MODEL)


def test_pfedsv_with_shared_1_trains_as_fedavg_and_keeps_own_models(tmp_path):
    """The same global model and trained models as FedAvg's, to the bit; what clients receive is not the global one, and
    no worse on their validation splits than what they have trained."""
    sampled = PFedSV(k=2, game="joining", shared=1.0)
    loops = []
    vectors = []
    for name, personalizer in (("fedavg", None), ("pfedsv", sampled)):
        loop = FederatedLoop(
            personalizer=personalizer,
            metrics={"relevance": DomainRelevance()} if personalizer else {},
            evaluation=ClientEvaluation(keep_trained=True, every=1),
            seed=1,
            reporting=Reporting(figures=0, table=False),
        )
        data = toy_data(client_val=0.3, client_test=0.2)
        module = fit(
            loop,
            tmp_path / name,
            Plain(network(False)),
            data,
            rounds=1,
        )
        loops.append(loop)
        vectors.append(state_vector(module))

    assert torch.equal(*vectors)

    fedavg, ours = loops
    received = ours.received()
    for client, model in ours.trained.items():
        assert torch.equal(model, fedavg.trained[client])
        assert not torch.equal(received[client], vectors[0])
        client_data = ours.clients[client]
        score_received, score_trained = client_data.ask(
            scores, torch.stack([received[client], model])
        ).tolist()
        assert score_received >= score_trained
        accuracy = client_data.ask(
            scores,
            received[client][None],
            "test",
            "accuracy",
        )
        assert ours.client_accuracy[client] == pytest.approx(float(accuracy))

    assert not torch.equal(fedavg.client_accuracy, ours.client_accuracy)


def scores(
    local: LocalData, models: Tensor, split: Any = "val", performance: Any = "negative_loss"
) -> Tensor:
    return local.evaluate(models, split).value(performance)
