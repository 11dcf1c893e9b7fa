"""Scaling: updates multiplied by a factor.

By boosting its update one client can replace the global model with its own: Bagdasaryan et al., "How To Backdoor
Federated Learning", AISTATS 2020. With equal weights, the size of the cohort is the factor that achieves it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.attacks.base import Attack
from flsv.uploads.base import UploadContext


class Scaling(Attack):
    """Attack that multiplies the update by ``factor``.

    Args:
        factor: factor on the update. Above 1, it increases the client's influence on the aggregate.
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: their share, instead of ``clients``.
        seed: seed of their choice.

    Raises:
        ConfigurationError: the factor is not finite.

    Example:
        >>> Scaling(factor=3.0).attack(torch.tensor([1.0, -2.0]), None, torch.Generator())
        tensor([ 3., -6.])
    """

    def __init__(
        self,
        factor: float = 10.0,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.factor = factor

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        return update * self.factor
