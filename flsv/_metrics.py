"""The loop's metrics: each is handed what its ``update`` names, before or after aggregation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.errors import ConfigurationError
from flsv.metrics import ContributionMetric
from flsv.round import AFTER_AGGREGATION, AFTER_PERSONALIZATION, HEAD_FIELDS, VOCABULARY, Round

RESERVED = ("weight", "accuracy")
GAME_ARGUMENTS = {"utility", "gradient_products", "hessian_products"}
Field = str | Callable[[Round], Any]


class ContributionBoard:
    """Metrics by name, and their current values.

    Args:
        metrics: name to metric. The argument names of a metric's ``update`` are attributes of :class:`flsv.Round`, or
            the metric's ``round_fields`` says what they are: another attribute, or a function of the round.

    Attributes:
        contributions: name to the metric's value, ``[n]`` or ``[n, M]``; a metric not yet updated has no entry.

    Raises:
        ConfigurationError: an argument name that a round does not have; a name that the reports use.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = dict(metrics)
        self.contributions: dict[str, Tensor] = {}
        self._num_clients = 0
        self._fields = {name: _fields(name, metric) for name, metric in self.metrics.items()}

    @property
    def head_metrics(self) -> list[str]:
        """Names of the metrics that look at the classifier head."""
        return [name for name, fields in self._fields.items() if HEAD_FIELDS & set(fields.values())]

    @property
    def game_metrics(self) -> list[str]:
        """Names of the metrics that evaluate models on the server's validation set."""
        return [name for name, fields in self._fields.items() if GAME_ARGUMENTS & set(fields)]

    @property
    def client_value_metrics(self) -> list[str]:
        """Names of the metrics that ask what the clients find each other to be worth."""
        return [name for name, fields in self._fields.items() if "client_values" in fields.values()]

    def bind(
        self, num_clients: int, num_classes: int, class_names: Sequence[str] | None, class_counts: Tensor | None = None
    ) -> None:
        """Tell every metric the size of the federation; see :meth:`ContributionMetric.bind`."""
        self._num_clients = num_clients
        for metric in self.metrics.values():
            if isinstance(metric, ContributionMetric):
                metric.bind(num_clients, num_classes, class_names, class_counts)
            metric.persistent(True)

    def reset(self) -> None:
        self.contributions.clear()
        for metric in self.metrics.values():
            metric.reset()

    def to(self, device: torch.device) -> None:
        for metric in self.metrics.values():
            metric.to(device)
        self.contributions = {name: value.to(device) for name, value in self.contributions.items()}

    @torch.no_grad()
    def update(self, round: Round) -> None:
        """Update the metrics whose time it is: after personalisation those that ask for what crossed, after aggregation
        those that ask for the aggregate, before it the rest."""
        stage = 2 if round.exchange is not None else int(round.server_vector is not None)
        for name, metric in self.metrics.items():
            fields = self._fields[name]
            if stage != _stage(set(fields.values())):
                continue
            arguments = {a: field(round) if callable(field) else getattr(round, field) for a, field in fields.items()}
            metric.update(**arguments)
            value = metric.compute()
            if not isinstance(value, Tensor) or value.ndim not in (1, 2) or len(value) != self._num_clients:
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"metric {name!r}: compute() must give one row per client, [{self._num_clients}] or "
                    f"[{self._num_clients}, M]; it gave {shape}."
                )
            self.contributions[name] = value.detach()

    def state_dict(self) -> dict[str, Any]:
        return {
            "metrics": {name: metric.state_dict() for name, metric in self.metrics.items()},
            "contributions": dict(self.contributions),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["metrics"].keys() != self.metrics.keys():
            raise ConfigurationError(
                f"the checkpoint holds the metrics {sorted(state['metrics'])}, the loop has {sorted(self.metrics)}: "
                "resume with the metrics that the run was started with."
            )
        for name, metric in self.metrics.items():
            metric.load_state_dict(state["metrics"][name])
        self.contributions = dict(state["contributions"])


def _stage(fields: set[Any]) -> int:
    """When a metric that asks for these is updated: 0 before aggregation, 1 after it, 2 after personalisation."""
    return 2 if AFTER_PERSONALIZATION & fields else int(bool(AFTER_AGGREGATION & fields))


def _fields(name: str, metric: Metric) -> dict[str, Field]:
    if name in RESERVED:
        raise ConfigurationError(f"metric name {name!r} is taken by the reports (as are {RESERVED}); choose another.")
    translation: Mapping[str, Field] = getattr(metric, "round_fields", {})
    parameters = inspect.signature(type(metric).update).parameters.values()
    arguments = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][1:]
    fields = {argument: translation.get(argument, argument) for argument in arguments}
    unknown = [field for field in fields.values() if not callable(field) and field not in VOCABULARY]
    if unknown:
        raise ConfigurationError(
            f"metric {name!r} ({type(metric).__name__}): update() asks for {unknown}, which a round does not have. "
            f"It may ask for {sorted(VOCABULARY)}."
        )
    return fields
