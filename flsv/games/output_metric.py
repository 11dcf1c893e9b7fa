"""OutputMetric: a torchmetrics metric of a model's outputs and labels.

torchmetrics takes a *batch* for logits if a number of it lies outside [0, 1]. So that all batches are treated the same
way, flsv decides once per module: it returns logits if a model with random parameters returns a number outside [0, 1].
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MulticlassExactMatch,
    MulticlassStatScores,
)

from flsv.games.validation_batches import description_of
from flsv.games.vector_evaluator import loss_dtype
from flsv.scores.class_scores import ClassScore, class_1_probabilities
from flsv.scores.likelihood import MeanLogLikelihood
from flsv.utilities.errors import ConfigurationError

_CLASSIFICATION_MODULE = "torchmetrics.classification"
#: Names of torchmetrics metrics that compare classes: of one class they are 0 or NaN.
_CLASS_COMPARING_NAMES = re.compile(
    "AUROC|LogAUC|ROC|AveragePrecision|PrecisionRecallCurve|At[FS]|EER|MatthewsCorrCoef|CohenKappa"
)
#: The distance of neighbouring numbers of a type, up to which they can show that outputs have fractions.
_LARGEST_STEP = 0.125
#: The least probability whose logarithm is taken.
MIN_PROBABILITY = 1e-6


class OutputMetric:
    """A copy of a torchmetrics metric that converts a model's outputs to the form that the metric expects.

    Depending on the metric this is: logits or probabilities ``[B, M]`` or ``[B, M, H, W]`` with integer labels, ``[B]``
    with binary labels (of outputs ``[B, 2]``, those of class 1), ``[B, L]`` with multilabel targets, numbers for
    regression.
    """

    def __init__(
        self,
        metric: Metric,
        requester: str,
        device: torch.device,
        # Whether the outputs are logits, which the metric gets as probabilities.
        converts_logits: bool = False,
    ) -> None:
        self.metric = metric.clone().to(device)
        self.metric.sync_on_compute = False  # evaluated in this process only
        self.metric.reset()
        self.converts_logits = converts_logits
        self._requester = requester
        self._device = device
        self._last_batch = ""

    def clone(self, device: torch.device | None = None) -> OutputMetric:
        """Return a copy that has seen no batch, on the same or another device."""
        return OutputMetric(
            self.metric,
            requester=self._requester,
            device=device or self._device,
            converts_logits=self.converts_logits,
        )

    def update(self, outputs: Any, y: Any) -> None:
        """Add a batch, with half-precision outputs in single precision and a last dimension of 1 dropped."""
        self._last_batch = f"{description_of(outputs)}, with y {description_of(y)}"
        if isinstance(outputs, Tensor) and isinstance(y, Tensor):
            if outputs.dtype in (torch.bfloat16, torch.float16):
                outputs = outputs.float()
            # Outputs [B, 1] for labels [B], or labels [B, 1] for outputs [B], lose their last dimension.
            if outputs.shape == (*y.shape, 1):
                outputs = outputs.squeeze(-1)
            elif y.shape == (*outputs.shape, 1):
                y = y.squeeze(-1)
            if self.converts_logits:
                outputs = _probabilities(self.metric, outputs, y)
            if _task_of(self.metric) == "Binary":
                outputs = class_1_probabilities(outputs, y)
        try:
            self.metric.update(outputs, y)
        except Exception as error:
            raise self._refused(error) from error

    def value(self) -> float:
        """Return the metric's value over all batches that were added."""
        try:
            value = self.metric.compute()
        except (RuntimeError, IndexError, ValueError) as error:
            raise self._refused(error) from error
        if isinstance(value, Tensor) and value.numel() == 1:
            return float(value)

        if isinstance(value, Tensor):
            form = str(list(value.shape))
            advice = 'Let the metric average, such as average="macro".'
        else:
            form = type(value).__name__
            advice = "Give a metric of one number, such as the metric that this one wraps."
        raise ConfigurationError(
            f"{type(self.metric).__name__} gives {form}, expected one number per model: a utility is a scalar. {advice}"
        )

    def _refused(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"{self._requester}: {type(self.metric).__name__} does not take what forward gives, {self._last_batch}: "
            f"{error} Log the value in validation_step, and give its name as performance."
        )


