"""Clients' values as a query over the scored models of coalitions: without Trainer, metric or run.

A :class:`Game` says which coalitions count, after which rounds, and by which performance measure. :class:`SeedScores`
has the coalitions' models of one seed, as :mod:`flsv.values.coalition_files` reads them from a run's folder.
:func:`values_by_round` computes the values of one seed, and :func:`values` a table, of several seeds as means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flsv.core import Values
from flsv.functional import few_coalitions_shapley
from flsv.functional.intervals import one_seed_stderr, prediction_stderr, t_quantile
from flsv.functional.joint_shares import CaseValues
from flsv.functional.shapley.predicted_outputs import (
    OutputMeasure,
    PredictedValues,
    ValuesFromOutputs,
    favors_nobody,
)
from flsv.games.members import Members, members_of
from flsv.utilities.display import INTERVAL_LEVEL
from flsv.utilities.errors import ConfigurationError
from flsv.values.coalition_files import (
    CLASSIFIER_OUTPUTS,
    COALITIONS_FOLDER,
    Models,
    ScoredModel,
    read_coalitions,
    read_settings,
    read_untrained,
    rounds_of,
)
from flsv.values.designs import Halves, design_of
from flsv.values.over_seeds import mean_with_interval

if TYPE_CHECKING:  # pandas is slow to import
    from pandas import DataFrame

#: The number of last rounds whose values' spread enters the intervals, and over which values are averaged.
NUM_RECENT_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Game:
    """A game of n clients: the coalitions that were trained, and the measure of their models.

    Args:
        masks: bool ``[K, n]``, the trained coalitions, with the empty and the full one.
        rounds: the rounds after which there are values, ascending.
        measure: name of the performance measure, see :func:`flsv.values.coalition_files.measure_name`.
        weights: ``[n]``, the clients' weights in the federation's average. None: no outputs are predicted.
        of_outputs: the measure as a function of outputs. None: no outputs are predicted.
        outputs: name of the measure under which outputs are stored.
        averages: whether values are means over the last rounds, as with a sampler.
        per_class: whether each class is a game of its own.
    """

    masks: Tensor
    rounds: Sequence[int]
    measure: str
    weights: Tensor | None = None
    of_outputs: ValuesFromOutputs | None = None
    outputs: str = CLASSIFIER_OUTPUTS
    averages: bool = False
    per_class: bool = False

    @property
    def coalitions(self) -> list[Members]:
        """Return the members of each coalition."""
        return members_of(self.masks)

    @property
    def are_all_trained(self) -> bool:
        """Return whether no coalition is missing."""
        num_coalitions, num_clients = self.masks.shape
        return num_coalitions == 2**num_clients

    @property
    def has_outputs(self) -> bool:
        """Return whether the measure is computed from outputs, and these coalitions allow to predict the others'."""
        if self.of_outputs is None or self.weights is None:
            return False
        return favors_nobody(self.masks)

    @property
    def predicts(self) -> bool:
        """Return whether the outputs of missing coalitions are predicted."""
        return self.has_outputs and not self.are_all_trained

    def without_class_axis(self, utilities: Tensor) -> Tensor:
        """Return utilities ``[K, 1]`` as ``[K]``, and those by class as they are."""
        return utilities if self.per_class else utilities.squeeze(1)

    def evidence(self, utilities: Tensor, source: str) -> dict[str, Any]:
        """Return where the utilities of coalitions come from, those of clients alone, and of all together, and the
        ends between which the values distribute the gain.
        """
        is_partly_trained = not self.are_all_trained
        is_alone = self.masks.sum(1) == 1
        design = design_of(self.masks)
        name = design.name if design else ""
        halvings = design.halvings if isinstance(design, Halves) else 0
        return {
            "source": source,
            "trainings": name,
            "listed": [] if name else [list(members) for members in self.coalitions],
            "alone_only": is_partly_trained and are_singles_only(self.masks),
            "halved": halvings > 0,
            "halvings": halvings,
            # The others' scores are then estimated from too few.
            "ranks_only": source == "scores" and name in ("singles", "leave-one-out"),
            "alone": [] if self.per_class else utilities[is_alone].tolist(),
            "together": None if self.per_class else float(utilities[self.masks.all(1)]),
            "ends": None if self.per_class else self._ends(utilities),
        }

    def _ends(self, utilities: Tensor) -> list[float]:
        """Return the utilities ``[K]`` of nobody and of all together."""
        nobody = utilities[~self.masks.any(1)]
        together = utilities[self.masks.all(1)]
        return [float(nobody), float(together)]


