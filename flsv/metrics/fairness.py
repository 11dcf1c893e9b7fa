"""CollaborativeFairness: do clients that would do well alone get the better models? One number per run."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from flsv.functional.allocation import collaborative_fairness


class CollaborativeFairness(Metric):
    r"""Pearson's correlation, across clients, of standalone accuracy and the accuracy of the final models.

    .. math::
        f = \operatorname{corr}\bigl((a_i^{\text{alone}})_i, (a_i^{\text{final}})_i\bigr)

    Compares two runs, so it belongs beside the loop, not among its metrics: the standalone run is one with
    :class:`flsv.personalization.Standalone`. ``flsv compare`` does both.

    As input to ``update``: ``standalone [n]`` and ``final [n]``, of all clients or of some of them; every ``update``
    adds clients. ``compute`` gives a scalar in [-1, 1], 1 being fair, or NaN where either is the same for everybody
    (nothing was distributed) or fewer than two clients are known. A client with a NaN is left out.

    When not to use it:
        With fewer than some five clients, of whom a correlation says nothing, and where all get one model and are
        tested on one set.

    Args:
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ValueError: the shapes differ.

    Source:
        Tastan et al., IJCAI 2024, section 4.3; after Lyu et al., Collaborative Fairness in Federated Learning, 2020.

    Example:
        >>> import torch
        >>> metric = CollaborativeFairness()
        >>> metric.update(torch.tensor([0.67, 0.26, 0.42, 0.31, 0.19]), torch.tensor([0.69, 0.44, 0.62, 0.60, 0.41]))
        >>> metric.compute()
        tensor(0.8785)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    plot_lower_bound = -1.0
    plot_upper_bound = 1.0

    standalone: list[Tensor]
    final: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("standalone", [], dist_reduce_fx="cat")
        self.add_state("final", [], dist_reduce_fx="cat")

    def update(self, standalone: Tensor, final: Tensor) -> None:
        """Add clients; shapes ``[n]`` and ``[n]``."""
        if standalone.ndim != 1 or standalone.shape != final.shape:
            raise ValueError(
                f"expected standalone [n] and final [n], got {list(standalone.shape)} and {list(final.shape)}."
            )
        self.standalone.append(standalone)
        self.final.append(final)

    def compute(self) -> Tensor:
        """The correlation over all clients added so far."""
        return collaborative_fairness(dim_zero_cat(self.standalone), dim_zero_cat(self.final))

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """One number, or one per run; ``(figure, axis)``."""
        return self._plot(val, ax)