@dataclass(frozen=True)
class OutputForm:
    """The form in which coalitions' outputs are predicted: logits, with the classes in the last dimension."""

    # A regression's outputs stay as they are.
    classifies: bool
    # Whether a sample has one number, for the positive class.
    has_one_output: bool = False
    gives_logits: bool = True
    # Whether outputs are log-probabilities of the labels. The classes are then "another" and "the label".
    are_label_likelihoods: bool = False
    # Whether a regression's outputs have a bound, as rates and shares have, which no prediction may pass.
    is_bounded: bool = False

    @staticmethod
    def for_metric(
        metric: Metric,
        shape: tuple[int, ...],
        y: Tensor,
        gives_logits: bool,
    ) -> OutputForm:
        """Find the form of a batch's outputs of the shape ``[B, ...]``."""
        if isinstance(metric, MeanLogLikelihood):
            return OutputForm(classifies=True, are_label_likelihoods=True)
        shapes_of_one_output = (y.shape, (*y.shape, 1))
        return OutputForm(
            classifies=_task_of(metric) is not None,
            has_one_output=shape in shapes_of_one_output,
            gives_logits=gives_logits,
        )

    def if_fractional(self, is_bounded: bool, examples: Iterable[Tensor]) -> OutputForm | None:
        """Return this form with its bound. None if all ``examples`` are whole numbers: predictions lie between."""
        numbers = torch.cat([outputs.flatten() for outputs in examples])
        # From here on numbers of this type are whole or have few fractions, so that whole ones say nothing: eps is the
        # distance of numbers at 1. In float32 the limit is 2^20.
        limit = _LARGEST_STEP / torch.finfo(numbers.dtype).eps
        small_numbers = numbers[numbers.abs() < limit]
        are_whole = len(small_numbers) > 0 and torch.equal(small_numbers, small_numbers.round())
        if are_whole:  # the outputs are class numbers
            return None
        return replace(self, is_bounded=is_bounded)

    def logits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Convert the outputs ``[c, B, ...]`` of c models for the labels ``y [B, ...]`` to this form. Classifiers'
        classes become the last dimension.
        """
        has_trailing_one = outputs.shape[1:] == (*y.shape, 1)
        if has_trailing_one:
            outputs = outputs.squeeze(-1)
        if not self.classifies:
            return outputs

        if self.are_label_likelihoods:
            # [c, B], log p with p the probability of the sample's label. The classes become [not the label, the label].
            log_p = outputs.float().clamp(max=-MIN_PROBABILITY)  # so that p < 1
            log_not_p = (-log_p.expm1()).log()  # log(1 - p)
            return torch.stack([log_not_p, log_p], -1)

        if self.has_one_output:
            # [c, B], a number for class 1. Class 0 gets the logit 0.
            logits_of_class_1 = outputs
            if not self.gives_logits:
                logits_of_class_1 = outputs.logit(eps=MIN_PROBABILITY)
            logits_of_class_0 = torch.zeros_like(logits_of_class_1)
            return torch.stack([logits_of_class_0, logits_of_class_1], -1)

        # [c, B, M, ...], a number for each of M classes.
        if not self.gives_logits:
            outputs = outputs.clamp_min(MIN_PROBABILITY).log()
        return outputs.movedim(2, -1)

    def outputs(self, logits: Tensor) -> Tensor:
        """Convert one model's predicted logits ``[B, ..., M]`` back to outputs, as :meth:`logits` has got them."""
        if not self.classifies:
            return logits
        if self.are_label_likelihoods:  # of the classes [not the label, the label]
            log_probabilities = logits.log_softmax(-1)
            return log_probabilities[..., 1]
        if self.has_one_output:  # of the classes [0, 1]
            log_odds = logits[..., 1] - logits[..., 0]
            return log_odds if self.gives_logits else log_odds.sigmoid()
        if not self.gives_logits:
            logits = logits.softmax(-1)
        return logits.movedim(-1, 1)  # [B, M, ...]


