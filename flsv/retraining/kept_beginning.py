"""KeptBeginning: the state before a fit, as a fork or as copies, from which coalitions are trained after the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L

from flsv.data import FederatedDataModule
from flsv.games.performance import ModelScore
from flsv.retraining.coalition_fit import CoalitionFits
from flsv.retraining.copied_fits import CopiedFits, Spare
from flsv.retraining.forked_fits import ForkedFits, why_not_by_forks


class KeptBeginning:
    """State before a fit: a fork of its process or, if it cannot be forked, copies of the Trainer and the module.

    Attributes:
        forks: the fork, which waits for orders to train coalitions; None if there is none.
        no_fork: the reason why there is no fork; None if there is one, or nothing is kept yet.
        no_copy: the reason why the Trainer and the module could not be copied, if they could not.
    """

    def __init__(self) -> None:
        self.forks: ForkedFits | None = None
        self._spare: Spare | None = None
        self.no_fork: str | None = None
        self.no_copy = ""

    def __bool__(self) -> bool:
        """Return whether a fork or copies are kept."""
        return self.forks is not None or self._spare is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_spare": None, "forks": None}

    def keep(self, trainer: L.Trainer, module: L.LightningModule, measures: Mapping[str, str | ModelScore]) -> bool:
        """Fork the process or copy the Trainer and the module, before the fit changes anything.

        Args:
            trainer: the Trainer in its ``setup``.
            module: the module before the first round.
            measures: ``{name: performance measure}`` by which models are scored.

        Returns:
            False in the run's own process. True in a process that was forked later to train a coalition, and whose
            Trainer has become the coalition's.
        """
        self.no_fork = why_not_by_forks(trainer)
        if self.no_fork is None:
            self.forks = ForkedFits(trainer, module, measures)
            return self.forks.begun
        if trainer.current_epoch:
            self.no_copy = "this Trainer has been fitted before: make a new one, and resume from a checkpoint"
            return False
        try:
            self._spare = Spare(trainer, module)
        except Exception as error:  # a callback or the module cannot be copied: reported if the copy is needed
            self.no_copy = f"{type(error).__name__}: {error}"
        return False

    def close(self) -> None:
        """End the forked process that keeps the fit's beginning, if there is one."""
        if self.forks is not None:
            self.forks.close()
        self.forks = None

    def forget(self) -> None:
        """Release the fork or the copies: no coalition will be trained after the run."""
        self.close()
        self._spare = None

    def fits(
        self, module: L.LightningModule, data: FederatedDataModule, measures: Mapping[str, str | ModelScore]
    ) -> CoalitionFits:
        """Return the object that trains coalitions from the kept state: by forks, or else by copies.

        Args:
            module: the run's module after its last round.
            data: the federation's data module.
            measures: ``{name: performance measure}`` by which models are scored.
        """
        if self.forks is not None:
            return self.forks
        assert self._spare is not None
        return CopiedFits(self._spare, module, data, measures)
