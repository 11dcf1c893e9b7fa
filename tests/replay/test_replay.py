"""Aggregators, client algorithms and uploads against a plain loop: a fit under partial participation, unequal steps and
an attack, resumed after two of four rounds."""

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from replay.plain import CLIENTS, MOMENTUM, Batches, PlainRound, Rule, Send, Train, replay, sgd
from torch import Tensor, nn

from flsv import aggregation
from flsv.attacks import InnerProductManipulation, SignFlip
from flsv.federation import FederatedLoop
from flsv.metrics import ContributionMetric, CosineGradientShapley
from flsv.metrics.base import latest
from flsv.sampling import UniformSampler
from flsv.training.algorithms import FedProx, MoreauSGD
from flsv.uploads import TopK, Upload
from flsv.utilities.seeding import generator_for
from helpers.fits import checkpoints, fit, vector
from helpers.loops_by_hand import COHORT, LOCAL_EPOCHS, ROUNDS, SEED, unequal_data
from helpers.models import Plain, network


class Moved(ContributionMetric):
    """How far each client moved in its last round, ``[n]``: values that aggregators read, known by hand."""

    per_class = False
    norms: Tensor

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("norms", torch.full((num_clients,), float("nan")), dist_reduce_fx=latest)

    def update(self, client_ids: Tensor, client_updates: Tensor) -> None:
        self.norms[client_ids] = client_updates.norm(dim=1).to(self.norms)

    def compute(self) -> Tensor:
        return self.norms


class MovedByClass(Moved):
    per_class = True

    def compute(self) -> Tensor:
        return self.norms[:, None] * torch.tensor([1.0, 2.0, 3.0])


def moved_so_far(round: PlainRound) -> dict[int, float]:
    kept = round.memory.setdefault("moved", {})
    kept.update({i: float((row - round.x).norm()) for i, row in round.rows.items()})
    return kept


def shares(round: PlainRound) -> list[float]:
    return [n / sum(round.samples.values()) for n in round.samples.values()]


def averaged(round: PlainRound) -> Tensor:
    return round.moved(shares(round))


def trimmed(round: PlainRound) -> Tensor:
    """Of three, the middle one, entry by entry."""
    return round.x + torch.stack([column.sort().values[1] for column in round.updates.T])


def median(round: PlainRound) -> Tensor:
    """Weiszfeld's steps in float64 until they stand still."""
    points, alpha = (
        torch.stack([*round.rows.values()]).double(),
        torch.tensor(shares(round)).double(),
    )
    z = alpha @ points
    for _ in range(2000):
        weights = alpha / (points - z).norm(dim=1)
        z = (weights / weights.sum()) @ points
    return z.float()


def bucketed(round: PlainRound) -> Tensor:
    """Two shuffled clients and the one that is left; buckets weigh as their samples."""
    order = torch.randperm(COHORT, generator=generator_for(SEED, "buckets", round.number)).tolist()
    rows, samples = [*round.updates], [*round.samples.values()]
    pair, (alone,) = order[:2], order[2:]
    n = sum(samples)
    of_pair = (rows[pair[0]] + rows[pair[1]]) / 2 * (samples[pair[0]] + samples[pair[1]]) / n
    return round.x + of_pair + rows[alone] * samples[alone] / n


def diverging(round: PlainRound) -> Tensor:
    """N_k - a F_k + b, F_k the Kullback-Leibler divergence of the labels from uniform, normalized in the cohort."""
    far = []
    for i in round.clients:
        p = [float(c) / float(round.class_counts[i].sum()) for c in round.class_counts[i]]
        far.append(sum(q * math.log(q * len(p)) for q in p if q > 0))
    weights = [max(0.0, n - 0.3 * f / sum(far) + 0.2) for n, f in zip(shares(round), far)]
    return round.moved([w / sum(weights) for w in weights])


def reputed(round: PlainRound) -> Tensor:
    """CGSV, equations 2 to 5: directions weighed by reputations; these learn the cosines with the aggregate.

    Data shares weigh in the first round, after which reputations are the cosines' shares; who comes later starts from
    the mean. A cohort keeps the sum of its reputations.
    """
    held = round.memory.setdefault("reputation", {})
    mean = sum(held.values()) / max(len(held), 1)
    before = shares(round) if not held else [held.get(i, mean) for i in round.clients]
    directions = round.updates / round.updates.norm(dim=1, keepdim=True)
    weights = torch.tensor([b / sum(before) for b in before])
    aggregate = weights @ directions
    cosines = torch.nn.functional.cosine_similarity(directions, aggregate[None]).tolist()
    kept = 0.6 if held else 0.0
    total = sum(before)
    after = [max(kept * b / total + 0.4 * c, 1e-3) for b, c in zip(before, cosines)]
    held.update({i: a / sum(after) * total for i, a in zip(round.clients, after)})
    return round.x + 0.5 * aggregate


