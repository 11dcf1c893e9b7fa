"""FederationRun and RunState: one run of a federation, and the state of its parts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import Tensor

from flsv._lightning.fit_loop import Phase
from flsv.configuration.federation_config import FederationConfig
from flsv.configuration.identity import Identity
from flsv.core import VOCABULARY, FederationState, Instruction, Round, Split
from flsv.core.needs import reads_of
from flsv.core.sharing import warn_of_sharing
from flsv.core.state import GLOBAL_MODEL
from flsv.core.strategy import FederationInfo
from flsv.engines.engine import Engine
from flsv.results.folder import CONTRIBUTIONS, RECORD
from flsv.results.record import read_record
from flsv.results.round_result import ALL_DIVERGED, NO_UPDATE
from flsv.sampling.base import checked_probabilities, draw_cohort
from flsv.scores.performance import ACCURACY, measure_of
from flsv.server.checks import check_head_is_trained, check_space
from flsv.server.contribution_metrics import ContributionMetrics
from flsv.server.round_server import NoModel, RoundServer
from flsv.training.store import ClientStore
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.formats import CHECKPOINT_FORMAT, package_versions
from flsv.utilities.host_copies import on_host
from flsv.utilities.seeding import seed_global_rngs

if TYPE_CHECKING:
    from flsv.metrics import PrivacyLoss


class FederationRun:
    """One run of a federation: its configuration, metrics, state, server and clients."""

    def __init__(
        self,
        config: FederationConfig,
        metrics: ContributionMetrics,
        state: FederationState,
        engine: Engine,
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.state = state
        self.engine = engine
        self.has_evaluated_clients = False
        # Descriptions of how copies and coalitions differ from the run, which are consistency warnings.
        self.coalition_differences: list[str] = []
        self.space = engine.space
        self.clients = engine.manager.clients
        self.channel = engine.manager.channel

        module = engine.trainer.lightning_module
        self._check_parts()
        metrics.to(module.device)
        state.to(module.device)
        state.global_vector = self.space.read(module)
        self.server = RoundServer(
            metrics=metrics,
            strategies=config.strategies,
            space=self.space,
            channel=self.channel,
            filters=config.filters,
        )

    def _check_parts(self) -> None:
        config = self.config
        module = self.engine.trainer.lightning_module
        check_space(
            self.space,
            self.metrics,
            config.uploads,
            head=config.head,
            num_classes=self.engine.data.known_num_classes,
        )
        warn_of_sharing(self.space, module, bool(config.evaluation.every))
        self.engine.check(self.metrics.fields, self.metrics.evaluating)

    # ---- before the first round

    def info(self) -> FederationInfo:
        """Return the description of the federation that strategies get before the first round."""
        config = self.config
        data = self.engine.data
        split_sizes = {}
        for split in get_args(Split):
            counts = [len(data.client_indices(client, split)) for client in range(data.num_clients)]
            split_sizes[split] = torch.tensor(counts)
        return FederationInfo(
            global_vector=self.state.model(),
            space=self.space,
            num_clients=data.num_clients,
            num_classes=data.num_classes,
            split_sizes=split_sizes,
            seed=self.state.seed,
            optimizers=self.engine.trainer.optimizers,
            strategies=config.strategies,
            local_epochs=min(config.work_of(name).epochs for name in data.client_names),
            uploads=config.uploads,
            client_names=data.client_names,
            metrics=self.metrics.metrics,
            filters=config.filters,
        )

    def begin(self, resumed: bool) -> None:
        """Begin or resume the strategies and filters, and draw the first cohort."""
        info = self.info()
        for part in (*self.config.strategies.values(), *self.server.filters):
            part.set_up(info)
            if resumed:
                part.resume(info)
            else:
                part.begin(info)

        self._priors = self.metrics.with_priors()
        # A checkpoint holds the next round's cohort, so it is drawn before a checkpoint is saved. A sampler that sends
        # requests to clients draws when the round begins.
        if not self.state.cohort and not self.config.sampler.sends_requests:
            self.draw_cohort()

    def begin_training(self, buffers: dict[str, Any] | None) -> None:
        """Prepare coalitions' evaluations and clients' training, after optimizers are set up. ``buffers`` are a
        checkpoint's counters and masks."""
        self.make_games()
        self.engine.begin_training(buffers)

    def make_games(self) -> None:
        """Make the coalition games in which metrics evaluate models, and test their evaluators."""
        measures = dict(self.metrics.performances)
        for role, strategy in self.config.strategies.items():
            # A strategy may also read utilities of coalitions.
            needs_utilities = any(VOCABULARY[name].needs_utilities for name in reads_of(strategy))
            if needs_utilities:
                measures[f"{role} {strategy!r}"] = measure_of(strategy) or ACCURACY

        games = self.engine.games(measures, self.metrics.evaluating)
        if games is not None:
            self.server.bind_games(games)

    def draw_cohort(self) -> None:
        """Draw the cohort of the next round, before its batches are made."""
        state = self.state
        # The values are stored, since metrics are updated before an aggregator needs this cohort's probabilities.
        self._priors = self.metrics.with_priors()
        num_earlier_messages = len(self.channel.messages)
        state.cohort = draw_cohort(self.config.sampler, state, self._priors, self.clients)
        # Messages of the draw are counted in the coming round, and saved in the checkpoint before that round.
        state.pending_traffic = self.channel.pop_since(num_earlier_messages)

    def loader(self) -> Iterable[Any]:
        if not self.state.cohort:
            self.draw_cohort()
        return self.engine.loader()

    # ---- a round

    def begin_round(self) -> None:
        """Seed the random numbers, and store the global model."""
        seed_global_rngs(self.state.seed, "round", self.state.round_index)
        self.engine.local_training.state.remember()

    def run_round(self, write_round: Callable[[Round], None]) -> bool:
        """Run a round, pass it to ``write_round``, and return whether it is complete."""
        instructions = self._instruct_cohort()

        # The engine trains clients one after the other, many at once, on ranks or at sites.
        if not self.engine.train(instructions):
            return False

        try:
            received_round = self._receive(instructions)
        except NoModel as error:
            self._pass_over(error)
        else:
            round = self._finish(received_round)  # metrics, aggregation, personalization
            write_round(round)
        self._complete()
        return True

    def _instruct_cohort(self) -> dict[int, Instruction]:
        state = self.state
        why_spent = self.why_budget_is_spent()
        if why_spent:  # a resumed run, or min_epochs
            raise ConfigurationError(
                f"the privacy budget does not allow another round: {why_spent}. Raise max_epsilon, or end the run."
            )
        state.global_vector = self.engine.local_training.state.begin_round()
        instructions = self._instruct(state.cohort)
        if any(upload.reference == "global" for upload in self.config.uploads):
            self._add_global_model(instructions)
        return instructions

    def _add_global_model(self, instructions: dict[int, Instruction]) -> None:
        """Send the global model to the clients that start from another one, in place."""
        model = self.state.model()
        for client, instruction in instructions.items():
            if instruction.start is not model:
                tensors = {**instruction.tensors, GLOBAL_MODEL: model}
                instructions[client] = replace(instruction, tensors=tensors)

    def _receive(self, instructions: dict[int, Instruction]) -> Round:
        """Pass the cohort's updates to the server, and return its view of the round."""
        engine = self.engine
        engine.loop.phase = Phase.SERVER
        self._count_messages(instructions)
        with self._warnings_once():
            round = self.server.receive(
                updates=engine.updates,
                matrix=engine.matrix,
                instructions=instructions,
                state=self.state,
                clients=self.clients,
                server_data=engine.manager.server,
                drawing_probabilities=self._drawing_probabilities(),
                broken=engine.broken_clients,
            )
        self._note_failures()
        # Attacks and compression may send a head that is not the trained one.
        is_head_sent = self.metrics.head_metrics and not self.config.uploads
        if self.state.round_index == 0 and is_head_sent:
            check_head_is_trained(round, self.metrics.head_metrics)
        senders = {update.client_id for update in engine.updates}
        refused_senders = senders.difference(on_host(round.client_ids))
        engine.exclude(refused_senders)
        return round

    def _note_failures(self) -> None:
        """Record the failures that filters have counted in the round."""
        times_noted = {
            (incident["client"], incident["what"]): incident["times"]
            for incident in self.state.incidents
        }
        for update_filter in self.server.filters:
            for failure, times_by_client in update_filter.notices.state_dict().items():
                for client, times in times_by_client.items():
                    if times > times_noted.get((client, failure), 0):
                        self.state.note(client, failure)

    def _count_messages(self, instructions: dict[int, Instruction]) -> None:
        """Count the messages of the cohort's draw, and the instructions of clients that have trained."""
        trained_clients = self.engine.clients_that_trained
        trained_instructions = {
            client: instruction
            for client, instruction in instructions.items()
            if client in trained_clients
        }
        self.server.send(trained_instructions)
        self.channel.prepend(self.state.pending_traffic)

    def _drawing_probabilities(self) -> Callable[[], Tensor]:
        """Return a function that computes each client's probability ``[n]`` to be drawn."""
        state = self.state
        return partial(
            checked_probabilities,
            self.config.sampler,
            state.num_clients,
            contributions=self._priors,
            round_index=state.round_index,
            cohort=state.cohort,
        )

    def _pass_over(self, reason: NoModel) -> None:
        """Keep the model in a round without updates. Raise NoModel if all clients that could be drawn have failed
        since the last update.
        """
        state = self.state
        engine = self.engine
        self._note_failures()
        self._add_failed_cohort(reason)
        state.note(client=None, failure=NO_UPDATE)
        for client in engine.broken_clients:
            state.note(client, ALL_DIVERGED)
        with self._warnings_once():
            warnings.warn(
                f"{reason} The global model does not change, and other clients are drawn next.",
                stacklevel=2,
            )
        senders = [update.client_id for update in engine.updates]
        state.updates_received[[*engine.broken_clients, *senders]] += 1
        self.has_evaluated_clients = False
        engine.exclude(senders)
        engine.end_round(state.model())

    def _add_failed_cohort(self, reason: NoModel) -> None:
        """Add the cohort to the clients that have failed since the last update. Raise NoModel if these are all."""
        failed_clients = {*self.state.failed, *self.state.cohort}
        if self.config.sampler.draws_only(failed_clients, self.state.num_clients):
            raise NoModel(
                f"{reason} All clients that could be drawn have failed. Fix these clients, and resume the run from its "
                "last checkpoint."
            ) from reason
        self.state.failed = sorted(failed_clients)

    def _finish(self, round: Round) -> Round:
        """Compute metrics and the aggregate, and write the next global model into the module."""
        state = self.state
        engine = self.engine
        with self._warnings_once():
            clients_with_updates = [update.client_id for update in engine.updates]
            round = self.server.finish(round, state)
            state.complete(round, [*engine.broken_clients, *clients_with_updates])
            self._evaluate_clients()
        engine.agree(round, state.model(), self.metrics.contributions)
        engine.end_round(state.model())
        return round

    def _evaluate_clients(self) -> None:
        """Keep and score the clients' own models in the configured rounds."""
        evaluation = self.config.evaluation
        state = self.state
        if evaluation.keeps:
            for client, model in self.engine.trained_models().items():
                state.trained[client] = model.clone()

        num_rounds = state.round_index + 1
        self.has_evaluated_clients = evaluation.every > 0 and (
            self._is_last_round() or num_rounds % evaluation.every == 0
        )
        if self.has_evaluated_clients:
            state.client_scores = self.engine.own_scores(self._instruct)

    def end_run(self) -> bool:
        """Evaluate clients' own models after the run's last round, unless the round has done so. Return whether they
        are evaluated now.
        """
        evaluates_clients = self.config.evaluation.every and self.engine.has_begun
        has_trained = self.state.round_index > 0
        if not evaluates_clients or not has_trained:
            return False
        if self.has_evaluated_clients:
            return False

        self.state.client_scores = self.engine.own_scores(self._instruct)
        return True

    def _complete(self) -> None:
        """Commit the clients' states, and draw the next round's cohort."""
        ended_round = self.state.round_index
        is_last = self._is_last_round()
        # Clients' states are stored first, since the draw may send requests, to which clients respond with this state.
        self.engine.commit()
        self.state.round_index += 1
        self.engine.loop.phase = Phase.BETWEEN_ROUNDS  # even if the next cohort cannot be drawn
        self.state.cohort = []
        if not is_last:
            self.draw_cohort()
        # Clients' states are exchanged after the draw, in which requests may have changed them. The draw may also have
        # used random numbers.
        self.engine.settle()
        seed_global_rngs(self.state.seed, "server", ended_round)

    def _is_last_round(self) -> bool:
        num_rounds = self.state.round_index + 1
        return num_rounds == self.engine.trainer.max_epochs or bool(self.why_budget_is_spent())

    def why_budget_is_spent(self) -> str | None:
        """Return why the privacy budget does not allow another round, or None."""
        if self.config.privacy is None:
            return None
        # The loop has added the metric with this reserved name.
        privacy_loss = cast("PrivacyLoss", self.metrics.metrics["epsilon"])
        return privacy_loss.spent()

    def received(self) -> dict[int, Tensor]:
        return self.engine.received_models(self._instruct)

    def _instruct(self, clients: Sequence[int]) -> dict[int, Instruction]:
        return self.server.instruct(clients, self.state)

    @contextmanager
    def _warnings_once(self) -> Iterator[None]:
        """Show warnings on the first rank only, within this context."""
        with warnings.catch_warnings():
            if self.engine.ranks.rank:
                warnings.simplefilter("ignore")
            yield


