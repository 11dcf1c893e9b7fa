"""Metrics and baselines of the benchmark, with their arguments and needs."""
# The metrics are listed in metrics.yaml. Your own need no entry: python tools/bench.py --metric my_package.MyMetric

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torchmetrics import Metric

from benchmark.federation import Federation
from flsv.configuration.identity import described
from flsv.configuration.option_texts import source_hash_of
from flsv.core.needs import requirements_of
from flsv.core.vocabulary import REQUIREMENTS
from flsv.metrics import ContributionMetric
from flsv.metrics.base import latest
from flsv.utilities.errors import ConfigurationError, nearest


class SampleCount(ContributionMetric):
    """Baseline metric: each client's number of training samples, ``[num_clients]``, NaN for clients never seen.

    Example:
        >>> metric = SampleCount(num_clients=3)
        >>> metric.update(torch.tensor([0, 2]), torch.tensor([10, 30]))
        >>> metric.compute()
        tensor([10., nan, 30.])
    """

    per_class = False
    sample_counts: Tensor

    def __init__(self, num_clients: int | None = None, **kwargs: Any) -> None:
        super().__init__(num_clients, num_classes=None, **kwargs)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state(
            "sample_counts", torch.full((num_clients,), float("nan")), dist_reduce_fx=latest
        )

    def update(self, client_ids: Tensor, num_samples: Tensor) -> None:
        """Add a round's client ids ``[k]`` and numbers of training samples ``[k]``."""
        self.sample_counts = self.sample_counts.clone()
        self.sample_counts[client_ids] = num_samples.to(self.sample_counts)

    def compute(self) -> Tensor:
        """Return each client's number of samples, ``[num_clients]``, NaN if never seen."""
        return self.sample_counts


class TrainingLoss(SampleCount):
    """Baseline metric: minus each client's mean training loss over its rounds.

    Example:
        >>> metric = TrainingLoss(num_clients=2)
        >>> metric.update(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
        >>> metric.update(torch.tensor([0]), torch.tensor([0.5]))
        >>> metric.compute()
        tensor([-0.7500, -2.0000])
    """

    total: Tensor
    num_losses: Tensor

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("total", torch.zeros(num_clients), dist_reduce_fx="sum")
        self.add_state("num_losses", torch.zeros(num_clients), dist_reduce_fx="sum")

    # For mypy: torchmetrics' update takes anything.
    def update(self, client_ids: Tensor, losses: Tensor) -> None:
        """Add a round's client ids ``[k]`` and mean training losses ``[k]``."""
        self.total = self.total.index_add(0, client_ids, losses.to(self.total))
        self.num_losses = self.num_losses.index_add(
            0, client_ids, torch.ones_like(losses).to(self.num_losses)
        )

    def compute(self) -> Tensor:
        """Compute minus each client's mean training loss, ``[num_clients]``, NaN if never seen."""
        return -self.total / self.num_losses  # 0 / 0 is NaN


class WrongArguments(ConfigurationError):
    """Error: a metric's arguments are wrong in every federation."""


@dataclass(frozen=True)
class Entry:
    """Description of a metric in the benchmark: its class, arguments and needs."""

    #: Description of the metric in words.
    title: str
    #: Class of the metric, or its import path.
    made_by: str | type
    #: Arguments of the class. If it takes `performance`, `mode`, `rounds` or `loss` (the name of a loss that the module
    #: logs, None for classifiers), the federation sets those that are missing here.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: The metric's needs that :func:`flsv.core.needs.requirements_of` does not find, by their names in
    #: :data:`flsv.core.vocabulary.REQUIREMENTS`.
    needs: tuple[str, ...] = ()
    #: Class path of the client algorithm that the metric requires. It must not change the trained models.
    client_algorithm: str | None = None

    @property
    def _metric_class(self) -> Any:
        if isinstance(self.made_by, str):
            return _import_class(self.made_by)
        return self.made_by

    @cached_property
    def requirements(self) -> tuple[str, ...]:
        """Return the names of all that the metric needs, see :data:`flsv.core.vocabulary.REQUIREMENTS`."""
        arguments = dict(self.arguments)
        if "rounds" in inspect.signature(self._metric_class).parameters:
            arguments.setdefault("rounds", 1)
        declared = set(self.needs)
        with suppress(TypeError, ValueError):  # :meth:`build` raises an error that names the metric
            metric = self._metric_class(**arguments)
            declared.update(requirements_of(metric))
        return tuple(name for name in REQUIREMENTS if name in declared)

    @property
    def is_users(self) -> bool:
        """Return whether the metric is neither of flsv nor a baseline, so that its code may change."""
        return isinstance(self.made_by, str) and not self.made_by.startswith(
            ("flsv.", "benchmark.")
        )

    def identity(self) -> str:
        """Return a fingerprint of the metric's class, arguments and code."""
        # It tells whether stored values are still valid.
        settings = (self.made_by, dict(self.arguments), self.client_algorithm)
        text = f"{described(settings)} {source_hash_of(self._metric_class)}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def options(self) -> dict[str, Any]:
        """Return the arguments of :class:`flsv.FederatedLoop` that the metric requires."""
        if self.client_algorithm is None:
            return {}
        algorithm_class = _import_class(self.client_algorithm)
        return {"client_algorithm": algorithm_class()}

    def build(self, federation: Federation) -> Metric:
        """Build a new metric for a federation."""
        if "classes" in self.requirements and not federation.classifies:
            raise ConfigurationError(
                f"{self.title}: the samples of {federation.name} have no classes."
            )
        federation_arguments = {
            "performance": federation.performance,
            "mode": federation.mode,
            "rounds": federation.rounds,
            "loss": None if federation.classifies else federation.performance,
        }
        arguments = dict(self.arguments)
        parameters = inspect.signature(self._metric_class).parameters
        for name, value in federation_arguments.items():
            if name in parameters:
                arguments.setdefault(name, value)

        try:
            metric = self._metric_class(**arguments)
        except ConfigurationError:
            raise
        except (TypeError, ValueError) as error:  # torchmetrics raises them for unknown keywords
            raise WrongArguments(f"{self.title}: {error}") from error
        if not isinstance(metric, Metric):
            raise WrongArguments(
                f"{self.made_by} is no metric: expected a subclass of flsv.metrics.ContributionMetric, or another "
                "torchmetrics metric whose update names what a flsv.Round has."
            )
        return metric


