"""The requests that a federation sends to its clients, the scores in the responses, and their numbers of values."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

from flsv.configuration.federation_config import FederationConfig
from flsv.core.responses import SCORE_RANGES, numbers_of_round
from flsv.core.round import started_from
from flsv.games.client_evaluation import score_models
from flsv.scores import OWN_SCORES
from flsv.scores.class_scores import CLASS_SCORES
from flsv.scores.performance import measure_of
from flsv.utilities.errors import ConfigurationError


class ResponseScore(NamedTuple):
    """The score in a response, unless the argument ``performance`` names another one, and its split."""

    name: str
    split: str = "val"


SCORE_COALITIONS = "flsv.games.client_evaluation:score_coalitions"
#: Functions of flsv that a server may request sites to compute on their data if the loop needs them, and the scores in
#: their responses, or None. A site may allow more functions.
REQUESTED_FUNCTIONS: Mapping[str, ResponseScore | None] = {
    "flsv.personalization.pfedsv:collaborate": ResponseScore("accuracy"),
    "flsv.personalization.fedfomo:mix_models": ResponseScore("negative_loss"),
    "flsv.core.round:started_from": None,
    "flsv.sampling.power_of_choice:local_loss": ResponseScore("negative_loss", "train"),
    "flsv.metrics.contribution_estimation:leave_self_out": ResponseScore("accuracy"),
    "flsv.games.client_evaluation:score_models": ResponseScore("accuracy"),
    SCORE_COALITIONS: ResponseScore("accuracy"),
}
#: Scores to which each class contributes a separate term, even if it has few samples.
SCORES_OF_CLASSES = ("balanced_accuracy", *CLASS_SCORES)
#: The splits of a site's samples, whose sizes it reports.
SPLITS = ("train", "val", "test")
#: Name of the training loss that an update has.
TRAINING_LOSS = "training_loss"


def requested_functions(config: FederationConfig) -> Counter[str]:
    """Return the functions of flsv that a federation requests from its clients, and how many components request each.

    A function belongs to the strategies and metrics of the module in which it is defined.
    """
    functions: Counter[str] = Counter()
    for part in _parts_of(config):
        modules = {base.__module__ for base in type(part).__mro__}
        if getattr(part, "evaluators", None) == "clients":
            modules.add(score_models.__module__)
        functions.update(name for name in REQUESTED_FUNCTIONS if name.partition(":")[0] in modules)
    if None not in requested_scores(config):
        functions.pop(SCORE_COALITIONS, None)  # which counts by class
    if config.strategies.get("personalizer") is not None:
        functions[f"{started_from.__module__}:{started_from.__name__}"] += 1
    return functions


def score_of_response(
    config: FederationConfig, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ResponseScore | None:
    """Return the score in the response to a request, or None.

    Raises:
        ConfigurationError: a federation of this configuration does not request this score.
    """
    response_score = REQUESTED_FUNCTIONS.get(f"{function.__module__}:{function.__name__}")
    bound_arguments = inspect.signature(function).bind(None, *args, **kwargs)  # None: the data
    bound_arguments.apply_defaults()
    if response_score is None or "performance" not in bound_arguments.arguments:
        return response_score
    performance = bound_arguments.arguments["performance"]
    if performance not in requested_scores(config):
        message = f"{performance!r:.120} is not a score that this site's loop requests"
        raise ConfigurationError(f"{message}.", without_data=message)
    return response_score._replace(name=performance or response_score.name)


def requested_scores(config: FederationConfig) -> set[str | None]:
    """Return the values of the argument ``performance`` in a federation's requests, None for counts by class."""
    scores = set()
    for part in _parts_of(config):
        if not getattr(part, "evaluates", False):
            continue
        measure = measure_of(part)
        if measure is not None:
            scores.add(None if measure.by_class else measure.called or measure.name)
    return scores


def scores_of_responses(config: FederationConfig) -> set[str]:
    """Return the names of all losses, scores and reports of flsv and of a federation of this configuration."""
    names = {TRAINING_LOSS, *OWN_SCORES, *SCORE_RANGES, *CLASS_SCORES}
    names.update(name for name in requested_scores(config) if name is not None)
    for strategy in config.strategies.values():
        names.update(strategy.reports)
    return names


def numbers_of_run(
    config: FederationConfig,
    functions: Mapping[str, int],
    num_clients: int,
    num_rounds: int,
    num_classes: int,
) -> int:
    """Return the largest number of values that a run requests from a site: its splits' sizes, scores of its own model,
    and responses.

    Args:
        config: the run's configuration.
        functions: the functions that the run requests, ``"module:function"``, and how many of its parts request each.
        num_clients: the number of sites.
        num_rounds: the number of rounds. All requests are also sent once before the first round, as a dry run.
        num_classes: the number of classes.
    """
    total = len(SPLITS)
    if config.evaluation.every:
        total += len(OWN_SCORES) * (num_rounds // config.evaluation.every + 1)
    for name, num_parts in functions.items():
        numbers = numbers_of_request(config, name, num_clients, num_classes)
        total += (num_rounds + 1) * num_parts * numbers
    return total


def numbers_of_request(
    config: FederationConfig, name: str, num_clients: int, num_classes: int
) -> int:
    """Return the largest number of values in a round's responses to the function ``name``, ``"module:function"``."""
    function = resolve_name(name)
    are_counts_by_class = None in requested_scores(config)
    if function is score_models and not are_counts_by_class:
        num_classes = 0  # there is one score of each model
    return numbers_of_round(function, num_clients, num_classes)


def _parts_of(config: FederationConfig) -> list[Any]:
    return [*config.strategies.values(), *config.metrics.values()]
