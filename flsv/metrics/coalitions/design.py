"""The choice of the coalitions that a federation trains for its values, and of the rounds after which it has values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flsv.scores.performance import Evaluators
from flsv.utilities.choices import Trainings
from flsv.utilities.errors import ConfigurationError
from flsv.values.designs import Design
from flsv.values.query import NUM_RECENT_ROUNDS

#: A set of coalitions: the name of a design of :func:`flsv.functional.few_coalitions`, a list of each coalition's
#: members, or "halves": each client alone, and complementary coalitions of half of the clients that are chosen later.
WhichCoalitions = Trainings | Sequence[Sequence[int]] | Design
#: Error if halves cannot be chosen.
NO_OUTPUTS_FOR_HALVES = (
    'coalitions="halves" are chosen by the outputs of clients\' models, but this performance is not computed from '
    'outputs. Choose a performance of outputs, such as "accuracy", or set coalitions="both".'
)


def equivalent_runs(masks: Tensor, clients_per_round: float | None = None) -> float:
    """Compute the cost of training coalitions ``[K, n]``, in training runs of the whole federation."""
    num_clients = masks.shape[1]
    if clients_per_round is None:
        clients_per_round = num_clients
    sizes = masks.sum(1)
    sizes = sizes[sizes < num_clients].double()  # the coalition of all clients is the run itself
    # In a round a coalition trains as many clients as the run does, or all its members if it has fewer.
    num_trained = sizes.clamp_max(clients_per_round).sum()
    return float(num_trained) / clients_per_round


def arguments_of_design(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``ShadowShapley`` that name the coalitions of values with this evidence. Empty if no
    coalitions were trained, or if their set has no name.
    """
    design = evidence.get("trainings")
    if not design:
        return {}
    return {"coalitions": design, "halvings": evidence.get("halvings") or None}


def check_halvings(coalitions: WhichCoalitions, halvings: int, evaluators: Evaluators) -> None:
    """Raise ConfigurationError if ``halvings`` are set for other coalitions, or if halves cannot be chosen."""
    if coalitions != "halves":
        if halvings != 1:
            raise ConfigurationError(
                f'halvings={halvings} has an effect only with coalitions="halves", but got coalitions={coalitions!r}. '
                "Remove halvings, or change coalitions."
            )
        return
    if evaluators == "clients":
        raise ConfigurationError(
            'coalitions="halves" cannot be combined with evaluators="clients", because halves are chosen by outputs '
            'for the server\'s validation samples. Set evaluators="server", or coalitions="both".'
        )


#: The largest number of rounds after which values are computed by default.
MAX_VALUED_ROUNDS = 10
#: The number of rounds after which values are computed by default if the performance is expensive.
EVALUATIONS_PER_RUN = 5
#: The largest part of the forward passes of training coalitions that scoring their models takes by default, if more
#: than the last :data:`NUM_RECENT_ROUNDS` rounds are valued.
MAX_PART_OF_SCORING = 0.25


def num_valued_rounds(num_trained: float, num_scored: float) -> int:
    """Choose the number of rounds after which coalitions' models are scored.

    Args:
        num_trained: the number of samples on which coalitions train in the whole run. Each epoch counts.
        num_scored: the number of samples on which all coalitions' models are scored after a round.

    Example:
        >>> num_valued_rounds(num_trained=20_000, num_scored=1_000), num_valued_rounds(20_000, num_scored=10_000)
        (5, 3)
    """
    num_rounds = int(MAX_PART_OF_SCORING * num_trained / num_scored)
    return max(NUM_RECENT_ROUNDS, min(num_rounds, MAX_VALUED_ROUNDS))


def spread_rounds(rounds: Sequence[int], max_rounds: int = MAX_VALUED_ROUNDS) -> list[int]:
    """Choose at most ``max_rounds`` of some rounds: the last :data:`NUM_RECENT_ROUNDS` and, spread evenly, earlier
    ones.

    Example:
        >>> spread_rounds(range(40))
        [4, 9, 13, 18, 23, 27, 32, 37, 38, 39]
    """
    if len(rounds) <= max_rounds:
        return list(rounds)
    # The last rounds are chosen, and some of the earlier rounds at equal distances.
    num_earlier = len(rounds) - NUM_RECENT_ROUNDS
    num_chosen = max_rounds - NUM_RECENT_ROUNDS
    chosen_rounds = []
    for step in range(1, num_chosen + 1):
        position = step * num_earlier // (num_chosen + 1)  # steps of num_earlier / (num_chosen + 1)
        chosen_rounds.append(rounds[position])
    return [*chosen_rounds, *rounds[-NUM_RECENT_ROUNDS:]]
