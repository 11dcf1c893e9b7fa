"""OutputScore: scores of coalitions by their outputs. And untrained models, which show how much scores depend on the
initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.functional.shapley.predicted_outputs import (
    PredictedValues,
    PredictionScore,
    values_of_rounds,
    values_of_tables,
)
from flsv.games.client_evaluation import ClientEvaluator
from flsv.games.coalition_utility import utility_of
from flsv.games.model_evaluator import ModelEvaluator
from flsv.games.module_copies import ModuleCopies
from flsv.games.output_scorer import OutputScorer
from flsv.games.sample_scores import SampleScores, sample_scores
from flsv.scores.performance import ModelScore, PerformanceMeasure
from flsv.utilities.seeding import isolated_rngs


@dataclass(frozen=True, eq=False)
class OutputScore(PredictionScore):
    """Score of coalitions' predicted outputs by a performance measure. It also computes the Shapley values."""

    # The evaluator at the clients, if the clients predict and score. Then the "outputs" are models [T, P].
    client_evaluator: ClientEvaluator | None = None
    # The scores on each validation sample. None: they cannot be computed.
    scores_by_sample: SampleScores | None = None

    def shapley(
        self,
        trained: Tensor,
        utilities: Sequence[Tensor],
        outputs: Iterable[Tensor],
        weights: Tensor,
    ) -> list[PredictedValues]:
        """Compute Shapley values after several rounds, from the utilities and outputs of each round, with the arguments
        of :func:`flsv.functional.predicted_shapley`.
        """
        if self.client_evaluator is None:
            return values_of_rounds(trained, utilities, outputs, weights, scoring=self)
        values = []
        for utilities_of_round, models in zip(utilities, outputs):
            tables = self.client_evaluator.predict(models, trained, weights)
            values.append(_values_with_trained(tables, trained, utilities_of_round))
        return values

    @staticmethod
    def for_evaluator(evaluator: Any, measure: PerformanceMeasure) -> OutputScore | None:
        """Return the score of the outputs that ``evaluator`` stores, by ``measure``. None if it stores no outputs."""
        if isinstance(evaluator, ClientEvaluator) and evaluator.can_predict:
            # The clients predict the outputs and return scores, so this function of outputs is never called.
            return OutputScore(lambda scores: scores, logits=True, client_evaluator=evaluator)
        if not isinstance(evaluator, ModelEvaluator) or evaluator.form is None:
            return None

        scorer = evaluator.output_scorer()
        by_sample = sample_scores(scorer, measure)
        return OutputScore(
            _score_of_outputs(scorer, measure, by_sample),
            logits=scorer.form.classifies,
            is_bounded=scorer.form.is_bounded,
            scores_by_sample=by_sample,
            order=scorer.order,
        )


def _score_of_outputs(
    scorer: OutputScorer, measure: PerformanceMeasure, by_sample: SampleScores | None
) -> Callable[[Tensor], Tensor]:
    """Return the function from models' outputs ``[c, V, ...]`` to their utilities ``[c]`` or ``[c, M]``."""
    if isinstance(measure, ModelScore) and by_sample is not None and not by_sample.is_resampled:
        return lambda outputs: by_sample.score(outputs).mean(1)  # over the samples
    needs_losses = measure == "negative_loss"
    return lambda outputs: utility_of(scorer.score(outputs, losses=needs_losses), measure)


def _values_with_trained(tables: Tensor, trained: Tensor, utilities: Tensor) -> PredictedValues:
    """Compute Shapley values from all coalitions' predicted utilities ``[2^n, 2]`` or ``[2^n, 2, M]``, by interpolation
    and by an ensemble. The ``trained`` coalitions get their own ``utilities`` in both games.
    """
    tables = tables.view(tables.shape[:2] + utilities.shape[1:])
    # The number of a coalition's row has the mask as its binary digits. Client 0 is the lowest digit.
    place_values = 2 ** torch.arange(trained.shape[1])
    coalition_numbers = (trained * place_values).sum(1)
    tables[coalition_numbers] = utilities.to(tables).unsqueeze(1)
    return values_of_tables(tables)


#: The number of untrained models that are evaluated.
NUM_UNTRAINED_MODELS = 8


def untrained_models(
    module: nn.Module, space: ParameterSpace, seed: int
) -> Callable[[int, Tensor], None] | None:
    """Return a function ``build(i, out)`` that draws the i-th model with random initial weights and writes it into
    ``out [P]``. None if no layer of the untrained ``module`` has weights that can be drawn.
    """
    module_copy = ModuleCopies(module, space).load()
    layers = _drawable_layers(module_copy, space)
    if not layers:
        return None

    def write_model(index: int, out: Tensor) -> None:
        with isolated_rngs(seed, "untrained", index):
            for layer in layers:
                layer.reset_parameters()
            space.read(module_copy, out=out)

    return write_model


def _drawable_layers(module: nn.Module, space: ParameterSpace) -> list[Any]:
    """List the layers whose weights can be drawn again by ``reset_parameters``."""
    frozen_ids = {id(tensor) for tensor in space.constants(module).values()}
    layers = []
    for layer in module.modules():
        if not callable(getattr(layer, "reset_parameters", None)):
            continue
        parameters = list(layer.parameters())
        has_frozen = any(id(parameter) in frozen_ids for parameter in parameters)
        # The initial weights of an adapter must be zero.
        is_adapter = len(parameters) > 0 and not any(parameter.any() for parameter in parameters)
        if not has_frozen and not is_adapter:
            layers.append(layer)
    return layers
