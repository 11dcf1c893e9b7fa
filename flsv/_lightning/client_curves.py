"""Patches with which loggers plot what clients log of single steps and of rounds, by client.

A run without ``Reporting(client_steps=...)`` does not load this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from flsv._lightning.patches import ROUND_NAME, Patch


def client_curves_patch(
    trainer: L.Trainer, position: Callable[[], tuple[str, int] | None]
) -> Patch:
    """Return the patch with which loggers plot single steps by client, where ``position`` gives name and step."""
    connector = trainer._logger_connector
    update = connector.update_train_step_metrics
    last_values: dict[str, Tensor] = {}

    def update_with_curves() -> None:
        update()
        logged_values = connector.metrics["log"]
        new_values = _newly_logged(logged_values, last_values)
        client_and_step = position()
        if client_and_step is None or not new_values:
            return
        client, step = client_and_step
        value_by_curve: dict[str, float] = {ROUND_NAME: trainer.current_epoch}
        for name, value in new_values.items():
            value_by_curve[f"{name}/{client}"] = float(value)
        for logger in trainer.loggers:
            logger.log_metrics(value_by_curve, step=step)

    return connector, "update_train_step_metrics", update_with_curves


def _newly_logged(
    logged_values: Mapping[str, Any], last_values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the values that the last batch has logged, and store all in ``last_values``."""
    # Lightning repeats what an earlier batch has logged, maybe of another client. Such a value is at the same place
    # of the memory, which no other takes while it is in `last_values`.
    new_values = {}
    for name, logged_value in logged_values.items():
        value = torch.as_tensor(logged_value)
        last_value = last_values.get(name)
        is_repeated = last_value is not None and last_value.data_ptr() == value.data_ptr()
        if not is_repeated:
            new_values[name] = value
        last_values[name] = value
    return new_values


def client_means_patches(trainer: L.Trainer, client_name: Callable[[], str | None]) -> list[Patch]:
    """Return the patches with which loggers plot, by client and round, the values that it logs for the epoch."""
    results = trainer.fit_loop.epoch_loop._results
    connector = trainer._logger_connector
    results_class = type(results)
    original_log = results.log
    original_end = connector.epoch_end_reached
    results_by_client: dict[str, Any] = {}

    def log_for_client(hook: str, name: str, value: Any, **options: Any) -> None:
        original_log(hook, name, value, **options)
        client = client_name()
        # A metric that is logged as an object counts all clients' samples.
        if client is None or isinstance(value, Metric):
            return
        if client not in results_by_client:
            results_by_client[client] = results_class(training=True)
        client_results = results_by_client[client]
        client_results.batch_size = results.batch_size
        client_results.log(hook, name, value, **options)

    def plot_and_end() -> None:
        value_by_curve: dict[str, float] = {}
        for client, client_results in results_by_client.items():
            logged_values = client_results.metrics(on_step=False)["log"]
            for name, value in logged_values.items():
                value_by_curve[f"{name}/{client}"] = float(value)
        results_by_client.clear()
        if value_by_curve:
            value_by_curve[ROUND_NAME] = trainer.current_epoch
            for logger in trainer.loggers:
                logger.log_metrics(value_by_curve, step=trainer.current_epoch)
        original_end()

    return [(results, "log", log_for_client), (connector, "epoch_end_reached", plot_and_end)]
