"""FederationRun and RunState: one run of a federation, and the state of its parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from flsv.configuration.federation_config import FederationConfig
from flsv.configuration.identity import Identity
from flsv.core import VOCABULARY, FederationState, Instruction, Round
from flsv.core.needs import reads_of
from flsv.core.parameter_space import warn_of_sharing
from flsv.core.state import GLOBAL_MODEL
from flsv.core.strategy import FederationInfo
from flsv.engines.engine import Engine
from flsv.games.lent_module import lent
from flsv.metrics import PrivacyLoss
from flsv.results.folder import CONTRIBUTIONS, RECORD
from flsv.results.record import read_record
from flsv.sampling.base import chances_of, cohort_of
from flsv.server.checks import check_space
from flsv.server.contribution_metrics import ContributionMetrics
from flsv.server.round_server import RoundServer
from flsv.training.store import ClientStore
from flsv.utilities.arguments import attribute_of
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.formats import CHECKPOINT_FORMAT, package_versions
from flsv.utilities.host_copies import on_host
from flsv.utilities.seeding import generator_for, seed_global_rngs


class FederationRun:
    """One run of a federation: its configuration, metrics, state, server and clients."""

    def __init__(
        self,
        config: FederationConfig,
        metrics: ContributionMetrics,
        state: FederationState,
        engine: Engine,
        rounds: int | None,
    ) -> None:
        self.config, self.metrics, self.state, self.engine, self.rounds = (
            config,
            metrics,
            state,
            engine,
            rounds,
        )
        self.evaluated = self.at_server = False
        module, data, self.space = engine.trainer.lightning_module, engine.data, engine.space
        self.clients, self.channel, space = (
            engine.manager.clients,
            engine.manager.channel,
            engine.space,
        )
        num_classes = data.num_classes if data.no_classes is None else None
        check_space(space, metrics, config.uploads, config.head, num_classes)
        warn_of_sharing(space, module, bool(config.evaluation.every))
        engine.check(metrics.fields, metrics.evaluating)
        metrics.to(module.device)
        state.to(module.device)
        state.global_vector = space.read(module)
        self.server = RoundServer(metrics, config.strategies, space, self.channel, config.filters)

    # ---- before the first round

    def info(self) -> FederationInfo:
        """Return the description of the federation that strategies get before the first round."""
        engine, state = self.engine, self.state
        given = (
            state.model(),
            engine.space,
            engine.data,
            state.seed,
            engine.trainer.optimizers,
            self.metrics.metrics,
        )
        return self.config.federation_info(*given)

    def begin(self, resumed: bool) -> None:
        """Begin or resume the strategies and filters, and draw the first cohort."""
        info = self.info()
        for part in (*self.config.strategies.values(), *self.server.filters):
            if resumed:
                part.resume(info)
            else:
                part.begin(info)
        self._priors = self.metrics.with_priors()
        # A checkpoint holds the next cohort; a sampler that needs clients' answers draws later.
        if not self.state.cohort and not self.config.sampler.asks:
            self.draw_cohort()

    def begin_training(self, buffers: dict[str, Any] | None) -> None:
        """Prepare coalitions' evaluations and clients' training, after optimizers are set up. ``buffers`` are a
        checkpoint's counters and masks."""
        self.make_games()
        self.engine.begin_training(buffers)

    def make_games(self) -> None:
        """Make the coalition games in which metrics evaluate models, and try their evaluators."""
        measures = dict(self.metrics.performances)
        for role, strategy in self.config.strategies.items():
            if any(VOCABULARY[name].plays for name in reads_of(strategy)):
                measures[f"{role} {strategy!r}"] = attribute_of(strategy, "measured_by", "accuracy")

        games = self.engine.games(measures, self.metrics.evaluating)
        if games is not None:
            self.server.bind_games(games)

    def draw_cohort(self) -> None:
        """Draw the cohort of the next round, before its batches are made."""
        state, sampler = self.state, self.config.sampler
        # The values are stored: metrics are updated before an aggregator needs this cohort's probability.
        self._priors = self.metrics.with_priors()
        draw = generator_for(state.seed, "cohort", state.round_index)
        before = len(self.channel.messages)
        state.cohort = cohort_of(
            sampler,
            state.num_clients,
            self._priors,
            draw,
            state.round_index,
            self.clients,
            state.model(),
        )
        # Messages of the draw are counted in the coming round, and saved in the checkpoint before that round.
        state.pending_traffic = self.channel.pop_since(before)

    def loader(self) -> Iterable[Any]:
        if not self.state.cohort:
            self.draw_cohort()
        return self.engine.loader()

    # ---- a round

    def remember(self) -> None:
        """Seed the random numbers, and store the global model."""
        seed_global_rngs(self.state.seed, "round", self.state.round_index)
        self.engine.local_training.state.remember()

    def round(self, write: Callable[[Round], None], last: bool) -> bool:
        """Run a round, pass it to ``write``, and return whether it is complete."""
        instructions = self._instruct_cohort()

        # One after the other, many at once, on ranks or at sites.
        if not self.engine.train(instructions):
            return False

        round = self._receive(instructions)
        round = self._finish(round)  # metrics, aggregation, personalization
        write(round)
        self._complete(last or self.spent() is not None)
        return True

    def _instruct_cohort(self) -> dict[int, Instruction]:
        state = self.state
        if why := self.spent():  # a resumed run, or min_epochs
            raise ConfigurationError(
                f"there is no budget for another round: {why}. Raise max_epsilon, or stop here."
            )
        self.engine.local_training.state.begin_round()
        state.global_vector = self.engine.global_vector
        instructions, model = self._instruct(state.cohort), state.model()
        if any(upload.reference == "global" for upload in self.config.uploads):
            for client, told in instructions.items():
                if told.start is not model:
                    instructions[client] = replace(
                        told, tensors={**told.tensors, GLOBAL_MODEL: model}
                    )
        return instructions

    def _receive(self, instructions: dict[int, Instruction]) -> Round:
        """Pass the cohort's updates to the server, and return its view of the round."""
        state, engine, self.at_server = self.state, self.engine, True
        sampler, index = self.config.sampler, state.round_index
        # A function, which computes each client's probability [n] to be drawn.
        chances = partial(chances_of, sampler, state.num_clients, self._priors, index, state.cohort)
        self.server.send(
            {client: told for client, told in instructions.items() if client in engine.heard}
        )
        self.channel.prepend(state.pending_traffic)  # the messages of the cohort's draw
        with self._warnings_once():
            round = self.server.receive(
                engine.updates,
                engine.matrix,
                instructions,
                state,
                self.clients,
                engine.manager.server,
                chances,
                engine.broken,
            )
        sent = {update.client_id for update in engine.updates}
        engine.leave_out(sent.difference(on_host(round.client_ids)))
        return round

    def _finish(self, round: Round) -> Round:
        """Compute metrics and the aggregate, and write the next global model into the module."""
        state, engine = self.state, self.engine
        with self._warnings_once():
            round = self.server.finish(round, state)
            clients_with_updates = [update.client_id for update in engine.updates]
            state.complete(round, [*engine.broken, *clients_with_updates])
            self._evaluate_clients()
        engine.end_round(state.model())
        engine.check_agreement(round, state.model(), self.metrics.contributions)
        return round

    def _evaluate_clients(self) -> None:
        """Keep the clients' trained models, and score their own models, in rounds in which that is asked for."""
        evaluation, state = self.config.evaluation, self.state
        if evaluation.keeps:
            for client, model in self.engine.trained().items():
                state.trained[client] = model.clone()

        number_of_rounds = state.round_index + 1
        is_last = number_of_rounds == self.rounds or bool(self.spent())
        self.evaluated = evaluation.every > 0 and (
            is_last or number_of_rounds % evaluation.every == 0
        )
        if self.evaluated:
            state.client_scores = self.engine.own_scores(self._instruct)

    def end_run(self) -> bool:
        """Evaluate clients' own models after the run's last round, unless the round has done so. Return whether they
        are evaluated now.
        """
        is_due = self.config.evaluation.every and self.engine.begun and not self.evaluated
        if not is_due or not self.state.round_index:
            return False
        module = self.engine.trainer.lightning_module
        with lent(module, self.space):
            self.state.client_scores = self.engine.own_scores(self._instruct)
        return True

    def _complete(self, last: bool) -> None:
        """Commit the clients' states, and draw the next round's cohort."""
        index = self.state.round_index
        self.engine.commit()
        self.state.round_index += 1
        self.at_server = False
        self.state.cohort = []
        if not last:
            self.draw_cohort()
        self.engine.settle()
        seed_global_rngs(self.state.seed, "server", index)

    def spent(self) -> str | None:
        """Return why the privacy budget does not allow another round, or None."""
        loss = self.metrics.metrics.get("epsilon") if self.config.privacy is not None else None
        return loss.spent() if isinstance(loss, PrivacyLoss) else None

    def received(self) -> dict[int, Tensor]:
        return self.engine.received(self._instruct)

    def _instruct(self, clients: Sequence[int]) -> dict[int, Instruction]:
        return self.server.instruct(clients, self.state)

    @contextmanager
    def _warnings_once(self) -> Iterator[None]:
        """Show warnings on the first rank only, within this context."""
        with warnings.catch_warnings():
            if self.engine.ranks.rank:
                warnings.simplefilter("ignore")
            yield


