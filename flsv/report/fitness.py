"""Fractions of a payment that went to the wrong clients in trials, where the values came from trained coalitions.

Every number was measured on federations that were created after all design choices, against the mean of the values over
many seeds (``docs/results/payments.md``).
"""

from __future__ import annotations

from typing import NamedTuple


class Trials(NamedTuple):
    """Results of trials with one kind of federation: fractions of a payment that went to the wrong clients.

    Attributes:
        most: the largest number of clients in these federations.
        one: the fraction with values of one seed, or the smallest and the largest such fraction.
        several: the same with values averaged over three seeds.
    """

    most: int
    one: tuple[float, ...]
    several: tuple[float, ...]


#: Federations in which all clients take part in every round, by the number of clients; and those with a sampler.
EVERYBODY = (Trials(7, (0.06,), (0.05,)), Trials(12, (0.08,), (0.06,)), Trials(20, (0.14,), (0.11,)))
DRAWN = Trials(8, (0.04, 0.09), (0.02, 0.08))


def misallocated(num_clients: int, drawn: bool, seeds: int) -> tuple[tuple[float, ...], str]:
    """Return how much of a payment went to the wrong clients in trials with federations similar to this one.

    Args:
        num_clients: this federation's number of clients.
        drawn: whether a sampler draws some of the clients in each round.
        seeds: the number of seeds over which the clients' values are averaged.

    Returns:
        The fraction, or the smallest and the largest fraction; and a text that describes the trials' federations.

    Example:
        >>> misallocated(5, drawn=False, seeds=1)
        ((0.06,), 'with up to 7 clients, all of them in every round')
    """
    trials = DRAWN if drawn else next((each for each in EVERYBODY if num_clients <= each.most), EVERYBODY[-1])
    who = "some of them drawn for each round" if drawn else "all of them in every round"
    further = "" if num_clients <= trials.most else f" (here there are {num_clients})"
    return trials.several if seeds > 1 else trials.one, f"with up to {trials.most} clients{further}, {who}"
