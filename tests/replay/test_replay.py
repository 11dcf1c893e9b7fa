"""Aggregators, client algorithms and uploads against a plain loop: a fit under partial participation, unequal steps and
an attack, resumed after two of four rounds."""

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from replay.plain import CLIENTS, MOMENTUM, Rule, Send, Train, replay, sgd
from torch import Tensor, nn

from flsv import aggregation
from flsv.attacks import InnerProductManipulation, SignFlip
from flsv.federation import FederatedLoop
from flsv.functional import divergence_weights, label_divergence
from flsv.metrics import ContributionMetric, CosineGradientShapley
from flsv.metrics.base import latest
from flsv.sampling import UniformSampler
from flsv.training.algorithms import MoreauSGD
from flsv.uploads import TopK, Upload
from flsv.utilities.seeding import generator_for
from helpers.fits import fit, fit_and_save, state_vector
from helpers.loops_by_hand import COHORT, LOCAL_EPOCHS, ROUNDS, SEED, make_unequal_data
from helpers.models import Plain, network


class Moved(ContributionMetric):
    """How far each client moved in its last round, ``[n]``: values that aggregators read, known by hand."""

    per_class = False
    norms: Tensor

    def init_states(self, num_clients, num_classes):
        norms = torch.full((num_clients,), float("nan"))
        self.add_state("norms", norms, dist_reduce_fx=latest)

    def update(self, client_ids, client_updates):
        self.norms[client_ids] = client_updates.norm(dim=1).to(self.norms)

    def compute(self):
        return self.norms


def distance_moved(round):
    norms = round.memory.setdefault("moved", {})
    norms.update({i: float((row - round.x).norm()) for i, row in round.rows.items()})
    return norms


def sample_shares(round):
    total = sum(round.samples.values())
    return [count / total for count in round.samples.values()]


def weighted_mean(round):
    return round.moved(sample_shares(round))


def geometric_median(round):
    """Weiszfeld's steps in float64 until they stand still."""
    points = torch.stack([*round.rows.values()]).double()
    alpha = torch.tensor(sample_shares(round)).double()
    z = alpha @ points

    for _ in range(2000):
        weights = alpha / (points - z).norm(dim=1)
        z = (weights / weights.sum()) @ points

    return z.float()


def mean_of_buckets(round):
    """Two shuffled clients and the one that is left; buckets weigh as their samples."""
    generator = generator_for(SEED, "buckets", round.number)
    order = torch.randperm(COHORT, generator=generator).tolist()
    samples = [*round.samples.values()]
    (a, b), (single,) = order[:2], order[2:]
    total = sum(samples)
    mean_of_pair = (round.updates[a] + round.updates[b]) / 2
    share_of_pair = (samples[a] + samples[b]) / total
    share_of_single = samples[single] / total

    return round.x + mean_of_pair * share_of_pair + round.updates[single] * share_of_single


def mean_by_divergence(round):
    """By the weights that tests/functional/test_divergences.py compares with NumPy's."""
    samples = torch.tensor([*round.samples.values()])
    divergences = label_divergence(round.class_counts[round.clients])
    weights = divergence_weights(samples, divergences, a=0.3, b=0.2)
    return round.moved(weights)


def mean_by_reputation(round):
    """CGSV, equations 2 to 5: directions weighed by reputations; these learn the cosines with the aggregate.

    Data shares weigh in the first round, after which reputations are the cosines' shares; who comes later starts from
    the mean. A cohort keeps the sum of its reputations.
    """
    gamma = 0.5  # the length of the aggregate
    share_of_cosine = 0.4
    least_reputation = 1e-3

    reputations = round.memory.setdefault("reputation", {})
    if reputations:
        mean = sum(reputations.values()) / len(reputations)
        initial = [reputations.get(client, mean) for client in round.clients]
        momentum = 0.6  # 1 - share_of_cosine
    else:
        initial = sample_shares(round)
        momentum = 0.0

    total = sum(initial)
    directions = round.updates / round.updates.norm(
        dim=1,
        keepdim=True,
    )
    weights = torch.tensor([reputation / total for reputation in initial])
    aggregate = weights @ directions
    cosines = torch.nn.functional.cosine_similarity(directions, aggregate[None]).tolist()

    updated = []
    for reputation, cosine in zip(initial, cosines):
        learned = momentum * reputation / total + share_of_cosine * cosine
        updated.append(max(learned, least_reputation))
    for client, reputation in zip(round.clients, updated):
        reputations[client] = reputation / sum(updated) * total

    return round.x + gamma * aggregate


