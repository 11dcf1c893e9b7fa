"""What TensorBoard's tabs are told beside curves and pictures: Custom Scalars, HParams and Text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MarginChartContent,
    MultilineChartContent,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard.summary import custom_scalars, hparams
from torchmetrics import Metric

from flsv.csv_files import NAN
from flsv.drawing import client_labels
from flsv.metrics import ContributionMetric
from flsv.metrics.guide import what_it_is
from flsv.report.run_table import RunTable
from flsv.report.tensorboard.scalars import MOST_PER_CLASS, class_part, client_part

#: Charts of one metric's clients, beyond which nobody looks through them.
MOST_CLIENTS = 30


def layout(
    metrics: Mapping[str, bool],
    num_clients: int,
    num_classes: int,
    client_names: Sequence[str] | None,
    class_names: Sequence[str] | None,
    by_client: bool,
    more: Sequence[str] = (),
    intervals: Sequence[str] = (),
) -> Layout:
    """The charts of a run.

    Args:
        metrics: name to whether its values per class are curves.
        num_clients: n.
        num_classes: M.
        client_names: of the clients, or None.
        class_names: of the classes, or None.
        by_client: whether every client and class has a run, with tags of its own.
        more: other numbers that every client has, such as ``"weight"``.
        intervals: those of the metrics that have them: the curves have margins there.

    Example:
        >>> charts = layout({"cssv": True}, 2, 2, ["Boston", "1"], ["Shirt", "Dress"], by_client=True)
        >>> for category in charts.category:
        ...     print(category.title, [(chart.title, list(chart.multiline.tag)) for chart in category.chart])
        all clients [('cssv', ['^cssv$'])]
        cssv by class [('Shirt', ['^cssv/class_0_Shirt$']), ('Dress', ['^cssv/class_1_Dress$'])]
        cssv by client [('Boston', ['^cssv/client_0_Boston$']), ('client 1', ['^cssv/client_1$'])]
    """
    end = "$" if by_client else r"/client_\d+$"
    found = [Category(title="all clients", chart=[_chart(tag, re.escape(tag) + end) for tag in (*metrics, *more)])]
    margins = [_margins(name, num_clients, by_client) for name in intervals if by_client or num_clients <= MOST_CLIENTS]
    if margins:
        found.append(Category(title="all clients with intervals", chart=margins))
    for name, per_class in metrics.items():
        if not per_class or num_classes > MOST_PER_CLASS or num_clients * num_classes > MOST_PER_CLASS:
            continue
        classes = [class_part(j, class_names) for j in range(num_classes)]
        titles = [str(class_names[j]) if class_names else str(j) for j in range(num_classes)]
        titles = [f"class {title}" if title.isdigit() else title for title in titles]
        charts = [_chart(title, re.escape(f"{name}/{part}") + end) for title, part in zip(titles, classes)]
        found.append(Category(title=f"{name} by class", chart=charts))
        if num_clients > MOST_CLIENTS:
            continue
        tags = [
            re.escape(f"{name}/{client_part(i, client_names)}") + "$"
            if by_client
            else re.escape(name) + rf"/class_[^/]+/client_{i}$"
            for i in range(num_clients)
        ]
        charts = [_chart(label, tag) for label, tag in zip(client_labels(num_clients, client_names), tags)]
        found.append(Category(title=f"{name} by client", chart=charts))
    return Layout(category=found)


def layout_summary(charts: Layout) -> Summary:
    """As an event holds it."""
    summary = custom_scalars({})
    summary.value[0].tensor.string_val[0] = charts.SerializeToString()
    return summary


def _margins(name: str, num_clients: int, by_client: bool) -> Chart:
    """A metric's curves between their low and high ends."""
    ends = [""] if by_client else [f"/client_{i}" for i in range(num_clients)]
    series = [
        MarginChartContent.Series(value=f"{name}{end}", lower=f"{name}/low{end}", upper=f"{name}/high{end}")
        for end in ends
    ]
    return Chart(title=name, margin=MarginChartContent(series=series))


def _chart(title: str, tag: str) -> Chart:
    return Chart(title=title, multiline=MultilineChartContent(tag=[f"^{tag}"]))


