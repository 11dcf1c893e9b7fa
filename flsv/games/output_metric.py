"""OutputMetric: a torchmetrics metric of a model's outputs and labels.

torchmetrics decides for each *batch* whether outputs are logits: they are if a number is outside [0, 1]. To treat all
batches in the same way, flsv decides once per module, by its outputs for the first batch (:func:`gives_logits`).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MulticlassExactMatch,
    MulticlassStatScores,
)

from flsv.games.classification import double_dtype
from flsv.games.validation_batches import description_of
from flsv.scores.class_scores import ClassScore, class_1_probabilities
from flsv.utilities.errors import ConfigurationError

_CLASSIFICATION_MODULE = "torchmetrics.classification"
#: Names of torchmetrics metrics that compare classes. For labels of one class they are 0 or NaN.
_CLASS_COMPARING_NAMES = re.compile(
    "AUROC|LogAUC|ROC|AveragePrecision|PrecisionRecallCurve|At[FS]|EER|MatthewsCorrCoef|CohenKappa"
)


class OutputMetric:
    """A copy of a torchmetrics metric that converts a model's outputs to the form that the metric expects.

    This form depends on the metric: logits or probabilities ``[B, M]`` or ``[B, M, H, W]`` for integer labels, ``[B]``
    for binary labels (of outputs ``[B, 2]`` the column of class 1), ``[B, L]`` for multilabel targets, and numbers for
    regression.
    """

    _last_batch = ""

    def __init__(
        self,
        metric: Metric,
        requester: str,
        device: torch.device,
        # Whether the outputs are logits that are converted to probabilities for the metric.
        converts_logits: bool = False,
    ) -> None:
        self.metric = metric.clone().to(device)
        self.metric.sync_on_compute = False  # this process alone evaluates the model
        self.metric.reset()
        self.converts_logits = converts_logits
        self._requester = requester
        self._device = device

    def clone(self, device: torch.device | None = None) -> OutputMetric:
        """Return a copy without batches, on the same or another device."""
        return OutputMetric(
            self.metric,
            requester=self._requester,
            device=device or self._device,
            converts_logits=self.converts_logits,
        )

    def update(self, outputs: Any, y: Any) -> None:
        """Add a batch. Half-precision outputs are converted to single precision, and a last dimension of size 1 is
        dropped.
        """
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
            if task_of(self.metric) == "Binary":
                outputs = class_1_probabilities(outputs, y)
        try:
            self.metric.update(outputs, y)
        except Exception as error:
            raise self._refused(error) from error

    def compute(self) -> float:
        """Return the metric's value over all batches that were added."""
        try:
            value = self.metric.compute()
        except (RuntimeError, IndexError, ValueError) as error:
            raise self._refused(error) from error
        if isinstance(value, Tensor) and value.numel() == 1:
            return float(value)

        if isinstance(value, Tensor):
            form = f"a tensor {list(value.shape)}"
            advice = 'Let the metric average, for example with average="macro".'
        else:
            form = type(value).__name__
            advice = (
                "Pass a metric that returns one number, such as the metric that this one wraps."
            )
        raise ConfigurationError(
            f"{type(self.metric).__name__} returns {form}, but a performance must be one number per model. {advice}"
        )

    def value(self, outputs: Tensor, labels: Tensor, batch_sizes: list[int] | None = None) -> float:
        """Compute the metric of one model's ``outputs [V, ...]`` for V labels, by batches of these sizes, or at
        once.
        """
        self.metric.reset()
        sizes = batch_sizes or [len(labels)]
        for batch_outputs, batch_labels in zip(outputs.split(sizes), labels.split(sizes)):
            self.update(batch_outputs, batch_labels)
        return self.compute()

    def _refused(self, error: Exception) -> ConfigurationError:
        reason = str(error).rstrip(".")
        return ConfigurationError(
            f"{self._requester}: {type(self.metric).__name__} raised an error for the outputs of forward, "
            f"{self._last_batch}: {reason}. Pass a metric for such outputs, or log the value in validation_step and "
            "pass its name as the performance."
        )


def wants_probabilities(metric: Metric) -> bool:
    """Return whether a metric has different values for logits and for their probabilities."""
    compares_largest_outputs = isinstance(
        metric, MulticlassStatScores | MulticlassConfusionMatrix | MulticlassExactMatch
    )
    return task_of(metric) is not None and not compares_largest_outputs


def scores_class_1(metric: Metric) -> bool:
    """Return whether a metric's value changes if the classes 0 and 1 are exchanged.

    Example:
        >>> scores_class_1(ClassScore("average_precision")), scores_class_1(ClassScore("auroc"))
        (True, False)
    """
    if isinstance(metric, ClassScore):
        return metric.name != "auroc"
    symmetric = ("BinaryAUROC", "BinaryAccuracy")
    return task_of(metric) == "Binary" and type(metric).__name__ not in symmetric


def needs_two_classes(metric: Any) -> bool:
    """Return whether a metric compares classes, so that it is undefined for labels of one class."""
    if isinstance(metric, ClassScore):
        return True
    is_of_classes = isinstance(metric, Metric) and task_of(metric) in ("Binary", "Multiclass")
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
            f"{owner}: the {labels.numel()} labels by which models are scored are all of class {int(classes)}, but "
            f"{name} needs samples of two classes. Hold out samples of another class as well, or set "
            'performance="balanced_accuracy", for which one class is enough.'
        )


def gives_logits(metric: Metric, outputs: Any, labels: Any) -> bool | None:
    """Return whether a module's outputs for a batch are logits: then one of them is outside [0, 1]. They are
    probabilities if those of all classes sum to 1 for each sample. None: they can be either.
    """
    if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor):
        return False
    if not outputs.is_floating_point() or task_of(metric) is None:
        return False
    if not _are_within_0_and_1(outputs):
        return True
    has_class_columns = outputs.ndim == labels.ndim + 1 and outputs.shape[1] > 1
    if has_class_columns and are_probabilities(outputs):
        return False
    are_all_zero = not outputs.any()  # a head that is initialized with zeros returns such logits
    return True if are_all_zero else None


def _are_within_0_and_1(outputs: Tensor) -> bool:
    is_outside = (outputs < 0) | (outputs > 1)
    return not is_outside.any()


def are_probabilities(outputs: Tensor) -> bool:
    """Return whether outputs ``[B, M]`` are in [0, 1] and each row sums to 1, up to rounding."""
    sums = outputs.float().sum(1)
    are_one = torch.isclose(sums, torch.ones_like(sums), atol=1e-2)
    return _are_within_0_and_1(outputs) and bool(are_one.all())


def task_of(metric: Metric) -> str | None:
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
    task = task_of(metric)
    if not logits.is_floating_point() or task is None:
        return logits
    has_class_columns = logits.ndim == y.ndim + 1
    if task == "Multiclass":
        if not has_class_columns:
            return logits  # numbers of classes
        return logits.softmax(1)
    if task == "Multilabel" or not has_class_columns:
        return logits.sigmoid()
    # Metrics of rankings need probabilities close to 1 that are distinct, which float64 keeps.
    return logits.to(double_dtype(logits.device)).softmax(1)
