"""Clients' algorithms against their papers' Algorithms 1 in plain PyTorch: models, and what is kept beside them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn

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
from flsv.utilities.seeding import generator_for
from helpers import refused, warns
from helpers.fits import assert_private_parts, client_tensors, fit
from helpers.loops_by_hand import (
    PROPORTIONS,
    ROUNDS,
    SEED,
    assert_same_state,
    cohort_of_round,
    cohorts_by_hand,
    copy_parameters,
    cross_entropy_of,
    fedavg_by_hand,
    make_unequal_data,
    set_parameters,
    take_steps,
)
from helpers.models import Diverges, Plain, make_sgd, network

LR = 0.1
ALPHA = 0.1  # of FedDyn
DITTO_LR = 0.05
DITTO_LAMBDA = 0.3
PER_FEDAVG_ALPHA = 0.05
sgd = make_sgd(LR)


def make_loop(**options):
    options = {
        "aggregator": FedAvg("uniform"),
        "sampler": UniformSampler(3),
        "local_epochs": 2,
        **options,
    }
    return FederatedLoop(seed=SEED, **options)


def gradients_of(net, batch):
    return torch.autograd.grad(
        nn.functional.cross_entropy(net(batch[0]), batch[1]), list(net.parameters())
    )


@torch.no_grad()
def descend(net, gradients, lr=LR):
    for parameter, gradient in zip(net.parameters(), gradients):
        parameter -= lr * gradient


assert_close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)


def flatten(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def make_ditto_loop(**kwargs):
    return make_loop(**{"client_algorithm": Ditto(DITTO_LAMBDA, DITTO_LR), **kwargs})


def test_ditto_equals_its_algorithm_by_hand(tmp_path):
    net = network()
    personal = {}
    data = make_unequal_data()

    def train(model, visit):
        global_parameters = copy_parameters(model)
        personal_model = personal.setdefault(visit.client, copy.deepcopy(model))
        for batch in visit.batches:
            # The gradient of the loss at v, plus lambda (v - w).
            proximal_gradients = []
            for gradient, parameter, anchor in zip(
                gradients_of(personal_model, batch),
                personal_model.parameters(),
                global_parameters,
            ):
                proximal_gradients.append(gradient + DITTO_LAMBDA * (parameter - anchor))
            descend(personal_model, proximal_gradients, lr=DITTO_LR)
            descend(model, gradients_of(model, batch))

    expected, _ = fedavg_by_hand(net, train, uniform=True)
    loop = make_ditto_loop(evaluation=ClientEvaluation(every=ROUNDS))
    module = Plain(copy.deepcopy(net), sgd)

    fit(loop, tmp_path, module, make_unequal_data(), rounds=ROUNDS)

    assert_same_state(module.net, expected)

    models = {client: state["ditto_model"] for client, state in client_tensors(loop).items()}
    assert models.keys() == personal.keys()

    for client, personal_model in personal.items():
        buffers = [buffer for buffer in personal_model.buffers() if buffer.is_floating_point()]
        whole_model = flatten([*personal_model.parameters(), *buffers])
        torch.testing.assert_close(
            models[client],
            whole_model,
            rtol=1e-5,
            atol=1e-5,
        )

    # A client is tested with its own model; who was never drawn has the global one.
    for client, accuracy in enumerate(loop.client_scores["accuracy"].tolist()):
        model = personal.get(client, expected).eval()
        inputs, labels = zip(*data.client_loader(client, "test"))
        is_right = model(torch.cat(inputs)).argmax(1) == torch.cat(labels)
        assert accuracy == pytest.approx(
            is_right.double().mean().item(),
            rel=5e-3,  # told in three significant digits
        )


def make_fedrep_loop(**kwargs):
    return make_loop(**{"client_algorithm": FedRep(head_epochs=1), "share": ["!head"], **kwargs})


@pytest.mark.filterwarnings("ignore:.*tensors stay at their clients.*")
def test_fedrep_equals_its_algorithm_by_hand(tmp_path):
    """One epoch for the head, then one for the body, as the authors' code has it: by requires_grad."""
    net = network()
    head = ["4.weight", "4.bias"]
    decaying = make_sgd(momentum=0.5, weight_decay=0.01)

    def train_head_then_body(model, visit):
        optimizer = decaying(model.parameters())
        head_epoch, body_epoch = visit.epochs
        for trains_head, epoch in ((True, head_epoch), (False, body_epoch)):
            for name, parameter in model.named_parameters():
                is_head = name in head
                parameter.requires_grad_(is_head == trains_head)
            take_steps(optimizer, cross_entropy_of(model), epoch)

        model.requires_grad_(True)

    expected, private_parts = fedavg_by_hand(net, train_head_then_body, private=head, uniform=True)
    loop = make_fedrep_loop()
    module = Plain(copy.deepcopy(net), decaying)
    fit(loop, tmp_path, module, make_unequal_data(), rounds=ROUNDS)

    assert_same_state(module.net, expected)
    assert_private_parts(loop, private_parts)


