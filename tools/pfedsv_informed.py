"""Figure 4 of pFedSV (Wu et al., IEEE TMC 2024): clients that know who is relevant to them weigh those together, or one
by one.

The paper says of its pairwise weights that models are compared one to one, and weighed in proportion to what similarity
it does not say. Here: by distance, as equation 6 with the same value for everybody, and by loss, FedFomo's equation 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Generator, Tensor

from flsv.functional import personalized_weights
from flsv.functional.agreement import keep_common
from flsv.participants import LocalData
from flsv.personalization import PFedSV
from flsv.personalization.base import OWN_MODEL
from flsv.personalization.fedfomo import first_order_weights
from flsv.strategy import Contributions

Weights = Literal["together", "by loss", "by distance", "equally"]


class Informed(PFedSV):
    """Every client downloads who is relevant to it.

    Args:
        weights: ``"together"``: pFedSV's, by Shapley value; the others look at one model at a time, at its loss or
            distance, or at nothing.
        metric: as of :class:`flsv.personalization.PFedSV`.

    Attributes:
        relevant: bool ``[n, n]``, who is relevant to whom; to be set before training.
    """

    def __init__(self, weights: Weights = "together", metric: str = "relevance") -> None:
        super().__init__(metric)
        self.weights = weights
        self.relevant = torch.zeros(0, 0, dtype=torch.bool)

    def question(self, num_parameters: int) -> Callable[..., Tensor]:
        if self.weights == "together":
            return super().question(num_parameters)
        return partial(one_by_one, weights=self.weights, num_parameters=num_parameters)

    def _relevance(self, contributions: Contributions) -> Tensor:
        return torch.where(self.relevant, 1.0, -1.0)


def one_by_one(
    local: LocalData, others: list[Tensor], extractor: None, *, weights: str, num_parameters: int, generator: Generator
) -> Tensor:
    """At a client: the weights ``[1 + s]`` of its own model and of s others, each found without looking at the rest. It
    keeps their mixture."""
    assert local.model is not None
    assert local.start is not None
    models = torch.stack([local.model, *others])
    if weights == "by loss":
        start = local.start
        losses = -local.utility(torch.cat([start[None], models]), "negative_loss")
        distances = (models - start)[:, :num_parameters].norm(dim=1)
        found = first_order_weights(losses[0], losses[1:], distances.to(losses)).clamp_min(0)
        if not found.any():
            found[0] = 1
        found = found / found.sum()
    else:
        distances = (models - models[0])[:, :num_parameters].norm(dim=1)
        same = torch.ones(len(models))
        found = personalized_weights(same, distances.cpu(), own=0) if weights == "by distance" else same / len(same)
    local.state[OWN_MODEL] = keep_common(found.to(models) @ models, models)
    return found
