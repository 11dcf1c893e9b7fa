"""The optimizer of a packaged module, and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from flsv.errors import ConfigurationError


def optimizer_and_scheduler(
    make_optimizer: Callable[[Any], Optimizer], make_scheduler: Callable[[Optimizer], Any] | None, parameters: Iterable
) -> tuple[Optimizer, Any]:
    """Both, the schedule None where there is none.

    Raises:
        ConfigurationError: torch refuses an option of theirs.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> optimizer_and_scheduler(partial(torch.optim.SGD, lr=-1.0), None, [torch.zeros(1)])
        Traceback (most recent call last):
        ...
        flsv.errors.ConfigurationError: the optimizer cannot be made: Invalid learning rate: -1.0. Change its options.
    """
    what = "optimizer"
    try:
        optimizer = make_optimizer(parameters)
        what = "learning-rate schedule"
        return optimizer, None if make_scheduler is None else make_scheduler(optimizer)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the {what} cannot be made: {error}. Change its options.") from error
