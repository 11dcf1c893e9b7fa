"""ValidatedModels: the evaluator of models by the values that the module logs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn

from flsv._lightning.rounding import rounding_of
from flsv._lightning.validation_run import StoredBatches, ValidationRun, logged_number
from flsv.core.parameter_space import ParameterSpace
from flsv.games.copy_evaluator import CopyEvaluator, leaves_program
from flsv.games.module_copies import (
    ModuleCopies,
    ScoringEffects,
    are_repeated,
    not_repeated,
    other_weights,
)
from flsv.games.vector_evaluator import Build, Scores
from flsv.scores.performance import Measure
from flsv.utilities.errors import ConfigurationError, nearest

_SIGNATURE_OF_LOG = inspect.signature(L.LightningModule.log)


class ValidatedModels(CopyEvaluator):
    """Evaluator of models of any task by the values that they log in validation.

    It runs ``validation_step`` and the validation hooks for one model after the other, each in a copy of the fit's
    module. A model's score depends only on its vector and the module, since the global random generators are in the
    same state before every model. The trainer and its loggers do not change.

    Args:
        trainer: the fit's trainer, with its module on its device.
        space: the map between the module's state and vectors ``[P]``.
        loaders: the validation batches, see :func:`flsv._lightning.evaluation.store_batches`.
        names: names of the logged values that are the scores, as in ``trainer.callback_metrics`` after a validation.
        derived: those of ``names`` whose gradients are needed, too.
        requester: ``{name: metrics}``, the metrics that need the value logged under a name, for messages.
        seed: seed of the random numbers that a validation draws.
        effects: the changes that scoring makes, if another evaluator has found them out.

    Raises:
        ConfigurationError: during an evaluation, a name is not logged, or its value is not one number. In ``dry_run``,
            a name in ``derived`` has no gradient.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        space: ParameterSpace,
        loaders: Sequence[StoredBatches],
        *,
        names: Sequence[str],
        derived: Sequence[str] = (),
        requester: Mapping[str, str] | None = None,
        seed: int = 0,
        effects: ScoringEffects | None = None,
    ) -> None:
        device = trainer.strategy.root_device
        super().__init__(trainer.lightning_module, space, device, seed, effects)
        self._value_names = list(dict.fromkeys(names))
        self._names_with_gradient = derived
        self._requesters = requester or {}
        self._trainer = trainer
        self._loaders = loaders

    def _read_batches(self, batches: Sequence[StoredBatches]) -> None:
        self._loaders = batches

    @leaves_program
    @torch.no_grad()
    def evaluate(
        self,
        build: Build,
        count: int,
        keep: bool = False,
    ) -> Scores:
        """Compute the scores of ``count`` models, one after the other.

        Args:
            build: ``build(i, out)`` writes model i's vector into ``out [P]``.
            count: K, the number of models.
        """
        values_by_name: dict[str, list[float]] = {name: [] for name in self._value_names}
        vector = self._new_vector()
        copies = self.copies.take()
        for index in range(count):
            build(index, vector)
            with self._validation(copies, vector) as run:
                named_values = self._named_values(run.logged())
            for name, values in values_by_name.items():
                values.append(named_values[name])

        scores = {}
        for name, values in values_by_name.items():
            scores[name] = torch.tensor(values, dtype=torch.float64)  # [count]
        return Scores(scores)

    @torch.no_grad()
    def score_module(self, module: nn.Module, in_copy: bool = True) -> Scores:
        """Score a module as it is by a validation of one copy, which needs one in any case."""
        logged_values = self.logged_values(ModuleCopies(module, self.space))
        scores = {
            name: torch.tensor([value], dtype=torch.float64)
            for name, value in self._named_values(logged_values).items()
        }
        return Scores(scores)

    def computes(self, measure: Measure) -> bool:
        """Return whether this is one of the logged values."""
        is_at_server = measure.is_logged and not measure.at_clients
        return is_at_server and measure.name in self._value_names

    @property
    def has_all_batches(self) -> bool:
        """Return whether these batches are all batches of the fit's own validation."""
        return [len(loader) for loader in self._loaders] == list(self._trainer.num_val_batches)

    @leaves_program
    @torch.no_grad()
    def logged_values(self, copies: ModuleCopies) -> dict[str, Tensor]:
        """Return all values that the validation of a copy logs."""
        with self._validation(copies) as run:
            return run.logged()

    @leaves_program
    def gradient(self, vector: Tensor, name: str) -> Tensor:
        """Compute the gradient of a logged value at the model ``vector``.

        Args:
            vector: ``[P]``, the model.
            name: name of the logged value.

        Returns:
            The gradient with respect to the P' parameters, the leading entries of the vector, float64 ``[P']``.

        Raises:
            ConfigurationError: ``validation_step`` does not log the value with its autograd graph.
        """
        _value, gradient = self._value_and_gradient(vector, name)
        return gradient

    def dry_run(self) -> None:
        """Evaluate the fit's module as it is, to find errors before training.

        Raises:
            ConfigurationError: a value that a metric needs is not logged or has no gradient.
        """
        module = self._module
        vector = self.space.read(module)
        try:
            values, repeated_values = self._two_validations(module, vector)
        except Exception as error:
            if isinstance(error, ConfigurationError) or is_oom_error(error):
                raise
            requesters = ", ".join(self._requesters.values()) or "a utility"
            raise ConfigurationError(
                f"{requesters}: before training, a copy of the untrained {type(module).__name__} is validated, as all "
                f"scored models are. This validation has raised {type(error).__name__}: {error}. Let "
                "validation_step work with an untrained module, or choose a performance that is computed from "
                "forward(x)."
            ) from error

        for name in self._value_names:
            if not are_repeated(values[name], repeated_values[name], self.device):
                requester = self._requesters.get(name, "a utility")
                raise not_repeated(requester, module, f"validation, which logs {name!r},")
        for name in self._names_with_gradient:
            self._check_gradient(name, vector, values[name])

    def _two_validations(
        self, module: L.LightningModule, vector: Tensor
    ) -> tuple[dict[str, float], dict[str, float]]:
        copies = self.copies.take()
        with self._validation(copies, vector) as run:
            values = self._named_values(run.logged())
        with other_weights(module, self.space), self._validation(copies, vector) as run:
            repeated_values = self._named_values(run.logged())
        return values, repeated_values

    @contextmanager
    def _validation(
        self, copies: ModuleCopies, vector: Tensor | None = None
    ) -> Iterator[ValidationRun]:
        """Yield a validation of a copy, with the weights of ``vector [P]``. None: with the copy's weights."""
        with self._scoring():
            module, trainer = copies.load_with_trainer()
            if vector is not None:
                self._write(module, vector)
            yield ValidationRun(self._trainer, trainer, self._loaders)

    def _named_values(self, logged_values: Mapping[str, Any]) -> dict[str, float]:
        """Return the values by which models are scored. Raise ConfigurationError if one is not logged."""
        for name in self._value_names:
            if name not in logged_values:
                requester = self._requesters.get(name, "a utility")
                module_name = type(self._module).__name__
                raise ConfigurationError(
                    f"{requester}: {module_name} logs no {name!r} when it validates.{nearest(name, logged_values)} It "
                    f"logs {sorted(logged_values)}. Choose one of these names, or log the value in validation_step: "
                    f"self.log({name!r}, value). Values that callbacks log can be chosen only if configure_callbacks "
                    "returns the callbacks."
                )
        return {name: logged_number(name, logged_values) for name in self._value_names}

    def _value_and_gradient(
        self,
        vector: Tensor,
        name: str,
    ) -> tuple[Tensor, Tensor]:
        """Return the value that ``validation_step`` logs under ``name`` for a model ``[P]``, and its gradient
        ``[P']``.
        """
        # Lightning's evaluation loop converts logged values to numbers without an autograd graph. So the step is called
        # directly, without hooks. Batches are averaged as in Lightning, weighted by their sizes.
        gradient = torch.zeros(self.space.num_parameters, dtype=torch.float64, device=vector.device)
        total = torch.zeros((), dtype=torch.float64)
        num_samples = 0.0
        # The generator is closed, so that its contexts are left after an error, too.
        with self._validation(self.copies.take(), vector) as run, closing(run.steps()) as steps:
            parameters = self._trainable_parameters(run.module)
            for arguments, loader_index in steps:
                with torch.enable_grad():
                    logged_values = _values_of_step(run.module, name, arguments, loader_index)
                for value, batch_size in logged_values:
                    gradient += batch_size * self._gradient_of_value(value, name, parameters)
                    total = total + batch_size * value.detach().cpu().double()
                    num_samples += batch_size
        return total / num_samples, gradient / num_samples

    def _gradient_of_value(
        self,
        value: Tensor,
        name: str,
        parameters: list[Tensor],
    ) -> Tensor:
        """Return the gradient of a logged value, float64 ``[P']``."""
        if not value.requires_grad:
            raise ConfigurationError(
                f"{self._requesters.get(name, 'a metric')} needs the gradient of {name!r}, which "
                "validation_step logs without its autograd graph. Log the loss without .item(), .detach() "
                "and torch.no_grad(), or choose a metric that evaluates models instead of gradients."
            )
        gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
        parts = [tensor.flatten() for tensor in gradients]
        return torch.cat(parts).double()

    def _trainable_parameters(self, module: nn.Module) -> list[Tensor]:
        """Let a module's parameters require gradients. Return them in the order that they have in vectors."""
        parameters = {}
        for name, parameter in module.named_parameters():
            if name in self.space.names:
                parameters[name] = parameter.requires_grad_(True)
        return [parameters[name] for name in self.space.names if name in parameters]

    def _check_gradient(
        self,
        name: str,
        vector: Tensor,
        logged_value: float,
    ) -> None:
        """Raise ConfigurationError unless the value that is differentiated equals ``logged_value``, which Lightning
        logs.
        """
        mean_of_steps, _gradient = self._value_and_gradient(vector, name)
        step_value = float(mean_of_steps)
        relative_tolerance = rounding_of(self._trainer).number
        tolerance = relative_tolerance * max(1.0, abs(logged_value))
        is_equal = abs(step_value - logged_value) <= tolerance  # False for NaN
        if not is_equal:
            raise ConfigurationError(
                f"{self._requesters.get(name, 'a metric')} needs the gradient of {name!r}. The values that "
                f"validation_step logs have the mean {step_value:.6g}, but the trainer logs {logged_value:.6g}. So "
                "hooks around the step contribute to the value. Log the loss in validation_step only, or choose a "
                "metric that evaluates models instead of gradients."
            )


