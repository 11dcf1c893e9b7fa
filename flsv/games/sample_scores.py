"""SampleScores: scores of models on each validation sample, which show how much values depend on these samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric

from flsv.functional.joint_shares import CaseValues
from flsv.functional.shapley.predicted_outputs import (
    MAX_PREDICTED_PLAYERS,
    PredictionScore,
    case_values,
)
from flsv.games.output_scorer import OutputScorer
from flsv.scores.performance import ModelScore, PerformanceMeasure

#: Number of bootstrap resamples of the validation samples, for a measure that is not a mean over samples.
NUM_RESAMPLES = 20
#: The largest number of scores on resamples that are computed. Each takes milliseconds.
MAX_RESAMPLED_SCORES = 1500


@dataclass(frozen=True, eq=False)
class SampleScores:
    """Utilities of models on parts of the validation samples.

    If the measure is a mean over samples, there is one utility for each sample. Otherwise there is one for each of
    :data:`NUM_RESAMPLES` bootstrap resamples, which are drawn with replacement.
    """

    # Function from the outputs [c, V, ...] of c models for V samples, in this order, to utilities [c, R].
    score: Callable[[Tensor], Tensor]
    # int64 [V]. None: the order of the validation samples.
    order: Tensor | None = None
    is_resampled: bool = False
    # int64 [V], the stratum of each sample. Resamples keep the sizes of strata, such as those of the classes.
    strata: Tensor | None = None

    def values(
        self, trained: Tensor, outputs: Tensor, weights: Tensor, scoring: PredictionScore
    ) -> CaseValues | None:
        """Compute the Shapley values on each part of the validation samples.

        Args:
            trained: bool ``[T, n]``, the trained coalitions, see :func:`flsv.functional.predicted_shapley`.
            outputs: ``[T, V, ...]``, the outputs of their models. The empty coalition's model is among these.
            weights: ``[n]``, the clients' weights in the federation's average.
            scoring: how the coalitions' outputs are scored on all samples.

        Returns:
            The values. None if their computation would take too long, or a score is not finite.
        """
        if self._is_expensive(num_clients=trained.shape[1]):
            return None
        utilities = self.score(outputs if self.order is None else outputs[:, self.order])
        if not utilities.isfinite().all():
            return None

        # Predicted outputs, too, are brought into this order before they are scored.
        scoring_by_sample = replace(scoring, score=self.score, order=self.order)
        values = case_values(trained, utilities, outputs, weights, scoring_by_sample)
        if self.order is not None:
            original_order = self.order.argsort()
            values = values[:, original_order]
        return CaseValues(values, self.strata, self.is_resampled)

    def _is_expensive(self, num_clients: int) -> bool:
        if num_clients > MAX_PREDICTED_PLAYERS:
            return True
        return self.is_resampled and NUM_RESAMPLES * 2**num_clients > MAX_RESAMPLED_SCORES


def sample_scores(scorer: OutputScorer, measure: PerformanceMeasure) -> SampleScores | None:
    """Return the scores on each validation sample by a measure that ``scorer`` computes. None for values per
    class.
    """
    if isinstance(measure, ModelScore):
        return _metric_sample_scores(scorer, measure, scorer.labels)
    sorted_labels = scorer.sorted_labels
    assert sorted_labels is not None
    order = sorted_labels.order
    if measure == "accuracy":
        return SampleScores(lambda logits: sorted_labels.hits(logits).double(), order)
    if measure == "negative_loss":
        return SampleScores(lambda logits: -sorted_labels.losses(logits.double()), order)
    if measure == "balanced_accuracy":
        weights = _balancing_weights(scorer.labels)[order]
        return SampleScores(
            lambda logits: sorted_labels.hits(logits) * weights, order, strata=scorer.labels
        )
    return None


def _balancing_weights(labels: Tensor) -> Tensor:
    """Return the weights ``[V]`` by which the mean of weighted hits is the mean of the classes' accuracies."""
    class_counts = labels.bincount()
    num_classes = (class_counts > 0).sum()
    samples_of_own_class = class_counts[labels].double()
    return len(labels) / (num_classes * samples_of_own_class)


def _metric_sample_scores(
    scorer: OutputScorer, measure: ModelScore, labels: Tensor
) -> SampleScores | None:
    metric = measure.of
    if not isinstance(metric, Metric):  # the name of a value that the module logs
        return None
    power = _power_of_error(metric)
    if power is None:
        return _resampled(scorer, measure, labels)

    num_samples = len(labels)
    targets = labels.double().view(num_samples, -1)  # [V, outputs]

    def error_utilities(outputs: Tensor) -> Tensor:
        predictions = outputs.double().view(len(outputs), num_samples, -1)  # [c, V, outputs]
        errors = (predictions - targets).abs().pow(power)
        sample_errors = errors.mean(2)  # [c, V]
        return measure.utility(sample_errors)

    return SampleScores(error_utilities)


def _power_of_error(metric: Metric) -> int | None:
    """Return p if a metric is the mean of |error|^p over all samples, otherwise None."""
    num_outputs = getattr(metric, "num_outputs", 1)  # torchmetrics 1.4 has no such attribute
    if num_outputs != 1:
        return None
    if type(metric) is MeanAbsoluteError:
        return 1
    if type(metric) is MeanSquaredError and metric.squared:
        return 2
    return None


def _resampled(scorer: OutputScorer, measure: ModelScore, labels: Tensor) -> SampleScores:
    generator = torch.Generator().manual_seed(0)
    has_classes = labels.ndim == 1 and not labels.is_floating_point()
    if has_classes:
        strata = labels
    else:
        strata = torch.zeros(len(labels), dtype=torch.int64)
    resamples = [_resample(strata, generator) for _ in range(NUM_RESAMPLES)]

    def utilities_on_resamples(outputs: Tensor) -> Tensor:
        values = torch.empty(len(outputs), NUM_RESAMPLES, dtype=torch.float64)
        for model, model_outputs in enumerate(outputs):
            for column, samples in enumerate(resamples):
                values[model, column] = scorer.metric(model_outputs[samples], labels[samples])
        return measure.utility(values)

    return SampleScores(utilities_on_resamples, is_resampled=True)


def _resample(strata: Tensor, generator: torch.Generator) -> Tensor:
    """Draw indices of samples with replacement, as many from each stratum as it has samples."""
    drawn_indices = []
    for stratum in strata.unique():
        indices = (strata == stratum).nonzero().flatten()
        count = len(indices)
        positions = torch.randint(count, (count,), generator=generator)
        drawn_indices.append(indices[positions])
    return torch.cat(drawn_indices)
