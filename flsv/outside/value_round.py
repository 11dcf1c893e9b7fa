"""value_round: measures contributions to a round that another loop has run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pandas
import torch
from annotated_types import Ge
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torchmetrics import MetricCollection

from flsv._lightning.private import unwrapped
from flsv.configuration.federation_config import named_head
from flsv.core import VOCABULARY, Round, Values
from flsv.core.parameter_space import ParameterSpace
from flsv.data.groups import client_called
from flsv.games import CoalitionGames
from flsv.games.module_copies import module_device
from flsv.metrics import ContributionMetric, PartialFederatedShapley
from flsv.outside.games import LOSS, games_outside_fit
from flsv.results.rows import ResultBuilder
from flsv.results.run_table import frame, tidy
from flsv.server.checks import check_space
from flsv.server.contribution_metrics import ContributionMetrics
from flsv.utilities.declared import Count, check_argument, checked
from flsv.utilities.errors import ConfigurationError, check_lightning

Model = Tensor | Mapping[str, Any] | Sequence[Any]
"""A model: a ``state_dict``, or its entries as arrays in the same order, as Flower sends them, or a vector ``[P]`` of
:class:`flsv.ParameterSpace`."""


@dataclass(frozen=True, eq=False)
class RoundValues:
    """Values of all n clients after a round. They are NaN for clients that have not taken part yet.

    Attributes:
        values: ``{metric: values}``, each metric's :class:`flsv.core.Values`.
        evaluations: the number of models evaluated in this round.
        names: the clients' names, in the order of ``values``.
        table: the same values and the metrics' diagnostics, as :meth:`to_frame` returns them.
    """

    values: Mapping[str, Values]
    evaluations: int
    names: Sequence[str]
    table: pandas.DataFrame

    def __getitem__(self, metric: str) -> Tensor:
        return self.values[metric].overall

    def to_frame(self) -> pandas.DataFrame:
        """Return a row per metric, client and class, with the columns of :func:`flsv.read_run`."""
        return self.table


@checked
@torch.inference_mode(False)  # metrics change their state in place in later rounds
@isolate_rng()  # reading a DataLoader draws from torch's generator, which the caller's own rounds use, too
def value_round(
    module: nn.Module,
    start: Model,
    updates: Mapping[Any, Model] | Sequence[Model],
    val_loader: Any = None,
    *,
    metrics: ContributionMetric
    | Sequence[ContributionMetric]
    | Mapping[str, ContributionMetric]
    | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    num_samples: Mapping[Any, int] | Sequence[int] | None = None,
    weights: Mapping[Any, float] | Sequence[float] | None = None,
    deltas: bool = False,
    num_clients: Annotated[int, Ge(2), "A contribution is measured against other clients'."]
    | None = None,
    num_classes: int | None = None,
    client_names: Sequence[Any] | None = None,
    round_index: Annotated[int, Ge(0)] | None = None,
    seed: int = 0,
) -> RoundValues:
    """Measure how much each client contributed to one round.

    Pass the same metric objects after every round, and the values cover all rounds so far. Nothing is trained.

    Args:
        module: a module with the models' structure: any network, one set up by Fabric, or a LightningModule. It is not
            changed.
        start: the global model that the clients started from.
        updates: the clients' models after local training: a list in the order of the clients, or a mapping from
            clients, each one of ``client_names`` or, without these, a number from 0.
        val_loader: the server's validation batches, for metrics that evaluate models. A plain module needs pairs
            ``(x, y)``. A LightningModule whatever its ``validation_step`` takes.
        metrics: contribution metrics: one, or a list (named by their classes), or a mapping or ``MetricCollection``
            with names of your own. Default: a new ``PartialFederatedShapley`` of ``loss`` if that is given, else of
            accuracy.
        loss: the loss of a plain module: ``loss(module(x), y)`` returns the mean over the batch. Metrics refer to it as
            a logged value: ``performance="loss", mode="min"``.
        num_samples: each client's number of training samples, a list or mapping like ``updates``. None: all clients
            have equally many.
        weights: each client's weight in the aggregation, a list or mapping like ``updates``. The weights are not
            normalized. None: each client's share of the samples, as in FedAvg.
        deltas: whether ``updates`` holds differences from ``start`` instead of models.
        num_clients: n, the number of all clients. Default: the n that a metric was created with, else the number of
            names, else the number of updates. Set it if some clients do not take part in the first round.
        num_classes: M, the number of classes. Default: the number of rows of the classifier head.
        client_names: the names of all clients, in the order of their numbers.
        round_index: the round's number, from 0. Default: the number of rounds that the metrics have seen.
        seed: seed of the metrics' random choices, as in a FederatedLoop.

    Returns:
        The clients' values, see :class:`RoundValues`.

    Raises:
        ConfigurationError: a model does not fit the module, or is not finite, a client or metric is unknown, there are
            fewer than 2 clients, the clients' names differ from those of a metric's earlier rounds, a metric evaluates
            models, but there is no validation data, or the module does not log the value, a metric sends requests to
            clients, or reads a quantity that only a FederatedLoop has.

    Example:
        >>> net = nn.Linear(2, 2, bias=False)
        >>> start = {"weight": torch.zeros(2, 2)}
        >>> updates = [{"weight": torch.eye(2)}, {"weight": torch.tensor([[-1.0, 0], [0, 0]])}]
        >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
        >>> from flsv.metrics import CumulativeShapley, LeaveOneOut
        >>> metrics = [CumulativeShapley(), LeaveOneOut()]
        >>> round_values = value_round(net, start, updates, batches, metrics=metrics)
        >>> round_values["CumulativeShapley"], round_values.evaluations
        (tensor([ 0.7500, -0.2500]), 4)
        >>> round_values.to_frame().query("client == 0")["value"].tolist()[:1]
        [0.75]
    """
    module = unwrapped(module)
    check_lightning(module)
    contribution_metrics = ContributionMetrics(metrics_by_name(metrics, loss))
    head = named_head(contribution_metrics.metrics.values())
    space = ParameterSpace(module, head)

    measuring_metrics = _measuring_metrics(contribution_metrics)
    for metric in measuring_metrics:
        if num_clients is None:
            num_clients = metric.num_clients
    clients = client_names  # of the federation. Some may not be in the round
    if clients is None:
        clients = range(num_clients or len(updates))
    names = _checked_names(clients, num_clients)
    model_by_client = _by_client(updates, "updates", clients)
    cohort = _Cohort(clients, ids=list(model_by_client))
    _check_form("num_samples", num_samples, updates)
    _check_form("weights", weights, updates)

    _check_needs(contribution_metrics)
    check_space(space, contribution_metrics, [], head, num_classes)
    if num_classes is None and space.head is not None:
        num_classes = space.head.num_classes
    if num_classes is None:
        _check_without_classes(contribution_metrics)
    _check_names(contribution_metrics, names)
    contribution_metrics.bind(len(names), num_classes or 1, class_names=None, client_names=names)
    device = module_device(module)
    contribution_metrics.to(device)

    sample_counts = cohort.sample_counts(num_samples)
    shares = cohort.shares(weights, sample_counts)
    global_vector = _vector(space, module, start, owner="start")
    offset = global_vector if deltas else None
    models = _stacked_models(model_by_client, names, space, module, offset)

    if round_index is None:
        round_index = max((int(metric.rounds) for metric in measuring_metrics), default=0)
    round = Round(
        round_index=round_index,
        client_ids=torch.tensor(cohort.ids, device=device),
        num_samples=sample_counts.to(device),
        global_vector=global_vector.to(device),
        client_vectors=models.to(device),
        space=space,
        seed=seed,
        games=_games(contribution_metrics, module, val_loader, loss, num_classes),
    )
    results = _update(contribution_metrics, round, shares.to(device))
    return _round_values(contribution_metrics, round, results, names)


@dataclass(frozen=True)
class _Cohort:
    """The clients of a federation, and the ids of those in the round."""

    clients: Sequence[Any]
    ids: list[int]

    def sample_counts(self, num_samples: Any) -> Tensor:
        if num_samples is None:
            return torch.ones(len(self.ids), dtype=torch.long)
        return torch.tensor(self._numbers(num_samples, "num_samples", Count))

    def shares(self, weights: Any, sample_counts: Tensor) -> Tensor:
        if weights is None:
            return sample_counts.double() / sample_counts.sum()
        return torch.tensor(self._numbers(weights, "weights", float), dtype=torch.float64)

    def _numbers(
        self,
        values: Any,
        argument: str,
        kind: Any,
    ) -> list[Any]:
        number_by_client = _by_client(values, argument, self.clients, expected=self.ids)
        numbers = number_by_client.values()
        return [check_argument("value_round", argument, number, kind) for number in numbers]


def _measuring_metrics(contribution_metrics: ContributionMetrics) -> list[ContributionMetric]:
    metrics = contribution_metrics.metrics.values()
    return [metric for metric in metrics if isinstance(metric, ContributionMetric)]


def _stacked_models(
    model_by_client: Mapping[int, Model],
    names: list[str],
    space: ParameterSpace,
    module: nn.Module,
    offset: Tensor | None,
) -> Tensor:
    # Updates are models, or differences from the offset [P], if there is one.
    owners = [client_called(client, names) for client in model_by_client]  # for messages
    vectors = []
    for owner, model in zip(owners, model_by_client.values()):
        vectors.append(_vector(space, module, model, owner))
    models = torch.stack(vectors)  # [k, P]
    if offset is not None:
        models = models + offset
    _check_variances(models, space, owners)
    return models


def _checked_names(
    clients: Sequence[Any],
    num_clients: int | None,
) -> list[str]:
    names = [str(client) for client in clients]
    has_expected_number = num_clients in (None, len(names)) and len(names) > 1
    are_distinct = len(set(names)) == len(names)
    if not has_expected_number or not are_distinct:
        raise ConfigurationError(
            f"value_round got the clients {names[:20]} and num_clients={num_clients}, but at least 2 clients with "
            "different names are needed, because a contribution is measured against other clients'. Pass num_clients, "
            "or the names of all clients in client_names."
        )
    return names


def _check_form(argument: str, values: Any, updates: Any) -> None:
    """Raise ConfigurationError unless values and updates are both lists, or both mappings from clients."""
    if values is not None and isinstance(values, Mapping) != isinstance(updates, Mapping):
        raise ConfigurationError(
            f"value_round: {argument} is a {type(values).__name__}, but updates is a {type(updates).__name__}. Pass "
            "two lists, or two mappings from clients."
        )


def _by_client(
    values: Any,
    argument: str,
    clients: Sequence[Any],
    expected: Sequence[int] | None = None,
) -> dict[int, Any]:
    """Return ``{client id: value}`` of a mapping from clients, or of a list in the clients' order.

    The values are those of the ``expected`` clients, in this order, or of any.
    """
    id_by_client = {client: client_id for client_id, client in enumerate(clients)}
    entries = values if isinstance(values, Mapping) else dict(zip(clients, values))
    value_by_id = {}
    for client, value in entries.items():
        if client in id_by_client:
            value_by_id[id_by_client[client]] = value

    expected_ids = list(value_by_id) if expected is None else expected
    are_all_known = len(value_by_id) == len(values)
    are_expected = bool(value_by_id) and value_by_id.keys() == set(expected_ids)
    if not (are_all_known and are_expected):
        expected_clients = clients
        if expected is not None:
            expected_clients = [clients[client_id] for client_id in expected]
        raise ConfigurationError(
            f"value_round({argument}=...) has values of {len(values)} clients, {list(entries)[:20]}, but expected "
            f"those of {list(expected_clients)[:20]}. Name all clients in client_names, or pass their number in "
            "num_clients."
        )
    return {client_id: value_by_id[client_id] for client_id in expected_ids}


def metrics_by_name(
    metrics: Any,
    loss: Any = None,
) -> Mapping[str, ContributionMetric]:
    """Return ``{name: metric}`` for the arguments of :func:`value_round`."""
    if isinstance(metrics, Mapping):
        return dict(metrics)
    if metrics is None and loss is not None:
        metrics = PartialFederatedShapley(performance=LOSS, mode="min")
    elif metrics is None:
        metrics = PartialFederatedShapley()
    named_metrics: Any = MetricCollection(metrics)
    return dict(named_metrics.items())


def _games(
    contribution_metrics: ContributionMetrics,
    module: nn.Module,
    loader: Any,
    loss: Any,
    num_classes: int | None,
) -> CoalitionGames | None:
    performances = contribution_metrics.performances
    if performances and loader is None:
        raise ConfigurationError(
            f"The metrics {list(performances)} evaluate models on the server's validation data. "
            "Pass val_loader, or use metrics that only read updates, such as CosineGradientShapley."
        )
    if loss is not None:
        _check_loss_is_measured(contribution_metrics)
    if not performances:
        return None
    measures = {f"metric {name!r}": measure for name, measure in performances.items()}
    return games_outside_fit(module, loader, measures, loss, num_classes)


def _check_loss_is_measured(contribution_metrics: ContributionMetrics) -> None:
    measures = contribution_metrics.performances.values()
    if not any(measure.is_logged for measure in measures):
        raise ConfigurationError(
            f"value_round(loss=...): none of the metrics {list(contribution_metrics.metrics)} measures the loss. "
            f"Create one with performance={LOSS!r}, mode='min', or do not pass loss."
        )


def _update(
    contribution_metrics: ContributionMetrics,
    round: Round,
    weights: Tensor,
) -> dict[str, Values]:
    """Update all metrics with the round, aggregated by ``weights``, and return the clients' contributions."""
    games: Any = round.games
    if games is not None:
        games.begin(round)
    contribution_metrics.update(round, "training")
    weights = weights.to(round.client_vectors)  # the type and device that aggregators return
    aggregated_round = round.aggregated(round.combine(weights), weights)
    contribution_metrics.update(aggregated_round, "aggregation")
    return {name: values.map(Tensor.cpu) for name, values in contribution_metrics.values.items()}


