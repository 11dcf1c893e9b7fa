"""FederatedFitLoop: Lightning's fit loop, in which an epoch is a round.

Lightning may save at any batch: every n steps, on an exception, on Ctrl-C. The module then holds one client's
half-trained weights, from which no run can be resumed. Therefore a checkpoint saved within a round gets the global
model, Lightning's progress and the states of callbacks, optimizers and schedulers as they were at the round's start,
before any ``on_train_epoch_start``. The resumed round calls these hooks again. A checkpoint saved after aggregation,
but before Lightning has closed the epoch (at the end of validation, for example), gets the progress at the epoch's end.
Such a checkpoint also gets the values for which Lightning steps its plateau schedulers only when the epoch is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ProgressBar, Timer
from lightning.pytorch.loops import _FitLoop
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from flsv._lightning.data_source import RoundSource
from flsv._lightning.patches import Patch, PatchedAttributes, is_loop
from flsv.utilities.errors import ConfigurationError

#: Key of the values, by scheduler, for which plateau schedulers have not been stepped.
_PLATEAU_KEY = "plateau_values"


class Rounds:
    """The rounds of a federation, which a :class:`FederatedFitLoop` runs instead of Lightning's epochs."""

    def begin_round(self) -> None:
        """Prepare the next round, before any of its hooks is called."""

    def run_round(self) -> None:
        """Train the clients, each by :meth:`FederatedFitLoop.train_client`, and make the next global model."""
        raise NotImplementedError

    def score_round(self) -> None:
        """Score the global model, after all hooks of the round."""

    def finish(self) -> None:
        """Write the results, after all hooks of the fit's end."""


class _Memory(L.Callback):
    """Callback that calls ``remember`` at the end of each epoch, before all other callbacks."""

    def __init__(self, remember: Callable[[], None]) -> None:
        self._remember = remember

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._remember()


