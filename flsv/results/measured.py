"""What the metrics say after a round: as the rows of the run's table, as curves by tag, and as monitored values.

A tag begins with the metric, so that tools that group by the first part keep a metric together. Where all numbers go
into one place it ends with the client: ``cssv/client_3_Lyon``, ``cssv/class_3_Dress/client_0_Boston``. Where every
client has a place of its own (a run in TensorBoard) the client is left out: ``cssv``, ``cssv/class_3_Dress``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.metrics import ContributionMetric
from flsv.models.imbalance import OWN_SCORES
from flsv.results.round_result import Event, RoundResult, Row, Sink
from flsv.results.run_table import Numbers, changes, rows_of

#: Curves of one metric per class and client, above which none are written: pictures and the CSV have the values.
MOST_PER_CLASS = 500


def overall(metric: Metric, value: Tensor) -> Tensor:
    """One number per client ``[n]``: the metric's own summary, or the mean over classes."""
    if isinstance(metric, ContributionMetric):
        return metric.per_client(value)
    return value.mean(-1) if value.ndim == 2 else value


def columns_of(metric: Metric) -> list[str] | None:
    """Names of the columns of a metric's values where they are no classes."""
    return metric.columns() if isinstance(metric, ContributionMetric) else None


def numbers_of(
    metrics: Mapping[str, Metric], values: Mapping[str, Tensor], class_names: Sequence[str] | None
) -> Iterator[Numbers]:
    """All that the metrics say of clients: overall values with their intervals, values per class (or whatever the
    columns are), and what diagnostics say of each client.

    Args:
        metrics: by name.
        values: name to ``[n]`` or ``[n, M]``.
        class_names: of the classes, or None.
    """
    for name, value in values.items():
        metric = metrics[name]
        whole = overall(metric, value)
        if whole.ndim == 0:
            continue
        ends = metric.intervals(value=whole) if isinstance(metric, ContributionMetric) else None
        yield Numbers(name, _plain(whole), ends=None if ends is None else [_plain(end) for end in ends])
        if columns := _named_columns(metric, value, class_names):
            yield Numbers(name, _plain(value), columns)
    for name, value in _diagnostics(metrics):
        if value.ndim:
            yield Numbers(name, _plain(value))


def _named_columns(metric: Metric, value: Tensor, class_names: Sequence[str] | None) -> dict[str, str]:
    """Key to name of the columns of a value; nothing where there are none, or of one class, which is all."""
    own = columns_of(metric)
    if value.ndim < 2 or not (own or value.shape[1] > 1):
        return {}
    keys = own or [str(j) for j in range(value.shape[1])]
    names = own or class_names or getattr(metric, "class_names", None) or keys
    return dict(zip(keys, map(str, names)))


def shared_numbers(metrics: Mapping[str, Metric], values: Mapping[str, Tensor]) -> dict[str, float]:
    """What the metrics say of no single client, by name."""
    wholes = ((name, overall(metrics[name], value)) for name, value in values.items())
    return {name: value.item() for name, value in (*wholes, *_diagnostics(metrics)) if value.ndim == 0}


def spread(scores: Mapping[str, Tensor]) -> dict[str, float]:
    """Of the scores ``[n]`` of clients' own models, by name. The accuracies' standard deviation is how unevenly clients
    are served: Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, definition 1.

    Example:
        >>> import torch
        >>> spread({"accuracy": torch.tensor([0.5, 1.0])})
        {'client_accuracy/mean': 0.75, 'client_accuracy/min': 0.5, 'client_accuracy/std': 0.25}
    """
    found: dict[str, float] = {}
    for name, score in scores.items():
        known = score[~score.isnan()].double()
        if len(known):
            # NaN where somebody has no score: it is a mean of all.
            values = {"mean": score.mean(), "min": known.min(), "std": known.std(correction=0)}
            found |= {f"{tag_of(name)}/{what}": value.item() for what, value in values.items()}
    return found