def _values_of_step(
    module: L.LightningModule,
    wanted_name: str,
    arguments: tuple[Any, ...],
    loader_index: int | None,
) -> list[tuple[Tensor, float]]:
    """Return ``(value, batch size)`` for each value that ``validation_step`` logs under ``wanted_name``."""
    values_and_sizes = []

    # This function replaces self.log(...).
    def record_value(*args: Any, **kwargs: Any) -> None:
        logged = _arguments_of_log(*args, **kwargs)
        if wanted_name not in _names_of_logged(logged, loader_index):
            return
        batch_size = logged["batch_size"]
        if batch_size is None:
            batch_size = extract_batch_size(arguments[0])
        values_and_sizes.append((logged["value"], float(batch_size)))

    # The attribute hides the method during this step.
    attributes = vars(module)
    attributes["log"] = record_value
    try:
        module.validation_step(*arguments)
    finally:
        del attributes["log"]
    return [(torch.as_tensor(value).sum(), batch_size) for value, batch_size in values_and_sizes]


def _arguments_of_log(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a call of ``LightningModule.log`` by name."""
    log_call = _SIGNATURE_OF_LOG.bind(None, *args, **kwargs)  # None for self
    log_call.apply_defaults()
    return log_call.arguments


def _names_of_logged(
    logged: Mapping[str, Any],
    loader_index: int | None,
) -> list[str]:
    """Return the names under which a value can be found."""
    names = [logged["name"]]
    if loader_index is not None and logged["add_dataloader_idx"]:
        names.append(f"{logged['name']}/dataloader_idx_{loader_index}")
    return names
