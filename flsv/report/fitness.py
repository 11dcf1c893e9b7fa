"""How much of a payment by values of trained coalitions went to others in trials of the same kind.

Every number was measured on federations made after the choices, against the mean over many seeds of the game that the
values are of (``docs/results/payments.md``).
"""

from __future__ import annotations

from typing import NamedTuple


class Trials(NamedTuple):
    """Trials of one kind of federation.

    Attributes:
        most: the largest number of clients.
        one: the percentage of a payment that went to others, by one seed.
        several: the same by three seeds.
    """

    most: int
    one: str
    several: str


#: Federations in which all clients take part in every round, by the number of clients; and those with a sampler.
EVERYBODY = (Trials(9, "6", "5"), Trials(12, "6", "5"), Trials(20, "14", "11"))
DRAWN = Trials(8, "4 to 9", "2 to 8")


def misallocated(num_clients: int, drawn: bool, seeds: int) -> str:
    """Return a sentence on how much of a payment went to others in trials of this kind.

    Args:
        num_clients: the number of clients.
        drawn: whether a sampler draws some of the clients in each round.
        seeds: the number of seeds over which the values are means.

    Example:
        >>> misallocated(5, drawn=False, seeds=1)
        'In trials with up to 9 clients, all in every round, 6 % of a payment went to others than by many seeds.'
    """
    trials = DRAWN if drawn else next((each for each in EVERYBODY if num_clients <= each.most), EVERYBODY[-1])
    who = "some of them drawn for each round" if drawn else "all in every round"
    percent = trials.several if seeds > 1 else trials.one
    further = "" if num_clients <= trials.most else f", fewer than these {num_clients}"
    return (
        f"In trials with up to {trials.most} clients{further}, {who}, {percent} % of a payment went to others than by "
        "many seeds."
    )