def mean_by_softmax(round):
    norms = distance_moved(round)
    powers = [math.exp(norms[client] / 0.5) for client in round.clients]
    total = sum(powers)
    return round.moved([0.7 * power / total for power in powers])


def weighted_by_chance(round):
    """Value shares among *all* clients, unseen ones the mean of the others, over the chance of 3 in 5."""
    norms = distance_moved(round)
    mean = sum(norms.values()) / len(norms)
    total = sum(norms.get(client, mean) for client in range(CLIENTS))
    chance = COHORT / CLIENTS
    return round.moved([norms[client] / total / chance for client in round.clients])


def fednova_mean(round):
    """FedNova, equation 4: what a client's gradients count in its update adds up to |a|; the mean of it is gone."""
    # A gradient counts in the step that reads it and, by momentum, in all later ones.
    lengths = []
    for num_steps in round.steps.values():
        length = 0.0
        for step in range(num_steps):
            for age in range(num_steps - step):
                length += MOMENTUM**age
        lengths.append(length)

    shares = sample_shares(round)
    mean_length = sum(share * length for share, length in zip(shares, lengths))
    return round.moved([mean_length * share / length for share, length in zip(shares, lengths)])


def with_server_optimizer(rule, lr):
    """Reddi et al., algorithms 1 and 2, with the paper's names."""
    beta1 = 0.9
    beta2 = 0.5
    tau = 1e-3

    def momentum_step(round):
        memory = round.memory
        delta = weighted_mean(round) - round.x
        memory["m"] = beta1 * memory.get("m", 0.0) + delta
        return round.x + lr * memory["m"]

    def adaptive_step(round):
        memory = round.memory
        delta = weighted_mean(round) - round.x
        memory["m"] = beta1 * memory.get("m", 0.0) + (1 - beta1) * delta

        v = memory.get("v", torch.full_like(delta, tau**2))
        if rule == "adam":
            memory["v"] = beta2 * v + (1 - beta2) * delta**2
        else:
            memory["v"] = v - (1 - beta2) * delta**2 * torch.sign(v - delta**2)

        return round.x + lr * memory["m"] / (memory["v"].sqrt() + tau)

    if rule == "momentum":
        return momentum_step
    return adaptive_step


def flip_sign(round):
    change_update(round, 1, lambda d: -d)


def change_update(round, client, how):
    if client in round.rows:
        round.rows[client] = round.x + how(round.rows[client] - round.x)


def with_compression(compress, feedback=True):
    """p = d + e, C(p), e = p - C(p): the error e is what compression has left out so far."""

    def send(round):
        errors = round.memory.setdefault("errors", {})
        for client in round.clients:
            update = round.rows[client] - round.x
            corrected_update = update + errors.get(client, 0.0)
            sent = compress(corrected_update, round.number, client)

            if feedback:
                errors[client] = corrected_update - sent
            round.rows[client] = round.x + sent

    return send


def keep_largest(p, number, client):
    """The tenth of the largest magnitude, by sorting."""
    by_magnitude = sorted(
        range(len(p)),
        key=lambda index: -abs(p[index]),
    )
    is_sent = torch.zeros(len(p), dtype=torch.bool)
    is_sent[by_magnitude[: math.ceil(0.1 * len(p))]] = True

    return p.where(is_sent, torch.zeros(()))


def send_opposite_of_mean(round):
    """Xie et al.: against the mean, as long as the median of the lengths."""
    updates = round.updates.double()
    mean = updates.mean(0)
    direction = -mean / mean.norm()
    lengths = [float(update.norm()) for update in updates]
    sent = (statistics.median(lengths) * direction).float()

    for attacker in (0, 2):
        change_update(round, attacker, lambda update: sent)


def train_moreau(net, epochs):
    """pFedMe, algorithm 1: two steps of theta towards the proximal point, one of w towards theta; w is sent."""
    lr = 0.05
    outer_lr = 0.1
    lamda = 3.0
    inner_steps = 2

    local_model = [parameter.detach().clone() for parameter in net.parameters()]  # the paper's w
    thetas = list(net.parameters())
    for x, y in epochs:
        for _ in range(inner_steps):
            loss = nn.functional.cross_entropy(net(x), y)
            gradients = torch.autograd.grad(loss, thetas)
            with torch.no_grad():
                for theta, gradient, anchor in zip(thetas, gradients, local_model):
                    theta -= lr * (gradient + lamda * (theta - anchor))

        moved_model = []
        for parameter, theta in zip(local_model, thetas):
            moved_model.append(parameter - outer_lr * lamda * (parameter - theta.detach()))
        local_model = moved_model

    with torch.no_grad():
        for theta, parameter in zip(thetas, local_model):
            theta.copy_(parameter)


