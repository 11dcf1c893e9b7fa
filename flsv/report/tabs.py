"""What TensorBoard's tabs are told beside curves: pictures, Custom Scalars, HParams and Text."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MarginChartContent,
    MultilineChartContent,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor
from torch.utils.tensorboard.summary import custom_scalars, hparams
from torchmetrics import Metric

from flsv.charts import client_labels, label_text
from flsv.metrics import ContributionMetric
from flsv.metrics.needs import what_it_is
from flsv.report.blocks import markdown_table, plain
from flsv.report.measured import MOST_PER_CLASS, class_part, client_part

#: Pictures of a metric in a run, unless something else is asked for; TensorBoard keeps as many.
PICTURES = 10


def due(round_index: int, rounds: int | None, every: int | None) -> bool:
    """Whether figures are drawn after this round.

    Args:
        round_index: from 0.
        rounds: of the run; None or -1: nobody knows.
        every: rounds between two pictures; 0: none; None: ten in the run.

    Example:
        >>> [index for index in range(25) if due(index, 25, None)]
        [2, 5, 8, 11, 14, 17, 20, 23, 24]
    """
    known = rounds is not None and rounds > 0
    if every is None:
        every = -(-rounds // PICTURES) if known else PICTURES  # type: ignore[operator]
    return bool(every) and ((known and round_index + 1 == rounds) or (round_index + 1) % every == 0)


class FixedScale:
    """The limits of a metric's pictures: 1, 2 or 5 times a power of ten, and never beyond the metric's own bounds.

    Nobody knows the largest value of a run in advance. So the limits hold all values seen so far, in the pictures or
    between them, and are widened only when a value lies beyond.

    Args:
        lower: the least value that there can be; None: there is none.
        upper: the largest.

    Example:
        >>> scale = FixedScale(None, 1.0)
        >>> scale.include(Tensor([0.013, float("nan")]))
        >>> scale.limits
        (0.0, 0.02)
        >>> scale.include(Tensor([-0.03, 0.7]))
        >>> scale.limits
        (-0.05, 1.0)
    """

    def __init__(self, lower: float | None = None, upper: float | None = None) -> None:
        self._lower, self._upper = lower, upper
        self._least = self._most = 0.0

    def include(self, values: Any) -> None:
        """These, an array or a tensor, have to fit in; NaN and infinity do not count."""
        values = np.asarray(values)
        finite = values[np.isfinite(values)]
        if len(finite):
            self._least = min(self._least, float(finite.min()))
            self._most = max(self._most, float(finite.max()))

    @property
    def limits(self) -> tuple[float, float]:
        """Lower and upper; 0 is within."""
        low, high = -round_up(-self._least), round_up(self._most)
        low = low if self._lower is None else max(low, min(self._lower, 0.0))
        high = high if self._upper is None else min(high, max(self._upper, 0.0))
        return (low + 0.0, high) if high > low else (0.0, 1.0)


def round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten; 0 stays.

    Example:
        >>> round_up(0.013), round_up(0.5), round_up(730)
        (0.02, 0.5, 1000.0)
    """
    if value <= 0:
        return 0.0
    exponent = math.floor(math.log10(value))
    steps = (float(f"{step}e{power}") for power in (exponent, exponent + 1) for step in (1, 2, 5))
    return next(step for step in steps if step >= value)


def draw_metric(metric: Metric, name: str, value: Tensor, round_index: int, **style: Any) -> tuple[Any, Any]:
    """The metric's own picture, in whatever style its ``plot`` takes.

    Args:
        metric: draws itself.
        name: its name in the run.
        value: what it gave.
        round_index: in the title.
        style: keywords of :meth:`flsv.metrics.ContributionMetric.plot`; what a ``plot`` does not take is left out.
    """
    known: Mapping[str, Any] = inspect.signature(metric.plot).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        style = {key: value for key, value in style.items() if key in known}
    figure, axis = metric.plot(value, **style)
    axis.set_title(f"{label_text(name)}, round {round_index}")
    return figure, axis


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
    group: str = "",
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
        group: what stands before the metrics' own tags where every client has a run.

    Example:
        >>> charts = layout({"cssv": True}, 2, 2, ["Boston", "1"], ["Shirt", "Dress"], by_client=True)
        >>> for category in charts.category:
        ...     print(category.title, [(chart.title, list(chart.multiline.tag)) for chart in category.chart])
        all clients [('cssv', ['^cssv$'])]
        cssv by class [('Shirt', ['^cssv/class_0_Shirt$']), ('Dress', ['^cssv/class_1_Dress$'])]
        cssv by client [('Boston', ['^cssv/client_0_Boston$']), ('client 1', ['^cssv/client_1$'])]
    """
    end = "$" if by_client else r"/client_\d+$"
    group = group if by_client else ""
    some = intervals if by_client or num_clients <= MOST_CLIENTS else ()
    found = _of_all(metrics, more, end, group, [_margins(name, num_clients, by_client, group) for name in some])
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
        parts = [
            re.escape(f"{name}/{client_part(i, client_names)}") + "$"
            if by_client
            else re.escape(name) + rf"/class_[^/]+/client_{i}$"
            for i in range(num_clients)
        ]
        charts = [_chart(label, tag) for label, tag in zip(client_labels(num_clients, client_names), parts)]
        found.append(Category(title=f"{name} by client", chart=charts))
    return Layout(category=found)


def _of_all(
    metrics: Iterable[str], more: Iterable[str], end: str, group: str, margins: Sequence[Chart]
) -> list[Category]:
    """A chart per number that every client has; where there are intervals, one with margins, too."""
    tags = {**{name: f"{group}{name}" for name in metrics}, **{name: name for name in more}}
    found = [Category(title="all clients", chart=[_chart(name, re.escape(tag) + end) for name, tag in tags.items()])]
    return [*found, *([Category(title="all clients with intervals", chart=margins)] if margins else [])]


def layout_summary(charts: Layout) -> Summary:
    """As an event holds it."""
    summary = custom_scalars({})
    summary.value[0].tensor.string_val[0] = charts.SerializeToString()
    return summary


def _margins(name: str, num_clients: int, by_client: bool, group: str) -> Chart:
    """A metric's curves between their low and high ends."""
    ends = [""] if by_client else [f"/client_{i}" for i in range(num_clients)]
    series = [
        MarginChartContent.Series(value=f"{group}{name}{end}", lower=f"{name}/low{end}", upper=f"{name}/high{end}")
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


def text_table(columns: Mapping[str, Sequence[object]]) -> str:
    """Columns as a table in Markdown; whatever they hold is shown as it is.

    Example:
        >>> print(text_table({"client": ["a|b"], "weight": [0.5]}))
        | client | weight |
        | --- | --- |
        | a\\|b | 0.5 |
    """
    head, *rows = [[plain(str(cell)) for cell in row] for row in (columns, *zip(*columns.values()))]
    return markdown_table(head, rows)


def guide_text(name: str, metric: Metric) -> str:
    """How to read a metric."""
    rows = {"what it is": what_it_is(metric)}
    rows |= metric.guide().lines() if isinstance(metric, ContributionMetric) else {}
    rows["settings"] = repr(metric)
    rows["bold lines"] = "TensorBoard smooths them, by 0.6 at first; for the values set Smoothing to 0."
    return text_table({name: list(rows), " ": list(rows.values())})
