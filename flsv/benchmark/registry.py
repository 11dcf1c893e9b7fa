"""The metrics that the benchmark knows: how to build each, and what it needs.

Another one is a line here; one of your own needs none: ``flsv bench --metric my_package.MyMetric``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from flsv.benchmark import baselines
from flsv.benchmark.federation import Federation
from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.server.fingerprint import described
from flsv.server.identity import source_of

#: From so many clients on, the games of a round are sampled.
MANY = 11
#: What a metric may need, in the order in which it is shown.
NEEDS = {
    "validation": "the server has validation data",
    "updates": "the server sees every client's own update",
    "head": "the updates' classifier head",
    "classes": "samples have classes",
    "losses": "clients tell their training loss",
    "counts": "clients tell their numbers of samples of each class",
    "answers": "clients answer questions about their samples (FedBary's protocol)",
    "reports": "clients report what their samples do to the validation loss (InRunValues)",
    "client validation": "every client has validation samples of its own",
    "samples": "all samples lie in one place",
}


class WrongArguments(ConfigurationError):
    """A metric that cannot be created in any federation."""


@dataclass(frozen=True)
class Entry:
    """A metric of the benchmark.

    Args:
        title: in words.
        made_by: a class path, a class, or a function from a data module, that is set up, to values ``[n]``.
        arguments: of the class. ``performance``, ``mode``, ``rounds`` and ``loss`` (the name of a loss that the module
            logs; None for classifiers) are the federation's where they are not said here and the class takes them.
        needs: names in :data:`NEEDS`.
        client_algorithm: the clients' side of it, a class path; it must not change what they train.
        per_client: evaluations a client a round that its estimator gets as its budget where there are :data:`MANY`
            clients or more; None: what the metric takes itself.
    """

    title: str
    made_by: str | Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    client_algorithm: str | None = None
    per_client: int | None = None

    @property
    def own(self) -> bool:
        """Whether it is somebody's own, who may be at work on it."""
        return isinstance(self.made_by, str) and not self.made_by.startswith("flsv.")

    def identity(self) -> str:
        """A hash of what it is made of: class, arguments, and the code of what is not flsv's."""
        made_by = _located(self.made_by) if isinstance(self.made_by, str) else self.made_by
        said = (self.made_by, dict(self.arguments), self.client_algorithm, self.per_client)
        return hashlib.sha256(f"{described(said)} {source_of(made_by)}".encode()).hexdigest()[:12]

    def options(self) -> dict[str, Any]:
        """New arguments of :class:`flsv.FederatedLoop` without which the metric gives nothing."""
        return {} if self.client_algorithm is None else {"client_algorithm": _located(self.client_algorithm)()}

    def build(self, federation: Federation) -> Metric | Callable[[FederatedDataModule], Tensor]:
        """A new metric for a federation, or the function.

        Raises:
            WrongArguments: it takes no such arguments, or is no metric.
            ConfigurationError: it is of no use in this federation.
        """
        if "classes" in self.needs and not federation.classifies:
            raise ConfigurationError(f"{self.title}: the samples of {federation.name} have no classes.")
        made_by = _located(self.made_by) if isinstance(self.made_by, str) else self.made_by
        if not isinstance(made_by, type):
            return made_by
        given = dict(self.arguments)
        if self.per_client is not None and (clients := len(federation.num_samples)) >= MANY:
            given["estimator_args"] = {**given.get("estimator_args", {}), "budget": self.per_client * clients}
        takes = inspect.signature(made_by).parameters
        logged = None if federation.classifies else federation.performance
        known = {
            "performance": federation.performance,
            "mode": federation.mode,
            "rounds": federation.rounds,
            "loss": logged,
        }
        given |= {name: value for name, value in known.items() if name in takes and name not in given}
        try:
            made = made_by(**given)
        except ConfigurationError:
            raise
        except (TypeError, ValueError) as error:  # torchmetrics' own, of keywords that nobody takes
            raise WrongArguments(f"{self.title}: {error}") from error
        if not isinstance(made, Metric):
            raise WrongArguments(
                f"{self.made_by} is no metric: expected a subclass of flsv.metrics.ContributionMetric, or another "
                "torchmetrics metric whose update names what a flsv.Round has."
            )
        return made


