"""ShadowTraining: while the federation trains, every client also trains the models of the coalitions that it is in.

What a client is worth is the Shapley value of the game in which every coalition of clients is a federation of its own.
:mod:`flsv.games.retraining` trains these after the run; here they are trained with it. In a round, the server sends a
client the models of its coalitions; the client trains them on the very batches of its own training, as rows of one
batched model; the server averages each over those of its members that take part. So each comes to the model that a run
of this coalition alone comes to, with the same seed, to rounding. Nobody's model is the initial one, and everybody's is
the federation's own: these two are not trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flsv.aggregation import FedAvg
from flsv.attacks import Attack
from flsv.clients.algorithms.base import ClientAlgorithm, ClientContext
from flsv.clients.kernel import RowTraining, models_of, states_of
from flsv.clients.pure_steps import NotBatched, batched_steps, purely
from flsv.clients.row_checks import not_batched
from flsv.clients.row_step import State
from flsv.errors import ConfigurationError
from flsv.metrics import ShadowShapley
from flsv.metrics.shadow import Coalitions, coalition_masks
from flsv.participants.sharing import sharing
from flsv.round import FederationState, Round, TrainedCoalitions
from flsv.seeding import restore_torch_rngs, torch_rngs
from flsv.strategy import Federation

ROWS, TRAINED = "coalition_models", "trained_coalition_models"
#: How far a coalition's model may be from the client's own where both are the same training, relative to how far that
#: went; and in bf16-mixed.
TOLERANCE, ROUNDED = 0.01, 0.1
#: Bytes of the rows at the server and on their way, from which on a run is refused.
MOST_BYTES = 2**32


class ShadowTraining(ClientAlgorithm):
    """The clients' side of :class:`flsv.metrics.ShadowShapley`, which brings it along.

    Down go the models of a client's coalitions, beside the global one. Up come these models, each behind a number: 1,
    or 0 where it is not finite, so that the client counts as absent from that coalition in this round.

    Args:
        coalitions: see the metric.

    Raises:
        ConfigurationError: before training, whatever would make a coalition's model another than that of a run of the
            coalition; in the first client's first step, a module that cannot be batched, with the reason; at its end,
            a coalition's model that differs from the client's own where they have to be the same.
    """

    sends = (ROWS,)
    reports = (TRAINED,)
    saved = ("_rows", "_initial")

    def __init__(self, coalitions: Coalitions = "auto") -> None:
        self.coalitions = coalitions
        self._visit: CoalitionRows | None = None
        self._kernel: RowTraining | None = None
        self._round = -1  # of the kernel's recordings

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_visit": None, "_kernel": None}

    # ---- at the server

    def begin(self, federation: Federation) -> None:
        self.resume(federation)
        self._initial = federation.global_vector.clone()
        self._rows = self._initial.expand(len(self._members), -1).clone()

    def resume(self, federation: Federation) -> None:
        self._visit = self._kernel = None
        self._aggregator: Any = federation.strategies["aggregator"]
        self._cut = federation.space.num_parameters
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
        rows, sent = self._rows.to(round.client_vectors), round.reports[TRAINED]
        clients = round.client_ids.tolist()
        places = [self._places[client].to(rows.device) for client in clients]
        present = torch.zeros(len(rows), len(clients), dtype=torch.bool)
        for column, where in enumerate(places):
            present[where.cpu(), column] = sent[column, : len(where), 0].bool().cpu()
        averages = CoalitionAverages(self._aggregator, round.num_samples, present, rows, self._cut)
        for column, where in enumerate(places):
            averages.receive(column, where, sent[column, : len(where), 1:])
        self._rows = averages.end_round(rows)

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
        if self._kernel is not None and self._round != context.instruction.round_index:
            self._kernel.recordings.doubt()
        self._round = context.instruction.round_index
        self._visit = CoalitionRows(context, context.received(ROWS), self._kernel)

    def begin_batch(self, context: ClientContext, batch: Any) -> None:
        assert self._visit is not None
        self._visit.begin_batch(batch)

    def gradients(self, context: ClientContext, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        assert self._visit is not None
        self._visit.step()

    def end_client(self, context: ClientContext) -> Mapping[str, Tensor | float]:
        assert self._visit is not None
        rows, sent = self._visit.trained().clone(), context.received(ROWS)
        for place, start in enumerate(sent):
            rows[place] = context.upload(rows[place], start, f"coalition {place} ")
        self._kernel = self._visit.kernel
        self._visit = None
        finite = rows.isfinite().all(1, keepdim=True)
        return {TRAINED: torch.cat([finite.to(rows), torch.where(finite, rows, sent)], 1)}


class CoalitionRows:
    """Trains the coalitions' models of one client at once, in a Trainer's fit of the client's own.

    Args:
        context: the client's.
        rows: ``[m, P]``, the models of its coalitions.
        kernel: of a visit before.

    Attributes:
        kernel: for the next visit; its recordings are of this one's round.

    Raises:
        ConfigurationError: in the first step, a module that does not allow it; at the end, a model that differs from
            the client's own though both started from the same and took the same batches.
    """

    def __init__(self, context: ClientContext, rows: Tensor, kernel: RowTraining | None) -> None:
        self._context, self._rows, self.kernel = context, rows, kernel
        # At first all coalitions are the initial model: what becomes of one becomes of all, and of the client's own.
        self._alike = bool(len(rows)) and bool((rows == context.start).all())
        self._states: State = {}

    def begin_batch(self, batch: Any) -> None:
        """Before the client's own step on it: what its model draws from here on, all draw."""
        self._batch, self._drawn = batch, torch_rngs(self._rows.device)

    def step(self) -> None:
        """On the same batch; the client's own gradients are there, and it has not taken its step."""
        if not len(self._rows):
            return
        module: Any = self._context.module
        before = self.kernel
        kernel = self._begin(module.trainer) if not self._states else self.kernel
        assert kernel is not None
        gradients = kernel.played(self._batch)
        if gradients is None:
            try:
                with nullcontext() if kernel is before else purely(module), self._as_the_client():
                    gradients = kernel.gradients(self._batch)
            except NotBatched as error:
                raise ConfigurationError(
                    f"ShadowShapley trains the models of many coalitions as one batched model, and training_step of "
                    f"{type(module).__name__} does not allow it: {error.reason}. Value the run by flsv retrain."
                ) from error
        kernel.take(gradients)

    def _begin(self, trainer: Any) -> RowTraining:
        module = self._context.module
        self._states = states_of(self._context.space, module, self._rows[:1] if self._alike else self._rows)
        own = dict(module.named_parameters())
        apart = {name for name, parameter in own.items() if parameter.grad is None or name not in self._states}
        optimizer, kernel = trainer.optimizers[0], self.kernel
        if kernel is None or (kernel.module, kernel.optimizer, kernel.apart) != (module, optimizer, apart):
            self.kernel = kernel = RowTraining(module, optimizer, trainer.gradient_clip_val, apart, shared=True)
        kernel.begin(self._states)
        return kernel

    @contextmanager
    def _as_the_client(self) -> Iterator[None]:
        """Within it rows draw what the client's own model has drawn of this batch."""
        module: Any = self._context.module
        device = self._rows.device
        now = torch_rngs(device)
        restore_torch_rngs(self._drawn, device)
        try:
            with batched_steps(module.trainer):
                yield
        finally:
            restore_torch_rngs(now, device)

    def trained(self) -> Tensor:
        """``[m, P]``, what has become of the rows."""
        if not self._states:
            return self._rows
        rows = models_of(self._context.space, self._states, self._rows)
        if not self._alike:
            return rows
        context: Any = self._context
        allowed = ROUNDED if context.module.trainer.precision == "bf16-mixed" else TOLERANCE
        apart, way = (rows[0] - context.trained).norm(), (context.trained - context.start).norm()
        if context.trained.isfinite().all() and not apart <= allowed * way + 1e-6 * context.start.norm():
            raise ConfigurationError(
                f"ShadowShapley: at client {context.instruction.client_id} the model of a coalition differs by "
                f"{100 * float(apart / way.clamp_min(1e-12)):.1f} % from the client's own, and both began alike and "
                "saw the same: the module, its optimizer or its schedule does something that batched training does "
                "not. Value the run by flsv retrain."
            )
        return rows.expand(len(self._rows), -1)


