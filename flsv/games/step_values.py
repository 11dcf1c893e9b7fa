"""What ``validation_step`` logs, worked out by calling it: as a function to derive, and of many models at once.

Lightning's evaluation loop takes what is logged for numbers, without a graph and of one model. Here the step is called
by hand, ``self.log`` hands over its tensors, and batches are averaged as Lightning averages them: each value times the
batch size, over the sum of these. Hooks around the step are not called, and what is logged elsewhere or by a
torchmetrics metric is not seen; whoever uses this compares it with Lightning's value before training.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn
from torch.func import functional_call, vmap

from flsv._lightning.validation import ValidationRun
from flsv.errors import ConfigurationError

_LOG = inspect.signature(L.LightningModule.log)


class NotByStep(Exception):
    """A value is not what a step logs as a tensor; the text says why."""


class Logged(NamedTuple):
    """What one step has logged.

    Attributes:
        values: by name, each a scalar.
        weights: by name, what the batch counts.
    """

    values: dict[str, Tensor]
    weights: dict[str, float]


class StepValues:
    """Averages over all validation batches of what a module's ``validation_step`` logs.

    Args:
        run: the validation of a copy of the fit's module.
        names: what is asked for, as in ``trainer.callback_metrics``.
    """

    def __init__(self, run: ValidationRun, names: Sequence[str]) -> None:
        self._run, self._names = run, list(names)
        self._caller = _Caller(run.module)

    def gradient(self, name: str, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The value, and its gradient by each of these, at the module's present weights.

        Raises:
            NotByStep: it is not logged by the step, or has no graph.
        """
        slopes = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
        total, weights = torch.zeros((), dtype=torch.float64), 0.0
        for arguments, loader in self._steps():
            with torch.enable_grad():
                values, weight = self._step(arguments, loader, {})
                if name not in values:
                    continue
                value = values[name]
                if not value.requires_grad:
                    raise NotByStep(f"{name!r} is logged without its graph, as .item(), .detach() and no_grad leave it")
                found = torch.autograd.grad(value.float(), parameters, allow_unused=True)
            for slope, part in zip(slopes, found):
                if part is not None:
                    slope += weight[name] * part.double()
            total, weights = total + weight[name] * value.detach().cpu().double(), weights + weight[name]
        if not weights:
            raise NotByStep(f"validation_step logs no {name!r}")
        return total / weights, [slope / weights for slope in slopes]

    def of_many(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of models whose tensors are ``[K, ...]`` by name: name to float64 ``[K]``. The module's own tensors stand for
        what is not among them, and what depends on these alone is computed once.

        Raises:
            NotByStep: a name is not logged by the step, or vmap cannot run it.
        """
        totals: dict[str, Tensor] = {}
        weights: dict[str, float] = {}
        for arguments, loader in self._steps():
            counted: dict[str, float] = {}

            def one(state: dict[str, Tensor]) -> dict[str, Tensor]:
                values, weight = self._step(arguments, loader, state)  # noqa: B023 - called within the round
                counted.update(weight)  # noqa: B023
                return values

            for name, value in vmap(one, randomness="same")(dict(states)).items():
                totals[name] = totals.get(name, 0.0) + counted[name] * value.detach().double()
                weights[name] = weights.get(name, 0.0) + counted[name]
        missing = [name for name in self._names if name not in totals]
        if missing:
            raise NotByStep(f"validation_step logs no {missing[0]!r}")
        return {name: (total / weights[name]).cpu() for name, total in totals.items()}

    def _steps(self) -> Iterator[tuple[tuple[Any, ...], int | None]]:
        with closing(self._run.steps()) as steps:  # or an error would leave its contexts entered
            yield from steps

    def _step(self, arguments: tuple[Any, ...], loader: int | None, state: Mapping[str, Tensor]) -> Logged:
        found = Logged({}, {})

        def log(*args: Any, **kwargs: Any) -> None:
            said = _LOG.bind(None, *args, **kwargs)
            said.apply_defaults()
            for name in self._called(said.arguments, loader):
                if name in found.values:
                    raise NotByStep(f"{name!r} is logged twice in a step")
                found.values[name], found.weights[name] = _averaged(name, said.arguments, arguments[0])

        own = vars(self._run.module)
        own["log"] = log
        try:
            functional_call(self._caller, {f"module.{name}": tensor for name, tensor in state.items()}, arguments)
        except NotByStep:
            raise
        except Exception as error:
            if is_oom_error(error) or isinstance(error, ConfigurationError):
                raise
            said = str(error).partition("\n")[0]
            raise NotByStep(
                f"validation_step without the hooks around it raises {type(error).__name__}: {said}"
            ) from error
        finally:
            del own["log"]
        return found

    def _called(self, said: Mapping[str, Any], loader: int | None) -> Iterator[str]:
        """The names asked for that a value logged in a step has."""
        ends = [""] if loader is None or not said["add_dataloader_idx"] else ["", f"/dataloader_idx_{loader}"]
        yield from (name for end in ends if (name := said["name"] + end) in self._names)


class _Caller(nn.Module):
    """Calls a step where ``forward`` is called."""

    def __init__(self, module: L.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> None:
        self.module.validation_step(*arguments)


def _averaged(name: str, said: Mapping[str, Any], batch: Any) -> tuple[Tensor, float]:
    """A value that is averaged over the batches, and what this batch counts."""
    value, size = said["value"], said["batch_size"]
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() != 1:
        raise NotByStep(f"{name!r} is logged as {type(value).__name__}, and one floating-point tensor is needed")
    if said["reduce_fx"] not in ("mean", "avg", torch.mean) or said["on_epoch"] is False or said["on_step"]:
        raise NotByStep(f"{name!r} is logged as no mean over the batches")
    return value.reshape(()), float(extract_batch_size(batch) if size is None else size)
