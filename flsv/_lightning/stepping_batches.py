"""``Trainer.estimated_stepping_batches`` while federations are fitted: the steps of the client that trains.

All else that a Trainer reports of a client it asks its loops. This number it computes itself, as batches of an epoch
times epochs, though a client takes part in some rounds only, and steps at the end of each local epoch. Therefore the
property of Lightning's class asks the fit loop, as long as there is a fit that can answer.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import lightning as L

_NAME = "estimated_stepping_batches"


class StepsOfFits:
    """The fits of federations for which :class:`lightning.Trainer` asks the fit loop. Fits may run in several threads.

    Example:
        >>> from types import SimpleNamespace
        >>> trainer, steps_of_fits = L.Trainer(logger=False, barebones=True), StepsOfFits()
        >>> trainer.fit_loop = SimpleNamespace(num_steps_of_fit=lambda: 12)
        >>> steps_of_fits.begin(trainer.fit_loop)
        >>> trainer.estimated_stepping_batches
        12
        >>> steps_of_fits.end(trainer.fit_loop)
    """

    def __init__(self) -> None:
        self._fit_loops: list[Any] = []
        self._lock = Lock()

    def begin(self, fit_loop: Any) -> None:
        """Let the Trainer of ``fit_loop`` report ``fit_loop.num_steps_of_fit()``."""
        with self._lock:
            if not self._fit_loops:
                self._lightnings_property: Any = vars(L.Trainer)[_NAME]
                setattr(L.Trainer, _NAME, property(self._num_steps))
            self._fit_loops.append(fit_loop)

    def end(self, fit_loop: Any) -> None:
        """End the fit of ``fit_loop``. After the last one the class has Lightning's own property."""
        with self._lock:
            self._fit_loops.remove(fit_loop)
            if not self._fit_loops:
                setattr(L.Trainer, _NAME, self._lightnings_property)

    def _num_steps(self, trainer: Any) -> float:
        num_steps_of_fit = getattr(trainer.fit_loop, "num_steps_of_fit", None)
        if num_steps_of_fit is not None:
            return num_steps_of_fit()
        return self._lightnings_property.fget(trainer)


STEPS_OF_FITS = StepsOfFits()
