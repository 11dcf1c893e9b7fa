"""Clients' algorithms against their papers' Algorithms 1 in plain PyTorch: models, and what is kept beside them."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flsv import ClientEvaluation
from flsv.aggregation import FedAvg
from flsv.attacks import Scaling
from flsv.federation import FederatedLoop
from flsv.filters import OutlierFilter
from flsv.personalization import FedAMP
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.training.algorithms import (
    SCAFFOLD,
    Ditto,
    FedDyn,
    FedDynServer,
    FedProx,
    FedRep,
    PerFedAvg,
)
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for
from helpers.fits import client_tensors, fit, state_vector
from helpers.loops_by_hand import (
    PROPORTIONS,
    ROUNDS,
    SEED,
    Train,
    assert_private_parts,
    assert_same_state,
    cohort_of_round,
    copy_buffers,
    copy_parameters,
    fit_in_run,
    in_run_values_by_hand,
    load_batches,
    make_in_run_data,
    make_in_run_loop,
    make_network_without_norm,
    make_unequal_data,
    set_state,
    train_sharing_by_hand,
)
from helpers.models import Diverges, Plain, network

LR, ALPHA = 0.1, 0.1
#: Trains client i of round r in place, from the server's model, on its batches.
Visit = Callable[[nn.Module, int, int, Iterator[Any]], None]
Failing = set[tuple[int, int]]

sgd = partial(torch.optim.SGD, lr=LR)
both_nets = pytest.mark.parametrize("batch_norm", [False, True])


def make_loop(**options: Any) -> FederatedLoop:
    options = {
        "aggregator": FedAvg("uniform"),
        "sampler": UniformSampler(3),
        "local_epochs": 2,
        **options,
    }
    return FederatedLoop(seed=SEED, **options)


def train_by_hand(
    net: nn.Module, visit: Visit, merge: Any = None, failing: Failing = frozenset()
) -> nn.Module:
    """Rounds of ``visit``, and after each the mean of the models, or what ``merge`` makes of them and of the start."""
    data = make_unequal_data()
    server = copy.deepcopy(net)
    for r in range(ROUNDS):
        models = []
        buffers = []
        for i in cohort_of_round(r):
            if (r, i) not in failing:
                client = copy.deepcopy(server).train()
                visit(client, r, i, load_batches(data, r, i))
                models.append(copy_parameters(client))
                buffers.append(copy_buffers(client))
        mean = [sum(parts) / len(parts) for parts in zip(*models)]
        new = mean if merge is None else merge(copy_parameters(server), models, mean)
        set_state(server, new, buffers, [1.0] * len(models))

    return server


def gradients_of(net: nn.Module, batch: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        nn.functional.cross_entropy(net(batch[0]), batch[1]), list(net.parameters())
    )


@torch.no_grad()
def descend(net: nn.Module, gradients: Any, lr: float = LR) -> None:
    for p, g in zip(net.parameters(), gradients):
        p -= lr * g


def flatten(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def make_ditto_loop(**kwargs: Any) -> FederatedLoop:
    return make_loop(**{"client_algorithm": Ditto(0.3, 0.05), **kwargs})


@both_nets
def test_ditto_equals_its_algorithm_by_hand(tmp_path: Path, batch_norm: bool) -> None:
    net = network(batch_norm)
    personal = {}
    data = make_unequal_data()

    def visit(
        client: nn.Module,
        r: int,
        i: int,
        batches: Iterator[Any],
    ) -> None:
        w = copy_parameters(client)
        v = personal.setdefault(i, copy.deepcopy(client))
        for batch in batches:
            gradients = gradients_of(v, batch)
            proximal = [
                g + 0.3 * (p - a)
                for g, p, a in zip(
                    gradients,
                    v.parameters(),
                    w,
                )
            ]
            descend(v, proximal, 0.05)
            descend(client, gradients_of(client, batch))

    expected = train_by_hand(net, visit)
    loop = make_ditto_loop(evaluation=ClientEvaluation(every=ROUNDS))
    module = Plain(copy.deepcopy(net), sgd)

    fit(loop, tmp_path, module, make_unequal_data(), rounds=ROUNDS)

    assert_same_state(module.net, expected)

    models = {client: state["ditto_model"] for client, state in client_tensors(loop).items()}
    assert models.keys() == personal.keys()

    for client, v in personal.items():
        buffers = [buffer for buffer in v.buffers() if buffer.is_floating_point()]
        whole = flatten([*v.parameters(), *buffers])
        torch.testing.assert_close(models[client], whole, rtol=1e-5, atol=1e-5)

    # A client is tested with its own model; who was never drawn has the global one.
    for client, accuracy in enumerate(loop.client_accuracy.tolist()):
        model = personal.get(client, expected).eval()
        inputs, labels = zip(*data.client_loader(client, "test"))
        is_right = model(torch.cat(inputs)).argmax(1) == torch.cat(labels)
        assert accuracy == pytest.approx(
            is_right.double().mean().item(),
            abs=1e-6,
        )


def test_global_model_with_ditto_equals_bitwise_the_one_without_ditto(tmp_path: Path) -> None:
    vectors = []
    for name, algorithm in (("with", Ditto()), ("without", None)):
        module = Plain(network(dropout=0.5))
        module.spare = nn.Parameter(torch.ones(2))  # without a gradient
        loop = make_ditto_loop(client_algorithm=algorithm)
        fit(loop, tmp_path / name, module, make_unequal_data(), rounds=2)
        vectors.append(state_vector(module))

    with_ditto, without_ditto = vectors
    assert torch.equal(with_ditto, without_ditto)


def make_fedrep_loop(**kwargs: Any) -> FederatedLoop:
    return make_loop(**{"client_algorithm": FedRep(head_epochs=1), "share": ["!head"], **kwargs})


@pytest.mark.filterwarnings("ignore:.*tensors stay at their clients.*")
@both_nets
def test_fedrep_equals_its_algorithm_by_hand(tmp_path: Path, batch_norm: bool) -> None:
    """One epoch for the head, then one for the body, as the authors' code has it: by requires_grad."""
    net = network(batch_norm)
    head = ["4.weight", "4.bias"]
    decaying = partial(
        torch.optim.SGD,
        lr=0.1,
        momentum=0.5,
        weight_decay=0.01,
    )

    def in_turn(client: nn.Module, epochs: list[list[Any]]) -> None:
        optimizer = decaying(client.parameters())
        for number, epoch in enumerate(epochs):
            for name, parameter in client.named_parameters():
                parameter.requires_grad_((name in head) == (number == 0))
            for features, labels in epoch:
                optimizer.zero_grad()
                nn.functional.cross_entropy(client(features), labels).backward()
                optimizer.step()

        client.requires_grad_(True)

    train: Train = in_turn
    expected, private_parts = train_sharing_by_hand(net, head, train, uniform=True)
    loop = make_fedrep_loop()
    module = Plain(copy.deepcopy(net), decaying)
    fit(loop, tmp_path, module, make_unequal_data(), rounds=ROUNDS)

    assert_same_state(module.net, expected)
    assert_private_parts(loop, private_parts)


