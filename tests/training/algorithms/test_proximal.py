"""FedProx's anchors, and what pFedMe's server averages; their steps are in tests/replay."""

from functools import partial

import pytest
import torch

from flsv import ClientEvaluation
from flsv.federation import FederatedLoop
from flsv.personalization import Personalizer
from flsv.training.algorithms import FedProx, MoreauSGD
from flsv.training.algorithms.base import is_proximal
from helpers import refused
from helpers.fits import KeepsRounds, fit
from helpers.models import Plain, make_sgd, network


def offset_of_start(client):
    """Return what each entry of a client's start has more than the global model's."""
    return 3 * (client + 1)


class StartsApart(Personalizer):
    """Lets each client start far from the global model, and records each client's model minus the global one after its
    training, as pairs of the client and a vector."""

    def __init__(self):
        self.offsets_after_training = []

    def start(self, client, state):
        return state.model() + offset_of_start(client)

    def personalize(self, round, contributions, models):
        for client, vector in zip(round.client_ids.tolist(), round.client_vectors):
            self.offsets_after_training.append((client, vector - round.global_vector))
        return {}


def offset_of_global_model(client):
    return 0


@pytest.mark.parametrize(
    ("anchor", "offset_of_anchor"), [("start", offset_of_start), ("global", offset_of_global_model)]
)
def test_fedprox_pulls_clients_toward_the_chosen_anchor(tmp_path, anchor, offset_of_anchor):
    # A step is w - lr (g + mu (w - anchor)). With lr mu = 1 it is anchor - lr g: models end near the anchor.
    lr = 1e-3
    fedprox = FedProx(mu=1 / lr, anchor=anchor)
    module = Plain(network(batch_norm=False), make_sgd(lr))
    personalizer = StartsApart()
    loop = FederatedLoop(personalizer=personalizer, client_algorithm=fedprox, seed=0)
    num_rounds = 2
    num_clients = 3

    fit(loop, tmp_path, module, rounds=num_rounds)

    assert len(personalizer.offsets_after_training) == num_rounds * num_clients
    for client, offset in personalizer.offsets_after_training:
        distance_to_anchor = (offset - offset_of_anchor(client)).abs().max()
        assert distance_to_anchor < 1  # two starts are 3 apart


class HalvedGradients(FedProx):
    """Changes gradients by more than the proximal term, so that rows of stacked models would train otherwise."""

    def gradients(self, context, parameters, gradients):
        super().gradients(context, parameters, gradients)
        torch._foreach_div_(gradients, 2)


def test_algorithm_that_changes_gradients_otherwise_too_is_not_proximal():
    assert is_proximal(FedProx())
    assert not is_proximal(HalvedGradients())


moreau_sgd = partial(MoreauSGD, lr=0.08, outer_lr=0.1, lamda=4.0, inner_steps=3)


@pytest.mark.slow
def test_pfedme_server_averages_w_and_the_client_keeps_theta(tmp_path):
    """A client sends w. It keeps theta, the personalized model, by which it is tested."""
    aggregator = KeepsRounds(weighting="uniform")
    evaluation = ClientEvaluation(every=1, models="trained")
    loop = FederatedLoop(aggregator, evaluation=evaluation, seed=0)
    module = Plain(network(batch_norm=False), moreau_sgd)

    fit(loop, tmp_path, module, rounds=2)

    last_round = aggregator.rounds[-1]
    torch.testing.assert_close(loop.space.read(module), last_round.client_vectors.mean(0))
    for client, theta in loop.trained.items():
        # w has moved towards theta, and is not there: theta was another one before the last batch.
        w = last_round.client_vectors[client]
        initial_w = last_round.global_vector
        assert not torch.allclose(theta, w)
        move_to_theta = theta - initial_w
        move = w - initial_w
        assert torch.dot(move_to_theta, move) > 0
    assert loop.client_scores["accuracy"].mean() > 0.4


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.2}, {"outer_lr": 0.1}, {"lamda": 0.0}, {"inner_steps": 0}],
    ids=lambda options: next(iter(options)),
)
def test_moreau_sgd_with_wrong_arguments_raises(options):
    parameter = torch.nn.Parameter(torch.zeros(1))

    with refused(r"MoreauSGD\(\w+=.*expected a"):
        MoreauSGD([parameter], **options)


def test_moreau_sgd_without_a_closure_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(1))

    with refused(r"needs a closure"):
        MoreauSGD([parameter]).step()


@pytest.mark.parametrize(
    ("loop_options", "trainer_options"),
    [({"optimizer_state": "persist"}, {}), ({}, {"accumulate_grad_batches": 2})],
)
def test_moreau_sgd_with_unsupported_settings_is_refused(tmp_path, loop_options, trainer_options):
    module = Plain(optimizer=MoreauSGD)
    with refused("MoreauSGD starts without state at every client"):
        fit(FederatedLoop(**loop_options), tmp_path, module, **trainer_options)