def are_singles_only(masks: Tensor) -> bool:
    """Return whether coalitions ``[K, n]`` are each a client alone, beside the empty one and the full one."""
    is_single = masks.sum(1) == 1
    return len(masks) == 2 + int(is_single.sum())


@dataclass(frozen=True, eq=False)
class SeedScores:
    """The scored models of one seed's coalitions, and utilities of untrained models by measure."""

    models: Mapping[Members, Models]
    untrained: Mapping[str, Tensor] = field(default_factory=dict)

    def utilities(self, game: Game, round_index: int) -> Tensor:
        """Return the coalitions' utilities after a round, float64 ``[K, 1]`` or by class ``[K, M]``."""
        models = self._models_after(game, round_index)
        utilities = [model.utilities[game.measure] for model in models]
        return torch.tensor(utilities, dtype=torch.float64)

    def outputs(self, game: Game, round_index: int) -> Tensor:
        """Return the coalitions' outputs ``[K, V, ...]`` after a round."""
        models = self._models_after(game, round_index)
        outputs = [model.outputs[game.outputs] for model in models]
        return torch.stack(outputs)

    def in_double(self) -> SeedScores | None:
        """Return the same models as they come out in 64 bits, where this is known. None: it is not known of any."""
        models_in_double: dict[Members, Models] = {}
        is_known = False
        for members, models in self.models.items():
            is_known |= any(model.in_double is not None for model in models.values())
            models_in_double[members] = {
                round_index: model.in_double or model for round_index, model in models.items()
            }
        return SeedScores(models_in_double, self.untrained) if is_known else None

    def _models_after(self, game: Game, round_index: int) -> list[ScoredModel]:
        models = []
        for members in game.coalitions:
            (model_round,) = rounds_of(members, [round_index])
            models.append(self.models[members][model_round])
        return models


def values_by_round(scores: SeedScores, game: Game) -> dict[int, Values]:
    """Compute the values of one seed's game after each of its rounds. Where it is known what models come to in 64 bits,
    intervals include by how much the values differ.
    """
    values = _values_by_round(scores, game)
    scores_in_double = scores.in_double()
    if scores_in_double is None:
        return values
    values_in_double = _values_by_round(scores_in_double, game)
    return {
        round_index: _with_rounding(values_of_round, values_in_double[round_index])
        for round_index, values_of_round in values.items()
    }


def _with_rounding(values: Values, values_in_double: Values) -> Values:
    """Return values whose intervals include by how much they differ from the values in 64 bits."""
    if values.missing is not None or values_in_double.missing is not None:
        return values
    assert values.half_width is not None
    difference = (values.value - values_in_double.value).abs()
    return replace(
        values,
        half_width=(values.half_width.square() + difference.square()).sqrt(),
        evidence={**(values.evidence or {}), "rounding": difference.flatten().tolist()},
    )


def _values_by_round(scores: SeedScores, game: Game) -> dict[int, Values]:
    predictions = _predicted_values(scores, game)
    values: dict[int, Values] = {}
    recent_estimates: list[Tensor] = []
    for round_index in game.rounds:
        if round_index - 1 not in values:  # rounds without values lie between
            recent_estimates = []
        values[round_index], estimate = value_after_round(
            game,
            scores.utilities(game, round_index),
            outputs=scores.outputs(game, round_index) if game.has_outputs else None,
            predicted=predictions.get(round_index),
            untrained=scores.untrained.get(game.measure),
            recent_estimates=recent_estimates,
        )
        recent_estimates = [*recent_estimates, estimate][-NUM_RECENT_ROUNDS:]
    return values


