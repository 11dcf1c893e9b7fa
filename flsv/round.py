"""What the server knows of one round: the vocabulary of the whole package.

A contribution metric, an aggregator, a personaliser or a sampler asks for a quantity by one of the names on
:class:`Round`; whatever is expensive is derived when it is first asked for, and never if nobody does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.parameters import Head, ParameterSpace
from flsv.seeding import generator_for

if TYPE_CHECKING:
    from flsv.coalition import CoalitionGames, CoalitionUtility, GradientProducts, UtilityMetric, Weighting
    from flsv.local_data import Client, LocalData


@dataclass(frozen=True)
class ClientUpdate:
    """What crosses from one client to the server: its id, how many samples it trained on, its vector ``[P]``, its mean
    training loss (NaN where the module's ``training_step`` gives none), and what a strategy asks it to report: how far
    its classes are from those of the federation (NaN where nobody asks)."""

    client_id: int
    num_samples: int
    vector: Tensor
    loss: float = float("nan")
    label_divergence: float = float("nan")


@dataclass(frozen=True)
class Exchange:
    """What crossed in one round, and what the clients made of it.

    Args:
        uploaded: int64 ``[k]``, parameters that every client of the cohort sent.
        downloaded: int64 ``[k]``, parameters that it received.
        client_values: ``[k, n]``, what it found every other client's model to be worth to it; NaN for those it did not
            look at. None where clients do not judge each other.
    """

    uploaded: Tensor
    downloaded: Tensor
    client_values: Tensor | None = None

    @classmethod
    def of_models(cls, round: Round, up: float = 1, down: float = 1) -> Exchange:
        """``up`` whole models sent and ``down`` received by every client of the round."""
        size = torch.full((len(round),), round.space.size, device=round.client_ids.device)
        return cls((size * up).long(), (size * down).long())


@dataclass(frozen=True)
class Round:
    """One communication round, seen from the server. k = cohort size, P = length of the parameter vector, M = classes.

    Fields named ``server_*`` and ``aggregation_weights`` exist only after aggregation: a metric that asks for one of
    them is updated then, and weighs the next round. ``uploaded``, ``downloaded`` and ``client_values`` exist only after
    personalisation.

    Args:
        round_index: the round's number, from 0.
        client_ids: ``[k]`` integers, who took part (clients whose update was not finite are left out).
        num_samples: ``[k]`` integers, training samples of each.
        global_vector: ``[P]``, the global model at the start of the round.
        client_vectors: ``[k, P]``, the clients' models after local training.
        start_vectors: ``[k, P]``, the models that the clients started from; None where all started from the global one.
        losses: ``[k]`` mean training losses.
        label_divergence: float64 ``[k]``, what the clients report of it; None where no strategy asks.
        clients: the cohort, to be asked for what follows from their data; None outside of a fit.
        server_data: the server's validation set; None where there is none.
        seed: of the round's own random choices; see :meth:`generator`.
        chances: gives each client's probability ``[n]`` to be drawn into this cohort; None: certain.
        games: the round's coalition games on the server's validation set, or None.
        space: the map between vectors and modules.
        server_vector: ``[P]``, the next global model; None before aggregation.
        aggregation_weights: ``[k]``, the clients' weights in it; None before aggregation.
        exchange: what crossed; None before personalisation.
    """

    round_index: int
    client_ids: Tensor
    num_samples: Tensor
    global_vector: Tensor
    client_vectors: Tensor
    space: ParameterSpace
    start_vectors: Tensor | None = None
    losses: Tensor | None = None
    label_divergence: Tensor | None = None
    clients: Sequence[Client] | None = None
    server_data: LocalData | None = None
    seed: int = 0
    chances: Callable[[], Tensor] | None = None
    games: CoalitionGames | None = None
    server_vector: Tensor | None = None
    aggregation_weights: Tensor | None = None
    exchange: Exchange | None = None

    def __len__(self) -> int:
        """k, the size of the cohort."""
        return len(self.client_ids)

    @cached_property
    def client_updates(self) -> Tensor:
        """``[k, P]``: d_i = x_i minus the client's start point. A second matrix of the size of ``client_vectors``."""
        return self.client_vectors - self._starts

    @cached_property
    def client_heads(self) -> Tensor:
        """``[k, M, D+1]``: the classifier head's rows (weights, bias) of every client's update."""
        head = self.head
        return head.rows(self.client_vectors) - head.rows(self._starts)

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
    def utility(self) -> CoalitionUtility:
        """The coalition game of accuracy, with uniform averages inside a coalition."""
        return self._games.utility()

    def play(self, metric: UtilityMetric = "accuracy", weighting: Weighting = "uniform") -> CoalitionUtility:
        """Another coalition game of this round; all games of a round share their evaluations."""
        return self._games.utility(metric, weighting)

    def gradient_products(self, order: int = 1) -> GradientProducts:
        """g . d_i ``[k]`` and, for order 2, d_i^T H d_j ``[k, k]`` of the validation loss at the global model."""
        return self._games.gradient_products(order)

    def generator(self, name: str) -> torch.Generator:
        """The random stream of ``name`` in this round."""
        return generator_for(self.seed, name, self.round_index)

    @cached_property
    def server_update(self) -> Tensor:
        """``[P]``: the next global model minus this round's."""
        return self._aggregated("server_vector") - self.global_vector

    @cached_property
    def server_head(self) -> Tensor:
        """``[M, D+1]``: the clients' head updates, averaged with this round's aggregation weights."""
        return torch.einsum("k,kmd->md", self._weights, self.client_heads)

    @cached_property
    def server_head_weights(self) -> Tensor:
        """``[M, D+1]``: the clients' head weights, averaged with this round's aggregation weights."""
        return torch.einsum("k,kmd->md", self._weights, self.client_head_weights)

    @property
    def head(self) -> Head:
        """Where the classifier head lies in a vector."""
        if self.space.head is None:
            raise ConfigurationError("the module has no linear layer, so it has no classifier head.")
        return self.space.head

    def combine(self, weights: Tensor) -> Tensor:
        """``[P]``: x + sum_i weights_i (x_i - x) for the parameters x, whatever the weights sum to.

        Buffers (BatchNorm's statistics) are averaged with the weights made to sum to 1: moving a running variance
        beyond the clients' own can turn it negative.
        """
        weights = weights.to(self.client_vectors)
        total, cut = weights.sum(), self.space.num_parameters
        result = weights @ self.client_vectors
        result[:cut] += (1 - total) * self.global_vector[:cut]
        if cut < self.space.size and total != 1:
            result[cut:] = result[cut:] / total if total != 0 else self.global_vector[cut:]
        return result

    def aggregated(self, server_vector: Tensor, weights: Tensor) -> Round:
        """This round after aggregation. What has been derived so far is kept."""
        return self._with(server_vector=server_vector, aggregation_weights=weights)

    def exchanged(self, exchange: Exchange) -> Round:
        """This round after personalisation. What has been derived so far is kept."""
        return self._with(exchange=exchange)

    @cached_property
    def uploaded(self) -> Tensor:
        """int64 ``[k]``: parameters that every client sent."""
        return self._exchange.uploaded

    @cached_property
    def downloaded(self) -> Tensor:
        """int64 ``[k]``: parameters that every client received."""
        return self._exchange.downloaded

    @cached_property
    def client_values(self) -> Tensor:
        """``[k, n]``: what every client of the cohort found every client to be worth to it; NaN where not looked at."""
        values = self._exchange.client_values
        if values is None:
            raise RuntimeError("Round.client_values: the personaliser does not say what clients find each other worth.")
        return values

    @property
    def _exchange(self) -> Exchange:
        if self.exchange is None:
            raise RuntimeError("what crossed in a round is known only after personalisation.")
        return self.exchange

    def _with(self, **changes: Any) -> Round:
        after = replace(self, **changes)
        after.__dict__.update({name: self.__dict__[name] for name in _DERIVED if name in self.__dict__})
        return after

    @property
    def _games(self) -> CoalitionGames:
        if self.games is None:
            raise RuntimeError("this round has no coalition games: there is no validation set to play them on.")
        return self.games

    @property
    def _starts(self) -> Tensor:
        return self.global_vector if self.start_vectors is None else self.start_vectors

    @property
    def _weights(self) -> Tensor:
        return self._aggregated("aggregation_weights").to(self.client_vectors)

    def _aggregated(self, name: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise RuntimeError(f"Round.{name} exists only after aggregation.")
        return value


# What a metric's `update` may name; the second and third sets are known only after aggregation and personalisation.
_DERIVED = {name for name, value in vars(Round).items() if isinstance(value, cached_property)}
AFTER_PERSONALIZATION = {"uploaded", "downloaded", "client_values"}
AFTER_AGGREGATION = {"server_vector", "server_update", "server_head", "server_head_weights", "aggregation_weights"}
VOCABULARY = _DERIVED | (set(Round.__dataclass_fields__) - {"space", "seed", "chances", "games", "exchange"})
HEAD_FIELDS = {name for name in _DERIVED if "_head" in name}
