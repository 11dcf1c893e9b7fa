"""PFedSV: who is worth what to whom, what is downloaded, mixed and saved; by hand, and in whole federations."""

import pytest
import torch
from numpy.testing import assert_allclose
from personalization.scored_clients import (
    SPACE,
    ScoredClient,
    begin_method,
    closeness,
    exact_values,
    nan,
    play_round,
    random_models,
)
from torch import nn
from torch.testing import assert_close

from flsv.core import FederationState, Instruction, opened
from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop
from flsv.metrics import CommunicationCost, DomainRelevance
from flsv.personalization import PFedSV
from flsv.personalization.base import OWN_MODEL
from helpers import refused
from helpers.fits import fit

#: Half a unit in the third significant digit, in which clients answer.
THREE_DIGITS = 5e-3


def test_pfedsv_values_and_mixture_of_four_clients_equal_all_orders():
    vectors = random_models(4, seed=1)
    accuracy = closeness(vectors[[0, 2]].mean(0))
    clients = [ScoredClient(0, accuracy)]
    for client in (1, 2, 3):
        clients.append(ScoredClient(client, lambda vector: 0))
    method = begin_method(4, PFedSV())

    models, round = play_round(method, clients, vectors)

    values = exact_values(vectors.numpy(), accuracy)
    assert_allclose(round.peer_values[0], values, rtol=THREE_DIGITS)

    # Every coalition but the empty one, once, in one call.
    (evaluated,) = clients[0].evaluated
    assert len(evaluated) == len(evaluated.unique(dim=0)) == 15

    mixture = mixture_of_client_0(torch.from_numpy(values), vectors, vectors)
    assert_close(models[0], mixture, atol=1e-6, rtol=0)


def mixture_of_client_0(values, points, mixed):
    """Weights are positive values over distances of points; its own counts as at the mean of the others'."""
    distances = (points - points[0]).norm(dim=1)
    distances[0] = distances[1:].mean()
    weights = values.double().clamp_min(0) / distances
    return weights / weights.sum() @ mixed


def test_pfedsv_client_keeps_its_own_unnoised_model_if_all_values_are_negative():
    vectors = random_models(3)
    trained = vectors[0] + 7
    clients = [
        ScoredClient(0, lambda vector: -1 - len(vector), trained),
        ScoredClient(1, lambda vector: 0),
        ScoredClient(2, lambda vector: 0),
    ]

    models, round = play_round(begin_method(3, PFedSV()), clients, vectors)

    assert (round.peer_values[0] < 0).all()
    assert torch.equal(models[0], trained)
    # What others download is what it has uploaded.
    assert torch.equal(models[1], vectors[1])
    assert torch.equal(models[2], vectors[2])


@pytest.mark.parametrize("better", [True, False])
def test_pfedsv_safeguard_refuses_a_mixture_worse_than_the_own_model(better):
    vectors = random_models(2)
    # The other model is worth something to client 0 by itself, and the mixture less, or more, than its own model.
    target = vectors.mean(0) if better else vectors[0]
    accuracy = closeness(target)
    clients = [ScoredClient(client, accuracy) for client in range(2)]
    free_method = begin_method(2, PFedSV())
    careful_method = begin_method(2, PFedSV(safeguard=True))

    free, _ = play_round(free_method, clients, vectors)
    careful, round = play_round(careful_method, clients, vectors)

    assert round.peer_values is not None
    assert (round.peer_values[0] > 0).all()
    assert not torch.equal(free[0], vectors[0])
    expected = free[0] if better else vectors[0]
    assert torch.equal(careful[0], expected)


def test_pfedsv_without_its_metric_is_refused():
    method = begin_method(2, PFedSV())
    client = ScoredClient(0, lambda vector: 0)
    vectors = random_models(1)
    relevance = torch.zeros(2)

    with refused("DomainRelevance"):
        play_round(method, [client], vectors, relevance)


