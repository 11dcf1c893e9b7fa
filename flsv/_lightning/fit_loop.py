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
from enum import Enum, auto
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ProgressBar, Timer
from lightning.pytorch.loops import _FitLoop, _TrainingEpochLoop
from lightning.pytorch.loops.progress import _BatchProgress
from lightning.pytorch.loops.utilities import _select_data_fetcher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from flsv._lightning.patches import CONFIGURE_HOOK, Patch, PatchedAttributes, is_loop
from flsv._lightning.private import hook_of
from flsv._lightning.stepping_batches import STEPS_OF_FITS
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.stop_signals import stop_if_signaled

#: Key of the values, by scheduler, for which plateau schedulers have not been stepped.
_PLATEAU_KEY = "plateau_values"


class Phase(Enum):
    """State of a round."""

    BETWEEN_ROUNDS = auto()
    #: From the hooks at its start until the last client has trained.
    CLIENTS = auto()
    SERVER = auto()
    #: It has ended before the last client has trained.
    DISCARDED = auto()


class LoadersOfFit(CombinedLoader):
    """The round's ``loader``, whose ``iterables``, which are ``trainer.train_dataloader``, are ``shown_loader()``."""

    def __init__(self, loader: Any, shown_loader: Callable[[], Any]) -> None:
        super().__init__(loader, "max_size_cycle")
        self._shown_loader = shown_loader

    @property
    def iterables(self) -> Any:
        return self._shown_loader()


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


class ClientBatchProgress(_BatchProgress):
    """Lightning's counts of batches, in which ``is_last_batch`` is true at the last batch of a client's round.

    Attributes:
        is_last_epoch: whether this is the client's last local epoch.
        epoch_length: number of batches of the local epoch, None before the first.
    """

    is_last_epoch = True
    epoch_length: int | None = None
    _has_fetched_last = False

    @property
    def has_reached_end(self) -> bool:
        """Return whether the batch is the last of its local epoch."""
        # A module that fetches its batches itself does so after its hooks, so they are counted, too.
        return self._has_fetched_last or self.current.ready == self.epoch_length

    @property
    def is_last_batch(self) -> bool:
        return self.is_last_epoch and self.has_reached_end

    @is_last_batch.setter
    def is_last_batch(self, is_last: bool) -> None:
        # Lightning sets it at the last batch of its epoch, which is a local epoch.
        self._has_fetched_last = is_last


class ClientEpochLoop(_TrainingEpochLoop):
    """Lightning's epoch loop, which runs for each client and local epoch.

    Attributes:
        batch: the client's batch that is trained on, None from its ``on_train_batch_end`` hooks on.
        ends_round: whether this is the round's last local epoch.
        is_idle: whether no client trains in this loop.
        delayed_hooks: hooks for when the module holds the next global model.
    """

    trainer: Any
    batch_progress: Any  # a ClientBatchProgress

    batch: Any = None
    ends_round = True
    is_idle = False
    has_stepped_plateaus = False
    steps_before_round = 0
    steps_before_client = 0

    def __init__(self, lightnings_loop: Any) -> None:
        vars(self).update(vars(lightnings_loop))
        self.max_steps = -1  # a fast_dev_run's would end the cohort early
        lightnings_progress = lightnings_loop.batch_progress
        self.batch_progress = ClientBatchProgress(
            lightnings_progress.total,
            lightnings_progress.current,
            lightnings_progress.is_last_batch,
        )
        self.delayed_hooks: list[Callable[[], Any]] = []

    @property
    def steps_so_far(self) -> int:
        """Return the number of steps of all clients of this process."""
        return super().global_step

    @property
    def global_step(self) -> int:
        """Return ``steps_so_far``, during a batch without those of the round's other clients."""
        if self.batch is None:
            return self.steps_so_far
        return self.steps_so_far - (self.steps_before_client - self.steps_before_round)

    def is_at_end_of_round(self) -> bool:
        return self.ends_round and self.batch_progress.has_reached_end

    def _num_ready_batches_reached(self) -> bool:
        return self.batch_progress.has_reached_end

    def advance(self, data_fetcher: Any) -> None:
        try:
            if self.is_idle:
                self._advance_idly()
            else:
                super().advance(data_fetcher)
        finally:  # after an error, too: Ctrl-C may have ended the workers of a loader
            stop_if_signaled()

    def _advance_idly(self) -> None:
        # All batches of the round have been trained elsewhere. Callbacks see one batch, which is None.
        trainer = self.trainer
        batch_index = self.batch_idx + 1
        self.val_loop.restarting = False
        self.batch_progress.is_last_batch = True
        self.batch_progress.increment_ready()
        trainer._logger_connector.on_batch_start(None)
        call._call_callback_hooks(trainer, "on_train_batch_start", None, batch_index)
        self.batch_progress.increment_started()
        self.batch_progress.increment_processed()
        self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        call._call_callback_hooks(trainer, "on_train_batch_end", {}, None, batch_index)
        trainer._logger_connector.on_batch_end()
        self.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """End a batch as Lightning does, the last one when the global model can be validated."""
        end_batch = super().on_advance_end
        if self.is_at_end_of_round():
            # Lightning would step the client's schedulers after the validation, which `end_round` begins.
            self.update_lr_schedulers("step", update_plateau_schedulers=True)
            self.delayed_hooks.append(partial(end_batch, data_fetcher))
        else:
            end_batch(data_fetcher)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        # There is no validation after other epochs than the round's last, unless training stops.
        fit_loop = self.trainer.fit_loop
        is_stopping = self.trainer.should_stop and fit_loop._can_stop_early
        is_allowed = self.ends_round or is_stopping
        return is_allowed and super()._should_check_val_fx(data_fetcher)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        is_due = self.ends_round if interval == "epoch" else not self.is_idle
        if is_due:
            super().update_lr_schedulers(interval, update_plateau_schedulers)
        if interval == "epoch" and update_plateau_schedulers:
            self.has_stepped_plateaus = True