def per_fedavg_by_hand(net, second_order):
    """With the true Hessian, or without."""
    data = make_unequal_data()

    def independent_batches(round_index, client):
        for epoch in range(100):
            draw = generator_for(SEED, "per_fedavg", round_index, client, epoch)
            yield from data.client_loader(client, "train", generator=draw)

    def loss_at(net, parameters, batch):
        names = [name for name, _ in net.named_parameters()]
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        logits = torch.func.functional_call(
            net,
            {
                **dict(zip(names, parameters)),
                **buffers,
            },
            batch[0],
        )

        return nn.functional.cross_entropy(logits, batch[1])

    def hessian_products(model, batch, direction):
        """The Hessian of the loss on a batch, times a direction."""
        parameters = list(model.parameters())
        loss = loss_at(model, parameters, batch)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(gradients, parameters, grad_outputs=direction)

    def train(model, visit):
        # A step is (I - alpha H(w)) g(w - alpha g(w)), each of the three on a batch of its own.
        other_batches = independent_batches(visit.round_index, visit.client)
        for batch in visit.batches:
            adapted = []
            for parameter, gradient in zip(
                model.parameters(),
                gradients_of(model, batch),
            ):
                moved = parameter.detach() - PER_FEDAVG_ALPHA * gradient
                adapted.append(moved.requires_grad_())
            loss_of_adapted = loss_at(model, adapted, next(other_batches))
            gradients_of_adapted = torch.autograd.grad(loss_of_adapted, adapted)
            if not second_order:
                descend(model, gradients_of_adapted)
                continue

            products = hessian_products(model, next(other_batches), gradients_of_adapted)
            steps = []
            for gradient, product in zip(gradients_of_adapted, products):
                steps.append(gradient - PER_FEDAVG_ALPHA * product)
            descend(model, steps)

    server, _ = fedavg_by_hand(net, train, uniform=True)
    return server


def test_first_order_per_fedavg_equals_its_algorithm_by_hand(tmp_path):
    net = network()
    module = Plain(copy.deepcopy(net), sgd)
    fit(
        make_loop(client_algorithm=PerFedAvg(PER_FEDAVG_ALPHA)),
        tmp_path,
        module,
        make_unequal_data(),
        rounds=ROUNDS,
    )

    assert_same_state(module.net, per_fedavg_by_hand(net, second_order=False))


