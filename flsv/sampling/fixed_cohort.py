"""FixedCohort: the same clients in every round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from flsv.core.strategy import Contributions
from flsv.sampling.base import ClientSampler
from flsv.utilities.errors import ConfigurationError


class FixedCohort(ClientSampler):
    """Sampler that draws the same clients in every round, as if there were no others.

    Args:
        clients: the clients' ids, at least one.

    Raises:
        ConfigurationError: there are no clients, a client is named twice or, before training, a client does not exist.

    Example:
        >>> FixedCohort([3, 0]).sample(5, {}, torch.Generator())
        tensor([0, 3])
    """

    rules: ClassVar = (
        (lambda a: 0 < len(a.clients) == len(set(a.clients)), "expected different client ids, one at least."),
    )

    def __init__(self, clients: Sequence[Annotated[int, Ge(0)]]) -> None:
        self.clients = sorted(clients)

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        return torch.tensor(self.clients)

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        chances = torch.zeros(num_clients)
        chances[self.clients] = 1
        return chances

    def among(self, members: Sequence[int]) -> ClientSampler:
        if both := {*self.clients} & {*members}:
            return FixedCohort([*both])
        raise ConfigurationError(
            f"{self!r} draws none of the clients {list(members)} in any round, so that a coalition of these alone has "
            "no round. Leave them out of the data, or draw them."
        )

    def check(self, num_clients: int) -> None:
        if self.clients[-1] >= num_clients:
            raise ConfigurationError(f"{self!r} cannot be met: the federation has clients 0 to {num_clients - 1} only.")
