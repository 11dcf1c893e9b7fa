"""Personalizers that give start points: what clients start from, against the papers' formulas."""

import itertools
import math
from copy import deepcopy

import lightning as L
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from personalization.watched import record_calls
from torch.testing import assert_close

from flsv.aggregation import CGSV, ShapFedWA
from flsv.data import FederatedDataModule, Loader, ProportionPartitioner, Splits
from flsv.federation import FederatedLoop
from flsv.functional import class_specific_shapley
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley
from flsv.models.mixture import MixtureClient
from flsv.personalization import (
    IFCA,
    FedAMP,
    FedEM,
    HeurFedAMP,
    PFedHN,
    ShapFedPersonalizer,
    SparsifiedReward,
)
from flsv.sampling import UniformSampler
from helpers import refused
from helpers.data import toy_data, toy_sets
from helpers.fits import client_tensors, fit
from helpers.models import Plain, loop_of, network, sgd


@pytest.mark.fast_rows
@pytest.mark.parametrize("sampler", [None, UniformSampler(2)])
def test_cgsv_rewards_each_client_with_the_largest_elements_of_every_layer(tmp_path, sampler):
    personalizer = SparsifiedReward(beta=1.0)
    loop = FederatedLoop(
        CGSV(scale=0.5),
        {"cgsv": CosineGradientShapley(alpha=0.5)},
        personalizer=personalizer,
        sampler=sampler,
        seed=2,
    )

    def reputation_and_models(round, contributions, models):
        return contributions["cgsv"].clone(), deepcopy(dict(models))

    entries = record_calls(personalizer, reputation_and_models)
    fit(loop, tmp_path, rounds=4)

    for round, (reputation, initial_models), own_models, _ in entries:
        assert sorted(own_models) == sorted(round.client_ids.tolist())
        merit = [math.tanh(max(float(r), 0)) for r in reputation.double().nan_to_num(0)]
        shares = [m / max(merit) for m in merit]
        assert min(shares) < 0.999  # so that the test says something
        step = loop.space.unflatten(round.server_vector - round.global_vector)
        server = loop.space.unflatten(round.server_vector)
        for client, own_model in own_models.items():
            initial_model = initial_models.get(client, round.global_vector)
            initial = loop.space.unflatten(initial_model)
            rewarded = loop.space.unflatten(own_model)
            for name in loop.space.names:
                if "running" in name:
                    assert_close(rewarded[name], server[name])
                    continue
                expected = with_largest_elements(initial[name], step[name], shares[client])
                assert_close(rewarded[name], expected, msg=name)


def with_largest_elements(initial, step, share):
    """Add this share of a step's entries, those of the largest magnitude, and never all of them."""
    flat = step.flatten()
    count = min(math.ceil(share * len(flat)), len(flat) - 1)
    by_magnitude = sorted(
        range(len(flat)),
        key=lambda index: -abs(float(flat[index])),
    )
    result = initial.flatten().clone()

    for index in by_magnitude[:count]:
        result[index] += flat[index]
    return result.view(step.shape)


def test_fedamp_attention_equals_numpys():
    alpha = 2.0
    sigma = 9.0
    models = np.random.default_rng(0).normal(size=(4, 7))

    attention = FedAMP(alpha, sigma).attention(torch.from_numpy(models))

    expected = np.zeros((4, 4))
    for i, j in itertools.permutations(range(4), 2):
        squared_distance = ((models[i] - models[j]) ** 2).sum()
        expected[i, j] = alpha * math.exp(-squared_distance / sigma) / sigma
    attention_to_others = expected.sum(1)
    assert (attention_to_others < 1).all()
    np.fill_diagonal(expected, 1 - attention_to_others)
    assert_allclose(attention, expected)


def test_heurfedamp_attention_equals_numpys():
    self_weight = 0.4
    sigma = 3.0
    models = np.random.default_rng(1).normal(size=(4, 7))

    attention = HeurFedAMP(self_weight, sigma).attention(torch.from_numpy(models))

    directions = models / np.linalg.norm(models, axis=1, keepdims=True)
    powers = np.exp(sigma * directions @ directions.T)
    np.fill_diagonal(powers, 0)
    expected = (1 - self_weight) * powers / powers.sum(1, keepdims=True)
    np.fill_diagonal(expected, self_weight)
    assert_allclose(attention, expected)


