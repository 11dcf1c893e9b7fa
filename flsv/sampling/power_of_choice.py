"""PowerOfChoice: a sampler of the candidates with the highest loss under the global model.

Cho, Wang and Joshi, "Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice Selection
Strategies", 2020, section 4 (pi_pow-d): ``configs/power_of_choice.yaml``.

Losses are computed on all training samples of a candidate, as in the paper's basic strategy. The selection is biased on
purpose and has no known inclusion probabilities, so aggregators and metrics that divide by them raise an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from flsv.core import Client, LocalData, NoResponse, Numbers, declare_response, map_clients
from flsv.core.strategy import Contributions, FederationInfo
from flsv.sampling.base import ClientSampler
from flsv.utilities.declared import Count
from flsv.utilities.errors import ConfigurationError


class PowerOfChoice(ClientSampler):
    """Sampler of the ``cohort_size`` clients with the highest local loss among randomly drawn candidates.

    Candidates are drawn without replacement, in proportion to their numbers of training samples. They receive the
    global model and report its loss on their training samples. Of candidates with equal losses the one drawn first
    takes part. A candidate receives the model once for the choice, and again if it takes part. ``round.downloaded``
    counts both. A site that does not respond is chosen last.

    Args:
        cohort_size: m, the number of clients per round.
        candidates: d, the number of candidates, at least ``cohort_size``. With d = m losses do not matter. The paper
            tries 2 m to 10 m.

    Raises:
        ConfigurationError: ``cohort_size`` is below 1, or there are fewer candidates, or before training: there are
            fewer clients with samples than candidates, a part of the loop needs inclusion probabilities, or the module
            is not a classifier.

    Example:
        >>> PowerOfChoice(cohort_size=2, candidates=6)
        PowerOfChoice(cohort_size=2, candidates=6)
    """

    evaluates = True
    needs: Sequence[str] = ("all_clients",)

    rules: ClassVar = (
        (lambda a: a.candidates >= a.cohort_size, "expected at least {cohort_size} candidates."),
    )

    def __init__(self, cohort_size: Count, candidates: int) -> None:
        self.cohort_size = cohort_size
        self.candidates = candidates
        self._sizes = torch.zeros(0)

    def set_up(self, federation: FederationInfo) -> None:
        self._sizes = federation.split_sizes["train"].double().cpu()
        num_clients = int((self._sizes > 0).sum())
        if num_clients < self.candidates:
            if num_clients < self.cohort_size:
                arguments = "candidates and cohort_size"
            else:
                arguments = "candidates"
            raise ConfigurationError(
                f"{self!r} cannot draw its candidates, since only {num_clients} clients have training samples. Lower "
                f"{arguments} to at most {num_clients}, or set more clients in the partitioner."
            )

    def sample(
        self,
        num_clients: int,
        contributions: Contributions,
        generator: torch.Generator,
        round_index: int = 0,
    ) -> Tensor:
        """Draw the candidates, among which :meth:`choose` selects the cohort."""
        return self._sizes.multinomial(self.candidates, generator=generator)

    def choose(
        self,
        clients: Sequence[Client],
        model: Tensor,
        contributions: Contributions,
        generator: torch.Generator,
        round_index: int = 0,
    ) -> Tensor:
        candidates = self.sample(len(clients), contributions, generator, round_index)
        candidate_clients = [clients[client] for client in candidates.tolist()]
        responses = map_clients(candidate_clients, partial(_request_loss, model))
        # A client whose loss is NaN comes last.
        losses = torch.tensor(responses, dtype=torch.float64).nan_to_num(-torch.inf)
        highest_first = losses.argsort(descending=True, stable=True)
        cohort = candidates[highest_first[: self.cohort_size]]
        return cohort.sort().values

    def inclusion_probabilities(
        self,
        num_clients: int,
        contributions: Contributions,
        round_index: int = 0,
    ) -> Tensor:
        raise ConfigurationError(
            f"the aggregator or a metric divides by each client's probability to take part, which {self!r} does not "
            "know, since it selects by loss. Use another aggregator or metric, or a sampler such as UniformSampler."
        )


def local_loss(local: LocalData, model: Tensor) -> float:
    """Compute the mean loss of a model ``[P]`` on a client's training samples, at the client."""
    score = local.evaluate(model[None], "train")
    return -float(score.value("negative_loss"))


declare_response(local_loss, lambda client, model: Numbers(float, lowest=0))


def _request_loss(model: Tensor, client: Client) -> float:
    try:
        return client.request(local_loss, model)
    except NoResponse as error:
        warnings.warn(f"{error} The sampler chooses this client last.", stacklevel=2)
        return float("nan")
