"""LightningFit: one ``Trainer.fit`` of a federation, which undoes its changes at the end."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from flsv import scores
from flsv._lightning.fit_loop import FederatedFitLoop, Phase, Rounds
from flsv._lightning.patches import (
    LastCallback,
    PatchedAttributes,
    callbacks_of,
    limit_closing,
    no_placeholder_patches,
    no_profiling_patches,
    round_axis_patch,
)
from flsv._lightning.round_boundary import RoundAverage, mark_as_refused
from flsv.configuration.federation_config import FederationConfig
from flsv.configuration.identity import changeable_settings_of
from flsv.core import FederationState, Values
from flsv.data import FederatedDataModule
from flsv.engines.engine import Engine, describe_place
from flsv.federation.reports import RunReports
from flsv.federation.resume import check_sharing, requested_seed
from flsv.federation.run import FederationRun, RunState
from flsv.results.folder import leaves_files, run_folder
from flsv.server.checks import check_metric_shapes
from flsv.server.contribution_metrics import ContributionMetrics
from flsv.training.client_batches import LocalSteps
from flsv.training.training_step import is_type_error, note_on_types
from flsv.utilities.atomic_files import FolderLock
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.stop_signals import begin_to_stop

if TYPE_CHECKING:
    from flsv.retraining.coalitions import Coalitions

_ENDED_EARLY = "the epoch ended before the round's last batch"

#: Warning that Lightning would repeat whenever a loader is made.
_REPEATED_WARNING = r".*isinstance\(treespec, LeafSpec\)"


class LightningFit(Rounds):
    """One fit of a federation, which connects a Trainer with a :class:`flsv.federation.run.FederationRun`."""

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        config: FederationConfig,
        metrics: ContributionMetrics,
        state: FederationState,
        run_state: RunState,
        coalitions: Coalitions | None,
    ) -> None:
        self.trainer = trainer
        self.data = data
        self.config = config
        self.metrics = metrics
        self.state = state
        self.run_state = run_state
        self.coalitions = coalitions

        self.is_fitting = True
        self._has_finished = False
        # Values and scores that are computed at the end of training and written with the final results.
        self._late_values: Mapping[str, Values] = {}
        self._late_scores: Mapping[str, torch.Tensor] = {}
        self._has_scored_untrained = False
        self.requested_seed = requested_seed(config.seed)
        self.federation: FederationRun | None = None
        self.reports: RunReports | None = None
        self.average = RoundAverage()
        self.steps = self._local_steps()

        # What is undone when the fit ends, the last first.
        self._cleanup = ExitStack()
        self._cleanup.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=_REPEATED_WARNING)
        if coalitions is not None:
            self._cleanup.callback(coalitions.close)
        self._writes_files = config.reporting.files and leaves_files(trainer)
        if self._writes_files and trainer.is_global_zero:
            folder_lock = FolderLock(run_folder(trainer))
            self._cleanup.callback(folder_lock.release)
        # This takes the place of the trainer's loop.
        self.loop = FederatedFitLoop(trainer, rounds=self, steps=self.steps)
        self._cleanup.callback(self.loop.give_back)

    def _local_steps(self) -> LocalSteps:
        work_by_client = {
            client: self.config.work_of(name) for client, name in enumerate(self.data.client_names)
        }
        return LocalSteps(
            self.trainer,
            self.data,
            sampler=self.config.sampler,
            state=self.state,
            work_by_client=work_by_client,
            limit_train_batches=self.trainer.limit_train_batches,
        )

    # ---- before the first round

    def set_up(self) -> None:
        """Prepare the trainer and the metrics, before the module is on its device."""
        self._set_up_metrics()

        state = self.state
        num_clients = self.data.num_clients
        state.seed = self._agreed_seed()
        state.num_clients = num_clients
        if len(state.participations) != num_clients:
            state.participations = torch.zeros(num_clients, dtype=torch.long)
            state.updates_received = torch.zeros(num_clients, dtype=torch.long)
        self._set_up_trainer()

    def _set_up_metrics(self) -> None:
        self._bind_metrics()
        measures = self.metrics.performances.values()
        if measures:
            scores.performance.check_positive_class(measures, self.data)
        check_metric_shapes(
            self.config.strategies,
            self.metrics.metrics,
            num_clients=self.data.num_clients,
            num_classes=self.data.num_classes,
        )
        if self.config.privacy is not None:
            from flsv.privacy import warn_of_noise

            warn_of_noise(self.config.privacy, self.metrics.update_metrics)

    def _bind_metrics(self) -> None:
        data = self.data
        class_counts = None
        if not self.config.is_private:
            class_counts = data.known_class_counts
        self.metrics.bind(
            num_clients=data.num_clients,
            num_classes=data.num_classes,
            class_names=data.class_names,
            class_counts=class_counts,
            client_names=data.client_names,
        )

    def _set_up_trainer(self) -> None:
        trainer = self.trainer
        # Each patch is an object, the name of an attribute, and the attribute's value until the fit ends.
        self._patch_until_end(
            (trainer, "reload_dataloaders_every_n_epochs", 1),
            round_axis_patch(trainer),
            *no_placeholder_patches(trainer),
            *no_profiling_patches(trainer),
        )
        shown_loader = self.steps.show_loader_in_data()
        self._cleanup.callback(shown_loader.restore)

    def _agreed_seed(self) -> int:
        """Return the seed of the run, the same on all processes."""
        if self.requested_seed is None and self.run_state.resumed:
            seed = self.state.seed
        elif self.requested_seed is None:
            seed = int.from_bytes(os.urandom(4), "little")
        else:
            seed = self.requested_seed

        # All ranks use the seed of the first, and check that they have the same data and settings.
        agree = getattr(self.trainer.strategy, "agree", None)
        if agree is None:  # there is one process
            return seed
        return agree(self.trainer, self.run_state.identity, seed, engine=self.config.engine)

    def start(self, module: L.LightningModule) -> None:
        """Make the federation's run, its engine and its reports, after Lightning has set up the optimizers."""
        division_on_device = self.data.to_device(self.trainer)
        self._patch_until_end((self.data, "_division", division_on_device))
        engine_class = self._engine_class()
        engine = engine_class(
            self.trainer, self.data, self.state, self.run_state.store, self.config, self.steps
        )
        federation = FederationRun(
            config=self.config,
            metrics=self.metrics,
            state=self.state,
            engine=engine,
        )
        self.federation = federation
        if self.coalitions is not None:
            folder = run_folder(self.trainer) if self._writes_files else None
            self.coalitions.begin(federation, self.run_state, folder)

        self.loop.take_loaders_from(federation.loader)
        self._check_and_note_changes(engine)
        federation.begin(resumed=self.run_state.resumed)
        if self._has_rounds_left or self._awaits_coalitions:
            self.reports = RunReports(
                self.trainer, federation, self.run_state, writes_files=self._writes_files
            )

    def _check_and_note_changes(self, engine: Engine) -> None:
        """Check that a resumed run has suitable optimizers and shared parameters, and note changed settings."""
        run_state = self.run_state
        changes_of_optimizers: list[str] = []
        saved_options = run_state.configured_options
        if saved_options is not None:
            engine.options.check(saved_options)
            changes_of_optimizers = engine.options.changes(saved_options)
            check_sharing(run_state.shared, engine.space.described())
        settings = changeable_settings_of(self.config, self.data)
        run_state.note_changes(settings, changes_of_optimizers, self.state.round_index)

    @property
    def _has_rounds_left(self) -> bool:
        max_rounds = self.trainer.max_epochs
        return max_rounds in (None, -1) or self.state.round_index < max_rounds

    @property
    def _awaits_coalitions(self) -> bool:
        """Return whether coalitions have to be trained for the values of past rounds."""
        if self.coalitions is None or self.state.round_index == 0:
            return False
        return self.coalitions.awaits_training

    def _engine_class(self) -> Callable[..., Engine]:
        """Return the engine of the loop, or of the trainer's strategy."""
        engine = self.config.engine
        if not isinstance(engine, str):
            return engine
        if engine == "sequential":
            engine_of_strategy = getattr(self.trainer.strategy, "federated_engine", None)
            return engine_of_strategy or Engine
        from flsv.vmap.engine import VmapProcess  # few runs need it

        return VmapProcess

    def begin_training(self, module: L.LightningModule) -> None:
        """Prepare the engine, the reports and the trainer's hooks for the first round."""
        federation = self.running
        engine = federation.engine
        run_state = self.run_state
        assert self.reports is not None
        # This comes before the module's hooks are patched, since the client algorithm may inspect them.
        algorithm: Any = federation.config.client_algorithm
        if algorithm is not None:
            algorithm.check_fit(self.trainer, federation.config)
        if run_state.configured_options is not None:
            engine.options.apply(run_state.configured_options)
            run_state.configured_options = None
        federation.begin_training(run_state.buffers)
        run_state.buffers = None

        self.reports.check_monitors()
        self.average = RoundAverage(callbacks_of(self.trainer))
        self._deliver_global_model()

    def _deliver_global_model(self) -> None:
        """Let checkpoints and averages hold the global model, also within a round."""
        strategy = self.trainer.strategy
        state_dict_of_module = strategy.lightning_module_state_dict
        trainer_state = self.running.engine.local_training.state

        def state_dict_of_global_model() -> dict[str, Any]:
            if self.loop.is_in_round:  # the module holds a client's model
                return trainer_state.global_state_dict()
            return state_dict_of_module()

        self._patch_until_end(
            (strategy, "lightning_module_state_dict", state_dict_of_global_model),
            *self.average.patches,
        )

    # ---- the state of the fit

    @property
    def running(self) -> FederationRun:
        """Return the FederationRun that :meth:`start` has made."""
        if self.federation is None:
            raise RuntimeError(
                "this is available only after a fit has started. Call trainer.fit first."
            )
        return self.federation

    @property
    def current_client(self) -> int | None:
        if not self.loop.is_in_round:
            return None
        return self.running.engine.client

    def place(self) -> str:
        """Describe the present client and round, for messages."""
        return describe_place(self.current_client, self.state.round_index, self.data.client_names)

    # ---- a round

    def begin_round(self) -> None:
        """Store the federation's state before Lightning calls the next round's hooks."""
        assert self.reports is not None
        if not self._has_scored_untrained:
            self._score_untrained()
        self.loop.copy_states()
        self.average.begin_round(self.trainer)
        self.running.begin_round()

    def _score_untrained(self) -> None:
        """Score the initial model, after the hooks at the start of training."""
        assert self.reports is not None
        self._has_scored_untrained = True
        if self.coalitions is not None:
            self.coalitions.begin_training()
        self.reports.evaluate_untrained()

    def run_round(self) -> None:
        """Run a round in place of an epoch of Lightning's fit loop."""
        assert self.reports is not None
        try:
            is_complete = self.running.run_round(self.reports.write_round)
        except StopIteration:  # Lightning would interpret this error as the end of the fit
            is_complete = False
        if not is_complete:
            self._discard_interrupted_round()
            return

        self.average.end_batch(self.trainer)
        self.average.end_round(self.trainer, self.trainer.lightning_module)
        self.running.engine.finish_epoch()
        if self._has_rounds_left:
            self._stop_if_budget_is_spent()

    def _discard_interrupted_round(self) -> None:
        """Discard a round that the user has stopped. Raise an error if a hook has ended it."""
        if not self.trainer.should_stop:
            raise RuntimeError(
                f"{_ENDED_EARLY} {self.place()}, since a hook raised StopIteration or on_train_batch_start "
                "returned -1. A federation cannot skip the rest of a round. Remove this from the hook."
            )
        self.discard(_ENDED_EARLY)

    def _stop_if_budget_is_spent(self) -> None:
        why_stopped = self.running.why_budget_is_spent()
        if why_stopped:
            self.trainer.should_stop = True
            warnings.warn(
                f"training stops after {self.state.round_index} rounds: {why_stopped}.",
                stacklevel=3,
            )

    # ---- between rounds

    def score_round(self, is_run_over: bool = False) -> None:
        """Score the module after all hooks of a round, or with ``is_run_over`` of the fit, if metrics need its
        score."""
        if not self.loop.has_begun_round:
            return
        module = self.trainer.lightning_module
        last_round = self.state.round_index - 1
        client_values = self.running.engine.local_training.state.values
        client_values.describe_once(module, self.loop.names_logged_in("on_train_epoch_end"))

        if self.coalitions is None or (self.loop.is_in_round and not is_run_over):
            return  # an unfinished round is discarded
        # An error here does not end the run, unless these metrics have no values yet.
        with self.metrics.keeping_run(
            self.metrics.trained_names, f"scoring the model after round {last_round + 1}"
        ):
            if is_run_over:  # the module holds the run's final model
                self.coalitions.end_round(last_round, is_run_over=True)
            else:
                with self.average.averaged_weights(self.trainer, module):
                    self.coalitions.end_round(last_round, is_run_over=False)

    def begin_validation(self) -> None:
        """Discard an unfinished round, so that the module holds the global model."""
        if self.is_fitting and self.loop.is_in_round:
            self.discard(_ENDED_EARLY)
        own_validation = self._own_validation()
        if own_validation is not None:
            module = self.trainer.lightning_module
            with self.average.averaged_weights(self.trainer, module):
                own_validation.begin(module)

    def end_validation(self) -> None:
        """Compare the values that the run's own validation has logged with those of a copy of the module."""
        own_validation = self._own_validation()
        if own_validation is None:
            return
        difference = own_validation.difference()
        if difference:
            difference_in_round = f"in round {self.state.round_index}, {difference}"
            self.running.coalition_differences.append(difference_in_round)
            module_name = type(self.trainer.lightning_module).__name__
            warnings.warn(
                f"models are scored in copies of {module_name}, but {difference_in_round}. A part of the module is "
                "missing in its copies, such as layers in a list of their class, so values may be wrong. Keep this "
                "part in an attribute of the module.",
                stacklevel=2,
            )

    def _own_validation(self) -> Any:
        if not self.is_fitting or self.federation is None:
            return None
        games = self.federation.server.games
        return None if games is None else games.own_validation

    def discard(self, why: str) -> None:
        """Discard an unfinished round with a warning, if there is one."""
        if self.federation is not None and self.federation.engine.discard():
            warnings.warn(f"round {self.state.round_index + 1} is discarded: {why}.", stacklevel=2)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the state that the next round needs."""
        engine = None
        if self.federation is not None:
            engine = self.federation.engine
        return self.run_state.state_dict(engine)

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Change a checkpoint that is being saved to the state between two rounds."""
        if self.federation is None:
            return
        if self.loop.phase is Phase.SERVER:
            # An error was raised between the clients' training and the end of the round.
            mark_as_refused(self.trainer, checkpoint, f"round {self.state.round_index + 1}")
        if self.reports is not None:
            self.reports.flush()

        # After the fit the trainer has its own loop.
        checkpoint["loops"]["fit_loop"] = self.loop.state_dict()
        if self.loop.is_in_round:
            self.loop.rewind(checkpoint)
        else:
            self.average.put_last_model(checkpoint)

    # ---- the end

    def finish(self) -> None:
        """Compute the last values, and write the final results, unless coalitions are trained after the fit."""
        self._warn_of_sizes()
        # These values belong to the last round, whose rows have been written already.
        self._late_values = self.metrics.end_run()
        has_tested_clients = self.running.end_run()
        if has_tested_clients:
            self._late_scores = self.state.client_scores
        self.score_round(is_run_over=True)
        self._warn_of_filters()
        self._has_finished = True
        if not self._awaits_coalitions:
            self._train_coalitions_and_write()

    def _warn_of_sizes(self) -> None:
        """Warn if the last round's hooks have changed the sizes of buffers."""
        try:
            self.running.space.check(self.trainer.lightning_module)
        except ConfigurationError as error:
            warnings.warn(f"after the last round {error}", stacklevel=2)

    def _warn_of_filters(self) -> None:
        """Warn of all failures that filters have counted in the run."""
        notices: list[str] = []
        for update_filter in self.config.filters:
            notices += update_filter.notices.at_the_end()
        if notices:
            warnings.warn(f"during the whole run, {'; '.join(notices)}.", stacklevel=2)

    def _train_coalitions_and_write(self) -> None:
        """Train the missing coalitions, and write the final results."""
        assert self.reports is not None
        lines: list[str] = []
        if self.state.global_vector is not None:
            values_by_round: dict[int, dict[str, Values]] = {}
            if self.coalitions is not None:
                values_by_round, lines = self.coalitions.train()
            if self._late_values or self._late_scores:
                last_round = self.state.round_index - 1
                trained_values = values_by_round.get(last_round, {})
                values_by_round[last_round] = {**self._late_values, **trained_values}
            self.reports.write_late_rounds(values_by_round, self._late_scores)
        self.reports.finish(lines)

    def end(self) -> None:
        """Finish a resumed run in which all rounds had been run before."""
        if not self._has_finished and self._awaits_coalitions:
            self.running.make_games()
            self.finish()

    def tear_down(self, module: L.LightningModule) -> None:
        """Close the fit. If it has ended, do so after its last hook, train coalitions and show the table."""
        if not self._has_finished:
            self.close()
            return

        def show_and_close() -> None:
            assert self.reports is not None
            if self._awaits_coalitions:
                # Lightning has moved the module to the host, but scores need it on its device.
                module.to(self.trainer.strategy.root_device)
                self._train_coalitions_and_write()
                module.cpu()
            self.reports.terminal.show_table()
            self.close()

        last_callback = LastCallback(self.trainer, show_and_close)
        self._cleanup.callback(last_callback.remove)

    def fail(self, module: L.LightningModule, exception: BaseException) -> None:
        """Add client and round to an error's message, and restore trainer and module."""
        begin_to_stop()
        is_stopped = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        if is_stopped:
            limit_closing(self.trainer.loggers)
        try:
            if self.federation is not None:
                # This comes first, since the other ranks wait and no checkpoint may be saved any more.
                self.federation.engine.ranks.abort(f"{exception!r} ({self.place()})")
            self._add_note(exception)
            if self.loop.is_in_round:
                self.discard(f"{type(exception).__name__} {self.place()}")
            self.average.restore(module)
        finally:  # even if restoring the module failed, the folder's lock is released
            self.close(failed=True)
        if is_stopped and self.reports is not None:
            self.reports.show_stopped_run()
        if isinstance(exception, SIGTERMException):
            exception.code = 128 + signal.SIGTERM  # Lightning would exit with status 0

    def _add_note(self, exception: BaseException) -> None:
        """Add a note to an error with the client, the round and, for type errors, the batch's types."""
        batch = self.loop.epoch_loop.batch
        is_from_validation = not self.loop.is_in_round
        if is_from_validation and is_type_error(exception):
            with suppress(Exception):  # only the first error is reported
                batch = next(iter(self.data.val_dataloader()))
        note = note_on_types(exception, batch)
        if self.loop.is_in_round:
            exception.add_note(
                f"flsv: {self.place()} (clients are counted from 0, rounds from 1). {note}".strip()
            )
        elif note:
            exception.add_note(f"flsv: {self.place()}. {note}")

    def close(self, failed: bool = False) -> None:
        """Undo the changes to the trainer and its module, and close the reports."""
        self.is_fitting = False
        self._cleanup.close()
        if self.reports is not None:
            self.reports.close(failed)
        if self.federation is not None:
            self.federation.engine.close()

    def _patch_until_end(self, *changes: tuple[Any, str, Any]) -> None:
        """Set attributes, each ``(object, name, value)``, until the fit's end."""
        patches = PatchedAttributes(list(changes))
        self._cleanup.callback(patches.restore)
