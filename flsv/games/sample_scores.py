"""SampleScores: scores of models on each validation sample, which show how much values depend on these samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric

from flsv.functional.joint_shares import CaseValues
from flsv.functional.shapley.predicted_outputs import MAX_PREDICTED_PLAYERS, case_values
from flsv.games.model_evaluator import ModelEvaluator
from flsv.scores.performance import ModelScore

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

    # Function from the outputs [c, V, ...] of c models for V samples to utilities [c, R].
    score: Callable[[Tensor], Tensor]
    is_resampled: bool = False
    # int64 [V], the stratum of each sample. Resamples keep the sizes of strata, such as those of the classes.
    strata: Tensor | None = None

    def values(
        self,
        trained: Tensor,
        outputs: Tensor,
        weights: Tensor,
        logits: bool,
        bounded: bool = False,
    ) -> CaseValues | None:
        """Compute the Shapley values on each part of the validation samples.

        Args:
            trained: bool ``[T, n]``, the trained coalitions, see :func:`flsv.functional.predicted_shapley`.
            outputs: ``[T, V, ...]``, the outputs of their models. The empty coalition's model is among these.
            weights: ``[n]``, the clients' weights in the federation's average.
            logits: whether the outputs are logits.
            bounded: whether predicted outputs are limited to the range of the trained coalitions' outputs.

        Returns:
            The values. None if their computation would take too long, or a score is not finite.
        """
        num_clients = trained.shape[1]
        is_expensive = self.is_resampled and NUM_RESAMPLES * 2**num_clients > MAX_RESAMPLED_SCORES
        if num_clients > MAX_PREDICTED_PLAYERS or is_expensive:
            return None

        utilities = self.score(outputs)
        if not utilities.isfinite().all():
            return None
        score = self.score
        if bounded:
            has_members = trained.any(1)
            score = score_within_bounds(self.score, outputs[has_members])
        values = case_values(
            trained,
            utilities,
            outputs=outputs,
            weights=weights,
            score=score,
            logits=logits,
        )
        return CaseValues(values, self.strata, self.is_resampled)


def score_within_bounds(
    score: Callable[[Tensor], Tensor], trained_outputs: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return a function that clamps predicted outputs ``[c, V, ...]`` to the range of the trained coalitions' outputs
    ``[T, V, ...]``, sample by sample, and then computes ``score``.
    """
    lowest = trained_outputs.amin(0)
    highest = trained_outputs.amax(0)

    def score_clamped(outputs: Tensor) -> Tensor:
        return score(outputs.clamp(lowest.to(outputs), highest.to(outputs)))

    return score_clamped


def sample_scores(evaluator: ModelEvaluator, measure: str | ModelScore) -> SampleScores | None:
    """Return the scores on each validation sample by a measure that ``evaluator`` computes. None for values per
    class.
    """
    labels = torch.cat([y.cpu() for _, y in evaluator.batches])  # [V]
    if isinstance(measure, ModelScore):
        return _metric_sample_scores(evaluator, measure, labels)
    if measure == "accuracy":
        return SampleScores(lambda outputs: _hits(outputs, labels))
    if measure == "negative_loss":
        return SampleScores(lambda outputs: -_losses(outputs, labels))
    if measure == "balanced_accuracy":
        # Each class has the same total weight: the mean of weighted hits is the mean of the classes' accuracies.
        class_counts = labels.bincount()
        num_classes = (class_counts > 0).sum()
        samples_of_own_class = class_counts[labels].double()  # [V]
        weights = len(labels) / (num_classes * samples_of_own_class)
        return SampleScores(
            lambda outputs: _hits(outputs, labels) * weights,
            strata=labels,
        )
    return None


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 1 where a model classifies a sample correctly and 0 elsewhere, float64 ``[c, V]``."""
    largest, predicted = logits.max(-1)
    is_number = largest == largest  # False for NaN, which max takes for the largest
    return ((predicted == labels) & is_number).double()


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each model's cross-entropy for each sample, float64 ``[c, V]``."""
    num_models = len(logits)
    flat_logits = logits.double().flatten(0, 1)  # [c * V, M]
    repeated_labels = labels.repeat(num_models)
    losses = F.cross_entropy(flat_logits, repeated_labels, reduction="none")
    return losses.view(num_models, -1)


def _metric_sample_scores(
    evaluator: ModelEvaluator,
    measure: ModelScore,
    labels: Tensor,
) -> SampleScores | None:
    metric = measure.of
    if not isinstance(metric, Metric):  # the name of a value that the module logs
        return None
    power = _power_of_error(metric)
    if power is None:
        return _resampled(evaluator, measure, labels)

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


def _resampled(
    evaluator: ModelEvaluator,
    measure: ModelScore,
    labels: Tensor,
) -> SampleScores:
    generator = torch.Generator().manual_seed(0)
    has_classes = labels.ndim == 1 and not labels.is_floating_point()
    if has_classes:
        strata = labels
    else:
        strata = torch.zeros(len(labels), dtype=torch.int64)
    resamples = [_resample(strata, generator) for _ in range(NUM_RESAMPLES)]

    def score(outputs: Tensor) -> Tensor:
        # [c, NUM_RESAMPLES], the metric of each model on each resample of the validation samples
        values = torch.empty(len(outputs), NUM_RESAMPLES, dtype=torch.float64)
        for model, model_outputs in enumerate(outputs):
            for column, rows in enumerate(resamples):
                value = evaluator.metric_of_outputs(model_outputs[rows], labels[rows])
                values[model, column] = value
        return measure.utility(values)

    return SampleScores(score, is_resampled=True)


def _resample(strata: Tensor, generator: torch.Generator) -> Tensor:
    """Draw indices of samples with replacement, as many from each stratum as it has samples."""
    drawn_indices = []
    for stratum in strata.unique():
        indices = (strata == stratum).nonzero().flatten()
        count = len(indices)
        positions = torch.randint(count, (count,), generator=generator)
        drawn_indices.append(indices[positions])
    return torch.cat(drawn_indices)