def _diagnostics(metrics: Mapping[str, Metric]) -> Iterable[tuple[str, Tensor]]:
    for name, metric in metrics.items():
        for what, value in metric.diagnostics().items() if isinstance(metric, ContributionMetric) else ():
            yield f"{name}/{what}", value


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().double()


def known_rows(
    index: int,
    metrics: Mapping[str, Metric],
    values: Mapping[str, Tensor],
    of_round: Mapping[str, Tensor | None],
    client_names: Sequence[str],
    class_names: Sequence[str] | None = None,
) -> list[Row]:
    """All that is known between two rounds.

    Args:
        index: of the last round.
        metrics: by name.
        values: of the metrics.
        of_round: name to what else there is of every client ``[n]``, such as the weights.
        client_names: of the clients.
        class_names: of the classes, or None.
    """
    others = [Numbers(name, value.cpu()) for name, value in of_round.items() if value is not None]
    return rows_of(index, [*numbers_of(metrics, values, class_names), *others], client_names)


class Results:
    """Makes each round's result, the rows once for all who read it.

    Args:
        metrics: by name.
        client_names: of the clients.
        class_names: of the classes, or None.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], client_names: Sequence[str], class_names: Sequence[str] | None
    ) -> None:
        self._metrics, self._client_names, self._class_names = metrics, client_names, class_names
        self._before: Sequence[Row] = ()
        self._late: Sequence[Row] = ()

    def known(self, index: int, values: Mapping[str, Tensor], **of_round: Tensor | None) -> list[Row]:
        """See :func:`known_rows`."""
        return known_rows(index, self._metrics, values, of_round, self._client_names, self._class_names)

    def resume(self, known: Sequence[Row]) -> None:
        """These rows are written already."""
        self._before = known

    def after(
        self,
        index: int,
        last_one: bool,
        values: Mapping[str, Tensor],
        weights: Tensor,
        losses: Mapping[int, float],
        norms: Mapping[int, float],
        scores: Mapping[str, Tensor],
        evaluated: bool,
        events: Sequence[Event] = (),
    ) -> RoundResult:
        """What is known after a round, see :class:`flsv.results.round_result.RoundResult`.

        Args:
            scores: of the clients' own models, as they were last evaluated.
            evaluated: whether that was in this round.
        """
        measured = self.known(index, values)
        numbers = [Numbers("weight", weights.cpu()), Numbers("update_norm", [*norms.values()], clients=[*norms])]
        numbers += [Numbers(name, score.cpu()) for name, score in scores.items()]
        own = rows_of(index, numbers, self._client_names)
        now = [row for row in own if evaluated or row.metric not in scores]
        new = changes(measured, self._before)
        self._before = measured
        return RoundResult(
            index,
            last_one,
            values,
            weights,
            losses,
            norms,
            scores if evaluated else {},
            table=measured + own,
            changes=new + now,
            events=events,
            shared=shared_numbers(self._metrics, values) | (spread(scores) if evaluated else {}),
        )

    def late(self, index: int, values: Mapping[str, Tensor]) -> RoundResult:
        """Make the rows of an earlier round from what is known by now; see :meth:`after`.

        Args:
            index: of the round.
            values: the metrics' values after it, by name; rounds are told in their order.
        """
        rows = self.known(index, values)
        new, self._late = changes(rows, self._late), rows
        nobody = torch.full((len(self._client_names),), torch.nan)
        shared = shared_numbers({name: self._metrics[name] for name in values}, values)
        return RoundResult(index, False, values, nobody, {}, {}, {}, table=rows, changes=new, shared=shared)


class Monitored(Sink):
    """What callbacks may monitor, in ``trainer.callback_metrics``: of each client every metric's value, the round's
    weight and the last known scores of its own model, by number (``cssv/client_0``); and what is nobody's alone. NaN is
    left out.

    Args:
        trainer: whose callbacks.
        metrics: their names.

    Attributes:
        names: of those values; all others in there are the module's, and callbacks'.
    """

    def __init__(self, trainer: L.Trainer, metrics: Iterable[str]) -> None:
        self._trainer, self._metrics = trainer, {*metrics, "weight", *OWN_SCORES}
        self.names: set[str] = set()

    def write(self, result: RoundResult) -> None:
        found = dict(result.shared)
        scores: dict[str, Tensor] = {}
        for row in result.table:
            if row.metric in OWN_SCORES:
                own = scores.setdefault(row.metric, torch.full((len(result.weights),), torch.nan))
                own[row.client] = row.value
            if row.metric in self._metrics and not row.column:
                found[f"{tag_of(row.metric)}/client_{row.client}"] = row.value
        now = {name: torch.tensor(value) for name, value in (found | spread(scores)).items() if value == value}
        for name in self.names - now.keys():
            self._trainer.callback_metrics.pop(name, None)
        self._trainer.callback_metrics.update(now)
        self.names = set(now)

    def write_late(self, result: RoundResult) -> None:
        found = {f"{row.metric}/client_{row.client}": torch.tensor(row.value) for row in result.table if not row.column}
        self._trainer.callback_metrics.update(found)


class Point(NamedTuple):
    """A client's number in a curve."""

    client: int
    tag: str
    value: float


