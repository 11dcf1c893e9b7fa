"""The dry run before the first round: a copy of the run trains one client for a round, as a coalition does."""

from __future__ import annotations

import traceback
from contextlib import suppress
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from flsv._lightning.data_source import kept_data_generators
from flsv._lightning.patches import callbacks_of, find_loop, is_loop
from flsv.data import FederatedDataModule
from flsv.isolation.pickles import pickled
from flsv.isolation.program_state import present_state
from flsv.retraining.coalition_fit import (
    callbacks_that_train,
    only_watches_clients,
    prepare_coalition_fit,
)
from flsv.retraining.copied_fits import HOW_TO_MAKE_AGAIN, CopyOfRun, KeptRun, fit_quietly, in_quiet
from flsv.retraining.fit_scoring import CoalitionScoring
from flsv.retraining.price import MAX_ELEMENTS_OF_MODEL, RowTrial
from flsv.retraining.training_job import TrainingJob
from flsv.retraining.training_needs import (
    depends_on_validations,
    only_watches_the_run,
    reads_checkpoints,
)
from flsv.server.coalition_server import metric_of_aggregator
from flsv.server.round_server import NoModel
from flsv.training.algorithms.base import ClientAlgorithm, is_proximal
from flsv.training.module_snapshot import ModuleSnapshot
from flsv.training.swapped_optimizer import options_of
from flsv.utilities.errors import ConfigurationError, listed, reason_of
from flsv.utilities.plain_values import are_equal, digest
from flsv.vmap.coalition_rows import CoalitionRows

#: Types of objects to which a callback may refer, and which are not part of its own state.
_SHARED_TYPES = (
    nn.Module,
    L.Trainer,
    L.LightningDataModule,
    Dataset,
    DataLoader,
    Optimizer,
)
#: The folder of flsv's own code.
_PACKAGE = Path(__file__).parents[1]


class NotRepeatable(Exception):
    """Error: a copy of the run cannot create or read a file or folder as the run does."""


class _FailedWhileCounting(Exception):
    """Error: a step has failed whose multiplications and additions were counted, which may be why."""


class DryRunResult(NamedTuple):
    """The parts of Lightning that the fits of coalitions need, because training depends on them."""

    # Whether training may depend on the results of validations or on ModelCheckpoint and EarlyStopping.
    depends_on_validations: bool
    # ModelCheckpoint and EarlyStopping.
    needs_checkpoints: bool
    # What was found out about rows of the module.
    rows: RowTrial
    # Whether a validation changes a global or a class of the program, which training may read.
    validation_changes_program: bool = False

    @property
    def needs_validations(self) -> bool:
        return self.depends_on_validations or self.validation_changes_program

    def rows_or_reason(self) -> RowTrial:
        """Return whether coalitions can be trained at once, considering all that training depends on."""
        if self.depends_on_validations and not self.rows.why_not:
            return self.rows._replace(why_not="training may depend on validations or checkpoints.")
        return self.rows


def client_of_dry_run(data: FederatedDataModule) -> int:
    """Return the client with the fewest samples among those that have several batches. If no client has several, return
    the client with the most samples.
    """
    num_samples = data.num_samples.tolist()
    batch_size = data.batch_size or 1
    clients = sorted(range(data.num_clients), key=num_samples.__getitem__)
    for client in clients:
        if num_samples[client] > batch_size:
            return client
    return clients[-1]


def dry_run(
    run_copy: CopyOfRun,
    trainer: L.Trainer,
    client: int,
    seed: int,
    tries_rows: bool = False,
) -> DryRunResult:
    """Train one client for a round in a copy of the run, then end the fit, as a coalition does. The run itself does not
    change. With ``tries_rows`` find out whether coalitions can be trained at once.

    Raises:
        ConfigurationError: the dry run has failed. The message says where.
        NotRepeatable: the dry run has failed at a file or folder.
    """
    job = TrainingJob(members=(client,), seed=seed, rounds=(0,), keeps_checkpoints=True)
    kept_run = KeptRun(trainer)
    fit = partial(_fit_in_folder, run_copy, trainer, job, tries_rows)
    try:
        try:
            return fit(counts_work=tries_rows)
        except _FailedWhileCounting:
            return fit(counts_work=False)
    except ConfigurationError:
        raise
    except OSError as error:
        raise NotRepeatable(
            f"A dry run of client {client}'s first round in a copy of the run has failed{_place_of(error)}: {error}. "
            f"{HOW_TO_MAKE_AGAIN}"
        ) from error
    except Exception as error:
        raise _failure_of_dry_run(client, error) from error
    finally:
        kept_run.restore()