def per_fedavg_by_hand(net: nn.Module, second_order: bool) -> nn.Module:
    """With the true Hessian, or without."""
    data = make_unequal_data()
    alpha = 0.05

    def others(r: int, i: int) -> Iterator[Any]:
        for epoch in range(100):
            yield from data.client_loader(
                i, "train", generator=generator_for(SEED, "per_fedavg", r, i, epoch)
            )

    def loss_at(
        net: nn.Module,
        parameters: list[Tensor],
        batch: Any,
    ) -> Tensor:
        names = [name for name, _ in net.named_parameters()]
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        logits = torch.func.functional_call(
            net, {**dict(zip(names, parameters)), **buffers}, batch[0]
        )

        return nn.functional.cross_entropy(logits, batch[1])

    def visit(
        client: nn.Module,
        r: int,
        i: int,
        batches: Iterator[Any],
    ) -> None:
        other_batches = others(r, i)
        w = list(client.parameters())
        for batch in batches:
            gradients = gradients_of(client, batch)
            adapted = [(p.detach() - alpha * g).requires_grad_() for p, g in zip(w, gradients)]
            loss = loss_at(client, adapted, next(other_batches))
            step = torch.autograd.grad(loss, adapted)
            if second_order:
                loss = loss_at(client, w, next(other_batches))
                slope = torch.autograd.grad(loss, w, create_graph=True)
                products = torch.autograd.grad(slope, w, grad_outputs=step)
                step = [g - alpha * product for g, product in zip(step, products)]
            descend(client, step)

    return train_by_hand(net, visit)


