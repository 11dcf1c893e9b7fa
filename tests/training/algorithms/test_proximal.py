"""FedProx's anchors, and what pFedMe's server averages; their steps are in tests/replay."""

from functools import partial

import pytest
import torch

from flsv import ClientEvaluation
from flsv.federation import FederatedLoop
from flsv.personalization import Personalizer
from flsv.training.algorithms import FedProx, MoreauSGD
from helpers import refused
from helpers.fits import KeepsRounds, fit
from helpers.models import Plain, make_sgd, network


def distance_of_start(client):
    """Return how much the start of a client differs from the global model, in each entry."""
    return 3 * (client + 1)


class StartsApart(Personalizer):
    """Lets each client start far from the global model, and records how far its model is from that when it ends."""

    def __init__(self):
        self.moves = []

    def start(self, client, state):
        return state.model() + distance_of_start(client)

    def personalize(self, round, contributions, models):
        for client, vector in zip(round.client_ids.tolist(), round.client_vectors):
            self.moves.append((client, vector - round.global_vector))
        return {}


@pytest.mark.parametrize("anchor", ["start", "global"])
def test_fedprox_pulls_clients_toward_the_chosen_anchor(tmp_path, anchor):
    # A step is w - lr (g + mu (w - anchor)). With lr mu = 1 it is anchor - lr g: models end near the anchor.
    lr = 1e-3
    mu = 1000.0
    module = Plain(network(batch_norm=False), make_sgd(lr))
    personalizer = StartsApart()
    loop = FederatedLoop(
        personalizer=personalizer,
        client_algorithm=FedProx(mu, anchor),
        seed=0,
    )

    fit(loop, tmp_path, module, rounds=2)

    assert len(personalizer.moves) == 2 * 3  # rounds x clients
    for client, move in personalizer.moves:
        distance_of_anchor = distance_of_start(client) if anchor == "start" else 0
        assert (move - distance_of_anchor).abs().max() < 1


def test_pfedme_server_averages_w_and_the_client_keeps_theta(tmp_path):
    recorder = KeepsRounds(weighting="uniform")
    loop = FederatedLoop(
        recorder,
        evaluation=ClientEvaluation(every=1, models="trained"),
        seed=0,
    )
    moreau = partial(
        MoreauSGD,
        lr=0.08,
        outer_lr=0.1,
        lamda=4.0,
        inner_steps=3,
    )
    module = fit(
        loop,
        tmp_path,
        Plain(network(batch_norm=False), moreau),
        rounds=2,
    )
    last_round = recorder.rounds[-1]
    model = last_round.global_vector
    sent = last_round.client_vectors

    torch.testing.assert_close(loop.space.read(module), sent.mean(0))
    for client, theta in loop.trained.items():
        # w has moved towards theta, and is not there: theta was another one before the last batch.
        assert not torch.allclose(theta, sent[client])
        assert torch.dot(theta - model, sent[client] - model) > 0
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
    ("loop", "trainer"),
    [({"optimizer_state": "persist"}, {}), ({}, {"accumulate_grad_batches": 2})],
)
def test_moreau_sgd_with_unsupported_settings_is_refused(tmp_path, loop, trainer):
    with refused("MoreauSGD starts without state at every client"):
        fit(FederatedLoop(**loop), tmp_path, Plain(optimizer=MoreauSGD), **trainer)
