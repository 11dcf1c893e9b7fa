"""KeptBeginning: the state before a fit, from which coalitions are trained after the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L

from flsv.games.performance import ModelScore
from flsv.retraining.coalition_fit import CoalitionFits
from flsv.retraining.forked_fits import ForkedFits, why_not_by_forks
from flsv.retraining.fresh_fits import FreshFits


class KeptBeginning:
    """State before a fit: a fork of its process, or the pickled Trainer, module and data."""

    def __init__(self) -> None:
        self.forks: ForkedFits | None = None
        self._fresh: FreshFits | None = None
        # Why there is no fork.
        self.no_fork: str | None = None
        # Why nothing is kept at all.
        self.not_pickled = ""

    def __bool__(self) -> bool:
        """Return whether the beginning is kept."""
        return self.forks is not None or self._fresh is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fresh": None, "forks": None}

    def keep(self, trainer: L.Trainer, module: L.LightningModule, measures: Mapping[str, str | ModelScore]) -> bool:
        """Fork the process or pickle the fit, and return True only in a process forked later for a coalition."""
        self.no_fork = why_not_by_forks(trainer)
        if self.no_fork is None:
            self.forks = ForkedFits(trainer, module, measures)
            return self.forks.begun
        if trainer.current_epoch:
            self.not_pickled = "this Trainer has been fitted before: make a new one, and resume from a checkpoint"
            return False
        try:
            self._fresh = FreshFits(trainer, module, measures)
        except Exception as error:  # reported when it is known that coalitions will be trained
            self.not_pickled = f"{type(error).__name__}: {error}"
        return False

    def close(self) -> None:
        """End the forked process that keeps the fit's beginning, if there is one."""
        for kept in (self.forks, self._fresh):
            if kept is not None:
                kept.close()
        self.forks = None

    def forget(self) -> None:
        """Release the beginning: no coalition will be trained after the run."""
        self.close()
        self._fresh = None

    @property
    def fits(self) -> CoalitionFits:
        """Return the object that trains coalitions from the kept state."""
        kept = self.forks or self._fresh
        assert kept is not None
        return kept
