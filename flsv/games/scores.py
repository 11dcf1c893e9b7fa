"""Scores of models over the validation set: counts and losses; and by name, of class probabilities, ``"auroc"``,
``"average_precision"`` and ``"f1"``.

Of two classes the latter are class 1's; of more, the mean over the classes that occur, each against the rest ("macro").

The server's validation batches, checked once and kept on the device.

What a torchmetrics metric is given of a model's outputs and labels.

torchmetrics takes what it is given for probabilities, or for logits if a number of the *batch* lies outside [0, 1]. Of
models whose logits happen to lie inside, some batches would be read as the one and some as the other. So which it is,
is decided once for a module, not for a model: with random parameters logits leave [0, 1] and probabilities do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassExactMatch, MulticlassStatScores
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    binary_f1_score,
    multiclass_f1_score,
)
from torchmetrics.utilities import dim_zero_cat

from flsv.utilities.errors import ConfigurationError

#: What :meth:`Scores.value` gives of classifiers.
UtilityMetric = Literal["accuracy", "balanced_accuracy", "negative_loss", "per_class_accuracy"]
METRICS = get_args(UtilityMetric)

#: A batch: an input and labels.
Pair = tuple[Any, Any]


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of K models on the same validation samples; on the CPU.

    Attributes:
        values: name to one number per model, float64 ``[K]``. Of classifiers of M classes ``"loss"`` is the mean
            cross-entropy in nats (NaN or infinite where the logits are) and ``"correct"``, int64 ``[K, M]``, how many
            samples of each class are classified correctly. A sample whose logits hold a NaN is not.
        support: of classifiers, int64 ``[M]``, samples of each class.

    Example:
        >>> scores = Scores({"correct": torch.tensor([[2, 0, 0]])}, torch.tensor([2, 2, 0]))
        >>> scores.value("accuracy"), scores.value("per_class_accuracy")
        (tensor([0.5000], dtype=torch.float64), tensor([[1., 0., 0.]], dtype=torch.float64))
    """

    values: Mapping[str, Tensor]
    support: Tensor | None = None

    def __len__(self) -> int:
        """K."""
        return len(next(iter(self.values.values())))

    def value(self, name: str) -> Tensor:
        """One number per model, float64 ``[K]``, or one per model and class ``[K, M]``.

        Args:
            name: in ``values``; or of classifiers ``"accuracy"``, the share of samples that are classified correctly;
                ``"balanced_accuracy"``, the mean of the per-class accuracies over the classes that have samples;
                ``"per_class_accuracy"`` ``[K, M]``, 0 for a class without samples, so that its game is constant and
                nobody's contribution to it is anything but 0; ``"negative_loss"``, minus the mean cross-entropy.

        Raises:
            KeyError: there is no such score.
        """
        if self.support is None or name not in METRICS:
            return self.values[name]
        if name == "negative_loss":
            return -self.values["loss"]
        correct = self.values["correct"]
        if name == "accuracy":
            return correct.sum(-1).double() / self.support.sum()
        per_class = correct.double() / self.support.clamp(min=1)
        return per_class if name == "per_class_accuracy" else per_class.sum(-1) / (self.support > 0).sum()

    def __getitem__(self, rows: Tensor) -> Scores:
        """The scores of some of the models."""
        return Scores({name: value[rows] for name, value in self.values.items()}, self.support)

    @staticmethod
    def cat(parts: Sequence[Scores]) -> Scores:
        """The models of several evaluations on the same samples, one after the other."""
        first = parts[0]
        return Scores({name: torch.cat([part.values[name] for part in parts]) for name in first.values}, first.support)


