"""Models of any task: scored by what their own ``validation_step`` logs, or by a torchmetrics metric of ``forward``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from flsv._lightning.validation import KeptBatches, ValidationRun, keep_batches, number
from flsv.errors import ConfigurationError
from flsv.games.evaluation.fresh import FreshCopies
from flsv.games.evaluation.replica import Build, metric_value, private_metric
from flsv.games.performance import Performance
from flsv.parameters import ParameterSpace
from flsv.seeding import isolated_rngs


@dataclass(frozen=True, eq=False)
class NamedScores:
    """Numbers of K models by name; on the CPU.

    Attributes:
        values: name to float64 ``[K]``.

    Example:
        >>> NamedScores.cat([NamedScores({"a": torch.tensor([1.0])}), NamedScores({"a": torch.tensor([2.0])})])[
        ...     torch.tensor([1])
        ... ].value("a")
        tensor([2.])
    """

    values: Mapping[str, Tensor]

    def __len__(self) -> int:
        """K."""
        return len(next(iter(self.values.values())))

    def value(self, metric: str) -> Tensor:
        """float64 ``[K]``."""
        return self.values[metric]

    def __getitem__(self, rows: Tensor) -> NamedScores:
        """The scores of some of the models."""
        return NamedScores({name: value[rows] for name, value in self.values.items()})

    @staticmethod
    def cat(parts: Sequence[NamedScores]) -> NamedScores:
        """The models of several evaluations, one after the other."""
        return NamedScores({name: torch.cat([part.values[name] for part in parts]) for name in parts[0].values})


class ValidatedModels(ABC):
    """Evaluates models of one structure one after the other, each in a copy of the module of its own.

    What a model scores is a function of its vector and of the fit's module: Python's, NumPy's and torch's global
    generators are at the same place at the start of every model, and are put back afterwards. The module, its trainer
    and its loggers stay as they are.

    Args:
        trainer: of the fit, with its module on its device.
        space: the map between the module and vectors ``[P]``.
        loaders: the validation batches, see :func:`flsv._lightning.validation.keep_batches`.
        seed: of what a validation draws.
    """

    def __init__(
        self, trainer: L.Trainer, space: ParameterSpace, loaders: Sequence[KeptBatches], *, seed: int = 0
    ) -> None:
        self.space = space
        self._trainer, self._loaders, self._seed = trainer, loaders, seed
        self._copies = FreshCopies(trainer.lightning_module, space)

    def __call__(self, vectors: Tensor) -> NamedScores:
        """The scores of the models in the rows of ``vectors [K, P]``."""
        if vectors.ndim != 2 or vectors.shape[1] != self.space.size:
            raise ValueError(f"expected vectors [K, {self.space.size}], got {list(vectors.shape)}.")

        def build(index: int, out: Tensor) -> None:
            out.copy_(vectors[index])

        return self.evaluate(build, len(vectors))

    @torch.no_grad()
    def evaluate(self, build: Build, count: int) -> NamedScores:
        """The scores of ``count`` models, K at least 1; ``build(i, out)`` writes model i's vector into ``out [P]``."""
        rows: list[Mapping[str, float]] = []
        for index in range(count):
            with (
                isolated_rngs(self._seed, "utility"),
                torch.inference_mode(False),
                torch.autocast(self._trainer.strategy.root_device.type, enabled=False),
            ):
                run = ValidationRun(self._trainer, self._copies.copy(build, index), self._loaders)
                rows.append(self._score(run))
        return NamedScores({n: torch.tensor([row[n] for row in rows], dtype=torch.float64) for n in rows[0]})

    @torch.inference_mode(False)
    @torch.no_grad()
    def attempt(self) -> None:
        """The fit's module as it is, on the first batch of every loader.

        Raises:
            ConfigurationError: what is asked for cannot be had.
        """
        vector, loaders = self.space.read(self._trainer.lightning_module), self._loaders
        self._loaders = [loader.first() for loader in loaders]
        try:
            self(vector[None])
        finally:
            self._loaders = loaders

    @abstractmethod
    def _score(self, run: ValidationRun) -> Mapping[str, float]:
        """One model's."""


