"""What a run says of the coalitions that it will train."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flsv.functional.shapley.predicted_outputs import favors_nobody, has_complete_sizes
from flsv.games.members import Members
from flsv.retraining.coalition_store import clients_text

#: Mean errors of shares, in percent, over eight federations in which no two clients have a class in common: if each
#: client is trained alone, and if all coalitions are trained.
_ERROR_OF_SINGLES, _ERROR_OF_ALL = 24, 16

#: What is said if each client is trained alone, and no two of them have a class in common.
NO_COMMON_CLASS = (
    "no two clients have a class in common, so a client that trains alone learns nothing about the others' classes. In "
    f"experiments with such clients, shares had a mean error of {_ERROR_OF_SINGLES} %, and of {_ERROR_OF_ALL} % if all "
    "coalitions were trained. To train all coalitions of all clients but one, too, set coalitions: both."
)


def coalitions_in_words(masks: Tensor, is_halved: bool) -> str:
    """Name the coalitions ``[K, n]`` that are trained one by one, with a verb."""
    num_clients = masks.shape[1]
    num_coalitions = len(masks) - 2
    if num_coalitions == num_clients and has_complete_sizes(masks):
        return f"a model of each of {num_clients} clients alone is"
    if is_halved:
        num_halves = num_coalitions - num_clients
        return (
            f"models of each of {num_clients} clients alone and of {num_halves} complementary groups of unlike "
            "clients are"
        )
    return f"models of {num_coalitions} groups of clients are"


def estimation_in_words(masks: Tensor, have_outputs: bool) -> str:
    """Say how the scores of coalitions besides the trained ones ``[K, n]`` are found. Empty if all are trained."""
    if are_all(masks):
        return ""
    if have_outputs and favors_nobody(masks):
        return " The predictions of the models of all other groups are computed from these models' predictions."
    return (
        " The scores of the models of all other groups are estimated from these models' scores. Computing the "
        "models' predictions is more accurate. For this, choose a performance that is computed from outputs, and "
        'coalitions="singles", "both" or "halves".'
    )


def witnesses_in_words(witnesses: Sequence[Members], enlarged_rounding: float) -> str:
    """Say which clients were trained twice, and how far ``enlarged_rounding`` took their two models apart, relative to
    their training. Empty if none was.
    """
    if not witnesses:
        return ""
    clients = tuple(sorted({client for (client,) in witnesses}))
    also_trained = clients_text(clients).capitalize()
    sentence = (
        f" {also_trained} also trained in fits of their own, with the same models but for rounding"
    )
    if not enlarged_rounding:
        return f"{sentence}."
    return (
        f"{sentence}. Training enlarges rounding errors up to {100 * enlarged_rounding:.2g} % of what it changes, so "
        "values differ slightly between machines."
    )


def are_all(masks: Tensor) -> bool:
    """Return whether coalitions ``[K, n]`` are all 2^n."""
    return len(masks) == 2 ** masks.shape[1]
