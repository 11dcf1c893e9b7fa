"""ShadowTraining: while the federation trains, every client also trains the models of the coalitions that it is in.

What a client is worth is the Shapley value of the game in which every coalition of clients is a federation of its own.
:mod:`flsv.games.retrained_utility` trains these after the run; here they are trained with it. In a round, the server
sends a client the models of its coalitions; the client trains them on the very batches of its own training, as rows of
one batched model; at the server, each coalition has an aggregator, filters and metrics of its own, for those of its
members that take part. So each comes to the model that a run of this coalition alone comes to, with the same seed, to
rounding.
Nobody's model is the initial one, and everybody's is the federation's own: these two are not trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv.configuration.federation_config import FederationConfig
from flsv.core import Client, ClientUpdate, FederationState, Round, TrainedCoalitions
from flsv.core.strategy import FederationInfo
from flsv.engines.one_process import shared_space
from flsv.metrics.shadow import Coalitions, coalition_masks
from flsv.retraining.coalition_servers import servers_of, unlike_alone
from flsv.training.algorithms import ClientAlgorithm, ClientContext
from flsv.training.rows.coalition_rows import CoalitionRows
from flsv.training.rows.row_checks import not_batched, not_by_rounds
from flsv.training.rows.row_trial import why_not_rows
from flsv.utilities.errors import ConfigurationError

ROWS, TRAINED = "coalition_models", "trained_coalition_models"
#: Bytes of the rows at the server and on their way, from which on a run is refused.
MOST_BYTES = 2**32


def not_as_rows(trainer: L.Trainer, config: FederationConfig) -> str | None:
    """Say before the first round why coalitions' models, trained as rows beside the clients' own, would not be those of
    runs of the coalitions, and what to do; None: they would.

    What can be seen is looked at first; then a copy of the module trains a few batches of a client in both ways, where
    the clients' data are. Nothing is changed by it.

    Args:
        trainer: in ``on_train_start``: its optimizers are set up, its data dealt.
        config: what the federation is put together from.
    """
    module = trainer.lightning_module
    if why := unlike_alone(config, config.client_algorithm, losses=False):
        return f"{why}. Leave it out"
    if config.engine == "vmap":
        return 'with engine="vmap" clients are rows already. Use engine="sequential"'
    if why := not_batched(trainer, None, config.optimizer_state, schedules=True, accumulates=True):
        return why
    if why := not_by_rounds(trainer):
        return f"{why}. Take a schedule that steps by rounds or batches"
    if callable(config.engine):  # the data are elsewhere: every site sees it in its first steps
        return None
    return why_not_rows(trainer, shared_space(module, config)[0], config.seed or 0, draws=("torch",))


class ShadowTraining(ClientAlgorithm):
    """What clients and server do for :class:`flsv.metrics.ShadowShapley` where rows are the same as runs, see
    :class:`flsv.retraining.coalition_plan.CoalitionPlan`.

    Down go the models of a client's coalitions, beside the global one. Up come these models, each behind a number: 1,
    or 0 where it is not finite, so that the client counts as absent from that coalition in this round.

    Args:
        coalitions: see the metric.
        algorithm: what clients do differently, in every coalition alike: it changes gradients entry by entry, as
            :class:`flsv.training.algorithms.FedProx`; None: nothing.

    Raises:
        ConfigurationError: before training, whatever would make a coalition's model another than that of a run of the
            coalition; in the first client's first step, a module that cannot be batched, with the reason; at its end,
            a coalition's model that differs from the client's own where they have to be the same.
    """

    sends = (ROWS,)
    reports = (TRAINED,)
    saved = ("_rows", "_initial")

    def __init__(self, coalitions: Coalitions = "auto", algorithm: ClientAlgorithm | None = None) -> None:
        self.coalitions, self.algorithm = coalitions, algorithm
        self._visit: CoalitionRows | None = None
        self._left: Tensor | None = None  # the global model after the last round
        self._updates: Sequence[ClientUpdate] = ()
        self._clients: Sequence[Client] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_visit": None, "_left": None, "_clients": ()}

    @property
    def changes_steps(self) -> bool:  # type: ignore[override]
        """Whether clients take other steps than without it."""
        return self.algorithm is not None

    # ---- at the server

    def begin(self, federation: FederationInfo) -> None:
        self._set_up(federation)
        self._left = self._initial = federation.global_vector.clone()
        self._rows = self._initial.expand(len(self._members), -1).clone()
        self._servers = servers_of(federation, self._members, self._rows)

    def resume(self, federation: FederationInfo) -> None:
        self._set_up(federation)
        self._servers = servers_of(federation, self._members, self._rows, self._loaded)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "servers": self._servers.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._loaded = state["servers"]

    def _set_up(self, federation: FederationInfo) -> None:
        self._visit = self._left = None
        self._masks = coalition_masks(self.coalitions, federation.num_clients)
        self._members = _trained(self._masks)
        self._places = [mine.nonzero().flatten() for mine in self._members.T]
        rows = len(self._members) + 3 * sum(map(len, self._places))  # the server's, and as they cross
        size = rows * federation.space.size * federation.space.dtype.itemsize
        if size > MOST_BYTES:
            raise ConfigurationError(
                f"ShadowShapley(coalitions={self.coalitions!r}): the models of {len(self._members)} coalitions take "
                f"{size / 2**30:.0f} GiB at the server, with those on their way. "
                'Take coalitions="pairs" or "singles".'
            )

    def send(self, client: int, start: Tensor | None, state: FederationState) -> dict[str, Tensor]:
        if self._left is not None and not torch.equal(self._left, state.model()):
            raise ConfigurationError(
                f"ShadowShapley: the module's weights or buffers have changed between rounds {state.round_index} and "
                f"{state.round_index + 1}, as by a hook around an epoch or by validation, and coalitions' models would "
                "not. Let hooks leave them as they are, or value the run by flsv retrain."
            )
        self._rows = self._rows.to(state.model())
        return {ROWS: self._rows[self._places[client].to(self._rows.device)]}

    def before_filters(self, updates: Sequence[ClientUpdate], clients: Sequence[Client]) -> None:
        self._updates, self._clients = updates, clients

    def end_round(self, round: Round) -> None:
        rows, present = self._rows.to(round.client_vectors), torch.zeros_like(self._members)
        sent = {update.client_id: update.reports[TRAINED].to(rows.device) for update in self._updates}
        for client, models in sent.items():
            present[self._places[client], client] = models[:, 0].bool().cpu()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a coalition: the run's own server says it of the run
            self._servers.begin_round(present, rows, round.round_index)
            for update in self._updates:
                client = update.client_id
                places = self._places[client].to(rows.device)
                self._servers.receive(client, places, sent[client][:, 1:], update.num_steps)
            self._rows = self._servers.end_round(rows, self._clients, round.server_data, lenient=True)
        self._updates, self._left = (), round.server_vector

    def coalition_models(self, round: Round) -> TrainedCoalitions:
        assert round.server_vector is not None
        trained = iter(self._rows)
        ends = {0: self._initial, self._masks.shape[1]: round.server_vector}
        models = [ends[size] if size in ends else next(trained) for size in self._masks.sum(1).tolist()]

        def build(index: int, out: Tensor) -> None:
            out.copy_(models[index])

        return TrainedCoalitions(self._masks, build)

    # ---- at a client

    def begin_client(self, context: ClientContext) -> None:
        self._visit = CoalitionRows(context, context.received(ROWS), self.algorithm)

    def begin_batch(self, context: ClientContext, batch: Any) -> None:
        assert self._visit is not None
        self._visit.begin_batch(batch)

    def gradients(self, context: ClientContext, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        assert self._visit is not None
        self._visit.step()
        if self.algorithm is not None:
            self.algorithm.gradients(context, parameters, gradients)

    def end_client(self, context: ClientContext) -> Mapping[str, Tensor | float]:
        assert self._visit is not None
        rows, sent = self._visit.trained().clone(), context.received(ROWS)
        for place, start in enumerate(sent):
            rows[place] = context.upload(rows[place], start, f"coalition {place} ")
        self._visit = None
        finite = rows.isfinite().all(1, keepdim=True)
        return {TRAINED: torch.cat([finite.to(rows), torch.where(finite, rows, sent)], 1)}


def _trained(masks: Tensor) -> Tensor:
    """Without nobody and everybody."""
    sizes = masks.sum(1)
    return masks[(sizes > 0) & (sizes < masks.shape[1])]