def points_of(
    result: RoundResult, per_class: Iterable[str], clients: int, class_names: Sequence[str] | None
) -> Iterator[Point]:
    """What is new in a round, as points of curves.

    Args:
        result: of the round.
        per_class: metrics whose values per class are curves.
        clients: n.
        class_names: of the classes, or None.
    """
    curves = set(per_class)
    columns = {(row.metric, row.column) for row in result.changes if row.column and row.metric in curves}
    counts = Counter(metric for metric, _ in columns)
    for row in result.changes:
        if row.column:
            if 0 < counts[row.metric] * clients <= MOST_PER_CLASS:
                tag = f"{row.metric}/{class_part(int(row.column), class_names)}"
                yield Point(row.client, tag, row.value)
            continue
        for what, number in (("", row.value), ("/low", row.low), ("/high", row.high)):
            if number == number:
                yield Point(row.client, f"{tag_of(row.metric)}{what}", number)
    for client, loss in result.losses.items():
        if loss == loss:
            yield Point(client, "train_loss", loss)


def in_one_place(points: Iterable[Point], client_names: Sequence[str] | None) -> dict[str, float]:
    """Points by tags that name their clients: ``weight/client_1_Lyon``."""
    return {f"{point.tag}/{client_part(point.client, client_names)}": point.value for point in points}


def curves_of(metrics: Mapping[str, Metric], wanted: bool) -> list[str]:
    """Metrics whose values per class are curves."""
    return [name for name, metric in metrics.items() if wanted and columns_of(metric) is None]


def tag_of(metric: str) -> str:
    """A metric in a tag: the scores of clients' own models begin with ``client_``."""
    return f"client_{metric}" if metric in OWN_SCORES else metric


def own_title(name: str) -> str:
    """The head of its column.

    Example:
        >>> [own_title(name) for name in OWN_SCORES]
        ['own accuracy', 'own balanced accuracy', 'own AUROC']
    """
    return f"own {'AUROC' if name == 'auroc' else name.replace('_', ' ')}"


def class_part(column: int, names: Sequence[str] | None) -> str:
    """A class in a tag.

    Example:
        >>> class_part(3, None), class_part(0, ["T-shirt/top"]), class_part(1, ["0", "1"])
        ('class_3', 'class_0_T-shirt_top', 'class_1')
    """
    return _part("class", column, names)


def client_part(client: int, names: Sequence[str] | None) -> str:
    """A client in a tag, with its name; see :func:`class_part`."""
    return _part("client", client, names)


def _part(kind: str, number: int, names: Sequence[str] | None) -> str:
    name = "" if names is None else str(names[number])
    plain = re.sub(r"[^\w.-]+", "_", name)[:24].strip("_.")
    return f"{kind}_{number}" if plain in ("", str(number)) else f"{kind}_{number}_{plain}"
