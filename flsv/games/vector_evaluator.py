"""VectorEvaluator: the base class of evaluators of models that are given as vectors, and their scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.functional.shapley.predicted_outputs import ValuesFromOutputs
from flsv.games.module_copies import ScoringCopies, ScoringEffects
from flsv.scores.performance import Measure

#: Names of classifiers' scores that :meth:`Scores.value` takes.
UtilityMetric = Literal["accuracy", "balanced_accuracy", "negative_loss", "per_class_accuracy"]
METRICS = get_args(UtilityMetric)


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of K models on the same validation samples, on the CPU.

    Attributes:
        values: ``{name: numbers}``, one number per model, float64 ``[K]``. For classifiers of M classes, ``"loss"`` is
            the mean cross-entropy in nats (NaN or infinite if logits are), and ``"correct"``, int64 ``[K, M]``, is the
            number of samples of each class that are classified correctly. A sample with a NaN among its logits is not
            classified correctly.
        support: for classifiers, the number of samples of each class, int64 ``[M]``, otherwise None.
        outputs: the models' outputs, float32 ``[K, V, ...]`` for V samples, or None if they were not stored. For
            classifiers they are logits, with the classes in the last dimension.

    Example:
        >>> scores = Scores({"correct": torch.tensor([[2, 0, 0]])}, torch.tensor([2, 2, 0]))
        >>> scores.value("accuracy"), scores.value("per_class_accuracy")
        (tensor([0.5000], dtype=torch.float64), tensor([[1., 0., 0.]], dtype=torch.float64))
    """

    values: Mapping[str, Tensor]
    support: Tensor | None = None
    outputs: Tensor | None = None

    def __len__(self) -> int:
        """Return K, the number of models."""
        return len(next(iter(self.values.values())))

    def value(self, name: str) -> Tensor:
        """Return one number per model, float64 ``[K]``, or one per model and class ``[K, M]``.

        Args:
            name: a name in ``values``. For classifiers also ``"accuracy"``, the share of samples that are classified
                correctly, ``"balanced_accuracy"``, the mean of the per-class accuracies over the classes that have
                samples, ``"per_class_accuracy"`` ``[K, M]``, which is 0 for a class without samples, and
                ``"negative_loss"``, minus the mean cross-entropy.

        Raises:
            KeyError: the score is unknown.
        """
        if self.support is None or name not in METRICS:
            return self.values[name]
        if name == "negative_loss":
            return -self.values["loss"]
        correct = self.values["correct"]  # [K, M]
        if name == "accuracy":
            num_correct = correct.sum(-1)
            return num_correct.double() / self.support.sum()
        divisors = self.support.clamp(min=1)  # no division by 0
        per_class_accuracy = correct.double() / divisors
        if name == "per_class_accuracy":
            return per_class_accuracy
        # balanced accuracy, over the classes that have samples
        num_classes = (self.support > 0).sum()
        return per_class_accuracy.sum(-1) / num_classes

    def __getitem__(self, rows: Tensor) -> Scores:
        """Select the scores of the models with the indices ``rows``."""
        selected = {name: values[rows] for name, values in self.values.items()}
        return Scores(selected, self.support)

    @staticmethod
    def cat(parts: Sequence[Scores]) -> Scores:
        """Concatenate the scores of several groups of models on the same samples."""
        values = {}
        for name in parts[0].values:
            values_of_parts = [part.values[name] for part in parts]
            values[name] = torch.cat(values_of_parts)
        kept_outputs = [part.outputs for part in parts if part.outputs is not None]
        outputs = torch.cat(kept_outputs) if kept_outputs else None
        return Scores(values, parts[0].support, outputs)


#: A function ``build(i, out)`` that writes model i's vector into the tensor ``out [P]``.
Build = Callable[[int, Tensor], None]


def row_builder(vectors: Tensor | Sequence[Tensor]) -> Build:
    """Return a function that writes row i of ``vectors [K, P]`` into ``out [P]``."""

    def build(index: int, out: Tensor) -> None:
        out.copy_(vectors[index])

    return build


class VectorEvaluator(ABC):
    """Base class of evaluators, which compute scores of models given as vectors ``[P]``.

    :class:`CoalitionGames` calls an evaluator with the models of coalitions. Subclasses override :meth:`evaluate`.
    """

    space: ParameterSpace
    requests_from_clients = False
    """Whether the evaluator sends requests to the clients. Then every rank must evaluate every model."""
    copies: ScoringCopies | None = None
    """The copies of the fit's module in which models are scored. None: models are not scored in this process."""
    effects: ScoringEffects | None = None
    """The changes that scoring makes. None: models are not scored in this process."""

    def __call__(self, vectors: Tensor, keep: bool = False) -> Scores:
        """Compute the scores of the K models in the rows of ``vectors [K, P]``.

        With ``keep`` the scores also contain the models' outputs, if possible.

        Raises:
            ValueError: the vectors have another length.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.space.size:
            shape = list(vectors.shape)
            raise ValueError(f"expected vectors of the shape [K, {self.space.size}], got {shape}.")
        return self.evaluate(row_builder(vectors), len(vectors), keep)

    @abstractmethod
    def evaluate(
        self,
        build: Build,
        count: int,
        keep: bool = False,
    ) -> Scores:
        """Compute the scores of ``count`` models, which ``build`` writes (see :data:`Build`).

        One model or one chunk of models is in memory at a time. With ``keep`` the scores also contain the models'
        outputs, if possible, from which other coalitions' outputs are predicted.
        """

    @abstractmethod
    def computes(self, measure: Measure) -> bool:
        """Return whether the scores have a performance measure."""

    def output_measure(self, measure: Measure) -> ValuesFromOutputs | None:
        """Return the object that computes Shapley values by ``measure`` from the outputs that :meth:`evaluate` keeps.
        None: it keeps no outputs.
        """
        return None

    def score_module(self, module: nn.Module, in_copy: bool = True) -> Scores:
        """Compute the scores of the fit's ``module`` in its present state, with all changes that hooks have made. The
        scores also contain its outputs, if possible. A copy is scored, unless ``in_copy`` is False and scoring changes
        nothing.
        """
        return self(self.space.read(module)[None], keep=True)
