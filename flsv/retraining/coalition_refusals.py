"""Checks that a federation's coalitions can be trained. Their errors name the setting to change."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import distributions, packages_distributions, requires
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from flsv._lightning.patches import callbacks_of
from flsv.configuration.federation_config import FederationConfig
from flsv.core.sharing import sharing
from flsv.games.members import members_of
from flsv.isolation.reachable import LIBRARIES
from flsv.metrics.shadow import ShadowShapley
from flsv.sampling import ClientSampler
from flsv.server import ContributionMetrics
from flsv.uploads.base import JointUpload
from flsv.utilities.errors import ConfigurationError, listed

_NAMES_OF_TORCH = re.compile(r"(torch|lightning|pytorch[-_.]lightning)\b", re.IGNORECASE)
#: Advice in error messages, also for runs that get the metric from a base configuration on the command line.
HOW_TO_DO_WITHOUT = (
    "remove ShadowShapley from the metrics (--config digits is quickstart without it)"
)


def metrics_with_coalitions(metrics: ContributionMetrics) -> dict[str, ShadowShapley]:
    """Return the metrics whose values need trained coalitions, by name. Raise ConfigurationError unless coalitions can
    be trained for them."""
    metrics_by_name = {}
    for name in metrics.trained_names:
        metric = metrics.metrics[name]
        if not isinstance(metric, ShadowShapley):
            class_name = type(metric).__name__
            raise ConfigurationError(
                f"metric {name!r}: {class_name}.trains_coalitions is True, but {class_name} does not say which "
                "coalitions it needs. Derive it from flsv.metrics.ShadowShapley."
            )
        metrics_by_name[name] = metric
    return metrics_by_name


def check_settings(config: FederationConfig) -> None:
    """Raise ConfigurationError if a part of the federation prevents the training of coalitions."""
    colluders = [upload for upload in config.uploads if isinstance(upload, JointUpload)]
    if config.personalizer is not None:
        reason = f"personalizer={config.personalizer!r} gives each client a start point of its own"
    elif config.privacy is not None:
        reason = f"noise would be spent on each of these models by {config.privacy!r}"
    elif colluders:
        reason = f"{colluders} compare the updates of one cohort"
    else:
        return
    raise ConfigurationError(
        f"ShadowShapley trains a model for each of many coalitions, and {reason}. Remove this part of the federation, "
        f"or {HOW_TO_DO_WITHOUT}."
    )


def check_shared(config: FederationConfig, module: L.LightningModule) -> None:
    """Raise ConfigurationError if a trained parameter stays at the clients, since sites train coalitions as shared
    vectors.
    """
    private_names = sharing(config.share, module, config.head).kept
    if private_names:
        raise ConfigurationError(
            f"ShadowShapley trains a model for each of many coalitions, and with share={config.share!r} the trained "
            f"parameters {sorted(private_names)[:3]} stay at the sites. Share all trained parameters, or "
            f"{HOW_TO_DO_WITHOUT}."
        )


def check_scored(metric_name: str, share: Any, evaluator: Any) -> None:
    """Raise ConfigurationError if the server would score models of which it does not have all parameters."""
    private_names = evaluator.space.private_names
    if private_names and not evaluator.requests_from_clients:
        raise ConfigurationError(
            f"{metric_name} scores models on the server's validation set, and with share={share!r} a part of each "
            f"model stays at the clients: the server only has the initial values of {private_names[0]!r}. Let the "
            'clients score the models (evaluators="clients"), or share all trained parameters.'
        )


def check_sampler(sampler: ClientSampler, masks: Tensor) -> None:
    """Raise ConfigurationError if a sampler cannot draw clients from each of the coalitions ``masks [K, n]``."""
    try:
        for members in members_of(masks):
            if members:
                sampler.among(members)  # raises an error if it cannot
        sampler.inclusion_probabilities(masks.shape[1], {})
    except ConfigurationError as error:
        raise ConfigurationError(
            f"ShadowShapley trains each of many coalitions alone, but {error} Or {HOW_TO_DO_WITHOUT}."
        ) from None


def excluded_callbacks(
    trainer: L.Trainer, metrics: Iterable[ShadowShapley], at_sites: bool
) -> list[L.Callback]:
    """Return the callbacks that take no part in coalitions: those that the metrics name, or by default those of tools
    (:func:`is_of_tool`).
    """
    names_by_metric = [
        metric.excluded_callbacks for metric in metrics if metric.excluded_callbacks is not None
    ]
    callbacks = callbacks_of(trainer)
    if not names_by_metric:  # the default
        return [callback for callback in callbacks if is_of_tool(callback)]
    names = set(chain.from_iterable(names_by_metric))
    if names and at_sites:
        raise ConfigurationError(
            "ShadowShapley(excluded_callbacks=...) has no effect here, because sites train coalitions beside the run, "
            "with all their callbacks. Remove the argument."
        )
    _check_callback_names(names, {type(callback).__name__ for callback in callbacks})
    return [callback for callback in callbacks if type(callback).__name__ in names]


def _check_callback_names(names: set[str], callback_names: set[str]) -> None:
    unknown = sorted(names - callback_names)
    if unknown:
        raise ConfigurationError(
            f"ShadowShapley(excluded_callbacks={sorted(names)}): the Trainer has no callback {unknown[0]!r}. Name the "
            f"classes of some of its callbacks: {listed(sorted(callback_names))}."
        )


def is_of_tool(callback: L.Callback) -> bool:
    """Return whether a callback's class comes from an installed package that requires neither torch nor Lightning.

    Such a package is a tool, for example for hyper-parameter search or experiment tracking, and its callback does not
    act on training. A package without declared requirements counts as the program's own.
    """
    for kind in type(callback).__mro__:
        package, _, _ = kind.__module__.partition(".")
        if package in LIBRARIES or not _is_installed(kind.__module__):
            continue
        for distribution in set(packages_distributions().get(package, ())):
            requirements = requires(distribution) or []
            needed = [requirement for requirement in requirements if "extra ==" not in requirement]
            is_about_training = any(_NAMES_OF_TORCH.match(requirement) for requirement in needed)
            if needed and not is_about_training:
                return True
    return False


def _is_installed(module_name: str) -> bool:
    """Return whether there are installed packages in the folder that a module is imported from. To read what all of
    them contain takes a second, which a program's own callbacks shall not cost.
    """
    module_file = getattr(sys.modules.get(module_name), "__file__", None)
    if module_name == "__main__" or module_file is None:
        return False
    path = Path(module_file)
    num_packages = module_name.count(".") + (path.stem == "__init__")
    return any(distributions(path=[str(path.parents[num_packages])]))


def fitted_before(num_rounds: int) -> ConfigurationError:
    """Return the error for a Trainer that has run ``num_rounds`` rounds in an earlier fit."""
    return ConfigurationError(
        f"ShadowShapley: this Trainer has run {num_rounds} rounds in an earlier fit, but a "
        "coalition is trained by one fit. Create a new Trainer with max_epochs for all rounds, and resume from "
        "a checkpoint. Or remove ShadowShapley from the metrics, and run flsv retrain after the run."
    )


def hidden_engine_of_sites(class_name: str) -> ConfigurationError:
    """Return the error for a function that makes an engine of sites, but does not say so."""
    return ConfigurationError(
        f"ShadowShapley: the function that makes the engine does not show before the fit that clients train at sites. "
        f"Pass FederatedLoop(engine=partial({class_name}, ...)), or a function with an attribute clients_here = False."
    )