@pytest.mark.parametrize("amp", [FedAMP(2.0, 5.0), HeurFedAMP(0.6, 5.0)])
def test_fedamp_clients_start_from_the_mixture_of_the_last_uploads(tmp_path, amp):
    """With absent clients: their last upload counts, and they too start from the newest mixture."""
    loop = FederatedLoop(personalizer=amp, sampler=UniformSampler(2), seed=4)
    entries = record_calls(amp)
    fit(
        loop,
        tmp_path,
        data=toy_data((2, 2, 3, 2)),
        rounds=4,
    )

    uploads = {}
    own_models = {}
    for round, *_ in entries:
        initial_models = round.matrix.starts
        for row, client in enumerate(round.client_ids.tolist()):
            expected = own_models.get(client, round.global_vector)
            assert_close(initial_models[row], expected)
            uploads[client] = round.client_vectors[row]
        stacked = torch.stack(list(uploads.values())).double()
        weights = amp.attention(stacked[:, : round.space.num_parameters])
        own_models = dict(zip(uploads, (weights @ stacked).float()))

    assert set(loop.state.starts) == set(uploads)
    assert len(uploads) > 2
    for client, model in loop.state.starts.items():
        assert_close(model, own_models[client])
        assert (loop.space.unflatten(model)["net.1.running_var"] > 0).all()


NAME = "module.network.responsibility"


class Begun(L.Callback):
    """Remembers what every client started from: the vector, and its mixture weights."""

    def __init__(self):
        self.models = {}

    def on_train_batch_start(self, trainer, module, *_):
        loop = loop_of(module)
        now = loop.space.read(module), module.network.responsibility.clone()
        self.models.setdefault((loop.round_index, loop.current_client), now)


def test_fedem_shares_components_and_keeps_weights(tmp_path):
    personalizer = FedEM()
    start_watch = Begun()
    counts_at_clients = []
    keep_at_client = personalizer.keep

    def noting_keep(local):
        counts_at_clients.append(local.state[NAME].clone())
        keep_at_client(local)

    def traffic_of(round):
        return torch.stack([round.uploaded, round.downloaded])

    personalizer.keep = noting_keep
    rounds = record_calls(personalizer, read_round=traffic_of)
    loop = FederatedLoop(personalizer=personalizer, sampler=UniformSampler(2), seed=1)
    torch.manual_seed(0)
    mixture = MixtureClient(
        num_components=3,
        network="mlp",
        network_args={"hidden": [8]},
        optimizer=sgd,
    )
    data = toy_data((2, 3, 2, 3))
    module = fit(
        loop,
        tmp_path,
        mixture,
        data,
        rounds=5,
        callbacks=[start_watch],
    )

    equal_weights = torch.full((3,), 1 / 3)
    # Nothing of the weights is in a vector, in the global model or in what the server side saves.
    assert "responsibility" not in " ".join(loop.space.names)
    assert_close(module.network.responsibility, equal_weights)

    saved = loop.state_dict()["strategies"]["personalizer"]
    assert saved == loop.state.starts == {}

    weights = {}
    for round, _, _, traffic in rounds:
        for initial_model in round.matrix.starts:
            assert initial_model is round.global_vector
        clients = round.client_ids.tolist()
        for client, samples in zip(clients, round.num_samples.tolist()):
            key = round.round_index, client
            vector, initial_weights = start_watch.models[key]
            assert torch.equal(vector, round.global_vector)
            expected_weights = weights.get(client, equal_weights)
            assert_close(initial_weights, expected_weights)

            # One for where it started, and one for every training sample.
            count = counts_at_clients.pop(0)
            total = count.sum()
            assert float(total) == pytest.approx(1 + samples, rel=1e-4)
            weights[client] = count / total
        assert (traffic == loop.space.size).all()

    assert len(weights) > 2

    largest_weights = torch.stack([*weights.values()]).amax(1)
    assert largest_weights.max() > 0.4

    tensors = client_tensors(loop)
    assert tensors.keys() == weights.keys()
    for client, weight in weights.items():
        assert torch.equal(tensors[client][NAME], weight)


def test_fedem_with_a_module_that_is_no_mixture_is_refused(tmp_path):
    with refused(r"Train a flsv\.models\.MixtureClient"):
        fit(FederatedLoop(personalizer=FedEM()), tmp_path)


