"""Performance measures of models in coalition games: the arguments ``performance`` and ``mode``.

====================================== ============================================================================
``performance``                        the utility of a model on the server's validation set
====================================== ============================================================================
``"accuracy"``                         share of samples whose largest logit is the label's
``"balanced_accuracy"``                mean over the classes that occur of their accuracies
``"negative_loss"``                    minus the mean cross-entropy, nats
``"auroc"``, ``"average_precision"``,  the score of class 1, the positive class (``pos_label`` of the data), if there
``"f1"``                               are two classes, else the mean over the classes that occur, from the
                                       outputs of ``forward(x)``, logits or probabilities, over all batches
any other name, with ``mode``          the value that the module logs under it in ``validation_step`` or in the
                                       validation hooks around it: ``"val_loss"`` with ``mode="min"`` (minus the value),
                                       ``"val_f1"`` with ``mode="max"``
a torchmetrics metric                  its value for ``forward(x)`` and ``y`` over all batches ``(x, y)`` (a binary
                                       metric gets the output of class 1 if there are two), or minus the value if its
                                       ``higher_is_better`` is False, or with ``mode="min"``
``FromOutputs(metric, logits=False)``  the same of outputs that do not show whether they are logits
``MeanLogLikelihood()``                the mean of ``forward(x)``, the log-probabilities of the labels ``y``, such as a
                                       text's tokens (:class:`flsv.scores.likelihood.MeanLogLikelihood`)
====================================== ============================================================================

The first three are for classifiers: ``forward`` returns logits ``[B, M]``, labels are integers ``[B]``. All measures
except logged values are computed from outputs. For logged values models are validated one after the other, as
``trainer.validate`` does it on the whole validation set (``limit_val_batches`` matters only for loaders without a
length), in the fit's module, which is restored. With several loaders ``"val_loss/dataloader_idx_1"`` is one loader's
value, and ``"val_loss"`` the mean, weighted by size. Random numbers are the same for every model. A measure that is not
finite for the untrained model is refused before the first round. In YAML a metric is a class path::

    performance: {class_path: torchmetrics.F1Score, init_args: {task: multiclass, num_classes: 10, average: macro}}
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pkgutil import resolve_name
from typing import Any, Literal

from torch import Tensor
from torchmetrics import Metric

from flsv.scores.class_scores import CLASS_SCORES, ClassScore
from flsv.utilities.arguments import attribute_of
from flsv.utilities.choices import Evaluators as Evaluators
from flsv.utilities.display import CLIENTS_PREFIX
from flsv.utilities.errors import ConfigurationError, nearest

Mode = Literal["min", "max"]
#: Measures of classifiers, evaluated from logits.
CLASSIFICATION = ("accuracy", "balanced_accuracy", "negative_loss")
#: Measures that clients, if they score models, report class by class.
BY_CLASS = ("balanced_accuracy", "per_class_accuracy")
_PERFORMANCE_NAMES = (*CLASSIFICATION, *CLASS_SCORES)


@dataclass(frozen=True, eq=False)
class Measure:
    """A performance measure: a classifier's score such as accuracy, a value that the module logs, or a torchmetrics
    metric.

    Args:
        of: the name of the classifier's score or of the logged value, or the metric.
        mode: whether less (``"min"``) or more (``"max"``) is better.
        called: flsv's own name of the measure, such as ``"accuracy"`` or ``"auroc"``. Empty for logged values and for
            the user's metrics.
        derived: whether the gradient of the logged value is needed, too.
        at_clients: whether the clients score the models, see :mod:`flsv.games.client_evaluation`.
        logits: whether a module's outputs are logits, see :class:`FromOutputs`. None: they show it.

    Example:
        >>> Measure("val_loss", "min")
        ModelScore(of='val_loss', mode='min')
    """

    of: str | Metric
    mode: Mode
    called: str = ""
    derived: bool = False
    at_clients: bool = False
    logits: bool | None = None

    def __repr__(self) -> str:
        if self.called:
            return repr(self.called)
        # This is in run.json, where a class keeps its name.
        return f"ModelScore(of={self.of!r}, mode={self.mode!r})"

    @property
    def is_of_classifier(self) -> bool:
        """Return whether this is a classifier's score, such as accuracy."""
        return isinstance(self.of, str) and bool(self.called)

    @property
    def is_logged(self) -> bool:
        """Return whether this is a value that the module logs."""
        return isinstance(self.of, str) and not self.called

    @property
    def request(self) -> str | Measure:
        """Return what the server sends to clients to request scores: a classifier's score by its name."""
        return self.called if self.is_of_classifier else self

    @property
    def title(self) -> str:
        """Return the measure's name in tables and texts."""
        if self.called:
            name = self.called
        elif isinstance(self.of, str):
            name = self.of
        else:
            name = type(self.of).__name__
        return f"{CLIENTS_PREFIX}{name}" if self.at_clients else name

    @property
    def by_class(self) -> bool:
        """Return whether clients score models and report this measure class by class."""
        return self.at_clients and self.called in BY_CLASS

    @property
    def name(self) -> str:
        """Return the measure's name in an evaluator's :class:`flsv.games.vector_evaluator.Scores`."""
        return self.of if isinstance(self.of, str) else "metric"

    def utility(self, values: Tensor) -> Tensor:
        """Convert values of the measure to utilities, of which more is better."""
        return -values if self.mode == "min" else values

    def scored_by(self, evaluators: Evaluators) -> Measure:
        """Return the measure by which ``evaluators``, the server or the clients, score models. Clients use balanced
        instead of plain accuracy.
        """
        if evaluators == "server":
            return self
        measure = self
        if self.called == "accuracy":
            measure = classifier_measure("balanced_accuracy")  # clients count by class
        return replace(measure, at_clients=True)


