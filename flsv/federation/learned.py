"""Tests whether the global model has learned anything beyond a constant answer, and so whether there is something to
share; and whether the metrics' values tell clients apart.

Performances of classifiers are tested themselves. Where no metric plays a game, the model's mean recall is, if the
server has a validation set with classes and ``forward`` gives logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from scipy import stats
from torch import Tensor
from torchmetrics import Metric

from flsv._lightning.evaluation import each_loader, on_device
from flsv.federation.run import FederationRun
from flsv.functional.shapley.studentized_range import pairs_differ, times_to_tell_apart
from flsv.games import ModelScore, Scores
from flsv.games.replica import Replica
from flsv.games.scores import score_batch
from flsv.games.validation_batches import checked_logits, checked_pair
from flsv.games.vector_evaluator import row_builder
from flsv.metrics import ContributionMetric
from flsv.training.local_steps import limited
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import isolated_rngs

#: How often a model that has learnt nothing is taken for one that has, at most (about, for balanced accuracy).
LEVEL = 0.05
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
    """Measure the model before the first round by what each metric's game shares out."""
    return {name: verdict.value for name, verdict in verdicts(trainer, fit)[0].items()}


def learned(trainer: L.Trainer, fit: FederationRun) -> dict[str, Any]:
    """Make the record's entries on what the model has learned: by metric, the performance that its game shares out at
    the run's start and now, the sum of the values, and whether the model is told apart from a constant answer, or why
    that is not known; and which metrics' values are undecided."""
    found, unknown = verdicts(trainer, fit)
    values, start = fit.metrics.contributions, fit.state.start
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
    budgets = undecided(fit.metrics.metrics, values)
    more = {"not_known": unknown} if unknown is not None else {}
    return {"paid_in": paid, **more, **({"undecided": budgets} if budgets else {})}