def _predicted_values(scores: SeedScores, game: Game) -> dict[int, PredictedValues]:
    """Return the values after each round whose utilities and outputs are finite, if the game predicts outputs."""
    if not game.predicts:
        return {}
    assert game.of_outputs is not None
    assert game.weights is not None
    utilities_by_round = {}
    for round_index in game.rounds:
        utilities = scores.utilities(game, round_index)
        outputs = scores.outputs(game, round_index)
        if not _coalitions_not_finite(game.masks, utilities, outputs):
            utilities_by_round[round_index] = game.without_class_axis(utilities)
    if not utilities_by_round:
        return {}
    values = game.of_outputs.shapley(
        game.masks,
        utilities=[*utilities_by_round.values()],
        # Each round's outputs are stacked when it is its turn.
        outputs=(scores.outputs(game, round_index) for round_index in utilities_by_round),
        weights=game.weights,
    )
    return dict(zip(utilities_by_round, values))


def _coalitions_not_finite(
    masks: Tensor, utilities: Tensor, outputs: Tensor | None
) -> list[list[int]]:
    """Return the members of each coalition ``[K, n]`` with a utility or an output that is not finite."""
    is_finite = utilities.isfinite().all(1).cpu()
    if outputs is not None:
        is_finite &= outputs.flatten(1).isfinite().all(1)
    return [list(members) for members in members_of(masks[~is_finite])]


def value_after_round(
    game: Game,
    utilities: Tensor,
    *,
    outputs: Tensor | None = None,
    predicted: PredictedValues | None = None,
    untrained: Tensor | None = None,
    recent_estimates: Sequence[Tensor] = (),
) -> tuple[Values, Tensor]:
    """Compute the values after one round, and those of this round alone, float64 ``[n, 1]`` or ``[n, M]``. All are NaN
    if a coalition has no finite performance.

    Args:
        game: the game.
        utilities: ``[K, 1]`` or ``[K, M]``, the coalitions' utilities.
        outputs: ``[K, V, ...]``, their models' outputs. None: they are not known.
        predicted: the values from predicted outputs. None: they are computed from utilities.
        untrained: ``[R, 1]`` or ``[R, M]``, utilities of untrained models with different initial weights. None: they
            are not known.
        recent_estimates: the values ``[n, 1]`` or ``[n, M]`` of the rounds just before, each after the other.
    """
    shape = game.masks.shape[1], utilities.shape[1]  # [n, 1] or [n, M]
    broken_coalitions = _coalitions_not_finite(game.masks, utilities, outputs)
    if broken_coalitions:
        no_values = torch.full(shape, torch.nan).double()
        reason = f"The coalitions {broken_coalitions} come to no finite performance."
        nothing = game.without_class_axis(no_values)
        return Values(nothing, half_width=nothing, evidence={}, missing=reason), no_values

    flat_estimate, flat_stderr, evidence = _estimate(
        game, game.without_class_axis(utilities), predicted
    )
    estimate = flat_estimate.reshape(shape).double()
    recent_values = torch.stack([*recent_estimates, estimate][-NUM_RECENT_ROUNDS:])
    values = estimate
    if game.averages:
        # Which clients a round draws is luck, and the mean over successive rounds has less of it.
        values = recent_values.nanmean(0)
        evidence = _with_end_of_mean(evidence, float((values - estimate).sum()))
    has_spread = _has_spread(recent_values, game)
    stderr = one_seed_stderr(
        values,
        flat_stderr.reshape(shape),
        untrained_utilities=untrained if _is_finite(untrained) else None,
        recent_values=recent_values if has_spread else None,
    )
    after_round = Values(
        game.without_class_axis(values),
        half_width=game.without_class_axis(t_quantile(INTERVAL_LEVEL) * stderr),
        evidence=evidence,
        case_values=_case_values(game, outputs),
    )
    return after_round, estimate


def _with_end_of_mean(evidence: dict[str, Any], difference: float) -> dict[str, Any]:
    """Return evidence in which the gain's end is that of means over rounds, whose sum has this ``difference``."""
    if evidence["ends"] is None:
        return evidence
    start, end = evidence["ends"]
    return {**evidence, "ends": [start, end + difference]}


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor.isfinite().all())


def _has_spread(recent_values: Tensor, game: Game) -> bool:
    """Return whether the spread of a game's recent values is that of its trainings."""
    # Predictions of several rounds differ by what is predicted, too.
    if game.predicts or len(recent_values) < NUM_RECENT_ROUNDS:
        return False
    return _is_finite(recent_values)


def _case_values(game: Game, outputs: Tensor | None) -> Callable[[], CaseValues | None] | None:
    measure = game.of_outputs
    if not isinstance(measure, OutputMeasure) or measure.by_sample is None:
        return None
    if outputs is None or game.per_class:
        return None
    assert game.weights is not None
    return partial(measure.shapley_by_sample, game.masks, outputs, game.weights)