def class_weighted(round: PlainRound) -> Tensor:
    """ShapFed, equation 6: gamma is the mean over classes of (1 + value) / 2; values are 1, 2 and 3 times the norm."""
    kept = moved_so_far(round)
    gamma = [sum((1 + c * kept[i]) / 2 for c in (1, 2, 3)) / 3 for i in round.clients]
    return round.moved([g / sum(gamma) for g in gamma])


def softmax(round: PlainRound) -> Tensor:
    kept = moved_so_far(round)
    powers = [math.exp(kept[i] / 0.5) for i in round.clients]
    return round.moved([0.7 * p / sum(powers) for p in powers])


def weighted_by_chance(round: PlainRound) -> Tensor:
    """Value shares among *all* clients, unseen ones the mean of the others, over the chance of 3 in 5."""
    kept = moved_so_far(round)
    mean = sum(kept.values()) / len(kept)
    total = sum(kept.get(i, mean) for i in range(CLIENTS))
    return round.moved([kept[i] / total / (COHORT / CLIENTS) for i in round.clients])


def estimated(round: PlainRound) -> Tensor:
    kept = moved_so_far(round)
    return round.moved([kept[i] / sum(kept[j] for j in round.clients) for i in round.clients])


def normalized(round: PlainRound) -> Tensor:
    """FedNova, equation 4: what a client's gradients count in its update adds up to |a|; the mean of it is gone."""
    lengths = [
        sum(MOMENTUM**k for first in range(n) for k in range(n - first))
        for n in round.steps.values()
    ]
    effective = sum(p * length for p, length in zip(shares(round), lengths))
    return round.moved([effective * p / length for p, length in zip(shares(round), lengths)])


def optimized(rule: str, lr: float) -> Rule:
    """Reddi et al., algorithms 1 and 2, with beta1 = 0.9, beta2 = 0.5, tau = 1e-3."""

    def step(round: PlainRound) -> Tensor:
        kept, delta = round.memory, averaged(round) - round.x
        if rule == "momentum":
            kept["m"] = 0.9 * kept.get("m", 0.0) + delta
            return round.x + lr * kept["m"]
        kept["m"] = 0.9 * kept.get("m", 0.0) + 0.1 * delta
        v = kept.get("v", torch.full_like(delta, 1e-6))
        adam = 0.5 * v + 0.5 * delta**2
        kept["v"] = adam if rule == "adam" else v - 0.5 * delta**2 * torch.sign(v - delta**2)
        return round.x + lr * kept["m"] / (kept["v"].sqrt() + 1e-3)

    return step


def flipped(round: PlainRound) -> None:
    change(round, 1, lambda d: -d)


def change(round: PlainRound, client: int, how: Callable[[Tensor], Tensor]) -> None:
    if client in round.rows:
        round.rows[client] = round.x + how(round.rows[client] - round.x)


def compressed(compress: Callable[[Tensor, int, int], Tensor], feedback: bool = True) -> Send:
    """p = d + e, C(p), e = p - C(p)."""

    def send(round: PlainRound) -> None:
        errors = round.memory.setdefault("errors", {})
        for i in round.clients:
            p = round.rows[i] - round.x + errors.get(i, 0.0)
            sent = compress(p, round.number, i)
            errors[i] = p - sent if feedback else 0.0
            round.rows[i] = round.x + sent

    return send


def largest(p: Tensor, number: int, client: int) -> Tensor:
    """The tenth of the largest magnitude, by sorting."""
    kept = set(sorted(range(len(p)), key=lambda j: -abs(p[j]))[: math.ceil(0.1 * len(p))])
    return torch.stack([each if j in kept else torch.zeros(()) for j, each in enumerate(p)])


def opposite(round: PlainRound) -> None:
    """Xie et al.: against the mean, as long as the median of the lengths."""
    known = round.updates.double()
    mean = known.mean(0)
    sent = -mean / mean.norm() * statistics.median(float(each.norm()) for each in known)
    for i in (0, 2):
        change(round, i, lambda d: sent.float())


def proximal(net: nn.Module, epochs: Batches) -> None:
    """SGD with momentum of the loss and mu/2 |w - w_0|^2."""
    start = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    for x, y in epochs:
        optimizer.zero_grad()
        far = sum(((p - q) ** 2).sum() for p, q in zip(net.parameters(), start))
        (nn.functional.cross_entropy(net(x), y) + 0.25 * far).backward()
        optimizer.step()


def moreau(net: nn.Module, epochs: Batches) -> None:
    """pFedMe, algorithm 1: two steps of theta towards the proximal point, one of w towards theta; w is sent."""
    w = [p.detach().clone() for p in net.parameters()]
    for x, y in epochs:
        for _ in range(2):
            gradients = torch.autograd.grad(
                nn.functional.cross_entropy(net(x), y), list(net.parameters())
            )
            with torch.no_grad():
                for theta, gradient, own in zip(net.parameters(), gradients, w):
                    theta -= 0.05 * (gradient + 3.0 * (theta - own))
        w = [own - 0.1 * 3.0 * (own - theta.detach()) for own, theta in zip(w, net.parameters())]
    with torch.no_grad():
        for theta, own in zip(net.parameters(), w):
            theta.copy_(own)


