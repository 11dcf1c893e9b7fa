"""FederatedLoop: the callback that is the server.

One ``Trainer.fit`` is the whole federation and one epoch is one communication round. The train dataloader of a round
yields the batches of the cohort, one client after the other; the LightningModule is, in turn, every client (with that
client's start point and optimizer state in it) and, between the rounds, the global model, which Lightning validates and
saves. What happens in a round is :class:`flsv.engines.one_process.OneProcess`'s; here are Lightning's hooks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.averaging import RoundAverage
from flsv._lightning.durable import install
from flsv._lightning.patches import PatchedAttributes, no_placeholder, round_axis, skip_unused_hooks, stepping
from flsv._lightning.per_client import ClientHooks
from flsv._lightning.round_boundary import FinetuningState, RoundBoundary, global_weights
from flsv.aggregation import Aggregator, FedAvg
from flsv.arguments import old_names_told
from flsv.clients.algorithms import ClientAlgorithm
from flsv.clients.cohort import CohortLoader
from flsv.clients.local_steps import LocalSteps, TrainLength
from flsv.clients.training import name_place, no_stop_iteration, where
from flsv.clients.trial import initialise_lazy_layers
from flsv.engines.one_process import OneProcess
from flsv.engines.ranks import SeveralRanks, agree, ranks_of
from flsv.engines.vmap import VmapProcess
from flsv.errors import ConfigurationError
from flsv.filters import OutlierFilter, UpdateFilter, with_guard
from flsv.loop.told import ToldLoop
from flsv.metrics import ContributionMetric, PrivacyLoss
from flsv.participants import ClientStates
from flsv.personalization import Personalizer
from flsv.privacy import warn_of_noise
from flsv.report.folder import FolderLock, run_folder
from flsv.report.reporting import Reporting
from flsv.round import FederationState
from flsv.sampling import ClientSampler, FullParticipation
from flsv.seeding import seed_global_rngs
from flsv.server import ContributionMetrics
from flsv.server.callback_checks import check_callbacks, check_stochastic_averaging
from flsv.server.checks import (
    check_names,
    check_packages,
    check_setup,
)
from flsv.server.config import ClientEvaluation, FederationConfig
from flsv.server.fingerprint import fingerprint, settings_of
from flsv.server.metric_shapes import check_metric_shapes
from flsv.server.resume import check_checkpoint, check_sharing
from flsv.uploads import Upload

_ENGINES: dict[str, Callable[..., OneProcess]] = {"sequential": OneProcess, "vmap": VmapProcess}


class FederatedLoop(ToldLoop):
    """Trains a LightningModule federated, and measures what every client contributes while it happens.

    Add it to a ``Trainer`` and fit any LightningModule on a :class:`flsv.data.FederatedDataModule`. ``max_epochs`` is
    the number of rounds; ``limit_train_batches`` holds per client and local epoch; gradient accumulation starts anew
    with every client. Validation sees the global model. A checkpoint always stands between two rounds, and resuming
    from it goes on bit for bit (on CUDA as far as its kernels are deterministic: ``docs/gpu.md``). What it cannot go on
    with is refused by name: other data, clients or labels, another seed, other strategies, metrics, attacks or privacy.
    ``max_epochs``, ``server_lr``, ``local_epochs``, the optimizer's options, batch sizes, the privacy budget and all
    that is only logged or drawn may change, and are used.

    A scheduler with ``interval="epoch"`` steps once a round; one with ``interval="step"``, or one that
    ``training_step`` steps itself, belongs to the client. ``trainer.estimated_stepping_batches`` is the number of steps
    of one client in all rounds that it is drawn in, so that a schedule of that length ends where it would end if the
    module were trained on this client's data alone. ``trainer.is_last_batch`` is the client's.

    Other callbacks see the global model between rounds, in any order. ``trainer.callback_metrics`` holds the last
    contributions, the round's weights and the last accuracies of the clients' own models, by the loggers' names
    (``<metric>/client_<i>``, ``weight/client_<i>``, ``client_accuracy/client_<i>``, ``.../mean``, ``.../min``,
    ``.../std``), for ``EarlyStopping``, ``ModelCheckpoint``. A client never seen has no contribution, one outside the
    cohort no weight.
    ``WeightAveraging`` averages the global models, once a round.

    Args:
        aggregator: how the clients' models become the next global one. Default: FedAvg.
        metrics: name to contribution metric; ``loop.metrics[name]`` is the live metric. In Python any torchmetrics
            ``Metric`` will do whose ``update`` names attributes of ``flsv.Round``.
        personalizer: gives clients start points of their own. Default: everyone starts from the global model.
        sampler: draws each round's cohort. Default: every client.
        client_algorithm: what clients do differently when they train, such as ``flsv.clients.algorithms.FedProx``.
        uploads: what clients do to their updates before these leave, one after the other: attacks of malicious clients,
            such as ``flsv.attacks.GradientPoisoning``, which the server does not know of; then
            ``flsv.privacy.GaussianPrivacy``, with the budget at which the fit stops, which adds the metric
            ``"epsilon"``; then compression, such as ``flsv.uploads.TopK``.
        filters: what the server does to a cohort's updates before it measures and averages them, in this order, such as
            ``[OutlierFilter(), CopyFilter(0.7, gap=0.45), NormCap(1.25), SampleCap(1.25)]``, see :mod:`flsv.filters`.
            Default: an ``OutlierFilter()``, which warns. An empty list: none.
        local_epochs: passes over a client's data per round.
        client_optimizer: ``"reset"`` empties the optimizer's state when a client starts; ``"keep"`` gives every
            client the one it left.
        share: what of the module travels: ``"all"``; ``"trainable"``, the parameters that require a gradient when the
            fit begins, and all buffers (adapters, LoRA); a list of names, such as ``["!norm"]`` (FedBN) or
            ``["!head"]`` (FedPer), see :func:`flsv.participants.sharing.sharing`; or a function of an entry's name and
            tensor (in YAML, ``class_path`` and ``init_args`` of a class whose objects are such). The rest stays at its
            client, which goes on and is evaluated with it; the global model has its initial values.
        evaluation: when the clients' own models are evaluated on their own test splits, such as
            ``ClientEvaluation(every=5)``. Default: never.
        reporting: what the run shows and writes, see :class:`flsv.report.reporting.Reporting`.
        seed: what every random choice of the federation derives from. Default: ``seed_everything``'s, else random.
        engine: how clients run. ``"sequential"``: in this process, one after the other. ``"vmap"``: in this process,
            many small ones at once, for plain modules, equal to rounding: :class:`flsv.engines.vmap.VmapProcess`. In
            Python, also what makes another engine, such as :class:`flsv.engines.remote.RemoteFederation`.

    Attributes:
        config: the arguments, in one frozen object; each is an attribute of the loop, too, by its name. They are read
            only: :meth:`replace` gives a loop of others.
        state: what stands between two rounds; the properties below read it.

    Raises:
        ConfigurationError: a wrong argument or combination, before training starts.
        RuntimeError: every client of a round returned a model that is not finite.

    Example:
        >>> from flsv.aggregation import ShapFedWA
        >>> from flsv.metrics import ClassSpecificShapley
        >>> loop = FederatedLoop(aggregator=ShapFedWA("cssv"), metrics={"cssv": ClassSpecificShapley()})
        >>> loop.metrics["cssv"]
        ClassSpecificShapley()
    """

    _instead = "Use loop.replace({0}), which gives a new loop."
    _patches: list[PatchedAttributes]
    _lock: FolderLock | None
    _hooks: ClientHooks | None
    _limit: float
    _steps: LocalSteps

    _read_only = frozenset(field.name for field in fields(FederationConfig))

    @old_names_told
    def __init__(
        self,
        aggregator: Aggregator | None = None,
        metrics: dict[str, ContributionMetric] | None = None,
        personalizer: Personalizer | None = None,
        sampler: ClientSampler | None = None,
        client_algorithm: ClientAlgorithm | None = None,
        uploads: list[Upload] | None = None,
        filters: list[UpdateFilter] | None = None,
        local_epochs: int = 1,
        client_optimizer: Literal["reset", "keep"] = "reset",
        share: str | list[str] | Callable[[str, Tensor], bool] = "all",
        evaluation: ClientEvaluation = ClientEvaluation(),
        reporting: Reporting = Reporting(),
        seed: int | None = None,
        engine: str | Callable[..., Any] = "sequential",
    ) -> None:
        # Copies, whatever becomes of the caller's own lists.
        self.config = config = FederationConfig(
            aggregator=aggregator or FedAvg(),
            metrics=dict(metrics or {}),
            personalizer=personalizer,
            sampler=sampler or FullParticipation(),
            client_algorithm=client_algorithm,
            uploads=tuple(uploads or ()),
            filters=with_guard([OutlierFilter()] if filters is None else filters),
            local_epochs=local_epochs,
            client_optimizer=client_optimizer,
            share=list(share) if isinstance(share, list | tuple) else share,
            evaluation=evaluation,
            reporting=reporting,
            seed=seed,
            engine=engine,
        )
        self._epsilon = None if config.privacy is None else PrivacyLoss(config.privacy)
        spent = {} if self._epsilon is None else {"epsilon": self._epsilon}
        self.board = ContributionMetrics({**config.metrics, **spent}, check_names(config.strategies))
        for each in config.filters:
            each.check(personalizer, list(self.board.evaluating))
        self._settings: dict[str, str] = {}
        self._reset()

    def __getattr__(self, name: str) -> Any:
        # Only for what is no attribute: the arguments.
        if name in self._read_only and "config" in vars(self):
            return getattr(self.config, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def replace(self, **changes: Any) -> FederatedLoop:
        """A new loop of the same arguments but for these; those of a loop that is there cannot be set.

        Example:
            >>> FederatedLoop(local_epochs=3).replace(seed=1).local_epochs
            3
        """
        given = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        return type(self)(**{**given, **changes})

    def without_files(self) -> FederatedLoop:
        """The same loop, which writes nothing."""
        return self.replace(reporting=replace(self.reporting, files=False))

    # ---- before the first round

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        check_packages(trainer, pl_module)
        install(trainer, partial(check_checkpoint, trainer, self.state_key, self.check_state))
        if stage != "fit":
            return
        data = check_setup(trainer, pl_module, self.board, self.config)
        check_callbacks(trainer, self.metrics, data.num_clients, self.evaluation.every, self)
        if (boundary := vars(self).get("_boundary")) is not None:
            boundary.close(trainer, self.round_index)
        if trainer.current_epoch == 0:
            self._reset()
            self.board.reset()
        if self._leaves_files(trainer) and trainer.is_global_zero:
            self._lock = FolderLock(run_folder(trainer))
        self._data, self._fitting = data, True
        # Of the objects as the first fit finds them: later they may hold what they have learnt.
        self._settings = self._settings or settings_of(self.config, self.metrics)
        self._fingerprint = fingerprint(self._settings, data)
        self.board.bind(
            data.num_clients, data.num_classes, data.class_names, data.known_class_counts, data.client_names
        )
        check_metric_shapes(self.strategies, self.metrics, data.num_clients, data.num_classes)
        warn_of_noise(self.config.privacy, self.board.update_metrics)
        seed = self._given_seed = os.environ.get("PL_GLOBAL_SEED") if self.seed is None else self.seed
        own = int.from_bytes(os.urandom(4), "little") if seed is None else int(seed)
        self.state.seed = agree(trainer, self._fingerprint, own, self.engine)
        self.state.num_clients = data.num_clients
        if len(self.participations) != data.num_clients:
            self.state.participations, self.state.heard = torch.zeros(2, data.num_clients, dtype=torch.long)
        # limit_train_batches holds per client here, and a fast_dev_run's max_steps would cut the cohort short.
        self._limit = trainer.limit_train_batches
        self._steps = LocalSteps(trainer, data, self.sampler, self.state, self.local_epochs, self._limit)
        self._patches = [
            PatchedAttributes(
                [
                    (trainer, "limit_train_batches", 1.0),
                    (trainer, "reload_dataloaders_every_n_epochs", 1),
                    (trainer.fit_loop.epoch_loop, "max_steps", -1),
                    (data, "round_loader", self._round_loader),
                    round_axis(trainer),
                    *no_placeholder(trainer),
                    *stepping(trainer, self._steps.answer, self._is_last_batch, self._length),
                    *skip_unused_hooks(trainer),
                ]
            )
        ]

    def _round_loader(self) -> CohortLoader | TrainLength:
        """The train dataloader of the coming round, once it can be had."""
        length = self._length()
        return self._running.loader(self._limit) if length is None else length

    def _length(self) -> TrainLength | None:
        """For schedules, which are a client's, and before anybody is drawn: a client's number of batches."""
        return self._steps.length() if self._fit is None or self._steps.configuring else None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = self._data
        self._patches.append(PatchedAttributes([(data, "device_cache", data.reside(trainer))]))
        check_stochastic_averaging(trainer)
        self._finetuning = FinetuningState(trainer)
        self._finetuning.restore(pl_module, self._finetuned)
        initialise_lazy_layers(trainer, data, self.state.seed)
        make = _ENGINES[self.engine] if isinstance(self.engine, str) else self.engine
        if make is OneProcess and ranks_of(trainer).size > 1:
            make = SeveralRanks
        self._fit = fit = make(
            trainer,
            data,
            self.state,
            self._states,
            self.board,
            self.config,
            self._steps,
        )
        if self._asked is not None:
            fit.options.check(self._asked)
            check_sharing(self._shared, fit.space.described())
        self._begin_reports(trainer, fit)
        fit.begin_strategies(resumed=self._resumed or trainer.current_epoch > 0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        fit = self._running
        self._hooks = None if fit.idle else ClientHooks(trainer, lambda: fit.clients.batch_idx)
        if self._asked is not None:
            fit.options.apply(self._asked)
            self._asked = None
        self._patches.append(PatchedAttributes(fit.patches()))
        fit.begin_training(self._optimizer_state, self._buffers)
        self._optimizer_state, self._buffers = None, None
        self._look_at_start(trainer, fit)
        self._boundary = RoundBoundary(trainer)
        self._average = RoundAverage(trainer.callbacks, trainer.max_epochs)  # type: ignore[attr-defined]
        step = no_stop_iteration(trainer.strategy.training_step, self._place)
        weights = global_weights(trainer, fit.within_round)
        changes = [(trainer.strategy, "training_step", step), weights, *self._average.changes]
        self._patches.append(PatchedAttributes(changes))

    # ---- within a round

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # What hooks and validation draw must not depend on how the run got here.
        seed_global_rngs(self.state.seed, "round", self.round_index)
        if why := self._spent():  # a resumed run, or min_epochs
            raise ConfigurationError(f"there is no budget for another round: {why}. Raise max_epsilon, or stop here.")
        self._finetuning.begin_round()
        self._average.begin_round()
        self._running.begin_round(self._running.loader(self._limit))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        clients = self._running.clients
        if clients.begin_batch(batch):
            rounds = f"{self.round_index + 1}/{trainer.max_epochs}"
            assert self._progress is not None
            self._progress.text = {"round": rounds, "client": clients.place}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._running.clients.local.begin_step(optimizer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._hooks is not None:
            self._hooks.end_batch(outputs, batch)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor):
            loss = None
        elif pl_module.automatic_optimization and trainer.accumulate_grad_batches != 1:
            loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it by that
        self._average.end_batch(trainer)
        if self._running.clients.end_batch(loss):
            self._end_round(trainer)
            self._average.end_round(trainer, pl_module)

    def _end_round(self, trainer: L.Trainer) -> None:
        fit, index = self._running, self.round_index
        last, every = index + 1 == trainer.max_epochs, self.evaluation.every
        round = fit.end_round(lambda: bool(every) and (last or (index + 1) % every == 0 or bool(self._spent())))
        if not last and (why := self._spent()):
            last = trainer.should_stop = True
            warnings.warn(f"training stops after {index + 1} rounds: {why}.", stacklevel=2)
        self._report_round(trainer, fit, round)
        fit.advance(last)
        seed_global_rngs(self.state.seed, "server", index)

    def _is_last_batch(self) -> bool | None:
        """Of the client that trains; None between rounds."""
        training = None if self._fit is None else self._fit.training
        return None if training is None else training.local.last_batch

    def _spent(self) -> str | None:
        """Why the privacy budget does not last for another round."""
        return None if self._epsilon is None else self._epsilon.spent()

    # ---- between rounds

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._fitting and not trainer.sanity_checking and self._running.clients.active:
            # Lightning validates before it stops, and the module is a half-trained client.
            self._discard("the epoch ended before the round's last batch")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._running.clients.active:
            if not trainer.should_stop:
                raise RuntimeError(
                    f"the epoch ended before the round's last batch {self._place()}: a hook raised StopIteration, or "
                    "on_train_batch_start returned -1. A federation has no other round to skip to."
                )
            self._discard("the epoch ended before the round's last batch")
            return
        self._boundary.remember()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if said := [text for each in self.filters for text in each.notices.at_the_end()]:
            warnings.warn(f"in the whole run, {'; '.join(said)}.", stacklevel=2)
        self._finish_reports(trainer, self._running)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._fit is not None:
            self._fit.failed(exception, self._place() if self._within_round else where(None, self.round_index))
        if self._within_round:
            name_place(exception, self._place())
            self._discard(f"{type(exception).__name__} {self._place()}")
            with suppress(OSError):  # what went wrong first matters more
                self._record_found()
        self._average.give_back(pl_module)
        if self._progress is not None:
            self._progress.cancel()
        self._return()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._return()

    def _place(self) -> str:
        """Whose turn it is, in words."""
        return where(self._running.clients.client, self.round_index, self._data.client_names)

    def _discard(self, why: str) -> None:
        if self._running.discard():
            warnings.warn(f"round {self.round_index} is discarded: {why}.", stacklevel=2)

    # ---- one fit

    def _reset(self) -> None:
        """As if no round had been run."""
        self.state, self._states = FederationState(), ClientStates()
        self._fit, self._resumed, self._fitting, self._given_seed = None, False, False, None
        self._hooks = None
        self._csv, self._asked, self._optimizer_state, self._buffers = None, None, None, None
        self._fingerprint, self._patches, self._lock, self._progress = {}, [], None, None
        self._shared = None
        self._average, self._finetuning, self._finetuned, self._monitored = (
            RoundAverage(),
            FinetuningState(),
            None,
            set(),
        )

    def _return(self) -> None:
        """Leave the trainer and the module as they were found."""
        self._fitting = False
        for patch in reversed(self._patches):
            patch.give_back()
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self._lock is not None:
            self._lock.release()
        if self._progress is not None:
            self._progress.remove()
        if (reporter := vars(self).get("_reporter")) is not None:
            reporter.close()
        if self._fit is not None:
            self._fit.close()
