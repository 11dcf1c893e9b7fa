"""Requests to train coalitions, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from flsv._lightning.rounding import ROUNDINGS, Rounding
from flsv.games.members import Members
from flsv.games.module_copies import ScoringEffects
from flsv.values.coalition_files import ScoredModel


@dataclass(frozen=True, eq=False)
class TrainingJob:
    """Request to train one coalition: its members, the seed, and the rounds after which its model is scored."""

    members: Members
    seed: int
    # The rounds after which the model is scored, ascending. The fit ends after the last of them.
    rounds: tuple[int, ...]
    # Whether the model is scored after these rounds, and before the first round.
    scores_rounds: bool = True
    scores_untrained: bool = False
    # The changes that scoring by each measure makes, which the run has found out.
    effects: Mapping[str, ScoringEffects] = field(default_factory=dict)
    # Whether Lightning runs the validations that the run has.
    validates: bool = True
    # Whether Lightning's ModelCheckpoint and EarlyStopping take part, because training reads them.
    keeps_checkpoints: bool = False
    # The rounds after which the result has the model itself.
    model_rounds: tuple[int, ...] = ()
    # Whether all is computed in 64 bits, to find out whether two ways to train differ by rounding only.
    in_double: bool = False


@dataclass(frozen=True, eq=False)
class FitModels:
    """A coalition's models ``[P]`` before its first round and, by round, after those that its job names."""

    initial: Tensor = field(default_factory=partial(torch.empty, 0))
    after_round: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class FitResult:
    """Scores from training one coalition, and the models that its job requests."""

    # The model after each of the job's rounds.
    scored: Sequence[ScoredModel]
    # The model before the first round, None if it was not scored.
    untrained: ScoredModel | None
    # A hash of the module's weights before training.
    start_hash: str
    models: FitModels = field(default_factory=FitModels)
    rounding: Rounding = ROUNDINGS["float32"]
    # For each member, the norm of its first update in each parameter and buffer of the model.
    first_updates: Mapping[int, Tensor] = field(default_factory=dict)
    # The same models, trained in 64 bits. Empty: a proof of coalitions at once needed none.
    in_double: Sequence[ScoredModel] = ()
    # Paths of tensors that the fit has changed although the program keeps them outside of the module.
    changed_tensors: Sequence[str] = ()


@dataclass(frozen=True)
class FitFailed:
    """The error that ended a coalition's fit, in place of its result."""

    error: str

    def __str__(self) -> str:
        return self.error


#: What training one coalition comes to.
FitOutcome = FitResult | FitFailed