@pytest.mark.slow
def test_hessian_free_per_fedavg_is_close_to_per_fedavg_with_the_hessian(tmp_path):
    layers = []
    for layer in network(batch_norm=False):
        layers.append(nn.Tanh() if isinstance(layer, nn.ReLU) else layer)

    net = nn.Sequential(*layers)
    module = Plain(copy.deepcopy(net), sgd)
    fit(
        make_loop(client_algorithm=PerFedAvg(PER_FEDAVG_ALPHA, "free")),
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


def scaffold_by_hand(net, failing=frozenset()):
    """Option II. The model, the server's control variate (the paper's c) and those of the clients (c_i)."""
    zeros = [torch.zeros_like(p) for p in net.parameters()]
    server_variate = list(zeros)
    client_variates = {client: list(zeros) for client in range(len(PROPORTIONS))}
    changes_of_round = []

    def train(model, visit):
        initial = copy_parameters(model)
        variates = client_variates[visit.client]
        num_steps = 0
        for batch in visit.batches:
            num_steps += 1
            corrected = []
            for gradient, variate, of_server in zip(
                gradients_of(model, batch), variates, server_variate
            ):
                corrected.append(gradient - variate + of_server)
            descend(model, corrected)

        # c_i - c + (x - y_i) / (K lr)
        next_variates = []
        for variate, of_server, initial_parameter, parameter in zip(
            variates, server_variate, initial, copy_parameters(model)
        ):
            mean_step = (initial_parameter - parameter) / (num_steps * LR)
            next_variates.append(variate - of_server + mean_step)
        changes = [new - old for new, old in zip(next_variates, variates)]
        changes_of_round.append(changes)
        client_variates[visit.client] = next_variates

    def merge(server, models, mean):
        # c + sum_i (change of c_i) / N
        next_server_variate = []
        for variate, *changes in zip(server_variate, *changes_of_round):
            next_server_variate.append(variate + sum(changes) / len(PROPORTIONS))
        server_variate[:] = next_server_variate
        changes_of_round.clear()
        return mean

    server, _ = fedavg_by_hand(
        net, train, cohorts=cohorts_by_hand(failing=failing), uniform=True, merge=merge
    )
    flat_variates = {client: flatten(variate) for client, variate in client_variates.items()}
    return server, flatten(server_variate), flat_variates


slow_sgd = make_sgd(0.02, momentum=0.9)


def feddyn_by_hand(net, failing=frozenset()):
    """With the local problem left to autograd. The model, the server's state (the paper's h) and the clients'
    gradients."""
    zeros = [torch.zeros_like(p) for p in net.parameters()]
    server_state = list(zeros)
    client_gradients = {client: list(zeros) for client in range(len(PROPORTIONS))}

    def train(model, visit):
        optimizer = slow_sgd(model.parameters())
        initial = copy_parameters(model)
        linear_terms = client_gradients[visit.client]
        for features, labels in visit.batches:
            optimizer.zero_grad()
            risk = nn.functional.cross_entropy(model(features), labels)
            # Minus <gradient, theta>, plus alpha / 2 |theta - initial|^2.
            for theta, linear, center in zip(
                model.parameters(),
                linear_terms,
                initial,
            ):
                squared_distance = ((theta - center) ** 2).sum()
                risk = risk - (linear * theta).sum() + ALPHA / 2 * squared_distance
            risk.backward()
            optimizer.step()

        next_gradients = []
        for gradient, trained, center in zip(linear_terms, copy_parameters(model), initial):
            next_gradients.append(gradient - ALPHA * (trained - center))
        client_gradients[visit.client] = next_gradients

    def merge(server, models, mean):
        # h - alpha / N sum_i (theta_i - theta), and the model is the mean - h / alpha.
        share = ALPHA / len(PROPORTIONS)
        trained = [copy_parameters(model) for model in models.values()]
        next_state = []
        for state, center, *client_parameters in zip(
            server_state, copy_parameters(server), *trained
        ):
            sum_of_moves = sum(parameter - center for parameter in client_parameters)
            next_state.append(state - share * sum_of_moves)
        server_state[:] = next_state
        set_parameters(
            mean,
            [
                parameter - state / ALPHA
                for parameter, state in zip(copy_parameters(mean), server_state)
            ],
        )
        return mean

    server, _ = fedavg_by_hand(
        net, train, cohorts=cohorts_by_hand(failing=failing), uniform=True, merge=merge
    )
    flat_gradients = {client: flatten(parts) for client, parts in client_gradients.items()}
    return server, flatten(server_state), flat_gradients


def make_scaffold_loop(**kwargs):
    return make_loop(client_algorithm=SCAFFOLD(), **kwargs)


def make_feddyn_loop():
    return make_loop(aggregator=FedDynServer(), client_algorithm=FedDyn(ALPHA))


def server_variate(loop):
    return loop.state_dict()["strategies"]["client_algorithm"]["variate"]


def feddyn_state(loop):
    return ALPHA * loop.state_dict()["strategies"]["aggregator"]["shift"]


class CaseWithState(NamedTuple):
    make_loop: Callable
    train_by_hand: Callable
    optimizer: Callable
    read_server_state: Callable
    name_of_client_state: str


CASES = {
    "scaffold": CaseWithState(
        make_loop=make_scaffold_loop,
        train_by_hand=scaffold_by_hand,
        optimizer=sgd,
        read_server_state=server_variate,
        name_of_client_state="control_variate",
    ),
    "feddyn": CaseWithState(
        make_loop=make_feddyn_loop,
        train_by_hand=feddyn_by_hand,
        optimizer=slow_sgd,
        read_server_state=feddyn_state,
        name_of_client_state="feddyn_gradient",
    ),
}


@pytest.mark.filterwarnings("ignore:.*returned a model with NaN or infinite entries")
@pytest.mark.parametrize("name", CASES)
def test_scaffold_control_variates_and_models_equal_those_by_hand(tmp_path, name):
    """Some clients fail in some rounds."""
    case = CASES[name]
    failing = {(0, 0), (1, 3), (3, 4)}
    assert all(client in cohort_of_round(round_index) for round_index, client in failing)

    net = network()
    expected_net, expected_server_state, expected_client_states = case.train_by_hand(net, failing)
    loop = case.make_loop()
    module = Diverges(net, case.optimizer, failing)
    fit(loop, tmp_path, module, make_unequal_data(), rounds=ROUNDS)

    assert_same_state(module.net, expected_net)
    # Of parameters: a BatchNorm's statistics would make them longer.
    assert_close(case.read_server_state(loop), expected_server_state)

    states = client_tensors(loop)
    for client, expected_state in expected_client_states.items():
        if client in states:
            assert_close(states[client][case.name_of_client_state], expected_state)
        else:
            assert not expected_state.any()  # it was never drawn, or has always failed

    mean_of_clients = sum(expected_client_states.values()) / len(PROPORTIONS)
    torch.testing.assert_close(expected_server_state, mean_of_clients, rtol=1e-5, atol=1e-6)
    assert expected_server_state.abs().max() > 1e-3


def test_scaffold_client_whose_update_is_excluded_changes_no_model_or_variate(tmp_path):
    """The server has not taken in what it sent, so its own variate must not have moved either."""
    net = network(batch_norm=False)
    failing = {(round_index, 0) for round_index in range(ROUNDS)}
    expected_net, expected_variate, client_variates = scaffold_by_hand(net, failing=failing)
    loop = make_scaffold_loop(
        uploads=[Scaling(1e6, clients=[0])],
        filters=[OutlierFilter(exclude=True)],
    )
    module = Plain(copy.deepcopy(net), sgd)

    with warns("excluded from the round"):
        fit(loop, tmp_path, module, make_unequal_data(), rounds=ROUNDS)

    assert_same_state(module.net, expected_net)
    assert_close(server_variate(loop), expected_variate)
    for client, state in client_tensors(loop).items():
        assert_close(state["control_variate"], client_variates[client])


def test_scaffold_reports_no_more_than_the_upload_and_nothing_without_a_step(tmp_path):
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


def make_sgd_of_two_rates(parameters):
    return torch.optim.SGD(
        [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(parameters)], lr=0.1
    )


ONE_SGD = r"one torch.optim.SGD with momentum=0 and a single learning rate"
TWO_SIDES = r"FedDyn needs a client algorithm and an aggregator, but got client_algorithm="


@pytest.mark.parametrize(
    ("make", "optimizer", "message"),
    [
        (lambda: make_ditto_loop(personalizer=FedAMP()), sgd, "Remove the personalizer"),
        (
            lambda: make_fedrep_loop(share="all"),
            sgd,
            r"FedRep\(\) trains parameters that stay at the client",
        ),
        (
            make_scaffold_loop,
            make_sgd(momentum=0.9),
            ONE_SGD,
        ),
        (make_scaffold_loop, partial(torch.optim.Adam, lr=0.1), ONE_SGD),
        (make_scaffold_loop, make_sgd_of_two_rates, ONE_SGD),
        (lambda: FederatedLoop(client_algorithm=FedDyn()), sgd, TWO_SIDES),
        (
            lambda: FederatedLoop(FedDynServer(), client_algorithm=FedProx()),
            sgd,
            TWO_SIDES,
        ),
    ],
)
def test_algorithm_with_unusable_settings_is_refused(tmp_path, make, optimizer, message):
    with refused(message):
        fit(make(), tmp_path, Plain(optimizer=optimizer), make_unequal_data())
