"""ValidatedModels: models of any task by what the module logs when Lightning validates it; and a loss's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import islice
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flsv._lightning.evaluation import tolerance
from flsv._lightning.validation import KeptBatches, ValidationRun, number
from flsv.errors import ConfigurationError
from flsv.games.copies import check_copies, copied
from flsv.games.replica import Build, VectorEvaluator, module_device, named_tensors, rows_of
from flsv.games.scores import Scores
from flsv.games.step_gradient import NotByStep, step_gradient
from flsv.parameters import ParameterSpace
from flsv.seeding import isolated_rngs

#: What a module reads and does not change: all copies share it.
_SHARED = (Dataset, DataLoader, L.LightningDataModule)


class FreshCopies:
    """Makes copies of a module with vectors in them.

    A user's ``validation_step`` may count, collect outputs and keep the best value so far. So that a model's score
    depends on nothing but its vector and the fit's module, every model has a copy of its own, in which the module's
    Python state, metrics and buffers are as they are in the module now. Only the tensors that a vector holds are not
    allocated anew: all copies share one set of them, which a new copy overwrites; and the parameters that nobody trains
    are not copied at all. One copy is valid at a time.

    Args:
        module: it is read, never written.
        space: the map between the module and vectors.
    """

    @torch.inference_mode(False)
    def __init__(self, module: nn.Module, space: ParameterSpace) -> None:
        self._module, self._space = module, space
        self._held: dict[str, Tensor] = {}
        for name, tensor in named_tensors(module):
            if name in space.names:
                own = torch.empty_like(tensor)
                self._held[name] = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
        self._vector = torch.empty(space.size, dtype=space.dtype, device=module_device(module))

    @torch.no_grad()
    def copy(self, build: Build, index: int, private: Mapping[str, Tensor] | None = None) -> Any:
        """A copy that is model ``index``, in the modes (training or evaluation) of the module.

        Raises:
            ConfigurationError: the module cannot be copied.
        """
        instead: dict[int, Any] = {
            id(t): self._held[name] for name, t in named_tensors(self._module) if name in self._held
        }
        instead |= {id(tensor): tensor for tensor in self._space.constants(self._module).values()}
        for layer in self._module.modules():
            for value in vars(layer).values():
                instead.update(_shared(value))
        own = copied(self._module, instead)
        build(index, self._vector)
        self._space.write(own, self._vector)
        for name, tensor in named_tensors(own) if private else ():
            if name in private and name not in self._held:  # type: ignore[operator]
                tensor.copy_(private[name])  # type: ignore[index]
        return own


def _shared(value: Any) -> Iterator[tuple[int, Any]]:
    """Data, which is not copied."""
    if isinstance(value, _SHARED):
        yield id(value), value
    elif type(value) in (list, tuple, dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _shared(part)


class ValidatedModels(VectorEvaluator):
    """Scores models of one structure by what they log, one after the other, each in its own copy of the module: runs
    ``validation_step`` and the validation hooks around it.

    What a model scores is a function of its vector and of the fit's module: Python's, NumPy's and torch's global
    generators are at the same place at the start of every model, and are put back afterwards. The module, its trainer
    and its loggers stay as they are.

    Args:
        trainer: of the fit, with its module on its device.
        space: the map between the module and vectors ``[P]``.
        loaders: the validation batches, see :func:`flsv._lightning.validation.keep_batches`.
        names: of the scores, among the names of ``trainer.callback_metrics`` after a validation.
        derived: those of them whose gradients are asked for.
        asking: who asks for each of them, for messages.
        seed: of what a validation draws.

    Raises:
        ConfigurationError: while evaluating, a name that is not logged, or not as one number; from ``attempt``, a name
            that has no gradient.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        space: ParameterSpace,
        loaders: Sequence[KeptBatches],
        *,
        names: Sequence[str],
        derived: Sequence[str] = (),
        asking: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        self.space, self.names = space, list(dict.fromkeys(names))
        self._derived, self._asking = derived, asking or {}
        self._trainer, self._loaders, self._seed = trainer, loaders, seed
        self._copies = FreshCopies(trainer.lightning_module, space)
        self._private: Callable[[], Mapping[str, Tensor]] | None = None

    def on(
        self, loaders: Sequence[KeptBatches], private: Callable[[], Mapping[str, Tensor]] | None = None
    ) -> ValidatedModels:
        """The same on other batches. It shares this one's memory for models, so the two must not evaluate at the same
        time.

        Args:
            loaders: from :func:`flsv._lightning.validation.keep_batches`.
            private: gives state of the module that is not in the vectors, by its names; None: the module's own.
        """
        other = copy(self)
        other._loaders, other._private = loaders, private
        return other

    @torch.no_grad()
    def evaluate(self, build: Build, count: int) -> Scores:
        """The scores of ``count`` models; ``build(i, out)`` writes model i's vector into ``out [P]``."""
        rows: list[Mapping[str, float]] = []
        for index in range(count):
            with self._validation(build, index) as run:
                rows.append(self._numbers(run.logged()))
        return Scores({n: torch.tensor([row[n] for row in rows], dtype=torch.float64) for n in self.names})

    def gradient(self, vector: Tensor, name: str) -> Tensor:
        """float64 ``[P']``: the gradient of what is logged under ``name`` at a model ``[P]``, over the leading P'
        entries, the parameters.

        Raises:
            ConfigurationError: it is not logged by ``validation_step`` with its graph.
        """
        return self._derive(vector, name)[1]

    def attempt(self) -> None:
        """Evaluate the fit's module as it is.

        Raises:
            ConfigurationError: what is asked for cannot be had, or the module cannot be copied.
        """
        module = self._trainer.lightning_module
        start = self.space.read(module)
        logged = self(start[None])
        first = [KeptBatches(islice(loader, 1)) for loader in self._loaders]

        def outputs(vector: Tensor) -> Any:
            with isolated_rngs(self._seed, "utility"):
                own = self._copies.copy(rows_of(vector[None]), 0)
                return ValidationRun(self._trainer, own, first).logged()

        check_copies(module, self.space, outputs, sensitive=False)
        for name in self._derived:
            self._check_gradient(name, start, float(logged.value(name)))

    @contextmanager
    def _validation(self, build: Build, index: int) -> Iterator[ValidationRun]:
        """Of model ``index``, with the random numbers that every model is given."""
        with (
            isolated_rngs(self._seed, "utility"),
            torch.inference_mode(False),
            torch.autocast(self._trainer.strategy.root_device.type, enabled=False),
        ):
            private = None if self._private is None else self._private()
            yield ValidationRun(self._trainer, self._copies.copy(build, index, private), self._loaders)

    def _numbers(self, logged: Mapping[str, Any]) -> dict[str, float]:
        for name in self.names:
            if name not in logged:
                who, module = self._asking.get(name, "a utility"), type(self._trainer.lightning_module).__name__
                raise ConfigurationError(
                    f"{who}: {module} logs no {name!r} when it validates. It logs {sorted(logged)}. Log it in "
                    f"validation_step, self.log({name!r}, value), or name one of those; what callbacks log does not "
                    "count."
                )
        return {name: number(name, logged) for name in self.names}

    def _derive(self, vector: Tensor, name: str) -> tuple[Tensor, Tensor]:
        with self._validation(rows_of(vector[None]), 0) as run:
            own = {n: p for n, p in run.module.named_parameters() if n in self.space.names}
            trained = [(parameter, parameter.requires_grad) for parameter in own.values()]
            try:
                for parameter, _ in trained:
                    parameter.requires_grad_(True)
                value, slopes = step_gradient(run, name, list(own.values()))
            except NotByStep as error:
                raise ConfigurationError(
                    f"{self._asking.get(name, 'a metric')} asks for the gradient of {name!r}, and {error}. Let "
                    f"validation_step log the loss itself, self.log({name!r}, loss), or take a metric that evaluates "
                    "models instead."
                ) from error
            finally:
                for parameter, before in trained:
                    parameter.requires_grad_(before)
        by_name = dict(zip(own, slopes))
        return value, torch.cat([by_name[n].flatten() for n in self.space.names if n in by_name])

    def _check_gradient(self, name: str, start: Tensor, logged: float) -> None:
        """What is derived must be what Lightning logs."""
        derived = float(self._derive(start, name)[0])
        if not abs(derived - logged) <= tolerance(self._trainer) * max(1.0, abs(logged)):
            raise ConfigurationError(
                f"{self._asking.get(name, 'a metric')} asks for the gradient of {name!r}. What validation_step "
                f"logs averages to {derived:.6g}, and the trainer logs {logged:.6g}: hooks around the step have a part "
                "in it. Log the loss in validation_step, or take a metric that evaluates models instead."
            )