def identity_of(
    federations: Mapping[str, Federation], entries: Mapping[str, Entry]
) -> Callable[[str, str], str | None]:
    """What the values of a federation and a metric, by their names, are of; None for others."""
    where = {}
    for name, each in federations.items():
        where[name] = each.identity.key
        each.release()
    what = {name: each.identity() for name, each in entries.items()}

    def of(federation: str, metric: str) -> str | None:
        if federation not in where or (metric not in what and not metric.startswith("*")):
            return None
        return f"{where[federation]}-{what.get(metric, '')}"

    return of


def _located(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"there is no metric {path!r} ({error}): expected one of {', '.join(METRICS)}, or the path of a class, "
            "such as my_package.MyMetric."
        ) from error


def entry(name: str) -> tuple[str, Entry]:
    """A metric by its name here or by its class path, perhaps with arguments: ``my_package.MyMetric(momentum=0.5)``.

    Returns:
        What it is called in tables, and the entry.

    Raises:
        ConfigurationError: there is none, or its arguments are no plain values.

    Example:
        >>> entry("cgsv")[1].title
        'CGSV: cosine of update and aggregate'
        >>> entry("flsv.metrics.GradientShapley(order=2)")[1].arguments
        {'order': 2}
    """
    if name in METRICS:
        return name, METRICS[name]
    path, bracket, rest = name.partition("(")
    arguments: dict[str, Any] = {}
    if bracket:
        try:
            call = ast.parse(f"f({rest}", mode="eval").body
            assert isinstance(call, ast.Call)
            if call.args or any(keyword.arg is None for keyword in call.keywords):
                raise ValueError("arguments are given by name")
            arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        except (SyntaxError, ValueError) as error:
            raise ConfigurationError(f"--metric {name}: {error}. Write my_package.MyMetric(momentum=0.5).") from error
    _located(path)
    like = next((each for each in METRICS.values() if each.made_by == path), Entry("", path))
    short = path.rpartition(".")[2] + (f"({', '.join(f'{k}={v}' for k, v in arguments.items())})" if arguments else "")
    return short, Entry(short, path, arguments, like.needs, like.client_algorithm)


def _metric(name: str) -> str:
    return f"flsv.metrics.{name}"


_GAME = ("validation", "updates")
_IN_RUN = "flsv.clients.algorithms.InRunValues"
#: Evaluations a client that "auto" takes of many clients, so that all sampled games cost the same.
_PER_CLIENT = 20


def _sampled(estimator: str) -> dict[str, Any]:
    """The game of ``fedsv_samples`` at a budget that buys 24 of six clients' 64 coalitions; see ``per_client``."""
    return {"weighting": "samples", "estimator": estimator, "estimator_args": {"budget": 24}}


