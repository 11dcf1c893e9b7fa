"""ShadowShapley: values of retraining every coalition, while the run trains.

The models of the coalitions are trained by :class:`flsv.loop.shadow.ShadowTraining`, which explains how; here
they are evaluated and their game is shared out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.declared import Count
from flsv.errors import ConfigurationError
from flsv.functional import few_coalitions, few_coalitions_shapley
from flsv.functional.shapley.few_coalitions import Which
from flsv.functional.shapley.game import t_quantile
from flsv.functional.shapley.one_seed import one_seed_stderr
from flsv.games.performance import Mode
from flsv.metrics.base import latest
from flsv.metrics.coalitions.value import MeasuredMetric
from flsv.metrics.intervals import LEVEL
from flsv.round import Round

Coalitions = Which | Sequence[Sequence[int]]


def coalition_masks(coalitions: Coalitions, num_clients: int) -> Tensor:
    """Bool ``[K, n]``: nobody, everybody, and the coalitions that are asked for.

    Args:
        coalitions: a name of :func:`flsv.functional.few_coalitions`, or the members of each.
        num_clients: n.

    Raises:
        ConfigurationError: an unknown name, a client that there is not.

    Example:
        >>> coalition_masks([[0], [2, 0]], 3).int().tolist()
        [[0, 0, 0], [1, 1, 1], [1, 0, 0], [1, 0, 1]]
    """
    if isinstance(coalitions, str):
        return few_coalitions(num_clients, coalitions)
    masks = [[False] * num_clients, [True] * num_clients]
    for members in coalitions:
        strange = [member for member in members if member not in range(num_clients)]
        if strange:
            raise ConfigurationError(
                f"ShadowShapley(coalitions=...): {list(members)} names clients {strange}, and the federation has 0 to "
                f"{num_clients - 1}."
            )
        mask = [client in members for client in range(num_clients)]
        if mask not in masks:
            masks.append(mask)
    return torch.tensor(masks)


class ShadowShapley(MeasuredMetric):
    r"""Shapley values of the game in which every coalition of clients is a federation of its own, in every round.

    .. math::
        \phi_i = \sum_{S \subseteq N \setminus i} \frac{U(S \cup i) - U(S)}{n \binom{n-1}{|S|}}, \qquad
        U(S) = u(\text{the model that S alone has trained})

    While the federation trains, each client also trains the models of the coalitions that it is in, on its own batches
    (:class:`flsv.loop.shadow.ShadowTraining`, which the loop adds by itself). After a round U(S) is the
    performance of the model that coalition S has come to, on the server's validation set. With ``coalitions="all"``
    the values are exact; with fewer they are those of :func:`flsv.functional.few_coalitions_shapley`. They are the
    values of ``flsv retrain`` with this seed, after so many rounds: a model holds all rounds before it, so that nothing
    is summed up. With a sampler, a coalition trains with those of its members who are drawn; where none is, its model
    stays.

    For n clients ``"pairs"`` trains n models at each of them, ``"singles"`` one, ``"pairs+leave-one-out"`` 2 n - 1,
    ``"all"`` 2^(n - 1) - 1. A plain module trains them as one batched model: for an MLP that costs little, for a
    convolution on a CPU as much as so many trainings. Pairs alone see what a client adds to nobody and to one other,
    and underpay who adds to many.

    The values are those of this run's seed. Their intervals say within what other seeds' values lie: by what seeds
    differ by on average, see :mod:`flsv.functional.shapley.one_seed`, not by what they differ by in this federation,
    which ``flsv repeat`` and ``flsv retrain`` measure.

    Each coalition has an aggregator of its own, with filters and the metric that it reads; attacks, compression and
    :class:`flsv.clients.algorithms.FedProx` are those of every coalition. Refused are client algorithms with a state or
    steps of their own; personalizers; a metric that the aggregator reads and that evaluates models or looks at losses;
    colluders, who compare the updates of one cohort; and privacy, whose noise would be spent on each of these models.

    What crosses grows by these models, both ways; it is counted. The server sees what each client makes of the models
    of its coalitions, which says more of its data than its update alone.

    As input to ``update``: ``client_ids [k]``, ``coalitions`` bool ``[K, n]``, nobody and everybody among them, and
    their ``utility(masks: bool [K, n]) -> [K]`` (or ``[K, M]``). ``compute`` gives the last round's values
    ``[num_clients]``, in the performance's unit, or ``[num_clients, num_classes]``; a client never seen is NaN.

    When not to use it:
        With large models or slow sites: clients train and send several models. Where sites must not tell more than one
        update: coalitions' models say more. Once, after the run, ``flsv retrain`` gives the same values.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        num_classes: M. Where it is given, values are per class: the game of each class's accuracy.
        coalitions: ``"auto"`` (``"all"`` of up to seven clients, ``"pairs+leave-one-out"`` of more), ``"singles"``
            (each alone), ``"pairs"`` (and every two), ``"leave-one-out"``, ``"both"`` (each alone and all but one),
            ``"pairs+leave-one-out"`` (these three), ``"all"``, or a list of lists of members. Nobody and everybody are
            always known.
        performance: what a model is measured by, see :mod:`flsv.games.performance`.
        per_class: values per class, with the number of classes taken from the data.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better.
        every: value the clients after so many rounds, and after the last; in between they keep their values. Training
            goes on in every round.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: an unknown name, values per class of another performance than
            accuracy; in a loop, before training, whatever the coalitions cannot be
            trained with.

    Example:
        >>> metric = ShadowShapley(num_clients=3, coalitions="all")
        >>> masks = coalition_masks("all", 3)
        >>> metric.update(torch.arange(3), masks, lambda masks: masks.double() @ torch.tensor([1.0, 2.0, 4.0]).double())
        >>> metric.compute()
        tensor([1., 2., 4.])
    """

    sign = "positive: federations do better with the client; negative: worse; 0: no difference."
    cost = "training and a validation of every coalition's model, at the clients too."
    values: Tensor
    errors: Tensor
    seen: Tensor
    evaluations: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        coalitions: Coalitions = "auto",
        performance: str | Metric = "accuracy",
        per_class: bool = False,
        mode: Mode | None = None,
        every: Count = 1,
        **kwargs: Any,
    ) -> None:
        self.coalitions = coalitions if isinstance(coalitions, str) else [list(members) for members in coalitions]
        self.every = every
        self._last: int | None = None
        self._measure(performance, mode, per_class or num_classes is not None)
        super().__init__(num_clients, num_classes, **kwargs)

    @property
    def round_fields(self) -> dict[str, Any]:
        """Where a ``FederatedLoop`` finds the arguments of ``update``."""
        return {"utility": self._game}

    def check_rounds(self, rounds: int) -> None:
        self._last = rounds - 1

    def _game(self, round: Round) -> Callable[[Tensor], Tensor]:
        if round.trained is None or round.games is None:
            raise RuntimeError("no coalitions are trained in this round: ShadowShapley needs a FederatedLoop.")
        return partial(round.trained.play, round.games, self.measured_by)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        width = num_classes if self.per_class and num_classes is not None else 1
        for name in ("values", "errors"):
            self.add_state(name, torch.full((num_clients, width), float("nan")), dist_reduce_fx=latest)
        self.add_state("seen", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("evaluations", torch.tensor(0), dist_reduce_fx="sum")

    def update(
        self, client_ids: Tensor, coalitions: Tensor, utility: Callable[[Tensor], Tensor], round_index: int = 0
    ) -> None:
        """Share out the game of the coalitions as they are after a round."""
        if coalitions.ndim != 2 or coalitions.shape[1] != self.num_clients:
            raise ValueError(f"expected coalitions bool [K, {self.num_clients}], got {list(coalitions.shape)}.")
        masks = coalitions.cpu()
        self.seen = self.seen.clone()
        self.seen[client_ids] += 1
        if (round_index + 1) % self.every and round_index != self._last:
            return
        self._share_out(masks, utility(masks))

    def _share_out(self, masks: Tensor, utilities: Tensor) -> None:
        found = few_coalitions_shapley(masks, utilities)
        self.values = found.values.to(self.values).reshape(self.values.shape)
        errors = one_seed_stderr(found.values, found.stderr)
        self.errors = errors.to(self.errors).reshape(self.errors.shape)
        self.evaluations = self.evaluations + len(masks)

    def compute(self) -> Tensor:
        """``[num_clients]`` or ``[num_clients, num_classes]``, NaN for clients never seen."""
        value = self.values.masked_fill((self.seen == 0)[:, None], float("nan"))
        return value if self.per_class else value.squeeze(-1)

    def intervals(self, level: float = LEVEL, value: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """Low and high ends ``[num_clients]`` of an interval of other seeds' values; None of values per class.

        Args:
            level: in (0, 1).
            value: the clients' values ``[num_clients]``; by default the present ones.

        Example:
            >>> metric = ShadowShapley(num_clients=2)
            >>> metric.update(torch.arange(2), coalition_masks("all", 2), lambda masks: masks.sum(1).double())
            >>> metric.intervals()
            (tensor([0.9178, 0.9178]), tensor([1.0822, 1.0822]))
        """
        if self.per_class:
            return None
        value = self.compute() if value is None else value
        half = t_quantile(level) * self.errors.squeeze(-1).to(value)
        return value - half, value + half

    def diagnostics(self) -> dict[str, Tensor]:
        """The models evaluated in all rounds."""
        return {"evaluations": self.evaluations.clone()}
