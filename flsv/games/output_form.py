"""OutputForm: the form in which models' outputs are stored, to predict those of coalitions that were not trained."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.games.output_metric import task_of
from flsv.scores.likelihood import MeanLogLikelihood

#: Numbers of a floating-point type show whether outputs are whole numbers only if neighbouring numbers of this type are
#: nearer than this distance.
_LARGEST_STEP = 0.125
#: Lower probabilities are raised to this one before their logarithm is taken.
MIN_PROBABILITY = 1e-6


@dataclass(frozen=True)
class OutputForm:
    """The form in which coalitions' outputs are predicted. Classifiers' outputs become logits, with the classes in the
    last dimension. A regression's outputs do not change.
    """

    classifies: bool
    # Whether there is one output per sample, for the positive class.
    has_one_output: bool = False
    gives_logits: bool = True
    # Whether outputs are log-probabilities of the labels. The two classes are then "not the label" and "the label".
    are_label_likelihoods: bool = False
    # Whether a regression's outputs have a bound that no prediction may exceed, such as rates and shares have.
    is_bounded: bool = False

    @staticmethod
    def for_metric(
        metric: Metric, shape: tuple[int, ...], y: Tensor, gives_logits: bool
    ) -> OutputForm:
        """Return the form for a metric, and outputs of the shape ``[B, ...]`` for the labels ``y``."""
        if isinstance(metric, MeanLogLikelihood):
            return OutputForm(classifies=True, are_label_likelihoods=True)
        shapes_of_one_output = (y.shape, (*y.shape, 1))
        return OutputForm(
            classifies=task_of(metric) is not None,
            has_one_output=shape in shapes_of_one_output,
            gives_logits=gives_logits,
        )

    def logits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Convert the outputs ``[c, B, ...]`` of c models for the labels ``y [B, ...]`` to this form."""
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
        """Convert c models' predicted logits ``[c, B, ..., M]`` back to outputs, as the inverse of :meth:`logits`."""
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
        return logits.movedim(-1, 2)  # [c, B, M, ...]


def are_whole(numbers: Tensor) -> bool:
    """Return whether all outputs are whole numbers, so that predictions must not be fractions."""
    # Large floating-point numbers are always whole, so only small ones are examined. The distance of neighbouring
    # numbers is eps at 1, and grows with the number. In float32 the limit is 2^20.
    limit = _LARGEST_STEP / torch.finfo(numbers.dtype).eps
    small_numbers = numbers[numbers.abs() < limit]
    return len(small_numbers) > 0 and torch.equal(small_numbers, small_numbers.round())


def have_bound(numbers: Tensor, numbers_of_larger: Tensor) -> bool:
    """Return whether outputs have a bound, such as rates and shares have: outputs of models with larger weights,
    ``numbers_of_larger``, do not exceed the outputs ``numbers`` of models with smaller weights.
    """
    if not len(numbers) or not len(numbers_of_larger):
        return False
    if _is_below(numbers.min(), numbers_of_larger.min()):
        return True
    return _is_below(-numbers.max(), -numbers_of_larger.max())


def _is_below(bound: Tensor, other_bound: Tensor) -> bool:
    """Return whether ``bound`` is finite and below ``other_bound``, up to rounding."""
    lowest = float(bound)
    rounding = 1e-3 * (1 + abs(lowest))
    return isfinite(lowest) and lowest - rounding <= float(other_bound)
