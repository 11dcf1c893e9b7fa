"""Values of clients from the rows of a store, which has the utilities and outputs of coalitions' models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flsv.core.extension import MeasuredRun
from flsv.games.members import members_of
from flsv.games.output_score import OutputScore
from flsv.metrics.shadow import ShadowShapley
from flsv.retraining.utility_store import UtilityStore, column_name, outputs_name


def values_of_rows(
    metrics: Mapping[str, ShadowShapley],
    masks: Tensor,
    store: UtilityStore,
    run: MeasuredRun,
) -> dict[int, dict[str, Tensor]]:
    """Give the metrics the rows of the coalitions ``masks``, and return their values, ``{round: {metric: values}}``."""
    coalitions = members_of(masks)
    values_by_round: dict[int, dict[str, Tensor]] = {index: {} for index in store.rounds}
    for name, metric in metrics.items():
        rounds_to_value = metric.rounds_to_value(store.rounds[-1] + 1)
        rounds = [index for index in rounds_to_value if index in store.rounds]
        positions = [store.rounds.index(round_index) for round_index in rounds]
        column = store.names.index(column_name(metric.measured_by))
        utilities = []  # [K][R][1], or per class
        for members in coalitions:
            rows = store.rows(run.seed, members)
            utilities.append([rows[position][column] for position in positions])

        score = score_of_stored_outputs(metric, store, run)
        outputs = None
        if score is not None:
            outputs = stored_outputs(metric, masks, store, run.seed)[:, positions].transpose(0, 1)
        metric_values = metric.complete(
            masks,
            torch.tensor(utilities, dtype=torch.float64).transpose(0, 1),
            rounds=rounds,
            outputs=outputs,
            weights=run.weights,
            output_score=score,
        )
        for index, values in metric_values.items():
            values_by_round[index][name] = values
    return values_by_round


def stored_outputs(
    metric: ShadowShapley,
    masks: Tensor,
    store: UtilityStore,
    seed: int,
) -> Tensor:
    """Return the coalitions' outputs ``[K, R, V, ...]`` after each of R rounds."""
    name = outputs_name(metric.measured_by)
    outputs = [store.outputs(seed, members, name) for members in members_of(masks)]
    return torch.stack(outputs)


def score_of_stored_outputs(
    metric: ShadowShapley,
    store: UtilityStore,
    run: MeasuredRun,
) -> OutputScore | None:
    """Return the score of ``metric`` as a function of outputs. None if the store has no outputs."""
    if outputs_name(metric.measured_by) not in store.measures_with_outputs:
        return None
    return output_score(metric, run)


def output_score(metric: ShadowShapley, run: MeasuredRun) -> OutputScore | None:
    """Return the score of ``metric`` as a function of outputs, None if there are none."""
    evaluator = run.games.evaluator_of(metric.measured_by)
    return OutputScore.for_evaluator(evaluator, metric.measured_by)