def undecided(metrics: Mapping[str, Metric], values: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """Find the metrics whose sampled values tell no pair of clients apart: how many evaluations they have had, and how
    many would tell one apart, see :mod:`flsv.functional.shapley.studentized_range`."""
    found = {}
    for name, value in values.items():
        metric = metrics[name]
        known = metric.diagnostics() if isinstance(metric, ContributionMetric) and value.ndim == 1 else {}
        if not {"stderr", "evaluations"} <= known.keys() or not bool((known["stderr"] > 0).any()):
            continue
        of, errors = value.cpu(), known["stderr"].cpu()
        freedom = float(torch.as_tensor(metric.error_freedom()).nan_to_num(nan=math.inf).min())  # type: ignore[operator]
        some = int((of.isfinite() & errors.isfinite()).sum()) > 1
        if some and not pairs_differ(of, errors, freedom):
            spent, times = int(known["evaluations"]), times_to_tell_apart(of, errors, freedom)
            found[name] = {"evaluations": spent, "needed": math.ceil(spent * times)}
    return found


def verdicts(trainer: L.Trainer, fit: FederationRun) -> tuple[dict[str, Verdict], str | None]:
    """Test the global model by each metric's measure, and under ``NO_METRIC`` where no metric plays a game.

    Returns:
        The verdicts; and why it is not known whether the model has learned anything, None where it is.
    """
    model = fit.state.model()
    found = _of_games(fit, model)
    if found:
        known = any(verdict.apart is not None for verdict in found.values())
        measures = sorted({verdict.by for verdict in found.values()})
        return found, None if known else f"no constant answer's {', '.join(measures)} is known"
    scores = _scores(trainer, fit, model)
    if isinstance(scores, str):
        return {}, scores
    by = "balanced_accuracy"
    return {NO_METRIC: Verdict(by, _finite(scores.value(by)), told_apart(scores, by))}, None


def _of_games(fit: FederationRun, model: Tensor) -> dict[str, Verdict]:
    """Test the model by the measure of each metric's game, where a constant answer's performance is known."""
    found: dict[str, Verdict] = {}
    evaluators: dict[Any, Any] = {}
    scores: dict[Any, Any] = {}
    for name, measure in fit.metrics.performances.items():
        other = measure if isinstance(measure, ModelScore) else None
        key = None if other is None else other.evaluator
        if key not in scores:
            assert fit.server.games is not None
            evaluators[key] = fit.server.games.evaluator_of(measure)
            scores[key] = evaluators[key](model[None])
        value = scores[key].value(measure if other is None else other.name)
        by = other.of if other is not None and other.by_class else measure
        apart = told_apart(scores[key], by) if isinstance(by, str) and by in TESTED else None
        if other is not None and other.called and not other.judged:
            labels = [y.cpu() for _, y in evaluators[key].batches]
            apart = ranks_apart(other.called, float(value), torch.cat(labels), fit.engine.data.num_classes)
        found[name] = Verdict(measure if other is None else other.title, _finite(value), apart)
    return found


@torch.inference_mode(False)
@torch.no_grad()
def _scores(trainer: L.Trainer, fit: FederationRun, model: Tensor) -> Scores | str:
    """Compute a classifier's scores on as many validation batches as the trainer validates on, or say why there are
    none. One batch at a time is in memory; nothing of the fit changes."""
    data, space, module = fit.engine.data, fit.engine.space, trainer.lightning_module
    loaders, limit = data.val_dataloader(), trainer.limit_val_batches
    if not loaders:
        return "the server has no validation set"
    if limit == 0:
        return "nothing is validated (limit_val_batches=0)"
    if data.no_classes is not None:
        return f"there are no classes ({data.no_classes})"
    if space.private_names:
        return "a part of the model stays with the clients"
    correct, support = torch.zeros(2, data.num_classes, dtype=torch.int64)
    try:
        with isolated_rngs(0, "answers"), torch.autocast(trainer.strategy.root_device.type, enabled=False):
            replica = Replica(module, space, trainer.strategy.precision_plugin.forward_context)
            replica.follow(module)
            replica.load(row_builder(model[None]), 0)
            for index, loader in enumerate(each_loader(loaders)):
                for batch in on_device(trainer, islice(loader, limited(len(loader), limit)), index):
                    x, y = checked_pair(batch, data.num_classes)
                    with replica.context():
                        logits = checked_logits(replica.module(x), y, data.num_classes)
                    correct += score_batch(logits[None], y)[0][0].cpu()
                    support += torch.bincount(y.cpu(), minlength=data.num_classes)
    except ConfigurationError as error:
        return str(error)
    except Exception as error:  # whatever a forward raises that the run has no need of
        return f"{type(module).__name__}.forward(x) ends in {type(error).__name__}: {error}"
    return Scores({"correct": correct[None]}, support) if support.any() else "there are no validation samples"


def _finite(values: Tensor) -> float | None:
    value = float(values.mean())
    return value if math.isfinite(value) else None


def told_apart(scores: Scores, performance: str) -> bool:
    r"""Return whether a model's score on the validation set is significantly above a constant answer's.

    Args:
        scores: of one model, K = 1.
        performance: ``"accuracy"``: against the majority class, by the exact McNemar test on the samples on which the
            two differ. ``"negative_loss"``: against the classes' shares on the set, the best constant there is. Of
            predictions that have nothing to do with the labels, the likelihood ratio has a mean of 1 at most, so that
            it is above :math:`1/\alpha` with probability :math:`\alpha` at most (Markov's inequality).
            ``"balanced_accuracy"``, ``"per_class_accuracy"``: against 1 / M over the classes that occur, by the
            normal interval of the mean recall, with one sample right and one wrong added to every class.

    Example:
        >>> def scores(correct, support, loss):
        ...     return Scores({"correct": torch.tensor([correct]), "loss": torch.tensor([loss])}, torch.tensor(support))
        >>> constant, learned = scores([94, 0], [94, 6], 0.3), scores([92, 5], [94, 6], 0.1)
        >>> told_apart(constant, "accuracy"), told_apart(constant, "balanced_accuracy")
        (False, False)
        >>> [told_apart(learned, by) for by in ("accuracy", "balanced_accuracy", "negative_loss")]
        [False, True, True]
    """
    assert scores.support is not None
    there = scores.support > 0
    support, correct = scores.support[there].double(), scores.values["correct"][0, there].double()
    if performance == "accuracy":
        most = int(support.argmax())
        won = int(correct.sum() - correct[most])
        lost = int(support[most] - correct[most])
        return won + lost > 0 and float(stats.binom.sf(won - 1, won + lost, 0.5)) < LEVEL
    if performance == "negative_loss":
        shares = support / support.sum()
        entropy = float(-(shares * shares.log()).sum())
        return float(support.sum()) * (entropy - float(scores.values["loss"][0])) > math.log(1 / LEVEL)
    recall = (correct + 1) / (support + 2)
    error = float((recall * (1 - recall) / support).sum().sqrt()) / len(support)
    return float((correct / support).mean()) - 1 / len(support) > float(stats.norm.ppf(1 - LEVEL)) * error


def ranks_apart(score: str, value: float, labels: Tensor, num_classes: int) -> bool:
    """Return whether a score of probabilities is significantly above that of predictions that have nothing to do with
    the labels, a constant one among them. That score follows from the labels' counts alone: the mean over the classes
    that occur (of two, class 1's), and an error as if all classes' errors went together, so that it is not too small.

    Args:
        score: in :data:`flsv.games.class_scores.CLASS_SCORES`. ``"auroc"``: 1/2, with Mann and Whitney's variance.
            ``"average_precision"``: about a class's share, with the mean and (to the second order) the variance over
            all orders; they are skewed, so that two errors count. ``"f1"``: whichever share of the predictions is of a
            class, it is 2p / (1 + p) for the share p of class 1 of two, and 1 / M of M classes, at most.
        value: of the model.
        labels: int64 ``[N]``.
        num_classes: M.

    Example:
        >>> labels = torch.tensor([0, 1] * 50)
        >>> [ranks_apart("auroc", value, labels, 2) for value in (0.55, 0.65)]
        [False, True]
    """
    n, counts = len(labels), torch.bincount(labels, minlength=num_classes).double()
    positive = counts[1:2] if num_classes == 2 else counts[counts > 0]
    share, quantile = positive / n, float(stats.norm.ppf(1 - LEVEL))
    if score == "auroc":
        mean, error = torch.tensor(0.5), ((n + 1) / (12 * positive * (n - positive))).sqrt()
    elif score == "average_precision":
        harmonic, quantile = float((1 / torch.arange(1, n + 1)).sum()), 2.0
        mean = (harmonic + (n - harmonic) * (positive - 1) / (n - 1)) / n
        beyond = (1 - share) ** 2 * harmonic + math.pi**2 / 6 * (1 - share) / share
        error = (share * (1 - share) / n + beyond / n**2).sqrt()
    else:
        mean = 2 * share / (1 + share) if num_classes == 2 else torch.tensor(1 / len(positive))
        error = ((1 - share) / n).sqrt()
    return value - float(mean.mean()) > quantile * float(error.mean())