class FederatedFitLoop(_FitLoop):
    """Lightning's fit loop, in which an epoch is a round. Lightning's own epoch runs for each client and local epoch.

    Attributes:
        has_begun_round: whether the hooks at the round's start have run. They are not called again for a checkpoint's
            epoch.
        is_in_round: whether a round is unfinished.
    """

    # Lightning does not declare all attributes of these.
    trainer: Any
    epoch_loop: Any

    has_begun_round = False
    is_in_round = False
    _has_stepped_plateaus = False
    _is_last_epoch = True
    _is_idle = False
    _first_batch_index = 0

    def __init__(self, trainer: L.Trainer, rounds: Rounds) -> None:
        # This loop takes over Lightning's state.
        self.__dict__.update(trainer.fit_loop.__dict__)
        self._rounds = rounds
        self._delayed_hooks: list[Callable[[], Any]] = []
        # Values from a checkpoint for plateau schedulers, until these are stepped.
        self._plateau_values: dict[int, Tensor] = {}
        self._undo = [PatchedAttributes([(trainer, "fit_loop", self)])]

    def begin(self, client_callback: L.Callback) -> None:
        """Begin the fit, in which ``client_callback`` sees the clients' batches before all other callbacks."""
        trainer = self.trainer
        epoch_loop = self.epoch_loop
        self.remember()
        callback_of_loop = _Memory(self.remember)
        end_of_batch = partial(self._end_batch, epoch_loop.on_advance_end)
        patches: list[Patch] = [
            (trainer, "callbacks", [callback_of_loop, client_callback, *trainer.callbacks]),
            (epoch_loop, "on_advance_end", end_of_batch),
        ]
        if trainer.lr_scheduler_configs:
            step_schedulers = partial(self._step_if_due, epoch_loop.update_lr_schedulers)
            patches.append((epoch_loop, "update_lr_schedulers", step_schedulers))
        for callback in trainer.callbacks:
            patches += self._patches_of_callback(callback)
        self._undo.append(PatchedAttributes(patches))

    def _patches_of_callback(self, callback: Any) -> list[Patch]:
        """Return the patches with which checkpoints are saved between rounds, and bars show the round's batches."""
        patches: list[Patch] = []
        if isinstance(callback, Checkpoint):
            save = partial(self._save, callback.on_train_batch_end)
            patches.append((callback, "on_train_batch_end", save))
        if isinstance(callback, ProgressBar):
            for name in ("on_train_batch_start", "on_train_batch_end"):
                show = partial(self._show, getattr(callback, name))
                patches.append((callback, name, show))
        return patches

    def give_back(self) -> None:
        """Restore the Trainer's own loop, with the progress of this one."""
        while self._undo:
            self._undo.pop().restore()
        lightnings_state = vars(self.trainer.fit_loop)
        for name in lightnings_state:
            lightnings_state[name] = vars(self)[name]

    @property
    def round_loader(self) -> Any:
        """The round's CohortLoader, None before the first round. ``trainer.train_dataloader`` is a different loader."""
        combined_loader = self._combined_loader
        return None if combined_loader is None else combined_loader.iterables

    def take_loaders_from(self, make_loader: Callable[[], Any]) -> Callable[[], None]:
        """Get each round's loader from ``make_loader``. Return a function that undoes this."""
        source = RoundSource(self._data_source.instance, make_loader)
        patches = PatchedAttributes([(self, "_data_source", source)])
        return patches.restore

    def names_logged_in(self, hook: str) -> list[str]:
        """Return the names of the values that have been logged in a hook of the fit."""
        results = self.epoch_loop._results.values()
        return [result.meta.name for result in results if result.meta.fx == hook]

    def leave(self, loader: Any) -> None:
        """Set ``loader`` as the Trainer's train dataloader after the fit, instead of the last round's."""
        if self._combined_loader is not None:
            self._combined_loader = CombinedLoader(loader, "max_size_cycle")

    # ---- a round instead of an epoch

    def on_advance_start(self) -> None:
        progress: Any = self.epoch_progress.total
        num_started_before = progress.started
        self.has_begun_round = False
        self._step_plateaus()
        self._rounds.begin_round()
        # Lightning calls the hooks at the epoch's start, which may save a checkpoint. It counts the epoch as started,
        # except if it only ends the epoch of a checkpoint.
        self.is_in_round = True
        super().on_advance_start()
        self._has_stepped_plateaus = False
        self.has_begun_round = progress.started > num_started_before

    def advance(self) -> None:
        self._delayed_hooks = []
        self._first_batch_index = self.total_batch_idx + 1
        if self.has_begun_round:
            self._rounds.run_round()
        else:  # Lightning only ends the epoch of a checkpoint
            self.is_in_round = False
            super().advance()

    def on_advance_end(self) -> None:
        super().on_advance_end()
        self._rounds.score_round()

    def on_run_end(self) -> None:
        super().on_run_end()
        self._rounds.finish()

    def train_client(self, loader: Any, epochs: Sequence[Any]) -> None:
        """Train on a client's local epochs, one after the other. ``loader`` is the round's CohortLoader."""
        for epoch in epochs:
            loader.select(epoch)
            self.train_epoch(is_last=epoch is loader.epochs[-1])
        loader.select(None)

    def train_epoch(self, is_last: bool = True, is_idle: bool = False) -> None:
        """Train on all batches that the train dataloader yields now. ``is_last``: it is the round's last epoch.
        ``is_idle``: they are :class:`IdleBatch` only."""
        # These are read by `_end_batch`, `_save` and `_step_if_due` while `advance` runs.
        self._is_last_epoch = is_last
        self._is_idle = is_idle

        # The dataloader now yields other batches. These lines replace Lightning's `setup_data`, which would make a new
        # loader and take longer.
        fetcher: Any = self._data_fetcher
        self.max_batches = len(self.round_loader)
        self.trainer.val_check_batch = self.max_batches
        iter(fetcher)  # the fetcher begins to read the batches
        try:
            super().advance()
        finally:
            self._is_last_epoch = True  # as for any batch outside of a client's epoch

    def end_round(self) -> None:
        """Call the hooks that were delayed until the module holds the next global model."""
        delayed_hooks = self._delayed_hooks
        self._delayed_hooks = []
        self._is_idle = True
        for hook in delayed_hooks:
            hook()

    # ---- checkpoints, which hold the state between two rounds

    def remember(self) -> None:
        """Store Lightning's progress when a round is complete."""
        if self.is_in_round:
            return
        self._progress_between_rounds = deepcopy(super().state_dict())
        self._counts_between_rounds = {
            "epoch": self.trainer.current_epoch,
            "global_step": self.trainer.global_step,
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return Lightning's progress between rounds. It may be ahead of the hooks that have run."""
        if self.is_in_round:
            state = deepcopy(self._progress_between_rounds)
            state["state_dict"].pop(_PLATEAU_KEY, None)  # the schedulers have been stepped
            return state
        state = deepcopy(super().state_dict(*args, **kwargs))
        # Between two rounds, epochs and batches that have started count as completed.
        for part in ("total", "current"):
            epochs = state["epoch_progress"][part]
            epochs["started"] = epochs["ready"]
            epochs["processed"] = epochs["ready"]
            batches = state["epoch_loop.batch_progress"][part]
            batches["started"] = batches["ready"]
            batches["processed"] = batches["ready"]
            batches["completed"] = batches["ready"]
        return state

    def on_save_checkpoint(self) -> dict[str, Any]:
        has_ended_round = self.has_begun_round and not self.is_in_round
        if has_ended_round and not self._has_stepped_plateaus:
            values = self._values_for_plateaus()
        else:
            values = self._plateau_values
        return {**super().on_save_checkpoint(), _PLATEAU_KEY: values}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._plateau_values = state_dict.get(_PLATEAU_KEY, {})

    def _values_for_plateaus(self) -> dict[int, Tensor]:
        """Return the value for which each plateau scheduler is stepped when Lightning closes the epoch."""
        trainer = self.trainer
        if not trainer.lightning_module.automatic_optimization:
            return {}
        values = {}
        for index, config in enumerate(trainer.lr_scheduler_configs):
            is_plateau_by_epoch = config.reduce_on_plateau and config.interval == "epoch"
            is_due = (trainer.current_epoch + 1) % config.frequency == 0
            if not is_plateau_by_epoch or not is_due:
                continue
            value = trainer.callback_metrics.get(config.monitor)
            if value is not None:
                values[index] = value.detach().cpu().clone()
        return values

    def _step_plateaus(self) -> None:
        """Step the plateau schedulers that had not been stepped when the checkpoint was saved."""
        trainer = self.trainer
        for scheduler_index, monitored_value in self._plateau_values.items():
            progress = self.epoch_loop.scheduler_progress
            progress.increment_ready()
            scheduler = trainer.lr_scheduler_configs[scheduler_index].scheduler
            trainer.lightning_module.lr_scheduler_step(scheduler, monitored_value)
            progress.increment_completed()
        self._plateau_values = {}

    def copy_states(self) -> None:
        """Store the states of optimizers, schedulers and other callbacks before a round's hooks."""
        trainer = self.trainer
        callback_states = {}
        for callback in trainer.callbacks:
            # Files that a Checkpoint has written, and the time that a Timer counts, are not undone with the round.
            if not is_loop(callback) and not isinstance(callback, Checkpoint | Timer):
                state = _copy_state(callback.state_dict(), type(callback).__name__)
                callback_states[callback.state_key] = state
        self._callback_states = callback_states
        self._data_state = {}
        if trainer.datamodule is not None:
            name = type(trainer.datamodule).__qualname__  # Lightning's key in a checkpoint
            self._data_state[name] = _copy_state(trainer.datamodule.state_dict(), name)
        self._optimizer_states = _copy_of_optimizer_states(trainer)

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Set a checkpoint saved within a round to the state at the round's start."""
        checkpoint.update(self._counts_between_rounds)
        if "callbacks" in checkpoint:  # otherwise the checkpoint holds weights only
            states = checkpoint["callbacks"]
            for key, state in self._callback_states.items():
                # Lightning does not list callbacks without a state, either.
                if state or key in states:
                    states[key] = deepcopy(state)
            checkpoint.update(deepcopy(self._optimizer_states))
        for name in self._data_state.keys() & checkpoint.keys():
            checkpoint[name] = deepcopy(self._data_state[name])

    # ---- hooks that run once a round

    def _end_batch(self, lightnings_end: Callable[..., None], fetcher: Any) -> None:
        # A batch ends as in Lightning, except that validation is delayed to the end of the round.
        trainer = self.trainer
        is_last_batch = self.epoch_loop.batch_progress.is_last_batch
        if is_last_batch and self._is_last_epoch:
            # Lightning would step the client's schedulers after the validation, which `end_round` begins.
            self.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
            self._delayed_hooks.append(partial(lightnings_end, fetcher))
            return
        if not is_last_batch or trainer.should_stop:
            lightnings_end(fetcher)
            return

        # There is no validation after a client's other epochs, as with a limit of 0 batches.
        limit_before = trainer.limit_val_batches
        trainer.limit_val_batches = 0
        try:
            lightnings_end(fetcher)
        finally:
            trainer.limit_val_batches = limit_before

    def _save(self, save: Callable[..., None], *hook_arguments: Any) -> None:
        if self._is_last_epoch and self.epoch_loop.batch_progress.is_last_batch:
            self._delayed_hooks.append(partial(save, *hook_arguments))
        else:
            save(*hook_arguments)

    def _step_if_due(
        self, step: Callable[..., None], interval: str, update_plateau_schedulers: bool
    ) -> None:
        if interval == "epoch":
            is_due = self._is_last_epoch
        else:
            is_due = not self._is_idle
        if is_due:
            step(interval, update_plateau_schedulers=update_plateau_schedulers)
        if interval == "epoch" and update_plateau_schedulers:
            self._has_stepped_plateaus = True

    def _show(self, hook: Callable[..., None], *arguments: Any) -> None:
        batch_index = self.total_batch_idx - self._first_batch_index
        hook(*arguments[:-1], batch_index)


def _copy_of_optimizer_states(trainer: Any) -> dict[str, Any]:
    # Lightning's keys in a checkpoint.
    optimizer_states = []
    for optimizer in trainer.optimizers:
        # Between two rounds an optimizer has no state: clients keep theirs in the store.
        optimizer_states.append({**optimizer.state_dict(), "state": {}})
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    states = {
        "optimizer_states": optimizer_states,
        "lr_schedulers": [scheduler.state_dict() for scheduler in schedulers],
    }
    precision = trainer.precision_plugin
    precision_state = precision.state_dict()
    if precision_state:
        states[type(precision).__qualname__] = precision_state
    class_names = [type(owner).__name__ for owner in (*trainer.optimizers, *schedulers)]
    distinct_names = dict.fromkeys(class_names)
    return _copy_state(states, owner=" or ".join(distinct_names))


def _copy_state(state: Any, owner: str) -> Any:
    try:
        return deepcopy(state)
    except Exception as error:  # an object's own __deepcopy__ may raise any error
        raise ConfigurationError(
            f"the state_dict of {owner} cannot be copied ({type(error).__name__}), but a checkpoint saved within a "
            "round must hold the state from the round's start. Return only plain values and tensors from state_dict, "
            "not modules, functions or open files."
        ) from error