@pytest.mark.slow
def test_ifca_clusters_equal_those_by_hand(tmp_path):
    """Four clients, two and two with the same classes, and three clusters."""
    personalizer = IFCA(3)
    data = FederatedDataModule(
        toy_sets(200),
        ProportionPartitioner([[0.5, 0.0, 0.0]] * 2 + [[0.0, 0.5, 0.5]] * 2),
        batch_size=8,
        splits=Splits(client_test=0.2),
        loader=Loader(drop_last=True),
    )

    def clusters_and_traffic(round):
        traffic = round.uploaded.tolist(), round.downloaded.tolist()
        # The clients are asked for these, which is not counted any more.
        assert round.matrix.starts
        return personalizer._clusters.clone(), traffic

    def clusters(*arguments):
        return personalizer._clusters.clone()

    loop = FederatedLoop(personalizer=personalizer, sampler=UniformSampler(3), seed=0)
    entries = record_calls(personalizer, clusters, clusters_and_traffic)
    fit(loop, tmp_path, data=data, rounds=4)

    first_round, first_clusters, *_ = entries[0]
    is_initial = [torch.equal(cluster, first_round.global_vector) for cluster in first_clusters]

    assert is_initial == [True, False, False]

    used = set()
    for round, earlier_clusters, _, (new_clusters, traffic) in entries:
        members = {}
        for row, client in enumerate(round.client_ids.tolist()):
            samples = data.client_indices(client)
            x, y = (tensor[samples] for tensor in data.source[0].tensors)
            losses = []
            for cluster in earlier_clusters:
                module = Plain().eval()
                loop.space.write(module, cluster)
                with torch.no_grad():
                    loss = torch.nn.functional.cross_entropy(module(x), y)
                    losses.append(float(loss))
            best = losses.index(min(losses))
            assert torch.equal(round.matrix.starts[row], earlier_clusters[best])
            assert int(round.reports["cluster"][row]) == best
            members.setdefault(best, []).append(round.client_vectors[row])
        for index in range(3):
            expected = earlier_clusters[index]
            if index in members:
                expected = torch.stack(members[index]).mean(0)
            assert_close(new_clusters[index], expected)
        used |= set(members)
        # Up: a model, and which cluster it belongs to. Down: all clusters.
        size = loop.space.size
        assert traffic == ([size + 1] * 3, [3 * size] * 3)

    assert len(used) > 1


def test_pfedhn_steps_along_the_vector_jacobian_product(tmp_path):
    """Once for each client, against an optimizer on the inner product of h(v_i) with delta_i, whose gradient that is;
    clients start from what the network writes, with the global statistics."""
    personalizer = PFedHN(lr=0.02, embedding_dim=5, hidden=7)

    def networks(*_):
        return deepcopy(personalizer._network)

    loop = FederatedLoop(personalizer=personalizer, sampler=UniformSampler(3), seed=6)
    entries = record_calls(personalizer, networks, networks)
    module = Plain(network(batch_norm=True))
    fit(
        loop,
        tmp_path,
        module,
        toy_data((2, 3, 2, 3)),
    )

    cut = loop.space.num_parameters
    for round, reference, _, trained_network in entries[1:]:
        for client, initial in zip(round.client_ids, round.matrix.starts):
            assert_close(
                initial[:cut],
                reference(client).detach(),
            )
            assert torch.equal(initial[cut:], round.global_vector[cut:])
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.02)
        for client, initial, trained in zip(
            round.client_ids,
            round.matrix.starts,
            round.client_vectors,
        ):
            optimizer.zero_grad()
            (reference(client) * (initial - trained)[:cut]).sum().backward()
            optimizer.step()
        expected = reference.state_dict()
        for name, value in trained_network.state_dict().items():
            assert_close(
                value,
                expected[name],
                rtol=1e-4,
                atol=1e-6,
            )

    last_round = entries[-1].round
    first_initial, second_initial = last_round.matrix.starts[:2]

    assert not torch.equal(first_initial, second_initial)


def test_shapfed_start_points_equal_equation_8_in_the_order_of_algorithm_1(tmp_path):
    personalizer = ShapFedPersonalizer()
    loop = FederatedLoop(
        ShapFedWA("cssv"),
        {"cssv": ClassSpecificShapley(momentum=0.5)},
        personalizer=personalizer,
        seed=1,
    )
    entries = record_calls(personalizer)
    fit(
        loop,
        tmp_path,
        Plain(network(batch_norm=True)),
        rounds=4,
    )

    initial_models = None
    running_values = None
    shares = torch.full((3,), 1 / 3)
    for round, *_ in entries:
        if initial_models is None:
            initial_models = round.global_vector.expand(3, -1)
        server = round.server_vector
        expected = shares @ round.client_vectors
        assert_close(expected, server, rtol=1e-5, atol=1e-6)

        # Updates of heads, from where each client started.
        rows = round.space.head.rows
        heads = rows(round.client_vectors) - rows(initial_models)
        values = class_specific_shapley(heads, torch.einsum("k,kmd->md", shares, heads))
        if running_values is None:
            running_values = values
        else:
            running_values = 0.5 * running_values + 0.5 * values
        gamma = ((1 + running_values) / 2).mean(1)
        assert gamma.sum() > 1.2  # not normalized
        weights = gamma[:, None]
        initial_models = weights * server + (1 - weights) * round.client_vectors
        shares = gamma / gamma.sum()

    for client in range(3):
        initial = loop.state.starts[client]
        assert_close(
            initial,
            initial_models[client],
            rtol=1e-5,
            atol=1e-5,
        )
