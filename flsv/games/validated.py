"""Evaluates models of any task, each in a fresh copy of the module, in the fit's own validation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flsv._lightning.validation import KeptBatches, ValidationRun
from flsv.games.copies import check_copies, copied
from flsv.games.replica import Build, VectorEvaluator, module_device, named_tensors, rows_of
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


class ValidatedModels(VectorEvaluator):
    """Evaluates models of one structure one after the other, each in its own copy of the module.

    What a model scores is a function of its vector and of the fit's module: Python's, NumPy's and torch's global
    generators are at the same place at the start of every model, and are put back afterwards. The module, its trainer
    and its loggers stay as they are.

    Args:
        trainer: of the fit, with its module on its device.
        space: the map between the module and vectors ``[P]``.
        loaders: the validation batches, see :func:`flsv._lightning.validation.keep_batches`.
        seed: of what a validation draws.

    Attributes:
        names: of the scores.
    """

    names: Sequence[str]

    def __init__(
        self, trainer: L.Trainer, space: ParameterSpace, loaders: Sequence[KeptBatches], *, seed: int = 0
    ) -> None:
        self.space = space
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
    def evaluate(self, build: Build, count: int) -> NamedScores:
        """The scores of ``count`` models; ``build(i, out)`` writes model i's vector into ``out [P]``."""
        rows: list[Mapping[str, float]] = []
        private = None if self._private is None else self._private()
        for index in range(count):
            with self._validation(build, index, private) as run:
                rows.append(self._score(run))
        return NamedScores({n: torch.tensor([row[n] for row in rows], dtype=torch.float64) for n in self.names})

    @contextmanager
    def _validation(self, build: Build, index: int, private: Mapping[str, Tensor] | None) -> Iterator[ValidationRun]:
        """Of model ``index``, with the random numbers that every model is given."""
        with (
            isolated_rngs(self._seed, "utility"),
            torch.inference_mode(False),
            torch.autocast(self._trainer.strategy.root_device.type, enabled=False),
        ):
            yield ValidationRun(self._trainer, self._copies.copy(build, index, private), self._loaders)

    def attempt(self) -> None:
        """Evaluate the fit's module as it is.

        Raises:
            ConfigurationError: what is asked for cannot be had, or the module cannot be copied.
        """
        module = self._trainer.lightning_module
        self(self.space.read(module)[None])
        first = [KeptBatches(islice(loader, 1)) for loader in self._loaders]

        def outputs(vector: Tensor) -> Any:
            with isolated_rngs(self._seed, "utility"):
                own = self._copies.copy(rows_of(vector[None]), 0)
                return dict(self._evidence(ValidationRun(self._trainer, own, first)))

        check_copies(module, self.space, outputs, sensitive=False)

    def _evidence(self, run: ValidationRun) -> Mapping[str, Any]:
        """Whatever shows which model it is."""
        return self._score(run)

    @abstractmethod
    def _score(self, run: ValidationRun) -> Mapping[str, float]:
        """One model's."""
