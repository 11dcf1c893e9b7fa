"""What a run says of the coalitions that it will train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from flsv.functional.shapley.predicted_outputs import favors_nobody
from flsv.games.members import Members
from flsv.metrics.shadow import ShadowShapley
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


def witnesses_in_words(witnesses: Sequence[Members]) -> str:
    """Say which clients were trained twice. Empty if none was."""
    if not witnesses:
        return ""
    clients = tuple(sorted({client for (client,) in witnesses}))
    also_trained = clients_text(clients).capitalize()
    return (
        f" {also_trained} also trained in fits of their own, with the same models but for rounding."
    )


def rounding_in_words(metrics: Mapping[str, ShadowShapley]) -> list[str]:
    """Say of each metric by how much its values differ if models train in 64 bits, if this was found out."""
    sentences = []
    for name, metric in metrics.items():
        differences = (metric.latest_values.evidence or {}).get("rounding")
        if differences:
            sentences.append(
                f"{name}: training enlarges rounding errors. If the models of groups train in 64 bits, values differ "
                f"by up to {max(differences):.2g}. On another machine, they may differ by about as much. The intervals "
                "include this."
            )
    return sentences


def are_all(masks: Tensor) -> bool:
    """Return whether coalitions ``[K, n]`` are all 2^n."""
    return len(masks) == 2 ** masks.shape[1]
