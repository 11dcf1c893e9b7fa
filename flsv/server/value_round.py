"""value_round: what clients were worth to a round that somebody else ran.

For rounds of plain PyTorch, of Fabric, and of other frameworks: a Flower strategy's ``aggregate_fit``, an NVFlare
aggregator. Nothing trains and nothing is aggregated here; the metrics, their games and their numbers are those of a
:class:`flsv.FederatedLoop`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pandas
import torch
from annotated_types import Ge
from lightning.fabric.wrappers import _unwrap_objects
from torch import Tensor, nn
from torchmetrics import Metric

import flsv.metrics
from flsv.declared import Count, check_argument, checked
from flsv.errors import ConfigurationError
from flsv.games import CoalitionGames
from flsv.games.outside_fit import LOSS, games_outside_fit
from flsv.games.performance import Mode, is_logged
from flsv.games.replica import module_device
from flsv.metrics import ContributionMetric
from flsv.parameters import ParameterSpace
from flsv.report.measured import numbers_of, overall
from flsv.report.run_table import COLUMNS, frame, rows_of
from flsv.round import Round, stage_of
from flsv.server.checks import check_space
from flsv.server.config import named_head
from flsv.server.contribution_metrics import ContributionMetrics
from flsv.server.named_cohort import NamedCohort

Model = Tensor | Mapping[str, Any] | Sequence[Any]
"""A ``state_dict``; or its entries as arrays in its order, as Flower sends them; or a vector ``[P]`` of
:class:`flsv.ParameterSpace`."""
Asked = str | ContributionMetric

#: Of a round, what only a FederatedLoop has; and the stages of one that come after its aggregation.
_OF_A_LOOP = {"clients", "server_data", "losses", "num_steps"}
_LATE = ("personalization", "exchange")


@dataclass(frozen=True, eq=False)
class RoundValues:
    """The clients' values after a round; NaN for clients never seen.

    Attributes:
        values: metric to one number per client ``[n]``.
        per_class: of the metrics that have them, values per class ``[n, M]``, or of whatever their columns are.
        diagnostics: metric to what else it says, by name.
        evaluations: models that were evaluated in this round's games.
        names: of the clients.
        table: the same as rows of a run's table.
    """

    values: Mapping[str, Tensor]
    per_class: Mapping[str, Tensor]
    diagnostics: Mapping[str, Mapping[str, Tensor]]
    evaluations: int
    names: Sequence[str]
    table: pandas.DataFrame

    def __getitem__(self, metric: str) -> Tensor:
        """``[n]``."""
        return self.values[metric]

    def to_frame(self) -> pandas.DataFrame:
        """A row per metric, client and class, with the columns of :func:`flsv.read_run`."""
        return self.table[[*COLUMNS]]


@checked
@torch.inference_mode(False)  # what the metrics keep is written again in later rounds
def value_round(
    module: nn.Module,
    start: Model,
    updates: Mapping[Any, Model] | Sequence[Model],
    val_loader: Any = None,
    *,
    metrics: Asked | Sequence[Asked] | Mapping[str, Asked] = "PartialFederatedShapley",
    performance: str | Metric | None = None,
    mode: Mode | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    num_samples: Mapping[Any, int] | Sequence[int] | None = None,
    weights: Mapping[Any, float] | Sequence[float] | None = None,
    deltas: bool = False,
    num_clients: int | None = None,
    num_classes: int | None = None,
    client_names: Sequence[Any] | None = None,
    round_index: Annotated[int, Ge(0)] | None = None,
    seed: int = 0,
) -> RoundValues:
    """Measure what each client contributed to one round of federated training.

    Metrics that are given as objects keep their state: give the same ones after every round, and the values are those
    of all rounds so far. Metrics that are given by name are made anew, and say what this round says.

    Args:
        module: of the models' structure: any network, one set up by Fabric, or a LightningModule. It is read, not
            written.
        start: the global model that the clients started from.
        updates: the clients' models after local training: in their order, or by client, a number from 0 or one of
            ``client_names``.
        val_loader: the server's validation batches, for metrics that evaluate models. A plain module takes pairs
            ``(x, y)``; a LightningModule whatever its ``validation_step`` takes.
        metrics: contribution metrics, or names of those in :mod:`flsv.metrics`; under names of your own as a mapping.
        performance: of metrics that are given by name: what models are measured by, see :mod:`flsv.games.performance`.
            By default ``loss`` where it is given, else ``"accuracy"``.
        mode: whether less or more of a logged value is better, likewise. Of ``loss`` less is, by default.
        loss: of a plain module: ``loss(module(x), y)``, a mean over the batch. Metrics may name it as a logged value:
            ``performance="loss", mode="min"``.
        num_samples: training samples of each client, as ``updates`` is given. None: all have equally many.
        weights: of each client in the aggregation, likewise; they are taken as they are. None: its share of the
            samples, as in FedAvg.
        deltas: ``updates`` are differences to ``start``.
        num_clients: n, of all clients. By default what a metric was made with, the number of names, or as many as the
            updates tell of: say it where not everybody takes part in the first round.
        num_classes: M. By default the rows of the classifier head.
        client_names: of all clients, in the order of their numbers.
        round_index: from 0. By default the number of rounds that the metrics have seen.
        seed: of what estimators draw, as a FederatedLoop's.

    Returns:
        See :class:`RoundValues`.

    Raises:
        ConfigurationError: models that do not fit the module, or are not finite; an unknown client or metric; fewer
            than 2 clients; clients with other names than a metric's earlier rounds had; no validation data for a metric
            that evaluates models, a value that the module does not log, or a loss that no metric measures; a metric
            that asks the clients themselves, or for what only a FederatedLoop knows.

    Example:
        >>> net = nn.Linear(2, 2, bias=False)
        >>> start = {"weight": torch.zeros(2, 2)}
        >>> updates = [{"weight": torch.eye(2)}, {"weight": torch.tensor([[-1.0, 0], [0, 0]])}]
        >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
        >>> found = value_round(net, start, updates, batches, metrics=["CumulativeShapley", "LeaveOneOut"])
        >>> found["CumulativeShapley"], found.evaluations
        (tensor([ 0.7500, -0.2500]), 4)
        >>> found.to_frame().query("client == 0")["value"].tolist()[:1]
        [0.75]
    """
    module = _unwrap_objects(module)
    board = ContributionMetrics(_made(metrics, performance, mode, loss))
    head = named_head(board.metrics.values())
    space = ParameterSpace(module, head)
    own = [metric for metric in board.metrics.values() if isinstance(metric, ContributionMetric)]
    if num_clients is None:
        num_clients = next((metric.num_clients for metric in own if metric.num_clients is not None), None)
    cohort = NamedCohort.of(updates, client_names, num_clients)
    classes = num_classes if num_classes is not None or space.head is None else space.head.num_classes
    _check(board, space, head, num_classes, classes)
    _check_names(board, cohort.names)
    board.bind(len(cohort.names), classes or 1, None, client_names=cohort.names)
    device = module_device(module)
    board.to(device)

    counts, shares = _counts(cohort, num_samples), _weights(cohort, weights)
    vector, models = _models(space, module, start, updates, cohort, deltas)
    if round_index is None:
        round_index = max((int(metric.rounds) for metric in own), default=0)
    round = Round(
        round_index=round_index,
        client_ids=torch.tensor(cohort.ids, device=device),
        num_samples=counts.to(device),
        global_vector=vector.to(device),
        client_vectors=models.to(device),
        space=space,
        seed=seed,
        games=_games(board, module, val_loader, loss, classes),
    )
    shares = counts.double() / counts.sum() if shares is None else shares
    return _measured(board, round, shares.to(device), cohort.names)


def _counts(cohort: NamedCohort, num_samples: Any) -> Tensor:
    """``[k]`` training samples of each client."""
    counts = [count for _, count in cohort.each(num_samples, "num_samples")] or [1] * len(cohort.ids)
    for count in counts:
        check_argument("value_round", "num_samples", count, Count)
    return torch.tensor([int(count) for count in counts])


def _weights(cohort: NamedCohort, weights: Any) -> Tensor | None:
    """float64 ``[k]``; None where none are given."""
    given = [float(weight) for _, weight in cohort.each(weights, "weights")]
    if not all(map(math.isfinite, given)):
        raise ConfigurationError(f"value_round(weights={given}): expected finite numbers.")
    return torch.tensor(given, dtype=torch.float64) if given else None


def _games(
    board: ContributionMetrics, module: nn.Module, loader: Any, loss: Any, classes: int | None
) -> CoalitionGames | None:
    """What the metrics play, if any does."""
    measures = {f"metric {name!r}": measure for name, measure in board.performances.items()}
    if measures and loader is None:
        raise ConfigurationError(
            f"metrics {list(board.performances)} evaluate models on the server's validation data: give val_loader, or "
            "take metrics of the updates alone, such as CosineGradientShapley."
        )
    if loss is not None and not any(is_logged(measure) for measure in measures.values()):
        raise ConfigurationError(
            f"value_round(loss=...): none of the metrics {list(board.metrics)} measures it. Make one with "
            f"performance={LOSS!r}, mode='min', or leave loss out."
        )
    return games_outside_fit(module, loader, measures, loss, classes) if measures else None


def _measured(board: ContributionMetrics, round: Round, weights: Tensor, names: list[str]) -> RoundValues:
    """Update the metrics, before and after the aggregation by these weights."""
    games: Any = round.games
    if games is not None:
        games.begin(round)
    board.update(round, "training")
    weights = weights.to(round.client_vectors)  # as aggregators give them
    board.update(round.aggregated(round.combine(weights), weights), "aggregation")
    found = {name: value.cpu() for name, value in board.contributions.items()}
    return RoundValues(
        values={name: overall(board.metrics[name], value) for name, value in found.items()},
        per_class={name: value for name, value in found.items() if value.ndim == 2},
        diagnostics={n: m.diagnostics() for n, m in board.metrics.items() if isinstance(m, ContributionMetric)},
        evaluations=0 if games is None else games.evaluations,
        names=names,
        table=frame(rows_of(round.round_index, numbers_of(board.metrics, found, None), names)),
    )


def _made(metrics: Any, performance: Any, mode: Mode | None, loss: Any) -> dict[str, ContributionMetric]:
    """The metrics by name; those that are names are made."""
    named = _by_name(metrics)
    wanted: dict[str, Any] = {"performance": performance, "mode": mode}
    if loss is not None and performance is None:
        wanted = {"performance": LOSS, "mode": mode or "min", "loss": LOSS}
    made = {name: _make(metric, wanted) if isinstance(metric, str) else metric for name, metric in named.items()}
    takes = [metric for metric in named.values() if isinstance(metric, str) and "performance" in _arguments(metric)]
    if (performance is not None or mode is not None) and not takes:
        raise ConfigurationError(
            f"value_round(performance={performance!r}, mode={mode!r}): none of the metrics {list(made)} is made here "
            "and takes it. Give it to the metrics themselves."
        )
    return made


def _by_name(metrics: Any) -> Mapping[str, Any]:
    """Metrics, or names of metrics, by the names that their values get."""
    if isinstance(metrics, Mapping):
        return metrics
    listed = [metrics] if isinstance(metrics, str | Metric) else list(metrics)
    names = [metric if isinstance(metric, str) else type(metric).__name__ for metric in listed]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"value_round(metrics={names}): give them names of their own, as a mapping.")
    return dict(zip(names, listed))


def _make(name: str, wanted: Mapping[str, Any]) -> ContributionMetric:
    """The metric of this name, with what it takes of ``wanted``."""
    takes = _arguments(name)
    needs = [p.name for p in takes.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if needs:
        raise ConfigurationError(
            f"value_round: {name} is made with {needs}. Make it once, and give the object after every round."
        )
    return _known()[name](**{n: value for n, value in wanted.items() if n in takes and value is not None})


def _arguments(name: str) -> Mapping[str, inspect.Parameter]:
    known = _known()
    if name not in known:
        raise ConfigurationError(f"value_round: there is no contribution metric {name!r}. There are {list(known)}.")
    return inspect.signature(known[name]).parameters


def _known() -> dict[str, type[ContributionMetric]]:
    """The contribution metrics of :mod:`flsv.metrics`, by name."""
    kinds = {name: getattr(flsv.metrics, name) for name in flsv.metrics.__all__}
    return {
        name: kind
        for name, kind in kinds.items()
        if inspect.isclass(kind) and issubclass(kind, ContributionMetric) and not inspect.isabstract(kind)
    }


def _check_names(board: ContributionMetrics, names: list[str]) -> None:
    """Raise where a metric has seen rounds of clients that had other names: its values are by place."""
    for name, metric in board.metrics.items():
        if not isinstance(metric, ContributionMetric) or metric.client_names is None:
            continue
        before, rounds = metric.client_names, int(metric.rounds)
        if rounds and list(before) != names:
            raise ConfigurationError(
                f"metric {name!r} has seen rounds of the clients {list(before)[:20]}, and is given one of "
                f"{names[:20]}. Name the same clients in the same order after every round."
            )


def _check(
    board: ContributionMetrics, space: ParameterSpace, head: str | None, given: int | None, classes: int | None
) -> None:
    """Raise where a metric asks for what such a round has not."""
    for name, fields in board.fields.items():
        asked = [field for field in fields.values() if isinstance(field, str)]
        late = [each for each in asked if each in _OF_A_LOOP or stage_of([each]) in _LATE]
        if late or getattr(board.metrics[name], "reported_by", None):
            raise ConfigurationError(
                f"metric {name!r} ({type(board.metrics[name]).__name__}) asks for {late or 'reports of the clients'}, "
                "which only a FederatedLoop has: it needs the clients themselves."
            )
    check_space(space, board, [], head, given)
    by_class = [n for n, metric in board.metrics.items() if getattr(metric, "per_class", False)]
    games = [n for n, measure in board.performances.items() if isinstance(measure, str)]
    if classes is None and (by_class or games):
        raise ConfigurationError(
            f"metrics {[*by_class, *games]} are of classes, and the module has no linear layer that tells how many "
            "there are: say num_classes."
        )


def _models(
    space: ParameterSpace, module: nn.Module, start: Model, updates: Any, cohort: NamedCohort, deltas: bool
) -> tuple[Tensor, Tensor]:
    """``[P]`` and ``[k, P]``."""
    vector = _vector(space, module, start, "start")
    if not vector.isfinite().all():
        raise ConfigurationError("the start model holds NaN or infinite entries.")
    models = torch.stack([_vector(space, module, model, client) for client, model in cohort.each(updates, "updates")])
    models = models + vector if deltas else models
    broken = [name for name, model in zip(cohort.called, models) if not model.isfinite().all()]
    if broken:
        raise ConfigurationError(f"the models of {', '.join(broken)} hold NaN or infinite entries: leave them out.")
    return vector, models


def _vector(space: ParameterSpace, module: nn.Module, model: Model, whose: str) -> Tensor:
    """``[P]``."""
    if isinstance(model, Tensor):
        if model.shape != (space.size,):
            raise ConfigurationError(
                f"the vector of {whose} has the shape {list(model.shape)}, expected [{space.size}], as "
                "flsv.ParameterSpace(module).read(module) gives it."
            )
        return model.detach().to(space.dtype)
    own = module.state_dict()
    if not isinstance(model, Mapping):
        if len(model) != len(own):
            raise ConfigurationError(
                f"the model of {whose} has {len(model)} arrays, expected {len(own)} in the order of the module's "
                "state_dict()."
            )
        model = dict(zip(own, model))
    missing, more = [name for name in space.names if name not in model], [n for n in model if n not in own]
    if missing or more:
        raise ConfigurationError(
            f"the state_dict of {whose} lacks {missing[:5]}, and has {more[:5]} that the module has not."
        )
    tensors = {name: torch.as_tensor(model[name]).detach() for name in space.names}
    wrong = [
        f"{n} {[*tensors[n].shape]} for {[*s]}" for n, s in zip(space.names, space.shapes) if tensors[n].shape != s
    ]
    if wrong:
        raise ConfigurationError(f"the model of {whose} has other shapes than the module: {', '.join(wrong[:5])}.")
    return space.flatten(tensors)
