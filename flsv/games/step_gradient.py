"""The gradient of what ``validation_step`` logs.

Lightning's evaluation loop takes what is logged for numbers, without a graph. Here the step is called by hand,
``self.log`` hands over its tensors, and batches are averaged as Lightning averages them: each value times the batch
size, over the sum of these. Hooks around the step are not called, and what is logged elsewhere or by a torchmetrics
metric is not seen; whoever uses this compares it with Lightning's value before training.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor

from flsv._lightning.validation import ValidationRun
from flsv.errors import ConfigurationError

_LOG = inspect.signature(L.LightningModule.log)


class NotByStep(Exception):
    """A value is not what a step logs as a tensor; the text says why."""


def step_gradient(run: ValidationRun, name: str, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The mean over all validation batches of what ``validation_step`` logs under ``name``, and its gradient, float64,
    by each of these parameters, at the module's present weights.

    Args:
        run: the validation of a copy of the fit's module.
        name: as in ``trainer.callback_metrics``.
        parameters: of the copy.

    Raises:
        NotByStep: it is not logged by the step, or has no graph.
    """
    slopes = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    with closing(run.steps()) as steps:  # or an error would leave its contexts entered
        for arguments, loader in steps:
            with torch.enable_grad():
                logged = _logged(run.module, name, arguments, loader)
                if logged is None:
                    continue
                value, weight = logged
                if not value.requires_grad:
                    raise NotByStep(f"{name!r} is logged without its graph, as .item(), .detach() and no_grad leave it")
                parts = torch.autograd.grad(value.float(), parameters, allow_unused=True)
            for slope, part in zip(slopes, parts):
                if part is not None:
                    slope += weight * part.double()
            total, weights = total + weight * value.detach().cpu().double(), weights + weight
    if not weights:
        raise NotByStep(f"validation_step logs no {name!r}")
    return total / weights, [slope / weights for slope in slopes]


def _logged(
    module: L.LightningModule, name: str, arguments: tuple[Any, ...], loader: int | None
) -> tuple[Tensor, float] | None:
    """What one step logs under this name, and what the batch counts; None: nothing."""
    values: list[tuple[Tensor, float]] = []

    def log(*args: Any, **kwargs: Any) -> None:
        call = _LOG.bind(None, *args, **kwargs)
        call.apply_defaults()
        names = [call.arguments["name"]]
        if loader is not None and call.arguments["add_dataloader_idx"]:
            names.append(f"{names[0]}/dataloader_idx_{loader}")
        if name in names:
            values.append(_averaged(name, call.arguments, arguments[0]))

    own = vars(module)
    own["log"] = log
    try:
        module.validation_step(*arguments)
    except NotByStep:
        raise
    except Exception as error:
        if is_oom_error(error) or isinstance(error, ConfigurationError):
            raise
        reason = str(error).partition("\n")[0]
        raise NotByStep(
            f"validation_step without the hooks around it raises {type(error).__name__}: {reason}"
        ) from error
    finally:
        del own["log"]
    if len(values) > 1:
        raise NotByStep(f"{name!r} is logged twice in a step")
    return values[0] if values else None


def _averaged(name: str, call: Mapping[str, Any], batch: Any) -> tuple[Tensor, float]:
    """A value that is averaged over the batches, and what this batch counts."""
    value, size = call["value"], call["batch_size"]
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() != 1:
        raise NotByStep(f"{name!r} is logged as {type(value).__name__}, and one floating-point tensor is needed")
    if call["reduce_fx"] not in ("mean", "avg", torch.mean) or call["on_epoch"] is False or call["on_step"]:
        raise NotByStep(f"{name!r} is logged as no mean over the batches")
    return value.reshape(()), float(extract_batch_size(batch) if size is None else size)
