"""RoundServer: instructs the clients, filters, measures and aggregates their updates, and personalizes their models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flsv.aggregation import Aggregator
from flsv.core import (
    Channel,
    Client,
    ClientUpdate,
    FederationState,
    Instruction,
    LocalData,
    Round,
    Stage,
    Start,
    request_initial_models,
)
from flsv.core.needs import read_by
from flsv.core.parameter_space import ParameterSpace
from flsv.core.strategy import Strategy
from flsv.filters import Cohort, UpdateFilter
from flsv.functional.distances import all_finite
from flsv.personalization import Personalized, Personalizer
from flsv.server.contribution_metrics import ContributionMetrics
from flsv.utilities.host_copies import copied, from_host

if TYPE_CHECKING:
    from flsv.games import CoalitionGames


class NoModel(RuntimeError):
    """Error: a round has no next global model."""


class RoundServer:
    """The server's side of a federation. A round calls :meth:`instruct`, :meth:`send`, :meth:`receive`, :meth:`finish`.

    It does not depend on a Trainer or on where the clients run.

    Args:
        metrics: the loop's contribution metrics.
        strategies: ``{role: strategy}``, all strategies of the run, in the order in which they are called. The role
            ``"aggregator"`` is required.
        space: the map between modules and vectors.
        channel: counter of the messages between server and clients.
        filters: the filters of a cohort's updates, in the order in which they are applied.

    Attributes:
        strategies: all strategies, in the order in which they are called. Others may be added before the first round.
        games: object that evaluates models on the server's validation set, or None, see :meth:`bind_games`.
        norms: ``{client id: norm}`` of the last round's updates before filters, without non-finite ones.
    """

    def __init__(
        self,
        metrics: ContributionMetrics,
        strategies: Mapping[str, Any],
        space: ParameterSpace,
        channel: Channel,
        filters: Sequence[UpdateFilter] = (),
    ) -> None:
        self.metrics = metrics
        self.strategies = list[Strategy](strategies.values())
        self.aggregator: Aggregator = strategies["aggregator"]
        self.personalizer: Personalizer | None = strategies.get("personalizer")
        self.space = space
        self.channel = channel
        self.filters = filters
        self.norms: dict[int, float] = {}
        self.games: CoalitionGames | None = None

    def bind_games(self, games: CoalitionGames) -> None:
        """Store ``games``, which evaluate models on the server's validation set. Strategies get them, too."""
        self.games = games
        for strategy in self.strategies:
            strategy.bind_evaluator(games)

    def instruct(self, clients: Iterable[int], state: FederationState) -> dict[int, Instruction]:
        """Return ``{client id: instruction}`` for the clients of the round that begins with ``state``."""
        instructions = {}
        visible_state = state.for_strategies()
        global_model = visible_state.model()
        for client in clients:
            initial_model: Tensor | None = global_model
            if self.personalizer is not None:
                initial_model = self.personalizer.start(client, visible_state)

            tensors: dict[str, Tensor] = {}
            for strategy in self.strategies:
                tensors |= strategy.send(client, initial_model, visible_state)

            instructions[client] = Instruction(
                round_index=state.round_index,
                client_id=client,
                seed=state.seed,
                start=initial_model,
                tensors=tensors,
            )
        return instructions

    def send(self, instructions: Mapping[int, Instruction]) -> None:
        """Start a round: count ``instructions``, ``{client id: instruction}``, as messages to the clients."""
        self.channel.begin_round()
        for client, instruction in instructions.items():
            self.channel.send(client, "down", "start", instruction.start)
            for name, tensor in instruction.tensors.items():
                self.channel.send(client, "down", name, tensor)

    def receive(
        self,
        updates: Sequence[ClientUpdate],
        matrix: Tensor,
        instructions: Mapping[int, Instruction],
        state: FederationState,
        clients: Sequence[Client],
        server_data: LocalData | None = None,
        drawing_probabilities: Callable[[], Tensor] | None = None,
        broken: Sequence[int] = (),
    ) -> Round:
        """Filter the clients' updates, and return a round with those that remain.

        Args:
            updates: the updates that the clients sent.
            matrix: ``[k, P]``, the vectors of the k updates.
            instructions: the instruction that each client was sent, ``{client id: instruction}``.
            state: the federation at the start of the round.
            clients: all n clients of the federation.
            server_data: the server's validation set.
            drawing_probabilities: function that returns each client's probability ``[n]`` to be drawn into this
                cohort. None if all clients are drawn.
            broken: ids of the clients whose model was not finite.

        Raises:
            NoModel: the filters have excluded all updates.
        """
        model = state.model()
        if self.personalizer is None or self.personalizer.collaborates:
            for update in updates:
                self._count(update)
        for strategy in self.strategies:
            strategy.before_filters(updates, clients)
        num_samples = [update.num_samples for update in updates]
        received_cohort = Cohort(
            round_index=state.round_index,
            updates=tuple(updates),
            matrix=matrix,
            starts=tuple(instructions[update.client_id].start for update in updates),
            num_samples=torch.tensor(num_samples, device=model.device),
            num_parameters=self.space.num_parameters,
            model=model,
            broken=broken,
        )
        norms = received_cohort.norms.tolist()
        self.norms = dict(zip(received_cohort.ids, norms))
        cohort = self._apply_filters(received_cohort)
        starts, silent_clients = self._find_initial_models(cohort, instructions, clients)

        num_steps = [update.num_steps for update in cohort.updates]
        return Round(
            round_index=state.round_index,
            client_ids=from_host(cohort.ids, model.device),
            num_samples=cohort.num_samples,
            losses=from_host([update.loss for update in cohort.updates], model.device),
            num_steps=torch.tensor(num_steps, device=model.device),
            global_vector=model,
            client_vectors=cohort.matrix,
            starts=starts,
            reports=_stacked_reports(cohort.updates, model.device),
            clients=tuple(clients[update.client_id] for update in cohort.updates),
            all_clients=clients,
            server_data=server_data,
            space=self.space,
            seed=state.seed,
            drawing_probabilities=drawing_probabilities,
            games=self.games,
            channel=self.channel,
            excluded=[client for client in self.norms if client not in cohort.ids],
            unmeasured=[*cohort.unmeasured, *silent_clients],
        )

    def _count(self, update: ClientUpdate) -> None:
        """Count an update, and what its client reports, as messages."""
        send = partial(self.channel.send, update.client_id, "up")
        send("update", update.vector, update.traffic)
        for name, value in update.reports.items():
            send(name, value)

    def _apply_filters(self, cohort: Cohort) -> Cohort:
        """Apply the filters one after the other, and issue their warnings."""
        had_updates = bool(cohort.updates)
        for update_filter in self.filters:
            cohort = update_filter.apply(cohort)
            if not cohort.updates:
                break

        if cohort.warnings:
            warnings.warn(" ".join(cohort.warnings), stacklevel=2)
        if not cohort.updates:
            raise NoModel(self._why_no_update(cohort, had_updates))
        return cohort

    def _why_no_update(self, cohort: Cohort, had_updates: bool) -> str:
        failure = "NaN or infinite elements"
        if had_updates:  # the filters have excluded all of them
            failure += ", or one that is far too large"
        elif not cohort.broken:
            return f"round {cohort.round_index + 1}: no site sent a model."
        hints = [update_filter.hint() for update_filter in self.filters]
        advice = " ".join(hint for hint in hints if hint)
        return f"round {cohort.round_index + 1}: every client of the cohort returned a model with {failure}. {advice}"

    def _find_initial_models(
        self, cohort: Cohort, instructions: Mapping[int, Instruction], clients: Sequence[Client]
    ) -> tuple[list[Start], list[int]]:
        """Return each client's initial model ``[P]``, or the client if the model is requested later, and the ids of
        clients that did not respond.
        """
        models_or_clients: list[Start] = []
        for update in cohort.updates:
            initial_model = self._known_initial_model(update, instructions[update.client_id])
            if initial_model is None:
                models_or_clients.append(clients[update.client_id])
            else:
                models_or_clients.append(initial_model)

        only_server_requests = self.personalizer is not None and not self.personalizer.collaborates
        if only_server_requests:
            # Real clients of such a method send no models, so these messages are not counted.
            with self.channel.uncounted():
                return self._request_models(models_or_clients, cohort)
        if self.metrics.start_metrics:
            # Clients that do not respond are excluded from all metrics, so the models are requested before any update.
            return self._request_models(models_or_clients, cohort)
        return models_or_clients, []

    def _known_initial_model(self, update: ClientUpdate, instruction: Instruction) -> Tensor | None:
        if instruction.start is None and self.personalizer is not None:
            return self.personalizer.started(update)
        return instruction.start

    def _request_models(
        self, models_or_clients: Sequence[Start], cohort: Cohort
    ) -> tuple[list[Start], list[int]]:
        initial_models: list[Start] = []
        silent_clients: list[int] = []
        models_or_none = request_initial_models(models_or_clients)
        for client, trained_model, initial_model in zip(cohort.ids, cohort.matrix, models_or_none):
            if initial_model is None:
                silent_clients.append(client)
                initial_models.append(trained_model)
            else:
                initial_models.append(initial_model.to(trained_model))
        return initial_models, silent_clients

    def finish(self, round: Round, state: FederationState) -> Round:
        """Aggregate and personalize a round. Each metric is updated as soon as its inputs are known.

        The clients' next initial models are stored in ``state``. If the aggregate is not finite, the global model does
        not change, all weights are 0, and metrics that need the aggregate are not updated.

        Args:
            round: the round, from :meth:`receive`.
            state: the federation at the start of the round.

        Returns:
            The round, with the next global model, the weights and the peer values.

        Raises:
            NoModel: the aggregate is not finite for the second time in a row.
        """
        if self.games is not None:
            self.games.begin(round.measured())
        self._measure(round, "training")
        vector, weights = self._finite_aggregate(round, state)
        aggregated_round = round.aggregated(vector, weights)
        if state.is_aggregate_finite:
            self._measure(aggregated_round, "aggregation")
        finished_round = self._personalize(aggregated_round, state)
        self._measure(finished_round, "personalization")
        for strategy in self.strategies:
            round_view = read_by(strategy, finished_round, "personalization")
            strategy.end_round(round_view)
        self._measure(finished_round, "exchange")
        if self.games is not None:
            self.games.end()
        return finished_round

    def _measure(self, round: Round, stage: Stage) -> None:
        self.metrics.update(round.measured(), stage)

    def _finite_aggregate(self, round: Round, state: FederationState) -> tuple[Tensor, Tensor]:
        """Return the next global model ``[P]`` and the weights ``[k]``. If it is not finite, the model stays."""
        vector, weights = self._aggregate(round)
        # Both are copied to the host at once, where the state keeps the weights.
        vector_sum = copied([vector.sum(), weights])[0]
        is_finite = bool(vector_sum.isfinite()) or all_finite(vector)
        if not is_finite:
            self._warn_of_aggregate(round, state)
            vector = round.global_vector.clone()
            weights = torch.zeros_like(weights)
        state.is_aggregate_finite = is_finite
        return vector, weights

    def _aggregate(self, round: Round) -> tuple[Tensor, Tensor]:
        """Return the next global model ``[P]``, and the clients' weights in it, ``[k]``."""
        round_view = read_by(self.aggregator, round, "training")
        contributions = self.metrics.with_priors()
        vector, weights = self.aggregator.aggregate(round_view, contributions)
        server_lr = self.aggregator.server_lr
        if server_lr == 1:
            return vector, weights

        num_parameters = self.space.num_parameters
        parameters = round.global_vector[:num_parameters]
        # This is not done in place: an aggregator may return a client's model as a view of the matrix.
        moved = torch.lerp(parameters, vector[:num_parameters], server_lr)
        return torch.cat([moved, vector[num_parameters:]]), weights

    def _warn_of_aggregate(self, round: Round, state: FederationState) -> None:
        failure = f"round {round.round_index + 1}: {self.aggregator!r} returned a global model that is not finite"
        if not state.is_aggregate_finite:
            raise NoModel(f"{failure}, for the second time in a row.")
        warnings.warn(f"{failure}. The global model of the round before is kept.", stacklevel=3)

    def _personalize(self, round: Round, state: FederationState) -> Round:
        """Store the clients' next initial models, and return the round with ``peer_values``."""
        if self.personalizer is None:
            return round
        round_view = read_by(self.personalizer, round, "aggregation")
        contributions = self.metrics.with_priors()
        personalized = self.personalizer.personalize(round_view, contributions, state.starts)
        if not isinstance(personalized, Personalized):
            personalized = Personalized(personalized)

        for client, initial_model in personalized.starts.items():
            detached_model = initial_model.detach()
            # A view would keep and save the whole tensor behind it.
            if detached_model._is_view():
                detached_model = detached_model.clone()
            state.starts[client] = detached_model
        return round.personalized(personalized.peer_values)


def _stacked_reports(updates: Sequence[ClientUpdate], device: torch.device) -> dict[str, Tensor]:
    reports = {}
    for name in updates[0].reports:
        values = [update.reports[name] for update in updates]
        reports[name] = _stack_padded(values).to(device)
    return reports


def _stack_padded(reports: Sequence[Tensor]) -> Tensor:
    """Stack the clients' reports to ``[k, ...]``, and pad shorter ones with NaN."""
    lengths = [len(report) for report in reports if report.ndim]  # scalars need no padding
    longest = max(lengths, default=0)
    if all(length == longest for length in lengths):
        return torch.stack(list(reports))

    shape = (len(reports), longest, *reports[0].shape[1:])
    padded = reports[0].new_full(shape, float("nan"))
    for row, report in zip(padded, reports):
        row[: len(report)] = report
    return padded