def test_pfedsv_without_validation_samples_is_refused(tmp_path):
    with refused(r"clients \[0, 1, 2\].*none.*client_val"):
        fit(make_loop(), tmp_path)


def test_pfedsv_downloads_an_absent_clients_last_upload_and_skips_a_new_client():
    method = begin_method(4, PFedSV())
    vectors = random_models(3)
    earlier_clients = [
        ScoredClient(1, lambda vector: 0.5),
        ScoredClient(2, lambda vector: 0.5),
    ]
    play_round(method, earlier_clients, vectors[1:])
    new_client = ScoredClient(0, lambda vector: 0.5)

    _, round = play_round(
        method,
        [new_client],
        vectors[:1],
        torch.full((4, 4), nan),
        index=7,
    )

    models_received = 1 + 2  # the global one, and those of the two that were there
    models_evaluated = torch.cat(new_client.evaluated)
    has_no_value = round.peer_values.isnan()
    assert has_no_value.tolist() == [[False, False, False, True]]
    assert round.downloaded.tolist() == [models_received * SPACE.size]
    for vector in vectors:
        is_evaluated = (models_evaluated == vector).all(1).any()
        assert is_evaluated


def test_pfedsv_downloads_the_peers_with_a_positive_score_once_all_are_known():
    relevance = torch.full((4, 4), nan)
    scores = [0.5, -0.1, 0.2, 0.0]
    relevance[0] = torch.tensor(scores)
    clients = []
    for client in range(4):
        clients.append(ScoredClient(client, lambda vector: 0.5))

    _, round = play_round(
        begin_method(4, PFedSV()),
        clients,
        random_models(4),
        relevance,
        index=1,
    )

    assert round.peer_values[0].isnan().tolist() == [
        False,
        True,
        False,
        True,
    ]
    assert round.downloaded.tolist() == [
        (1 + 1) * SPACE.size,
        *[(1 + 3) * SPACE.size] * 3,
    ]


def test_pfedsv_with_a_shared_extractor_downloads_heads():
    vectors = random_models(3)
    accuracy = closeness(vectors[1])
    method = begin_method(3, PFedSV(mode="extractor"))
    clients = [ScoredClient(client, accuracy) for client in range(3)]

    models, round = play_round(method, clients, vectors)

    # The first 3 entries are the extractor.
    server = round.server_vector
    assert_close(server, vectors.mean(0))

    extractor = server[:3]
    evaluated = torch.cat(clients[0].evaluated)
    evaluated_extractors = evaluated[:, :3]
    assert (evaluated_extractors == extractor).all()
    for model in models.values():
        assert torch.equal(model[:3], extractor)

    # Shapley values and distances are those of heads on the common extractor.
    heads = vectors[:, 3:]
    on_common_extractor = torch.cat(
        [extractor.expand(3, -1), heads],
        dim=1,
    )
    expected = exact_values(on_common_extractor.numpy(), accuracy)

    assert_allclose(round.peer_values[0], expected, rtol=THREE_DIGITS)

    mixture = mixture_of_client_0(torch.from_numpy(expected), heads, heads)
    assert_close(
        models[0][3:],
        mixture,
        atol=1e-6,
        rtol=0,
    )

    # Up: a model, and three values. Down: the first model, the extractor, 3 parameters, and two heads of 4.
    assert round.uploaded.tolist() == [7 + 3] * 3
    parameters_received = 7 + 3 + 2 * 4
    assert round.downloaded.tolist() == [parameters_received] * 3


# 7 parameters: an extractor of 3 and a head of 4. The initial model is of zeros.
GLOBAL_MODEL = [0, 1, 2, 3, 4, 5, 6]
STORED_MODEL = [-1] * 7


