"""A metric and a sampler as somebody from outside writes them by the documentation. Mutants are made of them."""

from typing import Any

import torch
from torch import Tensor

from flsv.metrics.base import ContributionMetric, latest
from flsv.sampling import ClientSampler


def losses_before_and_after(round: Any) -> Tensor:
    """Validation losses ``[k, 2]`` of the global model and of each client's model."""
    server = round.server_data
    global_model = round.global_vector[None]
    client_models = round.client_vectors
    evaluation_before = server.evaluate(global_model, "val")
    evaluation_after = server.evaluate(client_models, "val")

    losses_after = -evaluation_after.value("negative_loss")
    loss_before = -evaluation_before.value("negative_loss")
    losses_before = loss_before.expand_as(losses_after)
    return torch.stack([losses_before, losses_after], dim=1)


class ValidationGain(ContributionMetric):
    """Mean fall of the validation loss by a client's model, over its rounds, ``[num_clients]``."""

    per_class = False
    claims = ("effect",)
    unit = "fall of the validation loss (nats)"
    round_fields = {"validation_losses": losses_before_and_after}  # noqa: RUF012
    needs = ("server_data", "global_vector", "client_vectors")

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        zeros = torch.zeros(num_clients, dtype=torch.float64)
        unknown = torch.full_like(zeros, torch.nan)
        self.add_state("falls", zeros, dist_reduce_fx="sum")
        self.add_state("counts", zeros.clone(), dist_reduce_fx="sum")
        self.add_state("last_fall", unknown, dist_reduce_fx=latest)

    def update(self, client_ids: Tensor, validation_losses: Tensor) -> None:
        losses = validation_losses.to(self.falls)
        loss_before = losses[:, 0]
        loss_after = losses[:, 1]
        fall = loss_before - loss_after
        one_round = torch.ones_like(fall)
        self.falls = self.falls.index_add(0, client_ids, fall)
        self.counts = self.counts.index_add(0, client_ids, one_round)
        self.last_fall = self.last_fall.clone()
        self.last_fall[client_ids] = fall

    def compute(self) -> Tensor:
        return self.falls / self.counts  # NaN, 0 / 0, for clients never seen

    def diagnostics(self) -> dict[str, Tensor]:
        return {"last_fall": self.last_fall.clone()}


class LeastServed(ClientSampler):
    """Sampler of the clients that have been in the fewest rounds. Among equals the generator decides."""

    saved = ("_counts",)

    def __init__(self, cohort_size: int = 2) -> None:
        self.cohort_size = cohort_size

    def begin(self, federation: Any) -> None:
        self._counts = torch.zeros(federation.num_clients)

    def sample(
        self,
        num_clients: int,
        contributions: Any,
        generator: Any,
        round_index: int = 0,
    ) -> Tensor:
        # A random number below 1 orders clients with equal counts.
        order_of_equals = torch.rand(num_clients, generator=generator)
        keys = self._counts + order_of_equals
        cohort = keys.argsort()[: self.cohort_size]
        return cohort.sort().values

    def inclusion_probabilities(
        self,
        num_clients: int,
        contributions: Any,
        round_index: int = 0,
    ) -> Tensor:
        counts = self._counts.sort().values
        highest_count = counts[self.cohort_size - 1]
        are_certain = self._counts < highest_count
        are_tied = self._counts == highest_count
        num_places = self.cohort_size - are_certain.sum()
        return are_certain + are_tied * num_places / are_tied.sum()

    def end_round(self, round: Any) -> None:
        counts = self._counts.clone()
        counts[round.client_ids] += 1
        self._counts = counts