def _round_values(
    contribution_metrics: ContributionMetrics,
    round: Round,
    results: Mapping[str, Values],
    names: list[str],
) -> RoundValues:
    metrics = contribution_metrics.metrics
    games: Any = round.games
    rows = ResultBuilder(metrics, names).rows(round.round_index, results)
    return RoundValues(
        values=results,
        evaluations=0 if games is None else games.evaluations,
        names=names,
        table=tidy(frame(rows)),
    )


def _check_names(contribution_metrics: ContributionMetrics, names: list[str]) -> None:
    """Check that the clients have the same names in the same order as in the metrics' earlier rounds."""
    for name, metric in contribution_metrics.metrics.items():
        if not isinstance(metric, ContributionMetric) or metric.client_names is None:
            continue
        earlier_names = list(metric.client_names)
        has_seen_rounds = int(metric.rounds) > 0
        if has_seen_rounds and earlier_names != names:
            raise ConfigurationError(
                f"The metric {name!r} has measured rounds of the clients {earlier_names[:20]}, but this round has the "
                f"clients {names[:20]}. Pass the same clients in the same order after every round."
            )


def _check_without_classes(contribution_metrics: ContributionMetrics) -> None:
    metrics_of_classes = _metrics_of_classes(contribution_metrics)
    if metrics_of_classes:
        raise ConfigurationError(
            f"The metrics {metrics_of_classes} need the number of classes, and the module has no linear layer from "
            "which it could be read. Pass num_classes."
        )