METRICS: dict[str, Entry] = {
    "size": Entry("counting samples", baselines.SampleCount),
    "training_loss": Entry("minus the training loss", baselines.TrainingLoss, needs=("losses",)),
    "divergence": Entry("Guo's weights: samples, less divergence", baselines.divergence, needs=("classes", "counts")),
    "cssv": Entry("CSSV of updates", _metric("ClassSpecificShapley"), {}, ("updates", "head", "classes")),
    "cssv_weights": Entry(
        "CSSV of weights", _metric("ClassSpecificShapley"), {"source": "weights"}, ("updates", "head", "classes")
    ),
    "cgsv": Entry("CGSV: cosine of update and aggregate", _metric("CosineGradientShapley"), {}, ("updates",)),
    "fedsv": Entry("FedSV: sum of the rounds' Shapley values", _metric("CumulativeShapley"), {}, _GAME),
    "fedsv_samples": Entry(
        "FedSV, coalitions weighed by samples", _metric("CumulativeShapley"), {"weighting": "samples"}, _GAME
    ),
    "ssv": Entry("SSV of ShapleyFL (AFedSV's weights)", _metric("SurrogateFederatedShapley"), {}, _GAME),
    "gtg": Entry("GTG-Shapley", _metric("CumulativeShapley"), {"estimator": "gtg"}, _GAME, per_client=_PER_CLIENT),
    "s_fedavg": Entry(
        "S-FedAvg's relevance", _metric("PartialFederatedShapley"), {"momentum": 0.75, "init": "uniform"}, _GAME
    ),
    "decayed": Entry("decayed shares of Guo et al.", _metric("DecayedShapley"), {"decay": 0.8}, _GAME),
    "decayed_sum": Entry(
        "decayed values without the division", _metric("DecayedShapley"), {"decay": 0.8, "normalize": False}, _GAME
    ),
    "decayed_sum_09": Entry(
        "the same, decay 0.9", _metric("DecayedShapley"), {"decay": 0.9, "normalize": False}, _GAME
    ),
    "multi_round": Entry("MR: shares of every round", _metric("DecayedShapley"), {"decay": 1.0}, _GAME),
    "one_round": Entry("OR: one game at the end", _metric("OneRoundShapley"), {}, _GAME),
    "loo": Entry(
        "leave-one-out, summed over rounds", _metric("CumulativeShapley"), {"estimator": "leave_one_out"}, _GAME
    ),
    "banzhaf": Entry(
        "Banzhaf values, summed over rounds",
        _metric("CumulativeShapley"),
        {"estimator": "banzhaf", "weighting": "samples"},
        _GAME,
        per_client=_PER_CLIENT,
    ),
    "beta_16_1": Entry(
        "Beta(16, 1)-Shapley, small coalitions first, summed over rounds",
        _metric("CumulativeShapley"),
        {"estimator": "beta", "estimator_args": {"alpha": 16, "beta": 1}, "weighting": "samples"},
        _GAME,
        per_client=_PER_CLIENT,
    ),
    "beta_1_4": Entry(
        "Beta(1, 4)-Shapley, large coalitions first, summed over rounds",
        _metric("CumulativeShapley"),
        {"estimator": "beta", "estimator_args": {"alpha": 1, "beta": 4}, "weighting": "samples"},
        _GAME,
        per_client=_PER_CLIENT,
    ),
    "lower_bound": Entry(
        "lower confidence bound of a round's Shapley value",
        _metric("LowerBoundShapley"),
        {"weighting": "samples"},
        _GAME,
    ),
    "permutation_24": Entry(
        "FedSV by permutations, 24 evaluations a round",
        _metric("CumulativeShapley"),
        _sampled("permutation"),
        _GAME,
        per_client=_PER_CLIENT,
    ),
    "leverage_24": Entry(
        "FedSV by Leverage SHAP, 24 evaluations a round",
        _metric("CumulativeShapley"),
        _sampled("leverage"),
        _GAME,
        per_client=_PER_CLIENT,
    ),
    "adjusted_24": Entry(
        "FedSV, regression-adjusted, 24 evaluations a round",
        _metric("CumulativeShapley"),
        _sampled("regression_adjusted"),
        _GAME,
        per_client=_PER_CLIENT,
    ),
    "surrogate_24": Entry(
        "FedSV by the surrogate, 24 evaluations a round",
        _metric("CumulativeShapley"),
        _sampled("surrogate"),
        _GAME,
        per_client=_PER_CLIENT,
    ),
    "gradient_1": Entry(
        "gradient Shapley, first order", _metric("GradientShapley"), {"momentum": 0.9}, (*_GAME, "classes")
    ),
    "gradient_2": Entry(
        "gradient Shapley, second order", _metric("GradientShapley"), {"order": 2, "momentum": 0.9}, (*_GAME, "classes")
    ),
    "in_run": Entry(
        "in-run data Shapley, first order",
        _metric("InRunShapley"),
        {},
        (*_GAME, "classes", "reports"),
        _IN_RUN,
    ),
    "in_run_2": Entry(
        "in-run data Shapley, second order",
        _metric("InRunShapley"),
        {"order": 2},
        (*_GAME, "classes", "reports"),
        _IN_RUN,
    ),
    "fedce": Entry("FedCE's weights", _metric("ContributionEstimation"), {}, ("updates", "client validation")),
    "everybody_else": Entry("EverybodyElse", _metric("EverybodyElse"), {}, ("client validation",)),
    "everybody_else_loss": Entry(
        "EverybodyElse, by the loss",
        _metric("EverybodyElse"),
        {"performance": "negative_loss"},
        ("classes", "client validation"),
    ),
    "gradient_agreement": Entry("gradient agreement", _metric("GradientAgreement"), {}, _GAME),
    "gradient_agreement_game": Entry("gradient agreement and games", _metric("GradientAgreementGame"), {}, _GAME),
    "fedbary": Entry(
        "FedBary: shares by distance",
        _metric("WassersteinContribution"),
        {"every": 4},
        ("validation", "classes", "answers"),
    ),
    "ot_gradient": Entry(
        "FedBary: samples not flagged",
        _metric("CalibratedOTGradient"),
        {"every": 4, "pictures": 0},
        ("validation", "classes", "answers"),
    ),
    "lava": Entry("LAVA", baselines.lava_values, needs=("validation", "classes", "samples")),
    "knn_shapley": Entry("KNN-Shapley", baselines.knn, needs=("validation", "classes", "samples")),
}
"""By the name that ``--metric`` takes."""
