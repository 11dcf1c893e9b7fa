"""Personalizers that give start points: what clients start from, against the papers' formulas."""

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from personalization.watched import watched
from torch import Tensor

from flsv.aggregation import CGSV, ShapFedWA
from flsv.core.parameter_space import ParameterSpace
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
    Standalone,
)
from flsv.sampling import FixedCohort, UniformSampler
from flsv.utilities.errors import ConfigurationError
from helpers.data import toy_data, toy_sets
from helpers.fits import client_tensors, fit
from helpers.models import Plain, loop_of, network, sgd


@pytest.mark.parametrize("sampler", [None, UniformSampler(2)])
def test_cgsv_rewards_each_client_with_the_largest_entries_of_every_layer(
    tmp_path: Path, sampler: Any
) -> None:
    personalizer, metric = SparsifiedReward(beta=1.0), CosineGradientShapley(alpha=0.5)
    loop = FederatedLoop(
        CGSV(scale=0.5), {"cgsv": metric}, personalizer=personalizer, sampler=sampler, seed=2
    )
    seen = watched(
        personalizer, lambda round, known, models: (known["cgsv"].clone(), deepcopy(dict(models)))
    )
    fit(loop, tmp_path, rounds=4)
    for round, (reputation, held), own, _ in seen:
        assert sorted(own) == sorted(round.client_ids.tolist())
        merit = [math.tanh(max(float(r), 0)) for r in reputation.double().nan_to_num(0)]
        shares = [m / max(merit) for m in merit]
        assert min(shares) < 0.999  # so that the test says something
        step = loop.space.unflatten(round.server_vector - round.global_vector)
        for client in own:
            start = loop.space.unflatten(held.get(client, round.global_vector))
            new, server = (
                loop.space.unflatten(own[client]),
                loop.space.unflatten(round.server_vector),
            )
            for name in loop.space.names:
                if "running" in name:
                    torch.testing.assert_close(new[name], server[name])
                    continue
                flat = step[name].flatten()
                count = min(math.ceil(shares[client] * len(flat)), len(flat) - 1)
                best = sorted(range(len(flat)), key=lambda i, flat=flat: -abs(float(flat[i])))[
                    :count
                ]
                expected = start[name].flatten().clone()
                expected[best] += flat[best]
                torch.testing.assert_close(new[name].flatten(), expected, msg=name)


def test_fedamp_attention_equals_numpys() -> None:
    w = np.random.default_rng(0).normal(size=(4, 7))
    expected = np.zeros((4, 4))
    for i in range(4):
        for j in set(range(4)) - {i}:
            expected[i, j] = 2.0 * math.exp(-((w[i] - w[j]) ** 2).sum() / 9.0) / 9.0
        assert expected[i].sum() < 1
        expected[i, i] = 1 - expected[i].sum()
    np.testing.assert_allclose(FedAMP(2.0, 9.0).attention(torch.from_numpy(w)), expected)


def test_heurfedamp_attention_equals_numpys() -> None:
    w = np.random.default_rng(1).normal(size=(4, 7))
    expected = np.zeros((4, 4))
    for i in range(4):
        cos = {
            j: w[i] @ w[j] / np.linalg.norm(w[i]) / np.linalg.norm(w[j]) for j in range(4) if j != i
        }
        total = sum(math.exp(3.0 * c) for c in cos.values())
        for j, c in cos.items():
            expected[i, j] = 0.6 * math.exp(3.0 * c) / total
        expected[i, i] = 0.4
    np.testing.assert_allclose(HeurFedAMP(0.4, 3.0).attention(torch.from_numpy(w)), expected)
    assert HeurFedAMP().attention(torch.ones(1, 2)).tolist() == [[1.0]]


@pytest.mark.parametrize("amp", [FedAMP(2.0, 5.0), HeurFedAMP(0.6, 5.0)])
def test_fedamp_clients_start_from_the_mixture_of_the_last_uploads(
    tmp_path: Path, amp: FedAMP
) -> None:
    """With absent clients: their last upload counts, and they too start from the newest mixture."""
    seen, loop = watched(amp), FederatedLoop(personalizer=amp, sampler=UniformSampler(2), seed=4)
    fit(loop, tmp_path, data=toy_data((2, 2, 3, 2)), rounds=4)
    uploads: dict[int, Tensor] = {}
    own: dict[int, Tensor] = {}
    for round, *_ in seen:
        for row, client in enumerate(round.client_ids.tolist()):
            begun = round.global_vector if round.start_vectors is None else round.start_vectors[row]
            torch.testing.assert_close(begun, own.get(client, round.global_vector))
            uploads[client] = round.client_vectors[row]
        stacked = torch.stack(list(uploads.values())).double()
        weights = amp.attention(stacked[:, : round.space.num_parameters])
        own = dict(zip(uploads, (weights @ stacked).float()))
    assert set(loop.state.starts) == set(uploads)
    assert len(uploads) > 2
    for client, model in loop.state.starts.items():
        torch.testing.assert_close(model, own[client])
        assert (loop.space.unflatten(model)["net.1.running_var"] > 0).all()


