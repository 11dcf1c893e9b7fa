"""Orders to train coalitions, and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from flsv._lightning.rounding import ROUNDINGS, Rounding
from flsv.games.members import Members
from flsv.games.module_copies import ScoringEffects
from flsv.values.coalition_files import NO_ROUND, ScoredModel


@dataclass(frozen=True, eq=False)
class FitOrder:
    """Request to train one coalition: members, seed and rounds to score."""

    members: Members
    seed: int
    # The rounds after which the model is scored, ascending. The fit ends with the last one. NO_ROUND stands for the
    # last round that the Trainer plans.
    rounds: tuple[int, ...] = (NO_ROUND,)
    # Whether the module is scored after the rounds, and before the first.
    scores_rounds: bool = True
    scores_untrained: bool = False
    # What scoring by each measure changes, as the run has tried.
    effects: Mapping[str, ScoringEffects] = field(default_factory=dict)
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

    # The model after each of the order's rounds.
    scored: Sequence[ScoredModel]
    # The model before the first round, None if it was not scored.
    untrained: ScoredModel | None
    # A hash of the module before training.
    start_hash: str
    models: FitModels | None = None
    rounding: Rounding = ROUNDINGS["float32"]
    # Norms of the entries of the members' updates in the first round, [entries], by client.
    first_updates: Mapping[int, Tensor] = field(default_factory=dict)
    # Paths of the program's tensors that the fit has changed, outside of all that is copied or put back.
    changed_tensors: Sequence[str] = ()


@dataclass(frozen=True)
class FitFailed:
    """Response in place of a result: the error that ended a coalition's fit."""

    error: str

    def __str__(self) -> str:
        return self.error