class CoalitionAverages:
    """FedAvg's part of many coalitions at once: weighted sums, to which every client's models are added.

    Args:
        aggregator: weighs the clients, and says how far the server goes.
        num_samples: ``[k]``, training samples of each client.
        members: bool ``[K, k]``, who is in which coalition.
        models: ``[K, P]``, what the coalitions start from; where nobody is, it stays.
        num_parameters: how many leading entries of a model the server's learning rate is for.
    """

    def __init__(
        self, aggregator: FedAvg, num_samples: Tensor, members: Tensor, models: Tensor, num_parameters: int
    ) -> None:
        samples = num_samples if aggregator.weighting == "samples" else torch.ones_like(num_samples)
        weights = members.double() * samples.to(members.device)
        self._weights = (weights / weights.sum(1, keepdim=True).clamp(min=1)).to(models)
        self._empty = ~members.any(1).to(models.device)
        self._server_lr, self._cut = aggregator.server_lr, num_parameters
        self._next = torch.zeros_like(models)

    def receive(self, client: int, rows: Tensor, sent: Tensor) -> None:
        """What a client, by its column, has made of the models of its coalitions, int64 ``[R]``: ``[R, P]``."""
        self._next.index_add_(0, rows, sent * self._weights[rows, client, None])

    def end_round(self, models: Tensor) -> Tensor:
        """The next models ``[K, P]`` after these."""
        after, self._next = self._next, torch.zeros_like(models)
        if self._server_lr != 1:
            cut = self._cut
            after[:, :cut] = torch.lerp(models[:, :cut], after[:, :cut], self._server_lr)
        after[self._empty] = models[self._empty]
        return after


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
    wanted = [metric.coalitions for metric in asking.values()]
    if isinstance(given, ShadowTraining):  # of a loop that this one replaces
        if given.coalitions in wanted and all(each == given.coalitions for each in wanted):
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
            f"metrics {list(asking)} are of different coalitions, and one set is trained in a run. Give them the same, "
            "or leave all but one out."
        )
    return ShadowTraining(wanted[0])