def _check_needs(contribution_metrics: ContributionMetrics) -> None:
    for name, attributes in contribution_metrics.reads.items():
        unmet_needs = _unmet_needs(contribution_metrics, name, attributes)
        if unmet_needs:
            raise ConfigurationError(
                f"The metric {name!r} ({type(contribution_metrics.metrics[name]).__name__}) needs {unmet_needs}, "
                "which only a FederatedLoop provides, because they come from the clients themselves."
            )


def _metrics_of_classes(contribution_metrics: ContributionMetrics) -> list[str]:
    metrics = contribution_metrics.metrics.items()
    measures = contribution_metrics.performances.items()
    return [
        *(name for name, metric in metrics if getattr(metric, "per_class", False)),
        *(name for name, measure in measures if measure.is_of_classifier),
    ]


def _unmet_needs(
    contribution_metrics: ContributionMetrics,
    name: str,
    attributes: Iterable[str],
) -> list[str] | str:
    """Return the needs of a metric that only a FederatedLoop meets, or ""."""
    # The attributes of a round that metrics may read. Some exist in a loop only.
    loop_attributes = [attribute for attribute in attributes if not VOCABULARY[attribute].outside]
    if loop_attributes:
        return loop_attributes
    if name in contribution_metrics.trained_names:
        return "trained coalitions"
    if name in contribution_metrics.evaluating:
        return 'evaluators="clients"'
    if getattr(contribution_metrics.metrics[name], "reported_by", None):
        return "reports of the clients"
    return ""


