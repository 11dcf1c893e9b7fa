"""Performance measures as functions of models' stored outputs for all validation samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric

from flsv.functional.shapley.predicted_outputs import NUM_RESAMPLES, OutputMeasure, Score
from flsv.games.classification import SortedLabels
from flsv.games.output_form import OutputForm
from flsv.games.output_metric import OutputMetric
from flsv.games.vector_evaluator import Scores
from flsv.scores.performance import CLASSIFICATION, Measure

#: The largest relative difference between a metric of batches and of all samples at once that is rounding.
METRIC_ROUNDING = 1e-4


def measure_of_classes(name: str, labels: Tensor, support: Tensor) -> OutputMeasure:
    """Return a classifier's measure of logits ``[c, V, M]``. The samples are sorted by class, since this is fast.

    Args:
        name: the measure's name, see :meth:`flsv.games.Scores.value`.
        labels: int64 ``[V]``, on the CPU.
        support: int64 ``[M]``, the number of samples of each class.
    """
    sorted_labels = SortedLabels(labels, len(support))
    order = sorted_labels.order
    is_loss = name == "negative_loss"
    is_balanced = name == "balanced_accuracy"
    weights = torch.ones(len(labels), dtype=torch.float64)
    if is_balanced:
        weights = _balancing_weights(labels)[order]

    def utility(logits: Tensor) -> Tensor:
        if is_loss:
            return -sorted_labels.losses(logits).double().mean(1)
        scores = Scores({"correct": sorted_labels.counts(logits)}, support)
        return scores.value(name)

    def by_sample(logits: Tensor) -> Tensor:
        if is_loss:
            return -sorted_labels.losses(logits.double())
        return sorted_labels.hits(logits) * weights

    is_mean_over_samples = name in CLASSIFICATION
    return OutputMeasure(
        utility,
        logits=True,
        order=order,
        by_sample=by_sample if is_mean_over_samples else None,
        strata=labels if is_balanced else None,
    )


def _balancing_weights(labels: Tensor) -> Tensor:
    """Return the weights ``[V]`` by which the mean of weighted hits is the mean of the classes' accuracies."""
    class_counts = labels.bincount()
    num_classes = (class_counts > 0).sum()
    samples_of_own_class = class_counts[labels].double()
    return len(labels) / (num_classes * samples_of_own_class)


def measure_by_metric(
    measure: Measure, form: OutputForm, labels_of_batches: Sequence[Tensor], metric: OutputMetric
) -> OutputMeasure:
    """Return a measure by a torchmetrics metric of outputs in the form ``form``, and labels."""
    labels = torch.cat([batch_labels.cpu() for batch_labels in labels_of_batches])
    power = _power_of_error(metric.metric)
    if power is not None:
        errors = _errors(labels, power)
        return OutputMeasure(
            lambda outputs: measure.utility(errors(outputs)).mean(1),  # over the samples
            logits=form.classifies,
            is_bounded=form.is_bounded,
            by_sample=lambda outputs: measure.utility(errors(outputs)),
        )

    value_of = _metric_of_model(metric, labels, [len(batch) for batch in labels_of_batches])

    def utility(outputs: Tensor) -> Tensor:
        values = [value_of(model_outputs) for model_outputs in form.outputs(outputs)]
        return measure.utility(torch.tensor(values, dtype=torch.float64))

    resamples = _resamples(labels)

    def utilities_on_resamples(outputs: Tensor) -> Tensor:
        values = torch.empty(len(outputs), NUM_RESAMPLES, dtype=torch.float64)
        for model, model_outputs in enumerate(form.outputs(outputs)):
            for column, samples in enumerate(resamples):
                values[model, column] = metric.value(model_outputs[samples], labels[samples])
        return measure.utility(values)

    return OutputMeasure(
        utility,
        logits=form.classifies,
        is_bounded=form.is_bounded,
        by_sample=utilities_on_resamples,
        is_resampled=True,
    )


def _metric_of_model(
    metric: OutputMetric, labels: Tensor, batch_sizes: list[int]
) -> Callable[[Tensor], float]:
    """Return the function from a model's outputs ``[V, ...]`` to the metric as :class:`flsv.games.ModelEvaluator`
    computes it, by one update if batches change nothing.
    """
    depends_on_batches: bool | None = None  # not known yet

    def value_of(outputs: Tensor) -> float:
        nonlocal depends_on_batches
        at_once = metric.value(outputs, labels)
        if depends_on_batches is False:
            return at_once
        by_batch = metric.value(outputs, labels, batch_sizes)
        if depends_on_batches is None:
            depends_on_batches = not math.isclose(by_batch, at_once, rel_tol=METRIC_ROUNDING)
        return by_batch

    return value_of


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


def _errors(labels: Tensor, power: int) -> Score:
    """Return the function from outputs to the mean of |error|^power for each sample, ``[c, V]``."""
    num_samples = len(labels)
    targets = labels.double().view(num_samples, -1)  # [V, outputs]

    def errors(outputs: Tensor) -> Tensor:
        predictions = outputs.double().view(len(outputs), num_samples, -1)  # [c, V, outputs]
        return (predictions - targets).abs().pow(power).mean(2)

    return errors


def _resamples(labels: Tensor) -> list[Tensor]:
    """Draw the indices of bootstrap resamples, with as many samples of each class as there are."""
    generator = torch.Generator().manual_seed(0)
    has_classes = labels.ndim == 1 and not labels.is_floating_point()
    strata = labels if has_classes else torch.zeros(len(labels), dtype=torch.int64)
    return [_resample(strata, generator) for _ in range(NUM_RESAMPLES)]


def _resample(strata: Tensor, generator: torch.Generator) -> Tensor:
    """Draw indices of samples with replacement, as many from each stratum as it has samples."""
    drawn_indices = []
    for stratum in strata.unique():
        indices = (strata == stratum).nonzero().flatten()
        count = len(indices)
        positions = torch.randint(count, (count,), generator=generator)
        drawn_indices.append(indices[positions])
    return torch.cat(drawn_indices)
