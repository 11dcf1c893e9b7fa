"""FalseReports: false numbers about a client's own training and about models that it evaluates.

A server cannot verify a loss, or a model's score on a client's own validation samples. Metrics made of such reports
reward lies: FedCE's estimates (Jiang et al., CVPR 2023) rise for a client that reports a low score of the others'
model.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from flsv.attacks.base import Attack
from flsv.uploads import UploadContext


class FalseReports(Attack):
    """Reports made-up numbers and sends an honest update.

    Args:
        loss: told as its mean training loss; None: the true one. It is logged, and what
            :class:`flsv.benchmark.TrainingLoss` is made of.
        score: told as the score of the others' model on its validation samples, see
            :class:`flsv.metrics.ContributionEstimation` (FedCE).
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients.

    Raises:
        ConfigurationError: nothing that is false; a number that is not finite.

    Example:
        >>> FalseReports(loss=0.1, clients=[0]).tell("loss", 2.3, UploadContext(0, 2, num_parameters=2, round_index=0))
        0.1
    """

    rules: ClassVar = ((lambda a: a.loss is not None or a.score is not None, "nothing is false. Give loss or score."),)

    def __init__(
        self,
        loss: float | None = None,
        score: float | None = None,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.loss = loss
        self.score = score

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        return update

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        """The update itself."""
        return update

    def tell(self, name: str, value: float, context: UploadContext) -> float:
        said: float | None = {"loss": self.loss, "score": self.score}.get(name)
        return value if said is None or context.client not in self.chosen(context.num_clients) else said