class FederatedFitLoop(_FitLoop):
    """Lightning's fit loop, in which an epoch is a round, and which answers for the client what the Trainer asks it.

    Attributes:
        has_begun_round: whether the hooks at the round's start have run. They are not called again for a checkpoint's
            epoch.
        phase: what is done with a round at present.
    """

    # Lightning does not declare all attributes of these.
    trainer: Any
    epoch_loop: Any

    has_begun_round = False
    phase = Phase.BETWEEN_ROUNDS
    _first_batch_index = 0
    _make_loader: Callable[[], Any] | None = None

    def __init__(
        self,
        trainer: L.Trainer,
        rounds: Rounds,
        steps: Any,  # a LocalSteps
    ) -> None:
        # This loop takes over Lightning's state.
        lightnings_loop: Any = trainer.fit_loop
        vars(self).update(vars(lightnings_loop))
        self.epoch_loop = ClientEpochLoop(lightnings_loop.epoch_loop)
        self._combined_loader: Any = LoadersOfFit(None, steps.shown_loader)
        # In a tuple, since Lightning takes any loop among the attributes of a loop for a part of it.
        self._lightnings_loops = lightnings_loop, lightnings_loop.epoch_loop
        self._rounds = rounds
        self._steps = steps
        # Values from a checkpoint for plateau schedulers, until these are stepped.
        self._plateau_values: dict[int, Tensor] = {}
        self._patches = PatchedAttributes()
        STEPS_OF_FITS.begin(self)
        trainer.fit_loop = self

    def begin(self, client_callback: L.Callback) -> None:
        """Begin the fit, in which ``client_callback`` sees the clients' batches before all other callbacks."""
        trainer = self.trainer
        self.remember()
        callback_of_loop = _Memory(self.remember)
        patches: list[Patch] = [
            (trainer, "callbacks", [callback_of_loop, client_callback, *trainer.callbacks]),
        ]
        for callback in trainer.callbacks:
            patches += self._patches_of_callback(callback)
        self._patches = PatchedAttributes(patches)

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
        """Restore the Trainer's own loops, with the progress of these and a loader of all clients' samples."""
        STEPS_OF_FITS.end(self)
        self._patches.restore()
        fit_loop, epoch_loop = self._lightnings_loops
        _take_over(epoch_loop, self.epoch_loop, except_for=("max_steps", "batch_progress"))
        epoch_loop.batch_progress.load_state_dict(self.epoch_loop.batch_progress.state_dict())
        _take_over(fit_loop, self, except_for=("epoch_loop", "max_batches", "_combined_loader"))
        if self.round_loader is not None:
            fit_loop.max_batches = self._steps.num_batches()
            loader = self._steps.shown_loader()
            fit_loop._combined_loader = CombinedLoader(loader, "max_size_cycle")
        self.trainer.fit_loop = fit_loop

    @property
    def is_in_round(self) -> bool:
        """Return whether a round is unfinished."""
        return self.phase is not Phase.BETWEEN_ROUNDS

    @property
    def round_loader(self) -> Any:
        """The round's CohortLoader, None before the first round. ``trainer.train_dataloader`` is a different loader."""
        return self._combined_loader.flattened[0]

    @property
    def max_batches(self) -> float:  # type: ignore[override]  # Lightning sets it once an epoch
        """Number of batches of the present local epoch, before the first round and for schedules of a round."""
        is_configuring = hook_of(self.trainer.lightning_module) == CONFIGURE_HOOK
        if self.round_loader is None or is_configuring:
            return self._steps.num_batches()
        return len(self.round_loader)

    def num_steps_of_fit(self) -> float:
        """Return ``trainer.estimated_stepping_batches``, a client's number of optimizer steps in all rounds."""
        return self._steps.num_steps_of_fit()

    def take_loaders_from(self, make_loader: Callable[[], Any]) -> None:
        """Get each round's loader from ``make_loader`` from now on."""
        self._make_loader = make_loader

    def setup_data(self) -> None:
        # Lightning's own method takes one loader for all epochs, and limits its length.
        if self._make_loader is None:  # no round can begin yet
            return
        loader = self._make_loader()
        if loader is self.round_loader:
            return
        self._combined_loader = LoadersOfFit(loader, self._steps.shown_loader)
        self._data_fetcher = _select_data_fetcher(self.trainer, RunningStage.TRAINING)
        self._data_fetcher.setup(self._combined_loader)
        iter(
            self._data_fetcher
        )  # a loader has no length before, which Lightning reads even after an error
        self.trainer.val_check_batch = self.max_batches

    def names_logged_in(self, hook: str) -> list[str]:
        """Return the names of the values that have been logged in a hook of the fit."""
        results = self.epoch_loop._results.values()
        return [result.meta.name for result in results if result.meta.fx == hook]

    # ---- a round instead of an epoch

    def on_advance_start(self) -> None:
        progress: Any = self.epoch_progress.total
        num_started_before = progress.started
        self.has_begun_round = False
        self._step_plateaus()
        self._rounds.begin_round()
        # Lightning calls the hooks at the epoch's start, which may save a checkpoint. It counts the epoch as started,
        # except if it only ends the epoch of a checkpoint.
        self.phase = Phase.CLIENTS
        super().on_advance_start()
        self.epoch_loop.has_stepped_plateaus = False
        self.has_begun_round = progress.started > num_started_before

    def advance(self) -> None:
        epoch_loop = self.epoch_loop
        epoch_loop.delayed_hooks = []
        epoch_loop.steps_before_round = epoch_loop.steps_so_far
        self._first_batch_index = self.total_batch_idx + 1
        if self.has_begun_round:
            self._rounds.run_round()
        else:  # Lightning only ends the epoch of a checkpoint
            self.phase = Phase.BETWEEN_ROUNDS
            super().advance()

    def on_advance_end(self) -> None:
        super().on_advance_end()
        self._rounds.score_round()

    def on_run_end(self) -> None:
        super().on_run_end()
        self._rounds.finish()

    def train_client(self, loader: Any, epochs: Sequence[Any]) -> None:
        """Train on a client's local epochs, one after the other. ``loader`` is the round's CohortLoader."""
        epoch_loop = self.epoch_loop
        epoch_loop.steps_before_client = epoch_loop.steps_so_far
        for epoch in epochs:
            loader.select(epoch)
            epoch_loop.batch_progress.is_last_epoch = epoch is epochs[-1]
            self.train_epoch(is_last=epoch is loader.epochs[-1])
        loader.select(None)

    def train_epoch(self, is_last: bool = True, is_idle: bool = False) -> None:
        """Train on all batches that the train dataloader yields now. ``is_last``: it is the round's last epoch.
        ``is_idle``: the round's batches have been trained elsewhere."""
        epoch_loop = self.epoch_loop
        epoch_loop.ends_round = is_last
        epoch_loop.is_idle = is_idle
        epoch_loop.batch_progress.epoch_length = len(self.round_loader)

        self.trainer.val_check_batch = self.max_batches
        fetcher: Any = self._data_fetcher
        iter(fetcher)  # the dataloader now yields other batches
        try:
            super().advance()
        finally:  # as for any batch outside of a client's epoch
            epoch_loop.ends_round = True
            epoch_loop.batch_progress.is_last_epoch = True

    def end_round(self) -> None:
        """Call the hooks that were delayed until the module holds the next global model."""
        delayed_hooks = self.epoch_loop.delayed_hooks
        self.epoch_loop.delayed_hooks = []
        self.epoch_loop.is_idle = True
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
        if has_ended_round and not self.epoch_loop.has_stepped_plateaus:
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

    def _save(self, save: Callable[..., None], *hook_arguments: Any) -> None:
        if self.epoch_loop.is_at_end_of_round():
            self.epoch_loop.delayed_hooks.append(partial(save, *hook_arguments))
        else:
            save(*hook_arguments)

    def _show(self, hook: Callable[..., None], *arguments: Any) -> None:
        batch_index = self.total_batch_idx - self._first_batch_index
        hook(*arguments[:-1], batch_index)


def _take_over(lightnings_loop: Any, loop: Any, except_for: Sequence[str]) -> None:
    """Set the state of one of Lightning's loops to that of another."""
    state = vars(loop)
    for name in vars(lightnings_loop).keys() - set(except_for):
        setattr(lightnings_loop, name, state[name])


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
