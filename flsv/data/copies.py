"""Copies of samples: equal samples of two clients, or of one, found by their hashes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flsv.data.sample_hashes import NO_VALUES

if TYPE_CHECKING:
    from flsv.data.federated_data import FederatedData

#: Strength from which on a doubt about data is strong. It is 1 where a doubt begins.
STRONG_DOUBT = 2.0
#: What a doubt about copies is about, in the place of a table's column.
SAMPLES = "samples"
#: Smallest number of a client's samples that are compared.
MIN_SAMPLES = 10
#: Smallest number of copies that are told.
MIN_COPIES = 5
#: Largest share of a client's samples that are copies, beyond what is usual or chance.
MAX_SHARE_OF_COPIES = 0.05
#: How far beyond chance, in standard deviations, a share of copies is.
_NUM_DEVIATIONS = 3


@dataclass(frozen=True)
class Copies:
    """Samples of a client that another client has, too, or that the client has twice or without a value."""

    client: int
    #: None: the client has them twice, or they have no value.
    other_client: int | None
    count: int
    num_samples: int
    #: The share of the client's samples that is more than usual.
    excess: float
    #: Whether all inputs of the samples are NaN.
    are_empty: bool = False

    @property
    def kind(self) -> str:
        """Return the kind of the event: ``empty``, ``twice`` or ``shared``."""
        if self.are_empty:
            return "empty"
        return "twice" if self.other_client is None else "shared"

    @property
    def strength(self) -> float:
        """How strong the doubt is, beyond 1."""
        return STRONG_DOUBT * self.excess / MAX_SHARE_OF_COPIES

    def text(self, client_names: Sequence[str]) -> str:
        """Return what is told of the client's samples."""
        part = f"{self.count} of {self.num_samples}"
        if self.are_empty:
            return f"{part} have no value: all their inputs are NaN"
        if self.other_client is None:
            return f"{part} are there twice"
        return f"{part} are samples of {client_names[self.other_client]}, too"


def copies_in(data: FederatedData) -> list[Copies]:
    """Return the copies among the clients' training samples, most of a client's samples first.

    Tables, arrays, texts and image folders are compared. Other data sets' samples would have to be read one by one,
    and a stream's cannot be read twice: of these nothing is returned.
    """
    hashes = data.hashes_of_samples()
    if hashes is None:
        return []
    return find_copies(hashes)


def find_copies(hashes: Sequence[np.ndarray]) -> list[Copies]:
    """Return the copies among clients' samples, by each client's hashes of its samples, most copies first.

    Example:
        >>> lyon, graz = np.arange(40), np.arange(100, 140)
        >>> bonn = np.concatenate([lyon[:20], np.arange(200, 220)])
        >>> [(copies.client, copies.other_client, copies.count) for copies in find_copies([lyon, graz, bonn])]
        [(0, 2, 20)]
    """
    copies: list[Copies] = []
    for client, samples in enumerate(hashes):
        num_empty = int((samples == NO_VALUES).sum())
        if num_empty > 0:
            share = num_empty / len(samples)
            empty = Copies(client, None, num_empty, len(samples), share, are_empty=True)
            copies.append(empty)
    # These are no copies of each other.
    hashes = [samples[samples != NO_VALUES] for samples in hashes]
    shares_twice = [_share_twice(samples) for samples in hashes]
    chances = [_chance_of_equality(samples) for samples in hashes]

    for client, samples in enumerate(hashes):
        if len(samples) < MIN_SAMPLES:
            continue
        copies += _twice(client, samples, shares_twice, chances)
        for other_client in range(client + 1, len(hashes)):
            other_samples = hashes[other_client]
            if len(other_samples) >= MIN_SAMPLES:
                usual_share = float(np.median(shares_twice))
                chance = float(np.median(chances))
                copies += _shared(
                    (client, other_client), samples, other_samples, usual_share, chance
                )
    return sorted(copies, key=lambda copies_of_client: -copies_of_client.excess)


def _twice(
    client: int,
    samples: np.ndarray,
    shares_twice: Sequence[float],
    chances: Sequence[float],
) -> Iterator[Copies]:
    """Find a client's samples that it has twice, beyond the share that other clients have twice."""
    usual_share = 0.0
    if len(shares_twice) > 1:
        shares_of_others = [*shares_twice[:client], *shares_twice[client + 1 :]]
        usual_share = float(np.median(shares_of_others))
        # The more samples of few values a client has, the more of them are equal by chance.
        chances_of_others = [*chances[:client], *chances[client + 1 :]]
        usual_chance = float(np.median(chances_of_others))
        usual_share = max(usual_share, usual_chance * len(samples))

    count = len(samples) - len(np.unique(samples))
    excess = shares_twice[client] - usual_share
    if excess > MAX_SHARE_OF_COPIES and count >= MIN_COPIES:
        yield Copies(client, None, count, len(samples), excess)


def _shared(
    clients: tuple[int, int],
    samples: np.ndarray,
    other_samples: np.ndarray,
    usual_share: float,
    chance_of_equality: float,
) -> Iterator[Copies]:
    """Find the first client's samples that the second has, too, beyond the share that is usual or chance."""
    client, other_client = clients
    is_shared = np.isin(samples, other_samples)
    share_by_chance = chance_of_equality * len(other_samples)
    deviation = math.sqrt(share_by_chance / len(samples))
    usual_share = max(usual_share, share_by_chance + _NUM_DEVIATIONS * deviation)
    excess = float(is_shared.mean()) - usual_share
    count = int(is_shared.sum())
    if excess > MAX_SHARE_OF_COPIES and count >= MIN_COPIES:
        yield Copies(client, other_client, count, len(samples), excess)


def _share_twice(samples: np.ndarray) -> float:
    num_different = len(np.unique(samples))
    num_samples = max(len(samples), 1)
    return 1 - num_different / num_samples


def _chance_of_equality(samples: np.ndarray) -> float:
    """Return the share of pairs of samples that are equal."""
    _, counts = np.unique(samples, return_counts=True)
    num_equal_pairs = (counts * (counts - 1) // 2).sum()
    num_pairs = len(samples) * (len(samples) - 1) // 2
    return float(num_equal_pairs) / max(num_pairs, 1)
