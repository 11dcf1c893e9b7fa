"""FederatedLoop: the callback that is the server.

One ``Trainer.fit`` is the whole federation and one epoch is one communication round. The train dataloader of a round
yields the batches of the cohort, one client after the other; the LightningModule is, in turn, every client (with that
client's start point and optimizer state in it) and, between the rounds, the global model, which Lightning validates and
saves.
"""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from flsv._borrow import Borrowed
from flsv._checkpoint import RoundBoundary
from flsv._checks import check_arguments, check_setup, check_space
from flsv._clients import CohortTraining
from flsv._describe import federation, settings
from flsv._metrics import ContributionBoard
from flsv._optimizers import ClientOptimizers
from flsv._participants import Participants
from flsv._server import Server
from flsv._terms import AnchoredTerm
from flsv.aggregation import Aggregator, FedAvg
from flsv.attacks import Attack
from flsv.cohort import CohortLoader
from flsv.data import plot_partition
from flsv.errors import ConfigurationError
from flsv.local import ClientTerm
from flsv.local_artifacts import write_artifacts
from flsv.local_data import Client
from flsv.metrics import ContributionMetric, PrivacyLoss
from flsv.parameters import ParameterSpace
from flsv.personalization import Personalizer
from flsv.privacy import GaussianPrivacy
from flsv.reporting.progress import ProgressText
from flsv.reporting.reporter import Reporter
from flsv.sampling import ClientSampler, FullParticipation
from flsv.seeding import generator_for, seed_global_rngs
from flsv.strategy import Strategy


