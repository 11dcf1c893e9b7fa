"""OutputScore: scores of coalitions by their outputs. And untrained models, which show how much scores depend on the
initial weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.functional.joint_shares import CaseValues
from flsv.functional.shapley.predicted_outputs import (
    PredictedValues,
    predicted_shapley,
    values_of_tables,
)
from flsv.games.client_evaluation import ClientEvaluator
from flsv.games.coalition_utility import utility_of
from flsv.games.model_evaluator import ModelEvaluator
from flsv.games.module_copies import ModuleCopies
from flsv.games.sample_scores import SampleScores, sample_scores, score_within_bounds
from flsv.scores.performance import ModelScore
from flsv.utilities.seeding import isolated_rngs


@dataclass(frozen=True, eq=False)
class OutputScore:
    """Score of coalitions' predicted outputs by a performance measure. It also computes the Shapley values."""

    # Function from outputs [c, V, ...] to utilities [c] or [c, M].
    score: Callable[[Tensor], Tensor]
    # Whether the outputs are logits.
    logits: bool
    # The evaluator at the clients, if the clients predict and score. Then the "outputs" are models [T, P].
    client_evaluator: ClientEvaluator | None = None
    # Whether predicted outputs are limited to the range of the trained coalitions' outputs.
    is_bounded: bool = False
    # The scores on each validation sample. None: they cannot be computed.
    scores_by_sample: SampleScores | None = None

    def shapley(
        self,
        trained: Tensor,
        utilities: Tensor,
        outputs: Tensor,
        weights: Tensor,
    ) -> PredictedValues:
        """Compute Shapley values, with the arguments of :func:`flsv.functional.predicted_shapley`."""
        if self.client_evaluator is None:
            score = self.score
            if self.is_bounded:
                has_members = trained.any(1)
                score = score_within_bounds(self.score, outputs[has_members])
            return predicted_shapley(
                trained,
                utilities,
                outputs=outputs,
                weights=weights,
                score=score,
                logits=self.logits,
            )

        # [2^n, 2] or [2^n, 2, M], the utilities in two games: of outputs by interpolation and by an ensemble
        tables = self.client_evaluator.predict(outputs, trained, weights)
        shape = tables.shape[:2] + utilities.shape[1:]
        tables = tables.view(shape)
        # The number of a coalition's row has the mask as its binary digits. Client 0 is the lowest digit.
        num_clients = trained.shape[1]
        place_values = 2 ** torch.arange(num_clients)
        coalition_numbers = (trained * place_values).sum(1)
        # In both games, trained coalitions have the utilities of their own models.
        tables[coalition_numbers] = utilities.to(tables).unsqueeze(1)
        return values_of_tables(tables)

    def case_values(
        self,
        trained: Tensor,
        outputs: Tensor,
        weights: Tensor,
    ) -> CaseValues | None:
        """Compute the values on each validation sample, from outputs ``[T, V, ...]``. None if this is not possible."""
        if self.scores_by_sample is None:
            return None
        return self.scores_by_sample.values(
            trained, outputs, weights, logits=self.logits, bounded=self.is_bounded
        )

    @staticmethod
    def for_evaluator(evaluator: Any, measure: str | ModelScore) -> OutputScore | None:
        """Return the score of the outputs that ``evaluator`` stores, by ``measure``. None if it stores no outputs."""
        if isinstance(evaluator, ClientEvaluator) and evaluator.can_predict:
            # The clients predict the outputs and return scores, so `score` is not used.
            return OutputScore(lambda scores: scores, logits=True, client_evaluator=evaluator)
        if not isinstance(evaluator, ModelEvaluator) or evaluator.form is None:
            return None

        needs_losses = measure == "negative_loss"

        def score(outputs: Tensor) -> Tensor:
            scores = evaluator.score_outputs(outputs, losses=needs_losses)
            return utility_of(scores, measure)

        return OutputScore(
            score,
            logits=evaluator.form.classifies,
            is_bounded=evaluator.form.is_bounded,
            scores_by_sample=sample_scores(evaluator, measure),
        )


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
