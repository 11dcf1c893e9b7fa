"""Round: the server's information about one round, which metrics, aggregators, personalizers and samplers read."""
# Expensive quantities are computed when they are first read.

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flsv.core.client import Channel, Client, Direction, NoResponse, map_clients
from flsv.core.local_data import LocalData
from flsv.core.matrix import BLOCK_BYTES, CPU_BLOCK_BYTES, ClientMatrix
from flsv.core.parameter_space import Head, ParameterSpace
from flsv.core.responses import Numbers, RespondingClient, declare_response
from flsv.core.vocabulary import VOCABULARY
from flsv.functional.common_columns import common_columns
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.host_copies import on_host
from flsv.utilities.seeding import generator_for

#: The weights of an average may differ from 1 in sum by this many times the rounding error of their sum.
_ROUNDING_MARGIN = 8


Start = Tensor | Client
"""The model that a client started from: a vector ``[P]``, or the client, which sends the vector on request."""


@dataclass(frozen=True)
class Round:
    """One communication round, seen from the server. Shapes use n = all clients, k = cohort size, P = length of the
    parameter vector, M = classes, D = weights per class in the classifier head.

    A metric's ``update`` takes attributes of a round as arguments, and is called as soon as all of them are known:
    :data:`flsv.core.vocabulary.TABLE` says when, and what the server needs for each. If an aggregator reads a metric
    that is updated after aggregation, it gets the values of the previous round.

    ``update`` may also take the reports that a strategy declares (:attr:`flsv.core.strategy.Strategy.reports`).

    Args:
        round_index: the round's number, from 0.
        client_ids: int64 ``[k]``, the clients that took part, without those whose update was excluded or not finite.
        num_samples: int64 ``[k]``, the number of training samples of each client.
        global_vector: ``[P]``, the global model at the start of the round.
        client_vectors: ``[k, P]``, the clients' models after local training.
        space: the map between vectors and modules.
        starts: for each of the k clients the model that it started from: a vector ``[P]``, or the :class:`Client`, from
            which the model is requested when needed. If it does not respond, its update counts as 0. None: all started
            from the global model.
        losses: ``[k]``, the mean training loss of each client.
        num_steps: int64 ``[k]``, the number of optimizer steps of each client.
        reports: the clients' reports that strategies declare, ``{name: tensor [k, ...]}``.
        clients: the k clients of the cohort, to which requests can be sent. None outside of a fit.
        all_clients: all n clients of the federation, in the order of their ids. None outside of a fit.
        server_data: the server's validation set, if it has one.
        seed: seed of the round's random choices, see :meth:`generator`.
        drawing_probabilities: function that returns each client's probability ``[n]`` to be drawn into this cohort.
            None if all clients are drawn.
        games: the round's ``flsv.games.CoalitionGames`` on the server's validation set, or None.
        channel: the counter of the messages between server and clients. None outside of a fit.
        server_vector: ``[P]``, the next global model. None before aggregation.
        aggregation_weights: ``[k]``, the clients' weights in the next global model. None before aggregation.
        excluded: ids of the clients whose update was excluded.
        unmeasured: ids of clients whose updates are aggregated but hidden from metrics: too large, or of an unknown
            start.
        peer_values: ``[k, n]``, the value that each of the cohort's k clients assigned to the model of each of the n
            clients, NaN for models that it did not evaluate. None before personalization, or if clients do not evaluate
            each other's models.
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
    all_clients: Sequence[Client] | None = None
    server_data: LocalData | None = None
    seed: int = 0
    drawing_probabilities: Callable[[], Tensor] | None = None
    games: Any = None
    channel: Channel | None = None
    server_vector: Tensor | None = None
    aggregation_weights: Tensor | None = None
    peer_values: Tensor | None = None
    excluded: Sequence[int] = ()
    unmeasured: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.client_ids)

    @cached_property
    def matrix(self) -> ClientMatrix:
        """Return the clients' models as a :class:`ClientMatrix`, which computes on their updates."""
        starts = self.starts or [self.global_vector] * len(self)
        initial_models = []
        for vector, initial_model in zip(self.client_vectors, request_initial_models(starts)):
            if initial_model is None:
                initial_model = vector  # the client has not responded, so its update is 0
            initial_models.append(initial_model)
        return ClientMatrix(self.client_vectors, initial_models)

    @cached_property
    def client_updates(self) -> Tensor:
        """Return each client's parameters minus those that it started from, ``[k, p]`` for p parameters, without
        buffers (BatchNorm's statistics), which :attr:`state_updates` has.

        This is a second matrix of the size of ``client_vectors``. :attr:`matrix` computes norms and products without
        it.
        """
        parameters = slice(self.space.num_parameters)
        return self.matrix.updates(parameters)

    @cached_property
    def state_updates(self) -> Tensor:
        """Return each client's model minus the model that it started from, buffers included, ``[k, P]``."""
        return self.matrix.updates(slice(None))

    @cached_property
    def client_heads(self) -> Tensor:
        """Return the updates' classifier-head parts, ``[k, M, D+1]``, per class D weights and a bias."""
        head = self.head
        heads = head.rows(self.client_vectors)
        initial_models = self.matrix.starts
        if all(model is self.global_vector for model in initial_models):
            return heads - head.rows(self.global_vector)
        initial_heads = [head.rows(model) for model in initial_models]
        return heads - torch.stack(initial_heads)

    @cached_property
    def client_head_weights(self) -> Tensor:
        """Return the models' classifier heads, ``[k, M, D+1]``, per class D weights and a bias."""
        return self.head.rows(self.client_vectors)

    @cached_property
    def inclusion_probabilities(self) -> Tensor:
        """Return the probability with which each client of the cohort was drawn, ``[k]``."""
        device = self.client_ids.device
        if self.drawing_probabilities is None:
            return torch.ones(len(self), device=device)
        probabilities_of_all = self.drawing_probabilities().to(device)
        return probabilities_of_all[self.client_ids]

    @cached_property
    def senders(self) -> Tensor:
        """Return the ids of the clients that sent an update, int64 ``[s]``. Excluded ones come last."""
        excluded_ids = self.client_ids.new_tensor(list(self.excluded))
        return torch.cat([self.client_ids, excluded_ids])

    @cached_property
    def utility(self) -> Any:
        """Return the coalition game whose utility is the accuracy of the members' uniform average."""
        return self._required_games.utility()

    def game(self, metric: Any = "accuracy", weighting: Any = "uniform") -> Any:
        """Return a coalition game of this round's clients. Games of a round evaluate a model only once.

        Args:
            metric: the performance measure of a coalition's model, see :class:`flsv.games.CoalitionUtility`.
            weighting: the clients' weights in a coalition's model, see the same class.
        """
        return self._required_games.utility(metric, weighting)

    def slopes(self, loss: Any = "negative_loss") -> Tensor:
        """Compute the inner products g . d_i ``[k]`` of a gradient with the updates d_i. g is the gradient of the
        validation loss at the global model."""
        return self._required_games.slopes(loss)

    def generator(self, name: str) -> torch.Generator:
        """Return this round's random generator called ``name``. It depends only on seed, name and round."""
        return generator_for(self.seed, name, self.round_index)

    @cached_property
    def server_update(self) -> Tensor:
        """Return the next global model minus this round's, ``[P]``."""
        return self._aggregated("server_vector") - self.global_vector

    @cached_property
    def server_head(self) -> Tensor:
        """Return the weighted average of the updates' classifier-head parts, ``[M, D+1]``."""
        return torch.einsum("k,kmd->md", self._weights, self.client_heads)

    @cached_property
    def server_head_weights(self) -> Tensor:
        """Return the weighted average of the models' classifier heads, ``[M, D+1]``."""
        return torch.einsum("k,kmd->md", self._weights, self.client_head_weights)

    @property
    def head(self) -> Head:
        """Return the position of the classifier head in a vector.

        Raises:
            ConfigurationError: the module has no classifier head, or does not share it.
        """
        if self.space.head is None:
            raise ConfigurationError(
                f"the module has no classifier head, since {self.space.why_no_head}."
            )
        return self.space.head

    def combine(self, weights: Tensor) -> Tensor:
        """Combine the clients' models x_i with the global model x. The parameters are x + sum_i weights_i (x_i - x).

        Buffers (BatchNorm's statistics) are averages of the clients' buffers, with weights that are normalized to sum
        to 1, because other sums can make a running variance negative. Elements that are equal in all clients' models
        keep exactly this value.

        Args:
            weights: ``[k]``, which need not sum to 1.

        Returns:
            The combined model ``[P]``.

        Raises:
            ValueError: weights have another shape.
        """
        if weights.shape != (len(self),):
            raise ValueError(
                f"Round.combine: expected weights [{len(self)}], one for each client of the round, got "
                f"{list(weights.shape)}."
            )
        weights = weights.to(self.client_vectors)
        sum_of_weights = weights.sum()
        # sum_i w_i x_i + (1 - sum_i w_i) x. The methods change it in place.
        combined = weights @ self.client_vectors
        self._add_global_parameters(combined, 1 - sum_of_weights)
        self._normalize_buffers(combined, sum_of_weights)
        self._restore_common_columns(combined, weights, sum_of_weights)
        return combined

    def _add_global_parameters(self, combined: Tensor, share: Tensor) -> None:
        """Add ``share`` times the global model's parameters to a sum of models ``[P]``, in place."""
        # This is done in blocks, to save a second vector. `matrix` is not used: it requests start points from clients.
        block_bytes = CPU_BLOCK_BYTES if combined.device.type == "cpu" else BLOCK_BYTES
        block_length = block_bytes // combined.element_size()
        num_parameters = self.space.num_parameters
        blocks = combined[:num_parameters].split(block_length)
        global_blocks = self.global_vector[:num_parameters].split(block_length)
        for block, global_block in zip(blocks, global_blocks):
            block += share * global_block

    def _normalize_buffers(self, combined: Tensor, sum_of_weights: Tensor) -> None:
        """Divide the buffers in a weighted sum ``[P]`` by ``sum_of_weights``, in place."""
        num_parameters = self.space.num_parameters
        if num_parameters == self.space.size:
            return
        sums = combined[num_parameters:]  # of the clients' weighted buffers
        global_buffers = self.global_vector[num_parameters:]
        averages = torch.where(sum_of_weights != 0, sums / sum_of_weights, global_buffers)
        # If the sums are averages already, a division would round them. A branch would wait for the value of
        # `sum_of_weights` on an accelerator.
        is_mean = sum_of_weights == 1
        combined[num_parameters:] = torch.where(is_mean, sums, averages)

    def _restore_common_columns(
        self, combined: Tensor, weights: Tensor, sum_of_weights: Tensor
    ) -> None:
        """Set the elements that are equal in all clients' models to exactly this value, in place."""
        # Elements that no client has changed (frozen weights, constant buffers) must not drift by rounding.
        # The rounding error of a sum of k weights is about k times eps.
        rounding = _ROUNDING_MARGIN * len(weights) * torch.finfo(weights.dtype).eps
        is_partial = (sum_of_weights - 1).abs() > rounding  # the weights do not sum to 1

        # In an average, each common element is restored. In a partial sum, parameters that all clients have changed
        # equally are not restored, since the sum changes them by another amount.
        # For each block of b elements, `is_common`, bool [b], is True where all clients' values are equal.
        for block, is_common in common_columns(self.client_vectors):
            common_values = self.client_vectors[0, block]
            is_restored = is_common
            # On an accelerator this is computed even if nothing changes: reading `is_partial` would wait for its value.
            if is_common.device.type != "cpu" or is_partial:
                global_values = self.global_vector[block]
                columns = torch.arange(block.start, block.stop, device=is_common.device)
                is_buffer = columns >= self.space.num_parameters
                is_unmoved = common_values == global_values
                is_restored = is_common & (~is_partial | is_unmoved | is_buffer)
                # If all weights are 0, the combination is the global model.
                common_values = torch.where(sum_of_weights != 0, common_values, global_values)
            combined[block] = common_values.where(is_restored, combined[block])

    def get(self, name: str) -> Any:
        """Return the reports ``[k, ...]`` that clients sent under ``name``, or else this round's attribute."""
        if name in self.reports:
            return self.reports[name]
        return getattr(self, name)

    def aggregated(self, server_vector: Tensor, weights: Tensor) -> Round:
        """Return a copy of this round with the next global model ``[P]`` and the weights ``[k]``."""
        return self._with(server_vector=server_vector, aggregation_weights=weights)

    def personalized(self, peer_values: Tensor | None) -> Round:
        """Return a copy of this round with ``peer_values [k, n]``, or None."""
        return self._with(peer_values=peer_values)

    def measured(self) -> Round:
        """Return a copy of this round without the :attr:`unmeasured` clients, for metrics."""
        if not self.unmeasured:
            return self
        measured_rows = [
            row
            for row, client in enumerate(on_host(self.client_ids))
            if client not in self.unmeasured
        ]

        fields_per_client: dict[str, Any] = {}  # they have a row for each client
        for field_of_round in fields(self):
            name = field_of_round.name
            if VOCABULARY[name].per_client:
                fields_per_client[name] = _selected(getattr(self, name), measured_rows)
        reports = {name: report[measured_rows] for name, report in self.reports.items()}
        return replace(
            self,
            **fields_per_client,
            reports=reports,
            excluded=[*self.excluded, *self.unmeasured],
            unmeasured=(),
        )

    @cached_property
    def uploaded(self) -> Tensor:
        """Return how many tensor elements each of the r :attr:`reached` clients has sent, int64 ``[r]``."""
        return self._counted(self._channel.numbers, "up")

    @cached_property
    def downloaded(self) -> Tensor:
        """Return how many tensor elements each of the r :attr:`reached` clients has received, int64 ``[r]``."""
        return self._counted(self._channel.numbers, "down")

    @cached_property
    def uploaded_bytes(self) -> Tensor:
        """Return how many bytes each of the r :attr:`reached` clients has sent, float64 ``[r]``."""
        return self._counted(self._channel.bytes, "up")

    @cached_property
    def downloaded_bytes(self) -> Tensor:
        """Return how many bytes each of the r :attr:`reached` clients has received, float64 ``[r]``."""
        return self._counted(self._channel.bytes, "down")

    @cached_property
    def reached(self) -> Tensor:
        """Return the ids of clients that received or sent anything, int64 ``[r]``. The cohort comes first."""
        cohort = on_host(self.client_ids)
        clients_of_messages = [message.client for message in self._channel.messages]
        # Each client occurs once, in the order of its first message.
        ids = dict.fromkeys([*cohort, *clients_of_messages])
        return self.client_ids.new_tensor(list(ids))

    def _counted(
        self, count: Callable[[Sequence[int], Direction], Tensor], direction: Direction
    ) -> Tensor:
        """Return a count of the channel for the :attr:`reached` clients, ``[r]``."""
        counts = count(self.reached.tolist(), direction)
        return counts.to(self.client_ids.device)

    @property
    def _channel(self) -> Channel:
        if self.channel is None:
            raise RuntimeError(
                "this round has no channel, since messages are counted only within a fit."
            )
        return self.channel

    def with_models(self, client_vectors: Tensor, global_vector: Tensor) -> Round:
        """Return a copy of this round with other models: ``client_vectors [k, P]``, which started from
        ``global_vector [P]``."""
        return replace(
            self, client_vectors=client_vectors, global_vector=global_vector, starts=None
        )

    def _with(self, **changes: Any) -> Round:
        """Return a copy with ``changes`` that shares the cached properties of this round."""
        new_round = copy.copy(self)
        vars(new_round).update(changes)  # an attribute of a frozen class cannot be assigned
        return new_round

    @property
    def _required_games(self) -> Any:
        if self.games is None:
            raise RuntimeError(
                "this round has no coalition games: either no component declares them by needs = ('game',), or the "
                "server has no validation set."
            )
        return self.games

    @property
    def _weights(self) -> Tensor:
        weights = self._aggregated("aggregation_weights")
        return weights.to(self.client_vectors)

    def _aggregated(self, name: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise RuntimeError(f"Round.{name} exists only after aggregation.")
        return value


def request_initial_models(starts: Sequence[Start]) -> list[Tensor | None]:
    """Replace each Client in ``starts`` by its initial model ``[P]``, which is requested. None: it did not respond."""
    clients = [client for client in starts if isinstance(client, Client)]
    responses = map_clients(clients, _request_start)  # in the order of `clients`
    next_response = iter(responses)
    initial_models = []
    for model_or_client in starts:
        if isinstance(model_or_client, Client):
            initial_models.append(next(next_response))
        else:
            initial_models.append(model_or_client)
    return initial_models


def _request_start(client: Client) -> Tensor | None:
    function = started_from  # a function that runs at the client
    try:
        return client.request(function)
    except NoResponse as error:
        warnings.warn(
            f"{error} The model from which the client started is unknown, so metrics exclude it from this round, and "
            "strategies that read updates treat its update as 0.",
            stacklevel=2,
        )
        return None


def _model_of_the_round(client: RespondingClient) -> Numbers:
    model = client.model()
    return Numbers(model.dtype, tuple(model.shape))


def started_from(local: LocalData) -> Tensor:
    """Return the model ``[P]`` from which the client started the round. Runs at the client."""
    if local.start is None:
        raise RuntimeError(f"{local!r} has no initial model, since it has not started a round.")
    return local.start


declare_response(started_from, _model_of_the_round, numbers=0)


def _selected(values: Tensor | Sequence[Any] | None, rows: list[int]) -> Any:
    if values is None:
        return None
    if isinstance(values, Tensor):
        return values[rows]
    return [values[row] for row in rows]