NAME = "module.network.responsibility"


class Begun(L.Callback):
    """Remembers what every client started from: the vector, and its mixture weights."""

    def __init__(self) -> None:
        self.models: dict[Any, tuple[Tensor, Tensor]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
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
    rounds = watched(personalizer, read_round=traffic_of)
    loop = FederatedLoop(personalizer=personalizer, sampler=UniformSampler(2), seed=1)
    torch.manual_seed(0)
    mixture = MixtureClient(
        num_components=3,
        network="mlp",
        network_args={"hidden": [8]},
        optimizer=sgd,
    )
    data = toy_data((2, 3, 2, 3))
    module = fit(loop, tmp_path, mixture, data, rounds=5, callbacks=[start_watch])

    equal_weights = torch.full((3,), 1 / 3)
    # Nothing of the weights is in a vector, in the global model or in what the server side saves.
    assert "responsibility" not in " ".join(loop.space.names)
    torch.testing.assert_close(module.network.responsibility, equal_weights)
    saved = loop.state_dict()["strategies"]["personalizer"]
    assert saved == loop.state.starts == {}

    weights = {}
    for round, _, _, traffic in rounds:
        assert round.start_vectors is None  # everybody starts from the global one
        clients = round.client_ids.tolist()
        for client, samples in zip(clients, round.num_samples.tolist()):
            key = round.round_index, client
            vector, initial_weights = start_watch.models[key]
            assert torch.equal(vector, round.global_vector)
            expected_weights = weights.get(client, equal_weights)
            torch.testing.assert_close(initial_weights, expected_weights)

            # One for where it started, and one for every training sample.
            count = counts_at_clients.pop(0)
            total = count.sum()
            assert float(total) == pytest.approx(1 + samples, rel=1e-4)
            weights[client] = count / total
        assert (traffic == loop.space.size).all()

        shares = round.num_samples.double() / round.num_samples.sum()
        average = shares @ round.client_vectors.double()
        next_model = round.server_vector.double()
        torch.testing.assert_close(
            next_model,
            average,
            rtol=1e-4,
            atol=1e-5,
        )

    assert len(weights) > 2
    largest_weights = torch.stack([*weights.values()]).amax(1)
    assert largest_weights.max() > 0.4
    tensors = client_tensors(loop)
    assert tensors.keys() == weights.keys()
    for client, weight in weights.items():
        assert torch.equal(tensors[client][NAME], weight)


def test_fedem_with_a_module_that_is_no_mixture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"train flsv\.models\.MixtureClient"):
        fit(FederatedLoop(personalizer=FedEM()), tmp_path)


def test_ifca_clusters_equal_those_by_hand(tmp_path: Path) -> None:
    """Four clients, two and two with the same classes, and three clusters."""
    personalizer = IFCA(3)
    data = FederatedDataModule(
        toy_sets(200),
        ProportionPartitioner([[0.5, 0.0, 0.0]] * 2 + [[0.0, 0.5, 0.5]] * 2),
        batch_size=8,
        splits=Splits(client_test=0.2),
        loader=Loader(drop_last=True),
    )

    def after(round: Any) -> Any:
        traffic = round.uploaded.tolist(), round.downloaded.tolist()
        assert (
            round.start_vectors is not None
        )  # the clients are asked for them, which is not counted any more
        return personalizer._clusters.clone(), traffic

    seen = watched(personalizer, lambda *_: personalizer._clusters.clone(), after)
    loop = FederatedLoop(personalizer=personalizer, sampler=UniformSampler(3), seed=0)
    fit(loop, tmp_path, data=data, rounds=4)
    initial = seen[0][0].global_vector
    assert [torch.equal(cluster, initial) for cluster in seen[0][1]] == [True, False, False]
    used = set()
    for round, before, _, (clusters, traffic) in seen:
        members: dict[int, list[Tensor]] = {}
        for row, client in enumerate(round.client_ids.tolist()):
            x, y = (part[data.client_indices(client)] for part in data.source[0].tensors)
            losses = []
            for cluster in before:
                module = Plain().eval()
                loop.space.write(module, cluster)
                with torch.no_grad():
                    losses.append(float(torch.nn.functional.cross_entropy(module(x), y)))
            best = losses.index(min(losses))
            assert torch.equal(round.start_vectors[row], before[best])
            assert int(round.reports["cluster"][row]) == best
            members.setdefault(best, []).append(round.client_vectors[row])
        for index in range(3):
            expected = torch.stack(members[index]).mean(0) if index in members else before[index]
            torch.testing.assert_close(clusters[index], expected)
        used |= set(members)
        # Up: a model, and which cluster it belongs to. Down: all clusters.
        assert traffic == ([loop.space.size + 1] * 3, [3 * loop.space.size] * 3)
    assert len(used) > 1


