"""ShadowTraining: every client also trains the models of its coalitions while the federation trains.

The models give each client's Shapley value in the game in which every coalition of clients is a federation of its own.
:mod:`flsv.games.retrained_utility` trains these federations after the run, this module during it. In a round, the
server sends a client the models of its coalitions; the client trains them on the same batches as its own model, as rows
of one batched model. At the server, each coalition has an aggregator, filters and metrics of its own, for those of its
members that take part. Up to rounding, the model of each coalition equals that of a run of this coalition alone with
the same seed. The empty coalition's model is the initial one and the full coalition's is the federation's own: these
two are not trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv.configuration.federation_config import FederationConfig
from flsv.core import Client, ClientUpdate, FederationState, ParameterSpace, Round, TrainedCoalitions
from flsv.core.strategy import FederationInfo
from flsv.engines.one_process import shared_space
from flsv.metrics.shadow import Coalitions, coalition_masks
from flsv.retraining.coalition_servers import servers_of, unlike_alone
from flsv.training.algorithms import ClientAlgorithm, ClientContext
from flsv.training.rows.coalition_rows import CoalitionRows, not_the_same
from flsv.training.rows.row_checks import not_batched, not_by_rounds
from flsv.training.rows.row_step import NotBatched
from flsv.training.rows.row_trial import why_not_rows

ROWS, TRAINED = "coalition_models", "trained_coalition_models"
#: Bytes of the rows at the server and on their way, above which coalitions are not trained as rows.
MOST_BYTES = 2**32


def not_as_rows(trainer: L.Trainer, config: FederationConfig, coalitions: Coalitions) -> str | None:
    """Check before the first round whether coalitions trained as rows get the same models as in runs of their own.

    The settings are checked first; then a copy of the module trains a few batches of a client in both ways, where the
    clients' data are in this process. The trainer and the module are not changed.

    Args:
        trainer: the trainer in ``on_train_start``, with its optimizers set up and its data assigned to clients.
        config: the federation's parts.
        coalitions: the coalitions to train.

    Returns:
        Why they would get other models, and what to do; None if they get the same.
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
    space, data = shared_space(module, config)[0], trainer.datamodule  # type: ignore[attr-defined]  # undeclared
    if why := _too_large(coalition_masks(coalitions, data.num_clients), space):
        return why
    if callable(config.engine):  # the data are elsewhere: every site checks its first steps
        return None
    return why_not_rows(trainer, space, config.seed or 0, draws=("torch",))


def _too_large(masks: Tensor, space: ParameterSpace) -> str | None:
    """Say that the models of coalitions bool ``[K, n]`` take more memory than is allowed; None: they do not."""
    members = _trained(masks)
    size = (len(members) + 3 * int(members.sum())) * space.size * space.dtype.itemsize  # three copies while they cross
    if size <= MOST_BYTES:
        return None
    return (
        f"the models of {len(members)} coalitions take {size / 2**30:.0f} GiB at the server, with those on their way. "
        'Take coalitions="pairs" or "singles"'
    )


