"""ProxyShapley: values in a game of linear models, for federations that are too large to retrain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor
from torchmetrics import Metric

from flsv.core import Client, LocalData
from flsv.functional.shapley.permutation import permutation_shapley
from flsv.games.performance import Mode, ModelScore
from flsv.games.proxy_game import FeatureKind, ProxyGame, ProxyOptions, ProxyServer
from flsv.metrics.base import latest
from flsv.metrics.coalitions.value import MeasuredMetric
from flsv.utilities.declared import Count, Positive
from flsv.utilities.errors import ConfigurationError


class ProxyShapley(MeasuredMetric):
    r"""How much each client adds to linear models that stand for the federation: Shapley values of a proxy game.

    .. math::
        \phi_i = \sum_{S \not\ni i} \frac{|S|!\,(n - |S| - 1)!}{n!} \bigl(U(S \cup i) - U(S)\bigr),
        \qquad U(S) = \tfrac12 \bigl(U_{model}(S) + U_{inputs}(S)\bigr)

    :math:`U_{model}(S)` is the performance, on the server's validation set, of a ridge regression that is fitted to the
    samples of the clients in S. Its features are the inputs of the current model's last linear layer. For
    :math:`U_{inputs}(S)` the features are the model's inputs themselves. Both kinds of features are projected on the
    first 64 principal axes of the validation set. Each client sends two sums over its samples
    (:mod:`flsv.games.proxy_game`), after one pass of its samples through the model. The server then needs one sum and
    one solve per coalition, so that the cost hardly depends on the network.

    For a classifier the targets of the regression are one-hot classes. The model of the empty coalition has the output
    0 for every class; its accuracy is 1/M for M classes. All n clients are asked, whether they take part in the round
    or not.

    As input to ``update``: ``client_ids [k]``, ``all_clients``, the server's ``validation`` data and its next model
    ``server_vector [P]``, ``round_index``, and a ``generator``. ``compute`` gives ``[num_clients]``, in the
    performance's unit, or ``[num_clients, num_classes]``; NaN for a client that never took part.

    When not to use it:
        For payment, or to rank clients of a federation that can be measured otherwise: on twelve federations made after
        its rules were chosen it was no better than :class:`BlendedContribution`, and worse with wrong labels and rare
        classes; with eight to twenty clients :class:`GradientAgreement` was better (``docs/results/proxy.md``). If
        coalitions can be trained, take :class:`ShadowShapley`. Where clients must not reveal the second moments of
        their samples, which they send; with ``GaussianPrivacy`` the metric raises an error. Where the model is far from
        trained: the linear models are always fully fitted.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``, which takes it from the data.
        num_classes: M, the number of classes. If it is set, values are per class.
        performance: the performance measure of a linear model: ``"accuracy"``, ``"balanced_accuracy"``,
            ``"negative_loss"``, ``"auroc"``, ``"average_precision"``, ``"f1"``, or a torchmetrics metric of outputs and
            targets. A value that the module logs with ``mode="min"``, such as ``"val_loss"``, stands for the linear
            models' own loss: the mean squared error of targets that are numbers, the cross-entropy of classes.
        features: ``"both"``; ``"model"``: only the inputs of the last linear layer, which suits model inputs that are
            not floating-point; ``"inputs"``: only the model's inputs, which suits modules without a linear layer.
        head: name of the layer whose inputs are the features, as in ``module.named_modules()``; None: timm's
            ``get_classifier()``, or the last ``nn.Linear``.
        components: the largest number of features of each kind.
        penalty: the ridge penalty, for features of a total variance of 1.
        budget: the largest number of coalitions to evaluate. If there are more, the values are estimated from random
            orders of the clients, with a standard error in ``diagnostics``.
        every: compute values every ``every`` rounds and after the last. None: after the last round only, or after every
            round if the number of rounds is not known. Set a number if the run may stop early.
        per_class: compute values per class, with the number of classes taken from the data.
        mode: ``"min"`` for a logged loss, or for a torchmetrics metric without ``higher_is_better``.
        kwargs: further arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: an option is unknown or out of range; in a loop, before training: there is no validation
            set, its batches are not pairs of tensors, the module has no such layer, or the performance cannot be
            computed from a linear model's outputs.

    Example:
        >>> from flsv.valuation import clients_of, server_of
        >>> x, y = torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1])
        >>> clients = clients_of([(x, y), (x[:2], y[:2]), (x[2:], y[2:])])  # all, the first class, the second class
        >>> metric = ProxyShapley(num_clients=3, features="inputs")
        >>> metric.update(torch.arange(3), clients, server_of(x, y), torch.empty(0))
        >>> metric.compute()
        tensor([0.3333, 0.0833, 0.0833])
    """

    sign = "positive: linear models do better with the client's samples; negative: worse; 0: no difference."
    cost = "a pass of all samples through the model, and a linear system for each coalition."
    to_pay_by = False
    values: Tensor
    errors: Tensor
    seen: Tensor
    evaluations: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        performance: str | Metric = "accuracy",
        features: FeatureKind = "both",
        head: str | None = None,
        components: Count = 64,
        penalty: Positive = 1.0,
        budget: Annotated[int, Ge(4)] = 4096,
        every: Count | None = None,
        per_class: bool = False,
        mode: Mode | None = None,
        **kwargs: Any,
    ) -> None:
        self.features, self.head, self.components, self.penalty = features, head, components, penalty
        self.budget, self.every = budget, every
        self._last: int | None = None
        self._samples: Tensor | None = None
        self._measure(performance, mode, per_class or num_classes is not None, "server")
        super().__init__(num_clients, num_classes, **kwargs)

    @property
    def round_fields(self) -> dict[str, Any]:
        """``{argument: attribute of the round, or f(round)}``, for arguments of ``update`` in a ``FederatedLoop``."""
        return {"validation": "server_data", "generator": lambda round: round.generator(type(self).__name__)}

    def check(self, num_samples: Tensor) -> None:
        """Store the numbers of samples that the clients have announced, and check the budget.

        Statistics that a client sends of more samples than it has announced are scaled down.

        Raises:
            ConfigurationError: there are so many clients that the budget does not suffice for one pair of orders.
        """
        clients = len(num_samples)
        if self.budget < min(2 * clients, 2**clients):
            raise ConfigurationError(
                f"ProxyShapley(budget={self.budget}): one pair of orders of {clients} clients needs {2 * clients} "
                f"coalitions. Set budget={50 * clients}, or a larger one."
            )
        self._samples = num_samples

    def check_rounds(self, rounds: int) -> None:
        self._last = rounds - 1

    def check_server(self, server_data: LocalData | None, model: Tensor) -> None:
        """Try before training whether the features and the performance can be computed on the validation samples.

        Raises:
            ConfigurationError: they cannot be computed, for the reasons listed at the class.
        """
        if server_data is not None:  # without validation data the loop has refused the metric
            self._server(server_data, model)

    def _server(self, validation: LocalData, model: Tensor) -> ProxyServer:
        measure: str | ModelScore = self.measured_by
        how = self.features, self.head, self.components, self.penalty, self.num_classes
        return ProxyServer(validation, model, ProxyOptions(measure, *how))

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        width = num_classes if self.per_class and num_classes is not None else 1
        for name in ("values", "errors"):
            self.add_state(name, torch.full((num_clients, width), float("nan")), dist_reduce_fx=latest)
        self.add_state("seen", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("evaluations", torch.tensor(0), dist_reduce_fx="sum")

    def update(
        self,
        client_ids: Tensor,
        all_clients: Sequence[Client],
        validation: LocalData,
        server_vector: Tensor,
        round_index: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        """Ask all clients for their statistics and compute the values of the proxy game, in the rounds that ``every``
        selects.

        Args:
            client_ids: ``[k]``, the ids of the round's k clients.
            all_clients: all n clients.
            validation: the server's validation data.
            server_vector: ``[P]``, the model after the round.
            round_index: the round's index, from 0.
            generator: the random generator of the orders, if there are more coalitions than the budget.
        """
        self.seen = self.seen.clone()
        self.seen[client_ids] += 1
        now = self._last is None if self.every is None else (round_index + 1) % self.every == 0
        if now or round_index == self._last:
            self._value(self._server(validation, server_vector).ask(all_clients, self._samples), generator)

    def _value(self, game: ProxyGame, generator: torch.Generator | None) -> None:
        """Compute and store the values of a game; clients that are not among its players keep their values."""
        if not game.players:
            return
        found = permutation_shapley(game, len(game.players), budget=self.budget, generator=generator)
        for name, numbers in (("values", found.values), ("errors", found.stderr)):
            state = getattr(self, name).clone()
            state[game.players] = numbers.reshape(len(game.players), -1).to(state)
            setattr(self, name, state)
        self.evaluations = self.evaluations + found.evaluations

    def compute(self) -> Tensor:
        """Return the values of the latest proxy game, ``[num_clients]`` or ``[num_clients, num_classes]``; NaN for a
        client that never took part, and before the first game.
        """
        value = self.values.masked_fill((self.seen == 0)[:, None], float("nan"))
        return value if self.per_class else value.squeeze(-1)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the number of ``evaluations`` of coalitions and, if coalitions were drawn at random and values are not
        per class, the values' ``stderr [num_clients]``.
        """
        found = {"evaluations": self.evaluations.clone()}
        drawn = bool((self.errors > 0).any()) and not self.per_class
        return {**found, "stderr": self.errors.squeeze(-1).clone()} if drawn else found