#: Attributes of a :class:`RunState` that a checkpoint stores as they are.
_SAVED = (
    "buffers",
    "configured_options",
    "shared",
    "csv",
    "changeable",
    "changes",
    "coalitions",
)


@dataclass
class RunState:
    """State of federation, clients, optimizers and files that the next round needs."""

    store: ClientStore = field(default_factory=ClientStore)
    buffers: dict[str, Any] | None = None
    configured_options: dict[str, Any] | None = None
    shared: dict[str, str] | None = None
    csv: str | None = None
    identity: Identity = field(default_factory=lambda: Identity({}, {}))
    resumed: bool = False
    #: Settings that may change when the run is resumed, `{name: text}`.
    changeable: dict[str, str] = field(default_factory=dict)
    #: Descriptions of those that have changed in the course of the run.
    changes: list[str] = field(default_factory=list)
    #: State of the training of coalitions, see :class:`flsv.retraining.measured_run.MeasuredRun`.
    coalitions: dict[str, Any] = field(default_factory=dict)

    def state_dict(self, engine: Engine | None = None) -> dict[str, Any]:
        # Without an engine, or before it has begun, the checkpoint repeats the loaded state.
        state = {name: copy.copy(getattr(self, name)) for name in _SAVED}
        state["identity"] = self.identity.plain()
        state["format"] = CHECKPOINT_FORMAT
        state["versions"] = package_versions()
        if engine is not None:
            state["configured_options"] = engine.options.configured_options
            state["shared"] = engine.space.described()

        if engine is not None and engine.has_begun:
            state["clients"] = engine.client_states()
            state["buffers"] = engine.local_training.state.buffers()
        else:
            state["clients"] = self.store.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load everything except the fingerprint of data and settings, which is that of the present fit."""
        self.store.load_state_dict(state["clients"])
        for name in _SAVED:
            setattr(self, name, copy.copy(state[name]))
        self.resumed = True

    def note_changes(
        self, settings: dict[str, str], changes_of_optimizers: Sequence[str], round_index: int
    ) -> None:
        """Add the settings that change from round ``round_index`` on to :attr:`changes`."""
        earlier_settings = self.changeable or settings  # a new run has none yet
        earlier_identity = Identity(earlier_settings, {})
        changes_of_settings = Identity(settings, {}).other_settings(earlier_identity)
        for change in [*changes_of_optimizers, *changes_of_settings]:
            self.changes.append(f"{change}, from round {round_index + 1} on")
        self.changeable = settings

    def find_table(self, checkpoint: str | Path | None, seed: int) -> None:
        """Set :attr:`csv` to the table of the resumed run: next to its checkpoint, else at the recorded path."""
        if self.csv is None or checkpoint is None:
            return
        run_folder = Path(checkpoint).resolve().parent.parent
        table_by_checkpoint = run_folder / CONTRIBUTIONS  # the run's folder may have been moved
        recorded_table = Path(self.csv)
        for table in (table_by_checkpoint, recorded_table):
            if table.is_file() and self._is_of_this_run(table.parent, seed):
                self.csv = str(table)
                return
        if table_by_checkpoint.is_file():  # the table of another run
            raise ConfigurationError(
                f"{run_folder} holds the results of another run than the one that saved {checkpoint}. Move the "
                "checkpoint into an empty folder, or resume from a checkpoint of the run in this folder."
            )
        self.csv = str(table_by_checkpoint)  # a new table

    def _is_of_this_run(self, folder: Path, seed: int) -> bool:
        if not (folder / RECORD).is_file():
            return False
        record = read_record(folder / RECORD)
        identity = Identity(record["fingerprint"], record["hashes"])
        recorded_seed = record["settings"]["federation_seed"]
        return identity == self.identity and recorded_seed == seed

    def copy(self, engine: Engine | None) -> RunState:
        """Copy this state, with the clients' present states in ``engine``, if it is not None."""
        copied = RunState()
        copied.load_state_dict(self.state_dict(engine))
        copied.identity = self.identity
        copied.resumed = self.resumed
        return copied
