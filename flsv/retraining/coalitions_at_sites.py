"""CoalitionsAtSites: a run's sites train each coalition as a federation of its members."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flsv.configuration.federation_config import FederationConfig
from flsv.core import Channel, Client, ClientUpdate, FederationState, Round, TrainedCoalitions
from flsv.core.strategy import FederationInfo, Strategy
from flsv.engines.remote.federation import RemoteFederation, RemoteSites
from flsv.engines.remote.messages import Packet
from flsv.sampling import ClientSampler
from flsv.sampling.base import chances_of, cohort_of
from flsv.server import ContributionMetrics, RoundServer
from flsv.server.checks import check_names
from flsv.server.round_server import NoModel
from flsv.utilities.digest import digest
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for

#: The least distance of a client's own model to the federation's, as a fraction of the way that training moved it.
NEAR = 0.1


def doubtful_own_models(
    own_models: Tensor,
    initial: Tensor,
    model: Tensor,
    updates: Tensor,
) -> dict[int, str]:
    """Find clients whose own model was probably not trained by them alone.

    Two checks are made. The own model must not be the federation's. And its move from the initial model must agree with
    the sum of this client's own updates in the federation: more than most others' moves do, and not less than with
    another client's updates. Agreement is the cosine, less the median of the others' cosines with the same updates. So
    the length of a false model counts for nothing, and it cannot make an honest client doubtful.

    Args:
        own_models: ``[n, P]``, the models of n clients alone.
        initial: ``[P]``, the initial model.
        model: ``[P]``, the federation's model that clients were sent last.
        updates: ``[n, P]``, the sums of the clients' updates in the federation so far.

    Returns:
        ``{client: reason}``. With fewer than three clients, and for a client without an update, only the first check
        is made.

    Example:
        >>> own = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]])
        >>> model = torch.tensor([0.3, 0.3, 0.3])
        >>> doubtful_own_models(torch.stack([own[0], own[0], model]), torch.zeros(3), model, own)
        {1: "its own model moves as client 0's updates do", 2: "its own model is the federation's"}
    """
    moves = own_models - initial
    distances = (own_models - model).norm(dim=1)
    is_near = distances < NEAR * moves.norm(dim=1)
    near_clients = is_near.nonzero().flatten().tolist()
    reasons = dict.fromkeys(near_clients, "its own model is the federation's")
    if len(own_models) < 3:
        return reasons

    cosines = _cosines(moves, updates)
    has_update = updates.norm(dim=1) > 0
    for client in has_update.nonzero().flatten().tolist():
        reason = _reason_by_direction(client, cosines)
        if reason:
            reasons.setdefault(client, reason)
    return dict(sorted(reasons.items()))


def _reason_by_direction(client: int, cosines: Tensor) -> str:
    """Return why a client's move is probably not its own, empty if it may be."""
    own_cosines = cosines[client]
    other_rows = torch.arange(len(cosines)) != client
    typical_cosines = cosines[other_rows].median(0).values
    agreement = own_cosines - typical_cosines

    closest = int(agreement.argmax())
    if own_cosines[closest] > own_cosines[client]:
        return f"its own model moves as client {closest}'s updates do"
    if agreement[client] <= 0:
        return "its own model does not move as its updates do"
    return ""


def _cosines(moves: Tensor, updates: Tensor) -> Tensor:
    """Compute the cosine of each move ``[n, P]`` with each update ``[n, P]``, float64 ``[n, n]`` on the CPU."""
    unit_moves = torch.nn.functional.normalize(moves, dim=1)
    unit_updates = torch.nn.functional.normalize(updates, dim=1)
    products = unit_moves @ unit_updates.T
    return products.cpu().double()


#: The largest distance of a client's own model to its first update, which is the same training, as a part of its way.
SAME = 0.01


def check_at_sites(config: FederationConfig) -> None:
    """Raise ConfigurationError if the aggregator reads a metric that evaluates models, which coalitions at sites
    cannot.
    """
    metrics = ContributionMetrics(_read_metrics(config), check_names(config.strategies))
    if asking := dict.fromkeys([*metrics.game_metrics, *metrics.evaluating, *metrics.peer_metrics]):
        raise ConfigurationError(
            f"ShadowShapley: {config.aggregator!r} uses {list(asking)}, which evaluate models in every round, and no "
            "coalition at sites can. Leave ShadowShapley out, and use flsv retrain where all data are."
        )


