"""GradientShapley and InRunShapley: Shapley values of the Taylor expansion of the validation loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flsv.functional.moving_average import momentum_add, momentum_merge, momentum_value
from flsv.functional.shapley.gradient import client_in_run_values, gradient_shapley
from flsv.metrics.base import ContributionMetric
from flsv.scores.performance import loss_measure
from flsv.utilities.declared import Momentum


class GradientShapley(ContributionMetric):
    r"""Exact Shapley values of the validation loss's first-order expansion.

    The game U(S) = -L(x + the updates' mean in S) has, up to a constant, the expansion

    .. math::
        U(S) \approx -\Bigl\langle g, \tfrac{1}{|S|} \sum_{i \in S} d_i \Bigr\rangle

    Here L is the validation loss, x the global model, g the gradient of L at x and d_i client i's update. A round of k
    clients costs one gradient and k dot products. The expansion is accurate if updates are small. See
    :func:`flsv.functional.gradient_shapley`.

    ``compute`` gives ``[num_clients]``, in nats, positive for clients that lower the loss. A client that does not take
    part in a round keeps its value, a client that never took part is NaN.

    When not to use it:
        With large updates (many local epochs, high learning rates): the expansion is accurate for small updates only.
        For a performance other than the loss: take :class:`CumulativeShapley`.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        momentum: mu in [0, 1), the weight of the past in a moving average over a client's rounds. 0 gives the last
            round's value.
        loss: for modules other than classifiers, such as language models: the name of the loss that they log in
            ``validation_step``, such as ``"val_loss"``. None: the classifier's cross-entropy.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: the momentum is outside [0, 1), or before the first round: the module does not log the loss,
            or logs it without its autograd graph.

    Example:
        >>> metric = GradientShapley(num_clients=3)
        >>> metric.update(torch.tensor([0, 2]), torch.tensor([-1.0, 0.5]))
        >>> metric.compute()
        tensor([ 0.8750,     nan, -0.6250])
    """

    unit = "fall of the validation loss (nats)"
    sign = "positive: lowers the validation loss; negative: raises it; 0: no difference."
    cost = "a gradient of the validation loss, and per client a dot product."
    claims = ("value",)
    to_pay_by = True
    per_class = False
    history: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        momentum: Momentum = 0.0,
        loss: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.momentum = momentum
        self.loss = loss
        #: The performance measure of models, see :meth:`flsv.Round.play`.
        self.measured_by = loss_measure(self, loss)
        super().__init__(num_clients, num_classes=None, **kwargs)

    rows_of_clients: Sequence[str] = ("gradient_products",)
    needs: Sequence[str] | None = ("slopes",)

    @property
    def round_fields(self) -> dict[str, Any]:
        """Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``."""
        return {"gradient_products": lambda round: round.slopes(loss=self.measured_by)}

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        reduction = partial(momentum_merge, momentum=self.momentum)
        self.add_state("history", torch.zeros(num_clients, 3), dist_reduce_fx=reduction)

    def update(self, client_ids: Tensor, gradient_products: Tensor) -> None:
        """Update the states with one round.

        Args:
            client_ids: ``[k]``, the round's clients.
            gradient_products: ``[k]``, the products g . d_i of the validation loss's gradient g with the clients'
                updates d_i.
        """
        values = gradient_shapley(gradient_products)
        self.history = momentum_add(self.history, client_ids, values[:, None], self.momentum)

    def compute(self) -> Tensor:
        """Compute the moving averages of the rounds' Shapley values, ``[num_clients]``, in nats. NaN for clients that
        never took part."""
        return momentum_value(self.history, self.momentum).squeeze(-1)


class InRunShapley(ContributionMetric):
    r"""How far each client has lowered the validation loss, by class.

    The method is from Wang, Mittal, Song and Jia, "Data Shapley in One Training Run", ICLR 2025.

    A client's value is the sum of its samples' values. In a round that moves the global model x by :math:`\eta \sum_i
    w_i d_i`, with g the gradient of the server's validation loss (mean cross-entropy) at x,

    .. math::
        \phi_i = -\eta w_i \langle g, d_i \rangle, \qquad
        -\langle g, d_i \rangle = \sum_{z} f_{t(z)} \langle g, \nabla l_z \rangle + \text{rest}

    with :math:`\eta` the server's learning rate, :math:`w_i` client i's weight, :math:`d_i` its update, z its samples,
    :math:`l_z` their losses and :math:`f_{t(z)}` the factor with which the gradient of the local step t(z), which used
    z, enters the update. It is the paper's first order. The server computes :math:`\phi_i` from the updates alone. The
    client's report (:class:`flsv.training.algorithms.InRunValues`) only divides this value among classes. The column
    ``"rest"`` is the part of the value that comes not from samples but from weight decay, clipping, momentum of an
    earlier round, upload transformations such as attacks, and steps in which the client computed no sample values.

    Values are summed over rounds, as the paper sums them over steps. A client gets 0 in a round in which it is absent.
    The sum of a client's row equals the value of :func:`flsv.functional.gradient_shapley` with fixed weights. It is
    accurate if updates are small.

    ``compute`` returns ``[num_clients, M + 1]``, in nats, positive if the loss falls. A client that never took part is
    NaN. ``per_client`` sums a row.

    When not to use it:
        To find wrong labels, which it detects weakly (an AUROC of 0.59 to 0.71 where 30 % are wrong). With large
        updates, with optimizers other than SGD at the clients, and without a validation set at the server.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        num_classes: M, the number of classes. None inside a ``FederatedLoop``.
        loss: for modules other than classifiers, such as language models: the name of the loss that they log in
            ``validation_step``, such as ``"val_loss"``. Samples without classes count as one class.
            None: the classifier's cross-entropy.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: in a loop: clients do not report, since ``client_algorithm=InRunValues()`` is missing, or
            the module does not log the loss with its autograd graph.

    Example:
        >>> metric = InRunShapley(num_clients=3, num_classes=2)
        >>> reported, slopes = torch.tensor([[0.75, 0.5], [0.5, 0.0]]), torch.tensor([-1.25, -0.25])
        >>> metric.update(torch.tensor([0, 2]), reported, slopes, torch.tensor([0.5, 0.5]))
        >>> metric.compute()
        tensor([[ 0.3750,  0.2500,  0.0000],
                [    nan,     nan,     nan],
                [ 0.2500,  0.0000, -0.1250]])
        >>> metric.per_client(metric.compute())
        tensor([0.6250,    nan, 0.1250])
    """

    unit = "fall of the validation loss (nats), summed over rounds"
    sign = "positive: the client's samples lower the validation loss; negative: they raise it."
    cost = "a gradient of the validation loss a round, and ghost products in the steps that clients look at."
    claims = ("effect",)
    to_pay_by = True
    reported_by = "FederatedLoop(client_algorithm=flsv.training.algorithms.InRunValues())"

    total: Tensor
    participations: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        loss: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.loss = loss
        #: The performance measure of models, see :meth:`flsv.Round.play`.
        self.measured_by = loss_measure(self, loss)
        super().__init__(num_clients, num_classes, **kwargs)

    @property
    def needs_classes(self) -> bool:
        """Whether the training samples must have classes: True unless ``loss`` is the name of a logged loss."""
        return self.loss is None

    rows_of_clients: Sequence[str] = ("gradient_products",)
    needs: Sequence[str] | None = ("slopes", "games")

    @property
    def round_fields(self) -> dict[str, Any]:
        """Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``."""
        return {
            "gradient_products": lambda round: round.slopes(loss=self.measured_by),
            "server_lr": lambda round: 1.0 if round.games is None else round.games.server_lr,
        }

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        assert num_classes is not None
        self.add_state("total", torch.zeros(num_clients, num_classes + 1), dist_reduce_fx="sum")
        self.add_state(
            "participations", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum"
        )

    def update(
        self,
        client_ids: Tensor,
        in_run_values: Tensor,
        gradient_products: Tensor,
        aggregation_weights: Tensor,
        server_lr: float = 1.0,
    ) -> None:
        """Update the states with one round.

        Args:
            client_ids: ``[k]``, the round's clients.
            in_run_values: ``[k, M]``, the reported in-run values of each client's samples, summed by class.
            gradient_products: ``[k]``, the products g . d_i of the validation loss's gradient with the updates d_i.
            aggregation_weights: ``[k]``, the clients' weights in the round's aggregation.
            server_lr: the server's learning rate.
        """
        if in_run_values.shape != (len(client_ids), self.num_classes):
            raise ValueError(
                f"expected in_run_values [{len(client_ids)}, {self.num_classes}], got {list(in_run_values.shape)}."
            )
        device = aggregation_weights.device
        values = client_in_run_values(
            in_run_values.to(device), gradient_products.to(device), aggregation_weights, server_lr
        )
        # Copies: whoever holds the old states must not see them change.
        self.total = self.total.clone()
        self.participations = self.participations.clone()
        self.total[client_ids] += values.to(self.total)
        self.participations[client_ids] += 1

    def compute(self) -> Tensor:
        """Compute the sums over rounds ``[num_clients, M + 1]``: the classes' columns and ``"rest"``. NaN for clients
        that never took part."""
        never_took_part = self.participations == 0
        return self.total.masked_fill(never_took_part[:, None], float("nan"))

    def columns(self) -> list[str]:
        names = self.class_names or [str(i) for i in range(self.num_classes or 0)]
        return [*names, "rest"]

    def per_client(self, value: Tensor) -> Tensor:
        return value.sum(-1)