@dataclass(frozen=True)
class Case:
    rule: Rule = averaged
    make: Callable[[], aggregation.Aggregator] = aggregation.FedAvg
    train: Train = sgd
    send: Send | None = flipped
    uploads: Callable[[], list[Upload]] = lambda: [SignFlip(clients=[1])]
    options: Callable[[], dict[str, Any]] = dict
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    tolerance: float = 1e-5


def reads(
    metric: Callable[[], ContributionMetric], name: str = "moved"
) -> Callable[[], dict[str, Any]]:
    return lambda: {"metrics": {name: metric()}}


CASES: dict[str, Case] = {
    "FedAvg": Case(),
    "TrimmedMean": Case(trimmed, lambda: aggregation.TrimmedMean(0.34)),
    "GeometricMedian": Case(
        median, lambda: aggregation.GeometricMedian(1e-9, 2000, 0.0), tolerance=1e-4
    ),
    "Bucketing": Case(bucketed, lambda: aggregation.Bucketing(aggregation.FedAvg("samples"), 2)),
    "DivergenceWeighted": Case(diverging, lambda: aggregation.DivergenceWeighted(0.3, 0.2)),
    "CGSV": Case(
        reputed,
        lambda: aggregation.CGSV(scale=0.5),
        options=reads(lambda: CosineGradientShapley(alpha=0.6), "cgsv"),
    ),
    "ShapFedWA": Case(
        class_weighted, lambda: aggregation.ShapFedWA("moved"), options=reads(MovedByClass)
    ),
    "ShapleySoftmax": Case(
        softmax, lambda: aggregation.ShapleySoftmax("moved", 0.7, 0.5), options=reads(Moved)
    ),
    "ShapleyWeighted": Case(
        weighted_by_chance, lambda: aggregation.ShapleyWeighted("moved"), options=reads(Moved)
    ),
    "FedCE": Case(estimated, lambda: aggregation.FedCE("moved"), options=reads(Moved)),
    "FedNova": Case(normalized, aggregation.FedNova),
    "FedAvgM": Case(optimized("momentum", 0.5), lambda: aggregation.FedAvgM(lr=0.5)),
    "FedAdam": Case(optimized("adam", 0.03), lambda: aggregation.FedAdam(lr=0.03, beta2=0.5)),
    "FedYogi": Case(optimized("yogi", 0.03), lambda: aggregation.FedYogi(lr=0.03, beta2=0.5)),
    "FedProx": Case(train=proximal, options=lambda: {"client_algorithm": FedProx(mu=0.5)}),
    "MoreauSGD": Case(
        train=moreau,
        optimizer=lambda p: MoreauSGD(p, lr=0.05, outer_lr=0.1, lamda=3.0, inner_steps=2),
    ),
    "TopK": Case(send=compressed(largest), uploads=lambda: [TopK(0.1)]),
    "TopK alone": Case(
        send=compressed(largest, feedback=False), uploads=lambda: [TopK(0.1, error_feedback=False)]
    ),
    "InnerProductManipulation": Case(
        send=opposite, uploads=lambda: [InnerProductManipulation(1.0, clients=[0, 2])]
    ),
}


def federation(case: Case) -> FederatedLoop:
    return FederatedLoop(
        case.make(), sampler=UniformSampler(COHORT), local_epochs=LOCAL_EPOCHS, uploads=case.uploads(), filters=[],
        seed=SEED, **case.options(),
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_federation_resumed_after_two_rounds_equals_the_plain_loop(
    name: str, tmp_path: Path
) -> None:
    """A whole fit is the same to the bit, as tests/federation/test_resume.py shows."""
    case, net = CASES[name], network(batch_norm=False)
    module = Plain(copy.deepcopy(net), *([case.optimizer] if case.optimizer else []))
    saving: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [checkpoints(tmp_path)]}
    fit(federation(case), tmp_path, copy.deepcopy(module), unequal_data(), rounds=2, **saving)
    path = tmp_path / "checkpoints/last.ckpt"
    fit(federation(case), tmp_path / "rest", module, unequal_data(), rounds=ROUNDS, ckpt_path=path)
    expected = replay(net, case.rule, case.train, case.send)
    torch.testing.assert_close(
        vector(module).float(), expected, rtol=case.tolerance, atol=case.tolerance
    )


def test_plain_loops_of_different_cases_differ() -> None:
    """Or one of them would pass for another."""
    found = {
        name: replay(network(batch_norm=False), case.rule, case.train, case.send)
        for name, case in CASES.items()
    }
    alike = [
        (a, b) for a in found for b in found if a < b and (found[a] - found[b]).abs().max() < 1e-3
    ]
    assert alike == []