@both_nets
def test_first_order_per_fedavg_equals_its_algorithm_by_hand(
    tmp_path: Path, batch_norm: bool
) -> None:
    net = network(batch_norm)
    module = Plain(copy.deepcopy(net), sgd)
    fit(
        make_loop(client_algorithm=PerFedAvg(0.05)),
        tmp_path,
        module,
        make_unequal_data(),
        rounds=ROUNDS,
    )

    assert_same_state(module.net, per_fedavg_by_hand(net, second_order=False))


def test_hessian_free_per_fedavg_is_close_to_per_fedavg_with_the_hessian(tmp_path: Path) -> None:
    layers = []
    for layer in network(batch_norm=False):
        layers.append(nn.Tanh() if isinstance(layer, nn.ReLU) else layer)

    net = nn.Sequential(*layers)
    module = Plain(copy.deepcopy(net), sgd)
    fit(
        make_loop(client_algorithm=PerFedAvg(0.05, "free")),
        tmp_path,
        module,
        make_unequal_data(),
        rounds=ROUNDS,
    )
    model = flatten(module.net.parameters())
    second_order = flatten(per_fedavg_by_hand(net, second_order=True).parameters())
    first_order = flatten(per_fedavg_by_hand(net, second_order=False).parameters())
    largest_effect = (first_order - second_order).abs().max()

    assert (model - second_order).abs().max() < 0.02 * largest_effect


def scaffold_by_hand(
    net: nn.Module, failing: Failing = frozenset()
) -> tuple[nn.Module, Tensor, dict[int, Tensor]]:
    """Option II. The next x, c and c_i."""
    zeros = [torch.zeros_like(p) for p in net.parameters()]
    c = list(zeros)
    c_i = {client: list(zeros) for client in range(len(PROPORTIONS))}
    moved = []

    def visit(
        client: nn.Module,
        r: int,
        i: int,
        batches: Iterator[Any],
    ) -> None:
        x = copy_parameters(client)
        steps = 0
        for batch in batches:
            steps += 1
            gradients = gradients_of(client, batch)
            descend(
                client,
                [
                    g - c_k + c_all
                    for g, c_k, c_all in zip(
                        gradients,
                        c_i[i],
                        c,
                    )
                ],
            )

        updated = [
            c_k - c_all + (a - b) / (steps * LR)
            for c_k, c_all, a, b in zip(
                c_i[i],
                c,
                x,
                copy_parameters(client),
            )
        ]
        moved.append([new - old for new, old in zip(updated, c_i[i])])
        c_i[i] = updated

    def merge(
        initial: list[Tensor],
        models: list[Any],
        mean: list[Tensor],
    ) -> list[Tensor]:
        c[:] = [c_all + sum(parts) / len(PROPORTIONS) for c_all, *parts in zip(c, *moved)]
        moved.clear()
        return mean

    server = train_by_hand(net, visit, merge, failing)
    return server, flatten(c), {client: flatten(variate) for client, variate in c_i.items()}


slow_sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


