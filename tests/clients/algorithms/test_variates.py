"""SCAFFOLD and FedDyn against their Algorithms 1 in plain PyTorch: what server and clients keep beside the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from flsv.clients.algorithms import SCAFFOLD, FedDyn, FedDynServer, FedProx
from flsv.errors import ConfigurationError
from flsv.filters import OutlierFilter
from flsv.loop import FederatedLoop
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.uploads import UploadContext

LR, ALPHA = 0.1, 0.1
#: The next model, what the server keeps, and what every client does.
Run = tuple[nn.Module, list[Tensor], dict[int, list[Tensor]]]

sgd = partial(torch.optim.SGD, lr=LR)
slow_sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


class Huge(Attack):
    """A client's update is far too large in one round."""

    def __init__(self, round_index: int, client: int) -> None:
        super().__init__([client])
        self.round_index = round_index

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        return update * (1e6 if context.round_index == self.round_index else 1)


def scaffold(**kwargs: Any) -> FederatedLoop:
    return _federation({"aggregator": FedAvg("uniform"), "client_algorithm": SCAFFOLD(), **kwargs})


def feddyn(**kwargs: Any) -> FederatedLoop:
    return _federation({"aggregator": FedDynServer(), "client_algorithm": FedDyn(ALPHA), **kwargs})


def _federation(options: dict[str, Any]) -> FederatedLoop:
    return FederatedLoop(**{"sampler": UniformSampler(3), "local_epochs": 2, "seed": SEED, **options})


def scaffold_by_hand(net: nn.Module, server_lr: float = 1.0, failing: set[tuple[int, int]] = frozenset()) -> Run:
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