def identity_of(
    federations: Mapping[str, Federation],
    entries: Mapping[str, Entry],
) -> Callable[[str, str], str]:
    """Return a function ``f(federation, metric)`` that returns a fingerprint of all that the values depend on."""
    federation_keys = {}
    for name, federation in federations.items():
        federation_keys[name] = federation.identity.key
        federation.release()  # the data, which the key is computed from
    metric_keys = {name: entry.identity() for name, entry in entries.items()}

    def identity(federation: str, metric: str) -> str:
        return f"{federation_keys.get(federation)}-{metric_keys.get(metric)}"

    return identity


def _import_class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        reason = f" ({error})" if module else ""
        raise ConfigurationError(
            f"there is no metric {path!r}{reason}.{nearest(path, METRICS)} python tools/bench.py --list shows all. "
            "A class of your own is named with its module, such as my_package.MyMetric."
        ) from error


def _class_path(name: str) -> str:
    """Return a metric's class path, also for a bare name of flsv's."""
    for package in ("flsv.metrics", "flsv.contrib"):
        if name in dir(importlib.import_module(package)):
            return f"{package}.{name}"
    return name


def entry(name: str) -> tuple[str, Entry]:
    """Return a metric's short name and description, by its name or class path, optionally with arguments.

    Example:
        >>> entry("cgsv")[1].title
        'CGSV: cosine of update and aggregate'
        >>> entry("flsv.metrics.GradientShapley(momentum=0.5)")[1].arguments
        {'momentum': 0.5}
        >>> entry("GradientShapley")[1].made_by
        'flsv.metrics.GradientShapley'
    """
    if name in METRICS:
        return name, METRICS[name]
    try:
        call = ast.parse(name, mode="eval").body
        arguments = _literal_arguments(call) if isinstance(call, ast.Call) else {}
    except (SyntaxError, ValueError) as error:
        raise ConfigurationError(
            f"--metric {name}: {error}. Write my_package.MyMetric(momentum=0.5)."
        ) from error
    name_of_class = name.partition("(")[0]
    path = _class_path(name_of_class)
    metric_class = _import_class(path)
    if isinstance(metric_class, type) and not issubclass(metric_class, Metric):
        raise ConfigurationError(f"--metric {name}: {path} is no metric.")
    # An entry of metrics.yaml with the same class has the same needs.
    needs: tuple[str, ...] = ()
    client_algorithm = None
    for packaged in METRICS.values():
        if packaged.made_by == path:
            needs = packaged.needs
            client_algorithm = packaged.client_algorithm
            break

    short_name = name[name_of_class.rfind(".") + 1 :]
    return short_name, Entry(
        short_name,
        path,
        arguments=arguments,
        needs=needs,
        client_algorithm=client_algorithm,
    )


def _literal_arguments(call: ast.Call) -> dict[str, Any]:
    arguments = {}
    if call.args:
        raise ValueError("arguments are given by name")
    for keyword in call.keywords:
        if keyword.arg is None:  # **options
            raise ValueError("arguments are given by name")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return arguments


def _packaged_metrics() -> dict[str, Entry]:
    path = Path(__file__).with_name("metrics.yaml")
    entries = {}
    for name, fields in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        fields["needs"] = tuple(fields.get("needs", ()))
        entries[name] = Entry(**fields)
    return entries


#: Metrics with which your own metric is compared: numbers of samples, training losses, one metric without and one with
#: validation data.
BASELINES = ("size", "training_loss", "cgsv", "fedsv_samples")
METRICS = _packaged_metrics()
"""Entries by the name that ``--metric`` takes, see ``metrics.yaml``."""
