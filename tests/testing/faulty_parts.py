"""Parts with one fault each, for the checks to find: by check."""

from typing import Any

import torch

from flsv.aggregation import FedAvg
from flsv.metrics import ContributionMetric, LeaveOneOut
from flsv.metrics.base import latest
from flsv.personalization import Personalizer
from flsv.sampling import FullParticipation
from flsv.training.algorithms import ClientAlgorithm

NAN = float("nan")
Fault = tuple[str, Any]


def faulty(kind, **changes):
    """An object of a subclass with these attributes."""
    return type(f"Faulty{kind.__name__}", (kind,), changes)()


class Norm(ContributionMetric):
    """How far each client moved; without fault."""

    per_class = False
    initial_norm = NAN

    def init_states(self, num_clients, num_classes):
        self.add_state(
            "norms", torch.full((num_clients,), self.initial_norm), dist_reduce_fx=latest
        )
        self.calls = 0

    def update(self, client_ids, client_updates):
        self.norms[client_ids] = self.value(client_updates).to(self.norms)
        self.calls += 1

    def value(self, updates):
        return updates.norm(dim=1)

    def compute(self):
        return self.norms.clone()


class CountsBuffers(Norm):
    """Takes BatchNorm's statistics for updates."""

    def update(self, client_ids, state_updates):
        super().update(client_ids, state_updates)


class ComparesWithOthers(Norm):
    """Has no value for a client alone."""

    def value(self, updates):
        return updates.std(0).sum()


class PaysTheFirst(Norm):
    """Gives more to a client, the earlier it stands in the cohort."""

    def value(self, updates):
        return updates.norm(dim=1) / (1 + torch.arange(len(updates)))


class LossDrop(ContributionMetric):
    """How far losses have fallen since the first round, of which a merged state has the later one."""

    per_class = False
    reduction = staticmethod(latest)

    def init_states(self, num_clients, num_classes):
        for name in ("first", "last"):
            self.add_state(name, torch.full((num_clients,), NAN), dist_reduce_fx=self.reduction)

    def update(self, client_ids, losses):
        losses = losses.to(self.first)
        first_losses = self.first[client_ids]
        self.first[client_ids] = torch.where(first_losses.isnan(), losses, first_losses)
        self.last[client_ids] = losses

    def compute(self):
        return self.first - self.last


class CountsRounds(LossDrop):
    """Counts each client's rounds, and starts again where states are merged."""

    def update(self, client_ids, losses):
        self.first[client_ids] = self.first[client_ids].nan_to_num() + 1
        self.last[client_ids] = 0


class ByPosition(Norm):
    """Gives values to the clients of the lowest ids, whoever was in the round."""

    def update(self, client_ids, client_updates):
        super().update(torch.arange(len(client_ids)), client_updates)


def left_out(change, claim="value"):
    """LeaveOneOut with changed values, of which it claims something."""
    return faulty(
        LeaveOneOut, claims=(claim,), compute=lambda self: change(LeaveOneOut.compute(self))
    )


COUNTS = faulty(Norm, compute=lambda self: self.norms + self.calls)  # which is no state
METRICS = [
    ("one_row_per_client", faulty(Norm, compute=lambda self: self.norms.nanmean())),
    ("one_row_per_client", faulty(Norm, compute=lambda self: self.norms[:, None])),
    ("one_row_per_client", faulty(Norm, initial_norm=0.0)),
    (
        "inputs_stay",
        faulty(
            Norm,
            value=lambda self, updates: updates.mul_(2).norm(dim=1),
        ),
    ),
    (
        "inputs_stay",
        faulty(
            Norm,
            value=lambda self, updates: updates.norm(dim=1) * torch.rand(len(updates)),
        ),
    ),
    ("one_row_per_client", ByPosition()),
    (
        "odd_rounds_have_values",
        faulty(Norm, value=lambda self, updates: updates.norm(dim=1) / updates.norm()),
    ),
    (
        "equal_clients_are_equal",
        left_out(lambda values: values + 0.01 * torch.arange(len(values))),
    ),
    ("equal_clients_are_equal", left_out(lambda values: values / len(values))),
    ("wrong_labels_are_worth_less", faulty(Norm, claims=("value",))),
    ("no_samples_are_worth_nothing", left_out(lambda values: values + 1, "effect")),
    ("length_does_not_count", left_out(lambda values: values, "agreement")),
    ("shares_sum_to_one", faulty(Norm, claims=("weight",))),
    ("odd_rounds_have_values", ComparesWithOthers()),
    ("buffers_do_not_count", CountsBuffers()),
    ("resumes", COUNTS),
    ("merges", LossDrop()),
    ("merges", faulty(LossDrop, reduction="mean")),
    ("merges", CountsRounds()),
    ("places_do_not_count", PaysTheFirst()),
    (
        "places_do_not_count",
        faulty(Norm, value=lambda self, updates: updates.norm(dim=1).cumsum(0)),
    ),
    (
        "places_do_not_count",
        faulty(Norm, value=lambda self, updates: (updates @ updates[0]) / updates.norm(dim=1)),
    ),
]


