"""FitRun: what one ``Trainer.fit`` of a loop has of the trainer, and gives back at its end."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.patches import PatchedAttributes, no_placeholder, round_axis, stepping, unprofiled
from flsv._lightning.per_client import CallbackHooks, ClientHooks
from flsv._lightning.round_boundary import FinetuningState, RoundAverage, RoundBoundary, global_weights
from flsv.clients.client_manager import initialise_lazy_layers
from flsv.clients.cohort import CohortLoader, name_place, no_stop_iteration, where
from flsv.clients.schedules import LocalSteps, TrainLength
from flsv.data import FederatedDataModule
from flsv.engines.one_process import OneProcess
from flsv.engines.ranks import SeveralRanks, agree, ranks_of
from flsv.engines.vmap import VmapProcess
from flsv.errors import ConfigurationError
from flsv.loop.reports import RunReports
from flsv.parameters import ParameterSpace
from flsv.participants import Channel, Client
from flsv.privacy import warn_of_noise
from flsv.report.folder import FolderLock, leaves_files, run_folder
from flsv.seeding import seed_global_rngs
from flsv.server.callback_checks import check_stochastic_averaging
from flsv.server.checks import check_metric_shapes
from flsv.server.identity import of_fit
from flsv.server.resume import check_sharing

if TYPE_CHECKING:
    from flsv.loop.federated_loop import FederatedLoop

_ENGINES: dict[str, Callable[..., OneProcess]] = {"sequential": OneProcess, "vmap": VmapProcess}


#: What Lightning would say in every round, of its own code and of an epoch that is a round.
_EVERY_ROUND = (
    r".*isinstance\(treespec, LeafSpec\)",
    r"The number of training batches \(\d+\) is smaller than the logging",
)


class FitRun:
    """One fit, from its setup on.

    Args:
        trainer: of the fit.
        data: dealt out.
        loop: whose fit it is; its state stands at the beginning of the fit.

    Attributes:
        fitting: whether the fit has not ended.
        given_seed: the loop's, or ``seed_everything``'s, or None.
        engine: runs the rounds; from ``on_fit_start`` on.
        reports: likewise, what is shown and written.
    """

    def __init__(self, trainer: L.Trainer, data: FederatedDataModule, loop: FederatedLoop) -> None:
        self.trainer, self.data, self.fitting = trainer, data, True
        self.given_seed = os.environ.get("PL_GLOBAL_SEED") if loop.seed is None else loop.seed
        self.engine: OneProcess | None = None
        self.reports: RunReports | None = None
        self.boundary: RoundBoundary | None = None
        self.average, self.finetuning = RoundAverage(), FinetuningState()
        self._loop, self._patches = loop, list[PatchedAttributes]()
        self._hooks: ClientHooks | None = None
        self._order: CallbackHooks | None = None
        self._filters = ExitStack()
        self.files = loop.reporting.files and leaves_files(trainer)
        self._lock = FolderLock(run_folder(trainer)) if self.files and trainer.is_global_zero else None

    def set_up(self, settings: Mapping[str, str]) -> None:
        """Tell the metrics of the federation, agree on what the run is, and let the trainer ask for batches and steps.

        Args:
            settings: of the loop, see :func:`flsv.server.identity.settings_of`.
        """
        trainer, loop, data, state = self.trainer, self._loop, self.data, self._loop.state
        self._filters.enter_context(warnings.catch_warnings())
        for said in _EVERY_ROUND:
            warnings.filterwarnings("ignore", message=said)
        loop.saver.identity = of_fit(settings, data)
        loop.board.bind(
            data.num_clients, data.num_classes, data.class_names, data.known_class_counts, data.client_names
        )
        check_metric_shapes(loop.strategies, loop.metrics, data.num_clients, data.num_classes)
        warn_of_noise(loop.config.privacy, loop.board.update_metrics)
        own = int.from_bytes(os.urandom(4), "little") if self.given_seed is None else int(self.given_seed)
        state.seed = agree(trainer, loop.saver.identity, own, loop.engine)
        state.num_clients = data.num_clients
        if len(state.participations) != data.num_clients:
            state.participations, state.heard = torch.zeros(2, data.num_clients, dtype=torch.long)
        # limit_train_batches holds per client here, and a fast_dev_run's max_steps would cut the cohort short.
        self.limit = trainer.limit_train_batches
        self.steps = LocalSteps(trainer, self.data, loop.sampler, loop.state, loop.local_epochs, self.limit)
        self._change(
            (trainer, "limit_train_batches", 1.0),
            (trainer, "reload_dataloaders_every_n_epochs", 1),
            (trainer.fit_loop.epoch_loop, "max_steps", -1),
            (self.data, "round_loader", self._round_loader),
            round_axis(trainer),
            *no_placeholder(trainer),
            *unprofiled(trainer),
            *stepping(trainer, self.steps.answer, self._is_last_batch, self._length),
        )

    def start(self, module: L.LightningModule) -> None:
        """Everything is on its device and set up: make the engine, and begin the reports."""
        trainer, loop, saver = self.trainer, self._loop, self._loop.saver
        self._change((self.data, "device_cache", self.data.reside(trainer)))
        check_stochastic_averaging(trainer)
        self.finetuning = FinetuningState(trainer)
        self.finetuning.restore(module, saver.finetuned)
        initialise_lazy_layers(trainer, self.data, loop.state.seed)
        make = _ENGINES[loop.engine] if isinstance(loop.engine, str) else loop.engine
        if make is OneProcess and ranks_of(trainer).size > 1:
            make = SeveralRanks
        known = trainer, self.data, loop.state, saver.states, loop.board, loop.config, self.steps
        self.engine = engine = make(*known)
        if saver.asked is not None:
            engine.options.check(saver.asked)
            check_sharing(saver.shared, engine.space.described())
        self.reports = RunReports(loop, self, engine)
        engine.begin_strategies(resumed=saver.resumed or trainer.current_epoch > 0)

    def begin_training(self, module: L.LightningModule) -> None:
        """The optimizers are as they will be used."""
        trainer, engine, saver = self.trainer, self.running, self._loop.saver
        assert self.reports is not None
        self._hooks = None if engine.idle else ClientHooks(trainer, lambda: engine.clients.batch_idx)
        if saver.asked is not None:
            engine.options.apply(saver.asked)
            saver.asked = None
        self._change(*engine.patches())
        engine.begin_training(saver.optimizers, saver.buffers)
        saver.optimizers = saver.buffers = None
        # After the engine has looked at whose hooks are whose.
        self._order = CallbackHooks(
            trainer, lambda: engine.clients.batch_idx, self.begin_batch, partial(self.end_batch, module)
        )
        self.reports.look_at_start()
        self.boundary = RoundBoundary(trainer)
        self.average = RoundAverage(trainer.callbacks, trainer.max_epochs)  # type: ignore[attr-defined]
        step = no_stop_iteration(trainer.strategy.training_step, self.place)
        weights = global_weights(trainer, engine.within_round)
        self._change((trainer.strategy, "training_step", step), weights, *self.average.changes)

    @property
    def running(self) -> OneProcess:
        """The engine.

        Raises:
            RuntimeError: the fit has not started.
        """
        if self.engine is None:
            raise RuntimeError("the loop knows this from the start of a fit on: call trainer.fit first.")
        return self.engine

    @property
    def clients(self) -> list[Client]:
        """The clients, by number."""
        return self.running.manager.clients

    @property
    def channel(self) -> Channel:
        """What has crossed in this round."""
        return self.running.manager.channel

    @property
    def space(self) -> ParameterSpace:
        """The map between the module and vectors."""
        return self.running.space

    @property
    def within_round(self) -> bool:
        """Whether clients train: the module is one of them."""
        return self.engine is not None and self.engine.training is not None and self.engine.training.active

    def begin_round(self) -> None:
        """The module holds the global model.

        Raises:
            ConfigurationError: the privacy budget is spent.
        """
        loop = self._loop
        # What hooks and validation draw must not depend on how the run got here.
        seed_global_rngs(loop.state.seed, "round", loop.round_index)
        if why := loop.spent():  # a resumed run, or min_epochs
            raise ConfigurationError(f"there is no budget for another round: {why}. Raise max_epsilon, or stop here.")
        self.finetuning.begin_round()
        self.average.begin_round()
        self.running.begin_round(self.running.loader(self.limit))

    def begin_batch(self, batch: Any) -> None:
        """A client of the cohort is to train on a batch."""
        clients = self.running.clients
        if clients.begin_batch(batch):
            assert self.reports is not None
            rounds = f"{self._loop.round_index + 1}/{self.trainer.max_epochs}"
            self.reports.progress.text = {"round": rounds, "client": clients.place}

    def end_batch(self, module: L.LightningModule, outputs: Any, batch: Any) -> None:
        """A client has trained on a batch; with the cohort's last one, the round is over."""
        if self._hooks is not None:
            self._hooks.end_batch(outputs, batch)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor):
            loss = None
        elif module.automatic_optimization and self.trainer.accumulate_grad_batches != 1:
            loss = loss * self.trainer.accumulate_grad_batches  # Lightning has divided it by that
        self.average.end_batch(self.trainer)
        if self.running.clients.end_batch(loss):
            self._end_round()
            self.average.end_round(self.trainer, module)

    def _end_round(self) -> None:
        loop, trainer, engine, index = self._loop, self.trainer, self.running, self._loop.round_index
        last, every = index + 1 == trainer.max_epochs, loop.evaluation.every
        round = engine.end_round(lambda: bool(every) and (last or (index + 1) % every == 0 or bool(loop.spent())))
        if not last and (why := loop.spent()):
            last = trainer.should_stop = True
            warnings.warn(f"training stops after {index + 1} rounds: {why}.", stacklevel=2)
        assert self.reports is not None
        self.reports.round(round)
        engine.advance(last)
        seed_global_rngs(loop.state.seed, "server", index)

    def end_epoch(self) -> None:
        """Lightning's epoch is over, and with it a round, if nothing has stopped it.

        Raises:
            RuntimeError: something has, and the fit is to go on.
        """
        early = "the epoch ended before the round's last batch"
        if self.running.clients.active:
            if not self.trainer.should_stop:
                raise RuntimeError(
                    f"{early} {self.place()}: a hook raised StopIteration, or on_train_batch_start returned -1. A "
                    "federation has no other round to skip to."
                )
            self.discard(early)
        elif self.boundary is not None:
            self.boundary.remember()

    def begin_validation(self) -> None:
        """Lightning validates before it stops, and the module may be a half-trained client."""
        if self.fitting and self.running.clients.active:
            self.discard("the epoch ended before the round's last batch")

    def finish(self) -> None:
        """Training has ended as it should."""
        if said := [text for each in self._loop.filters for text in each.notices.at_the_end()]:
            warnings.warn(f"in the whole run, {'; '.join(said)}.", stacklevel=2)
        assert self.reports is not None
        self.reports.finish()

    def fail(self, module: L.LightningModule, exception: BaseException) -> None:
        """The fit has failed: name the client, forget its round, and leave everything as it was found."""
        if self.engine is not None:
            self.engine.failed(exception, self.place())
        if self.within_round:
            name_place(exception, self.place())
            self.discard(f"{type(exception).__name__} {self.place()}")
            with suppress(OSError):  # what went wrong first matters more
                assert self.reports is not None
                self.reports.record_found()
        self.average.give_back(module)
        if self.reports is not None:
            self.reports.cancel()
        self.close()

    def place(self) -> str:
        """Whose turn it is, in words."""
        client = self.engine.clients.client if self.engine is not None and self.within_round else None
        return where(client, self._loop.round_index, self.data.client_names)

    def discard(self, why: str) -> None:
        """Forget an unfinished round."""
        if self.engine is not None and self.engine.discard():
            warnings.warn(f"round {self._loop.round_index} is discarded: {why}.", stacklevel=2)

    def saved(self) -> dict[str, Any]:
        """What the next round needs of clients, optimizers and files."""
        saver = self._loop.saver
        return {**saver.state_dict(self.engine), "finetuned": self.finetuning.state(self.within_round)}

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint always stands between two rounds."""
        training = None if self.engine is None else self.engine.training
        if training is None or self.boundary is None or self.reports is None:
            return
        self.reports.reporter.board.flush()
        if training.active:
            self.boundary.rewind(checkpoint)
            training.local.optimizers.rewind(checkpoint)
            self.finetuning.rewind(checkpoint)
        else:
            self.boundary.close_epoch(checkpoint)
            self.average.place_last(checkpoint)

    def close(self) -> None:
        """Leave the trainer and the module as they were found."""
        self.fitting = False
        for patch in reversed(self._patches):
            patch.give_back()
        if self._order is not None:
            self._order.remove()
            self._order = None
        self._filters.close()
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self._lock is not None:
            self._lock.release()
        if self.reports is not None:
            self.reports.close()
        if self.engine is not None:
            self.engine.close()

    def _change(self, *changes: tuple[Any, str, Any]) -> None:
        self._patches.append(PatchedAttributes(list(changes)))

    def _round_loader(self) -> CohortLoader | TrainLength:
        """The train dataloader of the coming round, once it can be had."""
        length = self._length()
        if length is not None:
            return length
        return self.running.loader(self.limit)

    def _length(self) -> TrainLength | None:
        """For schedules, which are a client's, and before anybody is drawn: a client's number of batches."""
        return self.steps.length() if self.engine is None or self.steps.configuring else None

    def _is_last_batch(self) -> bool | None:
        """Of the client that trains; None between rounds."""
        training = None if self.engine is None else self.engine.training
        return None if training is None else training.local.last_batch
