"""ModelScoring: scores the models of a run or of coalitions by several performance measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from flsv.games.coalition_utility import check_untrained, utility_of
from flsv.games.vector_evaluator import Scores, VectorEvaluator, row_builder
from flsv.models.classifier import ClassifierClient
from flsv.scores.performance import Measure, Measures
from flsv.values.coalition_files import ScoredModel, outputs_name


class ModelScoring:
    """Scoring of models by ``measures``, ``{name: measure}``. ``evaluator_of(measure)`` returns an evaluator. With
    ``copies_modules`` False, it scores modules themselves, instead of copies, if this does not change them.
    """

    def __init__(
        self,
        measures: Measures,
        evaluator_of: Callable[[Measure], VectorEvaluator],
        copies_modules: bool = True,
    ) -> None:
        self._measures = measures
        self._copies_modules = copies_modules
        self.evaluators: list[VectorEvaluator] = []
        for measure in measures.values():
            if not any(evaluator.computes(measure) for evaluator in self.evaluators):
                self.evaluators.append(evaluator_of(measure))

    def score(
        self,
        module: nn.Module,
        untrained: Measures | None = None,
    ) -> ScoredModel:
        """Score a module as it is. If the module is untrained, ``untrained`` has the measures of metrics, ``{metric:
        measure}``: an error is raised if the model's score by one of these is not finite.
        """
        weighing_of_classes: AbstractContextManager[None] = nullcontext()
        if isinstance(module, ClassifierClient):
            weighing_of_classes = module.weighing_for_all()
        with weighing_of_classes:
            scores = {
                evaluator: evaluator.score_module(module, self._copies_modules)
                for evaluator in self.evaluators
            }

        for requester, measure in (untrained or {}).items():
            check_untrained(requester, measure, _scores_by(measure, scores))
        return self._model(scores, index=0)

    def score_vectors(self, vectors: Sequence[Tensor]) -> list[ScoredModel]:
        """Score the models ``vectors``, each ``[P]``."""
        build = row_builder(vectors)
        scores = {
            evaluator: evaluator.evaluate(build, len(vectors), keep=True)
            for evaluator in self.evaluators
        }
        return [self._model(scores, index) for index in range(len(vectors))]

    def _model(
        self, scores_by_evaluator: Mapping[VectorEvaluator, Scores], index: int
    ) -> ScoredModel:
        utilities = {}
        outputs = {}
        for name, measure in self._measures.items():
            scores = _scores_by(measure, scores_by_evaluator)
            utility = utility_of(scores, measure)[index]
            utilities[name] = utility.view(-1).tolist()
            if scores.outputs is not None:
                # A copy, since torch.save would write a view together with all models' outputs.
                outputs[outputs_name(measure)] = scores.outputs[index].cpu().clone()
        return ScoredModel(utilities, outputs)


def _scores_by(measure: Measure, scores_by_evaluator: Mapping[VectorEvaluator, Scores]) -> Scores:
    """Return the scores of the evaluator that computes a measure."""
    for evaluator, scores in scores_by_evaluator.items():
        if evaluator.computes(measure):
            return scores
    raise ValueError(f"{measure.title} is not computed by any evaluator.")
