"""A round's numbers: as rows of the run's table, and as curves by tag.

A tag begins with the metric, so that tools that group by the first part keep a metric together. Where all numbers go
into one place it ends with the client: ``cssv/client_3``, ``cssv/class_3_Dress/client_0``. Where every client has a
place of its own (a run in TensorBoard) the client is left out: ``cssv``, ``cssv/class_3_Dress``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor
from torchmetrics import Metric

from flsv.metrics import ContributionMetric
from flsv.models.imbalance import OWN_SCORES
from flsv.report.run_table import Numbers, RunTable


def overall(metric: Metric, value: Tensor) -> Tensor:
    """One number per client ``[n]``: the metric's own summary, or the mean over classes."""
    if isinstance(metric, ContributionMetric):
        return metric.per_client(value)
    return value.mean(-1) if value.ndim == 2 else value


def columns_of(metric: Metric) -> list[str] | None:
    """Names of the columns of a metric's values where they are no classes."""
    return metric.columns() if isinstance(metric, ContributionMetric) else None


def numbers_of(
    metrics: Mapping[str, Metric], contributions: Mapping[str, Tensor], class_names: Sequence[str] | None
) -> Iterator[Numbers]:
    """All that the metrics say of clients: overall values with their intervals, values per class (or whatever the
    columns are), and what diagnostics say of each client.

    Args:
        metrics: by name.
        contributions: name to ``[n]`` or ``[n, M]``.
        class_names: of the classes, or None.
    """
    for name, value in contributions.items():
        metric, whole = metrics[name], overall(metrics[name], value)
        if whole.ndim == 0:
            continue
        ends = metric.intervals(value=whole) if isinstance(metric, ContributionMetric) else None
        yield Numbers(name, _plain(whole), ends=None if ends is None else [_plain(end) for end in ends])
        own = columns_of(metric)
        # Of one class there is no more to say than over all.
        if value.ndim == 2 and (own or value.shape[1] > 1):
            keys = own or [str(j) for j in range(value.shape[1])]
            names = own or class_names or getattr(metric, "class_names", None) or keys
            yield Numbers(name, _plain(value), dict(zip(keys, map(str, names))))
    for name, value in _diagnostics(metrics):
        if value.ndim:
            yield Numbers(name, _plain(value))


def shared_numbers(metrics: Mapping[str, Metric], contributions: Mapping[str, Tensor]) -> dict[str, float]:
    """What the metrics say of no single client, by name."""
    wholes = ((name, overall(metrics[name], value)) for name, value in contributions.items())
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
            found |= {f"{client_score(name)}/{what}": value.item() for what, value in values.items()}
    return found


def client_score(name: str) -> str:
    """The tag of a score of clients' own models."""
    return f"client_{name}"


def own_title(name: str) -> str:
    """The head of its column.

    Example:
        >>> [own_title(name) for name in OWN_SCORES]
        ['own accuracy', 'own balanced accuracy', 'own AUROC']
    """
    return f"own {'AUROC' if name == 'auroc' else name.replace('_', ' ')}"


def _diagnostics(metrics: Mapping[str, Metric]) -> Iterable[tuple[str, Tensor]]:
    for name, metric in metrics.items():
        for what, value in metric.diagnostics().items() if isinstance(metric, ContributionMetric) else ():
            yield f"{name}/{what}", value


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().double()


#: Curves of one metric per class and client, above which none are written: pictures and the CSV have the values.
MOST_PER_CLASS = 500


class RoundScalars:
    """Collects them.

    Args:
        client_names: of the clients, or None.
        class_names: of the classes, or None.

    Attributes:
        shared: of no client: tag to number.
        clients: client to tag to number.
        classes: class to tag to number, the same numbers once more, by the other side.

    Example:
        >>> scalars = RoundScalars(["Boston", "Lyon"], ["Shirt", "Dress"])
        >>> scalars.add("weight", 1, 0.5)
        >>> scalars.add_class("cssv", 1, 0, 0.25)
        >>> scalars.flat()
        {'weight/client_1': 0.5, 'cssv/class_1_Dress/client_0': 0.25}
        >>> scalars.named()
        {'weight/client_1_Lyon': 0.5, 'cssv/class_1_Dress/client_0_Boston': 0.25}
        >>> scalars.clients[0], scalars.classes[1]
        ({'cssv/class_1_Dress': 0.25}, {'cssv/client_0_Boston': 0.25})
    """

    def __init__(self, client_names: Sequence[str] | None, class_names: Sequence[str] | None) -> None:
        self._client_names, self._class_names = client_names, class_names
        self._flat: dict[str, float] = {}
        self._named: dict[str, float] = {}
        self.shared: dict[str, float] = {}
        self.clients: dict[int, dict[str, float]] = defaultdict(dict)
        self.classes: dict[int, dict[str, float]] = defaultdict(dict)

    def share(self, tag: str, value: float) -> None:
        """A number of no client."""
        self.shared[tag] = self._flat[tag] = self._named[tag] = value

    def add(self, tag: str, client: int, value: float) -> None:
        """A client's number."""
        self.clients[client][tag] = self._flat[client_tag(tag, client)] = value
        self._named[f"{tag}/{client_part(client, self._client_names)}"] = value

    def add_class(self, metric: str, column: int, client: int, value: float) -> None:
        """A client's number for a class."""
        tag = f"{metric}/{class_part(column, self._class_names)}"
        self.add(tag, client, value)
        self.classes[column][f"{metric}/{client_part(client, self._client_names)}"] = value

    def flat(self) -> dict[str, float]:
        """All of them in one place."""
        return dict(self._flat)

    def named(self) -> dict[str, float]:
        """The same, with the clients' names in their tags: ``weight/client_1_Lyon``."""
        return dict(self._named)


def scalars_of(
    table: RunTable,
    curves: Iterable[str],
    shared: Mapping[str, float],
    client_names: Sequence[str],
    class_names: Sequence[str] | None,
) -> RoundScalars:
    """A round's rows as curves.

    Args:
        table: what is new in the round.
        curves: metrics whose values per class are curves.
        shared: numbers of no client.
        client_names: of the clients.
        class_names: of the classes, or None.
    """
    found = RoundScalars(client_names, class_names)
    for tag, number in shared.items():
        found.share(tag, number)
    for _, metric, client, column, value, _, _, low, high in table.rows():
        if not column:
            found.add(client_score(metric) if metric in OWN_SCORES else metric, client, value)
            if low == low:
                found.add(f"{metric}/low", client, low)
                found.add(f"{metric}/high", client, high)
    for metric in curves:
        keys = table.columns(metric)
        for key in keys if len(keys) * len(client_names) <= MOST_PER_CLASS else ():
            part = table.part(metric, key).cells
            for client, value in zip(part["client"].tolist(), part["value"].tolist()):
                found.add_class(metric, int(key), client, value)
    return found


def client_tag(tag: str, client: int) -> str:
    """The tag of a client's number where all clients' are in one place."""
    return f"{tag}/client_{client}"


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
