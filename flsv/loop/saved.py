"""Saves and restores a federation's loop: checkpoints, copies and pickles."""

from __future__ import annotations

from typing import Any

import lightning as L

from flsv._lightning.averaging import RoundAverage
from flsv._lightning.round_boundary import FinetuningState, RoundBoundary
from flsv.loop.known import KnownLoop
from flsv.participants import ClientStates
from flsv.report.reporter import Reporter
from flsv.server.resume import check_state

#: What a loop has from the start of a fit on and does not take with it when it is copied or pickled.
_OF_A_FIT = ("_data", "_reporter", "_record", "_boundary", "_steps")


class SavedLoop(KnownLoop):
    """The part of :class:`flsv.FederatedLoop` that saves and goes on from what was saved."""

    _csv: str | None
    _asked: dict[str, Any] | None
    _optimizer_state: dict[str, Any] | None
    _buffers: dict[str, Any] | None
    _fingerprint: dict[str, dict[str, str]]
    _given_seed: str | int | None
    _shared: dict[str, str] | None
    _states: ClientStates
    _fitting: bool
    _resumed: bool
    _boundary: RoundBoundary
    _reporter: Reporter
    _average: RoundAverage
    _finetuning: FinetuningState
    _finetuned: dict[str, list[str]] | None

    def state_dict(self) -> dict[str, Any]:
        """All that the next round needs beyond the global model; between two rounds whenever it is asked for."""
        return {
            **self.state.state_dict(),
            **self._trained_with(),
            **self._kept(),
            "fingerprint": self._fingerprint,
            "board": self.board.state_dict(),
            "strategies": {role: strategy.state_dict() for role, strategy in self.strategies.items()},
            "filters": {type(each).__name__: each.state_dict() for each in self.filters},
            "csv": self._csv,
            "finetuned": self._finetuning.state(self._within_round),
        }

    @property
    def _within_round(self) -> bool:
        return self._fit is not None and self._fit.training is not None and self._fit.training.active

    def _trained_with(self) -> dict[str, Any]:
        fit = self._fit
        local = None if fit is None or fit.training is None else fit.training.local
        return {
            "asked": self._asked if fit is None else fit.options.asked,
            "buffers": self._buffers if local is None else local.buffers(),
            "shared": self._shared if fit is None else fit.space.described(),
        }

    def _kept(self) -> dict[str, Any]:
        """What clients and their optimizers keep."""
        fit = self._fit
        known = self._states.state_dict(), self._optimizer_state
        return dict(zip(("clients", "optimizers"), known if fit is None or fit.training is None else fit.kept()))

    def __getstate__(self) -> dict[str, Any]:
        """The federation as it stands between two rounds, without the trainer and the data of its fit: a copy knows
        what this loop's metrics and :attr:`state` know, and can be fitted anew; what resumes a run is a checkpoint."""
        trained, states = {**self._trained_with(), **self._kept()}, ClientStates()
        states.load_state_dict(trained["clients"])
        return {
            **{name: value for name, value in vars(self).items() if name not in _OF_A_FIT},
            "_states": states,
            "_asked": trained["asked"],
            "_optimizer_state": trained["optimizers"],
            "_buffers": trained["buffers"],
            "_shared": trained["shared"],
            **{"_fit": None, "_fitting": False, "_patches": [], "_hooks": None, "_lock": None, "_progress": None},
            **{"_average": RoundAverage(), "_finetuning": FinetuningState()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._fitting:
            return  # validating, testing or predicting with a checkpoint: only the global model matters
        self.check_state(state_dict)
        self._asked, self._resumed = state_dict.get("asked"), True
        self._shared = state_dict.get("shared")
        self.state.load_state_dict(state_dict)
        self.board.load_state_dict(state_dict["board"])
        self._states.load_state_dict(state_dict["clients"])
        self._optimizer_state, self._buffers = state_dict["optimizers"], state_dict["buffers"]
        self._csv, self._finetuned = state_dict["csv"], state_dict.get("finetuned")
        for role, strategy in self.strategies.items():
            strategy.load_state_dict(state_dict["strategies"].get(role, {}))
        for each in self.filters:  # which may be others, see UpdateFilter.may_change
            if type(each).__name__ in state_dict["filters"]:
                each.load_state_dict(state_dict["filters"][type(each).__name__])

    def check_state(self, state_dict: dict[str, Any], max_epochs: int | None = None) -> None:
        """Raise ConfigurationError where this fit cannot go on from what ``state_dict`` gave."""
        check_state(state_dict, self._fingerprint, self._given_seed, max_epochs)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # Those of a wrapped data module are no arguments of FederatedDataModule, nor always safe to load.
        checkpoint.pop(L.LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY, None)
        training = None if self._fit is None else self._fit.training
        if training is None:
            return
        self._reporter.flush()
        if training.active:
            self._boundary.rewind(checkpoint)
            training.local.optimizers.rewind(checkpoint)
            self._finetuning.rewind(checkpoint)
        else:
            self._boundary.close_epoch(checkpoint)
            self._average.place_last(checkpoint)