class LoggedValues(ValidatedModels):
    """Scores models by what they log themselves: ``validation_step`` and the validation hooks around it are run.

    Args:
        names: what is asked for, among the names of ``trainer.callback_metrics`` after a validation.
        asking: what asks, for messages.

    Raises:
        ConfigurationError: while evaluating, a name that is not logged, or not as one number.
    """

    def __init__(self, *args: Any, names: Sequence[str], asking: str = "a utility", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._names, self._asking = list(dict.fromkeys(names)), asking

    def _score(self, run: ValidationRun) -> Mapping[str, float]:
        logged = run.logged()
        for name in self._names:
            if name not in logged:
                raise ConfigurationError(
                    f"{self._asking}: {type(self._trainer.lightning_module).__name__} logs no {name!r} when it "
                    f"validates. It logs {sorted(logged)}. Log it in validation_step, self.log({name!r}, value), or "
                    "name one of those; what callbacks log does not count."
                )
        return {name: number(name, logged) for name in self._names}


class MetricOfOutputs(ValidatedModels):
    """Scores models by a torchmetrics metric of ``(forward(x), y)`` over all validation batches, pairs ``(x, y)``.

    Predictions are what ``forward`` gives, in single precision where it is half; a last dimension of 1 that only one of
    the two has is dropped, so that one logit ``[B, 1]`` fits labels ``[B]``. What they must look like is the metric's
    business: logits ``[B, M]`` or ``[B, M, H, W]`` with integer labels, one logit or probability ``[B]`` for binary
    ones, ``[B, L]`` for multilabel, numbers for regression. The metric's value for a model is ``value("metric")``.

    Args:
        metric: it is copied.
        asking: what asks, for messages.

    Raises:
        ConfigurationError: while evaluating, batches that are no pairs; what the metric does not take; a metric that
            gives more than one number.
    """

    def __init__(self, *args: Any, metric: Metric, asking: str = "a utility", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metric = private_metric(metric).to(self._trainer.strategy.root_device)
        self._asking = asking

    def _score(self, run: ValidationRun) -> Mapping[str, float]:
        self._metric.reset()
        module = run.module.eval()
        for batch in run.batches():
            x, y = self._pair(batch)
            with self._trainer.strategy.precision_plugin.forward_context():
                found = module(x)
            self._update(found, y)
        return {"metric": metric_value(self._metric)}

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
        what = f"{len(batch)} parts" if isinstance(batch, tuple | list) else type(batch).__name__
        raise ConfigurationError(
            f"{self._asking}: {type(self._metric).__name__} is given forward(x) and y of batches (x, y), and a batch "
            f"is {what}. Log the value in validation_step, and name it: performance='val_...', mode='max' or 'min'."
        )

    def _update(self, found: Any, y: Any) -> None:
        if isinstance(found, Tensor) and isinstance(y, Tensor):
            found = found.float() if found.dtype in (torch.bfloat16, torch.float16) else found
            if found.shape == (*y.shape, 1):
                found = found.squeeze(-1)
            elif y.shape == (*found.shape, 1):
                y = y.squeeze(-1)
        try:
            self._metric.update(found, y)
        except Exception as error:
            raise ConfigurationError(
                f"{self._asking}: {type(self._metric).__name__} does not take what "
                f"{type(self._trainer.lightning_module).__name__}.forward gives, {_what(found)}, with y {_what(y)}: "
                f"{error} Log the value in validation_step, and name it: performance='val_...'."
            ) from error


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
        By :attr:`flsv.games.Performance.evaluator`.

    Raises:
        ConfigurationError: something cannot be had: a name that is not logged, outputs that a metric does not take.
    """
    asked = {name: measure for name, measure in measures.items() if isinstance(measure, Performance)}
    if not asked:
        return {}
    with isolated_rngs(seed, "utility batches"):
        kept = keep_batches(trainer, loaders)
    found: dict[Hashable, ValidatedModels] = {}
    logged = {name: measure.of for name, measure in asked.items() if isinstance(measure.of, str)}
    if logged:
        found["logged"] = LoggedValues(
            trainer, space, kept, names=list(logged.values()), seed=seed, asking=f"metrics {list(logged)}"
        )
    for name, measure in asked.items():
        if isinstance(measure.of, Metric):
            found[measure.evaluator] = MetricOfOutputs(
                trainer, space, kept, metric=measure.of, seed=seed, asking=f"metrics {[name]}"
            )
    for evaluator in found.values():
        evaluator.attempt()
    return found


def _what(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
