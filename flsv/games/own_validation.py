"""OwnValidation: compares the values that copies of the module log in validation with those that the run logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch

from flsv._lightning.data_source import generators_of
from flsv._lightning.logged_values import callback_metrics_of
from flsv._lightning.rounding import rounding_of
from flsv._lightning.validation_run import store_batches
from flsv.core.parameter_space import ParameterSpace
from flsv.games.module_copies import ModuleCopies
from flsv.games.validated_models import ValidatedModels
from flsv.utilities.seeding import isolated_rngs, kept_generators, seed_generators


class OwnValidation:
    """Comparison of a copy's validation with the run's own validation of the same model on the same batches.

    Models are scored in copies of the module. A difference shows that scores may be wrong, because the module depends
    on something that its copies do not have. If metrics score models by logged values, every validation is compared,
    otherwise the first, second, fourth, eighth and so on. There is no comparison on several ranks, if scores use only a
    part of the batches, or after a copy could not be validated.

    Args:
        trainer: the fit's trainer.
        space: the map between the module and vectors.
        loaders: function that returns the validation loaders.
        scorer: the evaluator of models by logged values, if there is one.
        seed: seed of the random numbers that a validation draws.
    """

    _num_validations = 0
    _copies: ModuleCopies | None = None

    def __init__(
        self,
        trainer: L.Trainer,
        space: ParameterSpace,
        loaders: Callable[[], Any],
        *,
        scorer: ValidatedModels | None,
        seed: int,
    ) -> None:
        self._trainer = trainer
        self._space = space
        self._loaders = loaders
        self._scorer = scorer
        self._seed = seed
        self._compares_all = scorer is not None
        self._is_over = trainer.world_size > 1

    def begin(self, module: L.LightningModule) -> None:
        """Copy the module before the run's own validation."""
        self._num_validations += 1
        is_power_of_two = self._num_validations & (self._num_validations - 1) == 0
        is_due = self._compares_all or is_power_of_two
        if self._is_over or not is_due:
            return
        try:
            self._copies = ModuleCopies(module, self._space)
        except Exception:  # scoring the first model raises the same error with a reason
            self._is_over = True

    def difference(self) -> str:
        """After the run's validation, describe how the values that a copy logs differ. Empty if they do not."""
        copies = self._copies
        self._copies = None
        if copies is None:
            return ""
        run_values = _numbers(callback_metrics_of(self._trainer))
        try:
            values = self._values(copies)
            names = self._differing(values, run_values)
            if names:
                # Values that depend on random numbers or random batches differ between two copies, too.
                repeated_values = self._values(copies, is_repetition=True)
                random_names = self._differing(values, repeated_values)
                names = [name for name in names if name not in random_names]
        except Exception:  # scoring the first model raises the same error with a reason
            self._is_over = True
            return ""
        if not names:
            return ""
        self._is_over = True
        name = names[0]
        return f"a copy logs {name} {values[name]:.5g}, and the run {run_values[name]:.5g}"

    def _values(self, copies: ModuleCopies, is_repetition: bool = False) -> dict[str, float]:
        """Return the numbers that a copy logs. A repetition has other random numbers, and reads the batches again."""
        if self._scorer is None:
            self._scorer = self._new_scorer(self._seed)
        scorer = self._scorer
        if is_repetition:
            scorer = self._new_scorer(self._seed + 1)
        if not scorer.has_all_batches:
            self._is_over = True
            return {}
        return _numbers(scorer.logged_values(copies))

    def _new_scorer(self, seed: int) -> ValidatedModels:
        """Read the validation batches with the random numbers of ``seed``, and return a scorer on them."""
        loaders = self._loaders()
        generators = generators_of(loaders)
        with isolated_rngs(seed, "own validation"), kept_generators(generators):
            seed_generators(generators, seed, "own validation")
            batches = store_batches(self._trainer, loaders)
        return ValidatedModels(self._trainer, self._space, batches, names=(), seed=seed)

    def _differing(
        self, values: Mapping[str, float], other_values: Mapping[str, float]
    ) -> list[str]:
        relative_tolerance = rounding_of(self._trainer).number
        names = []
        for name in sorted(values.keys() & other_values.keys()):
            tolerance = relative_tolerance * max(1.0, abs(other_values[name]))
            distance = abs(values[name] - other_values[name])
            if distance > tolerance:  # False for NaN
                names.append(name)
        return names


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are a single number, as floats."""
    numbers = {}
    for name, value in values.items():
        tensor = torch.as_tensor(value)
        if tensor.numel() == 1:
            numbers[name] = float(tensor)
    return numbers
