"""Round: what the server knows of one round. Metrics name its attributes.

A contribution metric, an aggregator, a personalizer or a sampler asks for a quantity by one of the names on
:class:`Round`; whatever is expensive is derived when it is first asked for, and never if nobody does. A property says
with ``@after(stage)`` when it is known; a metric is updated at the latest stage of what its ``update`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flsv.core.client import Channel, Client, map_clients
from flsv.core.fields import TrainedCoalitions, after, derived, known_after
from flsv.core.local_data import LocalData
from flsv.core.matrix import BLOCK_BYTES, CPU_BLOCK_BYTES, ClientMatrix
from flsv.core.parameter_space import Head, ParameterSpace
from flsv.functional.common_entries import common_entries
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for

Start = Tensor | Client
"""Where a client started from: a vector ``[P]``, or a client to be asked for it."""


@dataclass(frozen=True)
class Round:
    """One communication round, seen from the server. k = cohort size, P = length of the parameter vector, M = classes.

    What is known only after a stage says so (:func:`flsv.core.after`): a metric that asks for ``server_*`` or
    ``aggregation_weights`` is updated after aggregation, and weighs the next round; one that asks for ``peer_values``
    after personalization, and one that asks for ``uploaded``, ``downloaded`` or ``reached`` when everything has
    crossed.

    Beside these names a metric may ask for whatever a strategy lets the clients report
    (:attr:`flsv.core.strategy.Strategy.reports`).

    Args:
        round_index: the round's number, from 0.
        client_ids: ``[k]`` integers, who took part (without clients whose update was not finite, or excluded).
        num_samples: ``[k]`` integers, training samples of each.
        global_vector: ``[P]``, the global model at the start of the round.
        client_vectors: ``[k, P]``, the clients' models after local training.
        space: the map between vectors and modules.
        starts: where every client started from, a vector ``[P]`` or a client to be asked; None: all from the global
            model.
        losses: ``[k]`` mean training losses.
        num_steps: ``[k]`` integers, optimizer steps of each.
        reports: name to ``[k, ...]``, what strategies let the clients report.
        clients: the cohort, to be asked for what follows from their data; None outside of a fit.
        server_data: the server's validation set; None where there is none.
        seed: of the round's own random choices; see :meth:`generator`.
        chances: gives each client's probability ``[n]`` to be drawn into this cohort; None: certain.
        games: the round's coalition games on the server's validation set, a ``flsv.games.CoalitionGames``, or None.
        channel: counts what crosses; None outside of a fit.
        server_vector: ``[P]``, the next global model; None before aggregation.
        aggregation_weights: ``[k]``, the clients' weights in it; None before aggregation.
        left_out: ids of the clients that have sent an update, too, and were excluded.
        unmeasured: ids of clients of the cohort whose updates are far too large: they are aggregated, and not measured.
        peer_values: ``[k, n]``, what every client of the cohort found every client's model to be worth to it, NaN for
            those it did not look at; None where clients do not judge each other.
        trained: the models of coalitions that are trained beside the global one; None before the exchange, and where
            there are none.
    """

    round_index: int
    client_ids: Tensor
    num_samples: Tensor
    global_vector: Tensor
    client_vectors: Tensor
    space: ParameterSpace
    starts: Sequence[Start] | None = None
    losses: Tensor | None = None
    num_steps: Tensor | None = None
    reports: Mapping[str, Tensor] = field(default_factory=dict)
    clients: Sequence[Client] | None = None
    server_data: LocalData | None = None
    seed: int = 0
    chances: Callable[[], Tensor] | None = None
    games: Any = None
    channel: Channel | None = None
    server_vector: Tensor | None = None
    aggregation_weights: Tensor | None = None
    peer_values: Tensor | None = None
    trained: TrainedCoalitions | None = None
    left_out: Sequence[int] = ()
    unmeasured: Sequence[int] = ()

    def __len__(self) -> int:
        """k, the size of the cohort."""
        return len(self.client_ids)

    @cached_property
    def matrix(self) -> ClientMatrix:
        """The cohort's models and what follows from them without a second matrix: norms, products, weighted sums."""
        starts = self.starts or [self.global_vector] * len(self)
        return ClientMatrix(self.client_vectors, asked_starts(starts))

    @cached_property
    def start_vectors(self) -> Tensor | None:
        """``[k, P]``: the models that the clients started from; None where all started from the global one. A second
        matrix of the size of ``client_vectors``."""
        starts = self.matrix.starts
        return None if all(start is self.global_vector for start in starts) else torch.stack(list(starts))

    @cached_property
    def client_updates(self) -> Tensor:
        """``[k, P]``: d_i = x_i minus the client's start point. A second matrix of the size of ``client_vectors``; see
        :attr:`matrix` for what can be had without it."""
        return self.matrix.updates(slice(None))

    @cached_property
    def client_heads(self) -> Tensor:
        """``[k, M, D+1]``: the classifier head's rows (weights, bias) of every client's update."""
        head = self.head
        starts = self.matrix.starts
        if all(start is self.global_vector for start in starts):
            return head.rows(self.client_vectors) - head.rows(self.global_vector)
        return head.rows(self.client_vectors) - torch.stack([head.rows(start) for start in starts])

    @cached_property
    def client_head_weights(self) -> Tensor:
        """``[k, M, D+1]``: the classifier head's rows of every client's weights."""
        return self.head.rows(self.client_vectors)

    @cached_property
    def inclusion_probabilities(self) -> Tensor:
        """``[k]``: each client's chance to have been drawn into this cohort."""
        if self.chances is None:
            return torch.ones(len(self), device=self.client_ids.device)
        return self.chances().to(self.client_ids.device)[self.client_ids]

    @cached_property
    def senders(self) -> Tensor:
        """``[s]`` integers: who has sent an update, the cohort first, then who was excluded."""
        return torch.cat([self.client_ids, self.client_ids.new_tensor(list(self.left_out))])

    @cached_property
    def utility(self) -> Any:
        """The coalition game of accuracy, with uniform averages inside a coalition."""
        return self._games.utility()

    def play(self, metric: Any = "accuracy", weighting: Any = "uniform") -> Any:
        """Another coalition game of this round; all games of a round share their evaluations."""
        return self._games.utility(metric, weighting)

    def gradient_products(self, order: int = 1, loss: Any = "negative_loss") -> Any:
        """g . d_i ``[k]`` and, for order 2, d_i^T H d_j ``[k, k]`` of the validation loss at the global model."""
        return self._games.gradient_products(order, loss)

    def slopes(self, balanced: bool = False) -> Tensor:
        """g . d_i ``[k]`` alone; ``balanced``: of the validation loss in which all classes count the same."""
        return self._games.slopes(balanced)

    def generator(self, name: str) -> torch.Generator:
        """The random stream of ``name`` in this round."""
        return generator_for(self.seed, name, self.round_index)

    @cached_property
    @after("aggregation")
    def server_update(self) -> Tensor:
        """``[P]``: the next global model minus this round's."""
        return self._aggregated("server_vector") - self.global_vector

    @cached_property
    @after("aggregation")
    def server_head(self) -> Tensor:
        """``[M, D+1]``: the clients' head updates, averaged with this round's aggregation weights."""
        return torch.einsum("k,kmd->md", self._weights, self.client_heads)

    @cached_property
    @after("aggregation")
    def server_head_weights(self) -> Tensor:
        """``[M, D+1]``: the clients' head weights, averaged with this round's aggregation weights."""
        return torch.einsum("k,kmd->md", self._weights, self.client_head_weights)

    @property
    def head(self) -> Head:
        """The position of the classifier head in a vector."""
        if self.space.head is None:
            if self.space.unshared_head is not None:
                raise ConfigurationError(f"the classifier head {self.space.unshared_head!r} is not shared.")
            raise ConfigurationError("the module has no linear layer, so it has no classifier head.")
        return self.space.head

    def combine(self, weights: Tensor) -> Tensor:
        """``[P]``: x + sum_i weights_i (x_i - x) for the parameters x, whatever the weights sum to.

        Buffers (BatchNorm's statistics) are averaged with the weights made to sum to 1: moving a running variance
        beyond the clients' own can turn it negative. Where all clients' models agree, the result is exactly that.
        """
        weights = weights.to(self.client_vectors)
        total, cut = weights.sum(), self.space.num_parameters
        result = weights @ self.client_vectors
        # In blocks, or it would be another vector; not the matrix's, which knows where clients started by asking them.
        width = (CPU_BLOCK_BYTES if result.device.type == "cpu" else BLOCK_BYTES) // result.element_size()
        for moved, before in zip(result[:cut].split(width), self.global_vector[:cut].split(width)):
            moved += (1 - total) * before
        if cut < self.space.size and total != 1:
            result[cut:] = result[cut:] / total if total != 0 else self.global_vector[cut:]
        # What nobody has changed must not drift by the rounding of the weights: frozen weights, constant buffers.
        rounding = 8 * len(weights) * torch.finfo(weights.dtype).eps
        partly = abs(total.item() - 1) > rounding
        for block, same in common_entries(self.client_vectors):
            common, before = self.client_vectors[0, block], self.global_vector[block]
            if partly:  # parameters that all have moved, they move by another amount
                same &= (common == before) | (torch.arange(block.start, block.stop, device=same.device) >= cut)
                common = common if total != 0 else before
            result[block] = common.where(same, result[block])
        return result

    def get(self, name: str) -> Any:
        """A quantity by its name: one of the round's own, or one that the clients report."""
        return self.reports[name] if name in self.reports else getattr(self, name)

    def aggregated(self, server_vector: Tensor, weights: Tensor) -> Round:
        """This round after aggregation. What has been derived so far is kept."""
        return self._with(server_vector=server_vector, aggregation_weights=weights)

    def personalized(self, peer_values: Tensor | None) -> Round:
        """This round after personalization. What has been derived so far is kept."""
        return self._with(peer_values=peer_values)

    def measured(self) -> Round:
        """This round as metrics see it: without the :attr:`unmeasured`, who count as if they had been left out."""
        if not self.unmeasured:
            return self
        rows = [row for row, client in enumerate(self.client_ids.tolist()) if client not in self.unmeasured]

        def of(values: Any) -> Any:
            return None if values is None else values[rows]

        return replace(
            self,
            **{name: of(getattr(self, name)) for name in _PER_CLIENT},
            starts=None if self.starts is None else [self.starts[row] for row in rows],
            clients=None if self.clients is None else tuple(self.clients[row] for row in rows),
            reports={name: of(values) for name, values in self.reports.items()},
            left_out=[*self.left_out, *self.unmeasured],
            unmeasured=(),
        )

    @cached_property
    @after("exchange")
    def coalitions(self) -> Tensor:
        """bool ``[K, n]``: the coalitions whose models are trained beside the global one, nobody and everybody among
        them."""
        if self.trained is None:
            raise RuntimeError("no coalitions are trained in this round: flsv.metrics.ShadowShapley has them trained.")
        return self.trained.masks

    @cached_property
    @after("exchange")
    def uploaded(self) -> Tensor:
        """int64 ``[k]``: numbers (entries of tensors) that every client has sent in this round."""
        return self._channel.numbers(self.client_ids.tolist(), "up").to(self.client_ids.device)

    @cached_property
    @after("exchange")
    def downloaded(self) -> Tensor:
        """int64 ``[k]``: numbers that every client has received in this round."""
        return self._channel.numbers(self.client_ids.tolist(), "down").to(self.client_ids.device)

    @cached_property
    @after("exchange")
    def uploaded_bytes(self) -> Tensor:
        """float64 ``[k]``: bytes that each client has sent in this round."""
        return self._channel.bytes(self.client_ids.tolist(), "up").to(self.client_ids.device)

    @cached_property
    @after("exchange")
    def downloaded_bytes(self) -> Tensor:
        """float64 ``[k]``: bytes that each client has received in this round."""
        return self._channel.bytes(self.client_ids.tolist(), "down").to(self.client_ids.device)

    @cached_property
    @after("exchange")
    def reached(self) -> Tensor:
        """``[r]`` integers: who has received or sent anything, the cohort first, then who was excluded, or sent nothing
        that is finite."""
        others = (message.client for message in self._channel.messages)
        return self.client_ids.new_tensor(list(dict.fromkeys([*self.client_ids.tolist(), *others])))

    @property
    def _channel(self) -> Channel:
        if self.channel is None:
            raise RuntimeError("this round has no channel: what crosses is counted within a fit.")
        return self.channel

    def with_coalitions(self, trained: TrainedCoalitions) -> Round:
        """This round after the exchange. What has been derived so far is kept."""
        return self._with(trained=trained)

    def _with(self, **changes: Any) -> Round:
        later = replace(self, **changes)
        later.__dict__.update({name: self.__dict__[name] for name in _DERIVED if name in self.__dict__})
        return later

    @property
    def _games(self) -> Any:
        if self.games is None:
            raise RuntimeError("this round has no coalition games: there is no validation set to play them on.")
        return self.games

    @property
    def _weights(self) -> Tensor:
        return self._aggregated("aggregation_weights").to(self.client_vectors)

    def _aggregated(self, name: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise RuntimeError(f"Round.{name} exists only after aggregation.")
        return value


def asked_starts(starts: Sequence[Start]) -> list[Tensor]:
    """The vectors ``[P]``; clients among them are asked."""
    clients = [start for start in starts if isinstance(start, Client)]
    found = iter(map_clients(clients, lambda client: client.ask(started_from)))
    return [next(found) if isinstance(start, Client) else start for start in starts]


def started_from(local: LocalData) -> Tensor:
    """Asked of a client: the model ``[P]`` that it started the round from, where the server did not send it."""
    if local.start is None:
        raise RuntimeError(f"{local!r} has not begun a round.")
    return local.start


known_after(("server_vector", "aggregation_weights"), "aggregation")
known_after(("peer_values",), "personalization")
_DERIVED = derived(Round)
#: Fields of one row per client of the cohort, in tensors.
_PER_CLIENT = (
    "client_ids", "num_samples", "client_vectors", "losses", "num_steps", "aggregation_weights", "peer_values",
)  # fmt: skip
_INTERNAL = {"space", "seed", "chances", "games", "channel", "starts", "reports", "left_out", "unmeasured", "trained"}
#: What a metric's ``update`` may name.
VOCABULARY = _DERIVED | (set(Round.__dataclass_fields__) - _INTERNAL)
HEAD_FIELDS = {name for name in _DERIVED if "_head" in name}
