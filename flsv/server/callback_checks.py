"""Checks before training whether the Trainer's other callbacks are correct in a federation."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from flsv._lightning.round_boundary import REPLACED, WeightAveraging
from flsv.errors import ConfigurationError
from flsv.models.imbalance import OWN_SCORES
from flsv.report.measured import client_score

_CLIENT = re.compile(r"(?P<metric>[^/]+)/client_(?P<client>\d+)")
_SCORES = tuple(map(client_score, OWN_SCORES))
_OURS = ("weight", *_SCORES)


def check_callbacks(
    trainer: L.Trainer, metrics: Iterable[str], num_clients: int, evaluate_every: int, loop: L.Callback
) -> None:
    """Check what does not depend on the optimizers; and put those that change optimizers and schedulers behind the
    loop, as Lightning itself puts checkpoints behind everybody. The loop has to see what ``configure_optimizers`` gave,
    and what stood at a round's beginning.

    Args:
        trainer: with its callbacks.
        metrics: names of the federation's metrics.
        num_clients: n.
        evaluate_every: of the loop.
        loop: the federation's own callback.

    Raises:
        ConfigurationError: a callback that cannot be right, and what to use instead; a monitored name that there will
            not be.
    """
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, (EarlyStopping, ModelCheckpoint)):
            _check_monitor(callback, set(metrics), num_clients, evaluate_every)
    averaging = [c for c in callbacks if isinstance(c, (WeightAveraging, StochasticWeightAveraging))]
    if len(averaging) > 1:
        raise ConfigurationError(
            f"{' and '.join(type(c).__name__ for c in averaging)}: a checkpoint has room for one averaged model. Keep "
            "one of them."
        )
    for callback in averaging:
        own = [name for name in REPLACED if getattr(type(callback), name) is not getattr(WeightAveraging, name, None)]
        if isinstance(callback, WeightAveraging) and own:
            raise ConfigurationError(
                f"{type(callback).__name__} has its own {own[0]}, which would average clients in the middle of their "
                "training. Say in should_update(step_idx, epoch_idx) when to average: it is done once a round, with "
                "the global model."
            )
    changing = [c for c in callbacks if isinstance(c, (BaseFinetuning, StochasticWeightAveraging))]
    if changing:
        rest = [c for c in callbacks if c not in changing]
        place = rest.index(loop) + 1
        trainer.callbacks = [*rest[:place], *changing, *rest[place:]]  # type: ignore[attr-defined]


def check_stochastic_averaging(trainer: L.Trainer) -> None:
    """Check what depends on layers and schedulers, as soon as they exist.

    Raises:
        ConfigurationError: StochasticWeightAveraging with BatchNorm or with a scheduler that steps per batch.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, StochasticWeightAveraging):
            continue
        instead = (
            "Use lightning.pytorch.callbacks.WeightAveraging, which averages the global models, their BatchNorm "
            "statistics included; to anneal the learning rate, return torch.optim.swa_utils.SWALR from "
            "configure_optimizers."
        )
        if callback.pl_module_contains_batch_norm(trainer.lightning_module):
            raise ConfigurationError(
                "StochasticWeightAveraging renews BatchNorm's statistics in an epoch of its own, after the last one: a "
                f"round in which nobody trains, and which would be aggregated and valued like any other. {instead}"
            )
        if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
            raise ConfigurationError(
                "StochasticWeightAveraging puts its own scheduler, which steps once a round, in the place of one that "
                f"steps per batch and belongs to the clients. {instead}"
            )


def _check_monitor(callback: Any, metrics: set[str], num_clients: int, evaluate_every: int) -> None:
    name = callback.monitor or ""
    who = f"{type(callback).__name__}(monitor={name!r})"
    found = _CLIENT.fullmatch(name)
    if found is not None and not _is_known(found["metric"], metrics, who):
        return
    if found is not None and int(found["client"]) >= num_clients:
        raise ConfigurationError(f"{who}: the clients are 0 to {num_clients - 1}.")
    if name.split("/")[0] not in _SCORES or (found is None and name.split("/")[-1] not in ("mean", "min", "std")):
        return
    if not evaluate_every:
        raise ConfigurationError(f"{who}: nobody measures it. Set FederatedLoop(evaluation=ClientEvaluation(every=1)).")
    if evaluate_every > 1 and isinstance(callback, EarlyStopping) and callback.strict:
        raise ConfigurationError(
            f"{who}: it is first known after {evaluate_every} rounds. Set ClientEvaluation(every=1), or "
            "EarlyStopping(strict=False)."
        )


def _is_known(metric: str, metrics: set[str], who: str) -> bool:
    """Whether these are values of the loop's. A module may log such a name; one much like a metric's was meant to be
    one."""
    if metric in metrics or metric in _OURS:
        return True
    if difflib.get_close_matches(metric, metrics):
        raise ConfigurationError(
            f"{who}: there is no metric {metric!r}. Defined: {sorted(metrics)}. Add it to FederatedLoop(metrics=...)."
        )
    return False