@dataclass(frozen=True)
class Case:
    rule: Rule = weighted_mean
    make: Callable[[], aggregation.Aggregator] = aggregation.FedAvg
    train: Train = sgd
    send: Send | None = flip_sign
    uploads: Callable[[], list[Upload]] = lambda: [SignFlip(clients=[1])]
    options: Callable[[], dict[str, Any]] = dict
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    tolerance: float = 1e-5


def read_metric(metric, name="moved"):
    return lambda: {"metrics": {name: metric()}}


CASES = {
    "FedAvg": Case(),
    "GeometricMedian": Case(
        geometric_median, lambda: aggregation.GeometricMedian(1e-9, 2000, 0.0), tolerance=1e-4
    ),
    "Bucketing": Case(
        mean_of_buckets, lambda: aggregation.Bucketing(aggregation.FedAvg("samples"), 2)
    ),
    "DivergenceWeighted": Case(
        mean_by_divergence, lambda: aggregation.DivergenceWeighted(0.3, 0.2)
    ),
    "CGSV": Case(
        mean_by_reputation,
        lambda: aggregation.CGSV(scale=0.5),
        options=read_metric(lambda: CosineGradientShapley(alpha=0.6), "cgsv"),
    ),
    "ShapleySoftmax": Case(
        mean_by_softmax,
        lambda: aggregation.ShapleySoftmax("moved", 0.7, 0.5),
        options=read_metric(Moved),
    ),
    "ShapleyWeighted": Case(
        weighted_by_chance, lambda: aggregation.ShapleyWeighted("moved"), options=read_metric(Moved)
    ),
    "FedNova": Case(fednova_mean, aggregation.FedNova),
    "FedAvgM": Case(with_server_optimizer("momentum", 0.5), lambda: aggregation.FedAvgM(lr=0.5)),
    "FedAdam": Case(
        with_server_optimizer("adam", 0.03), lambda: aggregation.FedAdam(lr=0.03, beta2=0.5)
    ),
    "FedYogi": Case(
        with_server_optimizer("yogi", 0.03), lambda: aggregation.FedYogi(lr=0.03, beta2=0.5)
    ),
    "MoreauSGD": Case(
        train=train_moreau,
        optimizer=lambda p: MoreauSGD(p, lr=0.05, outer_lr=0.1, lamda=3.0, inner_steps=2),
    ),
    "TopK": Case(send=with_compression(keep_largest), uploads=lambda: [TopK(0.1)]),
    "TopK alone": Case(
        send=with_compression(keep_largest, feedback=False),
        uploads=lambda: [TopK(0.1, error_feedback=False)],
    ),
    "InnerProductManipulation": Case(
        send=send_opposite_of_mean, uploads=lambda: [InnerProductManipulation(1.0, clients=[0, 2])]
    ),
}


def make_loop(case):
    return FederatedLoop(
        case.make(),
        sampler=UniformSampler(COHORT),
        local_epochs=LOCAL_EPOCHS,
        uploads=case.uploads(),
        filters=[],
        seed=SEED,
        **case.options(),
    )


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("name", CASES)
def test_federation_resumed_after_two_rounds_equals_the_plain_loop(name, tmp_path):
    """A whole fit is the same to the bit, as tests/federation/test_resume.py shows."""
    case = CASES[name]
    net = network(batch_norm=False)
    module = Plain(copy.deepcopy(net))

    if case.optimizer is not None:
        module = Plain(copy.deepcopy(net), case.optimizer)

    stopped = copy.deepcopy(module)
    checkpoint = fit_and_save(make_loop(case), tmp_path, stopped, make_unequal_data(), rounds=2)
    fit(make_loop(case), tmp_path / "rest", module, make_unequal_data(), ROUNDS, checkpoint)

    expected = replay(net, case.rule, case.train, case.send)
    tolerance = case.tolerance

    torch.testing.assert_close(
        state_vector(module).float(),
        expected,
        rtol=tolerance,
        atol=tolerance,
    )
