"""Checks before training whether the Trainer's other callbacks are correct in a federation."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging

from flsv._lightning.round_boundary import REPLACED, WeightAveraging
from flsv.errors import ConfigurationError


def check_callbacks(trainer: L.Trainer, loop: L.Callback) -> None:
    """Check what does not depend on the optimizers; and put those that change optimizers behind the
    loop, as Lightning itself puts checkpoints behind everybody. The loop has to see what ``configure_optimizers`` gave,
    and what stood at a round's beginning.

    Args:
        trainer: with its callbacks.
        loop: the federation's own callback.

    Raises:
        ConfigurationError: a callback that cannot be right, and what to use instead.
    """
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(c, StochasticWeightAveraging) for c in callbacks):
        raise ConfigurationError(
            "StochasticWeightAveraging ends with an epoch that renews BatchNorm's statistics: a round in which nobody "
            "trains. Use lightning.pytorch.callbacks.WeightAveraging, which averages the global models, these "
            "statistics included; to anneal the learning rate, return torch.optim.swa_utils.SWALR from "
            "configure_optimizers."
        )
    averaging = [c for c in callbacks if isinstance(c, WeightAveraging)]
    if len(averaging) > 1:
        raise ConfigurationError(
            f"{' and '.join(type(c).__name__ for c in averaging)}: a checkpoint has room for one averaged model. Keep "
            "one of them."
        )
    for callback in averaging:
        own = [name for name in REPLACED if getattr(type(callback), name) is not getattr(WeightAveraging, name, None)]
        if own:
            raise ConfigurationError(
                f"{type(callback).__name__} has its own {own[0]}, which would average clients in the middle of their "
                "training. Say in should_update(step_idx, epoch_idx) when to average: it is done once a round, with "
                "the global model."
            )
    changing = [c for c in callbacks if isinstance(c, BaseFinetuning)]
    if changing:
        rest = [c for c in callbacks if c not in changing]
        place = rest.index(loop) + 1
        trainer.callbacks = [*rest[:place], *changing, *rest[place:]]  # type: ignore[attr-defined]