def feddyn_by_hand(net: nn.Module, failing: set[tuple[int, int]] = frozenset()) -> Run:
    """Algorithm 1, with the local problem left to autograd. The next theta, h and the clients' gradients."""
    data, server = unequal_data(), copy.deepcopy(net)
    m = len(PROPORTIONS)
    zeros = [torch.zeros_like(p) for p in server.parameters()]
    h, gradients = list(zeros), {k: list(zeros) for k in range(m)}
    for t in range(ROUNDS):
        start, models, buffers = copies(server), [], []
        for k in [k for k in cohort(t) if (t, k) not in failing]:
            client = copy.deepcopy(server).train()
            optimizer = slow_sgd(client.parameters())
            for features, labels in batches(data, t, k):
                optimizer.zero_grad()
                risk = nn.functional.cross_entropy(client(features), labels)
                for theta, linear, center in zip(client.parameters(), gradients[k], start):
                    risk = risk - (linear * theta).sum() + ALPHA / 2 * ((theta - center) ** 2).sum()
                risk.backward()
                optimizer.step()
            models.append(copies(client))
            buffers.append(buffers_of(client))
            gradients[k] = [g - ALPHA * (a - b) for g, a, b in zip(gradients[k], models[-1], start)]
        h = [old - ALPHA / m * sum(theta - center for theta in parts) for old, center, *parts in zip(h, start, *models)]
        mean = [sum(parts) / len(parts) for parts in zip(*models)]
        put(server, [a - b / ALPHA for a, b in zip(mean, h)], buffers, [1.0] * len(models))
    return server, h, gradients


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@dataclass(frozen=True)
class Case:
    """A federation, the same by hand, and where its state dictionary has what server and clients keep.

    Attributes:
        make: the loop.
        by_hand: see :data:`Run`.
        optimizer: of the clients.
        of_server: names a strategy and its state.
        of_client: names a client's state.
        scale: of the server's state by hand, in that of the loop.
    """

    make: Callable[..., FederatedLoop]
    by_hand: Callable[..., Run]
    optimizer: Callable[..., torch.optim.Optimizer]
    of_server: tuple[str, str]
    of_client: str
    scale: float = 1.0

    def assert_kept(self, loop: FederatedLoop, server: list[Tensor], clients: dict[int, list[Tensor]]) -> None:
        state = loop.state_dict()
        strategy, name = self.of_server
        close = {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(self.scale * state["strategies"][strategy][name], flat(server), **close)
        for client, expected in clients.items():
            kept = state["clients"].get(client, {}).get(self.of_client, torch.zeros_like(flat(server)))
            torch.testing.assert_close(kept, flat(expected), **close)


CASES = {
    "scaffold": Case(scaffold, scaffold_by_hand, sgd, ("client_algorithm", "variate"), "control_variate"),
    "feddyn": Case(feddyn, feddyn_by_hand, slow_sgd, ("aggregator", "shift"), "feddyn_gradient", ALPHA),
}
both = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@both
@pytest.mark.parametrize("batch_norm", [False, True])
def test_same_models_and_states_as_by_hand(tmp_path: Path, batch_norm: bool, case: Case) -> None:
    net = network(batch_norm)
    expected, server, clients = case.by_hand(net)
    loop, module = case.make(), Plain(copy.deepcopy(net), case.optimizer)
    fit(loop, tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    case.assert_kept(loop, server, clients)  # of parameters: a BatchNorm's statistics would make them longer
    torch.testing.assert_close(flat(server), sum(map(flat, clients.values())) / len(PROPORTIONS), rtol=1e-5, atol=1e-6)
    assert flat(server).abs().max() > 1e-3


@both
def test_a_client_whose_update_is_not_finite_leaves_no_trace(tmp_path: Path, case: Case) -> None:
    failing = {(0, 0), (1, 3), (3, 4)}
    assert all(client in cohort(r) for r, client in failing)
    net = network()
    expected, server, clients = case.by_hand(net, failing=failing)
    loop, module = case.make(), Diverges(net, case.optimizer, failing)
    with pytest.warns(UserWarning, match="client 3 returned a model with NaN or infinite entries in round 2"):
        fit(loop, tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    case.assert_kept(loop, server, clients)


def test_what_is_reported_tells_no_more_than_the_upload(tmp_path: Path) -> None:
    """Clipped to next to nothing, the upload is the start point, and the change -c."""
    loop = scaffold(uploads=[GaussianPrivacy(clip=1e-9, noise_multiplier=0.0)])
    fit(loop, tmp_path, Plain(network(batch_norm=False), sgd), unequal_data(), rounds=2)
    assert loop.state_dict()["strategies"]["client_algorithm"]["variate"].abs().max() < 1e-6


def test_a_client_whose_update_is_excluded_leaves_no_trace(tmp_path: Path) -> None:
    """The server has not taken in what it sent, so its own variate must not have moved either."""
    excluded = {(0, 0), (3, 4)}
    net = network(batch_norm=False)
    expected, c, c_i = scaffold_by_hand(net, failing=excluded)
    loop = scaffold(uploads=[Huge(*each) for each in excluded], filters=[OutlierFilter(exclude=True)])
    module = Plain(copy.deepcopy(net), sgd)
    with pytest.warns(UserWarning, match="client 4 .* in round 4 .* left out of the round"):
        fit(loop, tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    CASES["scaffold"].assert_kept(loop, c, c_i)


def test_a_round_without_learning_rate_changes_nothing(tmp_path: Path) -> None:
    loop = scaffold()
    module = Plain(network(batch_norm=False), sgd, lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.0))
    fit(loop, tmp_path, module, unequal_data(), rounds=2)
    assert loop.state_dict()["strategies"]["client_algorithm"]["variate"].count_nonzero() == 0
    assert_same(module.net, network(batch_norm=False))


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


@pytest.mark.parametrize(
    "roles",
    [
        {"client_algorithm": FedDyn()},
        {"aggregator": FedAvg(), "client_algorithm": FedDyn()},
        {"aggregator": FedDynServer()},
        {"aggregator": FedDynServer(), "client_algorithm": FedProx()},
    ],
)
def test_one_side_alone_is_refused_before_training(tmp_path: Path, roles: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"FedDyn has two sides, and found client_algorithm="):
        fit(FederatedLoop(**roles), tmp_path)
