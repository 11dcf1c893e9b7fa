"""Client-side evaluation: clients score coalitions' models on their own held-out samples.

A classifier's utility is its balanced accuracy on the held-out samples of all clients together. Any other score is the
mean of the clients' scores, weighted by their numbers of held-out samples. There is one game for all clients, so their
values sum to the gain of the whole federation. A client that reports false scores can raise its share of the payment by
12 percentage points on average, and by up to 85 (``docs/results/client_evaluation.md``). So use client-side evaluation
only with partners who report honestly.

A client counts the samples of each class that a model classifies correctly. For a rare class, of which it holds out
fewer than :data:`MIN_HELD_OUT` samples, the count would reveal labels. So it reports only the sum over its rare
classes, if these have :data:`MIN_HELD_OUT` samples together. Otherwise it reports neither them nor the next class,
since their number would follow from the split's size. For a class that no client reports, the accuracy of all rare
classes is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.core import (
    Client,
    LocalData,
    NoResponse,
    Numbers,
    RespondingClient,
    declare_response,
    map_clients,
)
from flsv.core.parameter_space import ParameterSpace
from flsv.core.responses import MIN_HELD_OUT, range_of_score
from flsv.data import FederatedDataModule
from flsv.functional.shapley.exact import all_coalitions
from flsv.functional.shapley.predicted_outputs import (
    MAX_PREDICTED_PLAYERS,
    PredictedGame,
    PredictedValues,
    values_of_tables,
)
from flsv.games.vector_evaluator import Build, Scores, VectorEvaluator
from flsv.scores.performance import Measure, performance_of
from flsv.utilities.errors import ConfigurationError

#: The largest number of bytes of models that are sent to a client at a time.
MAX_BYTES_OF_MODELS = 2**28
_EXCLUDED_NOTICE = "Coalitions are scored without it in this round."
#: Clients predict coalitions' outputs only if a model has at most this number of elements.
MAX_ENTRIES_TO_PREDICT = 2**22


@cache
def _performance_called(name: str, mode: Any) -> Measure:
    return performance_of("score_models", name, mode)


def _form_of_scores(
    client: RespondingClient,
    models: Tensor,
    performance: Any = None,
    mode: str | None = None,
) -> Numbers:
    """Return the type, shape and range of the response of :func:`score_models` to these arguments."""
    if performance is not None:
        lowest, highest = range_of_score(performance)
        return Numbers(torch.float64, (len(models),), lowest=lowest, highest=highest)
    return _form_of_counts(client, rows=(1 + len(models),))


def _form_of_coalition_scores(
    client: RespondingClient, models: Tensor, trained: Tensor, weights: Tensor
) -> Numbers:
    """Return the type, shape and range of the response of :func:`score_coalitions` to these arguments."""
    num_clients = trained.shape[1]
    if num_clients > MAX_PREDICTED_PLAYERS:  # before a power of it is computed
        message = (
            f"coalitions of {num_clients} clients are to be scored, but outputs are predicted for at most "
            f"{MAX_PREDICTED_PLAYERS}"
        )
        raise ConfigurationError(f"{message}.", without_data=message)
    num_coalitions = 2**num_clients
    return _form_of_counts(client, rows=(2, 1 + num_coalitions))


def _form_of_counts(client: RespondingClient, rows: tuple[int, ...]) -> Numbers:
    """Return the form of a row with the numbers of held-out samples, followed by rows with counts of correctly
    classified samples.
    """
    assert client.num_classes is not None
    num_held_out = client.num_samples["val"]
    num_columns = client.num_classes + 1  # the last is the sum over rare classes
    return Numbers(
        torch.int64,
        shape=(*rows, num_columns),
        lowest=0,
        highest=num_held_out,
        rule=partial(_are_within_held_out_samples, num_held_out),
    )


def _are_within_held_out_samples(num_held_out: int, counts: Tensor) -> bool:
    support = counts[..., :1, :]  # row 0: the held-out samples of each class
    are_within_support = (counts <= support).all()
    is_support_held_out = (support.sum(-1) <= num_held_out).all()
    return bool(are_within_support & is_support_held_out)


def score_models(
    local: LocalData,
    models: Tensor,
    performance: str | Measure | None = None,
    mode: str | None = None,
) -> Tensor:
    """Score models on a client's held-out (validation) samples.

    The server runs this at the client by :meth:`flsv.core.Client.request`.

    Args:
        local: the client's own data.
        models: the models' vectors ``[K, P]``.
        performance: the performance measure, or its name. None: count the correctly classified samples of each class.
        mode: whether a smaller (``"min"``) or a larger (``"max"``) logged value is better.

    Returns:
        With a ``performance``, the models' scores, float64 ``[K]``. Without one, int64 ``[1 + K, M + 1]``: row 0 has
        the number of the client's held-out samples of each of M classes, and row 1 + i the number of those that model i
        classifies correctly. The columns of rare classes are 0. The last column is the sum over all rare classes, or 0
        if they have fewer than :data:`MIN_HELD_OUT` samples together. Then the next class's column is 0, too.
    """
    if performance is None:
        scores: Any = local.evaluate(models)
        return _without_rare_classes(scores.support, scores.values["correct"])
    if isinstance(performance, str):
        performance = _performance_called(performance, mode)
    return local.utility(models, performance)


def _numbers_of_models(num_clients: int, num_classes: int) -> int:
    # For more clients, estimators and designs do not evaluate more coalitions.
    num_coalitions = 2 ** min(num_clients, MAX_PREDICTED_PLAYERS)
    return (1 + num_coalitions) * (num_classes + 1)


def _numbers_of_coalitions(num_clients: int, num_classes: int) -> int:
    return 2 * _numbers_of_models(num_clients, num_classes)


declare_response(score_models, _form_of_scores, _numbers_of_models)


def score_coalitions(
    local: LocalData,
    models: Tensor,
    trained: Tensor,
    weights: Tensor,
) -> Tensor:
    """Count how many samples of each class every coalition's model classifies correctly, by predicted outputs.

    The server runs this at the client by :meth:`flsv.core.Client.request`.

    Args:
        local: the client's own data.
        models: ``[T, P]``, the models of the trained coalitions.
        trained: bool ``[T, n]``, these coalitions, see :mod:`flsv.functional.shapley.predicted_outputs`.
        weights: ``[n]``, the clients' weights in the federation's average.

    Returns:
        int64 ``[2, 1 + 2^n, M + 1]``, from outputs predicted by interpolation and by an ensemble. Each of the two has
        the rows and columns of :func:`score_models`. The coalitions are those of
        :func:`flsv.functional.shapley.exact.all_coalitions`.
    """
    trained_scores: Any = local.evaluate(models, keep=True)
    game = PredictedGame(
        trained.cpu(),
        utilities=trained_scores.values["correct"],  # [T, M]
        outputs=trained_scores.outputs,
        weights=weights.cpu(),
        measure=local.output_measure("correct"),
    )
    masks = all_coalitions(num_players=trained.shape[1])
    predicted_counts = game(masks).round().long()  # [2^n, 2 * M]
    # The first M columns are of outputs by interpolation, the last M of those by an ensemble.
    by_interpolation, by_ensemble = predicted_counts.chunk(2, dim=1)

    support = trained_scores.support
    responses = [
        _without_rare_classes(support, by_interpolation),
        _without_rare_classes(support, by_ensemble),
    ]
    return torch.stack(responses)  # [2, 1 + 2^n, M + 1]


declare_response(score_coalitions, _form_of_coalition_scores, _numbers_of_coalitions)


def _without_rare_classes(support: Tensor, correct: Tensor) -> Tensor:
    """Return a client's response ``[1 + K, M + 1]``, from its numbers of samples of each class ``[M]`` and the numbers
    of those that K models classify correctly, ``[K, M]``. The last column is the sum over the rare classes.
    """
    counts = torch.cat([support[None], correct])  # [1 + K, M]
    is_rare = support < MIN_HELD_OUT
    pooled = (counts * is_rare).sum(1, keepdim=True)
    num_rare = int(pooled[0])
    is_reported = ~is_rare
    if 0 < num_rare < MIN_HELD_OUT:
        is_reported[_class_to_hide(support)] = False
    is_pool_large = num_rare >= MIN_HELD_OUT
    return torch.cat([counts * is_reported, pooled * is_pool_large], 1)


def _class_to_hide(support: Tensor) -> Tensor:
    """Return the index ``[1]`` of the next class after the rare ones, empty if all are rare."""
    # With its size the split's size would reveal that of the rare classes. The choice does not depend on its size,
    # since an order of sizes would limit the possible ones.
    rare_classes = ((support > 0) & (support < MIN_HELD_OUT)).nonzero().flatten()
    other_classes = (support >= MIN_HELD_OUT).nonzero().flatten()
    later_classes = other_classes[other_classes > rare_classes[-1]]
    return torch.cat([later_classes, other_classes])[:1]


def hits_by_class(
    responses: Sequence[Tensor],
    samples: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sum the numbers of correctly classified samples that clients report, see :func:`score_models` without a
    ``performance``.

    Args:
        responses: the responses of j clients, int64 ``[1 + K, M + 1]`` each, for K models and M classes.
        samples: int64 ``[j]``, each client's number of training samples. A response that claims more held-out samples
            is scaled down to this number.

    Returns:
        The number of samples of each class that each model classifies correctly, float64 ``[K, M]``, and the number of
        held-out samples of each class, ``[M]``. For a class that no client reports, both are the numbers of all rare
        classes together.

    Example:
        >>> one, other = torch.tensor([[6, 0, 9], [6, 0, 0]]), torch.tensor([[0, 0, 9], [0, 0, 3]])
        >>> hits, held_out = hits_by_class([one, other], torch.tensor([30, 30]))
        >>> hits / held_out
        tensor([[1.0000, 0.1667]], dtype=torch.float64)
    """
    # [clients, 1 + K, M + 1]: row 0 has the held-out samples, the last column the sum over rare classes.
    counts = torch.stack([*responses]).double()
    held_out_samples = counts[:, 0].sum(1)  # [clients]
    # Clients could claim many held-out samples to get more weight, so at most their training samples count.
    factors = samples / held_out_samples.clamp(min=1)  # [clients]
    counts *= factors.clamp(max=1)[:, None, None]

    totals = counts.sum(0)  # [1 + K, M + 1]
    totals_by_class = totals[:, :-1]
    totals_of_rare_classes = totals[:, -1:]
    class_has_samples = totals_by_class[0] > 0
    # A class that no client reports gets the counts of all rare classes.
    totals_or_rare = torch.where(class_has_samples, totals_by_class, totals_of_rare_classes)
    hits = totals_or_rare[1:]
    held_out = totals_or_rare[0]
    return hits, held_out


