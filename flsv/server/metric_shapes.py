"""Checks before the first round that metrics have the shapes that strategies read."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torchmetrics import Metric

from flsv.errors import ConfigurationError
from flsv.strategy import Strategy


def check_metric_shapes(
    strategies: Mapping[str, Strategy], metrics: Mapping[str, Metric], num_clients: int, num_classes: int
) -> None:
    """Compare what strategies need with what the metrics give.

    Args:
        strategies: by role.
        metrics: by name, bound to the federation; those that the strategies read are among them.
        num_clients: n.
        num_classes: M.

    Raises:
        ConfigurationError: which strategy reads which metric, the shape that it needs and the one that it would get.
    """
    sizes = {"n": num_clients, "M": num_classes}
    for role, strategy in strategies.items():
        if strategy.metric is None or strategy.metric_shape is None:
            continue
        metric = metrics[strategy.metric]
        given = _shape(metric)
        # A metric of the user's own may not know its size before the first update.
        if given is None or given[:1] != (num_clients,):
            continue
        needed = tuple(sizes[letter] for letter in strategy.metric_shape)
        if given != needed:
            letters = ", ".join(strategy.metric_shape)
            raise ConfigurationError(
                f"{role} {strategy!r} needs a metric [{letters}] = {list(needed)}, and {strategy.metric!r} "
                f"({type(metric).__name__}) gives {list(given)}. Name a metric with {_MEANING[strategy.metric_shape]}."
            )


_MEANING = {
    ("n",): "one value per client",
    ("n", "M"): "one value per client and class, such as flsv.metrics.ClassSpecificShapley",
    ("n", "n"): "one value per pair of clients, such as flsv.metrics.DomainRelevance",
}


def _shape(metric: Metric) -> tuple[int, ...] | None:
    """The shape of a metric's value before any update; None where it cannot say."""
    try:
        # The class's own function: the instance's warns, and remembers what it gave.
        value = type(metric).compute(metric)
    except Exception:
        return None
    return tuple(value.shape) if isinstance(value, Tensor) else None
