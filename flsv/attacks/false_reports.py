"""FalseReports: false numbers about a client's own training and about models that it evaluates.

A server cannot verify a loss, or a model's score on a client's own validation samples. Metrics made of such reports
reward lies: FedCE's estimates (Jiang et al., CVPR 2023) rise for a client that reports a low score of the other
clients' model.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from flsv.attacks.base import Attack
from flsv.uploads.base import UploadContext


class FalseReports(Attack):
    """Attack that reports made-up numbers and sends an honest update.

    Args:
        loss: the mean training loss that the client reports. None for the true loss. The loss is logged, and
            the benchmark's baseline ``training_loss`` reads it.
        score: the score that the client reports when it evaluates the other clients' joint model on its validation
            samples, see :class:`flsv.metrics.ContributionEstimation` (FedCE). None for the true score.
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: their share, instead of ``clients``.
        seed: seed of their choice.

    Raises:
        ConfigurationError: neither loss nor score is given, or a number is not finite.

    Example:
        >>> context = UploadContext(0, 2, num_parameters=2, round_index=0)
        >>> FalseReports(loss=0.1, clients=[0]).report("loss", 2.3, context)
        0.1
    """

    rules: ClassVar = (
        (
            lambda a: a.loss is not None or a.score is not None,
            "expected a false loss or a false score. Set loss or score.",
        ),
    )

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

    def attack(
        self,
        update: Tensor,
        context: UploadContext,
        generator: torch.Generator,
    ) -> Tensor:
        return update

    def report(
        self,
        name: str,
        value: float,
        context: UploadContext,
    ) -> float:
        false_values: dict[str, float | None] = {"loss": self.loss, "score": self.score}
        false_value = false_values.get(name)
        if false_value is None or context.client not in self.chosen(context.num_clients):
            return value
        return false_value
