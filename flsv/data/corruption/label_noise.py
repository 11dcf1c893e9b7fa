"""Wrong labels within the task's classes.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, appendix B.3, "Malicious clients
with closed-set label noise": the label of each training sample of a malicious client is flipped from L to (L + 1) mod
C. A share of the samples instead of all is FedBary's "noisy labels" (0, 5, 10, 15 and 20 % by client).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.data.corruption.base import Corruption, some
from flsv.errors import ConfigurationError


class ClosedSetLabelNoise(Corruption):
    """Labels flipped to other classes of the task: ``y -> (y + 1) mod C``, or a class at random.

    Which samples were flipped, :meth:`flsv.data.FederatedDataModule.corrupted_samples` tells; the flip never keeps the
    label.

    Args:
        rate: share of each client's samples that are flipped, to the nearest whole number of samples.
        to: ``"next"`` as in ShapleyFL, or ``"random"``: every other class equally likely.
        clients: whom it concerns, see :class:`~flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients and of the flips.

    Raises:
        ConfigurationError: a rate outside [0, 1], or another ``to``; at the call, fewer than 2 classes.

    Example:
        >>> x, y = torch.zeros(4, 2), torch.tensor([0, 1, 2, 2])
        >>> ClosedSetLabelNoise()(x, y, num_classes=3, generator=torch.Generator())[1]
        tensor([1, 2, 0, 0])
    """

    def __init__(
        self,
        rate: float = 1.0,
        to: Literal["next", "random"] = "next",
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.rate = rate
        self.to = to
        self._check_rate("rate")
        if to not in ("next", "random"):
            raise ConfigurationError(f"{self!r}: to must be 'next' or 'random'.")

    def corrupt(self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if num_classes < 2:
            raise ConfigurationError(f"{self!r}: with {num_classes} class there is no other label to give.")
        flipped = some(len(y), self.rate, generator)
        step: int | Tensor = 1
        if self.to == "random":
            step = torch.randint(1, num_classes, flipped.shape, generator=generator)
        y[flipped] = (y[flipped] + step) % num_classes
        return x, y
