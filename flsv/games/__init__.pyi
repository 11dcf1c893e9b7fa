from . import make_evaluators as make_evaluators, module_copies as module_copies
from .coalition_games import CoalitionGames as CoalitionGames
from .coalition_utility import (
    CoalitionTable as CoalitionTable,
    CoalitionUtility as CoalitionUtility,
    Renormalized as Renormalized,
    Weighting as Weighting,
)
from .model_evaluator import ModelEvaluator as ModelEvaluator
from .validated_models import ValidatedModels as ValidatedModels
from .vector_evaluator import (
    METRICS as METRICS,
    Scores as Scores,
    UtilityMetric as UtilityMetric,
    VectorEvaluator as VectorEvaluator,
)