def _estimate(
    game: Game, utilities: Tensor, predicted: PredictedValues | None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return one round's values, their standard errors because of coalitions that are not trained, and evidence."""
    if predicted is not None:
        disagreement = predicted.disagreement
        evidence = game.evidence(utilities, source="outputs")
        evidence["disagreement"] = disagreement.flatten().tolist()
        return predicted.values, prediction_stderr(disagreement), evidence

    estimate = few_coalitions_shapley(game.masks, utilities)
    source = "trainings" if game.are_all_trained else "scores"
    evidence = game.evidence(utilities, source)
    evidence["stderr"] = estimate.stderr.flatten().tolist()
    return estimate.values, estimate.stderr, evidence


def mean_over_seeds(seeds: Sequence[Values]) -> Values:
    """Return the mean values ``[n]`` over seeds, with their 90 % intervals."""
    if len(seeds) == 1:
        return seeds[0]
    evidence = [seed.evidence or {} for seed in seeds]
    return mean_with_interval(torch.stack([seed.value for seed in seeds]), evidence)


def read_scores(run_folder: Path) -> dict[int, SeedScores]:
    """Read the scored models of coalitions in a run's folder, by seed.

    Raises:
        ConfigurationError: there are none, or an earlier version has written them.
    """
    folder = run_folder / COALITIONS_FOLDER
    if not read_settings(folder):
        raise ConfigurationError(
            f"{run_folder} has no scores of coalitions: train them by the metric ShadowShapley, or by flsv retrain."
        )
    untrained = read_untrained(folder)
    models_by_seed: dict[int, dict[Members, Models]] = {}
    for training, models in read_coalitions(folder).items():
        models_by_seed.setdefault(training.seed, {})[training.members] = models
    return {
        seed: SeedScores(models_by_members, untrained)
        for seed, models_by_members in models_by_seed.items()
    }


def values(
    scores: Path | Mapping[int, SeedScores],
    game: Game,
) -> DataFrame:
    """Compute a table of the clients' values.

    Args:
        scores: the folder of a run whose coalitions are trained, or the scored models by seed.
        game: the game.

    Returns:
        Of one seed a row for each of the game's rounds and each client, with the columns ``round``, ``client``,
        ``value``, ``low`` and ``high`` (both ends of the 90 % interval over seeds alone). Values by class have a column
        for each class in the place of the last three. Of several seeds the means after the last round.

    Example:
        >>> models = {(): {-1: 0.25}, (0,): {0: 0.5}, (1,): {0: 0.5}, (0, 1): {0: 1.0}}
        >>> for by_round in models.values():
        ...     for index, accuracy in by_round.items():
        ...         by_round[index] = ScoredModel({"accuracy": [accuracy]})
        >>> masks = torch.tensor([[False, False], [True, False], [False, True], [True, True]])
        >>> values({0: SeedScores(models)}, Game(masks, [0], "accuracy"))["value"].tolist()
        [0.375, 0.375]
    """
    import pandas  # slow

    if isinstance(scores, Path):
        scores = read_scores(scores)
    values_of_seeds = [values_by_round(seed_scores, game) for seed_scores in scores.values()]
    last_round = game.rounds[-1]
    if len(values_of_seeds) > 1:
        last_values = [by_round[last_round] for by_round in values_of_seeds]
        return _table_of_round(last_round, last_values, game.per_class)
    tables = [
        _table_of_round(round_index, [round_values], game.per_class)
        for round_index, round_values in values_of_seeds[0].items()
    ]
    return pandas.concat(tables, ignore_index=True)


def _table_of_round(
    round_index: int,
    seeds: Sequence[Values],
    per_class: bool,
) -> DataFrame:
    from pandas import DataFrame  # slow

    if per_class:
        values_by_seed = torch.stack([seed.value for seed in seeds])  # [S, n, M]
        means = values_by_seed.mean(0)
        columns = {str(label): means[:, label] for label in range(means.shape[1])}
    else:
        columns = mean_over_seeds(seeds).columns()
    table = DataFrame({name: column.numpy() for name, column in columns.items()})
    table.insert(0, "round", round_index)
    table.insert(1, "client", range(len(table)))
    return table
