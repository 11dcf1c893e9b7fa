"""CoalitionsAtSites: a run's sites train each coalition as a federation of its members."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flsv.configuration.federation_config import FederationConfig
from flsv.core import Client, ClientUpdate, FederationState, Round
from flsv.core.state import OF_VALUES
from flsv.core.strategy import FederationInfo, Strategy
from flsv.engines.client_manager import ClientManager
from flsv.games.members import Members
from flsv.server import ContributionMetrics
from flsv.server.checks import check_names
from flsv.server.coalition_server import CoalitionServer, metric_of_aggregator
from flsv.sites.federation import RemoteFederation, RemoteSites
from flsv.sites.messages import Packet
from flsv.sites.own_models import inconsistent_own_models
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import digest
from flsv.values.designs import Design

#: In the first round, a client's own model and its model in the run come from the same training. They may differ by
#: this fraction of the update's norm.
MAX_RELATIVE_DIFFERENCE = 0.01
#: The incident that is recorded for a client whose model is not finite.
DIVERGED = "sent a model that is not finite in a coalition's training"
#: In this number of first rounds, a module that has changed between two rounds is an error. Later, it is a warning.
NUM_STRICT_ROUNDS = 2


def check_at_sites(config: FederationConfig) -> None:
    """Raise ConfigurationError if the aggregator reads a metric that evaluates models. Coalitions at sites cannot
    evaluate models.
    """
    reported_names = check_names(config.strategies)
    metrics = ContributionMetrics(metric_of_aggregator(config), reported_names)
    evaluating_names = [*metrics.game_metrics, *metrics.evaluating, *metrics.peer_metrics]
    if evaluating_names:
        distinct_names = list(dict.fromkeys(evaluating_names))
        raise ConfigurationError(
            f"ShadowShapley: {config.aggregator!r} uses the metrics {distinct_names}, which evaluate models in every "
            "round, and coalitions at sites cannot evaluate models. Remove ShadowShapley from the metrics, and run "
            "flsv retrain on a machine that has all data."
        )


class CoalitionsAtSites(Strategy):
    """Strategy that lets sites train coalitions in each round, after the run's own training.

    Each coalition has a server of its own, and each of its sites keeps a separate state for it. So for a site the
    training of a coalition is an ordinary run. A site that did not respond in a round of the run takes part in no
    coalition in this round.

    Args:
        design: the coalitions. Those that follow once the first ones have models are chosen by the clients' updates of
            the first round.
        federation: the federation of the run.
        engine: the engine of the run.
        memory: the part of the run's checkpoints to which the state is added.
        consistency_warnings: a list of sentences that say why the values may be wrong, to which some may be added.
    """

    def __init__(
        self,
        design: Design,
        federation: FederationInfo,
        engine: RemoteFederation,
        memory: MutableMapping[str, Any],
        consistency_warnings: list[str],
    ) -> None:
        self._engine = engine
        self._design = design
        self._client_names = federation.client_names
        self._are_updates_unchanged = not federation.uploads
        self._run = FederationState()
        self._memory = memory
        self._warnings_of_run = consistency_warnings

        saved = memory.get("sites")
        if saved is None:
            # Those that are chosen later have placeholders of the right sizes.
            masks = design.planned_masks(federation.num_clients)
            saved = _initial_state(masks, federation)
        self._restore(saved, federation)
        consistency_warnings += self._saved_warnings

    def _restore(self, saved: Mapping[str, Any], federation: FederationInfo) -> None:
        # The keys of checkpoints stay as they are, whatever the attributes are called.
        self._initial_model: Tensor = saved["initial"].to(federation.global_vector)
        self._masks: Tensor = saved["masks"]  # in a checkpoint with the chosen halves
        # The run's model after its last complete round. None before the first round.
        self._last_model: Tensor | None = saved["left"]
        self._saved_warnings: list[str] = list(saved["consistency_warnings"])
        # [n, P], the sums of the clients' updates in the run.
        self._update_sums: Tensor = saved["moved"]

        initial_federation = replace(federation, global_vector=self._initial_model)
        self._coalitions = []
        for index, members in enumerate(_trained_coalitions(self._masks)):
            coalition = _Coalition(
                members,
                initial_federation,
                sites_of=self._engine.sites_of,
                saved=saved["coalitions"].get(index),
            )
            self._coalitions.append(coalition)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next round needs."""
        coalitions = enumerate(self._coalitions)
        states = {index: coalition.state_dict() for index, coalition in coalitions}
        return {  # by the keys of checkpoints
            "left": self._last_model,
            "consistency_warnings": self._saved_warnings,
            "moved": self._update_sums,
            "masks": self._masks,
            "coalitions": states,
            "initial": self._initial_model,
        }

    def bind_evaluator(self, games: Any) -> None:
        # What coalitions' strategies send to sites may depend on evaluations, such as of a gradient.
        for coalition in self._coalitions:
            for strategy in coalition.server.strategies:
                strategy.bind_evaluator(games)

    def send(self, client: int, start: Tensor | None, state: FederationState) -> dict[str, Tensor]:
        self._run = state
        return {}

    def before_filters(self, updates: Sequence[ClientUpdate], clients: Sequence[Client]) -> None:
        self._updates = updates
        self._clients = clients
        self._absent_clients = {*self._run.cohort} - self._engine.clients_that_trained

    def end_round(self, round: Round) -> None:
        self._check_unchanged(round)
        if self._design.grows and self._last_model is None:
            self._choose_next(round.global_vector)
        with warnings.catch_warnings():
            # The run's own server has issued the same warnings, and failures of sites are recorded.
            warnings.simplefilter("ignore")
            packets_by_coalition = [
                coalition.instruct(self._run, self._absent_clients, self._clients)
                for coalition in self._coalitions
            ]
            replies_by_coalition = self._exchange(packets_by_coalition)
            for coalition, replies in zip(self._coalitions, replies_by_coalition):
                coalition.receive(replies, self._engine.manager)
        self._note_inconsistent_models(round)
        self._last_model = round.server_vector
        self._memory["sites"] = self.state_dict()

    def _choose_next(self, global_model: Tensor) -> None:
        """Choose the coalitions that follow by the clients' updates in the first round."""
        first_updates = torch.zeros_like(self._update_sums)
        for update in self._updates:
            first_updates[update.client_id] = _update_of(update, global_model)
        first_masks = self._design.masks(len(first_updates))
        members = first_masks.to(first_updates)
        mean_updates = members @ first_updates / members.sum(1, keepdim=True).clamp_min(1)
        next_masks = self._design.next_masks(
            first_masks, mean_updates, logits=False, names=self._client_names, seed=self._run.seed
        )
        self._masks = torch.cat([first_masks, next_masks])
        trained_coalitions = _trained_coalitions(self._masks)
        for coalition, member_ids in zip(self._coalitions, trained_coalitions, strict=True):
            coalition.set_members(member_ids)

    def _check_unchanged(self, round: Round) -> None:
        if self._last_model is None:
            return
        last_model = self._last_model.to(round.global_vector)
        if torch.equal(last_model, round.global_vector):
            return
        reason = (
            f"the module's weights or buffers have changed before round {round.round_index + 1}, after the end of the "
            "round before, for example by a hook or in validation. The models of coalitions at sites do not change in "
            "this way. "
            "Remove this change from hooks and validation, or compute the values by flsv retrain"
        )
        if round.round_index < NUM_STRICT_ROUNDS:
            raise ConfigurationError(f"ShadowShapley: {reason}.")
        if not self._saved_warnings:  # only the first change is reported
            warnings.warn(f"ShadowShapley: {reason}.", stacklevel=2)
            self._saved_warnings = [reason]
            self._warnings_of_run.append(reason)

    def _exchange(self, packets_by_coalition: list[dict[int, Packet]]) -> list[dict[int, Any]]:
        """Send the packets of each coalition, ``{site: packet}``, and return the replies to each, ``{site: reply}``.
        Sent packets are removed from their dictionary.
        """
        replies_by_coalition: list[dict[int, Any]] = [{} for _ in packets_by_coalition]
        while any(packets_by_coalition):
            # A site trains one model at a time, so it gets one packet at a time.
            sent_packets: dict[int, Packet] = {}
            index_by_site = {}
            for index, waiting_packets in enumerate(packets_by_coalition):
                for site in waiting_packets.keys() - sent_packets.keys():
                    sent_packets[site] = waiting_packets.pop(site)
                    index_by_site[site] = index
            directory = self._coalitions[0].sites.directory  # the same for all coalitions
            for site, reply in directory.exchange(sent_packets).items():
                index = index_by_site[site]
                replies_by_coalition[index][site] = reply
        return replies_by_coalition

    def _note_inconsistent_models(self, round: Round) -> None:
        coalition_by_client = self._coalitions_of_one()
        if len(coalition_by_client) < len(self._update_sums):
            return

        global_model = round.global_vector  # the model that was last sent to the clients
        self._update_sums = self._update_sums.to(global_model)
        has_others = self._have_others_updates()  # in this model
        for update in self._updates:
            self._update_sums[update.client_id] += _update_of(update, global_model)
        if round.round_index == 0:
            self._note_unlike_first_updates(coalition_by_client, global_model)
            return

        clients = range(len(self._update_sums))
        own_models = [coalition_by_client[client].state.model() for client in clients]
        reasons = inconsistent_own_models(
            torch.stack(own_models),
            self._initial_model.to(global_model),
            federation_model=global_model,
            update_sums=self._update_sums,
            has_others=has_others,
        )
        for client, reason in reasons.items():
            self._run.note(client, reason, OF_VALUES)

    def _coalitions_of_one(self) -> dict[int, _Coalition]:
        singles = [coalition for coalition in self._coalitions if len(coalition.members) == 1]
        return {coalition.members[0]: coalition for coalition in singles}

    def _have_others_updates(self) -> Tensor:
        """Return whether another client's update is part of the global model, bool ``[n]``."""
        has_update = self._update_sums.norm(dim=1) > 0
        num_others = has_update.sum() - has_update.long()
        return num_others > 0

    def _note_unlike_first_updates(
        self, coalition_by_client: Mapping[int, _Coalition], global_model: Tensor
    ) -> None:
        """Record clients whose own model is not the one that they sent in the run's first round."""
        if not self._are_updates_unchanged:
            return
        for update in self._updates:
            client = update.client_id
            own_model = coalition_by_client[client].sent_models.get(client, update.vector)
            distance = (own_model - update.vector).norm()
            step = _update_of(update, global_model)
            if distance > MAX_RELATIVE_DIFFERENCE * step.norm():
                self._run.note(client, "its own model is not its first update", OF_VALUES)

    @property
    def masks(self) -> Tensor:
        """Return the coalitions, bool ``[K, n]``."""
        return self._masks

    def models(self) -> dict[Members, Tensor]:
        """Return the models that sites have trained, ``{coalition: [P]}``."""
        return {tuple(coalition.members): coalition.state.model() for coalition in self._coalitions}


