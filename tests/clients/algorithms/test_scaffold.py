"""SCAFFOLD against Algorithm 1 in plain PyTorch, and what must not reach the variates."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import (
    PROPORTIONS,
    ROUNDS,
    SEED,
    Diverges,
    assert_same,
    batches,
    buffers_of,
    cohort,
    copies,
    put,
    unequal_data,
)
from torch import Tensor, nn
from toys import Plain, fit, network

from flsv.aggregation import FedAvg
from flsv.attacks import Attack
from flsv.clients.algorithms import SCAFFOLD
from flsv.errors import ConfigurationError
from flsv.filters import OutlierFilter
from flsv.loop import FederatedLoop
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.uploads import UploadContext

LR = 0.1


class Huge(Attack):
    """A client's update is far too large in one round."""

    def __init__(self, round_index: int, client: int) -> None:
        super().__init__([client])
        self.round_index = round_index

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        return update * (1e6 if context.round_index == self.round_index else 1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def scaffold(**kwargs: Any) -> FederatedLoop:
    options = {"aggregator": FedAvg("uniform"), "sampler": UniformSampler(3), "local_epochs": 2, "seed": SEED, **kwargs}
    return FederatedLoop(client_algorithm=SCAFFOLD(), **options)


def scaffold_by_hand(
    net: nn.Module, server_lr: float = 1.0, failing: set[tuple[int, int]] = frozenset()
) -> tuple[nn.Module, list[Tensor], dict[int, list[Tensor]]]:
    """Algorithm 1, option II. The next x, c and c_i."""
    data, server = unequal_data(), copy.deepcopy(net)
    n = len(PROPORTIONS)
    zeros = [torch.zeros_like(p) for p in server.parameters()]
    c, c_i = list(zeros), {i: list(zeros) for i in range(n)}
    for r in range(ROUNDS):
        x, moves, changes, buffers = copies(server), [], [], []
        for i in [i for i in cohort(r) if (r, i) not in failing]:
            client = copy.deepcopy(server).train()
            steps = 0
            for features, labels in batches(data, r, i):
                loss = nn.functional.cross_entropy(client(features), labels)
                gradients = torch.autograd.grad(loss, list(client.parameters()))
                with torch.no_grad():
                    for y, g, own, all_ in zip(client.parameters(), gradients, c_i[i], c):
                        y -= LR * (g - own + all_)
                steps += 1
            y = copies(client)
            after = [own - all_ + (a - b) / (steps * LR) for own, all_, a, b in zip(c_i[i], c, x, y)]
            moves.append([b - a for a, b in zip(x, y)])
            changes.append([new - old for new, old in zip(after, c_i[i])])
            buffers.append(buffers_of(client))
            c_i[i] = after
        size = len(moves)
        put(
            server,
            [a + server_lr / size * sum(parts) for a, *parts in zip(x, *moves)],
            buffers,
            [1.0] * size,
        )
        c = [all_ + sum(parts) / n for all_, *parts in zip(c, *changes)]
    return server, c, c_i


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def assert_variates(loop: FederatedLoop, c: list[Tensor], c_i: dict[int, list[Tensor]]) -> None:
    state = loop.state_dict()
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(state["strategies"]["client_algorithm"]["variate"], flat(c), **close)
    for client, expected in c_i.items():
        kept = state["clients"].get(client, {}).get("control_variate", torch.zeros_like(flat(c)))
        torch.testing.assert_close(kept, flat(expected), **close)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("server_lr", [1.0, 1.5])
def test_same_models_and_variates_as_by_hand(tmp_path: Path, batch_norm: bool, server_lr: float) -> None:
    net = network(batch_norm)
    expected, c, c_i = scaffold_by_hand(net, server_lr)
    loop, module = scaffold(aggregator=FedAvg("uniform", server_lr=server_lr)), Plain(copy.deepcopy(net), sgd)
    fit(loop, tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    assert_variates(loop, c, c_i)  # of parameters: a BatchNorm's statistics would make them longer
    assert flat(c).abs().max() > 1e-3


def test_the_servers_variate_is_the_mean_of_the_clients(tmp_path: Path) -> None:
    loop = scaffold(uploads=[GaussianPrivacy(clip=0.1, noise_multiplier=0.5)])
    fit(loop, tmp_path, Plain(network(batch_norm=False), sgd), unequal_data(), rounds=ROUNDS)
    state = loop.state_dict()
    own = [client["control_variate"] for client in state["clients"].values()]
    torch.testing.assert_close(
        state["strategies"]["client_algorithm"]["variate"],
        sum(own) / len(PROPORTIONS),
        rtol=1e-5,
        atol=1e-6,
    )


def test_what_is_reported_tells_no_more_than_the_upload(tmp_path: Path) -> None:
    """Clipped to next to nothing, the upload is the start point, and the change -c."""
    loop = scaffold(uploads=[GaussianPrivacy(clip=1e-9, noise_multiplier=0.0)])
    fit(loop, tmp_path, Plain(network(batch_norm=False), sgd), unequal_data(), rounds=2)
    assert loop.state_dict()["strategies"]["client_algorithm"]["variate"].abs().max() < 1e-6


def test_a_client_whose_update_is_not_finite_leaves_no_trace(tmp_path: Path) -> None:
    failing = {(0, 0), (1, 3), (3, 4)}
    assert all(client in cohort(r) for r, client in failing)
    net = network()
    expected, c, c_i = scaffold_by_hand(net, failing=failing)
    loop, module = scaffold(), Diverges(net, sgd, failing)
    with pytest.warns(UserWarning, match="client 3 returned a model with NaN or infinite entries in round 1"):
        fit(loop, tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    assert_variates(loop, c, c_i)


def test_a_client_whose_update_is_excluded_leaves_no_trace(tmp_path: Path) -> None:
    """The server has not taken in what it sent, so its own variate must not have moved either."""
    excluded = {(0, 0), (3, 4)}
    net = network(batch_norm=False)
    expected, c, c_i = scaffold_by_hand(net, failing=excluded)
    loop = scaffold(uploads=[Huge(*each) for each in excluded], filters=[OutlierFilter(exclude=True)])
    module = Plain(copy.deepcopy(net), sgd)
    with pytest.warns(UserWarning, match="client 4 .* in round 3 .* left out of the round"):
        fit(loop, tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    assert_variates(loop, c, c_i)


def test_the_counters_of_an_excluded_client_are_not_the_next_models(tmp_path: Path) -> None:
    """BatchNorm's counter goes on from the cohort's first client, who is excluded here."""
    loop, module = scaffold(uploads=[Huge(0, 0)], filters=[OutlierFilter(exclude=True)]), Plain(network(), sgd)
    with pytest.warns(UserWarning, match="left out of the round"):
        fit(loop, tmp_path, module, unequal_data(), rounds=1)
    assert module.net.state_dict()["1.num_batches_tracked"] == 0


def test_a_round_without_learning_rate_changes_nothing(tmp_path: Path) -> None:
    loop = scaffold()
    module = Plain(network(batch_norm=False), sgd, lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.0))
    fit(loop, tmp_path, module, unequal_data(), rounds=2)
    assert loop.state_dict()["strategies"]["client_algorithm"]["variate"].count_nonzero() == 0
    assert_same(module.net, network(batch_norm=False))


def test_what_crosses(tmp_path: Path) -> None:
    loop = scaffold()
    fit(loop, tmp_path, Plain(network(), sgd), unequal_data(), rounds=1)
    size, parameters = loop.space.size, loop.space.num_parameters
    for direction in ("up", "down"):
        assert loop.channel.numbers(cohort(0), direction).tolist() == [size + parameters] * 3


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(
            [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(parameters)], lr=0.1
        ),
    ],
)
def test_other_optimizers_are_refused_before_training(tmp_path: Path, optimizer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"one torch.optim.SGD with momentum=0 and a single learning rate"):
        fit(scaffold(), tmp_path, Plain(optimizer=optimizer))