def make_state():
    global_vector = torch.tensor(GLOBAL_MODEL, dtype=torch.float)
    return FederationState(2, global_vector=global_vector)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("model", [0, 0, 0, 0, 0, 0, 0]),
        ("extractor", [0, 1, 2, 0, 0, 0, 0]),
    ],
)
def test_pfedsv_newcomer_starts_from_the_initial_model_on_the_shared_extractor(mode, expected):
    method = begin_method(2, PFedSV(mode=mode))
    state = make_state()

    initial = method.start(1, state)

    assert initial.tolist() == expected
    assert method.send(1, initial, state) == {}


@pytest.mark.parametrize(
    ("mode", "last_cohort", "expected"),
    [
        ("model", [1], STORED_MODEL),
        ("model", [0], STORED_MODEL),
        # A client of the last cohort has received the extractor already.
        ("extractor", [1], STORED_MODEL),
        (
            "extractor",
            [0],
            [0, 1, 2, -1, -1, -1, -1],
        ),
    ],
)
def test_pfedsv_client_keeps_its_model_and_is_sent_the_extractor_after_an_absence(
    mode, last_cohort, expected
):
    method = begin_method(2, PFedSV(mode=mode))
    state = make_state()
    stored_model = torch.tensor(STORED_MODEL, dtype=torch.float)
    method._uploads = {1: stored_model}  # client 1 has taken part
    method._cohort = last_cohort
    local = ScoredClient(1, lambda vector: 0).data

    initial = method.start(1, state)
    instruction = Instruction(
        round_index=4,
        client_id=1,
        seed=0,
        start=initial,
        tensors=method.send(1, initial, state),
    )
    with opened(local):
        local.state[OWN_MODEL] = stored_model
        received = method.receive(local, instruction)

    assert initial is None
    assert received.tolist() == expected
    # Nothing is written into the models that it has been made of.
    assert state.model().tolist() == GLOBAL_MODEL
    assert stored_model.tolist() == STORED_MODEL


def test_pfedsv_classifier_may_consist_of_several_layers():
    method = begin_method(
        2,
        PFedSV(mode="extractor", classifier=["0", "1"]),
    )
    state = FederationState(2, global_vector=torch.ones(7))

    initial = method.start(1, state)

    assert initial is not None
    assert initial.tolist() == [0] * 7
    with refused("classifier"):
        PFedSV(classifier=["0"])  # of whole models
    for layers in (["2"], ["1", "fc"], []):
        personalizer = PFedSV(mode="extractor", classifier=layers)
        with refused("classifier"):
            begin_method(2, personalizer)

    bare = nn.Sequential(nn.Conv2d(1, 2, 3))
    space = ParameterSpace(bare)
    personalizer = PFedSV(mode="extractor")
    with refused("it has no nn.Linear layer"):
        begin_method(2, personalizer, space=space)


def test_batch_norms_statistics_are_averaged_but_do_not_count_as_distance():
    module = nn.Sequential(
        nn.BatchNorm1d(2),
        nn.Linear(2, 1),
    )
    space = ParameterSpace(module)
    num_parameters = 4 + 3  # then come 4 statistics
    vectors = random_models(3, size=space.size)
    statistics = vectors[:, num_parameters:].abs()
    vectors[:, num_parameters:] = 1 + 1000 * statistics

    def score(vector):
        return 0.5 + 0.01 * float(vector[0])

    clients = [ScoredClient(client, score) for client in range(3)]
    method = begin_method(3, PFedSV(), space=space)

    models, round = play_round(method, clients, vectors, space=space)

    values = round.peer_values[0]
    parameters = vectors[:, :num_parameters]
    mixture = mixture_of_client_0(values, parameters, vectors)
    # The client mixes by its values with all digits, and tells them in three.
    assert_close(models[0], mixture, atol=0, rtol=0.02)


def make_loop():
    metrics = {
        "relevance": DomainRelevance(),
        "cost": CommunicationCost(),
    }
    personalizer = PFedSV(k=2)
    return FederatedLoop(metrics=metrics, personalizer=personalizer, seed=4)