class FederatedLoop(L.Callback):
    """Trains a LightningModule federated, and measures what every client contributes while it happens.

    Add it to a ``Trainer`` and fit any LightningModule on a :class:`flsv.data.FederatedDataModule`. ``max_epochs`` is
    the number of rounds; ``limit_train_batches`` holds per client and local epoch; gradient accumulation starts anew
    with every client; a scheduler with ``interval="epoch"`` steps once a round, one with ``interval="step"`` belongs to
    the client. Validation sees the global model. A checkpoint always stands between two rounds, and resuming from it
    goes on bit for bit.

    Args:
        aggregator: how the clients' models become the next global one. Default: FedAvg.
        metrics: name to contribution metric; ``loop.metrics[name]`` is the live metric. In Python any torchmetrics
            ``Metric`` will do whose ``update`` names attributes of ``flsv.Round``.
        personalizer: gives clients start points of their own. Default: everyone starts from the global model.
        sampler: draws each round's cohort. Default: every client.
        client_term: a term added to every client's loss, such as ``flsv.local.FedProx``.
        attacks: what malicious clients do to their updates, such as ``flsv.attacks.GradientPoisoning``. The server does
            not know.
        privacy: what every client does to its update before it leaves, and the budget at which the fit stops; adds the
            metric ``"epsilon"``.
        local_epochs: passes over a client's data per round.
        server_lr: the global model moves this share of the way to the aggregate. Buffers (BatchNorm) move all the
            way.
        client_optimizer: ``"reset"`` empties the optimizer's state when a client starts; ``"keep"`` gives every
            client the one it left.
        head: name of the classifier head as in ``module.named_modules()``; by default timm's ``get_classifier()`` or
            the last ``nn.Linear``.
        evaluate_clients_every: rounds between two evaluations of the clients' own models on their own test splits; 0
            for never.
        evaluate_models: which of a client's models that is: ``"received"``, its next start point, or ``"trained"``, the
            one that it trained last (the fine-tuned one).
        log_per_class: log per-class contributions to the loggers too (the CSV always has them).
        figures_every: rounds between two figures of a metric in TensorBoard (and after the last round); 0: none.
        print_table: print a table of the clients at the end.
        seed: what every random choice of the federation derives from. Default: ``seed_everything``'s, else random.

    Attributes:
        round_index: the number of completed rounds, so the index of the current or next one.
        contributions: metric name to its current value, ``[n]`` or ``[n, M]``.
        weights: ``[n]`` weights of the last aggregation, NaN outside its cohort.
        client_accuracy: ``[n]``, the last evaluation of the clients' own models, or None.
        models: client id to the start point ``[P]`` of its next round, where it has one of its own.
        trained: client id to the model ``[P]`` that it trained last; kept where ``keep_trained`` is set, as
            ``evaluate_models="trained"`` does.

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

    round_index: int
    weights: Tensor | None
    client_accuracy: Tensor | None
    models: dict[int, Tensor]
    trained: dict[int, Tensor]
    _seed: int
    _csv: str | None
    _optimizer_state: dict[str, Any] | None
    _loader: CohortLoader | None
    _borrowed: Borrowed
    # There from the start of a fit on.
    _reporter: Reporter
    _progress: ProgressText
    _participants: Participants
    _training: CohortTraining
    _server: Server

    def __init__(
        self,
        aggregator: Aggregator | None = None,
        metrics: dict[str, ContributionMetric] | None = None,
        personalizer: Personalizer | None = None,
        sampler: ClientSampler | None = None,
        client_term: ClientTerm | None = None,
        attacks: list[Attack] | None = None,
        privacy: GaussianPrivacy | None = None,
        local_epochs: int = 1,
        server_lr: float = 1.0,
        client_optimizer: Literal["reset", "keep"] = "reset",
        head: str | None = None,
        evaluate_clients_every: int = 0,
        evaluate_models: Literal["received", "trained"] = "received",
        log_per_class: bool = True,
        figures_every: int = 10,
        print_table: bool = True,
        seed: int | None = None,
    ) -> None:
        self.aggregator = aggregator or FedAvg()
        self.personalizer = personalizer
        self.sampler = sampler or FullParticipation()
        self.client_term = client_term
        self.attacks, self.privacy = attacks or [], privacy
        self._epsilon = None if privacy is None else PrivacyLoss(privacy)
        if self._epsilon is not None and "epsilon" in (metrics or {}):
            raise ConfigurationError(
                'FederatedLoop(privacy=...) adds a metric "epsilon", and there is one of that name: choose another.'
            )
        spent = {} if self._epsilon is None else {"epsilon": self._epsilon}
        self.board = ContributionBoard({**(metrics or {}), **spent})
        self.local_epochs, self.server_lr, self.client_optimizer = local_epochs, server_lr, client_optimizer
        self.head, self.evaluate_clients_every, self.evaluate_models = head, evaluate_clients_every, evaluate_models
        self.log_per_class, self.figures_every, self.print_table = log_per_class, figures_every, print_table
        self.keep_trained = evaluate_models == "trained"
        self.seed = seed
        check_arguments(self)
        self._reset()

    @property
    def metrics(self) -> dict[str, Metric]:
        """The live metrics by name."""
        return self.board.metrics

    @property
    def contributions(self) -> dict[str, Tensor]:
        """The metrics' current values by name."""
        return self.board.contributions

    @property
    def clients(self) -> list[Client]:
        """The clients, by number."""
        return self._participants.clients

    def received(self) -> dict[int, Tensor]:
        """Client id to the model ``[P]`` that it would start the next round from, where that is not the global one.
        Within a fit."""
        return self._server.starts(range(self._data.num_clients), self.space.read(self._training.module))

    @property
    def strategies(self) -> dict[str, Strategy]:
        """The aggregator, personaliser, sampler and client term, where there is one, by role."""
        roles = ("aggregator", "personalizer", "sampler", "client_term")
        return {role: getattr(self, role) for role in roles if getattr(self, role) is not None}

    # ---- before the first round

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._data = check_setup(self, trainer, pl_module)
        if trainer.current_epoch == 0:
            self._reset()
            self.board.reset()
        self._fitting = True
        data = self._data
        self.board.bind(data.num_clients, data.num_classes, data.class_names, data.class_counts)
        seed = os.environ.get("PL_GLOBAL_SEED") if self.seed is None else self.seed
        self._seed = int.from_bytes(os.urandom(4), "little") if seed is None else int(seed)
        # limit_train_batches holds per client here, and a fast_dev_run's max_steps would cut the cohort short.
        self._limit = trainer.limit_train_batches
        self._borrowed = Borrowed(
            [
                (trainer, "limit_train_batches", 1.0 if self._limit else 0),
                (trainer, "reload_dataloaders_every_n_epochs", 1),
                (trainer.fit_loop.epoch_loop, "max_steps", -1),
                (self._data, "round_loader", self._round_loader),
            ]
        )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.space = ParameterSpace(pl_module, self.head)
        check_space(self, self.space, self._data.num_classes)
        self.board.to(pl_module.device)
        self.models = {client: model.to(pl_module.device) for client, model in self.models.items()}
        self.trained = {client: model.to(pl_module.device) for client, model in self.trained.items()}
        self._reporter = Reporter(
            trainer,
            self.metrics,
            self._data.class_names,
            per_class=self.log_per_class,
            figures_every=self.figures_every,
        )
        figure, _ = plot_partition(self._data.class_counts, self._data.class_names)
        self._csv = self._reporter.begin(self.round_index, self._csv, settings(self, self._data, self._seed), figure)
        self._progress = ProgressText(trainer)
        # Before the first cohort is drawn, which the loader of the first round does.
        known = federation(self, pl_module, self._data, self._seed)
        for strategy in self.strategies.values():
            (strategy.resume if self._resumed or trainer.current_epoch else strategy.begin)(known)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        optimizers = ClientOptimizers(trainer, self.client_optimizer, self._optimizer_state)
        self._optimizer_state = None
        self._participants = Participants(
            trainer, self._data, self.space, own_model=lambda client: self._training.own.get(client)
        )
        self._training = CohortTraining(
            trainer,
            self.space,
            optimizers,
            self._seed,
            self._participants,
            list(self.strategies.values()),
            self.attacks,
            self.privacy,
        )
        self._server = Server(self, trainer, self._data, self.space, self._participants)
        self._term = AnchoredTerm(self.client_term, self._training)
        self._boundary = RoundBoundary(trainer)

    def _round_loader(self) -> CohortLoader:
        """The train dataloader of the current round; the data module asks for it, sometimes twice."""
        if self._loader is None or self._loader.round_index != self.round_index:
            draw = generator_for(self._seed, "cohort", self.round_index)
            # As they are now: the metrics are updated before an aggregator asks.
            known = dict(self.contributions)
            self._chances = partial(self.sampler.inclusion_probabilities, self._data.num_clients, known)
            cohort = self.sampler.sample(self._data.num_clients, known, draw).tolist()
            if not cohort:
                raise RuntimeError(f"{self.sampler!r} drew no client for round {self.round_index}.")
            self._loader = CohortLoader(
                self._data,
                cohort,
                seed=self._seed,
                round_index=self.round_index,
                local_epochs=self.local_epochs,
                limit=self._limit,
            )
        return self._loader

    # ---- within a round

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # What hooks and validation draw must not depend on how the run got here.
        seed_global_rngs(self._seed, "round", self.round_index)
        if why := self._spent():  # a resumed run, or min_epochs
            raise ConfigurationError(f"there is no budget for another round: {why}. Raise max_epsilon, or stop here.")
        self._training.begin_round(self._round_loader(), self._server.starts)
        self._term.begin_round()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._training.begin_batch():
            rounds = f"{self.round_index + 1}/{trainer.max_epochs}"
            self._progress.text = {"round": rounds, "client": self._training.place}
            self._term.begin_client()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._term.add_gradients(optimizer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and pl_module.automatic_optimization and trainer.accumulate_grad_batches != 1:
            loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it by that
        if self._training.end_batch(loss, self._data.num_samples):
            self._end_round(trainer)

    def _end_round(self, trainer: L.Trainer) -> None:
        round = self._server.aggregate(self._training.collect(self._chances, self._server.games))
        assert round.server_vector is not None
        assert round.aggregation_weights is not None
        weights = torch.full((self._data.num_clients,), float("nan"))
        weights[round.client_ids.cpu()] = round.aggregation_weights.detach().float().cpu()
        self.weights = weights
        if self.keep_trained:
            self.trained.update({client: model.clone() for client, model in self._training.own.items()})
        last, every = self.round_index + 1 == trainer.max_epochs, self.evaluate_clients_every
        if not last and (why := self._spent()):
            last = trainer.should_stop = True
            warnings.warn(f"training stops after {self.round_index + 1} rounds: {why}.", stacklevel=2)
        evaluated = bool(every) and (last or (self.round_index + 1) % every == 0)
        if evaluated:
            self.client_accuracy = self._server.evaluate_clients(round.server_vector)
        self._training.end_round(round.server_vector)
        self._reporter.round(
            self.round_index,
            self.contributions,
            self.weights,
            losses={} if round.losses is None else dict(zip(round.client_ids.tolist(), round.losses.tolist())),
            accuracy=self.client_accuracy if evaluated else None,
        )
        if self._reporter.figures_due(self.round_index) and self._reporter.csv is not None:
            for client in round.clients or ():
                client.ask(write_artifacts, self._reporter.folder / "clients" / str(client.id), self.round_index)
        seed_global_rngs(self._seed, "server", self.round_index)
        self.round_index += 1

    def _spent(self) -> str | None:
        """Why the privacy budget does not last for another round."""
        return None if self._epsilon is None else self._epsilon.spent()

    # ---- between rounds

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            pl_module.log("step", float(self.round_index - 1))  # Lightning's loggers take it as the x-axis

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._training.active:
            self._discard("the epoch ended before the round's last batch")
            return
        pl_module.log("step", float(self.round_index - 1))
        self._boundary.remember()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.print_table and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._reporter.table(self._data.num_samples, self.contributions, self.weights, self.client_accuracy)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._started and self._training.active:
            self._discard(f"{type(exception).__name__} within the round")
        self._return()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._return()

    def _discard(self, why: str) -> None:
        self._training.discard()
        warnings.warn(f"round {self.round_index} is discarded: {why}.", stacklevel=2)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """All that the next round needs beyond the global model; between two rounds whenever it is asked for."""
        optimizers = self._training.optimizers.state_dict() if self._started else self._optimizer_state
        return {
            "round_index": self.round_index,
            "seed": self._seed,
            "board": self.board.state_dict(),
            "models": dict(self.models),
            "trained": dict(self.trained),
            "weights": self.weights,
            "client_accuracy": self.client_accuracy,
            "optimizers": optimizers,
            "strategies": {role: strategy.state_dict() for role, strategy in self.strategies.items()},
            "csv": self._csv,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._fitting:
            return  # validating, testing or predicting with a checkpoint: only the global model matters
        self.round_index, self._seed = state_dict["round_index"], state_dict["seed"]
        self.board.load_state_dict(state_dict["board"])
        self.models, self.trained = dict(state_dict["models"]), dict(state_dict.get("trained", {}))
        self._resumed = True
        self.weights, self.client_accuracy = state_dict["weights"], state_dict["client_accuracy"]
        self._optimizer_state, self._csv = state_dict["optimizers"], state_dict["csv"]
        for role, strategy in self.strategies.items():
            strategy.load_state_dict(state_dict["strategies"].get(role, {}))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._started and self._training.active:
            self._boundary.rewind(checkpoint, self._training.global_state_dict())
        elif self._started:
            self._boundary.close_epoch(checkpoint)

    # ---- one fit

    def _reset(self) -> None:
        """As if no round had been run."""
        self.round_index = 0
        self.weights, self.client_accuracy, self.models, self.trained = None, None, {}, {}
        self._resumed = False
        self._seed, self._loader, self._csv, self._optimizer_state = 0, None, None, None
        self._borrowed, self._fitting = Borrowed(), False
        for name in ("_reporter", "_progress", "_participants", "_training", "_server"):
            self.__dict__.pop(name, None)

    def _return(self) -> None:
        """Leave the trainer and the module as they were found."""
        self._fitting = False
        self._borrowed.give_back()
        if "_progress" in self.__dict__:
            self._progress.remove()
        if self._started:
            self._training.windows.remove()

    @property
    def _started(self) -> bool:
        return "_training" in self.__dict__
