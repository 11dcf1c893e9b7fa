"""SameRun: a callback of ``flsv retrain``, by which a fit is the run again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from flsv._lightning.patches import callbacks_of, find_loop, in_turn
from flsv._lightning.rounding import rounding_of
from flsv.results.folder import run_folder
from flsv.utilities.errors import ConfigurationError

#: Error if all clients, trained again, come to other weights than the run.
MESSAGE_IF_DIFFERENT = (
    "there are no values: the run, trained again from its configuration, came to another model than its last "
    "checkpoint ({:.2g} % of the way that training went lie between them). Code, data or packages have changed since, "
    "or its training does not follow from configuration and seed. Train the run again (flsv fit --config "
    "RUN/config.yaml), and retrain that."
)


class SameRun(L.Callback):
    """Callback that lets a fit have a run's rounds, and ends it with an error unless it comes to the run's weights.

    Checkpoints of all callbacks are saved in the fit's own folder.

    Args:
        rounds: the number of rounds after which training ends, whatever else would end it.
        seed: the run's seed. Fits with other seeds come to other weights.
        checkpoint: path of the run's last checkpoint. None: weights are not compared.
    """

    only_watches = True  # it takes part in no coalition

    def __init__(
        self,
        rounds: int,
        seed: int,
        checkpoint: str | None = None,
    ) -> None:
        self.rounds = rounds
        self.seed = seed
        self.checkpoint = checkpoint
        self._initial_weights = torch.empty(0)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for callback in callbacks_of(trainer):
            if isinstance(callback, Checkpoint) and hasattr(callback, "dirpath"):
                callback.dirpath = str(run_folder(trainer) / "checkpoints")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._initial_weights = _weights_of(trainer)
        fit_loop: Any = trainer.fit_loop
        # After all hooks of a round, of which others may stop training.
        end_round = partial(self._end_round, trainer)
        fit_loop.on_advance_end = in_turn(fit_loop.on_advance_end, end_round)

    def _end_round(self, trainer: L.Trainer) -> None:
        trainer.should_stop = trainer.current_epoch >= self.rounds
        if trainer.should_stop:
            trainer.fit_loop.min_epochs = 0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.checkpoint is None:
            return
        loop: Any = find_loop(callbacks_of(trainer))
        if loop.state.seed != self.seed:
            return  # a fit with another seed comes to other weights than the run
        checkpoint: Any = torch.load(
            self.checkpoint,
            map_location="cpu",
            weights_only=True,
        )
        rounding = rounding_of(trainer)
        distance = rounding.unexplained_distance(
            _weights_of(trainer),
            _vector(checkpoint["state_dict"]),
            self._initial_weights,
        )
        if distance is not None:
            shutil.rmtree(run_folder(trainer))
            percent = 100 * distance
            raise ConfigurationError(MESSAGE_IF_DIFFERENT.format(percent))


def _weights_of(trainer: L.Trainer) -> Tensor:
    return _vector(trainer.strategy.lightning_module_state_dict())


def _vector(state: Mapping[str, Tensor]) -> Tensor:
    vectors = []
    for tensor in state.values():
        vector = tensor.detach().flatten()
        vectors.append(vector.double().cpu())
    return torch.cat(vectors)
