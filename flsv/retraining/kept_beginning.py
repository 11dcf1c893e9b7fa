"""KeptBeginning: the state before a fit, from which coalitions are trained after the run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from flsv.games.performance import ModelScore
from flsv.retraining.coalition_fit import CoalitionFits
from flsv.retraining.forked_fits import ForkedFits, why_not_by_forks
from flsv.retraining.fresh_fits import FreshFits, pickled_fit
from flsv.retraining.readings import file_time
from flsv.utilities.supervisor import ChildFailed


class KeptBeginning:
    """State before a fit. It is a fork of the process, or the pickled Trainer, module and data."""

    #: When the run's first round began.
    trains_since = float("inf")
    #: The round whose model the coalition of all clients must reach.
    checked_round = 0

    def __init__(self) -> None:
        self.forks: ForkedFits | None = None
        self._fresh: FreshFits | None = None
        # Makes them of a pickled fit.
        self._make_fresh: Any = None
        # Why there is no fork.
        self.no_fork: str | None = None
        # Why there is no pickled fit.
        self.not_pickled = ""

    def __bool__(self) -> bool:
        """Return whether the state before the fit is stored."""
        return self.forks is not None or self._fresh is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fresh": None, "forks": None, "_make_fresh": None}

    def keep(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        measures: Mapping[str, str | ModelScore],
    ) -> bool:
        """Fork the process or pickle the fit. Return True only in a process that is forked later for a coalition."""
        self.no_fork = why_not_by_forks(trainer)
        self._make_fresh = partial(FreshFits, trainer, measures=measures, since=time.monotonic())
        pickled = partial(pickled_fit, trainer, module, environment=dict(os.environ))
        if self.no_fork is None:
            self.forks = ForkedFits(trainer, module, measures, pickled)
            return self.forks.begun
        if trainer.current_epoch:
            self.not_pickled = (
                "this Trainer has been fitted before: make a new one, and resume from a checkpoint"
            )
            return False
        try:
            self._fresh = self._make_fresh(pickled())
        except Exception as error:  # reported when it is known that coalitions will be trained
            self.not_pickled = f"{type(error).__name__}: {error}"
        return False

    def begin_training(self) -> None:
        """Note that the run's first round begins."""
        self.trains_since = file_time()

    def close(self) -> None:
        """End the forked process that holds the state, if there is one."""
        for fits in (self.forks, self._fresh):
            if fits is not None:
                fits.close()
        self.forks = None

    def forget(self) -> None:
        """Release the state, since no coalition will be trained after the run."""
        self.close()
        self._fresh = None

    @property
    def fits(self) -> CoalitionFits:
        """Return the object that trains coalitions from the stored state."""
        fits = self.forks or self._fresh
        assert fits is not None
        return fits

    def fresh(self, why: str) -> CoalitionFits | None:
        """Return a trainer of coalitions in new processes, after forks failed because of ``why``. None if that is
        impossible.
        """
        forks = self.forks
        self.forks = None
        if forks is None:
            return None
        pickled = forks.pickled()
        forks.close()
        self.no_fork = f"forks have failed ({why})"
        if isinstance(pickled, ChildFailed):
            self.not_pickled = f"{pickled}"
            return None
        rank_zero_info(f"flsv: coalitions are trained in fresh processes, since {self.no_fork}.")
        self._fresh = self._make_fresh(pickled)
        return self._fresh
