"""A round's metric values as rows of the run's table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor
from torchmetrics import Metric

from flsv.functional.allocation import collaborative_fairness
from flsv.metrics import ContributionMetric
from flsv.report.run_table import Numbers, RunTable


def overall(metric: Metric, value: Tensor) -> Tensor:
    """One number per client ``[n]``: the metric's own summary, or the mean over classes."""
    summary = getattr(metric, "per_client", None)
    if summary is not None:
        return summary(value)
    return value.mean(-1) if value.ndim == 2 else value


def columns_of(metric: Metric) -> list[str] | None:
    """Names of the columns of a metric's values where they are no classes."""
    return metric.columns() if isinstance(metric, ContributionMetric) else None


def judged(metrics: Mapping[str, Metric]) -> list[str]:
    """The metrics of which more is better for each client."""
    return [
        name
        for name, metric in metrics.items()
        if isinstance(metric, ContributionMetric) and metric.higher_is_better and metric.columns() is None
    ]


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


def spread(accuracy: Tensor) -> dict[str, float]:
    """Of the clients' accuracies ``[n]``. Their standard deviation is how unevenly they are served: Li, Sanjabi,
    Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, definition 1."""
    known = accuracy[~accuracy.isnan()].double()
    if not len(known):
        return {}
    # NaN where somebody has no accuracy: it is a mean of all.
    values = {"mean": accuracy.mean(), "min": known.min(), "std": known.std(correction=0)}
    return {f"client_accuracy/{what}": value.item() for what, value in values.items()}


def fairness(metrics: Mapping[str, Metric], table: RunTable, accuracy: Tensor) -> dict[str, float]:
    """Per metric, whether those who contribute more end up with the better models: Pearson's correlation of the
    clients' contributions and the accuracies ``[n]`` of their own models, after Xu et al., "Gradient Driven Rewards to
    Guarantee Fairness in Collaborative Machine Learning", NeurIPS 2021, section 5; there what a client contributes is
    its accuracy alone. Left out where it has no answer, as where all have one model and one test set."""
    own = accuracy.cpu().double()
    known = [name for name in judged(metrics) if name in table.metrics]
    found = {
        f"{name}/fairness": collaborative_fairness(own.new_tensor(table.last(name, len(own))), own) for name in known
    }
    return {name: float(value) for name, value in found.items() if value == value}


def _diagnostics(metrics: Mapping[str, Metric]) -> Iterable[tuple[str, Tensor]]:
    for name, metric in metrics.items():
        for what, value in metric.diagnostics().items() if isinstance(metric, ContributionMetric) else ():
            yield f"{name}/{what}", value


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().double()