@dataclass
class RunState:
    """State of federation, clients, optimizers and files that the next round needs."""

    store: ClientStore = field(default_factory=ClientStore)
    buffers: dict[str, Any] | None = None
    configured_options: dict[str, Any] | None = None
    shared: dict[str, str] | None = None
    finetuned: dict[str, list[str]] | None = None
    csv: str | None = None
    identity: Identity = field(default_factory=lambda: Identity({}, {}))
    resumed: bool = False

    def state_dict(self, engine: Engine | None = None) -> dict[str, Any]:
        clients, buffers = self.store.state_dict(), self.buffers
        if engine is not None and engine.begun:
            clients, buffers = engine.kept(), engine.local_training.state.buffers()
        return {
            "clients": clients,
            "buffers": buffers,
            "configured_options": self.configured_options
            if engine is None
            else engine.options.configured_options,
            "shared": self.shared if engine is None else engine.space.described(),
            "finetuned": self.finetuned,
            "csv": self.csv,
            "identity": self.identity.plain(),
            "format": CHECKPOINT_FORMAT,
            "versions": package_versions(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load everything except the fingerprint of data and settings. That of the present fit stays."""
        self.store.load_state_dict(state["clients"])
        self.buffers, self.configured_options = state["buffers"], state["configured_options"]
        self.shared, self.finetuned, self.csv = state["shared"], state["finetuned"], state["csv"]
        self.resumed = True

    def find_table(self, checkpoint: str | Path | None, seed: int) -> None:
        """Find the table of the run that is resumed: beside its checkpoint, or else where it was recorded."""
        if self.csv is None or checkpoint is None:
            return
        run_folder = Path(checkpoint).resolve().parent.parent
        beside = run_folder / CONTRIBUTIONS
        recorded = Path(self.csv)
        for table in (beside, recorded):
            is_readable = table.is_file() and self._is_of_this_run(table.parent, seed)
            if is_readable:
                self.csv = str(table)
                return
        if beside.is_file():
            raise ConfigurationError(
                f"{run_folder} holds another run than the one that saved {checkpoint}. Move the checkpoint into a "
                "folder of its own, or resume this run's own checkpoint."
            )
        self.csv = str(beside)

    def _is_of_this_run(self, folder: Path, seed: int) -> bool:
        if not (folder / RECORD).is_file():
            return False
        record = read_record(folder / RECORD)
        identity = Identity(record["fingerprint"], record["hashes"])
        recorded_seed = record["settings"]["federation_seed"]
        return identity == self.identity and recorded_seed == seed

    def copy(self, engine: Engine | None) -> RunState:
        """Copy this state, with the clients' present states in ``engine``, if any."""
        copied = RunState()
        copied.load_state_dict(self.state_dict(engine))
        copied.identity, copied.resumed = self.identity, self.resumed
        return copied
