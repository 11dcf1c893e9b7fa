"""ClassSpecificShapley: what every participant contributes to every class, from the classifier head alone.

Tastan et al. (IJCAI 2024), Algorithm 1, lines 16-17.

CosineGradientShapley: every participant's reputation, from the direction of its updates.

Xu et al. (NeurIPS 2021), "Gradient Driven Rewards to Guarantee Fairness in Collaborative Machine Learning" (CGSV).
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flsv.core import ClientMatrix
from flsv.functional import class_specific_shapley
from flsv.functional.cgsv import cohort_reputation, normalized, updated_reputation
from flsv.functional.moving_average import momentum_add, momentum_merge, momentum_value
from flsv.metrics.base import ContributionMetric, cosines_with_sum, parameters_of
from flsv.utilities.declared import Momentum, Positive


class ClassSpecificShapley(ContributionMetric):
    r"""Class-specific Shapley values (CSSV) of ShapFed, with momentum over rounds.

    .. math::
        \tilde\Gamma_{ij} = \cos(h_{ij}, h_{sj}), \qquad
        \Gamma \leftarrow \mu\,\Gamma + (1 - \mu)\,\tilde\Gamma \quad\text{(the first round as is)}

    where :math:`h_{ij}` is row *j* (weights and bias) of client *i*'s classifier head and :math:`h_{sj}` the same of
    the aggregate. Costs one dot product per client and class: no validation data, no coalition.

    As input to ``update``: ``client_ids [k]``, ``client_heads [k, M, D]``, ``server_head [M, D]``, and for
    ``weighting="samples"`` ``num_samples [k]``. ``compute`` gives ``[num_clients, num_classes]`` in [-1, 1]: 1 where a
    client pulls the class's row just where the federation goes, 0 where it has nothing to say, negative where it pulls
    the other way. A client outside the cohort keeps its row; a client never seen is NaN. ``per_client`` gives the
    mean over classes, a cosine like its parts; gamma of eq. 6, by which ShapFed aggregates, is (1 + mean) / 2, see
    :func:`flsv.functional.participant_weights`.

    With two classes the rows of the head's update mirror each other (the gradients of two logits sum to 0), so that
    both classes have one and the same number. It tells who pulls the other way, such as a client with exchanged
    labels, and not what clients are worth: the fit says so in a warning; figures are in
    ``docs/explanation/metrics.md``.

    A cosine does not say how much data stands behind it: a client that splits its samples between two names is worth
    nearly twice as much. With ``weighting="samples"``, which is not the paper's, ``per_client`` multiplies the mean by
    the client's number of samples, as :class:`flsv.aggregation.ShapFedWA` does for its weights: two halves then come to
    the whole or to less. The cosines stay what they are. Numbers of samples are the clients' own claims;
    a :class:`flsv.filters.SampleCap` bounds them.

    When not to use it:
        To pay by: it says who agrees with the others, not what the model gains by whom. With two classes, whose numbers
        are the same; without a linear classifier head; where clients differ in how much they have, unless weighted by
        samples.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        num_classes: M, likewise.
        momentum: mu in [0, 1); the paper gives none. A client's momentum counts the rounds in which it took part.
        source: the head of the client's ``"update"``, or of its ``"weights"``. Weights are what the authors' code
            compares, but after some tens of rounds every cosine is above 0.98, so updates are the default.
        weighting: what ``per_client`` multiplies the mean by: ``"uniform"``, nothing, as in the paper; or
            ``"samples"``, the moving average of the client's number of samples, with the momentum of the cosines.
        head: name of the classifier head as in ``module.named_modules()``; by default timm's ``get_classifier()`` or
            the last ``nn.Linear``.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: momentum outside [0, 1), an unknown source or weighting.
        ValueError: shapes that do not fit ``num_classes``, unknown or repeated client ids.

    Source:
        Tastan, Fares, Aremu, Horváth, Nandakumar: Redefining Contributions: Shapley-Driven Federated Learning, IJCAI
        2024, eq. 5-6 and Algorithm 1.

    Example:
        >>> metric = ClassSpecificShapley(num_clients=3, num_classes=2)
        >>> heads = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, -1.0]]])
        >>> metric.update(torch.tensor([0, 2]), heads, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> metric.compute()
        tensor([[ 1.,  1.],
                [nan, nan],
                [ 1., -1.]])
        >>> metric = ClassSpecificShapley(num_clients=3, num_classes=2, weighting="samples")
        >>> metric.update(torch.tensor([0, 2]), heads, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([30, 80]))
        >>> metric.per_client(metric.compute())
        tensor([30., nan,  0.])
    """

    sign = "from -1 to 1: 1 pulls a class where the federation goes, negative the other way, 0 neither."
    cost = "a dot product per client and class; no coalition."
    to_pay_by = False
    over_rounds = "momentum"
    history: Tensor

    plot_lower_bound = -1.0
    plot_upper_bound = 1.0

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        momentum: Momentum = 0.9,
        source: Literal["update", "weights"] = "update",
        weighting: Literal["uniform", "samples"] = "uniform",
        head: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.momentum, self.source, self.weighting, self.head = momentum, source, weighting, head
        super().__init__(num_clients, num_classes, **kwargs)

    @property
    def round_fields(self) -> dict[str, str]:
        """Where a ``FederatedLoop`` finds the arguments of ``update`` that are not named as in :class:`flsv.Round`."""
        if self.source == "update":
            return {}
        return {"client_heads": "client_head_weights", "server_head": "server_head_weights"}

    def _bounded(self, end: Tensor) -> Tensor:
        return end if self._weighs else super()._bounded(end)  # the bounds are those of cosines

    @property
    def _weighs(self) -> bool:
        return self.weighting == "samples"

    def bind(self, num_clients: int, num_classes: int, *args: Any, **kwargs: Any) -> None:
        super().bind(num_clients, num_classes, *args, **kwargs)
        if num_classes == 2:
            warnings.warn(
                f"{type(self).__name__}: of two classes both have the same number, since the rows of the head mirror "
                "each other. It tells who pulls the other way and not what clients are worth, and is near 1 for all "
                "who agree. For values take ShadowShapley or CumulativeShapley, by class "
                "PartialFederatedShapley(per_class=True).",
                stacklevel=2,
            )

    @property
    def unit(self) -> str:  # type: ignore[override]
        """Unit of a value."""
        return "cosine with the aggregate" + ("; over all classes, times samples" if self._weighs else "")

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        assert num_classes is not None
        reduction = partial(momentum_merge, momentum=self.momentum)
        # Beside the classes the samples, where they count: they have the same momentum.
        start = torch.zeros(num_clients, 2 * (num_classes + self._weighs) + 1)
        self.add_state("history", start, dist_reduce_fx=reduction)

    def update(
        self, client_ids: Tensor, client_heads: Tensor, server_head: Tensor, num_samples: Tensor | None = None
    ) -> None:
        """Add one round; shapes ``[k]``, ``[k, M, D]``, ``[M, D]``, ``[k]``.

        Raises:
            ValueError: see the class; no numbers of samples where they count.
        """
        if client_heads.ndim != 3 or client_heads.shape[:2] != (len(client_ids), self.num_classes):
            raise ValueError(
                f"expected client_heads [k={len(client_ids)}, M={self.num_classes}, D], got {list(client_heads.shape)}."
            )
        values = class_specific_shapley(client_heads, server_head).to(self.history)
        mean = values.mean(-1)
        if self._weighs:
            if num_samples is None or num_samples.shape != client_ids.shape:
                found = None if num_samples is None else list(num_samples.shape)
                raise ValueError(f'weighting="samples" expects num_samples [k={len(client_ids)}], got {found}.')
            samples = num_samples.to(self.history)
            values, mean = torch.cat([values, samples[:, None]], dim=1), samples * mean
        self.history = momentum_add(self.history, client_ids, values, self.momentum)
        self.note_round(client_ids, mean)

    def compute(self) -> Tensor:
        """``[num_clients, num_classes]``, NaN for clients never seen."""
        return momentum_value(self.history, self.momentum)[:, : self.num_classes]

    def per_client(self, value: Tensor) -> Tensor:
        """The mean over classes ``[num_clients]``, in [-1, 1], times the clients' samples with ``weighting="samples"``;
        NaN for clients never seen."""
        mean = super().per_client(value)
        return mean * momentum_value(self.history, self.momentum)[:, -1].to(mean) if self._weighs else mean


class CosineGradientShapley(ContributionMetric):
    r"""CGSV's reputations: how well each client's updates point where the cohort's go.

    .. math::
        \varphi_i = \cos(u_i, u_N), \qquad r_i \leftarrow \max(\alpha r_i + (1 - \alpha)\varphi_i, \epsilon),
        \qquad r \leftarrow r / \textstyle\sum_j r_j

    with :math:`u_i` client *i*'s update made to one length and :math:`u_N` their weighted sum. Costs two products with
    the matrix of updates: no validation data, no coalition.

    As input to ``update``: ``client_ids [k]``, ``client_updates [k, P]`` (parameters only: buffers have no gradient),
    ``num_samples [k]`` and ``aggregation_weights [k]``. In a ``FederatedLoop`` the metric is updated after
    aggregation, with the weights of that aggregation in :math:`u_N`: under :class:`flsv.aggregation.CGSV` these are
    the reputations before the round, as in the paper, and data shares in the first. ``compute`` gives
    ``[num_clients]``, shares that sum to 1 over the clients seen, NaN for clients never seen. ``diagnostics`` holds
    each client's last :math:`\varphi_i`.

    Where the paper, with full participation, is silent: the cohort shares out anew what its members had together, so
    absent clients keep theirs; a client that joins late starts from the mean of the known ones.

    A reputation depends on all rounds in their order, so that parts of a run cannot be merged, nor two processes'
    rounds synchronized: that is refused. ``forward`` updates twice.

    When not to use it:
        To pay by: it is a share of directions, and does not say by how much a model has improved. Where somebody's data
        are rare and right: whoever differs from the majority has a low reputation. With a majority that errs.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        alpha: in [0, 1), how much of a reputation is memory.
        floor: the least reputation in a cohort, above 0.
        init: what the reputations remember in the first round: ``"zero"``, as in the authors' code, where they are
            :math:`\varphi / \sum_j \varphi_j` after it, or ``"shares"``: they start from the data shares, which alpha
            keeps for many rounds.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: alpha outside [0, 1), floor not above 0, another ``init``.
        ValueError: shapes that do not fit, unknown or repeated client ids; a merge.

    Example:
        >>> metric = CosineGradientShapley(num_clients=4, alpha=0.5)
        >>> updates = torch.tensor([[2.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> metric.update(torch.tensor([0, 1, 3]), updates, torch.tensor([10, 10, 10]))
        >>> metric.compute()
        tensor([0.4995, 0.4995,    nan, 0.0010])
    """

    unit = "reputation (share)"
    sign = "from 0 to 1, shares that sum to 1 over the clients seen; more is better."
    cost = "two products with the matrix of updates; no coalition."
    per_class = False
    to_pay_by = False
    full_state_update = True
    mergeable = False
    #: Where a ``FederatedLoop`` finds the arguments of ``update``.
    round_fields: ClassVar[dict[str, Any]] = {"client_updates": parameters_of}
    over_rounds = "sum"
    plot_lower_bound = 0.0

    reputation: Tensor
    phi: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        alpha: Momentum = 0.95,
        floor: Positive = 1e-3,
        init: Literal["zero", "shares"] = "zero",
        **kwargs: Any,
    ) -> None:
        self.alpha, self.floor, self.init = alpha, floor, init
        super().__init__(num_clients, None, **kwargs)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("reputation", torch.full((num_clients,), float("nan")), dist_reduce_fx=None)
        self.add_state("phi", torch.full((num_clients,), float("nan")), dist_reduce_fx=None)

    def update(
        self,
        client_ids: Tensor,
        client_updates: Tensor | ClientMatrix,
        num_samples: Tensor | None = None,
        aggregation_weights: Tensor | None = None,
    ) -> None:
        """Add one round; shapes ``[k]``, ``[k, P]``, ``[k]``, ``[k]``.

        Without ``num_samples`` the shares of the first round are equal; without ``aggregation_weights`` the reputations
        weigh. A ``FederatedLoop`` gives the cohort's matrix in place of the updates, which needs no second one.
        """
        matrix = self._matrix(client_ids, client_updates)
        samples = torch.ones_like(client_ids) if num_samples is None else num_samples
        before = cohort_reputation(self.reputation, client_ids, samples)
        weights = normalized(before) if aggregation_weights is None else aggregation_weights.double()
        norms = matrix.norms()
        phi = cosines_with_sum(matrix, norms, weights.to(norms))
        begins = self.init == "zero" and bool(self.reputation.isnan().all())  # with nothing to remember
        after = updated_reputation(None if begins else before.to(phi.device), phi, alpha=self.alpha, floor=self.floor)
        self.reputation, self.phi = self.reputation.clone(), self.phi.clone()
        # What the cohort has together stays the same; compute makes the whole sum to 1.
        self.reputation[client_ids] = (after * before.sum()).to(self.reputation)
        self.phi[client_ids] = phi.to(self.phi)
        # The round's own say: the cohort's cosines as shares of what it has together. A share is then the sum of the
        # rounds' own, but for the floor.
        phi = phi.double().clamp_min(self.floor)
        new, old = (1 - self.alpha) * phi.sum(), 0.0 if begins else self.alpha
        share = before.sum().to(phi) * phi / phi.sum()
        self.note_round(client_ids, share, (new / (new + old)).to(self.phi), (old / (new + old)).to(self.phi))

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen."""
        return self.reputation / self.reputation.nansum()

    def diagnostics(self) -> dict[str, Tensor]:
        """Each client's last cosine with the aggregate ``[num_clients]``."""
        return {"phi": self.phi.clone()}
