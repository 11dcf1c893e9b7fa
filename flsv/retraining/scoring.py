"""ModelScoring: scores the models of a run or of coalitions by several performance measures."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from flsv.games.coalition_utility import check_untrained, utility_of
from flsv.games.vector_evaluator import Scores, VectorEvaluator, row_builder
from flsv.models.classifier import ClassifierClient
from flsv.scores.performance import Measures, ModelScore, PerformanceMeasure
from flsv.values.coalition_files import ScoredModel, outputs_name


class ModelScoring:
    """Scoring of models by ``measures``, ``{name: measure}``. ``evaluator_of(measure)`` returns an evaluator."""

    def __init__(
        self, measures: Measures, evaluator_of: Callable[[PerformanceMeasure], VectorEvaluator]
    ) -> None:
        self._measures = measures
        self.evaluators: dict[Hashable, VectorEvaluator] = {}
        for measure in measures.values():
            key = _key(measure)
            if key not in self.evaluators:
                self.evaluators[key] = evaluator_of(measure)

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
        scores_by_key = {}
        with weighing_of_classes:
            for key, evaluator in self.evaluators.items():
                scores_by_key[key] = evaluator.score_module(module)

        if untrained is not None:
            for requester, measure in untrained.items():
                check_untrained(requester, measure, scores_by_key[_key(measure)])
        return self._model(scores_by_key, index=0)

    def score_vectors(self, vectors: Sequence[Tensor]) -> list[ScoredModel]:
        """Score the models ``vectors``, each ``[P]``."""
        scores_by_key = {}
        build = row_builder(vectors)
        num_models = len(vectors)
        for key, evaluator in self.evaluators.items():
            scores_by_key[key] = evaluator.evaluate(build, num_models, keep=True)

        models = []
        for index in range(num_models):
            model = self._model(scores_by_key, index)
            models.append(model)
        return models

    def _model(
        self,
        scores_by_key: Mapping[Hashable, Scores],
        index: int,
    ) -> ScoredModel:
        utilities = {}
        outputs = {}
        for measure_name, measure in self._measures.items():
            scores = scores_by_key[_key(measure)]
            utility = utility_of(scores, measure)[index]
            utilities[measure_name] = utility.view(-1).tolist()
            if scores.outputs is not None:
                output = scores.outputs[index].cpu()
                # A copy, since torch.save would write a view together with all models' outputs.
                outputs[outputs_name(measure)] = output.clone()
        return ScoredModel(utilities, outputs)


def _key(measure: PerformanceMeasure) -> Hashable:
    """Return the key of a measure's evaluator. All measures of a classifier's outputs have one evaluator."""
    if isinstance(measure, ModelScore):
        return measure.evaluator_key, measure.name
    return None
