"""GradientPoisoning: random multiplicative noise on every element of the update.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, appendix B.3, "Malicious client
with gradient poisoning": an element a becomes a (1 + b) with b ~ U[-0.5, 0.5]. The authors' code multiplies the
client's *weights* by 1 + N(0, s^2) instead, which is far stronger. flsv follows the paper.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from flsv.attacks.base import Attack
from flsv.uploads.base import UploadContext


class GradientPoisoning(Attack):
    """Attack that multiplies each element of the update by 1 + b. The b are drawn independently from U[low, high].

    On average the update is multiplied by 1 + (low + high) / 2, which is 1 by default. Around this average it has noise
    whose norm is (high - low) / sqrt(12), by default 29 %, of the update's norm.

    Args:
        low: the smallest possible b.
        high: the largest possible b, above ``low``.
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: their share, instead of ``clients``.
        seed: seed of the choice of clients and of the noise.

    Raises:
        ConfigurationError: ``low`` is not below ``high``, or one of them is not finite.

    Example:
        >>> sent = GradientPoisoning().attack(torch.ones(1000), None, torch.Generator().manual_seed(0))
        >>> bool(sent.min() >= 0.5), bool(sent.max() <= 1.5), round(float(sent.mean()), 1)
        (True, True, 1.0)
    """

    rules: ClassVar = ((lambda a: a.low < a.high, "expected high={high} to be above low={low}."),)

    def __init__(
        self,
        low: float = -0.5,
        high: float = 0.5,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.low = low
        self.high = high

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(len(update), generator=generator)
        noise = uniform * (self.high - self.low) + self.low
        return update * (1 + noise.to(update))