def wants_probabilities(metric: Metric) -> bool:
    """Return whether a metric's value for logits differs from that for their probabilities."""
    compares_largest_outputs = isinstance(
        metric, MulticlassStatScores | MulticlassConfusionMatrix | MulticlassExactMatch
    )
    return _task_of(metric) is not None and not compares_largest_outputs


def scores_class_1(metric: Metric) -> bool:
    """Return whether a metric's value changes if the classes 0 and 1 are exchanged.

    Example:
        >>> scores_class_1(ClassScore("average_precision")), scores_class_1(ClassScore("auroc"))
        (True, False)
    """
    if isinstance(metric, ClassScore):
        return metric.name != "auroc"
    symmetric = ("BinaryAUROC", "BinaryAccuracy")
    return _task_of(metric) == "Binary" and type(metric).__name__ not in symmetric


def needs_two_classes(metric: Any) -> bool:
    """Return whether a metric compares classes, so that it is undefined for labels of one class."""
    if isinstance(metric, ClassScore):
        return True
    is_of_classes = isinstance(metric, Metric) and _task_of(metric) in ("Binary", "Multiclass")
    return is_of_classes and _CLASS_COMPARING_NAMES.search(type(metric).__name__) is not None


def check_two_classes(metric: Any, labels: Tensor, owner: str) -> None:
    """Raise ConfigurationError if all ``labels`` of an ``owner`` are of one class, and the metric compares classes."""
    if not needs_two_classes(metric):
        return
    ignored_label = getattr(metric, "ignore_index", None)
    classes = labels[labels != ignored_label].unique()
    if len(classes) == 1:
        name = metric.name if isinstance(metric, ClassScore) else type(metric).__name__
        raise ConfigurationError(
            f"{owner}: the {labels.numel()} labels by which models are scored are all of class "
            f"{int(classes)}, and {name} needs two classes. Hold out samples of another class as well, "
            'or take performance="balanced_accuracy", which needs one.'
        )


def beyond_probabilities(outputs: Any) -> bool:
    """Return whether a number of the outputs is outside [0, 1]."""
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        return False
    is_outside = (outputs < 0) | (outputs > 1)
    return bool(is_outside.any())


def are_probabilities(outputs: Tensor) -> bool:
    """Return whether outputs ``[B, M]`` are in [0, 1] and each row sums to 1, up to rounding."""
    sums = outputs.float().sum(1)
    are_one = torch.isclose(sums, torch.ones_like(sums), atol=1e-2)
    return not beyond_probabilities(outputs) and bool(are_one.all())


def _task_of(metric: Metric) -> str | None:
    """Return a metric's task: "Binary", "Multilabel", "Multiclass", "Classes" (a :class:`ClassScore`), or None."""
    if isinstance(metric, ClassScore):
        return "Classes"
    metric_class = type(metric)
    if not metric_class.__module__.startswith(_CLASSIFICATION_MODULE):
        return None
    for task in ("Binary", "Multilabel", "Multiclass"):
        if metric_class.__name__.startswith(task):
            return task
    return None


def _probabilities(metric: Metric, logits: Tensor, y: Tensor) -> Tensor:
    task = _task_of(metric)
    if not logits.is_floating_point() or task is None:
        return logits
    has_class_columns = logits.ndim == y.ndim + 1
    if task == "Multiclass":
        if not has_class_columns:
            return logits  # class numbers
        return logits.softmax(1)
    if task == "Multilabel" or not has_class_columns:
        return logits.sigmoid()
    # In float64, probabilities close to 1 stay distinct, which metrics of rankings need.
    return logits.to(loss_dtype(logits.device)).softmax(1)
