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
from helpers.fits import all_samples, assert_private_parts, client_tensors, fit
from helpers.loops_by_hand import (
    PROPORTIONS,
    ROUNDS,
    SEED,
    assert_same_state,
    cohort_of_round,
    cohorts_by_hand,
    cross_entropy_of,
    fedavg_by_hand,
    make_unequal_data,
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


def fit_unequal_clients(loop, folder, module, rounds=ROUNDS):
    fit(loop, folder, module, make_unequal_data(), rounds=rounds)


def flatten(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def vector_of(model):
    """Return a model's parameters as one vector: everything by hand below is computed with such vectors."""
    return flatten(model.parameters())


def set_vector(model, vector):
    nn.utils.vector_to_parameters(vector, model.parameters())


def loss_of(model, batch):
    features, labels = batch
    return nn.functional.cross_entropy(model(features), labels)


def gradient_of(model, batch):
    return flatten(torch.autograd.grad(loss_of(model, batch), list(model.parameters())))


def descend(model, gradient, lr=LR):
    set_vector(model, vector_of(model) - lr * gradient)


assert_close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)


# ---- Ditto


def make_ditto_loop(**kwargs):
    return make_loop(**{"client_algorithm": Ditto(DITTO_LAMBDA, DITTO_LR), **kwargs})


class DittoByHand:
    """A client trains its model of the round, w, and beside it a personal model, v, that it keeps."""

    def __init__(self):
        self.personal_models = {}

    def train(self, model, visit):
        if visit.client not in self.personal_models:
            self.personal_models[visit.client] = copy.deepcopy(model)
        personal_model = self.personal_models[visit.client]
        global_vector = vector_of(model)

        for batch in visit.batches:
            # The gradient of the loss at v, plus lambda (v - w).
            distance = vector_of(personal_model) - global_vector
            proximal_gradient = gradient_of(personal_model, batch) + DITTO_LAMBDA * distance
            descend(personal_model, proximal_gradient, lr=DITTO_LR)
            descend(model, gradient_of(model, batch))


class DittoRuns(NamedTuple):
    """A fit of flsv, and the models that the algorithm by hand comes to."""

    loop: FederatedLoop
    net: nn.Module
    expected_net: nn.Module
    expected_personal_models: dict[int, nn.Module]


@pytest.fixture(scope="module")
def ditto_runs(tmp_path_factory):
    net = network()
    by_hand = DittoByHand()
    expected_net, _ = fedavg_by_hand(net, by_hand.train, uniform=True)

    loop = make_ditto_loop(evaluation=ClientEvaluation(every=ROUNDS))
    module = Plain(copy.deepcopy(net), sgd)
    fit_unequal_clients(loop, tmp_path_factory.mktemp("ditto"), module)

    return DittoRuns(loop, module.net, expected_net, by_hand.personal_models)


@pytest.mark.slow
def test_ditto_global_model_equals_that_by_hand(ditto_runs):
    assert_same_state(ditto_runs.net, ditto_runs.expected_net)


@pytest.mark.slow
def test_ditto_personal_models_equal_those_by_hand(ditto_runs):
    """A client keeps its model as a vector of the parameters, then of a BatchNorm's statistics."""
    expected_vectors = {}
    for client, model in ditto_runs.expected_personal_models.items():
        statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        expected_vectors[client] = flatten([*model.parameters(), *statistics])

    states = client_tensors(ditto_runs.loop)
    vectors = {client: state["ditto_model"] for client, state in states.items()}
    torch.testing.assert_close(vectors, expected_vectors, rtol=1e-5, atol=1e-5)


def accuracy_of(model, batches):
    features, labels = all_samples(batches)
    model.eval()
    is_right = model(features).argmax(1) == labels
    return is_right.double().mean().item()


def test_ditto_tests_clients_with_personal_models_and_those_never_drawn_with_the_global_one(
    ditto_runs,
):
    data = make_unequal_data()
    all_clients = range(len(PROPORTIONS))
    models = dict.fromkeys(all_clients, ditto_runs.expected_net)
    models.update(ditto_runs.expected_personal_models)
    expected_accuracies = []
    for client in all_clients:
        test_batches = data.client_loader(client, "test")
        expected_accuracies.append(accuracy_of(models[client], test_batches))

    accuracies = ditto_runs.loop.client_scores["accuracy"].tolist()
    # Scores are told in three significant digits.
    assert accuracies == pytest.approx(expected_accuracies, rel=5e-3)


# ---- FedRep


def make_fedrep_loop(**kwargs):
    return make_loop(**{"client_algorithm": FedRep(head_epochs=1), "share": ["!head"], **kwargs})


HEAD = ["4.weight", "4.bias"]
decaying_sgd = make_sgd(momentum=0.5, weight_decay=0.01)


def require_gradients(model, *, of_head, of_body):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(of_head if name in HEAD else of_body)


def train_head_then_body(model, visit):
    """One epoch for the head, then one for the body, as the authors' code has it: by requires_grad."""
    head_epoch, body_epoch = visit.epochs
    optimizer = decaying_sgd(model.parameters())

    require_gradients(model, of_head=True, of_body=False)
    take_steps(optimizer, cross_entropy_of(model), head_epoch)

    require_gradients(model, of_head=False, of_body=True)
    take_steps(optimizer, cross_entropy_of(model), body_epoch)

    model.requires_grad_(True)


@pytest.mark.filterwarnings("ignore:.*tensors stay at their clients.*")
def test_fedrep_body_and_heads_equal_those_by_hand(tmp_path):
    net = network()
    expected_net, expected_heads = fedavg_by_hand(
        net, train_head_then_body, private=HEAD, uniform=True
    )
    loop = make_fedrep_loop()
    module = Plain(copy.deepcopy(net), decaying_sgd)
    fit_unequal_clients(loop, tmp_path, module)

    assert_same_state(module.net, expected_net)
    assert_private_parts(loop, expected_heads)


# ---- Per-FedAvg


def independent_batches(visit):
    """Yield a client's batches in the orders that Per-FedAvg draws beside those of its epochs."""
    data = make_unequal_data()
    for epoch in range(100):
        draw = generator_for(SEED, "per_fedavg", visit.round_index, visit.client, epoch)
        yield from data.client_loader(visit.client, "train", generator=draw)


def hessian_product(model, batch, direction):
    """Return the Hessian of the loss on a batch, times a direction."""
    # A copy, since a BatchNorm would take the batch into its statistics.
    copied_model = copy.deepcopy(model)
    parameters = list(copied_model.parameters())
    loss = loss_of(copied_model, batch)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    gradient = nn.utils.parameters_to_vector(gradients)
    return flatten(torch.autograd.grad(gradient, parameters, grad_outputs=direction))


def train_by_per_fedavg(model, visit, *, second_order):
    """A step is (I - alpha H(w)) g(w - alpha g(w)), each of the three on a batch of its own; the first order is
    without H."""
    other_batches = independent_batches(visit)
    for batch in visit.batches:
        adapted_model = copy.deepcopy(model)
        descend(adapted_model, gradient_of(model, batch), lr=PER_FEDAVG_ALPHA)
        step = gradient_of(adapted_model, next(other_batches))
        if second_order:
            step -= PER_FEDAVG_ALPHA * hessian_product(model, next(other_batches), step)
        descend(model, step)


def per_fedavg_by_hand(net, *, second_order):
    train = partial(train_by_per_fedavg, second_order=second_order)
    server, _ = fedavg_by_hand(net, train, uniform=True)
    return server


def fit_per_fedavg(folder, net, algorithm):
    """Return the network that flsv trains, which begins as this one."""
    loop = make_loop(client_algorithm=algorithm)
    module = Plain(copy.deepcopy(net), sgd)
    fit_unequal_clients(loop, folder, module)
    return module.net


@pytest.mark.slow
def test_first_order_per_fedavg_equals_its_algorithm_by_hand(tmp_path):
    net = network()
    trained_net = fit_per_fedavg(tmp_path, net, PerFedAvg(PER_FEDAVG_ALPHA))

    assert_same_state(trained_net, per_fedavg_by_hand(net, second_order=False))


def make_smooth_network():
    """With Tanh in ReLU's place, whose second derivative would be 0."""
    layers = []
    for layer in network(batch_norm=False):
        layers.append(nn.Tanh() if isinstance(layer, nn.ReLU) else layer)
    return nn.Sequential(*layers)


@pytest.mark.slow
def test_hessian_free_per_fedavg_is_close_to_per_fedavg_with_the_hessian(tmp_path):
    net = make_smooth_network()
    trained_net = fit_per_fedavg(tmp_path, net, PerFedAvg(PER_FEDAVG_ALPHA, "free"))

    hessian_free = vector_of(trained_net)
    second_order = vector_of(per_fedavg_by_hand(net, second_order=True))
    first_order = vector_of(per_fedavg_by_hand(net, second_order=False))
    largest_error = (hessian_free - second_order).abs().max()
    largest_effect_of_hessian = (first_order - second_order).abs().max()
    assert largest_error < 0.02 * largest_effect_of_hessian


# ---- SCAFFOLD and FedDyn, whose server and clients keep a vector each


class ScaffoldByHand:
    """Option II. The server's state is the paper's control variate c, a client's is c_i."""

    def __init__(self, net):
        self.server_state = torch.zeros_like(vector_of(net))
        self.client_states = dict.fromkeys(range(len(PROPORTIONS)), self.server_state)
        self.changes_of_round = []

    def train(self, model, visit):
        initial_vector = vector_of(model)
        variate = self.client_states[visit.client]
        for batch in visit.batches:
            descend(model, gradient_of(model, batch) - variate + self.server_state)

        # The next c_i is c_i - c + (x - y_i) / (K lr).
        num_steps = len(visit.batches)
        mean_step = (initial_vector - vector_of(model)) / (num_steps * LR)
        change = mean_step - self.server_state
        self.client_states[visit.client] = variate + change
        self.changes_of_round.append(change)

    def merge(self, server, models, mean):
        # The next c is c + sum_i (change of c_i) / N. The model is the mean.
        mean_change = sum(self.changes_of_round) / len(PROPORTIONS)
        self.server_state = self.server_state + mean_change
        self.changes_of_round = []
        return mean


slow_sgd = make_sgd(0.02, momentum=0.9)


class FedDynByHand:
    """With the local problem left to autograd. The server's state is the paper's h, a client's its gradient."""

    def __init__(self, net):
        self.server_state = torch.zeros_like(vector_of(net))
        self.client_states = dict.fromkeys(range(len(PROPORTIONS)), self.server_state)

    def train(self, model, visit):
        initial_vector = vector_of(model)
        gradient = self.client_states[visit.client]
        compute_risk = partial(self.compute_risk, model, gradient, initial_vector)
        take_steps(slow_sgd(model.parameters()), compute_risk, visit.batches)

        move = vector_of(model) - initial_vector
        self.client_states[visit.client] = gradient - ALPHA * move

    def compute_risk(self, model, gradient, initial_vector, features, labels):
        # The loss, minus <gradient, theta>, plus alpha / 2 |theta - initial|^2.
        theta = nn.utils.parameters_to_vector(model.parameters())
        squared_distance = (theta - initial_vector).square().sum()
        loss = loss_of(model, (features, labels))
        return loss - gradient @ theta + ALPHA / 2 * squared_distance

    def merge(self, server, models, mean):
        # The next h is h - alpha / N sum_i (theta_i - theta), and the model is the mean - h / alpha.
        sum_of_moves = sum(vector_of(model) - vector_of(server) for model in models.values())
        self.server_state = self.server_state - ALPHA / len(PROPORTIONS) * sum_of_moves
        set_vector(mean, vector_of(mean) - self.server_state / ALPHA)
        return mean


def federate_by_hand(by_hand, net, failing):
    """Return the global model after all rounds. ``by_hand`` keeps the states of the server and the clients."""
    cohorts = cohorts_by_hand(failing=failing)
    server, _ = fedavg_by_hand(
        net, by_hand.train, cohorts=cohorts, uniform=True, merge=by_hand.merge
    )
    return server


def make_scaffold_loop(**kwargs):
    return make_loop(client_algorithm=SCAFFOLD(), **kwargs)


def make_feddyn_loop():
    return make_loop(aggregator=FedDynServer(), client_algorithm=FedDyn(ALPHA))


def read_server_variate(loop):
    return loop.state_dict()["strategies"]["client_algorithm"]["variate"]


def read_feddyn_state(loop):
    return ALPHA * loop.state_dict()["strategies"]["aggregator"]["shift"]


class CaseWithState(NamedTuple):
    """An algorithm by flsv and by hand."""

    make_loop: Callable
    make_optimizer: Callable
    make_by_hand: Callable
    read_server_state: Callable
    name_of_client_state: str


CASES = {
    "scaffold": CaseWithState(
        make_loop=make_scaffold_loop,
        make_optimizer=sgd,
        make_by_hand=ScaffoldByHand,
        read_server_state=read_server_variate,
        name_of_client_state="control_variate",
    ),
    "feddyn": CaseWithState(
        make_loop=make_feddyn_loop,
        make_optimizer=slow_sgd,
        make_by_hand=FedDynByHand,
        read_server_state=read_feddyn_state,
        name_of_client_state="feddyn_gradient",
    ),
}

#: Pairs of a round and a client.
FAILING = {(0, 0), (1, 3), (3, 4)}


class RunsWithState(NamedTuple):
    """What flsv and the algorithm by hand have trained while some clients failed, and their states."""

    net: nn.Module
    server_state: torch.Tensor
    client_states: dict[int, torch.Tensor]
    expected_net: nn.Module
    by_hand: ScaffoldByHand | FedDynByHand


@pytest.fixture(scope="module", params=CASES)
def runs_with_state(request, tmp_path_factory):
    case = CASES[request.param]
    net = network()
    by_hand = case.make_by_hand(net)
    expected_net = federate_by_hand(by_hand, net, FAILING)

    loop = case.make_loop()
    module = Diverges(net, case.make_optimizer, FAILING)
    folder = tmp_path_factory.mktemp(request.param)
    with warns("returned a model with NaN or infinite entries"):
        fit_unequal_clients(loop, folder, module)

    client_states = {}
    for client, state in client_tensors(loop).items():
        client_states[client] = state[case.name_of_client_state]
    return RunsWithState(
        module.net, case.read_server_state(loop), client_states, expected_net, by_hand
    )


def test_failing_clients_were_drawn_in_their_rounds():
    assert all(client in cohort_of_round(round_index) for round_index, client in FAILING)


def test_model_of_scaffold_and_feddyn_with_failing_clients_equals_that_by_hand(runs_with_state):
    assert_same_state(runs_with_state.net, runs_with_state.expected_net)


def test_server_state_of_scaffold_and_feddyn_equals_that_by_hand(runs_with_state):
    """It belongs to parameters: a BatchNorm's statistics would make it longer."""
    expected_state = runs_with_state.by_hand.server_state

    assert_close(runs_with_state.server_state, expected_state)
    assert expected_state.abs().max() > 1e-3


def test_client_states_of_scaffold_and_feddyn_equal_those_by_hand(runs_with_state):
    """Clients that were never drawn, or always failed, have none."""
    expected_states = {}
    for client, state in runs_with_state.by_hand.client_states.items():
        if state.any():
            expected_states[client] = state

    assert_close(runs_with_state.client_states, expected_states)


def test_scaffold_client_whose_update_is_excluded_changes_no_model_or_variate(tmp_path):
    """The server has not taken in what it sent, so its own variate must not have moved either."""
    net = network(batch_norm=False)
    by_hand = ScaffoldByHand(net)
    client_0_in_all_rounds = {(round_index, 0) for round_index in range(ROUNDS)}
    expected_net = federate_by_hand(by_hand, net, failing=client_0_in_all_rounds)

    loop = make_scaffold_loop(
        uploads=[Scaling(1e6, clients=[0])], filters=[OutlierFilter(exclude=True)]
    )
    module = Plain(copy.deepcopy(net), sgd)
    with warns("excluded from the round"):
        fit_unequal_clients(loop, tmp_path, module)

    assert_same_state(module.net, expected_net)
    assert_close(read_server_variate(loop), by_hand.server_state)
    for client, state in client_tensors(loop).items():
        assert_close(state["control_variate"], by_hand.client_states[client])


@pytest.mark.parametrize(
    ("uploads", "schedules", "limit"),
    [
        # The upload is then nearly the start point, and the change reported with it is no larger.
        ([GaussianPrivacy(clip=1e-9, noise_multiplier=0.0)], [], 1e-6),
        ([], [partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.0)], 0),
    ],
    ids=["uploads clipped to nothing", "a learning rate of zero"],
)
def test_scaffold_variate_stays_near_zero(tmp_path, uploads, schedules, limit):
    loop = make_scaffold_loop(uploads=uploads)
    module = Plain(network(batch_norm=False), sgd, *schedules)

    fit_unequal_clients(loop, tmp_path, module, rounds=2)

    assert read_server_variate(loop).abs().max() <= limit


