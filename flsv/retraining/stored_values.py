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
    values_by_round: dict[int, dict[str, Tensor]] = {}
    for round_index in store.rounds:
        values_by_round[round_index] = {}
    for name, metric in metrics.items():
        for round_index, values in _values_of_metric(metric, masks, store, run).items():
            values_by_round[round_index][name] = values
    return values_by_round


def _values_of_metric(
    metric: ShadowShapley,
    masks: Tensor,
    store: UtilityStore,
    run: MeasuredRun,
) -> dict[int, Tensor]:
    """Return a metric's values ``[n]`` or ``[n, M]`` after each of its rounds, ``{round: values}``."""
    rounds = []
    positions = []  # of these rounds among the store's
    due_rounds = metric.rounds_to_value(store.rounds[-1] + 1)
    for position, round_index in enumerate(store.rounds):
        if round_index in due_rounds:
            rounds.append(round_index)
            positions.append(position)

    measure_name = column_name(metric.measured_by)
    column = store.names.index(measure_name)
    utilities = []  # [K][R][1], or per class
    for members in members_of(masks):
        rows = store.rows(run.seed, members)
        utilities.append([rows[position][column] for position in positions])
    utility_table = torch.tensor(utilities, dtype=torch.float64)

    outputs = None
    score = score_of_stored_outputs(metric, store, run)
    if score is not None:
        outputs = stored_outputs(metric, masks, store, run.seed)
        outputs = outputs[:, positions].transpose(0, 1)
    return metric.complete(
        masks,
        utility_table.transpose(0, 1),
        rounds=rounds,
        outputs=outputs,
        weights=run.weights,
        output_score=score,
    )


def stored_outputs(
    metric: ShadowShapley,
    masks: Tensor,
    store: UtilityStore,
    seed: int,
) -> Tensor:
    """Return the coalitions' outputs ``[K, R, V, ...]`` after each of R rounds."""
    name = outputs_name(metric.measured_by)
    outputs = []
    for members in members_of(masks):
        outputs_of_coalition = store.outputs(seed, members, name)
        outputs.append(outputs_of_coalition)
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
