"""GradientAgreementGame: gradient agreement combined with a coalition game by the performance.

See :mod:`flsv.functional.gradient_agreement` for what it is made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.functional.gradient_agreement import gradient_agreement_game, part_scales, relative_slopes
from flsv.functional.shapley import Utility, banzhaf
from flsv.games.performance import Mode, is_logged, performance_of
from flsv.metrics.gradient_agreement import GradientAgreement, logged_slopes
from flsv.metrics.guide import Guide
from flsv.round import ClientMatrix, Round

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
        super().__init__(num_clients, balanced=performance == "balanced_accuracy", **kwargs)
        self.performance, self.mode, self.measured_by = performance, mode, measured_by

    @property
    def round_fields(self) -> dict[str, Any]:
        """Where a ``FederatedLoop`` finds the arguments of ``update``."""
        return {
            **super().round_fields,
            "utility": lambda round: round.play(self.measured_by, "samples"),
            "generator": lambda round: round.generator(type(self).__name__),
        }

    def _slopes(self, round: Round) -> Tensor:
        if isinstance(self.measured_by, str):
            return round.slopes(self.balanced)
        return logged_slopes(round, self.measured_by)

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
        self._check_clients(client_ids)
        k = len(client_ids)
        matrix = self._matrix(client_updates, k)
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
        self.rounds += 1

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