#: Performance measures by name, or by the metric that needs them.
Measures = Mapping[str, Measure]


@cache
def classifier_measure(name: str) -> Measure:
    """Return the measure of a classifier that :meth:`flsv.games.Scores.value` calls ``name``."""
    return Measure(name, "max", called=name)


#: The measure of parts that do not name one.
ACCURACY = classifier_measure("accuracy")


def as_measure(measure: str | Measure) -> Measure:
    """Return a measure, or that of a classifier with this name."""
    return classifier_measure(measure) if isinstance(measure, str) else measure


def measure_of(part: Any) -> Measure | None:
    """Return the performance measure by which models are scored for a metric or a strategy: its attribute ``measure``,
    which may also be the name of a classifier's score. None: it has none.

    Raises:
        ConfigurationError: the part has its measure under another name.
    """
    measure = attribute_of(part, "measure")
    if measure is not None:
        return as_measure(measure)
    if attribute_of(part, "measured_by") is not None:
        other_name = "measured_by"
    elif isinstance(attribute_of(part, "performance"), Measure):
        other_name = "performance"
    else:
        return None
    raise ConfigurationError(
        f"{type(part).__name__} has its performance measure in the attribute {other_name!r}, which is not read. "
        "Name the attribute 'measure'."
    )


class FromOutputs(Metric):
    """A performance of a module whose outputs do not show what they are.

    Outputs are taken for logits if one for the first validation batch is outside [0, 1], and for probabilities if those
    of each sample's classes sum to 1. Any others must be named.

    Args:
        metric: a torchmetrics metric, or ``"auroc"``, ``"average_precision"`` or ``"f1"``.
        logits: whether the outputs are logits. If not, they are probabilities.

    Example:
        >>> performance_of("FedSV", FromOutputs("auroc", logits=False), None).logits
        False
    """

    def __init__(self, metric: str | Metric, logits: bool) -> None:
        super().__init__()
        self.metric = metric
        self.logits = logits

    def update(self, *_: Any) -> None:
        raise NotImplementedError

    def compute(self) -> None:
        raise NotImplementedError


def title_of(measure: Measure, positive: str | None) -> str:
    """Return a measure's name for tables. If it is the score of the ``positive`` class, this class is named, too.

    Example:
        >>> title_of(performance_of("FedSV", "f1", None), "ill"), title_of(as_measure("accuracy"), "ill")
        ('f1 of ill', 'accuracy')
    """
    title = measure.title
    if positive is None or not scores_positive(measure):
        return title
    if positive.isdigit():
        return f"{title} of class {positive}"
    return f"{title} of {positive}"


def scores_positive(measure: Measure) -> bool:
    """Return whether a measure is a positive class's score, as F1 is."""
    if not isinstance(measure.of, Metric):
        return False
    scores_class_1 = resolve_name("flsv.games.output_metric:scores_class_1")
    return bool(scores_class_1(measure.of))


def check_positive_class(measures: Iterable[Measure], data: Any) -> None:
    """Raise ConfigurationError if a measure scores the positive class, which the user has to name (``pos_label``)."""
    if not data.needs_pos_label:
        return
    for measure in measures:
        if scores_positive(measure):
            names = [repr(name) for name in data.class_names]
            raise ConfigurationError(
                f"{measure.title} is the score of the positive class, and the data have the classes "
                f"{' and '.join(names)}. Set pos_label to the positive one: --data.pos_label {data.class_names[1]}, or "
                f"in Python pos_label={names[1]}."
            )


def loss_measure(owner: Any, loss: str | None) -> Measure:
    """Return the measure of a loss to differentiate: cross-entropy, or the logged value ``loss``.

    Example:
        >>> loss_measure("GradientShapley", None), loss_measure("GradientShapley", "val_loss").derived
        ('negative_loss', True)
    """
    if loss is None:
        return classifier_measure("negative_loss")
    measure = performance_of(owner, loss, "min", "loss")
    return replace(measure, derived=True)


