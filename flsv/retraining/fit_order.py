"""Orders to train coalitions, and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flsv._lightning.rounding import ROUNDINGS, Rounding
from flsv.games.members import Members
from flsv.retraining.utility_store import LAST_ROUND_KEY, Row


@dataclass(frozen=True, eq=False)
class FitOrder:
    """Request to train one coalition: members, seed, rounds to score and initial weights."""

    members: Members
    seed: int
    # The rounds after which the model is scored, ascending. The fit ends with the last one. LAST_ROUND_KEY stands for
    # the last round that the Trainer plans.
    rounds: tuple[int, ...] = (LAST_ROUND_KEY,)
    # The state_dict with which the module starts. None: its own weights.
    initial: Mapping[str, Any] | None = None
    # Whether the module is scored after the rounds, and before the first.
    scores_rounds: bool = True
    scores_untrained: bool = False
    # Whether Lightning validates, as in the run.
    is_whole: bool = True
    # Whether Lightning's ModelCheckpoint and EarlyStopping take part, since training reads them.
    keeps_checkpoints: bool = False
    # Whether the result has the models before and after training.
    returns_models: bool = False
    # Seconds after which the fit is given up if no round begins.
    max_wait: float | None = None


@dataclass(frozen=True, eq=False)
class FitModels:
    """Models ``[P]`` before and after training a coalition."""

    initial: Tensor
    # The global model after the last round.
    trained: Tensor


@dataclass(frozen=True, eq=False)
class FitResult:
    """Scores from training one coalition, and perhaps its models."""

    # {performance: utilities after each of the order's r rounds}, [r], or by class [r, M].
    utilities: Mapping[str, Tensor]
    # {performance: utility before the first round}, empty if the model was not scored.
    untrained: Mapping[str, Tensor]
    # A hash of the model before training.
    start_hash: str
    # {performance: outputs after each of the r rounds}, [r, V, ...].
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    models: FitModels | None = None
    rounding: Rounding = ROUNDINGS["float32"]
    # Norms of the entries of the members' updates in the first round, [entries], by client.
    first_updates: Mapping[int, Tensor] = field(default_factory=dict)
    # Paths of the program's tensors that the fit has changed, outside of all that is copied or put back.
    changed_tensors: Sequence[str] = ()

    def rows(self, rounds: Sequence[int]) -> dict[int, Row]:
        """Return the utilities by round, where ``rounds`` are the names of the order's rounds."""
        rows_by_round: dict[int, Row] = {}
        for position, round_index in enumerate(rounds):
            rows_by_round[round_index] = [
                _as_floats(utility[position]) for utility in self.utilities.values()
            ]
        return rows_by_round

    def untrained_row(self) -> Row:
        """Return the utilities before the first round, empty if they were not computed."""
        return [_as_floats(utility) for utility in self.untrained.values()]


def _as_floats(utility: Tensor) -> list[float]:
    return utility.view(-1).tolist()


@dataclass(frozen=True)
class FitFailed:
    """Answer in place of a result: the error that ended a coalition's fit."""

    error: str

    def __str__(self) -> str:
        return self.error
