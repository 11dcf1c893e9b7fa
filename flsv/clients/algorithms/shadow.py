"""ShadowTraining: while the federation trains, every client also trains the models of the coalitions that it is in.

What a client is worth is the Shapley value of the game in which every coalition of clients is a federation of its own.
:mod:`flsv.games.retraining` trains these after the run; here they are trained with it. In a round, the server sends a
client the models of its coalitions; the client trains them on the very batches of its own training, as rows of one
batched model; the server averages each over those of its members that take part. So each comes to the model that a run
of this coalition alone comes to, with the same seed, to rounding. Nobody's model is the initial one, and everybody's is
the federation's own: these two are not trained.

With a ``part``, such as the head, only that part of a coalition's model is its own. The rest is the federation's: while
a client trains, what its layers outside of the part give for a batch, before the step on that batch, is given to the
parts of all its coalitions; when coalitions are evaluated, the rest is the global model's after the round. Nobody's
model is the initial one as a whole. That is a game of its own, in which everybody has helped to train the features: who
brings features rather than a better head is worth more in a retraining.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flsv.aggregation import FedAvg
from flsv.attacks import Attack
from flsv.clients.algorithms.base import ClientAlgorithm, ClientContext
from flsv.clients.algorithms.shadow_rows import CoalitionRows, Entries
from flsv.clients.kernel import RowTraining
from flsv.clients.row_checks import not_batched
from flsv.errors import ConfigurationError
from flsv.metrics import ShadowShapley
from flsv.metrics.shadow import Coalitions, Part, coalition_masks
from flsv.participants.sharing import sharing
from flsv.round import FederationState, Round, TrainedCoalitions
from flsv.strategy import Federation

ROWS, TRAINED = "coalition_models", "trained_coalition_models"
#: Bytes of the rows at the server and on their way, from which on a run is refused.
MOST_BYTES = 2**32


class ShadowTraining(ClientAlgorithm):
    """The clients' side of :class:`flsv.metrics.ShadowShapley`, which brings it along.

    Down go the models of a client's coalitions, beside the global one. Up come these models, each behind a number: 1,
    or 0 where it is not finite, so that the client counts as absent from that coalition in this round.

    Args:
        coalitions: see the metric, as all of these.
        part: likewise.

    Raises:
        ConfigurationError: before training, whatever would make a coalition's model another than that of a run of the
            coalition; in the first client's first step, a module that cannot be batched, with the reason; at its end,
            a coalition's model that differs from the client's own where they have to be the same.
    """

    sends = (ROWS,)
    reports = (TRAINED,)
    saved = ("_rows", "_initial")

    def __init__(self, coalitions: Coalitions = "auto", part: Part = "all") -> None:
        self.coalitions, self.part = coalitions, part
        self._visit: CoalitionRows | None = None
        self._kernel: RowTraining | None = None
        self._round = -1  # of the kernel's recordings

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_visit": None, "_kernel": None}

    # ---- at the server

    def begin(self, federation: Federation) -> None:
        self.resume(federation)
        self._initial = federation.global_vector.clone()
        rows = self._entries.of(self._initial)
        self._rows = rows.expand(len(self._members), -1).clone()

    def resume(self, federation: Federation) -> None:
        self._visit = self._kernel = None
        self._aggregator: Any = federation.strategies["aggregator"]
        self._entries = Entries(federation.space, self.part)
        self._masks = coalition_masks(self.coalitions, federation.num_clients)
        self._members = _trained(self._masks)
        self._places = [mine.nonzero().flatten() for mine in self._members.T]
        rows = len(self._members) + 3 * sum(map(len, self._places))  # the server's, and as they cross
        size = rows * self._entries.size * federation.space.dtype.itemsize
        if size > MOST_BYTES:
            raise ConfigurationError(
                f"ShadowShapley(coalitions={self.coalitions!r}, part={self.part!r}): the models of "
                f"{len(self._members)} coalitions take {size / 2**30:.0f} GiB at the server, with those on their way. "
                'Take coalitions="pairs" or "singles", or part="head".'
            )

    def check_fit(self, trainer: Any, config: Any) -> None:
        if why := self._why_not(trainer, config):
            raise ConfigurationError(f"ShadowShapley trains a model for each of many coalitions, and {why}.")

    def _why_not(self, trainer: Any, config: Any) -> str | None:
        """Why coalitions' models would not be those of runs of the coalitions, and what to do."""
        if config.personalizer is not None:
            return f"personalizer={config.personalizer!r} gives each client a start point of its own. Leave one out"
        if type(config.aggregator) is not FedAvg:
            return (
                f"aggregator={config.aggregator!r} does more than to average by samples, which each coalition's server "
                "would have to do with what its own clients send. Use FedAvg, or value the run by flsv retrain"
            )
        if others := [each for each in config.uploads if not isinstance(each, Attack)]:
            return (
                f"uploads={others} would have to change what clients send in every coalition: noise would be spent on "
                "each of their models, and colluders would meet in each. Leave one of the two out, or value the run by "
                "flsv retrain"
            )
        if config.uploads and self.part != "all":
            return (
                f"uploads={list(config.uploads)} change whole updates, of which part={self.part!r} is a part. Take "
                'part="all", or leave one of the two out'
            )
        changing = [each for each in config.filters if each.excludes or each.bounds]
        if changing:
            return f"filters={changing} change a cohort's updates by what the others send. Leave one of the two out"
        if kept := sharing(config.share, trainer.lightning_module, config.head).kept:
            return (
                f"with share={config.share!r} {sorted(kept)[0]!r} and others stay at the clients. Share all that is "
                "trained"
            )
        return not_batched(trainer, None, config.client_optimizer, schedules=True)

    def send(self, client: int, start: Tensor | None, state: FederationState) -> dict[str, Tensor]:
        self._rows = self._rows.to(state.model())
        return {ROWS: self._rows[self._places[client].to(self._rows.device)]}

    def end_round(self, round: Round) -> None:
        rows = self._rows.to(round.client_vectors)
        after, total = self._averages(round, rows)
        if self._aggregator.server_lr != 1:
            cut = self._entries.num_parameters
            after[:, :cut] = torch.lerp(rows[:, :cut], after[:, :cut], self._aggregator.server_lr)
        self._rows = torch.where((total > 0).to(rows.device)[:, None], after, rows)

    def _averages(self, round: Round, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of what each client reports: ``[K, Q]``, and the weights' sums ``[K]``."""
        sent = round.reports[TRAINED]
        clients = round.client_ids.tolist()
        samples = round.num_samples.double()
        if self._aggregator.weighting == "uniform":
            samples = torch.ones_like(samples)
        weights = rows.new_zeros(len(clients), len(rows), dtype=torch.float64)
        places = [self._places[client].to(rows.device) for client in clients]
        for client, where in enumerate(places):
            weights[client, where] = samples[client] * sent[client, : len(where), 0].double()
        total = weights.sum(0)
        shares = (weights / total.where(total > 0, 1.0)).to(rows)
        after = torch.zeros_like(rows)
        for client, where in enumerate(places):
            after.index_add_(0, where, shares[client, where, None] * sent[client, : len(where), 1:])
        return after, total

    def coalition_models(self, round: Round) -> TrainedCoalitions:
        assert round.server_vector is not None
        whole, initial, entries = round.server_vector, self._initial, self._entries
        rows, sizes = self._rows, self._masks.sum(1).tolist()
        place = iter(range(len(rows)))
        at = [next(place) if 0 < size < self._masks.shape[1] else -1 for size in sizes]

        def build(index: int, out: Tensor) -> None:
            out.copy_(initial if sizes[index] == 0 else whole)
            if at[index] >= 0:
                entries.put(out, rows[at[index]])

        return TrainedCoalitions(self._masks, build)

    # ---- at a client

    def begin_client(self, context: ClientContext) -> None:
        self.leave_client(context)
        if self._kernel is not None and self._round != context.instruction.round_index:
            self._kernel.recordings.doubt()
        self._round = context.instruction.round_index
        entries = Entries(context.space, self.part)
        self._visit = CoalitionRows(context, context.received(ROWS), entries, self._kernel)

    def begin_batch(self, context: ClientContext, batch: Any) -> None:
        assert self._visit is not None
        self._visit.begin_batch(batch)

    def gradients(self, context: ClientContext, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        assert self._visit is not None
        self._visit.step()

    def leave_client(self, context: ClientContext) -> None:
        if self._visit is not None:
            self._visit.leave()

    def end_client(self, context: ClientContext) -> Mapping[str, Tensor | float]:
        assert self._visit is not None
        rows, sent = self._visit.trained().clone(), context.received(ROWS)
        if self.part == "all":
            for place, start in enumerate(sent):
                rows[place] = context.upload(rows[place], start, f"coalition {place} ")
        self._kernel = self._visit.kernel
        self._visit = None
        finite = rows.isfinite().all(1, keepdim=True)
        return {TRAINED: torch.cat([finite.to(rows), torch.where(finite, rows, sent)], 1)}


def _trained(masks: Tensor) -> Tensor:
    """Without nobody and everybody."""
    sizes = masks.sum(1)
    return masks[(sizes > 0) & (sizes < masks.shape[1])]


def shadow_training(metrics: Mapping[str, Any], given: ClientAlgorithm | None) -> ClientAlgorithm | None:
    """The client algorithm of a federation with these metrics: the given one, or what a ShadowShapley needs.

    Raises:
        ConfigurationError: both; or several metrics of different coalitions.
    """
    asking = {name: metric for name, metric in metrics.items() if isinstance(metric, ShadowShapley)}
    wanted = [(metric.coalitions, metric.part) for metric in asking.values()]
    if isinstance(given, ShadowTraining):  # of a loop that this one replaces
        known = (given.coalitions, given.part)
        given = given if known in wanted else None
        if given is not None and all(each == known for each in wanted):
            return given
        given = None
    if not wanted:
        return given
    if given is not None:
        raise ConfigurationError(
            f"metrics {list(asking)} train coalitions' models as clients train without client_algorithm={given!r}, so "
            "that these would be models of another federation. Leave one of the two out."
        )
    if any(each != wanted[0] for each in wanted):
        raise ConfigurationError(
            f"metrics {list(asking)} are of different coalitions or parts, and one set is trained in a "
            "run. Give them the same, or leave all but one out."
        )
    return ShadowTraining(*wanted[0])
