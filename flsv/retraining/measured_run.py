"""MeasuredRun: the run whose coalitions are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from flsv.data import FederatedDataModule
from flsv.games.members import Members
from flsv.retraining.record import CoalitionRecord


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """What the training of coalitions reads of a run."""

    # A FederationRun, and the RunState of its checkpoints.
    federation: Any
    run_state: Any
    #: The folder into which results are written, or None.
    folder: Path | None

    @property
    def trainer(self) -> L.Trainer:
        return self.federation.engine.trainer

    @property
    def data(self) -> FederatedDataModule:
        return self.federation.engine.data

    @property
    def all_clients(self) -> Members:
        return tuple(range(self.data.num_clients))

    @property
    def num_rounds(self) -> int:
        """The number of rounds that are complete."""
        return self.federation.state.round_index

    @property
    def clients_per_round(self) -> float:
        """The mean size of a cohort."""
        sampler = self.federation.config.sampler
        return float(sampler.inclusion_probabilities(self.data.num_clients, {}).sum())

    @property
    def seed(self) -> int:
        return self.federation.state.seed

    @property
    def games(self) -> Any:
        """The CoalitionGames of flsv.games, None before training."""
        return self.federation.server.games

    @property
    def weights(self) -> Tensor:
        """The clients' weights ``[n]`` in the federation's average."""
        return self.federation.config.client_weights(self.data.num_samples)

    @property
    def settings(self) -> dict[str, str]:
        """The settings that the results depend on."""
        return {**self.run_state.identity.flat(), "seed": str(self.seed)}

    @property
    def resumed(self) -> bool:
        """Whether results that are already in the folder belong to the run."""
        return self.run_state.resumed

    @property
    def changes(self) -> Sequence[str]:
        """Descriptions of the settings that have changed in the course of the run."""
        return self.run_state.changes

    @property
    def memory(self) -> CoalitionRecord:
        """The part of the run's checkpoints that belongs to the coalitions."""
        return self.run_state.coalitions