def score_batch(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[c, B, M]`` of c models and labels ``[B]`` to hits per class, int64 ``[c, M]``, and loss sums ``[c]``.

    Nothing here waits for the device.
    """
    models, _, classes = logits.shape
    best, predicted = logits.max(-1)
    # max finds NaN greater than everything: without the second condition a broken model would "predict" some class.
    hits = (predicted == y) & (best == best)
    correct = torch.zeros(models, classes, dtype=torch.int64, device=logits.device)
    correct.index_add_(1, y, hits.long())
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), y.repeat(models), reduction="none").view(models, -1)
    return correct, losses.sum(-1, dtype=loss_dtype(logits.device))


def loss_dtype(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


#: By the name that stands for it: of one class's probabilities ``[N]`` against 0 and 1.
CLASS_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "auroc": binary_auroc,
    "average_precision": binary_average_precision,
    "f1": binary_f1_score,
}


class ClassScore(Metric):
    """torchmetrics' score of probabilities ``[B]`` of class 1, or ``[B, M]``, against integer classes ``[B]``; more is
    better. Of more than two classes those that occur count; F1 takes what is most probable, so that a class that is
    predicted and does not occur counts, too, with 0.

    Args:
        name: in ``CLASS_SCORES``.

    Raises:
        ValueError: other shapes, labels that are no integers; in ``compute``, samples that are all of one class.

    Example:
        >>> auroc = ClassScore("auroc")
        >>> auroc.update(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]]), torch.tensor([0, 1, 1]))
        >>> auroc.compute()
        tensor(1.)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    probabilities: list[Tensor]
    labels: list[Tensor]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_state("probabilities", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        """One batch."""
        if labels.is_floating_point() or labels.ndim != 1 or len(labels) != len(probabilities):
            raise ValueError("expected one integer class per sample.")
        if probabilities.ndim > 2:
            raise ValueError("expected a logit per sample, or one for each class.")
        self.probabilities.append(probabilities)
        self.labels.append(labels)

    def compute(self) -> Tensor:
        """The score of all batches."""
        probabilities, labels = dim_zero_cat(self.probabilities), dim_zero_cat(self.labels)
        occur = labels.unique().tolist()
        if len(occur) < 2:
            raise ValueError(f"the samples are all of class {occur[0]}, and two classes are to be told apart.")
        found, score = class_1(probabilities, labels), CLASS_SCORES[self.name]
        if found.ndim == 1:
            return score(found, labels)
        if self.name == "f1":
            return multiclass_f1_score(found, labels, num_classes=found.shape[1], average="macro")
        return torch.stack([score(found[:, c], (labels == c).long()) for c in occur]).mean()


def class_1(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Of probabilities of two classes ``[B, 2, ...]``, those of class 1 ``[B, ...]``; others as they are.

    Example:
        >>> class_1(torch.tensor([[0.8, 0.2]]), torch.tensor([0]))
        tensor([0.2000])
    """
    two = probabilities.ndim == labels.ndim + 1 and probabilities.shape[1] == 2
    return probabilities[:, 1] if two else probabilities


@torch.inference_mode(False)
def kept_batches(
    batches: Iterable[Any], device: torch.device, num_classes: int | None, size: int | None = None
) -> tuple[list[Pair], Tensor | None]:
    """Batches ``(x, y)``, read once, on a device; and of classifiers, int64 ``[M]`` on the CPU, samples per class.

    Args:
        batches: pairs of an input (a tensor, or whatever the module's forward takes) and labels.
        device: where they are kept.
        num_classes: M, of classifiers; None: labels may be anything.
        size: of classifiers, tensors of one shape are put together and cut into batches of this many samples; None:
            batches stay as they are.

    Raises:
        ConfigurationError: no samples; not pairs; of classifiers, labels that are no integers ``[B]`` in 0 .. M-1.
    """
    kept: list[Pair] = []
    support = None if num_classes is None else torch.zeros(num_classes, dtype=torch.int64)
    for x, y in batches if num_classes is None else (checked_pair(batch, num_classes) for batch in batches):
        if support is not None:
            support += torch.bincount(y.cpu(), minlength=len(support))
        if support is None or len(y):
            kept.append(apply_to_collection(move_data_to_device((x, y), device), Tensor, _plain))
    if not kept:
        raise ConfigurationError("there are no validation samples: models cannot be evaluated on nothing.")
    return (kept if support is None or size is None else _recut(kept, size)), support


def _recut(batches: list[Pair], size: int) -> list[Pair]:
    """Batches of another size, where their inputs are tensors of one shape."""
    kinds = {(x.shape[1:], x.dtype) if isinstance(x, Tensor) else None for x, _ in batches}
    if len(kinds) > 1 or None in kinds:
        return batches
    inputs, labels = (torch.cat(parts).split(size) for parts in zip(*batches))
    return list(zip(inputs, labels))


def _plain(tensor: Tensor) -> Tensor:
    """A tensor made in inference mode could not be differentiated through."""
    return tensor.clone() if tensor.is_inference() else tensor


def checked_pair(batch: Any, num_classes: int) -> tuple[Any, Tensor]:
    """A batch, if it is an input and integer labels ``[B]`` in 0 .. M-1."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ConfigurationError(f"a validation batch is a {type(batch).__name__}, expected a pair (x, y).")
    x, y = batch
    if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point() or y.dtype == torch.bool:
        raise ConfigurationError(f"the labels of a validation batch are {kind_of(y)}, expected integer classes [B].")
    if isinstance(x, Tensor) and len(x) != len(y):
        raise ConfigurationError(f"a validation batch has {len(x)} inputs and {len(y)} labels.")
    if len(y) and (int(y.min()) < 0 or int(y.max()) >= num_classes):
        raise ConfigurationError(
            f"validation labels lie in {int(y.min())} .. {int(y.max())}, but num_classes={num_classes}: expected "
            f"0 .. {num_classes - 1}."
        )
    return x, y.long()


def checked_logits(logits: Any, y: Tensor, classes: int, or_more: bool = False) -> Tensor:
    """``logits``, if they are one row of M numbers, or more, per label."""
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
    if shape == (len(y), classes) or (or_more and len(shape) == 2 and shape[0] == len(y) and shape[1] > classes):
        return logits
    hint = ""
    if classes == 2 and shape in ((len(y),), (len(y), 1)):
        hint = (
            " Of one logit z per sample make two: torch.stack([torch.zeros_like(z), z], -1) has the same loss under "
            "cross_entropy as z under binary_cross_entropy_with_logits."
        )
    raise ConfigurationError(
        f"the module's forward gives {kind_of(logits)} for {len(y)} samples of {classes} classes; expected logits "
        f"[{len(y)}, {classes}].{hint}"
    )


def kind_of(value: Any) -> str:
    """A tensor's dtype and shape, or the type of something else, for messages."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


_CLASSES = "torchmetrics.classification"


class OutputMetric:
    """A private copy of a torchmetrics metric, which is given outputs as it wants them.

    Outputs are given in single precision where they are half; a last dimension of 1 that only one of outputs and labels
    has is dropped, so that one logit ``[B, 1]`` fits labels ``[B]``. All else is the metric's business: logits or
    probabilities ``[B, M]`` or ``[B, M, H, W]`` with integer labels, one ``[B]`` for binary labels (of two, ``[B, 2]``,
    it is given class 1's), ``[B, L]`` for multilabel ones, numbers for regression.

    Args:
        metric: it is copied.
        asking: what asks for it, for messages.
        device: of the outputs.
        gives_logits: whether outputs are logits where the metric wants probabilities.
    """

    def __init__(self, metric: Metric, asking: str, device: torch.device, gives_logits: bool = False) -> None:
        self.metric, self.gives_logits = metric.clone().to(device), gives_logits
        self._asking, self._device = asking, device
        self.metric.sync_on_compute = False  # it keeps to this process
        self.metric.reset()
        self._seen = ""

    def clone(self) -> OutputMetric:
        """Another, empty."""
        return OutputMetric(self.metric, self._asking, self._device, self.gives_logits)

    def update(self, found: Any, y: Any) -> None:
        """One batch of outputs and labels.

        Raises:
            ConfigurationError: the metric does not take them.
        """
        self._seen = f"{kind_of(found)}, with y {kind_of(y)}"
        if isinstance(found, Tensor) and isinstance(y, Tensor):
            found = found.float() if found.dtype in (torch.bfloat16, torch.float16) else found
            if found.shape == (*y.shape, 1):
                found = found.squeeze(-1)
            elif y.shape == (*found.shape, 1):
                y = y.squeeze(-1)
            if self.gives_logits:
                found = _probabilities(self.metric, found, y)
            if _kind(self.metric) == "Binary":
                found = class_1(found, y)
        try:
            self.metric.update(found, y)
        except Exception as error:
            raise self._refused(error) from error

    def value(self) -> float:
        """Of all batches.

        Raises:
            ConfigurationError: the metric gives no number, or more than one.
        """
        try:
            value = self.metric.compute()
        except (RuntimeError, IndexError, ValueError) as error:
            raise self._refused(error) from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigurationError(
                f"{type(self.metric).__name__} gives {what}, expected one number per model: a utility is a "
                'scalar. Let the metric average, such as average="macro".'
            )
        return float(value)

    def _refused(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"{self._asking}: {type(self.metric).__name__} does not take what forward gives, {self._seen}: {error} Log "
            "the value in validation_step, and give its name as performance."
        )


def wants_probabilities(metric: Metric) -> bool:
    """Whether it matters to a metric if it is given logits or probabilities."""
    largest = isinstance(metric, MulticlassStatScores | MulticlassConfusionMatrix | MulticlassExactMatch)
    return _kind(metric) is not None and not largest


def beyond_probabilities(found: Any) -> bool:
    """Whether a number of the outputs is no probability."""
    return isinstance(found, Tensor) and found.is_floating_point() and bool(((found < 0) | (found > 1)).any())


def _kind(metric: Metric) -> str | None:
    """ "Binary", "Multilabel" or "Multiclass" of torchmetrics' own, "Classes" of :class:`ClassScore`."""
    if isinstance(metric, ClassScore):
        return "Classes"
    if not type(metric).__module__.startswith(_CLASSES):
        return None
    return next((k for k in ("Binary", "Multilabel", "Multiclass") if type(metric).__name__.startswith(k)), None)


def _probabilities(metric: Metric, logits: Tensor, y: Tensor) -> Tensor:
    kind = _kind(metric)
    if not logits.is_floating_point() or kind is None:
        return logits
    if kind == "Multilabel" or logits.ndim != y.ndim + 1:
        return logits if kind == "Multiclass" else logits.sigmoid()
    # A double tells probabilities next to 1 apart, which ranks need.
    return (logits if kind == "Multiclass" else logits.to(loss_dtype(logits.device))).softmax(1)
