"""Scores models of any task by a torchmetrics metric of the output of ``forward``.

torchmetrics takes what it is given for probabilities, or for logits if a number of the *batch* lies outside [0, 1]. Of
models whose logits happen to lie inside, some batches would be read as the one and some as the other. So which it is,
is decided once, before the first round, for the module and not for a model: with random parameters logits leave [0, 1]
and probabilities do not.

Evaluators for tasks other than classification, tried before the first round.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import closing
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassExactMatch, MulticlassStatScores

from flsv._lightning.validation import ValidationRun, keep_batches
from flsv.errors import ConfigurationError
from flsv.games.logged_values import LoggedValues
from flsv.games.performance import ModelScore
from flsv.games.replica import metric_value, private_metric
from flsv.games.scores import ClassScore, class_1, is_binary, loss_dtype
from flsv.games.validated import ValidatedModels
from flsv.parameters import ParameterSpace
from flsv.seeding import isolated_rngs

#: Random models of the trial, and how large their parameters are.
_DRAWS, _SCALE = 8, 3.0


class MetricOfOutputs(ValidatedModels):
    """Scores models by a torchmetrics metric of ``(forward(x), y)`` over all validation batches, pairs ``(x, y)``.

    Predictions are what ``forward`` gives, in single precision where it is half; a last dimension of 1 that only one of
    the two has is dropped, so that one logit ``[B, 1]`` fits labels ``[B]``. What they must look like is the metric's
    business: logits or probabilities ``[B, M]`` or ``[B, M, H, W]`` with integer labels, one ``[B]`` for binary labels
    (of two, ``[B, 2]``, it is given class 1's), ``[B, L]`` for multilabel ones, numbers for regression. The metric's
    value for a model is ``value("metric")``.

    Args:
        metric: it is copied.
        asking: what asks, for messages.

    Attributes:
        gives_logits: whether ``forward`` gives logits where the metric wants probabilities; known after ``attempt``.

    Raises:
        ConfigurationError: while evaluating, batches that are no pairs; what the metric does not take; a metric that
            gives more than one number.
    """

    names = ("metric",)

    def __init__(self, *args: Any, metric: Metric, asking: str = "a utility", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metric = private_metric(metric).to(self._trainer.strategy.root_device)
        self._asking = asking
        self.gives_logits = self._trying = False

    def _score(self, run: ValidationRun) -> Mapping[str, float]:
        self._metric.reset()
        module, found, y = run.module.eval(), None, None
        with closing(run.batches()) as batches:
            for batch in batches:
                x, y = self._pair(batch)
                with self._trainer.strategy.precision_plugin.forward_context():
                    found = module(x)
                if self._trying:
                    return {"metric": float(_outside(found))}
                self._update(found, y)
        try:
            return {"metric": metric_value(self._metric)}
        except (RuntimeError, IndexError, ValueError) as error:
            raise self._refused(found, y, error) from error

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
        what = f"{len(batch)} parts" if isinstance(batch, tuple | list) else type(batch).__name__
        raise ConfigurationError(
            f"{self._asking}: {type(self._metric).__name__} is given forward(x) and y of batches (x, y), and a batch "
            f"is {what}. Log the value in validation_step, and name it: performance='val_...', mode='max' or 'min'."
        )

    def attempt(self) -> None:
        super().attempt()
        kind = _kind(self._metric)
        if kind is None:
            return
        start, cut = self.space.read(self._trainer.lightning_module), self.space.num_parameters
        draw = torch.Generator().manual_seed(0)

        def build(_: int, out: Tensor) -> None:
            out.copy_(start)
            out[:cut] = _SCALE * torch.randn(cut, generator=draw).to(out)

        self._trying = True
        try:
            self.gives_logits = bool(self.evaluate(build, _DRAWS).value("metric").any())
        finally:
            self._trying = False

    def _update(self, found: Any, y: Any) -> None:
        if isinstance(found, Tensor) and isinstance(y, Tensor):
            found = found.float() if found.dtype in (torch.bfloat16, torch.float16) else found
            if found.shape == (*y.shape, 1):
                found = found.squeeze(-1)
            elif y.shape == (*found.shape, 1):
                y = y.squeeze(-1)
            if self.gives_logits:
                found = _probabilities(self._metric, found, y)
            if is_binary(self._metric):
                found = class_1(found, y)
        try:
            _check_classes(self._metric, found, y)
            self._metric.update(found, y)
        except Exception as error:
            raise self._refused(found, y, error) from error

    def _refused(self, found: Any, y: Any, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"{self._asking}: {type(self._metric).__name__} does not take what "
            f"{type(self._trainer.lightning_module).__name__}.forward gives, {_what(found)}, with y {_what(y)}: "
            f"{error} Log the value in validation_step, and name it: performance='val_...'."
        )


def _kind(metric: Metric) -> str | None:
    """ "Binary", "Multilabel" or "Multiclass", where it matters to the metric whether it is given probabilities."""
    if isinstance(metric, ClassScore):
        return "Classes"
    if not type(metric).__module__.startswith("torchmetrics.classification"):
        return None
    if isinstance(metric, MulticlassStatScores | MulticlassConfusionMatrix | MulticlassExactMatch):
        return None  # the largest is the largest
    return next((k for k in ("Binary", "Multilabel", "Multiclass") if type(metric).__name__.startswith(k)), None)


def _outside(found: Any) -> bool:
    return isinstance(found, Tensor) and found.is_floating_point() and bool(((found < 0) | (found > 1)).any())


def _probabilities(metric: Metric, logits: Tensor, y: Tensor) -> Tensor:
    if not logits.is_floating_point():
        return logits
    kind = _kind(metric)
    if kind is not None and kind != "Multilabel" and logits.ndim == y.ndim + 1:
        # A double tells probabilities next to 1 apart, which ranks need.
        return (logits if kind == "Multiclass" else logits.to(loss_dtype(logits.device))).softmax(1)
    return logits if kind in (None, "Multiclass") else logits.sigmoid()


def _check_classes(metric: Metric, found: Any, y: Any) -> None:
    """torchmetrics takes numbers for classes without a word."""
    if not type(metric).__module__.startswith("torchmetrics.classification"):
        return
    if isinstance(y, Tensor) and y.is_floating_point():
        raise ValueError("a metric of classes needs integer labels.")
    numbers = isinstance(found, Tensor) and isinstance(y, Tensor) and found.is_floating_point()
    if numbers and found.ndim == y.ndim and type(metric).__name__.startswith("Multiclass"):
        raise ValueError("a metric of several classes needs a logit for each of them, [B, M, ...].")


def _what(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def validated_models(
    trainer: L.Trainer,
    space: ParameterSpace,
    loaders: Any,
    measures: Mapping[str, Any],
    *,
    seed: int = 0,
) -> dict[Hashable, ValidatedModels]:
    """Evaluators for all that is not measured on logits alone, after a trial on the first batches.

    Args:
        trainer: of the fit, with its module on its device.
        space: the map between the module and vectors.
        loaders: one or several validation loaders; they are read if there is anything to evaluate.
        measures: who asks, for messages, to what for; see :mod:`flsv.games.performance`.
        seed: of what a validation draws.

    Returns:
        By :attr:`flsv.games.ModelScore.evaluator`.

    Raises:
        ConfigurationError: something cannot be had: a name that is not logged, outputs that a metric does not take.
    """
    asked = {name: measure for name, measure in measures.items() if isinstance(measure, ModelScore)}
    if not asked:
        return {}
    with isolated_rngs(seed, "utility batches"):
        kept = keep_batches(trainer, loaders)
    found: dict[Hashable, ValidatedModels] = {}
    logged = {name: measure.of for name, measure in asked.items() if isinstance(measure.of, str)}
    if logged:
        names = list(dict.fromkeys(logged.values()))
        asking = {name: ", ".join(who for who, each in logged.items() if each == name) for name in names}
        derived = [measure.name for measure in asked.values() if measure.derived]
        found["logged"] = LoggedValues(trainer, space, kept, names=names, derived=derived, seed=seed, asking=asking)
    for name, measure in asked.items():
        if isinstance(measure.of, Metric):
            found[measure.evaluator] = MetricOfOutputs(trainer, space, kept, metric=measure.of, seed=seed, asking=name)
    for evaluator in found.values():
        evaluator.attempt()
    return found