def hyperparameters(chosen: Mapping[str, str | int | float], results: Iterable[str], name: str) -> list[Summary]:
    """What TensorBoard has to be told of a run.

    Args:
        chosen: column to value.
        results: tags of scalars of the same run. TensorBoard shows the last value of each.
        name: of the run in the table.

    Example:
        >>> experiment, start, end = hyperparameters({"algorithm": "FedAvg", "clients": 5}, ["val_acc"], "FedAvg 0")
        >>> told = HParamsPluginData.FromString(experiment.value[0].metadata.plugin_data.content).experiment
        >>> sorted(info.name for info in told.hparam_infos), [info.name.tag for info in told.metric_infos]
        (['algorithm', 'clients'], ['val_acc'])
    """
    experiment, start, end = hparams(dict(chosen), dict.fromkeys(results, 0.0))
    content = start.value[0].metadata.plugin_data
    told = HParamsPluginData.FromString(content.content)
    told.session_start_info.group_name = name
    content.content = told.SerializeToString()
    return [experiment, start, end]


def accuracies(logged: Iterable[str]) -> list[str]:
    """Those of the logged names that say how good a model is.

    Example:
        >>> accuracies(["val_loss", "val_acc", "lr", "val_f1"])
        ['val_acc', 'val_f1']
        >>> accuracies(["train_loss", "val_loss"])
        ['val_loss']
    """
    names = [name for name in logged if not name.startswith("train")]
    good = [name for name in names if any(word in name.lower() for word in ("acc", "f1", "auroc", "auc", "r2"))]
    return good or [name for name in names if "loss" in name.lower() or "error" in name.lower()]


def markdown_table(columns: Mapping[str, Sequence[object]]) -> str:
    """Columns as a table; whatever they hold is shown as it is.

    Example:
        >>> print(markdown_table({"client": ["a|b"], "weight": [0.5]}))
        | client | weight |
        |---|---|
        | a\\|b | 0.5 |
    """
    lines = ["| " + " | ".join(map(_plain, columns)) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(map(_plain, row)) + " |" for row in zip(*columns.values())]
    return "\n".join(lines)


def settings_text(settings: Mapping[str, Any]) -> str:
    """The run's settings, by name."""
    return markdown_table({"setting": list(settings), "value": list(settings.values())})


def guide_text(name: str, metric: Metric) -> str:
    """How to read a metric."""
    rows = {"what it is": what_it_is(metric)}
    rows |= metric.guide().lines() if isinstance(metric, ContributionMetric) else {}
    rows["settings"] = repr(metric)
    return markdown_table({name: list(rows), " ": list(rows.values())})


def results_text(table: RunTable, metrics: Iterable[str], labels: Sequence[str]) -> str:
    """A row per client.

    Args:
        table: of the last round: the metrics' rows, and ``samples``, ``rounds``, ``weight`` and ``accuracy``.
        metrics: names of those that are columns.
        labels: what the clients are called, n of them.
    """
    columns: dict[str, Sequence[object]] = {"client": labels}
    for name in ("samples", "rounds"):
        columns[name] = [f"{count:.0f}" for count in table.last(name, len(labels))]
    for name in metrics:
        ends = (table.last(name, len(labels), what=what) for what in ("value", "low", "high"))
        columns[name] = [*map(cell, *ends, table.last(f"{name}/stderr", len(labels)))]
    for name, title in (("weight", "weight"), ("accuracy", "own accuracy")):
        if name in table.metrics:
            columns[title] = [*map(cell, table.last(name, len(labels)))]
    return markdown_table(columns)


def cell(value: float, low: float = NAN, high: float = NAN, error: float = NAN) -> str:
    """A value with its interval, or with its standard error; NaN is unknown.

    Example:
        >>> cell(0.5), cell(0.5, 0.25, 0.75), cell(0.5, error=0.0625), cell(NAN)
        ('0.5', '0.5 [0.25, 0.75]', '0.5 ± 0.062', '')
    """
    if value != value:
        return ""
    if low == low:
        return f"{value:.4g} [{low:.4g}, {high:.4g}]"
    return f"{value:.4g}" + (f" ± {error:.2g}" if error == error else "")


def _plain(value: object) -> str:
    text = " ".join(str(value).split())
    for mark in "\\|*_`<[":
        text = text.replace(mark, "\\" + mark if mark != "<" else "&lt;")
    return text
