"""``training_step`` as a function of its batch: nothing is logged, and a Trainer that can say nothing of one client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L

from flsv.errors import ConfigurationError

#: What a Trainer has for one client that trains in it.
_OF_ONE_CLIENT = frozenset(
    {"callbacks", "fit_loop", "global_step", "is_last_batch", "lr_scheduler_configs", "optimizers", "strategy"}
)


class _ManyClients:
    """A trainer as many clients at once may see it."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ONE_CLIENT:
            raise ConfigurationError(
                f"training_step asks for trainer.{name}, which of clients that train at once is not one."
            )
        return getattr(self._trainer, name)


@contextmanager
def pure_step(module: L.LightningModule) -> Iterator[None]:
    """Within it, what ``training_step`` logs is left out, and asking the trainer for what belongs to one client raises
    a ConfigurationError."""
    own: dict[str, Any] = vars(module)
    names = ("_trainer", "log", "log_dict")
    before = {name: own[name] for name in names if name in own}
    own["_trainer"] = _ManyClients(module.trainer)
    own["log"] = own["log_dict"] = _nothing
    try:
        yield
    finally:
        for name in names:
            own.pop(name, None)
        own.update(before)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
