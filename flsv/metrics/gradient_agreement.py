"""GradientAgreement: one gradient of the validation loss a round, and the directions of the clients' updates; and
GradientAgreementGame, which combines it with a coalition game. See :mod:`flsv.functional.gradients` for their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.functional.agreement import cosines
from flsv.functional.gradients import (
    agreement_scales,
    gradient_agreement,
    gradient_agreement_game,
    part_scales,
    relative_slopes,
)
from flsv.functional.shapley import Utility, banzhaf
from flsv.games.performance import Mode, ModelScore, is_logged, performance_of
from flsv.metrics.base import ContributionMetric, Guide, latest, parameters_of
from flsv.metrics.intervals import OverRounds
from flsv.round import ClientMatrix, Round

#: The step along an update by which the slope of a logged loss is found.
STEP = 0.05
EPSILON = 1e-12


class GradientAgreement(ContributionMetric):
    r"""Half the share of the validation loss that a client's updates remove, half the share of agreement with the
    cohort.

    .. math::
        u_i = -n_i \sum_t \nabla L(x^t) \cdot d_i^t, \qquad a_i = n_i\, \overline{\cos(d_i^t, d_N^t)}, \qquad
        \phi_i = (1 - b) \frac{\max(u_i, 0)}{\sum_j \max(u_j, 0)} + b \frac{\max(a_i, 0)}{\sum_j \max(a_j, 0)}

    with :math:`d_N` the sum of the updates made to one length, weighed by samples. A round costs one gradient of the
    validation loss and two products with the matrix of updates; no coalition is evaluated, so it holds for thousands of
    clients. Whoever sends nothing, or the opposite of what helps, has 0.

    **Absence.** Early rounds take more off the loss than late ones, so a plain sum would punish whoever was absent
    early. :math:`u_i` is the ratio estimate instead: the client's sum over its own rounds, divided by the sum of the
    cohorts' mean absolute values in these rounds, times the same of all rounds. With everybody in every round it is the
    sum.

    As input to ``update``: ``client_ids [k]``, ``gradient_products [k]`` (g . d_i), ``client_updates [k, P]``
    (parameters only) and ``num_samples [k]``. ``compute`` gives ``[num_clients]``, shares that sum to 1 over the
    clients seen, NaN for clients never seen. ``diagnostics`` holds both parts.

    When not to use it:
        Where classes are of very unequal size: the mean loss's gradient is that of the large ones. Where clients may
        overstate their numbers of samples and nothing bounds them (:class:`flsv.filters.SampleCap`).

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        blend: b in [0, 1], the weight of the agreement.
        loss: for modules that are no classifiers: the loss that they log in ``validation_step``, such as
            ``"val_loss"``. Its slopes are difference quotients, one evaluation a client. None: the classifier's
            cross-entropy, by its gradient.
        balanced: the slope of the cross-entropy in which all classes of the validation set count the same, for models
            that are judged by balanced accuracy: where most samples are of one class, the mean loss says little of
            the others.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: ``blend`` out of range; ``balanced`` with a ``loss``; before the first round, a loss that
            the module does not log.
        ValueError: shapes that do not fit, unknown or repeated client ids.

    Example:
        >>> metric = GradientAgreement(num_clients=4)
        >>> updates = torch.tensor([[2.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> metric.update(torch.tensor([0, 1, 3]), torch.tensor([-3.0, -1.0, 1.0]), updates, torch.tensor([10, 10, 10]))
        >>> metric.compute()
        tensor([0.6250, 0.3750,    nan, 0.0000])
    """

    per_class = False
    over_rounds: OverRounds = "sum"
    parts = 2
    """Numbers a client and round that the value is made of."""
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    gain: Tensor
    level: Tensor
    levels: Tensor
    cosine: Tensor
    seen: Tensor
    samples: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        blend: float = 0.5,
        loss: str | None = None,
        balanced: bool = False,
        **kwargs: Any,
    ) -> None:
        check_number(self, "blend", blend, least=0, most=1)
        if balanced and loss is not None:
            raise ConfigurationError(
                f"{type(self).__name__}(loss={loss!r}, balanced=True): the module's own loss has no classes to "
                "balance. Leave one of them out."
            )
        self.blend, self.loss, self.balanced = blend, loss, balanced
        #: What models are measured by, see :meth:`flsv.Round.play`.
        self.measured_by: str | ModelScore = (
            "negative_loss" if loss is None else performance_of(self, loss, "min", "loss")
        )
        super().__init__(num_clients, None, **kwargs)

    @property
    def round_fields(self) -> dict[str, Any]:
        """Where a ``FederatedLoop`` finds the arguments of ``update``."""
        return {"gradient_products": self._slopes, "client_updates": parameters_of}

    def _slopes(self, round: Round) -> Tensor:
        """``[k]``: the loss's slope along every client's update."""
        logged = not isinstance(self.measured_by, str)
        return logged_slopes(round, self.measured_by) if logged else round.slopes(self.balanced)

    def guide(self) -> Guide:
        return Guide(
            unit="share",
            sign="larger: the client's steps lower the validation loss, and go where all go.",
            needs="the server's validation set.",
            cost="a gradient of the validation loss, and per client two dot products.",
        )

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        for name in ("gain", "level", "cosine", "seen"):
            self.add_state(name, torch.zeros(num_clients, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("levels", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.full((num_clients,), float("nan"), dtype=torch.float64), dist_reduce_fx=latest)

    def update(
        self, client_ids: Tensor, gradient_products: Tensor, client_updates: Tensor | ClientMatrix, num_samples: Tensor
    ) -> None:
        """Add one round; shapes ``[k]``, ``[k]``, ``[k, P]``, ``[k]``. A ``FederatedLoop`` gives the cohort's matrix in
        place of the updates."""
        matrix = self._matrix(client_ids, client_updates)
        descent, cosine = self._add(client_ids, gradient_products, matrix, num_samples)
        self._note_parts(client_ids, [descent, num_samples.to(cosine) * cosine])

    def _add(
        self, client_ids: Tensor, gradient_products: Tensor, client_updates: ClientMatrix, num_samples: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add a round to the states: what its updates take off the loss, times samples, and their cosines ``[k]``."""
        k = len(client_ids)
        if gradient_products.shape != (k,) or num_samples.shape != (k,):
            shapes = f"{list(gradient_products.shape)} and {list(num_samples.shape)}"
            raise ValueError(f"expected gradient_products and num_samples [k={k}], got {shapes}.")
        weights = num_samples.to(self.gain)
        descent = -weights * gradient_products.to(self.gain)
        norms = client_updates.norms()
        aggregate = client_updates.combine(weights.to(norms) / weights.sum().to(norms) / (norms + EPSILON))
        length = torch.linalg.vector_norm(aggregate, dtype=torch.float64)
        cosine = cosines(client_updates.dot(aggregate), norms, length).to(self.cosine)
        level = descent.abs().mean()
        self.gain = self.gain.index_add(0, client_ids, descent)
        self.level = self.level.index_add(0, client_ids, level.expand(k))
        self.levels = self.levels + level
        self.cosine = self.cosine.index_add(0, client_ids, cosine)
        self.seen = self.seen.index_add(0, client_ids, torch.ones_like(cosine))
        self.samples = self.samples.clone()
        self.samples[client_ids] = weights
        return descent, cosine

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen."""
        return gradient_agreement(*self._parts(), self.blend).float()

    def diagnostics(self) -> dict[str, Tensor]:
        """What the updates take off the loss, times samples, and the mean cosine ``[num_clients]``."""
        return {"descent": self._parts()[0], "cosine": self.cosine / self.seen}

    def _create_spread(self, num_clients: int) -> None:
        super()._create_spread(self.parts * num_clients)

    def _note_parts(self, client_ids: Tensor, values: list[Tensor], factors: Sequence[float] | None = None) -> None:
        """A round's own numbers ``[k]``, part by part, and its factor in each."""
        assert self.num_clients is not None
        ids = torch.cat([client_ids + part * self.num_clients for part in range(len(values))])
        factor = torch.tensor(factors or [1.0] * len(values)).repeat_interleave(len(client_ids))
        self.note_round(ids, torch.cat(values), factor.to(self.round_spread))

    def _squares(self) -> Tensor:
        # The totals that make shares of the parts are taken as known: little beside the spread of a client's own.
        scale = agreement_scales(*self._parts(), self.blend)
        count, factors = self.round_spread[:, 0].view(2, -1), self.round_spread[:, 9].view(2, -1)
        of_sum = factors[0] * (scale[0] * self.levels / _nonzero(self.level)).square()
        return torch.cat([of_sum, scale[1].square() / count[1].clamp_min(1)]).to(count)

    def _parts(self) -> tuple[Tensor, Tensor]:
        # Where a cohort's slopes are all 0, so is the client's sum.
        descent = (self.gain / _nonzero(self.level) * self.levels).masked_fill(self.seen == 0, float("nan"))
        return descent, self.samples * self.cosine / self.seen


def logged_slopes(round: Round, measure: Any) -> Tensor:
    """float64 ``[k]``: by how much what the module logs gets worse along every client's update: difference quotients,
    one evaluation a client and one more."""
    players = len(round)
    utility = round.play(measure, torch.full((players,), STEP))
    masks = torch.cat([torch.zeros(1, players, dtype=torch.bool), torch.eye(players, dtype=torch.bool)])
    values = utility(masks)
    return (values[0] - values[1:]) / STEP


#: Up to so many players all coalitions are evaluated; of more, so many evaluations a player.
EXACT, PER_PLAYER = 10, 20


class GradientAgreementGame(GradientAgreement):
    r"""Combines four shares: the validation loss that updates remove, the same per length, their agreement with the
    cohort, and Banzhaf values of coalitions.

    .. math::
        u_i = n_i \sum_t s_i^t, \quad
        r_i = n_i\, \overline{\frac{s_i^t / |d_i^t|}{\frac1k \sum_j |s_j^t| / |d_j^t|}}, \quad
        a_i = n_i\, \overline{\cos(d_i^t, d_N^t)}, \quad
        b_i = \sum_t \omega^t \beta_i^t

    .. math::
        \phi_i = \frac1{3 + w} \left( \frac{\max(u_i, 0)}{\sum_j \max(u_j, 0)} + \frac{r_i}{\sum_j |r_j|}
            + \frac{\max(a_i, 0)}{\sum_j \max(a_j, 0)} + w \frac{b_i}{\sum_j |b_j|} \right)

    with :math:`s_i = -\nabla L(x) \cdot d_i` of the validation loss L that goes with the performance,
    :math:`\overline{\cdot}` the mean over a client's rounds, :math:`d_N` as in :class:`GradientAgreement`, and
    :math:`\beta_i^t` the Banzhaf value of the round's game, in which coalitions' updates are averaged by samples.
    L is the mean cross-entropy, judged by balanced accuracy that in which all classes count the same, and of a module
    that is no classifier what it logs. Whoever harms has a negative value.

    Nearest of all here to retrained Shapley values where classes are of unequal size or numbers are predicted; a round
    costs 2^k evaluations up to 10 clients, 20 a client beyond (maximum sample reuse). See ``docs/benchmark.md``.

    **Absence.** Sums are the ratio estimates of :class:`GradientAgreement`, those of the games too.

    As input to ``update``: ``client_ids [k]``, ``gradient_products [k]`` (g . d_i), ``client_updates [k, P]``
    (parameters only), ``num_samples [k]``, ``round_index`` from 0, a ``utility(masks: bool [K, k]) -> [K]`` and a
    ``generator``. ``compute`` gives ``[num_clients]``, shares in -(1 + w)/(3 + w) to 1, NaN for clients never seen.
    ``diagnostics`` holds the parts and the evaluations.

    When not to use it:
        Where a value must have a unit, such as accuracy: it is a share of four things. Above ten clients a round costs
        20 evaluations a client. Where clients may overstate their numbers of samples and nothing bounds them.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        performance: what models are judged by: ``"accuracy"``, ``"balanced_accuracy"``, ``"negative_loss"``, or a value
            that the module logs in ``validation_step``, such as ``"val_loss"``, whose slopes are then difference
            quotients.
        mode: whether less (``"min"``) or more (``"max"``) of a logged value is better.
        game_weight: w.
        decay: omega in (0, 1], of the rounds' games.
        budget: evaluations a round; None: all 2^k up to 10 clients, else 20 a client.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: an argument out of range; a torchmetrics metric as performance, which has no slope; before
            the first round, a value that the module does not log.
        ValueError: shapes that do not fit, unknown or repeated client ids.

    Example:
        >>> metric = GradientAgreementGame(num_clients=3)
        >>> updates = torch.tensor([[2.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> game = lambda masks: masks.float() @ torch.tensor([0.2, 0.1, -0.1])
        >>> slopes, samples = torch.tensor([-3.0, -1.0, 1.0]), torch.tensor([10, 10, 10])
        >>> metric.update(torch.arange(3), slopes, updates, samples, 0, game)
        >>> metric.compute()
        tensor([ 0.5510,  0.3316, -0.1173])
    """

    parts = 4
    plot_lower_bound = -1.0

    relative: Tensor
    game: Tensor
    game_level: Tensor
    game_levels: Tensor
    evaluations: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        performance: str = "accuracy",
        mode: Mode | None = None,
        game_weight: float = 0.5,
        decay: float = 0.8,
        budget: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_number(self, "game_weight", game_weight, least=0)
        check_number(self, "decay", decay, above=0, most=1)
        if budget is not None:
            check_number(self, "budget", budget, least=2, whole=True)
        measured_by = performance_of(self, performance, mode)
        if not isinstance(measured_by, str) and not is_logged(measured_by):
            raise ConfigurationError(
                f"{type(self).__name__}(performance={type(performance).__name__}()): the slope of a torchmetrics "
                "metric is not known. Expected 'accuracy', 'balanced_accuracy', 'negative_loss' or the name of a value "
                "that the module logs."
            )
        self.game_weight, self.decay, self.budget = game_weight, decay, budget
        self.performance, self.mode = performance, mode
        balanced = performance == "balanced_accuracy"
        super().__init__(num_clients, blend=0.5, loss=None, balanced=balanced, **kwargs)
        self.measured_by = measured_by

    @property
    def round_fields(self) -> dict[str, Any]:
        """Where a ``FederatedLoop`` finds the arguments of ``update``."""
        return {
            **super().round_fields,
            "utility": lambda round: round.play(self.measured_by, "samples"),
            "generator": lambda round: round.generator(type(self).__name__),
        }

    def guide(self) -> Guide:
        return Guide(
            unit="share",
            sign="larger: its steps help and go where all go, and coalitions do better with it; negative: it harms.",
            needs="the server's validation set.",
            cost="a gradient of the validation loss, and a validation of every coalition's model: 2^k of k clients, "
            "from 11 clients on 20 a client, or the budget.",
        )

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        super().init_states(num_clients, num_classes)
        for name in ("relative", "game", "game_level"):
            self.add_state(name, torch.zeros(num_clients, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("game_levels", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("evaluations", torch.tensor(0), dist_reduce_fx="sum")

    def update(  # type: ignore[override]
        self,
        client_ids: Tensor,
        gradient_products: Tensor,
        client_updates: Tensor | ClientMatrix,
        num_samples: Tensor,
        round_index: int,
        utility: Utility,
        generator: torch.Generator | None = None,
    ) -> None:
        """Add one round; ``client_ids [k]`` are the players of its game."""
        k = len(client_ids)
        matrix = self._matrix(client_ids, client_updates)
        descent, cosine = self._add(client_ids, gradient_products, matrix, num_samples)
        relative = relative_slopes(-gradient_products, matrix.norms()).to(self.relative)
        budget = PER_PLAYER * k if self.budget is None and k > EXACT else self.budget
        estimate = banzhaf(utility, k, budget=budget, generator=generator)
        values, factor = estimate.values.to(self.game), self.decay**round_index
        level = (factor * values).abs().mean()
        self.relative = self.relative.index_add(0, client_ids, relative)
        self.game = self.game.index_add(0, client_ids, factor * values)
        self.game_level = self.game_level.index_add(0, client_ids, level.expand(k))
        self.game_levels = self.game_levels + level
        self.evaluations = self.evaluations + estimate.evaluations
        weights = num_samples.to(relative)
        self._note_parts(client_ids, [descent, weights * relative, weights * cosine, values], [1.0, 1.0, 1.0, factor])

    def compute(self) -> Tensor:
        """``[num_clients]``, NaN for clients never seen."""
        return gradient_agreement_game(*self._four(), self.game_weight).float()

    def diagnostics(self) -> dict[str, Tensor]:
        """What the updates take off the loss times samples, their mean slope per length, their mean cosine, the games'
        values ``[num_clients]``, and the evaluations."""
        descent, _, _, game = self._four()
        return {
            "descent": descent,
            "relative": self.relative / self.seen,
            "cosine": self.cosine / self.seen,
            "game": game,
            "evaluations": self.evaluations.clone(),
        }

    def _four(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        descent, agreement = self._parts()
        game = self.game / _nonzero(self.game_level) * self.game_levels
        relative = self.samples * self.relative / self.seen
        return descent, relative, agreement, game.masked_fill(self.seen == 0, float("nan"))

    def _squares(self) -> Tensor:
        scale = part_scales(*self._four(), self.game_weight)
        count, factors = (self.round_spread[:, column].view(4, -1) for column in (0, 9))
        of_sum = factors[0] * (scale[0] * self.levels / _nonzero(self.level)).square()
        of_game = factors[3] * (scale[3] * self.game_levels / _nonzero(self.game_level)).square()
        of_means = [scale[part].square() / count[part].clamp_min(1) for part in (1, 2)]
        return torch.cat([of_sum, *of_means, of_game]).to(count)


def _nonzero(level: Tensor) -> Tensor:
    return level.where(level > 0, torch.ones_like(level))
