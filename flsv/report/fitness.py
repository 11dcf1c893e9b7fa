"""Fractions of a payment that went to the wrong clients in trials, where the values came from trained coalitions.

They are means over the held-out federations of ``docs/results/predicted.csv``, against the mean of exact values over
many other seeds: of one seed with each client alone, and of three seeds with each alone and all but one.
"""

from __future__ import annotations

from typing import NamedTuple


class Trials(NamedTuple):
    """Results of trials with one kind of federation: fractions of a payment that went to the wrong clients.

    Attributes:
        most: the largest number of clients in these federations.
        one: the fraction with values of one seed.
        several: the fraction with values averaged over three seeds.
    """

    most: int
    one: float
    several: float


#: Federations in which all clients take part in every round, by the number of clients; and those with a sampler.
EVERYBODY, DRAWN = (Trials(7, 0.09, 0.07), Trials(16, 0.08, 0.06)), Trials(7, 0.04, 0.03)


def misallocated(num_clients: int, drawn: bool, seeds: int) -> tuple[float, str]:
    """Return how much of a payment went to the wrong clients in trials with federations similar to this one.

    Args:
        num_clients: this federation's number of clients.
        drawn: whether a sampler draws some of the clients in each round.
        seeds: the number of seeds over which the clients' values are averaged.

    Returns:
        The fraction, and a text that describes the trials' federations.

    Example:
        >>> misallocated(5, drawn=False, seeds=1)
        (0.09, 'with up to 7 clients, all of them in every round')
    """
    trials = DRAWN if drawn else next((each for each in EVERYBODY if num_clients <= each.most), EVERYBODY[-1])
    who = "some of them drawn for each round" if drawn else "all of them in every round"
    further = "" if num_clients <= trials.most else f" (here there are {num_clients})"
    return trials.several if seeds > 1 else trials.one, f"with up to {trials.most} clients{further}, {who}"
