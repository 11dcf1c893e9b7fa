"""What the Custom Scalars tab of TensorBoard shows: all clients of a metric, of each class, all classes of a client."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MarginChartContent,
    MultilineChartContent,
)
from torch.utils.tensorboard.summary import custom_scalars

from flsv.drawing import client_labels
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
