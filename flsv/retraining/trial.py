"""A trial before the first round: one client's round of a coalition, and its end, in a copy of the run."""

from __future__ import annotations

import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from flsv._lightning.data_source import kept_data_generators
from flsv._lightning.patches import callbacks_of
from flsv.data import FederatedDataModule
from flsv.retraining.coalition_fit import (
    depends_on_validations,
    only_watches_the_run,
    prepare_coalition_fit,
)
from flsv.retraining.copied_fits import (
    HOW_TO_MAKE_AGAIN,
    CopyOfRun,
    KeptRun,
    fit_quietly,
    in_quiet,
)
from flsv.retraining.fit_order import FitOrder
from flsv.training.module_snapshot import ModuleSnapshot
from flsv.training.swapped_optimizer import options_of
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.pickles import pickled
from flsv.utilities.plain_values import are_equal, digest

#: Parts of the paths of files that are not the user's: of installed packages and of flsv, wherever it is.
_LIBRARY_FOLDERS = ("site-packages", str(Path(__file__).parents[1]))
#: Types of objects that a callback refers to, and that are not its own state.
_SHARED_TYPES = (
    nn.Module,
    L.Trainer,
    L.LightningDataModule,
    Dataset,
    DataLoader,
    Optimizer,
)


class NotRepeatable(Exception):
    """Error: a coalition finds a file or folder otherwise than the run."""


class Findings(NamedTuple):
    """What coalitions need, as a trial has shown."""

    validations: bool
    # Lightning's ModelCheckpoint and EarlyStopping.
    checkpoints: bool

    def applied(self, order: FitOrder) -> FitOrder:
        """Return an order for a fit with what it needs."""
        return replace(
            order,
            is_whole=self.validations,
            keeps_checkpoints=self.checkpoints,
        )


def client_on_trial(data: FederatedDataModule) -> int:
    """Return the client with the fewest samples of those with several batches, or with the most samples."""
    num_samples = data.num_samples.tolist()
    batch_size = data.batch_size or 1
    clients = sorted(range(data.num_clients), key=num_samples.__getitem__)
    for client in clients:
        if num_samples[client] > batch_size:
            return client
    return clients[-1]


def try_coalition(
    run_copy: CopyOfRun,
    trainer: L.Trainer,
    client: int,
    seed: int,
) -> Findings:
    """Train one client for a round, then end the fit, as a coalition does. All of the run stays as it is.

    Raises:
        ConfigurationError: it fails. The message says where.
        NotRepeatable: it fails at a file or folder.
    """
    order = FitOrder(
        members=(client,),
        seed=seed,
        rounds=(0,),
        scores_rounds=False,
        keeps_checkpoints=True,
    )
    kept_run = KeptRun(trainer)
    try:
        with (
            in_quiet(),
            kept_data_generators(trainer),
            run_copy.folder.entered() as folder,
        ):
            findings = _fit_on_trial(run_copy, order, folder)
            run_copy.load()  # as for the next coalition
        if run_copy.folder.changed_files:
            raise ConfigurationError(
                f"a coalition has changed {listed(run_copy.folder.changed_files)}, which is too large to be copied "
                "before. Open it to be read only (mode='r' of np.memmap), or leave ShadowShapley out."
            )
        return findings
    except ConfigurationError:
        raise
    except OSError as error:
        raise NotRepeatable(
            f"A trial of client {client}'s first round in a copy of the run has failed{_place_of(error)}: {error}. "
            f"{HOW_TO_MAKE_AGAIN}"
        ) from error
    except Exception as error:
        raise ConfigurationError(
            f"ShadowShapley trains coalitions in copies of the run, and a trial of client {client}'s first round has "
            f"failed{_place_of(error)}: {type(error).__name__}: {error}. If a callback does not work twice in one "
            "program, leave it out, ShadowShapley(excluded_callbacks=['ItsClass']). Else leave ShadowShapley out."
        ) from error
    finally:
        kept_run.restore()


def _fit_on_trial(run_copy: CopyOfRun, order: FitOrder, folder: str) -> Findings:
    trainer, module, data = run_copy.load()
    scoring = prepare_coalition_fit(
        trainer,
        module,
        data,
        measures={},
        order=order,
        folder=folder,
    )
    scoring.reads.watch_checkpoints(trainer)

    if trainer.check_val_every_n_epoch:
        trainer.check_val_every_n_epoch = 1
    comparison = _Comparison()
    trainer.callbacks.append(comparison)
    fit_quietly(trainer, module, data)
    scoring.result()

    reads_results = scoring.reads.values or scoring.reads.checkpoints
    return Findings(
        validations=comparison.depends or reads_results,
        checkpoints=scoring.reads.checkpoints,
    )


class _Comparison(L.Callback):
    """Callback that compares module, callbacks and optimizers before and after the first validation."""

    depends = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.depends = depends_on_validations(trainer, pl_module)
        validation: Any = trainer.fit_loop.epoch_loop.val_loop
        validation.run = partial(self._run, trainer, pl_module, validation.run)

    def _run(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        validate: Any,
    ) -> Any:
        if self.depends:
            return validate()

        state = _TrainingState(trainer, module)
        result = validate()
        self.depends = not state.is_equal(_TrainingState(trainer, module))
        return result


class _TrainingState:
    """State on which training may depend at one time: plain values, and hashes of all else."""

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
        """Return whether both states are the same, where NaN equals NaN."""
        have_equal_values = are_equal(self._values, later_state._values)
        have_equal_options = are_equal(self._options, later_state._options)
        return have_equal_values and have_equal_options and self._hashes == later_state._hashes


def _content_of(callback: L.Callback) -> Any:
    try:
        pickled_state = pickled(vars(callback), shared_types=_SHARED_TYPES)
    except Exception:  # training has made what cannot be pickled
        return object()  # unlike any other
    return pickled_state.bytes, digest(pickled_state.storages)


def _place_of(error: Exception) -> str:
    """Return the innermost place of an error that is not in a library, such as `` at train.py:12 (on_fit_start)``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_of_library = any(folder in frame.filename for folder in _LIBRARY_FOLDERS)
        if not is_of_library:
            return f" at {frame.filename}:{frame.lineno} ({frame.name})"
    return ""
