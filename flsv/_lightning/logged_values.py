"""The values that a Trainer has logged, which a fit without validations does not give to the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector


class GuardedValues(_LoggerConnector):
    """Lightning's store of a Trainer's logged values, which calls ``refuse`` when the Trainer is asked for them."""

    def __init__(self, trainer: Any, refuse: Callable[[], None]) -> None:
        vars(self).update(vars(trainer._logger_connector))
        self._refuse = refuse
        trainer._logger_connector = self

    @property
    def callback_metrics(self) -> Any:
        self._refuse()
        return super().callback_metrics

    @property
    def logged_metrics(self) -> Any:
        self._refuse()
        return super().logged_metrics

    @property
    def progress_bar_metrics(self) -> Any:
        self._refuse()
        return super().progress_bar_metrics


def callback_metrics_of(trainer: L.Trainer) -> dict[str, Any]:
    """Return ``trainer.callback_metrics`` for flsv itself, guarded or not."""
    lightnings_property: Any = _LoggerConnector.callback_metrics
    values: dict[str, Any] = lightnings_property.fget(trainer._logger_connector)
    return values