def _failure_of_dry_run(client: int, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"ShadowShapley trains coalitions in copies of the run, and a dry run of client {client}'s first round has "
        f"failed{_place_of(error)}: {type(error).__name__}: {error}. If a callback does not work twice in one "
        "program, exclude it from coalitions: ShadowShapley(excluded_callbacks=['ItsClass']). Otherwise remove "
        "ShadowShapley from the metrics."
    )


def _fit_in_folder(
    run_copy: CopyOfRun,
    trainer: L.Trainer,
    job: TrainingJob,
    tries_rows: bool,
    counts_work: bool,
) -> DryRunResult:
    folder = run_copy.folder
    with in_quiet(), kept_data_generators(trainer), folder.entered() as path:
        result = _fit_one_round(run_copy, job, path, tries_rows, counts_work)
        run_copy.load()  # loads once more, as for the next coalition
    if folder.changed_files:
        raise ConfigurationError(
            f"ShadowShapley: the fit of a coalition has changed {listed(folder.changed_files)}, which is "
            "too large to be copied before. Open the file for reading only (mode='r' of np.memmap), or remove "
            "ShadowShapley from the metrics."
        )
    return result


def _fit_one_round(
    run_copy: CopyOfRun, job: TrainingJob, folder: str, tries_rows: bool, counts_work: bool
) -> DryRunResult:
    trainer, module, data = run_copy.load()
    needs_checkpoints = reads_checkpoints(trainer, module)
    why_not = _why_not_at_once(trainer) if tries_rows else "It was not tried."
    scoring: Any = prepare_coalition_fit(
        trainer,
        module,
        data,
        measures={},
        job=job,
        folder=folder,
        make_scoring=partial(_TrialOfRows, why_not, counts_work),
    )
    if trainer.check_val_every_n_epoch:
        trainer.check_val_every_n_epoch = 1  # the fit has one round only
    comparison = _Comparison()
    trainer.callbacks.append(comparison)
    try:
        with suppress(NoModel):  # a client may diverge alone
            fit_quietly(trainer, module, data)
    except Exception as error:
        if scoring.has_failed_while_counting:
            raise _FailedWhileCounting from error
        raise
    scoring.result()  # raises an error if nothing was trained

    return DryRunResult(
        depends_on_validations=comparison.depends_on_validations or needs_checkpoints,
        needs_checkpoints=needs_checkpoints,
        rows=scoring.rows,
        validation_changes_program=comparison.changes_program,
    )


def _try_rows(trainer: L.Trainer) -> RowTrial:
    """Try in the fit of a copy of the run, at its first batch, whether coalitions can be trained at once."""
    loop: Any = find_loop(callbacks_of(trainer))
    num_elements = loop.space.size
    if num_elements > MAX_ELEMENTS_OF_MODEL:
        return RowTrial(f"the model has {num_elements} numbers.")
    try:
        dry_run = CoalitionRows.trial(trainer, loop)
    except Exception as error:  # whatever it is, coalitions are trained one by one
        return RowTrial(reason_of(error))
    return RowTrial(
        "",
        dry_run.megaflops,
        num_elements=num_elements,
        joins_clients=not dry_run.kind.shares_batch,
        enlarges_rounding=dry_run.enlarges_rounding,
    )


def _why_not_at_once(trainer: L.Trainer) -> str:
    """Return why coalitions of a run cannot be trained in one fit. Empty: no reason is known before the fit."""
    for callback in callbacks_that_train(trainer, keeps_checkpoints=False):
        if not is_loop(callback):
            name = type(callback).__name__
            return (
                f"{name} takes part in training. If it only watches, leave it out of the training of groups: "
                f"ShadowShapley(excluded_callbacks=[{name!r}])."
            )
    return _why_not_on_server(find_loop(callbacks_of(trainer)))