def _vector(space: ParameterSpace, module: nn.Module, model: Model, owner: str) -> Tensor:
    """Return a model, given as vector, ``state_dict`` or arrays, as a vector ``[P]``. ``owner`` is for messages."""
    if isinstance(model, Tensor):
        if model.shape != (space.size,):
            raise ConfigurationError(
                f"The model of {owner} does not fit the module: expected a vector [{space.size}], as "
                "flsv.ParameterSpace(module).read(module) returns it."
            )
        vector = model.detach().to(space.dtype)
    else:
        module_tensors = module.state_dict()
        tensors = _tensors_by_name(model, module_tensors)
        _check_tensors(tensors, module_tensors, space, owner)
        vector = space.flatten(tensors)

    if not vector.isfinite().all():
        raise ConfigurationError(
            f"The model of {owner} contains NaN or infinite numbers. Do not pass this update."
        )
    return vector


def _tensors_by_name(
    model: Mapping[str, Any] | Sequence[Any],
    module_tensors: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    # No tensors if there are more or fewer arrays.
    entries: Mapping[str, Any] = {}
    if isinstance(model, Mapping):
        entries = model
    elif len(model) == len(module_tensors):
        entries = dict(zip(module_tensors, model))
    return {name: torch.as_tensor(entry).detach() for name, entry in entries.items()}


def _check_tensors(
    tensors: Mapping[str, Tensor],
    module_tensors: Mapping[str, Any],
    space: ParameterSpace,
    owner: str,
) -> None:
    different_names = []
    for name in sorted(module_tensors.keys() | tensors.keys()):
        is_needed = name in tensors or name in space.names
        has_module_shape = _shape_of(name, tensors) == _shape_of(name, module_tensors)
        if is_needed and not has_module_shape:
            different_names.append(name)
    if different_names:
        raise ConfigurationError(
            f"The model of {owner} does not fit the module: expected the module's state_dict, or its "
            f"{len(module_tensors)} entries as arrays, but {different_names[:5]} differ."
        )


def _shape_of(
    name: str,
    tensors: Mapping[str, Any],
) -> torch.Size | None:
    return getattr(tensors.get(name), "shape", None)


def _check_variances(
    models: Tensor,
    space: ParameterSpace,
    owners: Sequence[str],
) -> None:
    """Check that BatchNorm's variances in models ``[k, P]`` are not negative, as those of differences are."""
    sizes = [shape.numel() for shape in space.shapes]
    for name, entries in zip(space.names, models.split(sizes, dim=1)):
        if not name.endswith("running_var"):
            continue
        for owner, variances in zip(owners, entries):
            if (variances < 0).any():
                raise ConfigurationError(
                    f"{owner}: {name} has negative numbers, which cannot be variances. If updates holds differences "
                    "from start, set deltas=True. If it holds models, do not set deltas."
                )
