"""Tests whether the global model is better than a constant answer, and whether the metrics' values distinguish clients.

Contributions to a model that has learned nothing are random. A classifier is tested by the performance of each metric
that evaluates coalitions; without such a metric it is tested by the mean recall, if the server has a validation set
with classes and the module's ``forward`` returns logits.
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

from flsv._lightning.evaluation import each_loader, evaluating, on_device
from flsv.federation.run import FederationRun
from flsv.functional.shapley.studentized_range import pairs_differ, times_to_tell_apart
from flsv.games import ModelScore, Scores
from flsv.games.lent_module import lent
from flsv.games.performance import title_of
from flsv.games.scores import score_batch
from flsv.games.validation_batches import checked_logits, checked_pair
from flsv.metrics import ContributionMetric
from flsv.results.text import joined
from flsv.training.step_counts import limited
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import isolated_rngs

#: The tests' level: the largest probability (approximate for balanced accuracy) that an untrained model passes.
LEVEL = 0.05
#: Performance measures by which a constant answer's performance is known.
TESTED = ("accuracy", "balanced_accuracy", "per_class_accuracy", "negative_loss")
#: Stand-in for a metric's name if no metric evaluates coalitions.
NO_METRIC = ""


@dataclass(frozen=True)
class LearningResult:
    """Result of the test whether a model is better than a constant answer.

    Args:
        by: the name of the performance measure by which the model is tested.
        value: the model's performance; None if the number is not finite.
        apart: whether the model is significantly better than a constant answer; None if this cannot be tested.
    """

    by: str
    value: float | None
    apart: bool | None = None


def initial_scores(trainer: L.Trainer, run: FederationRun) -> dict[str, float | None]:
    """Return ``{metric: performance}`` of the global model before the first round; a performance that is not finite is
    None.

    Args:
        trainer: the fit's trainer.
        run: the run, before its first round.
    """
    return {name: verdict.value for name, verdict in learning_results(trainer, run)[0].items()}


def learning_record(trainer: L.Trainer, run: FederationRun) -> dict[str, Any]:
    """Test whether the global model has learned anything, and return the results as entries of ``run.json``.

    A warning is shown for each performance measure by which the model is not better than a constant answer.

    Args:
        trainer: the fit's trainer.
        run: the run, after its last round.

    Returns:
        ``"paid_in"``: by metric, the performance at the run's start and end, the sum of the clients' values, and
        whether the model is better than a constant answer; ``"not_known"``: if the test is not possible, the reason;
        ``"undecided"``: the result of :func:`inconclusive_metrics`, if it is not empty.
    """
    found, unknown = learning_results(trainer, run)
    values, start = run.metrics.contributions, run.state.start
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
            f"Measured by {by}, the model is not clearly better than a constant prediction: the values may be due to "
            "chance."
        )
    budgets = inconclusive_metrics(run.metrics.metrics, values)
    more = {"not_known": unknown} if unknown is not None else {}
    return {"paid_in": paid, **more, **({"undecided": budgets} if budgets else {})}


def inconclusive_metrics(metrics: Mapping[str, Metric], values: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """Find the metrics whose values, which are estimated from sampled coalitions, do not differ significantly between
    any two clients.

    Args:
        metrics: the metrics by name.
        values: the metrics' values by name.

    Returns:
        ``{metric: numbers}``: the number of ``"evaluations"`` of coalitions so far, and the number ``"needed"`` so that
        a pair of clients differs significantly, see :mod:`flsv.functional.shapley.studentized_range`.
    """
    found = {}
    for name, value in values.items():
        metric = metrics[name]
        known = metric.diagnostics() if isinstance(metric, ContributionMetric) and value.ndim == 1 else {}
        if not {"stderr", "evaluations"} <= known.keys() or not bool((known["stderr"] > 0).any()):
            continue
        of, errors = value.cpu(), known["stderr"].cpu()
        sampled: Any = metric
        freedom = float(torch.as_tensor(sampled.error_freedom()).nan_to_num(nan=math.inf).min())
        some = int((of.isfinite() & errors.isfinite()).sum()) > 1
        if some and not pairs_differ(of, errors, freedom):
            spent, times = int(known["evaluations"]), times_to_tell_apart(of, errors, freedom)
            found[name] = {"evaluations": spent, "needed": math.ceil(spent * times)}
    return found


def learning_results(trainer: L.Trainer, run: FederationRun) -> tuple[dict[str, LearningResult], str | None]:
    """Test whether the global model is better than a constant answer, by the performance measure of each metric.

    Args:
        trainer: the fit's trainer.
        run: the run.

    Returns:
        ``{metric: result}``, with a single result under ``NO_METRIC`` if no metric evaluates coalitions; and the reason
        why the test is not possible, None if it is possible.
    """
    model = run.state.model()
    found = _of_games(run, model)
    if found:
        known = any(verdict.apart is not None for verdict in found.values())
        measures = sorted({verdict.by for verdict in found.values()})
        return found, None if known else f"the {joined(measures)} of a constant prediction is not known"
    scores = _scores(trainer, run, model)
    if isinstance(scores, str):
        return {}, scores
    by = "balanced_accuracy"
    return {NO_METRIC: LearningResult(by, _finite(scores.value(by)), beats_constant(scores, by))}, None


def _of_games(run: FederationRun, model: Tensor) -> dict[str, LearningResult]:
    """Test whether the model ``[P]`` is better than a constant prediction, once for each metric that evaluates
    coalitions, by the performance measure of this metric. Return ``{metric's name: result}``, empty without them."""
    found: dict[str, LearningResult] = {}
    evaluators: dict[Any, Any] = {}
    scores: dict[Any, Any] = {}
    for name, measure in run.metrics.performances.items():
        other = measure if isinstance(measure, ModelScore) else None
        key = None if other is None else other.evaluator
        if key not in scores:
            assert run.server.games is not None
            evaluators[key] = run.server.games.evaluator_of(measure)
            scores[key] = evaluators[key](model[None])
        value = scores[key].value(measure if other is None else other.name)
        if other is not None and other.called and not other.judged:
            labels = torch.cat([y.cpu() for _, y in evaluators[key].batches])
            classes = run.engine.data.num_classes
            apart: bool | None = score_beats_chance(other.called, float(value), labels, classes)
        else:
            apart = _beats_constant(scores[key], measure)
        found[name] = LearningResult(title_of(measure, run.engine.data.positive_class), _finite(value), apart)
    return found


def _beats_constant(scores: Any, measure: str | ModelScore) -> bool | None:
    """Return whether a model's scores are better than a constant answer's; None if ``measure`` is not in
    :data:`TESTED`."""
    by = measure.of if isinstance(measure, ModelScore) and measure.by_class else measure
    return beats_constant(scores, by) if isinstance(by, str) and by in TESTED else None


def _why_not_scored(trainer: L.Trainer, run: FederationRun) -> str | None:
    """Return the reason why a classifier's answers cannot be scored, apart from missing validation data; None: they
    can."""
    if trainer.limit_val_batches == 0:
        return "nothing is validated (limit_val_batches=0)"
    if run.engine.data.no_classes is not None:
        return f"the data have no classes ({run.engine.data.no_classes})"
    return "a part of the model stays with the clients" if run.engine.space.private_names else None


@torch.inference_mode(False)
@torch.no_grad()
def _scores(trainer: L.Trainer, run: FederationRun, model: Tensor) -> Scores | str:
    """Score a classifier on the validation batches that the trainer uses, without changes to the fit.

    Args:
        trainer: the fit's trainer.
        run: the run.
        model: ``[P]``, the classifier.

    Returns:
        The scores; if there are none, a text with the reason.
    """
    data, space, module = run.engine.data, run.engine.space, trainer.lightning_module
    loaders, limit = data.val_dataloader(), trainer.limit_val_batches
    if not loaders:
        return "the server has no validation set"
    if why_not := _why_not_scored(trainer, run):
        return why_not
    correct, support = torch.zeros(2, data.num_classes, dtype=torch.int64)
    try:
        with (
            evaluating(module),
            lent(module, space),
            isolated_rngs(0, "answers"),
            torch.autocast(trainer.strategy.root_device.type, enabled=False),
        ):
            space.write(module, model)
            for index, loader in enumerate(each_loader(loaders)):
                for batch in on_device(trainer, islice(loader, limited(len(loader), limit)), index):
                    x, y = checked_pair(batch, data.num_classes)
                    with trainer.strategy.precision_plugin.forward_context():
                        logits = checked_logits(module(x), y, data.num_classes)
                    correct += score_batch(logits[None], y)[0][0].cpu()
                    support += torch.bincount(y.cpu(), minlength=data.num_classes)
    except ConfigurationError as error:
        return str(error)
    except Exception as error:  # any error of a `forward` that the run itself does not need
        return f"{type(module).__name__}.forward(x) raises {type(error).__name__}: {error}"
    return Scores({"correct": correct[None]}, support) if support.any() else "there are no validation samples"


def _finite(values: Tensor) -> float | None:
    """Return the mean of a tensor; None if it is not finite."""
    value = float(values.mean())
    return value if math.isfinite(value) else None


def beats_constant(scores: Scores, performance: str) -> bool:
    r"""Return whether a model's performance on the validation set is significantly above that of any constant answer.

    Args:
        scores: the scores of a single model.
        performance: the performance measure, which determines the test. ``"accuracy"``: the model is compared with the
            majority class, by the exact McNemar test on the samples on which only one of the two is right.
            ``"negative_loss"``: the model is compared with the classes' shares in the validation set, the best constant
            answer. For predictions that are independent of the labels, the likelihood ratio has a mean of 1 at most, so
            that it exceeds :math:`1/\alpha` with a probability of at most :math:`\alpha` (Markov's inequality;
            :math:`\alpha` is the level). ``"balanced_accuracy"``, ``"per_class_accuracy"``: the model's mean recall is
            compared with 1 / M, with M the number of classes that occur, by a normal confidence interval of the recall
            with one right and one wrong sample added to every class.

    Example:
        >>> def scores(correct, support, loss):
        ...     return Scores({"correct": torch.tensor([correct]), "loss": torch.tensor([loss])}, torch.tensor(support))
        >>> constant, learned = scores([94, 0], [94, 6], 0.3), scores([92, 5], [94, 6], 0.1)
        >>> beats_constant(constant, "accuracy"), beats_constant(constant, "balanced_accuracy")
        (False, False)
        >>> [beats_constant(learned, by) for by in ("accuracy", "balanced_accuracy", "negative_loss")]
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


def score_beats_chance(score: str, value: float, labels: Tensor, num_classes: int) -> bool:
    """Return whether a model's ``score`` is significantly above the score of predictions that are independent of the
    labels.

    The mean and the standard error of the score of such predictions follow from the number of samples of each class.
    With two classes they are those of class 1. Otherwise they are means over the classes that occur: the error is then
    that of fully correlated classes, so that it is not too small.

    Args:
        score: the score's name, in :data:`flsv.scores.ranking.CLASS_SCORES`. Predictions independent of the labels
            have an ``"auroc"`` of 1/2, with Mann and Whitney's variance; an ``"average_precision"`` of about a class's
            share, with the mean and (to the second order) the variance over all orders of the samples, and a margin of
            two errors, since the distribution is skewed; an ``"f1"`` of at most 2p / (1 + p) with two classes, where p
            is the share of class 1, and of at most 1 / M with M classes.
        value: the model's score.
        labels: int64 ``[N]``, the labels of the N validation samples.
        num_classes: the number M of classes.

    Example:
        >>> labels = torch.tensor([0, 1] * 50)
        >>> [score_beats_chance("auroc", value, labels, 2) for value in (0.55, 0.65)]
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
