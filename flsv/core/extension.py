"""RunExtension: additional work that a metric needs in a run, such as models trained after the last round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import lightning as L
from torch import Tensor

from flsv.utilities.arguments import attribute_of
from flsv.utilities.errors import ConfigurationError


@dataclass(frozen=True)
class MeasuredRun:
    """A run whose metrics need an extension."""

    trainer: L.Trainer
    # A FederationRun.
    federation: Any
    # A FederatedDataModule.
    data: Any
    seed: int
    # The folder into which an extension writes its results, or None.
    folder: Path | None
    # The settings that the results depend on.
    settings: Mapping[str, str]
    # Whether results that are already in the folder belong to the run.
    resumed: bool
    # Descriptions of the settings that have changed in the course of the run.
    changes: Sequence[str]
    # [n], the clients' weights in the federation's average.
    weights: Tensor
    # The CoalitionGames of flsv.games, None before training.
    games: Any
    # State of the extension that is stored in checkpoints.
    memory: dict[str, Any]


class RunExtension:
    """Base class of extensions of a run. It does nothing.

    A metric names its extension by its attribute ``extension``, ``"package.module:Class"``, and the loop imports the
    class when a run has such a metric. The loop calls the methods in the order below.

    Args:
        config: the run's :class:`FederationConfig`.

    Raises:
        ConfigurationError: the extension does not work with this run. All methods except :meth:`end_round` and
            :meth:`train` may raise it, too.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def prepare(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Store the required state before the fit, and check by a dry run that the work after it is possible."""

    def begin(self, run: MeasuredRun) -> None:
        """Check the run before its first round. Strategies may be added to its server."""

    def begin_training(self, run: MeasuredRun) -> None:
        """Prepare for the run's training, and log the extension's work and its cost."""

    def end_round(self, index: int, is_run_over: bool) -> None:
        """Score the run's own model after round ``index``, in every case after the last round."""

    def train(self, run: MeasuredRun) -> tuple[dict[int, dict[str, Tensor]], list[str]]:
        """Return the values that come after the last round, ``{round: {metric: values}}``, and lines to print."""
        return {}, []

    def close(self) -> None:
        """Undo what the extension has changed in the process. This is called when the fit has ended or failed."""


def extension_of(config: Any) -> RunExtension:
    """Make the extension that a run's metrics name.

    Args:
        config: the run's :class:`FederationConfig`.

    Raises:
        ConfigurationError: metrics name different extensions, or the extension does not work with this run.
    """
    metrics_by_extension: dict[str, list[str]] = {}
    for name, metric in config.metrics.items():
        extension = attribute_of(metric, "extension")
        if extension:
            metrics_by_extension.setdefault(extension, []).append(name)

    if not metrics_by_extension:
        return RunExtension(config)
    if len(metrics_by_extension) > 1:
        raise ConfigurationError(
            f"metrics need different extensions, but a run can have only one: {metrics_by_extension}. Remove the "
            "metrics of all extensions except one."
        )
    (class_name,) = metrics_by_extension
    extension_class: type[RunExtension] = resolve_name(class_name)
    return extension_class(config)