def test_pfedhn_steps_along_the_vector_jacobian_product(tmp_path: Path) -> None:
    """Once for each client, against an optimizer on the inner product of h(v_i) with delta_i, whose gradient that is;
    clients start from what the network writes, with the global statistics."""
    personalizer = PFedHN(lr=0.02, embedding_dim=5, hidden=7)

    def networks(*_: Any) -> Any:
        return deepcopy(personalizer._network)

    seen, loop = (
        watched(personalizer, networks, networks),
        FederatedLoop(personalizer=personalizer, sampler=UniformSampler(3), seed=6),
    )
    fit(loop, tmp_path, Plain(network(batch_norm=True)), toy_data((2, 3, 2, 3)))
    cut = loop.space.num_parameters
    for round, reference, _, after in seen[1:]:
        for client, start in zip(round.client_ids, round.start_vectors):
            torch.testing.assert_close(start[:cut], reference(client).detach())
            assert torch.equal(start[cut:], round.global_vector[cut:])
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.02)
        for client, start, trained in zip(
            round.client_ids, round.start_vectors, round.client_vectors
        ):
            optimizer.zero_grad()
            (reference(client) * (start - trained)[:cut]).sum().backward()
            optimizer.step()
        for name, value in after.state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-6)
    assert not torch.equal(*seen[-1][0].start_vectors[:2])


def test_shapfed_start_points_equal_equation_8_in_the_order_of_algorithm_1(tmp_path: Path) -> None:
    personalizer, metrics = ShapFedPersonalizer(), {"cssv": ClassSpecificShapley(momentum=0.5)}
    seen, loop = (
        watched(personalizer),
        FederatedLoop(ShapFedWA("cssv"), metrics, personalizer=personalizer, seed=1),
    )
    fit(loop, tmp_path, Plain(network(batch_norm=True)), rounds=4)
    starts, share, running = None, torch.full((3,), 1 / 3), None
    for round, *_ in seen:
        rows = round.space.head.rows
        begun = round.global_vector.expand(3, -1) if starts is None else starts
        torch.testing.assert_close(
            share @ round.client_vectors, round.server_vector, rtol=1e-5, atol=1e-6
        )
        heads = rows(round.client_vectors) - rows(begun)  # updates from where each client started
        now = class_specific_shapley(heads, torch.einsum("k,kmd->md", share, heads))
        running = now if running is None else 0.5 * running + 0.5 * now
        gamma = ((1 + running) / 2).mean(1)
        assert gamma.sum() > 1.2  # not normalized
        starts = gamma[:, None] * round.server_vector + (1 - gamma[:, None]) * round.client_vectors
        share = gamma / gamma.sum()
    for client in range(3):
        torch.testing.assert_close(loop.state.starts[client], starts[client], rtol=1e-5, atol=1e-5)


def test_standalone_client_that_joins_late_starts_from_the_initial_model(tmp_path: Path) -> None:
    personalizer, module, sampler = Standalone(), Plain(), FixedCohort([0])
    order = iter([0, 0, 1, 2])
    sampler.sample = lambda *_, **__: torch.tensor([next(order)])  # type: ignore[method-assign]
    seen = watched(personalizer, lambda round, *_: round.matrix.starts[0])
    initial = ParameterSpace(module).read(module)
    fit(
        FederatedLoop(personalizer=personalizer, sampler=sampler, seed=0),
        tmp_path,
        module,
        rounds=4,
    )
    assert [torch.equal(start, initial) for _, start, _, _ in seen] == [True, False, True, True]