def undefined_untrained(
    requester: str, measure: Measure, outputs: Tensor | None
) -> ConfigurationError:
    """Return the error for a measure that is not defined for the untrained model.

    Args:
        requester: name of what needs the measure.
        measure: the performance measure.
        outputs: the untrained model's outputs, None if they are not known.
    """
    title = measure.title
    trouble = f"{title} is not a finite number"
    remedy = "Begin with other weights, or choose a performance that is defined for every model."
    if measure.is_logged:
        remedy = "Let validation log a finite number for every model, or name another value."
    elif outputs is not None and not outputs.isfinite().all():
        num_broken = int((~outputs.isfinite()).sum())
        trouble = f"{num_broken} of {outputs.numel()} outputs are not finite"
        remedy = "Let forward give finite numbers (-1e4 rules a class out, as -inf does)."
    elif outputs is not None:
        trouble += f": its outputs are between {outputs.min():.4g} and {outputs.max():.4g}"
    return ConfigurationError(
        f"{requester} compares all models with the untrained model, of which {trouble}. {remedy}"
    )


def is_always_defined(measure: Measure) -> bool:
    """Return whether every model has a finite score, or clients have computed one before training."""
    if measure.is_of_classifier and measure.called != "negative_loss":
        return True
    return measure.at_clients


def performance_of(
    owner: Any,
    performance: str | Metric | Measure,
    mode: Mode | None,
    argument: str = "performance",
) -> Measure:
    """Return the performance measure that a metric's ``performance`` and ``mode`` name.

    Args:
        owner: the object with these arguments, or its name, for messages.
        performance: the argument ``performance``, see the table in :mod:`flsv.scores.performance`.
        mode: the argument ``mode``, see the same table.
        argument: the name of the argument ``performance``, for messages.

    Returns:
        The measure. ``"auroc"``, ``"average_precision"`` and ``"f1"`` are flsv's own scores without a ``mode``. With a
        ``mode``, they are values that the module logs under that name, as any other name is.

    Raises:
        ConfigurationError: ``performance`` is another name and ``mode`` is None, it is in ``CLASSIFICATION`` and
            ``mode`` is ``"min"``, or a torchmetrics metric's ``higher_is_better`` and ``mode`` are None.

    Example:
        >>> performance_of("FedSV", "val_loss", None)
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: FedSV(performance='val_loss'): expected one of accuracy, \
balanced_accuracy, negative_loss, auroc, average_precision, f1, or a torchmetrics metric (in YAML by its class_path). \
A value that the module logs in validation_step needs a mode beside it: mode: max if more of it is better, mode: min \
if less is.
    """
    owner_name = owner if isinstance(owner, str) else type(owner).__name__
    if isinstance(performance, Measure):  # checked before, for another object
        return performance
    if isinstance(performance, FromOutputs):
        return _score_of_outputs(owner_name, performance, mode, argument)
    if isinstance(performance, Metric):
        return _score_by_metric(owner_name, performance, mode, argument)
    if performance in CLASSIFICATION:
        _check_mode_of_classification(owner_name, performance, mode, argument)
        return classifier_measure(performance)
    if mode is not None:
        return Measure(performance, mode)
    if performance in CLASS_SCORES:
        return Measure(ClassScore(performance), "max", performance)
    raise _unknown_performance(owner_name, performance, argument)


def _check_mode_of_classification(
    owner: str, performance: str, mode: Mode | None, argument: str
) -> None:
    if mode == "min":
        raise ConfigurationError(
            f'{owner}({argument}={performance!r}, mode="min"): more of it is better. Leave mode out. (A value '
            "of this name that the module logs needs another name.)"
        )


def _score_of_outputs(
    owner: str,
    performance: FromOutputs,
    mode: Mode | None,
    argument: str,
) -> Measure:
    measure = performance_of(owner, performance.metric, mode, argument)
    if not isinstance(measure.of, Metric):
        raise ConfigurationError(
            f"{owner}({argument}=FromOutputs({performance.metric!r})): expected one of {[*CLASS_SCORES]}, or "
            "a torchmetrics metric."
        )
    return replace(measure, logits=performance.logits)


def _score_by_metric(
    owner: str,
    metric: Metric,
    mode: Mode | None,
    argument: str,
) -> Measure:
    if mode is None and metric.higher_is_better is None:
        raise ConfigurationError(
            f"{owner}({argument}={type(metric).__name__}()): the metric does not say whether more of it "
            'is better. Say mode="min" or mode="max".'
        )
    better_direction: Mode = "max" if metric.higher_is_better else "min"
    return Measure(copy.deepcopy(metric), mode or better_direction)


def _unknown_performance(owner: str, performance: str, argument: str) -> ConfigurationError:
    names = ", ".join(_PERFORMANCE_NAMES)
    advice = nearest(performance, _PERFORMANCE_NAMES) or (
        " A value that the module logs in validation_step needs a mode beside it: mode: max if more of it is "
        "better, mode: min if less is."
    )
    return ConfigurationError(
        f"{owner}({argument}={performance!r}): expected one of {names}, or a torchmetrics metric (in YAML by "
        f"its class_path).{advice}"
    )