def feddyn_by_hand(
    net: nn.Module, failing: Failing = frozenset()
) -> tuple[nn.Module, Tensor, dict[int, Tensor]]:
    """With the local problem left to autograd. The next theta, h and the clients' gradients."""
    zeros = [torch.zeros_like(p) for p in net.parameters()]
    h = list(zeros)
    gradients = {client: list(zeros) for client in range(len(PROPORTIONS))}

    def visit(
        client: nn.Module,
        t: int,
        k: int,
        batches: Iterator[Any],
    ) -> None:
        optimizer = slow_sgd(client.parameters())
        initial = copy_parameters(client)
        for features, labels in batches:
            optimizer.zero_grad()
            risk = nn.functional.cross_entropy(client(features), labels)
            for theta, linear, center in zip(
                client.parameters(),
                gradients[k],
                initial,
            ):
                risk = risk - (linear * theta).sum() + ALPHA / 2 * ((theta - center) ** 2).sum()
            risk.backward()
            optimizer.step()

        trained = zip(gradients[k], copy_parameters(client), initial)
        gradients[k] = [g - ALPHA * (a - b) for g, a, b in trained]

    def merge(
        initial: list[Tensor],
        models: list[Any],
        mean: list[Tensor],
    ) -> list[Tensor]:
        share = ALPHA / len(PROPORTIONS)
        h[:] = [
            old - share * sum(theta - center for theta in parts)
            for old, center, *parts in zip(h, initial, *models)
        ]

        return [a - b / ALPHA for a, b in zip(mean, h)]

    return (
        train_by_hand(net, visit, merge, failing),
        flatten(h),
        {client: flatten(gradient) for client, gradient in gradients.items()},
    )


def make_scaffold_loop(**kwargs: Any) -> FederatedLoop:
    return make_loop(client_algorithm=SCAFFOLD(), **kwargs)


def make_feddyn_loop() -> FederatedLoop:
    return make_loop(aggregator=FedDynServer(), client_algorithm=FedDyn(ALPHA))


def server_variate(loop: FederatedLoop) -> Tensor:
    return loop.state_dict()["strategies"]["client_algorithm"]["variate"]


def feddyn_state(loop: FederatedLoop) -> Tensor:
    return ALPHA * loop.state_dict()["strategies"]["aggregator"]["shift"]


#: The loop, the same by hand, the clients' optimizer, and where the server's state and a client's are.
CASES: dict[str, Any] = {
    "scaffold": (make_scaffold_loop, scaffold_by_hand, sgd, server_variate, "control_variate"),
    "feddyn": (make_feddyn_loop, feddyn_by_hand, slow_sgd, feddyn_state, "feddyn_gradient"),
}
NOBODY, SOME = frozenset(), {(0, 0), (1, 3), (3, 4)}