def _update_of(update: ClientUpdate, global_model: Tensor) -> Tensor:
    """Return a client's update ``[P]``: its model minus the global model, with 0 in place of NaN and infinities."""
    return (update.vector - global_model).nan_to_num(0.0, 0.0, 0.0)


class _Coalition(CoalitionServer):
    """The federation of one coalition's members at their sites."""

    def __init__(
        self,
        members: list[int],
        federation: FederationInfo,
        sites_of: Callable[..., RemoteSites],
        saved: Mapping[str, Any] | None,
    ) -> None:
        # {client: the model [P] that it sent in the last round}
        self.sent_models: dict[int, Tensor] = {}
        super().__init__(members, federation, saved)
        self.sites = sites_of(self.state, excluded_from=" from a coalition's training")

    def instruct(
        self, run_state: FederationState, absent: set[int], clients: Sequence[Client]
    ) -> dict[int, Packet]:
        """Begin the coalition's round. Return the messages to its sites, except ``absent`` ones."""
        state = self.state
        state.incidents = run_state.incidents
        if not state.run:  # the id of the coalition's run, for which sites keep a separate state
            state.run = digest([run_state.run, self.members]).hex()[:16]
        instructions = self.begin_round(run_state.round_index, clients, absent)
        self.sites.discard()
        return self.sites.packets(instructions)

    def receive(self, replies: Mapping[int, Any], manager: ClientManager) -> None:
        """End the coalition's round with the sites' ``replies``. If no site has sent a finite model, the coalition's
        model does not change.
        """
        device = self.state.model().device
        # The order of the instructions does not depend on which site replies first.
        replies_in_order = {site: replies[site] for site in self.instructions}
        updates, broken_clients = self.sites.updates(replies_in_order, device, self.server.space)
        for client in broken_clients:
            self.state.note(client, DIVERGED, OF_VALUES)
        self.sent_models = {update.client_id: update.vector for update in updates}
        accepted_clients = self.end_round(updates, broken_clients, manager.server)
        if accepted_clients:
            self.sites.accept(accepted_clients)
        else:  # neither the model nor the sites' states change
            self.sites.discard()
        self.sites.commit()
        manager.channel.messages += self.server.channel.messages


def _trained_coalitions(masks: Tensor) -> list[list[int]]:
    """Return the members of the coalitions in ``masks [K, n]`` that are neither empty nor full."""
    sizes = masks.sum(1)
    is_inner = (sizes > 0) & (sizes < masks.shape[1])
    return [mask.nonzero().flatten().tolist() for mask in masks[is_inner]]


def _initial_state(masks: Tensor, federation: FederationInfo) -> dict[str, Any]:
    return {
        "left": None,
        "consistency_warnings": [],
        "masks": masks,
        "moved": torch.zeros(federation.num_clients, len(federation.global_vector)),
        "coalitions": {},
        "initial": federation.global_vector.clone(),
    }
