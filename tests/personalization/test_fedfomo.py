"""FedFomo: equation 3 from the clients' own samples, whom a client downloads, and what it costs."""

from copy import deepcopy
from functools import partial
from math import inf, nan
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from personalization.watched import record_calls
from torch.testing import assert_close

from flsv.federation import FederatedLoop
from flsv.personalization import FedFomo
from flsv.personalization.base import OWN_MODEL
from flsv.personalization.fedfomo import mix_models
from flsv.sampling import UniformSampler
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain, network

PROPORTIONS = (3, 2, 3, 2)  # four clients
make_data = partial(toy_data, PROPORTIONS, client_val=0.3, drop_last=True)


def traffic_and_models(round):
    """Return what has crossed, and the models that the clients go on from."""
    traffic = round.uploaded, round.downloaded
    # The clients are asked for these models, which is not counted any more.
    assert len(round.matrix.starts) == len(round)

    models = {}
    for client in round.clients:
        models[client.id] = client.request(lambda local: local.state[OWN_MODEL].clone())

    return traffic, models


def losses_by_hand(loop, data, client, vectors):
    """Mean cross-entropy on the client's validation samples, without flsv's evaluator."""
    module = Plain(network(batch_norm=True)).eval()
    all_inputs, all_labels = data.source[0].tensors
    indices = data.client_indices(client, "val")
    x = all_inputs[indices]
    y = all_labels[indices]

    losses = []
    for vector in vectors:
        loop.space.write(module, vector)
        with torch.no_grad():
            log_chances = module(x).double().log_softmax(1)
        log_chances_of_labels = log_chances[torch.arange(len(y)), y]
        losses.append(-float(log_chances_of_labels.mean()))
    return losses


@pytest.mark.fast_rows
@pytest.mark.parametrize("sampler", [None, UniformSampler(2)])
def test_fedfomo_weights_follow_equation_3(tmp_path, sampler):
    personalizer = FedFomo(num_downloads=2)
    data = make_data()
    loop = FederatedLoop(personalizer=personalizer, sampler=sampler, seed=3)

    def uploads_and_affinity(*arguments):
        return deepcopy((personalizer._uploads, personalizer._affinity))

    entries = record_calls(personalizer, uploads_and_affinity, traffic_and_models)
    fit(loop, tmp_path, data=data, rounds=4)

    size = loop.space.size
    num_mixtures = 0
    for round, (earlier_uploads, affinity), _, (traffic, own_models) in entries:
        clients = round.client_ids.tolist()
        uploads = earlier_uploads | dict(zip(clients, round.client_vectors))
        uploaded, downloaded = traffic
        assert set(own_models) == set(clients)
        for row, client in enumerate(clients):
            initial = round.matrix.starts[row]
            values = round.peer_values[row]
            peers = values.isfinite().nonzero().flatten().tolist()
            assert client in peers
            assert len(peers) == 1 + min(2, len(uploads) - 1)

            # Down: the first model that it starts from, and the others'.
            # Up: a model, and what all these are worth to it.
            is_new = client not in earlier_uploads
            assert downloaded[row] == (is_new + len(peers) - 1) * size
            assert uploaded[row] == size + len(peers)

            signed, expected = mixture_by_hand(
                loop,
                data,
                client,
                initial,
                [uploads[j] for j in peers],
            )
            shares = signed / abs(signed).sum()
            np.testing.assert_allclose(
                values[peers],
                shares,
                rtol=5e-3,  # clients respond in three digits
                atol=1e-6,
            )
            own_model = own_models[client].double()
            assert_close(own_model, expected, rtol=1e-4, atol=1e-5)
            num_mixtures += (signed > 0).any()
            affinity[client, peers] += values[peers]

    assert num_mixtures > 3
    assert_close(personalizer._affinity, affinity)


def mixture_by_hand(loop, data, client, initial, peers):
    """Return what each peer's model gains by distance, and the mixture of those that gain something."""
    num_parameters = loop.space.num_parameters
    models = [initial, *peers]
    loss, *peer_losses = losses_by_hand(loop, data, client, models)
    distances = []
    for model in peers:
        update = (model - initial)[:num_parameters]
        distances.append(float(update.double().norm()))

    signed = (loss - np.array(peer_losses)) / np.array(distances)

    weights = np.maximum(signed, 0)
    mixture = initial.double()
    if weights.sum() > 0:
        for weight, model in zip(weights / weights.sum(), peers):
            mixture = mixture + weight * (model - initial).double()

    return signed, mixture


def test_fedfomo_gives_no_weight_to_the_start_model_or_a_nan_loss():
    initial = torch.zeros(3)
    better_model = torch.tensor([1.0, 0.0, 0.0])
    loss_of_initial = 1.0
    loss_of_trained = 1.0  # the client has not moved
    losses_of_downloads = [0.5, nan, inf]
    losses = torch.tensor([loss_of_initial, loss_of_trained, *losses_of_downloads]).double()
    local = SimpleNamespace(
        start=initial,
        model=initial,
        state={},
        utility=lambda vectors, performance: -losses,
    )

    downloads = [better_model, 2 * better_model, 3 * better_model]
    values = mix_models(local, downloads, num_parameters=3)

    # Only the first download lowers the loss, and so it has all the weight.
    assert torch.equal(local.state[OWN_MODEL], better_model)
    value_of_client = 0
    assert values.tolist() == [value_of_client, 1, 0, 0]


@pytest.mark.parametrize(
    ("decay", "rounds", "chances"),
    [
        # With chance 0.4 one of all others, else client 1, who alone is worth something.
        (0, range(400), [0, 0.7, 0.1, 0.1, 0.1]),
        (0.1, range(4, 200), [0, 1, 0, 0, 0]),  # decayed after 0.4 / 0.1 rounds
    ],
)
def test_fedfomo_downloads_by_affinity_and_at_random_with_chance_epsilon(decay, rounds, chances):
    personalizer = FedFomo(num_downloads=1, epsilon=0.4, epsilon_decay=decay)
    personalizer._uploads = dict.fromkeys(range(5), torch.zeros(1))
    personalizer._affinity = torch.eye(5)[1:2]  # of client 0: [0, 1, 0, 0, 0]

    counts = np.zeros(5)
    for index in rounds:
        peers = personalizer._choose_peers(0, SimpleNamespace(seed=0, round_index=index))
        counts[peers] += 1

    # Four deviations of a chance of 0.1 are 0.06.
    np.testing.assert_allclose(counts / len(rounds), chances, atol=0.06 if decay == 0 else 0)