class CoalitionsAtSites(Strategy):
    """Strategy that lets sites train coalitions in each round, after the run's own training.

    Each coalition has its own server, and each of its sites a separate state for it, so that a site sees an ordinary
    run. A site that did not answer in a round of the run takes part in no coalition in this round.
    """

    def __init__(
        self,
        masks: Tensor,
        federation: FederationInfo,
        engine: RemoteFederation,
        saved: Mapping[str, Any] | None,
    ) -> None:
        self._engine = engine
        self._masks, self._initial, self._whole = (
            masks,
            federation.global_vector.clone(),
            not federation.uploads,
        )
        self._run, self._left = FederationState(), None if saved is None else saved["left"]
        self._moved = (
            torch.zeros(federation.num_clients, len(self._initial))
            if saved is None
            else saved["moved"]
        )
        states = {} if saved is None else saved["coalitions"]
        trained = [mask.nonzero().flatten().tolist() for mask in trained_masks(masks)]
        self._coalitions = [
            _Coalition(
                members,
                replace(federation, global_vector=self._initial),
                engine.sites_of,
                states.get(place),
            )
            for place, members in enumerate(trained)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next round needs."""
        coalitions = {
            place: coalition.state_dict() for place, coalition in enumerate(self._coalitions)
        }
        return {"left": self._left, "moved": self._moved, "coalitions": coalitions}

    def send(self, client: int, start: Tensor | None, state: FederationState) -> dict[str, Tensor]:
        self._run = state
        return {}

    def before_filters(self, updates: Sequence[ClientUpdate], clients: Sequence[Client]) -> None:
        self._updates, self._clients = updates, clients
        self._away = {*self._run.cohort} - self._engine.heard

    def end_round(self, round: Round) -> None:
        if self._left is not None and not torch.equal(
            self._left.to(round.global_vector), round.global_vector
        ):
            raise ConfigurationError(
                f"ShadowShapley: the module's weights or buffers have changed before round {round.round_index + 1}, as "
                "by a hook around an epoch or by validation, and the models of coalitions at sites would not. Let "
                "hooks leave them as they are, or value the run by flsv retrain."
            )
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # the run's own server has warned; faults of sites are noted
            packets = [
                coalition.instruct(self._run, self._away, self._clients)
                for coalition in self._coalitions
            ]
            replies = [dict[int, Any]() for _ in packets]
            while any(packets):  # a site trains one model at a time
                wave: dict[int, tuple[int, Packet]] = {}
                for place, waiting in enumerate(packets):
                    for site in waiting.keys() - wave.keys():
                        wave[site] = place, waiting.pop(site)
                exchange = self._coalitions[0].sites.directory.exchange
                for site, reply in exchange(
                    {site: packet for site, (_, packet) in wave.items()}
                ).items():
                    replies[wave[site][0]][site] = reply
            for coalition, replied in zip(self._coalitions, replies):
                coalition.receive(replied, round)
        self._doubt(round)
        self._left = round.server_vector

    def _doubt(self, round: Round) -> None:
        """Record the clients whose own model was probably not trained by them alone."""
        alone = {each.members[0]: each for each in self._coalitions if len(each.members) == 1}
        if len(alone) < len(self._moved):
            return
        self._moved = self._moved.to(round.global_vector)
        for update in self._updates:
            moved, client = (
                (update.vector - round.global_vector).nan_to_num(0.0, 0.0, 0.0),
                update.client_id,
            )
            self._moved[client] += moved
            own = alone[client].sent.get(client, update.vector)
            same = round.round_index == 0 and self._whole  # both are the same training
            if same and (own - update.vector).norm() > SAME * moved.norm():
                self._run.note(client, "its own model is not its first update")
        if round.round_index:
            models = torch.stack(
                [alone[client].state.model() for client in range(len(self._moved))]
            )
            known = round.global_vector  # the last model that clients have seen
            for client, why in doubtful_own_models(
                models, self._initial.to(known), known, self._moved
            ).items():
                self._run.note(client, why)

    def coalition_models(self, round: Round) -> TrainedCoalitions:
        assert round.server_vector is not None
        models = [coalition.state.model() for coalition in self._coalitions]
        return models_of(self._masks, self._initial, round.server_vector, models)


class _Coalition:
    """The federation of one coalition's members at their sites."""

    def __init__(
        self,
        members: list[int],
        federation: FederationInfo,
        sites_of: Callable[[FederationState], RemoteSites],
        saved: Mapping[str, Any] | None,
    ) -> None:
        # sent: {client id: model [P]}, of the last round
        self.members, self.sent, n = members, dict[int, Tensor](), federation.num_clients
        roles: Mapping[str, Any] = federation.strategies
        own = {role: roles[role] for role in roles.keys() - {"sampler", "personalizer"}}
        strategies, read, filters = copy.deepcopy(
            (own, _read_metrics(federation), federation.filters)
        )
        self._sampler: ClientSampler = roles["sampler"].among(members)
        self._metrics = ContributionMetrics(read, check_names(strategies), n)
        self._metrics.reset()
        self._server = RoundServer(self._metrics, strategies, federation.space, Channel(), filters)
        self._parts = [*strategies.values(), *self._server.filters]
        unseen = torch.zeros(n, dtype=torch.long)
        self.state = FederationState(
            n, federation.seed, participations=unseen, updates_received=unseen.clone()
        )
        start = federation.global_vector
        self.state.global_vector = start.clone() if saved is None else saved["model"].to(start)
        info = replace(
            federation,
            global_vector=self.state.model().clone(),
            strategies={**federation.strategies, **strategies},
            metrics=read,
        )
        if saved is None:
            for part in self._parts:
                part.begin(info)
        else:
            self._metrics.load_state_dict(saved["metrics"])
            self.state.load_state_dict(saved["state"])
            for part, state in zip(self._parts, saved["parts"]):
                part.load_state_dict(state)
                part.resume(info)
        self._metrics.to(start.device)
        self.sites = sites_of(self.state)

    def state_dict(self) -> dict[str, Any]:
        parts = [part.state_dict() for part in self._parts]
        state = {**self.state.state_dict(), "incidents": []}
        return {
            "parts": parts,
            "metrics": self._metrics.state_dict(),
            "state": state,
            "model": self.state.model(),
        }

    def instruct(
        self, run: FederationState, away: set[int], clients: Sequence[Client]
    ) -> dict[int, Packet]:
        """Begin a round of the coalition. Return the messages to its sites that are not ``away``."""
        state, self._clients = self.state, clients
        state.round_index, state.incidents = run.round_index, run.incidents
        state.run = state.run or digest([run.run, self.members]).hex()[:16]
        draw, values = (
            generator_for(state.seed, "cohort", state.round_index),
            self._metrics.with_priors(),
        )
        drawn = cohort_of(
            self._sampler,
            state.num_clients,
            values,
            draw,
            state.round_index,
            clients,
            state.model(),
        )
        state.cohort = [client for client in drawn if client not in away]
        self._chances = partial(
            chances_of, self._sampler, state.num_clients, values, state.round_index, drawn
        )
        self._instructions = self._server.instruct(state.cohort, state)
        self.sites.discard()
        return self.sites.packets(self._instructions)

    def receive(self, replies: Mapping[int, Any], round: Round) -> None:
        """End the coalition's round with its sites' ``replies``. Without a finite new model the coalition keeps its
        last.
        """
        state, server = self.state, self._server
        updates, broken = self.sites.updates(
            {site: replies[site] for site in self._instructions}, state.model().device, server.space
        )
        self.sent = {update.client_id: update.vector for update in updates}
        server.send(self._instructions)
        if updates:
            matrix = torch.stack([update.vector for update in updates])
            try:
                given = (
                    matrix,
                    self._instructions,
                    state,
                    self._clients,
                    round.server_data,
                    self._chances,
                    broken,
                )
                own = server.receive(updates, *given)
                self.sites.count({*own.client_ids.tolist()})
                state.complete(server.finish(own, state), [*broken, *self.sent])
            except NoModel:
                self.sites.discard()
        self.sites.commit()
        if round.channel is not None:
            round.channel.messages += server.channel.messages


def _read_metrics(federation: FederationConfig | FederationInfo) -> dict[str, Any]:
    """Return the metric whose values the aggregator uses, ``{name: metric}``, empty if none."""
    read = federation.strategies["aggregator"].metric
    return {name: metric for name, metric in federation.metrics.items() if name == read}


def models_of(
    masks: Tensor, empty: Tensor, full: Tensor, others: Sequence[Tensor]
) -> TrainedCoalitions:
    """Return the models of the coalitions ``masks [K, n]``: ``empty``, ``full`` and, in order, ``others``, each
    ``[P]``.
    """
    trained, ends = iter(others), {0: empty, masks.shape[1]: full}
    models = [ends[size] if size in ends else next(trained) for size in masks.sum(1).tolist()]

    def build(index: int, out: Tensor) -> None:
        out.copy_(models[index])

    return TrainedCoalitions(masks, build)


def trained_masks(masks: Tensor) -> Tensor:
    """Return the coalitions in ``masks [K, n]`` that are neither empty nor full."""
    sizes = masks.sum(1)
    return masks[(sizes > 0) & (sizes < masks.shape[1])]
