"""DivergenceWeighted: weights by number of samples, lower for clients with skewed labels.

Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024, equations 5 to 7.
"""

from __future__ import annotations

from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import LocalData, Round
from flsv.core.strategy import Contributions
from flsv.functional.divergences import divergence_weights, label_divergence
from flsv.utilities.declared import Positive


class DivergenceWeighted(Aggregator):
    """Average of the clients' models, weighted by N_k - a F_k + b. See :func:`flsv.functional.divergence_weights`.

    N_k is the client's share of the cohort's samples and F_k the divergence of its label distribution. Every client
    computes its F_k itself and sends this number to the server. Its class histogram stays at the client.

    Args:
        a: factor of the penalty on divergence.
        b: constant added to every client's weight.
        server_lr: the server's learning rate, see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: a or b is not finite.

    Example:
        >>> DivergenceWeighted(a=0.5)
        DivergenceWeighted(a=0.5)
    """

    reports = ("label_divergence",)
    needs_classes = True

    def __init__(
        self,
        a: float = 0.6,
        b: float = 0.1,
        *,
        server_lr: Positive = 1.0,
    ) -> None:
        super().__init__(server_lr=server_lr)
        self.a = a
        self.b = b

    def report(self, local: LocalData) -> dict[str, float]:
        divergence = label_divergence(local.class_counts)
        return {"label_divergence": float(divergence)}

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        if "label_divergence" not in round.reports:
            raise RuntimeError(
                f"{self!r} needs the clients' label_divergence, but the round has no such report."
            )
        divergence = round.reports["label_divergence"]
        return divergence_weights(
            round.num_samples,
            divergence,
            a=self.a,
            b=self.b,
        )
