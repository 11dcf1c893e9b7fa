"""Whether everybody is served: mean test accuracy, and collaborative fairness.

MeanTestAccuracy: the mean accuracy of clients' own models on their own test samples.

The "MTA" of Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on
Mobile Computing, 2024, section VI-A, and of most work on personalised federated learning.

CollaborativeFairness: do clients that would do well alone get the better models? One number per run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from flsv.arguments import check_number
from flsv.functional.allocation import collaborative_fairness


class MeanTestAccuracy(Metric):
    r"""The mean over clients of the accuracy on their own test samples; each client counts once.

    .. math::
        a = \frac1n \sum_i \frac{\text{right}_i}{\text{samples}_i}

    It belongs beside the loop, not among its metrics: ``ClientEvaluation(every=...)`` logs the same
    number, ``client_accuracy/mean``, for the models of a federation.

    As input to ``update``: ``client_id``, a number, ``preds`` (logits ``[B, M]`` or classes ``[B]``) and ``target
    [B]``; a client's batches may come in any order. ``compute`` gives a scalar in [0, 1], NaN without samples. A client
    without samples is left out of the mean, and NaN in ``per_client``.

    When not to use it:
        With clients of very unequal or very small test sets: each counts once, and an easy set counts as a good model.
        With rare classes, whose share of right answers says little.

    Args:
        num_clients: n.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: no clients.
        ValueError: an unknown client, shapes that do not fit.

    Example:
        >>> metric = MeanTestAccuracy(num_clients=3)
        >>> metric.update(0, torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 0, 0]))
        >>> metric.update(2, torch.tensor([[0.1, 2.0]]), torch.tensor([1]))
        >>> metric.compute(), metric.per_client
        (tensor(0.8750), tensor([0.7500,    nan, 1.0000]))
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    hits: Tensor
    samples: Tensor

    def __init__(self, num_clients: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_number(self, "num_clients", num_clients, least=1, whole=True)
        self.num_clients = num_clients
        self.add_state("hits", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, client_id: int, preds: Tensor, target: Tensor) -> None:
        """Add a batch of one client."""
        if not 0 <= client_id < self.num_clients:
            raise ValueError(f"client_id={client_id}: expected 0 .. {self.num_clients - 1}.")
        classes = preds.argmax(-1) if preds.ndim == 2 else preds
        if target.ndim != 1 or classes.shape != target.shape:
            raise ValueError(
                f"expected preds [B, M] or [B] and target [B], got {list(preds.shape)} and {list(target.shape)}."
            )
        self.hits[client_id] += (classes == target).sum()
        self.samples[client_id] += len(target)

    @property
    def per_client(self) -> Tensor:
        """``[num_clients]`` accuracies, NaN for clients without samples."""
        return (self.hits / self.samples).masked_fill(self.samples == 0, float("nan"))

    def compute(self) -> Tensor:
        """The mean of ``per_client`` over the clients that have samples."""
        return self.per_client.nanmean()

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """One number, or one per round; ``(figure, axis)``."""
        return self._plot(val, ax)


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