# ---- settings that are refused


def make_sgd_of_two_rates(parameters):
    weight, *other_parameters = parameters
    return torch.optim.SGD([{"params": [weight], "lr": 0.2}, {"params": other_parameters}], lr=0.1)


ONE_SGD = r"one torch.optim.SGD with momentum=0 and a single learning rate"
TWO_SIDES = r"FedDyn needs a client algorithm and an aggregator, but got client_algorithm="


@pytest.mark.parametrize(
    ("make_loop_of_case", "make_optimizer", "message"),
    [
        (lambda: make_ditto_loop(personalizer=FedAMP()), sgd, "Remove the personalizer"),
        (
            lambda: make_fedrep_loop(share="all"),
            sgd,
            r"FedRep\(\) trains parameters that stay at the client",
        ),
        (make_scaffold_loop, make_sgd(momentum=0.9), ONE_SGD),
        (make_scaffold_loop, partial(torch.optim.Adam, lr=0.1), ONE_SGD),
        (make_scaffold_loop, make_sgd_of_two_rates, ONE_SGD),
        (lambda: FederatedLoop(client_algorithm=FedDyn()), sgd, TWO_SIDES),
        (lambda: FederatedLoop(FedDynServer(), client_algorithm=FedProx()), sgd, TWO_SIDES),
    ],
)
def test_algorithm_with_unusable_settings_is_refused(
    tmp_path, make_loop_of_case, make_optimizer, message
):
    module = Plain(optimizer=make_optimizer)
    with refused(message):
        fit(make_loop_of_case(), tmp_path, module, make_unequal_data())