class ClientEvaluator(VectorEvaluator):
    """Evaluator that lets the clients score models on their held-out samples."""

    requests_from_clients = True

    def __init__(
        self,
        space: ParameterSpace,
        clients: Sequence[Client],
        data: FederatedDataModule,
        device: torch.device,
        measure: Measure,
    ) -> None:
        self.space = space
        self._measure = measure
        self._device = device
        self._data = data
        sizes = [len(data.client_indices(client.id, "val")) for client in clients]
        if max(sizes) < MIN_HELD_OUT:
            raise ConfigurationError(
                f'evaluators="clients": no client holds out {MIN_HELD_OUT} samples to score models. Set '
                "FederatedDataModule(splits=Splits(client_val=0.2)), or a larger fraction."
            )
        self._held_out_counts = torch.tensor(sizes)  # int64 [n], by client id
        self._clients = [
            client for client in clients if self._held_out_counts[client.id] >= MIN_HELD_OUT
        ]
        # {client's id: its last response}, as score_models returns it.
        self.responses: dict[int, Tensor] = {}
        self._function = partial(score_models, **_function_arguments(measure))

    def check(self, model: Tensor) -> None:
        """Let all clients score one model ``[P]`` before training, to find errors early."""
        scores: Scores | None = None
        with warnings.catch_warnings(record=True) as recorded_warnings, suppress(NoResponse):
            warnings.simplefilter("always")
            scores = self(model[None])

        # The call has set self.responses, by client.
        silent_ids = [client.id for client in self._clients if client.id not in self.responses]
        if silent_ids:
            messages = [str(warning.message) for warning in recorded_warnings]
            reasons = [message for message in messages if message.endswith(_EXCLUDED_NOTICE)]
            raise ConfigurationError(
                f'evaluators="clients": the clients {silent_ids} do not score models. {" ".join(reasons)}'
            )
        if scores is not None and scores.support is not None:  # the scores are by class
            self._check_classes(scores.support)

    def _check_classes(self, support: Tensor) -> None:
        """Raise ConfigurationError if there is a class without held-out samples that clients report."""
        class_names = self._data.class_names
        unscored = [name for name, count in zip(class_names, support) if count == 0]
        if unscored:
            raise ConfigurationError(
                f'evaluators="clients": no client can score models on the classes {unscored}. A client scores models '
                f"on a class of which it holds out {MIN_HELD_OUT} samples, and on all of its rarer classes together if "
                f"these have {MIN_HELD_OUT} held-out samples. Let clients hold out more samples, "
                "FederatedDataModule(splits=Splits(client_val=0.3)), or merge rare classes."
            )

    @property
    def can_predict(self) -> bool:
        """Return whether the clients can predict the outputs of coalitions that were not trained."""
        # Clients have the private part of the run's model, but not that of each coalition's model.
        if self.space.private_names:
            return False
        num_clients = len(self._held_out_counts)
        is_cheap = (
            self.space.size <= MAX_ENTRIES_TO_PREDICT and num_clients <= MAX_PREDICTED_PLAYERS
        )
        return self._measure.by_class and is_cheap

    def computes(self, measure: Measure) -> bool:
        """Return whether clients score models by this measure."""
        if not measure.at_clients:
            return False
        if measure.by_class and self._measure.by_class:
            return True
        if isinstance(measure.of, Metric) or isinstance(self._measure.of, Metric):
            return measure.of is self._measure.of  # torchmetrics defines == by values
        return measure.of == self._measure.of

    def output_measure(self, measure: Measure) -> ClientEvaluator | None:
        """Return this evaluator if the clients can predict outputs, and score them themselves."""
        return self if self.can_predict else None

    def shapley(
        self,
        trained: Tensor,
        utilities: Sequence[Tensor],
        outputs: Iterable[Tensor],
        weights: Tensor,
    ) -> list[PredictedValues]:
        """Compute Shapley values after several rounds, see
        :class:`flsv.functional.shapley.predicted_outputs.ValuesFromOutputs`. The "outputs" of each round are the
        trained coalitions' models ``[T, P]``.
        """
        values = []
        for utilities_of_round, models in zip(utilities, outputs):
            tables = self.predict(models, trained, weights)
            values.append(_values_with_trained(tables, trained, utilities_of_round))
        return values

    def predict(
        self,
        models: Tensor,
        trained: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Let clients predict all coalitions' outputs, by interpolation and by an ensemble, and score them. Return both
        utilities of each coalition, ``[2^n, 2]`` or ``[2^n, 2, M]``.
        """
        tensors = [models.to(self._device), trained, weights]
        request = partial(self._request, score_coalitions, tensors)
        responses = map_clients(self._clients, request)
        response_by_client = {}
        for client, response in zip(self._clients, responses):
            if response is not None:
                response_by_client[client.id] = response
        if not response_by_client:
            raise NoResponse("no client has scored the coalitions' models.")

        client_ids = list(response_by_client)
        utilities = []
        # Each client's counts are by interpolation first, then by an ensemble.
        for method in range(2):
            counts = [response[method] for response in response_by_client.values()]
            scores = self._scores_by_class(counts, client_ids)
            values = scores.value(self._measure.name)
            utilities.append(self._measure.utility(values))
        return torch.stack(utilities, 1)

    def _scores_by_class(
        self,
        counts_of_clients: Sequence[Tensor],
        ids: list[int],
    ) -> Scores:
        hits, held_out = hits_by_class(counts_of_clients, self._data.num_samples[ids])
        return Scores({"correct": hits}, held_out)

    def evaluate(
        self,
        build: Build,
        count: int,
        keep: bool = False,
    ) -> Scores:
        """Let the clients score ``count`` models. With ``keep``, the attribute ``outputs`` of the result has the models
        themselves, for :meth:`predict`.
        """
        bytes_per_model = self.space.size * self.space.dtype.itemsize
        chunk_size = max(1, MAX_BYTES_OF_MODELS // bytes_per_model)
        chunks_of_models = []
        chunks_of_responses = []
        # Without models, clients get one request to score none.
        for first_row in range(0, max(count, 1), chunk_size):
            end_row = min(first_row + chunk_size, count)
            models = self._built(build, range(first_row, end_row))
            chunks_of_models.append(models)
            request = partial(self._request, self._function, [models])
            chunks_of_responses.append(map_clients(self._clients, request))

        self._set_responses(chunks_of_responses)
        scores = self._scores()  # from the responses
        if keep and self.can_predict:
            return replace(scores, outputs=torch.cat(chunks_of_models).cpu())
        return scores

    def _built(self, build: Build, rows: range) -> Tensor:
        """Return the models of these ``rows``, ``[len(rows), P]``."""
        shape = len(rows), self.space.size
        models = torch.empty(shape, dtype=self.space.dtype, device=self._device)
        for row, model in zip(rows, models):
            build(row, model)
        return models

    def _set_responses(self, chunks_of_responses: list[list[Tensor | None]]) -> None:
        """Set :attr:`responses` of the clients that have scored all chunks of models."""
        self.responses = {}
        for client, *chunks_of_client in zip(self._clients, *chunks_of_responses):
            chunks = [chunk for chunk in chunks_of_client if chunk is not None]
            if len(chunks) == len(chunks_of_client):
                self.responses[client.id] = self._joined(chunks)
        if not self.responses:
            raise NoResponse("no client has scored the coalitions' models.")

    def _joined(self, chunks: list[Tensor]) -> Tensor:
        if self._measure.by_class:
            # Row 0, the numbers of held-out samples, is the same in each chunk.
            chunks = [chunks[0], *(chunk[1:] for chunk in chunks[1:])]
        return torch.cat(chunks)

    def _request(
        self, function: Callable[..., Tensor], tensors: list[Tensor], client: Client
    ) -> Tensor | None:
        """Run a function on ``tensors`` at a client, and return the response. If there is none, warn and return
        None.
        """
        try:
            return client.request(function, *tensors).cpu()
        except NoResponse as reason:
            warnings.warn(f"{reason} {_EXCLUDED_NOTICE}", stacklevel=2)
            return None

    def _scores(self) -> Scores:
        client_ids = list(self.responses)
        responses = list(self.responses.values())
        if self._measure.by_class:
            return self._scores_by_class(responses, client_ids)

        num_samples = torch.minimum(self._held_out_counts, self._data.num_samples)
        weights = num_samples[client_ids].double()
        mean_utilities = (weights / weights.sum()) @ torch.stack(responses)  # [K]
        # A utility is the measure's value or its negative, so the same function converts utilities back to values.
        values = self._measure.utility(mean_utilities)
        return Scores({self._measure.name: values})


def _values_with_trained(tables: Tensor, trained: Tensor, utilities: Tensor) -> PredictedValues:
    """Compute Shapley values from all coalitions' predicted utilities ``[2^n, 2]`` or ``[2^n, 2, M]``, by interpolation
    and by an ensemble. The ``trained`` coalitions get their own ``utilities`` in both games.
    """
    tables = tables.view(tables.shape[:2] + utilities.shape[1:])
    # The number of a coalition's row has the mask as its binary digits. Client 0 is the lowest digit.
    place_values = 2 ** torch.arange(trained.shape[1])
    coalition_numbers = (trained * place_values).sum(1)
    tables[coalition_numbers] = utilities.to(tables).unsqueeze(1)
    return values_of_tables(tables)


def _function_arguments(measure: Measure) -> dict[str, Any]:
    """Return the arguments of :func:`score_models` with which the server requests a measure from clients."""
    if measure.by_class:
        return {}
    is_named_by_flsv = measure.called and measure.logits is None
    if is_named_by_flsv:  # the client knows the mode, too
        return {"performance": measure.called, "mode": None}
    if isinstance(measure.of, str):  # the name of a logged value
        return {"performance": measure.of, "mode": measure.mode}
    # A metric, which cannot be sent to a site.
    return {"performance": replace(measure, at_clients=False)}
