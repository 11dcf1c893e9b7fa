"""ContributionMetrics: the loop's metrics, each updated with the attributes of a round that its ``update`` names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.core import HEAD_FIELDS, VOCABULARY, Round, Stage, stage_of
from flsv.metrics import ContributionMetric
from flsv.results.curves import tag_of
from flsv.scores.class_scores import OWN_SCORES
from flsv.utilities.arguments import attribute_of, plain_name
from flsv.utilities.errors import ConfigurationError

RESERVED = (
    *("weight", *OWN_SCORES, "update_norm", "train_loss", *map(tag_of, OWN_SCORES)),
    *("data", "how to read"),
)
GAME_ARGUMENTS = {"utility", "gradient_products", "validation"}
#: Fields of a round that exist before any client has uploaded its update, or do not depend on the uploads.
APART_FROM_UPDATES = {
    "round_index", "client_ids", "senders", "reached", "num_samples", "global_vector", "losses", "num_steps", "clients",
    "all_clients", "server_data", "generator", "inclusion_probabilities", "uploaded", "downloaded", "uploaded_bytes",
    "downloaded_bytes",
}  # fmt: skip
#: Fields of a round that do not depend on the models from which the clients started.
APART_FROM_STARTS = APART_FROM_UPDATES | {
    "client_vectors", "client_head_weights", "server_head_weights", "server_vector", "server_update",
    "aggregation_weights", "peer_values", "coalitions",
}  # fmt: skip
Field = str | Callable[[Round], Any]


class ContributionMetrics:
    """The loop's metrics by name, and their current values.

    Args:
        metrics: ``{name: metric}``. Each argument of a metric's ``update`` gets the attribute of :class:`flsv.Round`
            that has its name, unless the metric's ``round_fields`` maps the argument to another attribute, to a
            function of the round, or to None (the argument is then not passed).
        reported: names of the values that clients report to strategies. Arguments of ``update`` may have these names,
            too.
        num_clients: n, the number of clients, if the metrics are bound already. :meth:`bind` sets it, too.

    Attributes:
        contributions: ``{name: value}``, each metric's current value, ``[n]`` or ``[n, M]`` for M classes. A metric
            that has not been updated yet has no entry.

    Raises:
        ConfigurationError: a metric's ``update`` has an argument that a round cannot give. Or a metric has a name that
            the run's table or report uses for something else.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], reported: Iterable[str] = (), num_clients: int = 0
    ) -> None:
        self.metrics = dict(metrics)
        self.contributions: dict[str, Tensor] = {}
        self._num_clients = num_clients
        self._reported = set(reported)
        _ = self.fields  # raises now if a metric asks for an unknown field

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name != "fields"
        }  # holds functions: not picklable

    @cached_property
    def fields(self) -> dict[str, dict[str, Field]]:
        """Return the round's field for each argument of each metric's ``update``, ``{metric: {argument: field}}``. A
        field is the name of an attribute of the round, or a function of the round."""
        return {
            name: _fields(name, metric, self._reported) for name, metric in self.metrics.items()
        }

    @property
    def head_metrics(self) -> list[str]:
        """Return the names of the metrics that read the classifier head."""
        return [name for name, fields in self.fields.items() if HEAD_FIELDS & set(fields.values())]

    @property
    def class_metrics(self) -> list[str]:
        """Return the names of the metrics that need training samples with classes."""
        return [
            name
            for name, m in self.metrics.items()
            if attribute_of(m, "needs_classes", name in self.head_metrics)
        ]

    @property
    def game_metrics(self) -> list[str]:
        """Return the names of the metrics that evaluate models on the server's validation set."""
        return [name for name, fields in self.fields.items() if GAME_ARGUMENTS & set(fields)]

    @property
    def performances(self) -> dict[str, Any]:
        """Return the performance measure of each metric that evaluates models, ``{name: performance}``. See
        :mod:`flsv.games.performance`. It is accuracy for a metric that declares none."""
        return {
            name: attribute_of(self.metrics[name], "measured_by", "accuracy")
            for name in self.game_metrics
        }

    @property
    def update_metrics(self) -> list[str]:
        """Return the names of the metrics whose values depend on the updates that clients upload."""
        return self._metrics_that_read_more_than(APART_FROM_UPDATES)

    @property
    def start_metrics(self) -> list[str]:
        """Return the names of the metrics that may read the models from which the clients started."""
        return self._metrics_that_read_more_than(APART_FROM_STARTS)

    def _metrics_that_read_more_than(self, apart: Collection[str]) -> list[str]:
        metrics = []
        for name, fields in self.fields.items():
            # A function of the round is known by its argument's name only.
            fields_read = {a if callable(field) else field for a, field in fields.items()}
            if fields_read.difference(apart, self._reported):
                metrics.append(name)
        return metrics

    @property
    def peer_metrics(self) -> list[str]:
        """Return the names of the metrics that read the values that clients assign to each other's models."""
        return [name for name, fields in self.fields.items() if "peer_values" in fields.values()]

    @property
    def evaluating(self) -> dict[str, ContributionMetric]:
        """Return ``{name: metric}``, the metrics for which clients evaluate models on their own validation samples."""
        return {
            n: m
            for n, m in self.metrics.items()
            if isinstance(m, ContributionMetric) and m.evaluates
        }

    def with_priors(self) -> dict[str, Tensor]:
        """Return the metrics' current values for strategies, ``{name: value}``. A metric's ``prior`` replaces NaN, the
        value of clients that never took part."""
        known = dict(self.contributions)
        for name, value in known.items():
            prior = attribute_of(self.metrics.get(name), "prior")
            if prior is not None:
                known[name] = torch.where(value.isnan(), prior, value)
        return known

    def bind(
        self,
        num_clients: int,
        num_classes: int,
        class_names: Sequence[str] | None,
        class_counts: Tensor | None = None,
        client_names: Sequence[str] | None = None,
    ) -> None:
        """Tell every metric the federation's size and the names of its classes and clients. See
        :meth:`ContributionMetric.bind`."""
        self._num_clients = num_clients
        for metric in self.metrics.values():
            if isinstance(metric, ContributionMetric):
                metric.bind(num_clients, num_classes, class_names, class_counts, client_names)
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
    def update(self, round: Round, stage: Stage) -> None:
        """Update the metrics whose last input is known after ``stage`` of the round. Their values are stored.

        Raises:
            ValueError: a metric's value is not ``[n]`` or ``[n, M]`` for n clients.
        """
        for name, metric in self.metrics.items():
            fields = self.fields[name]
            if stage != stage_of(fields.values()):
                continue
            arguments = {
                a: field(round) if callable(field) else round.get(field)
                for a, field in fields.items()
            }
            metric.update(**arguments)
            value = metric.compute()
            if (
                not isinstance(value, Tensor)
                or value.ndim not in (1, 2)
                or len(value) != self._num_clients
            ):
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"metric {name!r}: compute() must give one row per client, [{self._num_clients}] or "
                    f"[{self._num_clients}, M]; it gave {shape}."
                )
            self.contributions[name] = value.detach()

    @torch.no_grad()
    def end_run(self) -> dict[str, Tensor]:
        """Let the metrics compute the values that they have put off until the run's end. Return these."""
        values: dict[str, Tensor] = {}
        for name, metric in self.metrics.items():
            if isinstance(metric, ContributionMetric) and metric.end_run():
                values[name] = metric.compute().detach()
        self.contributions |= values
        return values

    def of_earlier_rounds(self) -> list[str]:
        """Return the names of the metrics whose values are of an earlier round than the last."""
        names = []
        for name, metric in self.metrics.items():
            is_pending = attribute_of(metric, "pending") is not None
            if attribute_of(metric, "put_off") is not None and not is_pending:
                names.append(name)
        return names

    def state_dict(self) -> dict[str, Any]:
        return {
            "metrics": {name: metric.state_dict() for name, metric in self.metrics.items()},
            "contributions": dict(self.contributions),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, metric in self.metrics.items():
            metric.load_state_dict(state["metrics"][name])
        self.contributions = dict(state["contributions"])


def _fields(name: str, metric: Metric, reported: set[str]) -> dict[str, Field]:
    if name in RESERVED:
        raise ConfigurationError(
            f"metric name {name!r} is taken by the reports (as are {RESERVED}); choose another."
        )
    plain_name(name, "metric")
    translation: Mapping[str, Field | None] = attribute_of(metric, "round_fields", {})
    parameters = inspect.signature(type(metric).update).parameters.values()
    arguments = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][1:]
    found = {argument: translation.get(argument, argument) for argument in arguments}
    fields = {argument: field for argument, field in found.items() if field is not None}
    unknown = [
        field
        for field in fields.values()
        if not callable(field) and field not in VOCABULARY | reported
    ]
    if unknown:
        by = getattr(metric, "reported_by", None)
        hint = "" if by is None else f" Clients report it with {by}."
        raise ConfigurationError(
            f"metric {name!r} ({type(metric).__name__}): update() asks for {unknown}, which a round does not have. "
            f"It may ask for {sorted(VOCABULARY | reported)}.{hint}"
        )
    return fields
