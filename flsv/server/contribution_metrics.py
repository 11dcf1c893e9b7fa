"""ContributionMetrics: the loop's metrics, each updated with the attributes of a round that its ``update`` names."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from flsv.core import VOCABULARY, Round, Stage, Values, stage_of
from flsv.core.needs import Field, check_declared, fields_of, read_by, reads_of, requirements_of
from flsv.core.vocabulary import ARGUMENTS
from flsv.metrics import ContributionMetric
from flsv.metrics.base import NAMES_IN_USE
from flsv.scores.performance import ACCURACY, Measure, measure_of
from flsv.utilities.arguments import attribute_of, plain_name
from flsv.utilities.errors import ConfigurationError


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
        values: ``{name: values}``, each metric's current :class:`flsv.core.Values`. A metric is missing before its
            first update. All values of a metric that has failed after its first round are NaN, with the reason.

    Raises:
        ConfigurationError: a metric's ``update`` has an argument that is not an attribute of a round, or a metric has a
            name that the run's table or report uses for something else.
    """

    def __init__(
        self, metrics: Mapping[str, Metric], reported: Iterable[str] = (), num_clients: int = 0
    ) -> None:
        self.metrics = dict(metrics)
        self.values: dict[str, Values] = {}
        # The values of the metrics that have failed, before they failed.
        self._last_values: dict[str, Tensor] = {}
        self._num_clients = num_clients
        self._reported_names = set(reported)
        _ = self.fields  # raises an error if a metric reads an unknown field

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        state.pop("fields", None)  # holds functions, which cannot be pickled
        return state

    @cached_property
    def fields(self) -> dict[str, dict[str, Field]]:
        """Return the round's field for each argument of each metric's ``update``, ``{metric: {argument: field}}``. A
        field is the name of an attribute of the round, or a function of the round."""
        return {
            name: _checked_fields(name, metric, self._reported_names)
            for name, metric in self.metrics.items()
        }

    @cached_property
    def reads(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the attributes of a round that each metric reads, ``{metric: names}``."""
        return {name: reads_of(metric) for name, metric in self.metrics.items()}

    @cached_property
    def priors(self) -> dict[str, float | None]:
        """Return the numbers that replace NaN in metrics' values for strategies, ``{metric: number}``."""
        return {name: attribute_of(metric, "prior") for name, metric in self.metrics.items()}

    @property
    def head_metrics(self) -> list[str]:
        """Return the names of the metrics that read the classifier head."""
        return [name for name, metric in self.metrics.items() if "head" in requirements_of(metric)]

    @property
    def class_metrics(self) -> list[str]:
        """Return the names of the metrics that need training samples with classes."""
        names = []
        for name, metric in self.metrics.items():
            reads_head = name in self.head_metrics
            # A metric without a declaration needs classes if it reads the head.
            needs_classes = attribute_of(metric, "needs_classes", reads_head)
            if needs_classes:
                names.append(name)
        return names

    @property
    def game_metrics(self) -> list[str]:
        """Return the names of the metrics that evaluate models on the server's validation set."""
        return self._names_of_readers("needs_utilities")

    @property
    def performances(self) -> dict[str, Measure]:
        """Return the performance measure of each metric that evaluates models, ``{name: measure}``. The default is
        accuracy."""
        return {name: measure_of(self.metrics[name]) or ACCURACY for name in self.game_metrics}

    @cached_property
    def trained_names(self) -> list[str]:
        """Return the names of the metrics whose values need trained coalitions."""
        return [
            name
            for name, metric in self.metrics.items()
            if attribute_of(metric, "trains_coalitions")
        ]

    @property
    def missing(self) -> dict[str, str]:
        """Return ``{name: reason}`` of each metric that has failed after its first round."""
        return {name: str(self.values[name].missing) for name in self._last_values}

    @property
    def contributions(self) -> dict[str, Tensor]:
        """Return the metrics' current values as strategies get them, ``[n]`` or ``[n, M]`` for M classes, by name."""
        return {name: values.value for name, values in self.values.items()}

    @property
    def update_metrics(self) -> list[str]:
        """Return the names of the metrics whose values depend on the updates that clients upload."""
        return self._names_of_readers("of_updates")

    @property
    def start_metrics(self) -> list[str]:
        """Return the names of the metrics that may read the models from which the clients started."""
        return self._names_of_readers("of_starts")

    @property
    def peer_metrics(self) -> list[str]:
        """Return the names of the metrics that read the values that clients assign to each other's models."""
        reads = self.reads.items()
        return [name for name, attributes in reads if "peer_values" in attributes]

    def _names_of_readers(self, flag: str) -> list[str]:
        """Return the names of metrics that read an attribute with this ``flag``."""
        return [
            name
            for name, attributes in self.reads.items()
            if any(getattr(VOCABULARY[attribute], flag) for attribute in attributes)
        ]

    def stage_of(self, name: str) -> Stage:
        """Return the stage of a round after which the metric ``name`` is updated."""
        return stage_of(self.reads[name])

    @property
    def evaluating(self) -> dict[str, ContributionMetric]:
        """Return ``{name: metric}``, the metrics for which clients evaluate models on their own validation samples."""
        return {
            name: metric
            for name, metric in self.metrics.items()
            if isinstance(metric, ContributionMetric) and metric.evaluates
        }

    def with_priors(self) -> dict[str, Tensor]:
        """Return the metrics' current values for strategies, ``{name: value}``. A metric's ``prior`` replaces NaN, the
        value of clients that never took part. A metric that has failed keeps its last values."""
        contributions = {**self.contributions, **self._last_values}
        for name, value in contributions.items():
            prior = self.priors.get(name)
            if prior is not None:
                contributions[name] = torch.where(value.isnan(), prior, value)
        return contributions

    def bind(
        self,
        num_clients: int,
        num_classes: int,
        class_names: Sequence[str] | None,
        class_counts: Tensor | None = None,
        client_names: Sequence[str] | None = None,
    ) -> None:
        """Call :meth:`ContributionMetric.bind` of every metric with the federation's size and names."""
        self._num_clients = num_clients
        for metric in self.metrics.values():
            if isinstance(metric, ContributionMetric):
                metric.bind(num_clients, num_classes, class_names, class_counts, client_names)
            metric.persistent(True)
        # Both are read here, so that errors are raised before training, and priors of metrics that are bound.
        vars(self).pop("priors", None)
        _ = self.priors
        _ = self.trained_names

    def reset(self) -> None:
        self.values.clear()
        self._last_values.clear()
        for metric in self.metrics.values():
            metric.reset()

    def to(self, device: torch.device) -> None:
        for metric in self.metrics.values():
            metric.to(device)
        move = methodcaller("to", device)
        for name, values in self.values.items():
            self.values[name] = values.map(move)
        for name, value in self._last_values.items():
            self._last_values[name] = move(value)

    @torch.no_grad()
    def update(self, round: Round, stage: Stage) -> None:
        """Update the metrics whose last input is known after ``stage`` of the round, and store their values.

        A metric that fails after its first round is not updated any more, see :attr:`missing`.

        Raises:
            ValueError: the first value of a metric is not ``[n]`` or ``[n, M]`` for n clients. Any other error of a
                metric's first round is raised, too.
        """
        for name, metric in self.metrics.items():
            if stage != self.stage_of(name) or name in self.missing:
                continue
            with self.keeping_run([name], f"round {round.round_index + 1}"):
                self._update(name, metric, round, stage)

    @contextmanager
    def keeping_run(self, names: Sequence[str], when: str) -> Iterator[None]:
        """Continue the run without the metrics ``names`` if one of them fails within the context.

        If some of them have no value yet, the error is raised, since little is lost and the run can be restarted.
        """
        try:
            yield
        except Exception as error:
            have_values = all(name in self.values for name in names)
            if not names or not have_values:
                raise
            for name in names:
                self._give_up(name, f"{when} ended in {type(error).__name__}: {error}")

    def _give_up(self, name: str, reason: str) -> None:
        if name in self.missing:
            return
        message = f"{reason.rstrip('.')}. The run continues without it."
        self._last_values[name] = self.values[name].value
        self.values[name] = self.values[name].without(message)
        warnings.warn(f"the metric {name!r} has failed: {message}", stacklevel=2)

    def _update(
        self,
        name: str,
        metric: Metric,
        round: Round,
        stage: Stage,
    ) -> None:
        round_view = read_by(metric, round, stage, reader=f"metric {name!r}")
        arguments = {}
        for argument, field in self.fields[name].items():
            if callable(field):
                arguments[argument] = field(round_view)
            else:
                arguments[argument] = round.get(field)
        metric.update(**arguments)

        self._check_rows(name, "compute()", metric.compute())
        values = result_of(metric)
        self._check_rows(name, "result()", values.value)
        self.values[name] = values.map(Tensor.detach)

    def _check_rows(self, name: str, method: str, value: Any) -> None:
        """Raise ValueError unless a metric's value is a vector or matrix with one row per client."""
        num_clients = self._num_clients
        description: Any = type(value).__name__
        if isinstance(value, Tensor):
            description = list(value.shape)
            if value.ndim in (1, 2) and len(value) == num_clients:
                return
        raise ValueError(
            f"metric {name!r}: {method} must return one row per client, [{num_clients}] or [{num_clients}, M], but "
            f"returned {description}."
        )

    @torch.no_grad()
    def end_run(self) -> dict[str, Values]:
        """Let the metrics compute the values that they have deferred to the run's end. Return these values."""
        values: dict[str, Values] = {}
        for name, metric in self.metrics.items():
            if not isinstance(metric, ContributionMetric) or name in self.missing:
                continue
            with self.keeping_run([name], "the end of the run"):
                if metric.end_run():
                    values[name] = metric.result()
        self.values |= values
        return values

    def outdated_names(self) -> list[str]:
        """Return the names of the metrics whose values are not those of the last round."""
        names = []
        for name, metric in self.metrics.items():
            if name not in self.missing and attribute_of(metric, "compute_at_run_end") is not None:
                names.append(name)
        return names

    def state_dict(self) -> dict[str, Any]:
        states = {}
        for name, metric in self.metrics.items():
            if name in self.missing:
                continue
            with self.keeping_run([name], "saving its state"):
                states[name] = _checked_state(metric)
        return {
            "metrics": states,
            "values": {name: values.state_dict() for name, values in self.values.items()},
            "missing": self.missing,
            "last_values": dict(self._last_values),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, metric in self.metrics.items():
            if name not in state["missing"]:
                metric.load_state_dict(state["metrics"][name])
        self.values = {name: Values(**saved) for name, saved in state["values"].items()}
        self._last_values = dict(state["last_values"])


def result_of(metric: Metric) -> Values:
    """Return the current values of a metric: the result of a contribution metric, or what another metric of
    torchmetrics computes, whose overall values are means over the columns."""
    if isinstance(metric, ContributionMetric):
        return metric.result()
    return Values(metric.compute())


def _checked_state(metric: Metric) -> dict[str, Any]:
    """Return a metric's state. Raise an error if a checkpoint cannot store it."""
    state = metric.state_dict()
    other_entries = [entry for entry in tree_leaves(state) if not isinstance(entry, Tensor)]
    pickle.dumps(other_entries)
    return state


def _checked_fields(name: str, metric: Metric, reported: set[str]) -> dict[str, Field]:
    if name in NAMES_IN_USE:
        raise ConfigurationError(
            f"reports use the name {name!r} for something else (as well as {NAMES_IN_USE}). Rename the metric."
        )
    plain_name(name, "metric")
    # For each argument of update(), an attribute of the round or a function of the round.
    fields = fields_of(metric)
    attributes = {field for field in fields.values() if isinstance(field, str)}
    unknown_attributes = sorted(attributes - ARGUMENTS - reported)
    if unknown_attributes:
        setting = getattr(metric, "reported_by", None)
        hint = ""
        if setting is not None:
            hint = f" Clients report it with {setting}."
        raise ConfigurationError(
            f"metric {name!r} ({type(metric).__name__}): update() takes {unknown_attributes}, which are not attributes "
            f"of a round. It may have {sorted(ARGUMENTS | reported)}.{hint}"
        )
    check_declared(metric, f"metric {name!r}")
    return fields