def _why_not_on_server(loop: Any) -> str:
    config = loop.config
    if config.uploads:
        return f"{config.uploads[0]!r} has a state for each client and coalition."
    for role, strategy in config.strategies.items():
        if role == "client_algorithm" and only_watches_clients(loop):
            continue  # coalitions are trained without it
        if isinstance(strategy, ClientAlgorithm) and is_proximal(strategy):
            continue  # it sends nothing, since all clients start from the model of their coalition
        if strategy.sends or strategy.reports:
            return f"{strategy!r} sends or reports tensors."
    if metric_of_aggregator(config):
        return f"{config.aggregator!r} reads a metric."
    return ""


class _TrialOfRows(CoalitionScoring):
    """Callback that finds out at the first batch whether the run's coalitions can be trained at once, and else how much
    work a step is.
    """

    def __init__(self, why_not: str, counts_work: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rows = RowTrial(why_not)
        self._has_tried = bool(why_not)
        self._counts_work = counts_work
        self._counter: FlopCounterMode | None = None
        self.has_failed_while_counting = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The hooks at the round's start may have made what a step needs.
        if not self._has_tried:
            self._has_tried = True
            self.rows = _try_rows(trainer)
        if self._counts_work and isnan(self.rows.megaflops):
            self._counts_work = False
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._counter is None:
            return
        self._counter.__exit__(None, None, None)
        loop: Any = find_loop(callbacks_of(trainer))
        self.rows = self.rows._replace(
            megaflops=self._counter.get_total_flops() / 1e6,
            num_elements=loop.space.size,
        )
        self._counter = None

    def on_exception(self, *arguments: Any) -> None:
        super().on_exception(*arguments)
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None
            self.has_failed_while_counting = True


class _Comparison(L.Callback):
    """Callback that compares module, callbacks, optimizers and program before and after the first validation."""

    depends_on_validations = False
    changes_program = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.depends_on_validations = depends_on_validations(trainer, pl_module)
        validation: Any = trainer.fit_loop.epoch_loop.val_loop
        validation.run = partial(self._run, trainer, pl_module, validation.run)

    def _run(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        validate: Any,
    ) -> Any:
        if self.depends_on_validations:
            return validate()

        state = _TrainingState(trainer, module)
        program = present_state()
        result = validate()
        later_state = _TrainingState(trainer, module)
        self.depends_on_validations = not state.is_equal(later_state)
        self.changes_program = not program.is_present()
        return result


class _TrainingState:
    """Snapshot of the state on which training may depend: plain values, and hashes of all other parts."""

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        snapshot = ModuleSnapshot(module)
        self._values = snapshot.values
        self._options = []
        for optimizer in trainer.optimizers:
            self._options += options_of(optimizer.param_groups)

        self._hashes = [digest(module.state_dict()), snapshot.structure]
        for callback in callbacks_of(trainer):
            module_name = type(callback).__module__
            is_of_program = not module_name.startswith(("lightning.", "flsv."))
            if is_of_program and not only_watches_the_run(callback):
                self._hashes.append(_content_of(callback))

    def is_equal(self, later_state: _TrainingState) -> bool:
        """Return whether both states are equal. NaN equals NaN."""
        if self._hashes != later_state._hashes:
            return False
        if not are_equal(self._options, later_state._options):
            return False
        return are_equal(self._values, later_state._values)


def _content_of(callback: L.Callback) -> Any:
    try:
        pickled_state = pickled(vars(callback), shared_types=_SHARED_TYPES)
    except Exception:  # training has created an object that cannot be pickled
        return object()  # differs from every other object
    return pickled_state.bytes, digest(pickled_state.storages)


def _place_of(error: Exception) -> str:
    """Return where the program raised an error, such as `` at train.py:12 (on_fit_start)``: the innermost frame that is
    not in a library.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_of_flsv = Path(frame.filename).is_relative_to(_PACKAGE)
        if not is_of_flsv and "site-packages" not in frame.filename:
            return f" at {frame.filename}:{frame.lineno} ({frame.name})"
    return ""