@pytest.mark.filterwarnings("ignore:.*returned a model with NaN or infinite entries")
@pytest.mark.parametrize(
    ("batch_norm", "failing"),
    [
        (False, NOBODY),
        (True, NOBODY),
        (True, SOME),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_scaffold_control_variates_and_models_equal_those_by_hand(
    tmp_path: Path, case: str, batch_norm: bool, failing: Failing
) -> None:
    make, hand, optimizer, of_server, of_client = CASES[case]
    assert all(client in cohort_of_round(r) for r, client in failing)

    net = network(batch_norm)
    expected, server, clients = hand(net, failing)
    loop = make()
    module = Diverges(net, optimizer, failing)
    fit(loop, tmp_path, module, make_unequal_data(), rounds=ROUNDS)

    assert_same_state(module.net, expected)
    # Of parameters: a BatchNorm's statistics would make them longer.
    torch.testing.assert_close(of_server(loop), server, rtol=1e-6, atol=1e-6)

    states = client_tensors(loop)
    for client, expected_state in clients.items():
        zeros = torch.zeros_like(expected_state)
        state = states.get(client, {}).get(of_client, zeros)
        torch.testing.assert_close(state, expected_state, rtol=1e-6, atol=1e-6)

    mean = sum(clients.values()) / len(PROPORTIONS)
    torch.testing.assert_close(server, mean, rtol=1e-5, atol=1e-6)
    assert server.abs().max() > 1e-3


def test_scaffold_client_whose_update_is_excluded_changes_no_model_or_variate(
    tmp_path: Path,
) -> None:
    """The server has not taken in what it sent, so its own variate must not have moved either."""
    net = network(batch_norm=False)
    failing = {(round_index, 0) for round_index in range(ROUNDS)}
    expected_net, expected_variate, client_variates = scaffold_by_hand(net, failing=failing)
    loop = make_scaffold_loop(
        uploads=[Scaling(1e6, clients=[0])], filters=[OutlierFilter(exclude=True)]
    )
    module = Plain(copy.deepcopy(net), sgd)

    with pytest.warns(UserWarning, match="client 0 .* left out of the round"):
        fit(loop, tmp_path, module, make_unequal_data(), rounds=ROUNDS)

    assert_close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    assert_same_state(module.net, expected_net)
    assert_close(server_variate(loop), expected_variate)
    for client, state in client_tensors(loop).items():
        assert_close(state["control_variate"], client_variates[client])


def test_scaffold_reports_no_more_than_the_upload_and_nothing_without_a_step(
    tmp_path: Path,
) -> None:
    """Clipped to next to nothing, the upload is the start point, and the change -c; likewise at a rate of 0."""
    clipping = GaussianPrivacy(clip=1e-9, noise_multiplier=0.0)
    rate_of_0 = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.0)
    clipped_loop = make_scaffold_loop(uploads=[clipping])
    clipped_module = Plain(network(batch_norm=False), sgd)
    still_loop = make_scaffold_loop()
    still_module = Plain(network(batch_norm=False), sgd, rate_of_0)

    fit(clipped_loop, tmp_path, clipped_module, make_unequal_data(), rounds=2)
    fit(still_loop, tmp_path, still_module, make_unequal_data(), rounds=2)

    assert server_variate(clipped_loop).abs().max() <= 1e-6
    assert server_variate(still_loop).abs().max() == 0


# ---- in-run values; of every step: tests/metrics/test_in_run_shapley.py


def test_in_run_values_of_every_fourth_step_are_scaled_to_all_steps(tmp_path: Path) -> None:
    dealt = make_in_run_data()
    loop = make_in_run_loop(every=4)
    module = Plain(make_network_without_norm(), sgd)

    _, sample_values, rounds = fit_in_run(loop, tmp_path, module, dealt, rounds=4)

    for client in range(3):
        expected = 0.0
        for round in rounds:
            values, _ = in_run_values_by_hand(
                dealt,
                round,
                client,
                LR,
                0.0,
                1,
                1,
                every=4,
            )
            expected = expected + values
        torch.testing.assert_close(sample_values[client], expected, atol=1e-6, rtol=1e-4)


def make_sgd_of_two_rates(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(parameters)], lr=0.1
    )


ONE_SGD = r"one torch.optim.SGD with momentum=0 and a single learning rate"
TWO_SIDES = r"FedDyn has two sides, and found client_algorithm="


@pytest.mark.parametrize(
    ("make", "optimizer", "message"),
    [
        (lambda: make_ditto_loop(personalizer=FedAMP()), sgd, "Leave the personalizer out"),
        (
            lambda: make_fedrep_loop(share="all"),
            sgd,
            r"FedRep\(\) trains the part that a client keeps, and all",
        ),
        (
            lambda: make_fedrep_loop(local_epochs=1),
            sgd,
            r"no epoch for the shared part: local_epochs=1\. Set .*=2\) or more",
        ),
        (make_scaffold_loop, partial(torch.optim.SGD, lr=0.1, momentum=0.9), ONE_SGD),
        (make_scaffold_loop, partial(torch.optim.Adam, lr=0.1), ONE_SGD),
        (make_scaffold_loop, make_sgd_of_two_rates, ONE_SGD),
        (lambda: FederatedLoop(client_algorithm=FedDyn()), sgd, TWO_SIDES),
        (lambda: FederatedLoop(FedDynServer(), client_algorithm=FedProx()), sgd, TWO_SIDES),
    ],
)
def test_algorithm_with_unusable_settings_is_refused(
    tmp_path: Path, make: Any, optimizer: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(make(), tmp_path, Plain(optimizer=optimizer), make_unequal_data())
