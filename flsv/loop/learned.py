"""Tests whether the global model has learned anything beyond a constant answer, and so whether there is something to
share; and whether the metrics' values tell clients apart.

Performances of classifiers are tested themselves. Where no metric plays for one (it looks at updates, or at a value
that the module logs), the model's mean recall is, if the server has a validation set with classes and ``forward`` gives
logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_auroc

from flsv.errors import ConfigurationError
from flsv.functional.shapley.undecided import times_to_tell_apart
from flsv.functional.shapley.undecided import told_apart as pairs_apart
from flsv.games import ModelScore, Scores
from flsv.games.constant import answers_of, ranked_apart, told_apart
from flsv.games.scores import score_batch
from flsv.loop.federation import FederationRun
from flsv.metrics import ContributionMetric

#: Performances of which a constant answer's is known.
TESTED = ("accuracy", "balanced_accuracy", "per_class_accuracy", "negative_loss")
#: What stands for a metric's name where no metric's performance can be tested.
NO_METRIC = ""


@dataclass(frozen=True)
class Verdict:
    """The test's result for one model.

    Args:
        by: what it is measured by.
        value: of it; None where it is not finite.
        apart: whether the model is told apart from a constant answer by it; None: it does not tell.
    """

    by: str
    value: float | None
    apart: bool | None = None


def starts(trainer: L.Trainer, fit: FederationRun) -> dict[str, float | None]:
    """By metric, what its game shares out, of the model before the first round."""
    return {name: verdict.value for name, verdict in verdicts(trainer, fit)[0].items()}


def learned(trainer: L.Trainer, fit: FederationRun) -> dict[str, Any]:
    """For the run's record: by metric, what its game shares out, of the model at the run's start and now, the sum
    of the values, and whether the model is told apart from a constant answer, or why that is not known; and which
    metrics' values are undecided."""
    found, unknown = verdicts(trainer, fit)
    values, start = fit.board.contributions, fit.state.start
    paid = {
        name: {
            "by": verdict.by,
            "start": start.get(name),
            "end": verdict.value,
            "sum": float(values[name].nansum()) if name in values else None,
            "told_apart": verdict.apart,
        }
        for name, verdict in found.items()
    }
    for by in dict.fromkeys(verdict.by for verdict in found.values() if verdict.apart is False):
        rank_zero_warn(
            f"The model is not told apart from a constant answer by {by}: who contributed what to it is chance."
        )
    budgets = undecided(fit.board.metrics, values)
    more = {"not_known": unknown} if unknown is not None else {}
    return {"paid_in": paid, **more, **({"undecided": budgets} if budgets else {})}


def undecided(metrics: Mapping[str, Metric], values: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """Metrics whose sampled values tell no pair of clients apart: the evaluations that they have had, and those that
    would, see :mod:`flsv.functional.shapley.undecided`."""
    found = {}
    for name, value in values.items():
        metric = metrics[name]
        known = metric.diagnostics() if isinstance(metric, ContributionMetric) and value.ndim == 1 else {}
        if not {"stderr", "evaluations"} <= known.keys() or not bool((known["stderr"] > 0).any()):
            continue
        of, errors = value.cpu(), known["stderr"].cpu()
        freedom = float(torch.as_tensor(metric.error_freedom()).nan_to_num(nan=math.inf).min())  # type: ignore[operator]
        some = int((of.isfinite() & errors.isfinite()).sum()) > 1
        if some and not pairs_apart(of, errors, freedom):
            spent, times = int(known["evaluations"]), times_to_tell_apart(of, errors, freedom)
            found[name] = {"evaluations": spent, "needed": math.ceil(spent * times)}
    return found


def verdicts(trainer: L.Trainer, fit: FederationRun) -> tuple[dict[str, Verdict], str | None]:
    """On the global model, by metric, and under ``NO_METRIC`` where none of theirs can be tested.

    Returns:
        The verdicts; and why it is not known whether the model has learned anything, None where it is.
    """
    model, measures = fit.state.model(), fit.board.performances
    found = _of_games(fit, model)
    if any(verdict.apart is not None for verdict in found.values()):
        return found, None
    ranked = [name for name, measure in measures.items() if isinstance(measure, ModelScore) and _ranks(measure)]
    answers = _answers(trainer, fit, model)
    if isinstance(answers, str):
        return found, answers
    outputs, labels = answers
    if ranked:
        apart = ranked_apart(outputs, labels)
        return found | {name: replace(found[name], apart=apart) for name in ranked}, None
    if outputs.ndim == 1:  # a logit, or a probability: where class 1 begins is not known
        area = Verdict("auroc", _finite(binary_auroc(outputs, labels)), ranked_apart(outputs, labels))
        return {**found, NO_METRIC: area}, None
    correct, loss = score_batch(outputs[None], labels)
    support = torch.bincount(labels, minlength=outputs.shape[1])
    own = Scores({"correct": correct, "loss": loss / len(labels)}, support)
    by = "balanced_accuracy"
    return {**found, NO_METRIC: Verdict(by, _finite(own.value(by)), told_apart(own, by))}, None


def _of_games(fit: FederationRun, model: Tensor) -> dict[str, Verdict]:
    """Of each metric's game, told apart where a constant answer's performance is known."""
    found: dict[str, Verdict] = {}
    scores: dict[Any, Any] = {}
    for name, measure in fit.board.performances.items():
        other = measure if isinstance(measure, ModelScore) else None
        key = None if other is None else other.evaluator
        if key not in scores:
            assert fit.server.games is not None
            scores[key] = fit.server.games.evaluator_of(measure)(model[None])
        value = scores[key].value(measure if other is None else other.name)
        apart = told_apart(scores[key], measure) if measure in TESTED else None
        found[name] = Verdict(measure if other is None else other.title, _finite(value), apart)
    return found


def _answers(trainer: L.Trainer, fit: FederationRun, model: Tensor) -> tuple[Tensor, Tensor] | str:
    """Outputs and labels, or why there are none."""
    data = fit.engine.data
    loaders = data.val_dataloader()
    if not loaders:
        return "the server has no validation set"
    if trainer.limit_val_batches == 0:
        return "nothing is validated (limit_val_batches=0)"
    if data.no_classes is not None:
        return f"there are no classes ({data.no_classes})"
    if fit.engine.space.private_names:
        return "a part of the model stays with the clients"
    try:
        return answers_of(trainer, fit.engine.space, model, loaders, data.num_classes)
    except ConfigurationError as error:
        return str(error)
    except Exception as error:  # whatever a forward raises that the run has no need of
        return f"{type(trainer.lightning_module).__name__}.forward(x) ends in {type(error).__name__}: {error}"


def _ranks(performance: ModelScore) -> bool:
    """Whether it is a measure of how samples are ranked."""
    named = performance.called in ("auroc", "average_precision")
    return named or type(performance.of).__name__.endswith(("AUROC", "AveragePrecision"))


def _finite(values: Tensor) -> float | None:
    value = float(values.mean())
    return value if math.isfinite(value) else None
