"""Differences between two trainings of a coalition, at once and alone, and whether they are rounding.

A coalition that is trained twice must come to the same models, scores and outputs, but for rounding. Where training
enlarges rounding errors, both ways to train are repeated in 64 bits. There a difference that is rounding vanishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flsv._lightning.rounding import relative_distance
from flsv.games.members import Members
from flsv.retraining.coalition_store import clients_text
from flsv.retraining.training_job import FitResult
from flsv.utilities.errors import NotBatched
from flsv.values.coalition_files import ScoredModel

#: The largest relative difference between the scores or outputs of two models that differ by rounding.
MAX_DIFFERENCE_OF_SCORES = 0.01
#: The largest distance of two models in 64 bits that is rounding, relative to the model's distance from the initial
#: one. Besides, it may be this fraction of the distance in the run's own precision.
MAX_DISTANCE_IN_DOUBLE = 1e-6
MAX_FRACTION_IN_DOUBLE = 1e-3
#: The largest relative difference between their scores or outputs.
MAX_DIFFERENCE_OF_SCORES_IN_DOUBLE = 1e-4


class ProofFailed(NotBatched):
    """Error: a coalition that trained at once has other models than in an earlier training.

    Attributes:
        round_of_run: the index of the round after which the model of all clients differs from the run's own. None:
            another coalition's model differs.
    """

    def __init__(self, words: str, round_of_run: int | None = None) -> None:
        super().__init__(words)
        self.round_of_run = round_of_run

    def __reduce__(self) -> tuple[type, tuple[str, int | None]]:
        """Let a rank send the error to the other ranks."""
        return type(self), (self.reason, self.round_of_run)


class Expected(NamedTuple):
    """The models ``[P]`` and scored models of a coalition by round, from an earlier training."""

    members: Members
    models: Mapping[int, Tensor]
    scored: Mapping[int, ScoredModel]
    #: Whether the earlier training is the run itself.
    is_run: bool = False

    @classmethod
    def of_fit(cls, members: Members, result: FitResult, rounds: Sequence[int]) -> Expected:
        """Return what the fit of a coalition has come to."""
        return cls(members, result.models.after_round, scored=dict(zip(rounds, result.scored)))

    def scored_pairs(
        self, result: FitResult, rounds: Sequence[int]
    ) -> Iterator[tuple[int, ScoredModel, ScoredModel]]:
        """Yield the rounds after which both trainings have scored models, with the result's and the earlier one."""
        for round_index, model in zip(rounds, result.scored):
            if round_index in self.scored:
                yield round_index, model, self.scored[round_index]


@dataclass(frozen=True)
class Difference:
    """A difference between two trainings of a coalition that plain rounding does not explain."""

    #: What differs, such as "the model of client 1 alone after round 3".
    subject: str
    #: Relative to the model's distance from the initial one, or to the largest score or output.
    size: float
    round_of_run: int | None = None


def find_differences(
    result: FitResult, expected: Expected, rounds: Sequence[int]
) -> Iterator[Difference]:
    """Yield the differences between a result and an earlier training that plain rounding does not explain.

    Args:
        result: the result of training at once.
        expected: the earlier training of the same coalition.
        rounds: the rounds after which ``result`` has scored models.
    """
    for round_index, model in expected.models.items():
        distance = result.rounding.unexplained_distance(
            result.models.after_round[round_index], model.cpu(), result.models.initial
        )
        if distance is not None:
            yield _difference("the model", distance, round_index, expected)
    for round_index, scored, earlier_scored in expected.scored_pairs(result, rounds):
        for name, difference in differences_of_scores(scored, earlier_scored).items():
            if not difference <= MAX_DIFFERENCE_OF_SCORES:
                yield _difference(f"{name} of the model", difference, round_index, expected)


def _difference(what: str, size: float, round_index: int, expected: Expected) -> Difference:
    members = "all clients" if expected.is_run else f"{clients_text(expected.members)} alone"
    return Difference(
        f"{what} of {members} after round {round_index + 1}",
        size,
        round_of_run=round_index if expected.is_run else None,
    )


def check_in_double(
    result: FitResult,
    expected: Expected,
    rounds: Sequence[int],
    differences: Sequence[Difference],
) -> None:
    """Raise ProofFailed if two trainings of a coalition differ in 64 bits, where rounding nearly vanishes.

    Args:
        result: the result of training at once in 64 bits.
        expected: the same coalition, trained alone in 64 bits.
        rounds: the rounds after which ``result`` has scored models.
        differences: what differs in the run's own precision, and may be rounding.
    """
    largest = max(difference.size for difference in differences)
    max_distance = min(MAX_DISTANCE_IN_DOUBLE, MAX_FRACTION_IN_DOUBLE * largest)
    for round_index, model in expected.models.items():
        distance = _distance(
            result.models.after_round[round_index], model, initial_model=result.models.initial
        )
        if not distance <= max_distance:
            raise no_rounding(differences, f"the models differ by {distance:.2g} in 64 bits, too.")
    for _, scored, earlier_scored in expected.scored_pairs(result, rounds):
        for name, difference in differences_of_scores(scored, earlier_scored).items():
            if not difference <= MAX_DIFFERENCE_OF_SCORES_IN_DOUBLE:
                raise no_rounding(
                    differences, f"{name} differs by {difference:.2g} in 64 bits, too."
                )


def no_rounding(differences: Sequence[Difference], reason: str) -> ProofFailed:
    """Return the error that differences are no rounding, for a reason."""
    first = differences[0]
    return ProofFailed(
        f"{first.subject} differs by {first.size:.2g}, relative to what training has changed, and this is no "
        f"rounding error: {reason}",
        last_round_of_run(differences),
    )


def last_round_of_run(differences: Iterable[Difference]) -> int | None:
    """Return the last round after which all clients differ from the run. None: they do not."""
    rounds = [difference.round_of_run for difference in differences]
    return max((index for index in rounds if index is not None), default=None)


def _distance(model: Tensor, reference: Tensor, initial_model: Tensor) -> float:
    """Return the relative distance of two models. It is infinite if other elements are finite."""
    is_finite = reference.isfinite()
    if not is_finite.all():
        return 0.0 if model.isfinite().equal(is_finite) else float("inf")
    return relative_distance(model.double(), reference.double(), initial_model.double())


def differences_of_scores(model: ScoredModel, expected: ScoredModel) -> dict[str, float]:
    """Return by how much two models' outputs or utilities differ, relative to the largest one, by name."""
    pairs = _pairs_of_numbers(model, expected)
    return {name: _relative_difference(*pair) for name, pair in pairs.items()}


def _pairs_of_numbers(
    model: ScoredModel, expected: ScoredModel
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the outputs that both models have, by name, or their utilities if they have no outputs in common, since a
    store may have none.
    """
    names = model.outputs.keys() & expected.outputs.keys()
    if names:
        return {name: (model.outputs[name], expected.outputs[name]) for name in names}
    return {
        name: (torch.tensor(model.utilities[name]), torch.tensor(utility))
        for name, utility in expected.utilities.items()
    }


def _relative_difference(numbers: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected number. Infinite: shapes or NaNs differ."""
    if numbers.shape != expected.shape or not numbers.isnan().equal(expected.isnan()):
        return float("inf")
    if not expected.numel():
        return 0.0
    numbers = numbers.double().nan_to_num()
    expected = expected.double().nan_to_num()
    difference = float((numbers - expected).abs().max())
    if not difference:
        return 0.0
    scale = float(expected.abs().max())
    return difference / scale if scale else float("inf")
