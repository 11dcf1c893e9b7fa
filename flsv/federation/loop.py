"""FederatedLoop: the callback that runs a federation's server in a Trainer."""
# A fit is the whole federation, and an epoch is a round. The LightningModule holds each client's model in turn and,
# between rounds, the global model.

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import cached_property, partial
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import lightning as L
from torch import Tensor
from torchmetrics import Metric

from flsv._lightning.round_boundary import install_checkpoint_io
from flsv.configuration.federation_config import FederationConfig
from flsv.configuration.identity import Identity, fit_identity, settings_of
from flsv.core import FederationState, Values
from flsv.core.strategy import Strategy
from flsv.federation.lightning_fit import LightningFit
from flsv.federation.reports import current_table, events_of
from flsv.federation.resume import (
    ModelHash,
    check_checkpoint,
    check_rounds,
    check_same_run,
    check_seed,
    check_state,
    model_hash,
    refuse_incomplete,
    requested_seed,
)
from flsv.federation.run import FederationRun, RunState
from flsv.results.round_result import Event, invalid_updates_in
from flsv.server import ContributionMetrics
from flsv.server.checks import check_callbacks, check_names, check_setup, federated_data
from flsv.utilities.arguments import ReadOnlyArguments
from flsv.utilities.declared import checked, with_arguments_of
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.stop_signals import stop_if_signaled

if TYPE_CHECKING:
    import pandas

    from flsv.retraining.coalitions import Coalitions


_ARGUMENT_NAMES = tuple(inspect.signature(FederationConfig).parameters)


