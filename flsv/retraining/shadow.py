"""ShadowTraining: clients at sites also train the models of the coalitions that they are in.

The server sends a client the models of its coalitions beside the global model. The client trains them on the same
batches as its own model, as rows of one batched model. At the server each coalition has an aggregator, filters and
metrics of its own. Up to rounding, a coalition's model equals that of a run of its members with the same seed.
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
from flsv.engines.engine import shared_space
from flsv.functional.own_models import doubtful_own_models
from flsv.retraining.coalition_rows import CoalitionRows, not_the_same
from flsv.retraining.coalition_servers import servers_of, unlike_alone
from flsv.sampling import FullParticipation
from flsv.training.algorithms import ClientAlgorithm, ClientContext
from flsv.training.rows.row_checks import not_batched, not_by_rounds
from flsv.utilities.host_copies import to_host

ROWS, TRAINED = "coalition_models", "trained_coalition_models"
#: Largest size in bytes of the coalitions' models, at the server and in messages, with which they are trained as rows.
MOST_BYTES = 2**32
#: The largest distance of a client's own model to its first update, which is the same training, as a part of its way.
SAME = 0.01


def not_as_rows(trainer: L.Trainer, config: FederationConfig, masks: Tensor) -> str | None:
    """Check before the first round whether sites can train coalitions as rows of one batched model, with the same
    models as in separate runs. Every site checks its first steps, too.

    Args:
        trainer: the trainer in ``on_train_start``, with its optimizers set up.
        config: the federation's configuration.
        masks: bool ``[K, n]``, the members of the coalitions to train.

    Returns:
        The reason why the coalitions would get other models or take too much memory, and what to do; None if they can
        be trained as rows.
    """
    if why := unlike_alone(config, config.client_algorithm):
        return f"{why}. Leave it out"
    if not isinstance(config.sampler, FullParticipation):
        return (
            f"each coalition draws its own cohorts by sampler={config.sampler!r}, and sites train in rounds for which "
            "the run draws them"
        )
    if why := not_batched(trainer, None, config.optimizer_state, schedules=True, accumulates=True):
        return why
    if why := not_by_rounds(trainer):
        return f"{why}. Take a schedule that steps by rounds or batches"
    return _too_large(masks, shared_space(trainer.lightning_module, config)[0])


def _too_large(masks: Tensor, space: ParameterSpace) -> str | None:
    """Return a sentence if the models of the coalitions take more memory than is allowed, else None.

    Args:
        masks: bool ``[K, n]``, the members of each coalition.
        space: the map between the module and its vectors ``[P]``.
    """
    members = trained_masks(masks)
    size = (len(members) + 3 * int(members.sum())) * space.size * space.dtype.itemsize  # three copies while they cross
    if size <= MOST_BYTES:
        return None
    return (
        f"the models of {len(members)} coalitions take {size / 2**30:.0f} GiB at the server, "
        "including those being sent. "
        'Take coalitions="pairs" or "singles"'
    )


class ShadowTraining(ClientAlgorithm):
    """Client algorithm that trains coalitions as rows for :class:`flsv.metrics.ShadowShapley`.

    :class:`flsv.retraining.coalition_plan.CoalitionPlan` uses this algorithm if training as rows gives the same models
    as separate runs of the coalitions. The server sends a client the models of its coalitions beside the global model.
    The client reports these models after training as ``[m, 1 + P]``. The first number of a row is 1, or 0 if the model
    is not finite; then the client counts as absent from this coalition in the round.

    Args:
        masks: a function of the number of clients n, which returns the members of the coalitions to train, bool
            ``[K, n]``.
        algorithm: the clients' own algorithm, which all coalitions use; it must change gradients entry by entry, as
            :class:`flsv.training.algorithms.FedProx` does; None: there is none.

    Raises:
        ConfigurationError: the module cannot be batched (in the first client's first step); a
            coalition's model differs from the client's own although both must be equal (after a client's training); or
            the global model has changed since the last round (before a round).
    """

    sends = (ROWS,)
    reports = (TRAINED,)
    saved = ("_rows", "_initial", "_moved")

    def __init__(
        self,
        masks: Callable[[int], Tensor],
        algorithm: ClientAlgorithm | None = None,
    ) -> None:
        self._make_masks, self.algorithm = masks, algorithm
        self._visit: CoalitionRows | None = None
        self._left: Tensor | None = None  # the global model after the last round
        self._updates: Sequence[ClientUpdate] = ()
        self._clients: Sequence[Client] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_visit": None, "_left": None, "_clients": ()}

    @property
    def changes_steps(self) -> bool:  # type: ignore[override]  # a property for an attribute
        """Return whether the clients' own algorithm changes their optimizer steps."""
        return self.algorithm is not None

    # ---- at the server

    def begin(self, federation: FederationInfo) -> None:
        self._set_up(federation)
        self._left = self._initial = federation.global_vector.clone()
        self._rows = self._initial.expand(len(self._members), -1).clone()
        self._moved = torch.zeros_like(self._rows[:1]).repeat(federation.num_clients, 1)
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
        self._masks = self._make_masks(federation.num_clients)
        self._members = trained_masks(self._masks)
        self._places = [mine.nonzero().flatten() for mine in self._members.T]

    def send(self, client: int, start: Tensor | None, state: FederationState) -> dict[str, Tensor]:
        self._note = state.note
        left, self._left = self._left, None  # looked at once in a round: the host waits for the device
        if left is not None and not torch.equal(left, state.model()):
            between = f"between rounds {state.round_index} and {state.round_index + 1}"
            reason = (
                f"the module's weights or buffers have changed {between}, as by a hook around an epoch or by "
                "validation, and coalitions' models, trained as rows, would not"
            )
            raise not_the_same(reason, "Let hooks leave them as they are, or value the run by flsv retrain")
        self._rows = self._rows.to(state.model())
        return {ROWS: self._rows[self._places[client].to(self._rows.device)]}

    def before_filters(self, updates: Sequence[ClientUpdate], clients: Sequence[Client]) -> None:
        self._updates, self._clients = updates, clients

    def end_round(self, round: Round) -> None:
        rows, present = self._rows.to(round.client_vectors), torch.zeros_like(self._members)
        sent = {update.client_id: update.reports[TRAINED].to(rows.device) for update in self._updates}
        for client, finite in zip(sent, to_host(models[:, 0] for models in sent.values())):
            present[self._places[client], client] = finite.bool()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # only the run's own server warns, not the coalitions' servers
            self._servers.begin_round(present, rows, round.round_index)
            for update in self._updates:
                client = update.client_id
                places = self._places[client].to(rows.device)
                self._servers.receive(client, places, sent[client][:, 1:], update.num_steps)
            self._rows = self._servers.end_round(rows, self._clients, round.server_data)
        self._doubt(round, sent)
        self._updates, self._left = (), round.server_vector

    def _doubt(self, round: Round, sent: Mapping[int, Tensor]) -> None:
        """Note the clients whose model of them alone does not look as if they had trained it."""
        alone = self._members.sum(1) == 1
        if int(alone.sum()) < self._members.shape[1]:
            return
        own, order = self._rows[alone.to(self._rows.device)], self._members[alone].int().argmax(1).argsort()
        self._moved = self._moved.to(own)
        for update in self._updates:
            moved = (update.vector - round.global_vector).nan_to_num(0.0, 0.0, 0.0)
            self._moved[update.client_id] += moved
            if round.round_index == 0:  # both are the same training
                client = update.client_id
                row = sent[client][(self._members[self._places[client]].sum(1) == 1).to(own.device), 1:][0]
                if (row - update.vector).norm() > SAME * moved.norm():
                    self._note(client, "its own model is not its first update")
        if round.round_index:
            initial, known = self._initial.to(own), round.global_vector  # the last model that clients have seen
            for client, why in doubtful_own_models(own[order], initial, known, self._moved).items():
                self._note(client, why)

    def coalition_models(self, round: Round) -> TrainedCoalitions:
        assert round.server_vector is not None
        return models_of(self._masks, self._initial, round.server_vector, self._rows)

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
        sent = context.received(ROWS)
        rows = self._visit.trained().clone()
        for place, start in enumerate(sent):
            rows[place] = context.upload(rows[place], start, f"coalition {place} ")
        self._visit = None
        finite = rows.isfinite().all(1, keepdim=True)
        return {TRAINED: torch.cat([finite.to(rows), torch.where(finite, rows, sent)], 1)}


def models_of(masks: Tensor, nobody: Tensor, everybody: Tensor, rows: Tensor) -> TrainedCoalitions:
    """Combine coalitions and their models to the trained coalitions of a round, which metrics read.

    Args:
        masks: bool ``[K, n]``, the members of each coalition, the empty and the full coalition among them.
        nobody: ``[P]``, the empty coalition's model.
        everybody: ``[P]``, the full coalition's model.
        rows: ``[R, P]``, the models of the other coalitions, in the order of ``masks``.
    """
    trained, ends = iter(rows), {0: nobody, masks.shape[1]: everybody}
    models = [ends[size] if size in ends else next(trained) for size in masks.sum(1).tolist()]

    def build(index: int, out: Tensor) -> None:
        out.copy_(models[index])

    return TrainedCoalitions(masks, build)


def ends_of(nobody: Tensor, everybody: Tensor, num_clients: int) -> TrainedCoalitions:
    """Return the two trained coalitions that need no training: the empty and the full coalition.

    Args:
        nobody: ``[P]``, the empty coalition's model.
        everybody: ``[P]``, the full coalition's model.
        num_clients: the number n of clients.
    """

    return models_of(torch.tensor([[False], [True]]).expand(-1, num_clients), nobody, everybody, nobody[None])


def trained_masks(masks: Tensor) -> Tensor:
    """Return the rows of ``masks [K, n]`` that are neither the empty nor the full coalition."""
    sizes = masks.sum(1)
    return masks[(sizes > 0) & (sizes < masks.shape[1])]