class Nameless(FedAvg):
    """Keeps a function, of which nobody can say what it is."""

    def __init__(self):
        super().__init__()
        self.function = lambda x: x


def opposite_weights(self, round, contributions):
    return -FedAvg.weights(self, round, contributions)


def the_first_alone(self, round, contributions):
    return (torch.arange(len(round)) == 0).float()


AGGREGATORS = [
    ("pickles", Nameless()),
    ("equal_clients_weigh_the_same", faulty(FedAvg, weights=the_first_alone)),
    ("learns", faulty(FedAvg, weights=opposite_weights)),
    ("attack_moves_little", faulty(FedAvg, robust=True)),
]


class NeedsTwo(FedAvg):
    """Divides by the number of the other clients."""

    def weights(self, round, contributions):
        shares = super().weights(round, contributions)
        return shares / (len(round) - 1)


class Extrapolates(FedAvg):
    """Moves statistics as if they were parameters."""

    def aggregate(self, round, contributions):
        weights = self.weights(round, contributions).to(round.client_vectors)
        mean_update = weights @ round.state_updates
        return round.global_vector - 10 * mean_update.abs(), weights


class DividesByLengths(FedAvg):
    """Weighs clients by the length of their updates."""

    def weights(self, round, contributions):
        lengths = round.client_updates.norm(dim=1)
        return lengths / lengths.sum()


AGGREGATORS += [
    ("odd_rounds_end", DividesByLengths()),
    ("odd_rounds_end", NeedsTwo()),
    ("odd_rounds_end", Extrapolates()),
]


class Slows(ClientAlgorithm):
    """Gradients become smaller."""

    times = 1
    saved = ("times",)

    def gradients(self, context, parameters, gradients):
        for gradient in gradients:
            gradient.div_(self.times)

    def count(self, _):
        self.times += 1


ALGORITHMS = [
    ("trains_alone", faulty(Slows, begin_client=Slows.count)),
    ("resumes", faulty(Slows, end_round=Slows.count, saved=())),
]


def sample_downwards(self, num_clients, *_, **__):
    return torch.arange(num_clients).flip(0)


def sample_the_first(*_, **__):
    return torch.tensor([0])


SAMPLERS = [
    ("draws_a_cohort", faulty(FullParticipation, sample=sample_downwards)),
    ("draws_a_cohort", faulty(FullParticipation, sample=sample_the_first)),
]


class StartsFromTheLast(Personalizer):
    """Keeps at a client what the client before it may have been sent: wrong where all begin before any ends."""

    def receive(self, local, instruction):
        self.last_model = super().receive(local, instruction) * (1 + instruction.client_id)
        return self.last_model

    def keep(self, local):
        local.state["own_model"] = self.last_model

    def start(self, client, state):
        return state.model() if state.round_index == 0 else None

    def personalize(self, round, contributions, models):
        return {}


class FLTrust(FedAvg):
    """Weights by the cosine with a trusted update, at least 0 (Cao and others, arXiv:2012.13995, section 4.2), without
    fault. The trusted update is here the opposite of the mean: nobody is trusted."""

    def aggregate(self, round, contributions):
        updates = round.client_updates
        trusted_update = -updates.mean(0, keepdim=True)
        similarities = torch.nn.functional.cosine_similarity(updates, trusted_update)
        trust = similarities.relu()
        weights = trust / trust.sum().clamp(min=1e-12)
        return round.combine(weights), weights