class FederatedLoop(ReadOnlyArguments, L.Callback):
    """Callback that trains a LightningModule as a federation and measures contributions.

    Add it to a ``Trainer`` and fit any LightningModule on a :class:`flsv.data.FederatedDataModule`. ``max_epochs`` is
    the number of rounds. ``limit_train_batches`` applies to each client and local epoch. Gradient accumulation ends
    with each of these epochs. Validation uses the global model. A checkpoint always holds the state between two rounds,
    and a resumed run continues bit for bit (on CUDA as far as its kernels are deterministic: ``docs/gpu.md``). Resuming
    with other data, seed, strategies, metrics, attacks or privacy raises an error that names the difference. You may
    change ``max_epochs``, ``server_lr``, ``local_epochs``, options of optimizers that have no scheduler, batch sizes,
    the privacy budget, and everything that is only logged or drawn.

    A scheduler with ``interval="epoch"`` steps once a round. Every client has its own scheduler with
    ``interval="step"``, even if ``training_step`` steps it. ``trainer.estimated_stepping_batches`` is a client's number
    of steps in all rounds that it is drawn in, and ``trainer.is_last_batch`` is true at each client's last batch.

    A Trainer takes one FederatedLoop: of two, it says that their ``state_key`` must be unique.
    Other callbacks, before or after this one in the list, see the global model between rounds.
    ``trainer.callback_metrics`` holds the last contributions, the last aggregation weights and the last scores of the
    clients' own models (``<metric>/client_<i>``, ``weight/client_<i>``, ``.../mean``, ``.../min``, ``.../std``).

    Args:
        aggregator: the aggregator, which makes the next global model from the clients' models. Default: FedAvg.
        metrics: contribution metrics by name, or a ``MetricCollection``. ``loop.metrics[name]`` is the live metric. In
            Python, any torchmetrics ``Metric`` whose ``update`` arguments are named after attributes of ``flsv.Round``.
        personalizer: the personalizer, which gives each client its own initial model. Default: all clients start from
            the global model.
        sampler: the sampler, which draws each round's cohort. Default: every client takes part.
        client_algorithm: changes the clients' training, such as ``flsv.training.algorithms.FedProx``.
        uploads: changes that clients make to their updates before sending them. The order is attacks, which the server
            does not know of, ``flsv.privacy.GaussianPrivacy``, whose budget ends the fit and which adds the metric
            ``"epsilon"``, and compression, such as ``flsv.uploads.TopK``.
        filters: filters that the server applies to a cohort's updates before it measures and averages them, in this
            order, such as ``[OutlierFilter(exclude=True), NormCap(1.25)]``, see :mod:`flsv.filters`. Default: an
            ``OutlierFilter()``, which warns. Updates that are not finite, or swamp the sum numerically, are always
            dropped.
        local_epochs: the number of epochs over a client's data per round, or ``{"Boston": 2, "Lyon": 1}``, by client,
            or ``"100 steps"``, the same number of optimizer steps (with manual optimization, of batches) for every
            client. This does not change the aggregator's weights.
        optimizer_state: ``"reset"`` starts each round with a fresh optimizer, ``"persist"`` restores the client's state
            from its last round.
        share: the parameters and buffers that are shared: ``"all"``, ``"trainable"`` (the parameters that require a
            gradient when the fit begins, and all buffers, as for adapters and LoRA), a list of patterns, such as
            ``["!norm"]`` (FedBN) or ``["!head"]`` (FedPer), see :func:`flsv.core.sharing.sharing`, or a function of a
            name and a tensor. Everything else stays local: each client keeps its own copy for training and evaluation,
            and the global model keeps the initial values.
        evaluation: when the clients' own models are evaluated on their own test splits. Default: never.
        reporting: options of tables, figures and files, see :class:`flsv.Reporting`.
        seed: the seed of every random choice. Default: the seed of ``seed_everything``, else a random seed.
        engine: how clients are trained. ``"sequential"`` trains one after the other, ``"vmap"`` many small clients at
            once, see :class:`flsv.vmap.VmapProcess`. Or a function that returns an engine.

    Raises:
        ConfigurationError: an argument or combination is wrong, before training starts.
        RuntimeError: every client of a round returned a model that is not finite.

    Example:
        >>> from flsv.aggregation import ShapFedWA
        >>> from flsv.metrics import ClassSpecificShapley
        >>> loop = FederatedLoop(aggregator=ShapFedWA("cssv"), metrics={"cssv": ClassSpecificShapley()})
        >>> loop
        FederatedLoop(aggregator=ShapFedWA(), metrics={'cssv': ClassSpecificShapley()}), 0 rounds done
    """

    _remedy_template = "Use loop.replace({0}), which gives a new loop."
    _read_only = frozenset(_ARGUMENT_NAMES)

    @checked
    @with_arguments_of(FederationConfig.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._begin(FederationConfig(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        """Return an argument, an attribute of :attr:`config`. ``metrics``, a property, has the live metrics."""
        if name in _ARGUMENT_NAMES:
            return getattr(self.config, name)
        return self.__getattribute__(name)  # raises the usual error

    def _begin(self, config: FederationConfig) -> None:
        """Set all attributes for a first fit with these settings."""
        self.config = config
        metrics_of_run = {**config.metrics}
        if config.privacy is not None:
            from flsv.metrics.costs import PrivacyLoss

            metrics_of_run["epsilon"] = PrivacyLoss(config.privacy)
        names_read = check_names(config.strategies)
        self.contribution_metrics = ContributionMetrics(metrics_of_run, names_read)
        for update_filter in config.filters:
            update_filter.check(config.personalizer, list(self.contribution_metrics.evaluating))

        self._is_prepared = False
        self._reset()
        vars(self).pop("_described", None)

    @cached_property
    def _described(self) -> dict[str, str]:
        """Return the settings as text, cached because a fit may change them."""
        return settings_of(self.config, self.metrics)

    # The identity of the run of which this loop is a copy. None: it is computed from the samples.
    _identity_of_run: Identity | None = None

    def _reset(self) -> None:
        self._has_rounds_left = True
        self.state = FederationState()
        self.run_state = RunState()
        self._lightning_fit: LightningFit | None = None
        self._last_model: ModelHash | None = None
        self._coalitions = self._trained_coalitions()

    def _trained_coalitions(self) -> Coalitions | None:
        """Return the plan for training coalitions, if a metric needs them."""
        if not self.contribution_metrics.trained_names:
            return None
        from flsv.retraining.coalitions import Coalitions  # slow

        return Coalitions(self.config, self.contribution_metrics)

    def replace(self, **changes: Any) -> FederatedLoop:
        """Make a new loop with some arguments changed.

        The arguments of an existing loop cannot be set. Metrics, strategies, uploads and filters are copied, so that
        the loops share no state.

        Args:
            **changes: new values of arguments, by name.

        Example:
            >>> FederatedLoop(local_epochs=3).replace(seed=1).local_epochs
            3
        """
        arguments = {}
        functions = {}
        for name in _ARGUMENT_NAMES:
            if name in changes:
                continue
            if name in ("engine", "share"):  # functions are not copied
                functions[name] = getattr(self.config, name)
            else:
                arguments[name] = getattr(self.config, name)
        copied_arguments = copy.deepcopy(arguments)  # at once: arguments may share objects
        return type(self)(**copied_arguments, **functions, **changes)

    def set_arguments(self, **changes: Any) -> None:
        """Change arguments before the first fit, where callbacks and modules refer to this loop. Otherwise use
        :meth:`replace`.
        """
        self._begin(self.replace(**changes).config)

    def set_arguments_of_copy(self, **changes: Any) -> None:
        """Change arguments of a copy of a run's loop before its fit. It keeps the run's identity, for which all samples
        would be hashed again.
        """
        identity = self.run_state.identity
        self.set_arguments(**changes)
        self._identity_of_run = identity

    # ---- Lightning's hooks

    def prepare(self, trainer: L.Trainer) -> None:
        """Check a federation before the ``setup`` of any callback. The data module calls this when it is set up.

        Raises:
            ConfigurationError: trainer, module, data and settings are not compatible.
        """
        is_fitting = self._lightning_fit is not None and self._lightning_fit.is_fitting
        if self._is_prepared or is_fitting:
            return  # a callback sets up the data again
        self._is_prepared = True
        self._has_rounds_left = True
        module = trainer.lightning_module
        data = check_setup(trainer, module, self.contribution_metrics, self.config)
        check_callbacks(trainer, self)

        identity = self._identity_of_run or fit_identity(self._described, data)
        is_new_run = trainer.current_epoch == 0
        if is_new_run:
            self._reset()
            self.contribution_metrics.reset()
        elif trainer.ckpt_path is None:  # a checkpoint is compared when it is read
            self._go_on(trainer, module, identity)
            awaits_coalitions = self._coalitions is not None and self._coalitions.awaits_training
            if self.round_index == trainer.max_epochs and not awaits_coalitions:
                self._has_rounds_left = False  # Lightning does not run a round, either
                return
        self.run_state.identity = identity
        if self._coalitions is not None:
            self._coalitions.prepare(trainer, module)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        check_saved = partial(check_checkpoint, trainer, self.state_key, self.check_state)
        install_checkpoint_io(trainer, check_saved)
        if stage != "fit":
            return

        data = federated_data(trainer)
        self.prepare(trainer)  # has no effect if the data module has called it
        self._is_prepared = False
        if not self._has_rounds_left:
            return
        self._lightning_fit = LightningFit(
            trainer=trainer,
            data=data,
            config=self.config,
            metrics=self.contribution_metrics,
            state=self.state,
            run_state=self.run_state,
            coalitions=self._coalitions,
        )
        self._lightning_fit.set_up()

    def _go_on(self, trainer: L.Trainer, module: L.LightningModule, identity: Identity) -> None:
        """Begin a further fit of the Trainer, which continues the run of the last fit."""
        check_rounds(trainer, self.round_index)
        check_seed(requested_seed(self.config.seed), self.state.seed)
        assert self._last_model is not None  # from the last fit
        check_same_run(identity, self.run_state.identity, module, self._last_model)
        last_federation = self._fit.federation
        last_engine = None if last_federation is None else last_federation.engine
        self.run_state = self.run_state.copy(last_engine)
        self.run_state.resumed = True

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._fit.is_fitting:
            self.run_state.find_table(trainer.ckpt_path, self.state.seed)
            self._fit.start(pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._fit.begin_training(pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._lightning_fit is not None and not trainer.sanity_checking:
            self._lightning_fit.begin_validation()

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        stop_if_signaled()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._lightning_fit is not None and not trainer.sanity_checking:
            self._lightning_fit.end_validation()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._fit.is_fitting:
            self._fit.end()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self._lightning_fit is not None and self._lightning_fit.is_fitting:
            self._lightning_fit.fail(pl_module, exception)
            self._hash_model(pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._lightning_fit is not None and self._lightning_fit.is_fitting:
            self._lightning_fit.tear_down(pl_module)
            self._hash_model(pl_module)

    def _hash_model(self, module: L.LightningModule) -> None:
        federation = self._fit.federation
        is_copy = self._identity_of_run is not None  # it is not fitted again
        if federation is not None and not is_copy:
            self._last_model = model_hash(module, federation.space.names)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next round needs, except the global model."""
        if self._lightning_fit is None:
            state_of_run = self.run_state.state_dict()
        else:
            state_of_run = self._lightning_fit.checkpoint_state()
        return {
            **self.state.state_dict(),
            **state_of_run,
            **self.config.state_dict(),
            "metrics": self.contribution_metrics.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._lightning_fit is None or not self._lightning_fit.is_fitting:
            return  # to validate, test or predict, only the global model is loaded
        self.check_state(state_dict)
        with refuse_incomplete():
            self.state.load_state_dict(state_dict)
            self.run_state.load_state_dict(state_dict)
            self.contribution_metrics.load_state_dict(state_dict["metrics"])
            self.config.load_state_dict(state_dict)

    def check_state(self, state_dict: dict[str, Any], max_epochs: int | None = None) -> None:
        """Check that this fit can resume from a saved ``state_dict`` of a loop.

        Raises:
            ConfigurationError: the fit cannot resume. The message names the difference.
        """
        seed = None
        if self._lightning_fit is not None:
            seed = self._lightning_fit.requested_seed
        check_state(state_dict, self.run_state.identity, seed, max_epochs=max_epochs)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # A wrapped data module's hyper-parameters are not arguments of FederatedDataModule, and may be unsafe to load.
        checkpoint.pop(L.LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY, None)
        if self._lightning_fit is not None:
            self._lightning_fit.rewind(checkpoint)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the present fit, its trainer and data."""
        engine = None
        if self._lightning_fit is not None and self._lightning_fit.federation is not None:
            engine = self._lightning_fit.federation.engine
        return {
            **vars(self),
            # Lightning sets `log` and `log_dict` to the module's methods.
            "log": None,
            "log_dict": None,
            "run_state": self.run_state.copy(engine),
            "_lightning_fit": None,
            "_last_model": None,
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config.text}), {self.round_index} rounds done"

    # ---- results and state

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics that the loop updates, by name."""
        return MappingProxyType(self.contribution_metrics.metrics)

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """Return the loop's strategies (aggregator, personalizer, sampler, client algorithm) by role."""
        return self.config.strategies

    @property
    def contributions(self) -> dict[str, Tensor]:
        """Return the metrics' current values ``[n]`` by the metric's name. :attr:`values` has those by class, too."""
        return {name: values.overall for name, values in self.values.items()}

    @property
    def values(self) -> Mapping[str, Values]:
        """Return the metrics' current values by name, with their intervals, values per class, and the reason why there
        are none: see :class:`flsv.core.Values`."""
        return MappingProxyType(self.contribution_metrics.values)

    @property
    def round_index(self) -> int:
        """Return the number of completed rounds, the index of the current or next one."""
        return self.state.round_index

    @property
    def weights(self) -> Tensor | None:
        """Return the clients' last aggregation weights ``[n]``, NaN outside the cohort. None before the first round."""
        return self.state.weights

    @property
    def participations(self) -> Tensor:
        """Return the number of rounds that included each client's update, int64 ``[n]``."""
        return self.state.participations

    @property
    def client_scores(self) -> dict[str, Tensor]:
        """Return the last scores ``[n]`` of the clients' own models by name, such as ``"accuracy"``."""
        return self.state.client_scores

    @property
    def run(self) -> FederationRun:
        """Return the run of the last fit, with ``clients``, ``channel``, ``space``, ``state`` and ``server``."""
        return self._fit.running

    clients = property(attrgetter("run.clients"))
    channel = property(attrgetter("run.channel"))
    space = property(attrgetter("run.space"))
    trained = property(attrgetter("state.trained"), doc="See :class:`flsv.core.FederationState`.")

    @property
    def events(self) -> list[Event]:
        """Return one event per client and kind of failure, with the number of times."""
        return events_of(self.state)

    @property
    def named(self) -> dict[int, tuple[int, int]]:
        """Return ``{client: (faulty, sent)}``, numbers of rounds, for the clients with faulty updates. An update is
        faulty if it is not finite or far too large. ``sent`` counts all updates."""
        return invalid_updates_in(self.events)

    @property
    def current_client(self) -> int | None:
        """Return the id of the client that trains now, if any."""
        if self._lightning_fit is None:
            return None
        return self._lightning_fit.current_client

    def received(self) -> dict[int, Tensor]:
        """Return ``{client id: model [P]}`` of clients with an initial model other than the global one."""
        return self.run.received()

    def to_frame(self) -> pandas.DataFrame:
        """Return the current values, weights and scores as a tidy DataFrame. It has the columns of
        :func:`flsv.read_run`. :meth:`history` returns all rounds.
        """
        client_names = None
        if self._lightning_fit is not None:
            client_names = self._lightning_fit.data.client_names
        return current_table(self.contribution_metrics, self.state, client_names)

    def history(self) -> pandas.DataFrame:
        """Return the values of all rounds, as :func:`flsv.read_run` does.

        Raises:
            ConfigurationError: the fit has written no files.
        """
        if self.run_state.csv is None:
            raise ConfigurationError(
                "loop.history() reads contributions.csv, which this fit has not written. Set default_root_dir or a "
                "logger of the Trainer, and keep Reporting(files=True)."
            )
        from flsv.results import read_run  # pandas is slow to import

        return read_run(self.run_state.csv)

    @property
    def _fit(self) -> LightningFit:
        if self._lightning_fit is None:
            raise RuntimeError(
                "this is available only after a fit has started. Call trainer.fit first."
            )
        return self._lightning_fit
