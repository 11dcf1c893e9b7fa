"""Fractions of a payment that went to the wrong clients in trials, where the values came from trained coalitions.

Every number was measured on federations that were created after all design choices, against the mean of the values over
many seeds (``docs/results/payments.md``).
"""

from __future__ import annotations

from typing import NamedTuple


class Trials(NamedTuple):
    """Trials of one kind of federation.

    Attributes:
        most: the largest number of clients.
        one: the fraction of a payment that went to the wrong clients, with values of one seed; or the least and the
            most.
        several: the same with values averaged over three seeds.
    """

    most: int
    one: tuple[float, ...]
    several: tuple[float, ...]


#: Federations in which all clients take part in every round, by the number of clients; and those with a sampler.
EVERYBODY = (Trials(7, (0.06,), (0.05,)), Trials(12, (0.08,), (0.06,)), Trials(20, (0.14,), (0.11,)))
DRAWN = Trials(8, (0.04, 0.09), (0.02, 0.08))


def misallocated(num_clients: int, drawn: bool, seeds: int) -> tuple[tuple[float, ...], str]:
    """Return the fractions of a payment that went to the wrong clients in trials of similar federations (one number, or
    the least and the most), and a text that describes these federations.

    Args:
        num_clients: the number of clients.
        drawn: whether a sampler draws some of the clients in each round.
        seeds: the number of seeds over which the values are means.

    Example:
        >>> misallocated(5, drawn=False, seeds=1)
        ((0.06,), 'with up to 7 clients, all of them in every round')
    """
    trials = DRAWN if drawn else next((each for each in EVERYBODY if num_clients <= each.most), EVERYBODY[-1])
    who = "some of them drawn for each round" if drawn else "all of them in every round"
    further = "" if num_clients <= trials.most else f" (here there are {num_clients})"
    return trials.several if seeds > 1 else trials.one, f"with up to {trials.most} clients{further}, {who}"
