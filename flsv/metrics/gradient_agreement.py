"""GradientAgreement: contributions from the validation loss's slopes along the clients' updates and the updates'
directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.core import ClientMatrix, Round
from flsv.functional.gradient_agreement import gradient_agreement
from flsv.metrics.base import ContributionMetric, latest
from flsv.metrics.cosine_gradient_shapley import cosines_with_sum, parameters_of
from flsv.scores.performance import Measure, classifier_measure, performance_of

#: Step of the difference quotients of a logged loss, as a fraction of an update.
STEP_FRACTION = 0.05
#: A small number that is added to the updates' norms, so that an update of zero causes no division by zero.
EPSILON = 1e-12


class GradientAgreement(ContributionMetric):
    r"""The mean of a client's shares of the loss's decrease and of agreement.

    .. math::
        u_i = -n_i \sum_t \nabla L(x^t) \cdot d_i^t, \qquad a_i = n_i\, \overline{\cos(d_i^t, d_N^t)}, \qquad
        \phi_i = \frac{\max(u_i, 0)}{2 \sum_j \max(u_j, 0)} + \frac{\max(a_i, 0)}{2 \sum_j \max(a_j, 0)}

    with :math:`L` the validation loss, :math:`x^t` the global model of round t, :math:`d_i^t` client i's update,
    :math:`n_i` its number of samples, and :math:`d_N^t` the sum of the updates, each scaled to length
    1 and weighted by samples. A client gets 0 if its update is zero, or if it raises the loss and opposes the other
    clients' updates.

    **Absence.** Early rounds reduce the loss more than late ones, so a plain sum would punish clients that were absent
    early. So :math:`u_i` is a ratio estimate: the sum of the client's terms is multiplied by :math:`A / A_i`, where A
    is the sum, over all rounds, of the mean absolute term of the round's clients, and :math:`A_i` the same sum over the
    client's rounds. With full participation :math:`A = A_i`.

    ``compute`` gives ``[num_clients]``, shares that sum to 1 over the clients seen, NaN for clients that never took
    part. ``diagnostics`` returns :math:`u_i` and the mean cosines.

    When not to use it:
        Where classes are of very unequal size: the mean loss's gradient is dominated by the large classes. Where
        clients may overstate their numbers of samples and nothing bounds them (:class:`flsv.filters.SampleCap`).

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        loss: for modules other than classifiers: the name of the loss that they log in ``validation_step``, such as
            ``"val_loss"``. Its slopes are computed by difference quotients, with one evaluation per client. None: the
            classifier's cross-entropy.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: before the first round: the module does not log the loss.
        ValueError: shapes do not fit, or client ids are unknown or repeated.

    Example:
        >>> metric = GradientAgreement(num_clients=4)
        >>> updates = torch.tensor([[2.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> metric.update(torch.tensor([0, 1, 3]), torch.tensor([-3.0, -1.0, 1.0]), updates, torch.tensor([10, 10, 10]))
        >>> metric.compute()
        tensor([0.6250, 0.3750,    nan, 0.0000])
    """

    unit = "share"
    sign = "larger: the client's steps lower the validation loss, and agree with the cohort's."
    cost = "a gradient of the validation loss, and per client two dot products."
    claims = ("effect", "agreement", "weight")
    to_pay_by = True
    per_class = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    descent: Tensor
    cohort_descent: Tensor
    total_cohort_descent: Tensor
    cosine: Tensor
    participations: Tensor
    samples: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        loss: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.loss = loss
        #: The performance measure of models, see :meth:`flsv.Round.game`.
        self.measure: Measure = classifier_measure("negative_loss")
        if loss is not None:
            self.measure = performance_of(self, loss, mode="min", argument="loss")
        super().__init__(num_clients, num_classes=None, **kwargs)

    rows_of_clients: Sequence[str] = ("gradient_products",)
    needs: Sequence[str] | None = ("slopes", "matrix", "space")

    @property
    def round_fields(self) -> dict[str, Any]:
        """Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``."""
        return {"gradient_products": self._slopes, "client_updates": parameters_of}

    def _slopes(self, round: Round) -> Tensor:
        if self.measure.is_of_classifier:
            return round.slopes()
        return logged_slopes(round, self.measure)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        # Sums over a client's rounds: its descents, the cohorts' mean absolute descents, its cosines, and the number of
        # rounds.
        zeros = torch.zeros(num_clients, dtype=torch.float64)
        for name in ("descent", "cohort_descent", "cosine", "participations"):
            self.add_state(name, zeros.clone(), dist_reduce_fx="sum")
        # The sum of the cohorts' mean absolute descents over all rounds.
        self.add_state(
            "total_cohort_descent", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum"
        )
        unknown_numbers = torch.full_like(zeros, torch.nan)
        self.add_state("samples", unknown_numbers, dist_reduce_fx=latest)

    def update(
        self,
        client_ids: Tensor,
        gradient_products: Tensor,
        client_updates: Tensor | ClientMatrix,
        num_samples: Tensor,
    ) -> None:
        """Update the states with one round.

        Args:
            client_ids: ``[k]``, the round's clients.
            gradient_products: ``[k]``, the products g . d_i of the validation loss's gradient g with the clients'
                updates d_i.
            client_updates: ``[k, P]``, the clients' updates of the P parameters (without buffers). A ``FederatedLoop``
                passes the round's :class:`ClientMatrix`.
            num_samples: ``[k]``, the clients' numbers of training samples.
        """
        matrix = self._matrix(client_updates)
        _check_lengths(len(client_ids), gradient_products, num_samples)
        weights = num_samples.to(self.descent)
        descents = -weights * gradient_products.to(self.descent)
        mean_abs_descent = descents.abs().mean()
        cohort_descents = mean_abs_descent.expand(len(client_ids))
        cosines = _cosines(matrix, weights).to(self.cosine)

        self.descent = self.descent.index_add(0, client_ids, descents)
        self.cohort_descent = self.cohort_descent.index_add(0, client_ids, cohort_descents)
        self.total_cohort_descent = self.total_cohort_descent + mean_abs_descent
        self.cosine = self.cosine.index_add(0, client_ids, cosines)
        ones = torch.ones_like(cosines)
        self.participations = self.participations.index_add(0, client_ids, ones)
        # The old state may be referenced elsewhere, so it is not changed in place.
        self.samples = self.samples.clone()
        self.samples[client_ids] = weights

    def compute(self) -> Tensor:
        """Compute the shares ``[num_clients]``, NaN for clients that never took part."""
        descents, cosines = self._descents_and_cosines()
        return gradient_agreement(descents, cosines).float()

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the parts of each client's value, ``[num_clients]``. ``descent`` is :math:`u_i` in the class's
        formula, ``cosine`` the mean cosine with the sum of updates.
        """
        descents, _ = self._descents_and_cosines()
        return {"descent": descents, "cosine": self.cosine / self.participations}

    def _descents_and_cosines(self) -> tuple[Tensor, Tensor]:
        """Return the clients' shares of the descent, and their mean cosines times their samples."""
        # A client's descent is divided by its cohorts' mean absolute descents, and multiplied by those of all rounds.
        # If its cohorts have no descent, its own descent is 0, too, and is divided by 1.
        has_no_descent = ~(self.cohort_descent > 0)
        never_took_part = self.participations == 0
        divisors = self.cohort_descent.masked_fill(has_no_descent, 1.0)
        divisors = divisors.masked_fill(never_took_part, torch.nan)
        descents = self.descent / divisors * self.total_cohort_descent
        weighted_cosines = self.samples * self.cosine / self.participations
        return descents, weighted_cosines


def _check_lengths(k: int, gradient_products: Tensor, num_samples: Tensor) -> None:
    if gradient_products.shape != (k,) or num_samples.shape != (k,):
        shapes = f"{list(gradient_products.shape)} and {list(num_samples.shape)}"
        raise ValueError(f"expected gradient_products and num_samples [k={k}], got {shapes}.")


def _cosines(matrix: ClientMatrix, weights: Tensor) -> Tensor:
    # [k], with the sum of the updates
    norms = matrix.norms()
    shares = weights.to(norms) / weights.sum().to(norms)
    return cosines_with_sum(matrix, norms, shares, epsilon=EPSILON)


def logged_slopes(round: Round, measure: Any) -> Tensor:
    """Compute a logged loss's slopes ``[k]`` along k updates, by difference quotients from k + 1 evaluations."""
    # A coalition's model is the global model plus STEP_FRACTION times its members' updates.
    num_players = len(round)
    weights = torch.full((num_players,), STEP_FRACTION)
    utility = round.game(measure, weights)

    empty_coalition = torch.zeros(1, num_players, dtype=torch.bool)
    single_clients = torch.eye(num_players, dtype=torch.bool)
    utilities = utility(torch.cat([empty_coalition, single_clients]))
    # A utility is minus the loss, so a slope of the loss is the decrease of the utility.
    return (utilities[0] - utilities[1:]) / STEP_FRACTION