class ShadowTraining(ClientAlgorithm):
    """Client algorithm that trains coalitions as rows for :class:`flsv.metrics.ShadowShapley`.

    :class:`flsv.retraining.coalition_plan.CoalitionPlan` uses it where rows get the same models as runs. The server
    sends the models of a client's coalitions beside the global one. The client reports these models after training,
    each behind a number: 1, or 0 where the model is not finite, so that the client counts as absent from that coalition
    in this round.

    Args:
        coalitions: the coalitions to train, as for the metric.
        algorithm: the clients' own algorithm, which all coalitions use; it must change gradients entry by entry, as
            :class:`flsv.training.algorithms.FedProx`; None: there is none.
        give_up: called with the reason if rows turn out during training not to be the same as runs; from then on no
            coalitions are trained. None: that is an error.

    Raises:
        ConfigurationError: without ``give_up``: in the first client's first step, the module cannot be batched; at the
            end of a turn, a coalition's model differs from the client's own although they must be equal; weights have
            changed between rounds.
    """

    sends = (ROWS,)
    reports = (TRAINED,)
    saved = ("_rows", "_initial")

    def __init__(
        self,
        coalitions: Coalitions = "auto",
        algorithm: ClientAlgorithm | None = None,
        give_up: Callable[[str], None] | None = None,
    ) -> None:
        self.coalitions, self.algorithm = coalitions, algorithm
        self._give_up, self._given_up = give_up, False
        self._visit: CoalitionRows | None = None
        self._left: Tensor | None = None  # the global model after the last round
        self._updates: Sequence[ClientUpdate] = ()
        self._clients: Sequence[Client] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_visit": None, "_left": None, "_clients": (), "_give_up": None}

    @property
    def changes_steps(self) -> bool:  # type: ignore[override]  # a property for an attribute
        """Return whether clients take other steps than without the algorithm."""
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

    def send(self, client: int, start: Tensor | None, state: FederationState) -> dict[str, Tensor]:
        if self._left is not None and not torch.equal(self._left, state.model()):
            between = f"between rounds {state.round_index} and {state.round_index + 1}"
            reason = (
                f"the module's weights or buffers have changed {between}, as by a hook around an epoch or by "
                "validation, and coalitions' models, trained as rows, would not"
            )
            self._stop(not_the_same(reason, "Let hooks leave them as they are, or value the run by flsv retrain"))
        if self._given_up:
            return {ROWS: state.model().new_empty(0, len(state.model()))}
        self._rows = self._rows.to(state.model())
        return {ROWS: self._rows[self._places[client].to(self._rows.device)]}

    def before_filters(self, updates: Sequence[ClientUpdate], clients: Sequence[Client]) -> None:
        self._updates, self._clients = updates, clients

    def _stop(self, error: NotBatched) -> None:
        if self._give_up is None:
            raise error
        if not self._given_up:
            self._given_up = True
            self._give_up(error.reason)

    def end_round(self, round: Round) -> None:
        if self._given_up:
            return
        rows, present = self._rows.to(round.client_vectors), torch.zeros_like(self._members)
        sent = {update.client_id: update.reports[TRAINED].to(rows.device) for update in self._updates}
        for client, models in sent.items():
            present[self._places[client], client] = models[:, 0].bool().cpu()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a coalition's: the run's own server warns of the run
            self._servers.begin_round(present, rows, round.round_index)
            for update in self._updates:
                client = update.client_id
                places = self._places[client].to(rows.device)
                self._servers.receive(client, places, sent[client][:, 1:], update.num_steps)
            self._rows = self._servers.end_round(rows, self._clients, round.server_data, lenient=True)
        self._updates, self._left = (), round.server_vector

    def coalition_models(self, round: Round) -> TrainedCoalitions:
        assert round.server_vector is not None
        if self._given_up:
            return ends_of(self._initial, round.server_vector, self._masks.shape[1])
        trained = iter(self._rows)
        ends = {0: self._initial, self._masks.shape[1]: round.server_vector}
        models = [ends[size] if size in ends else next(trained) for size in self._masks.sum(1).tolist()]

        def build(index: int, out: Tensor) -> None:
            out.copy_(models[index])

        return TrainedCoalitions(self._masks, build)

    # ---- at a client

    def begin_client(self, context: ClientContext) -> None:
        rows = context.received(ROWS)
        self._visit = CoalitionRows(context, rows[:0] if self._given_up else rows, self.algorithm)

    def begin_batch(self, context: ClientContext, batch: Any) -> None:
        assert self._visit is not None
        self._visit.begin_batch(batch)

    def gradients(self, context: ClientContext, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        assert self._visit is not None
        try:
            self._visit.step()
        except NotBatched as error:
            self._stop(error)
            self._visit = CoalitionRows(context, context.received(ROWS)[:0])
        if self.algorithm is not None:
            self.algorithm.gradients(context, parameters, gradients)

    def end_client(self, context: ClientContext) -> Mapping[str, Tensor | float]:
        assert self._visit is not None
        sent = context.received(ROWS)
        try:
            rows = self._visit.trained().clone()
        except NotBatched as error:
            self._stop(error)
            rows = sent[:0]
        sent = sent[: len(rows)]
        for place, start in enumerate(sent):
            rows[place] = context.upload(rows[place], start, f"coalition {place} ")
        self._visit = None
        finite = rows.isfinite().all(1, keepdim=True)
        return {TRAINED: torch.cat([finite.to(rows), torch.where(finite, rows, sent)], 1)}


def ends_of(nobody: Tensor, everybody: Tensor, num_clients: int) -> TrainedCoalitions:
    """Return the models ``[P]`` of the empty and the full coalition of n clients as trained coalitions."""

    def build(index: int, out: Tensor) -> None:
        out.copy_(everybody if index else nobody)

    return TrainedCoalitions(torch.tensor([[False], [True]]).expand(-1, num_clients), build)


def _trained(masks: Tensor) -> Tensor:
    """Return the coalitions without the empty and the full one, bool ``[K', n]``."""
    sizes = masks.sum(1)
    return masks[(sizes > 0) & (sizes < masks.shape[1])]
