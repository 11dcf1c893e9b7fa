"""Equal samples of two clients, of one client, or of a client and the validation set, by the samples' hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from flsv._lightning.evaluation import list_loaders
from flsv.data.loaders import samples_of
from flsv.data.sample_hashes import forms_of, hash_samples_and_inputs

if TYPE_CHECKING:
    from flsv.data.federated_data import FederatedData

#: Name in data warnings about equal samples, instead of a table's column.
SAMPLES = "samples"
#: A client with fewer samples is not compared.
MIN_SAMPLES = 10
#: Fewer copies are not reported.
MIN_COPIES = 5
#: A larger share of a client's samples that are copies, beyond what is usual or due to chance, is reported.
MAX_SHARE_OF_COPIES = 0.05
#: Largest number of other clients that have the same sample with which a client is compared.
MAX_COMPARED = 50
#: Number of standard deviations by which a share of copies has to be above what is due to chance.
_NUM_DEVIATIONS = 3


@dataclass(frozen=True)
class Copies:
    """Samples of a client that another client also has, or that the client has more than once."""

    client: int
    #: None: the client has them more than once.
    other_client: int | None
    count: int
    num_samples: int
    #: Share of the client's samples beyond what is usual or due to chance.
    excess: float

    def text(self, client_names: Sequence[str]) -> str:
        """Return the text of the data warning."""
        part = f"{self.count} of {self.num_samples}"
        if self.other_client is None:
            return f"{part} occur more than once"
        return f"{part} are also samples of {client_names[self.other_client]}"


@dataclass(frozen=True)
class ValidationCopies:
    """Samples of the server's validation set that a client also trains on."""

    #: None: any of the clients.
    client: int | None
    #: Number of validation samples that are training samples, also with another target if inputs are tensors.
    count: int
    #: Those of them that are training samples with another target only.
    num_relabeled: int
    num_samples: int
    #: Share of the validation samples beyond what is usual or due to chance.
    excess: float

    @property
    def is_conspicuous(self) -> bool:
        """Return whether the copies are reported."""
        return self.count >= MIN_COPIES and self.excess > MAX_SHARE_OF_COPIES

    @property
    def text(self) -> str:
        """Text of the data warning."""
        text = f"{self.count} of {self.num_samples} validation samples are also training samples"
        if self.num_relabeled:
            return f"{text}, {self.num_relabeled} of them with another label"
        return text


def copies_in(data: FederatedData) -> list[Copies]:
    """Return the copies among the clients' training samples, the largest excess first.

    Tables, arrays, texts and image folders are compared. For other data sets the list is empty, since their samples
    would have to be read one by one.
    """
    division = data.division
    sample_hashes = division.sample_hashes
    if sample_hashes is None:
        return []
    return find_copies([sample_hashes[samples.numpy()] for samples in division.splits.train])


def validation_copies_in(data: FederatedData) -> list[ValidationCopies] | None:
    """Return which validation samples are training samples of any client, and then of each client.

    Return None if there are no validation samples, or if they cannot be compared by hashes with the training samples,
    as at sites.
    """
    division = data.division
    if division.sample_hashes is None or data.validation() is None:
        return None
    validation_hashes = _validation_hashes(data)
    if validation_hashes is None or len(validation_hashes[0]) == 0:
        return None

    samples_by_client = [samples.numpy() for samples in division.splits.train]
    hashes, input_hashes = validation_hashes
    copies = find_validation_copies(
        hashes, [division.sample_hashes[samples] for samples in samples_by_client]
    )
    if input_hashes is None or division.input_hashes is None:
        return copies
    copies_of_inputs = find_validation_copies(
        input_hashes, [division.input_hashes[samples] for samples in samples_by_client]
    )
    return list(map(_with_relabeled, copies, copies_of_inputs))


def conspicuous(all_copies: Sequence[ValidationCopies]) -> list[ValidationCopies]:
    """Return what is reported: the clients with many validation samples, or all together if no single one has many."""
    reported = [copies for copies in all_copies if copies.is_conspicuous]
    reported_clients = [copies for copies in reported if copies.client is not None]
    return sorted(reported_clients, key=lambda copies: -copies.excess) or reported


def _with_relabeled(copies: ValidationCopies, of_inputs: ValidationCopies) -> ValidationCopies:
    return replace(
        copies,
        count=of_inputs.count,
        num_relabeled=of_inputs.count - copies.count,
        excess=max(copies.excess, of_inputs.excess),
    )


def _validation_hashes(data: FederatedData) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Return the hash of each validation sample and, of pairs of tensors, of its inputs. None: not comparable."""
    division = data.division
    rows = data.server_val_indices.numpy()
    if len(rows) and division.sample_hashes is not None:
        hashes_of_rows = division.sample_hashes[rows]
        if division.input_hashes is None:
            return hashes_of_rows, None
        return hashes_of_rows, division.input_hashes[rows]

    hashes: list[np.ndarray] = []
    input_hashes = []
    for loader in list_loaders(data.val_loaders):
        dataset, indices = samples_of(loader)
        if indices is None or forms_of(dataset) != forms_of(division.source.train):
            return None
        hashes_of_loader, input_hashes_of_loader = hash_samples_and_inputs(dataset, indices)
        if hashes_of_loader is None:
            return None
        hashes.append(hashes_of_loader)
        if input_hashes_of_loader is not None:
            input_hashes.append(input_hashes_of_loader)
    if len(input_hashes) < len(hashes):
        return np.concatenate(hashes), None
    return np.concatenate(hashes), np.concatenate(input_hashes)


def find_validation_copies(
    validation: np.ndarray, hashes: Sequence[np.ndarray]
) -> list[ValidationCopies]:
    """Return which of V validation samples any client has, and then which each client has, by the samples' hashes.

    Example:
        >>> validation = np.arange(100, 110)
        >>> lyon, graz = np.arange(40), np.arange(104, 144)
        >>> [(copies.client, copies.count) for copies in find_validation_copies(validation, [lyon, graz])]
        [(None, 6), (0, 0), (1, 6)]
    """
    samples, occurrences = np.unique(validation, return_counts=True)
    all_hashes = np.concatenate(hashes)
    sizes = np.array(list(map(len, hashes)))
    owners = np.repeat(np.arange(len(hashes)), sizes)
    positions = np.searchsorted(samples, all_hashes).clip(max=len(samples) - 1)
    is_copy = samples[positions] == all_hashes

    # A client and a sample are one number, so that each sample of a client counts once.
    keys = np.unique(owners[is_copy] * len(samples) + positions[is_copy])
    owners_of_copies, copied_samples = np.divmod(keys, len(samples))
    counts = np.bincount(
        owners_of_copies, weights=occurrences[copied_samples], minlength=len(hashes)
    )
    count_of_any = occurrences[np.unique(copied_samples)].sum()

    all_counts = np.array([count_of_any, *counts], dtype=int)
    all_sizes = np.array([len(all_hashes), *sizes])
    excesses = np.zeros(len(all_counts))
    if count_of_any >= MIN_COPIES:  # fewer are not reported, whatever is usual
        excesses = _excess(
            all_counts,
            len(validation),
            all_sizes,
            usual_share=float(np.median(list(map(_share_repeated, hashes)))),
            chance_of_equality=float(np.median(list(map(_chance_of_equality, hashes)))),
        )
    owner_ids = [None, *range(len(hashes))]
    copies = []
    for client, count, excess in zip(owner_ids, all_counts.tolist(), excesses.tolist()):
        copies.append(
            ValidationCopies(
                client, count, num_relabeled=0, num_samples=len(validation), excess=excess
            )
        )
    return copies


def find_copies(hashes: Sequence[np.ndarray]) -> list[Copies]:
    """Return the copies among clients' samples, by the hashes of each client's samples, the largest excess first.

    If more than 51 clients have a sample, each of them is compared with the next 50.

    Example:
        >>> lyon, graz = np.arange(40), np.arange(100, 140)
        >>> bonn = np.concatenate([lyon[:20], np.arange(200, 220)])
        >>> [(copies.client, copies.other_client, copies.count) for copies in find_copies([lyon, graz, bonn])]
        [(0, 2, 20)]
    """
    if not hashes:
        return []
    shares_repeated = [_share_repeated(samples) for samples in hashes]
    chances = [_chance_of_equality(samples) for samples in hashes]

    copies = _own_copies(hashes, shares_repeated, chances)
    copies += _shared_copies(
        hashes,
        usual_share=float(np.median(shares_repeated)),
        chance_of_equality=float(np.median(chances)),
    )
    return sorted(copies, key=_sort_key)


def _sort_key(copies: Copies) -> tuple[float, int, int]:
    other_client = -1 if copies.other_client is None else copies.other_client
    return -copies.excess, copies.client, other_client


def _own_copies(
    hashes: Sequence[np.ndarray],
    shares_repeated: Sequence[float],
    chances: Sequence[float],
) -> list[Copies]:
    """Find samples that a client has more than once, beyond the share that is usual at other clients."""
    usual_shares = _medians_of_others(shares_repeated)
    usual_chances = _medians_of_others(chances)

    copies = []
    for client, hashes_of_client in enumerate(hashes):
        num_samples = len(hashes_of_client)
        num_repeated = num_samples - len(np.unique(hashes_of_client))
        # The more samples of few values a client has, the more of them are equal by chance.
        share_by_chance = usual_chances[client] * num_samples
        excess = shares_repeated[client] - max(usual_shares[client], share_by_chance)
        if num_samples < MIN_SAMPLES or num_repeated < MIN_COPIES:
            continue
        if excess > MAX_SHARE_OF_COPIES:
            copies.append(
                Copies(
                    client,
                    other_client=None,
                    count=num_repeated,
                    num_samples=num_samples,
                    excess=excess,
                )
            )
    return copies


def _medians_of_others(numbers: Sequence[float]) -> list[float]:
    """Return the median of all other numbers for each number. It is 0 for a single number."""
    if len(numbers) == 1:
        return [0.0]
    medians = []
    for position in range(len(numbers)):
        other_numbers = np.delete(numbers, position)
        medians.append(float(np.median(other_numbers)))
    return medians


def _shared_copies(
    hashes: Sequence[np.ndarray],
    usual_share: float,
    chance_of_equality: float,
) -> list[Copies]:
    """Find a client's samples that another client also has, beyond the share that is usual or due to chance."""
    clients, other_clients, counts = _common_samples(hashes)
    sizes = np.array([len(samples) for samples in hashes])
    num_samples = sizes[clients]

    excess = _excess(counts, num_samples, sizes[other_clients], usual_share, chance_of_equality)
    is_conspicuous = (excess > MAX_SHARE_OF_COPIES) & (counts >= MIN_COPIES)

    copies = []
    for pair in np.flatnonzero(is_conspicuous):
        copies.append(
            Copies(
                client=int(clients[pair]),
                other_client=int(other_clients[pair]),
                count=int(counts[pair]),
                num_samples=int(num_samples[pair]),
                excess=float(excess[pair]),
            )
        )
    return copies


def _excess(
    counts: np.ndarray,
    num_samples: np.ndarray | int,
    sizes_of_others: np.ndarray,
    usual_share: float,
    chance_of_equality: float,
) -> np.ndarray:
    """Return the share of samples that others have, beyond what is usual or due to chance."""
    share_by_chance = chance_of_equality * sizes_of_others
    deviation = np.sqrt(share_by_chance / num_samples)
    largest_by_chance = share_by_chance + _NUM_DEVIATIONS * deviation
    return np.asarray(counts / num_samples - np.maximum(usual_share, largest_by_chance))


def _common_samples(hashes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the P pairs of clients that have samples in common: each pair's clients, the lower id first, and how many
    of the first one's samples the second one has, int ``[P]`` each.
    """
    samples, owners, counts = _counts_by_sample(hashes)
    num_clients = len(hashes)
    pair_numbers = []
    counts_of_first_owners = []
    # The owners of a sample stand side by side, in ascending order. Each is compared with the ones after it.
    for distance in range(1, MAX_COMPARED + 1):
        is_same_sample = samples[distance:] == samples[:-distance]
        first_owners = owners[:-distance][is_same_sample]
        second_owners = owners[distance:][is_same_sample]
        pair_numbers.append(first_owners * num_clients + second_owners)
        counts_of_first_owners.append(counts[:-distance][is_same_sample])

    pairs, positions = np.unique(np.concatenate(pair_numbers), return_inverse=True)
    common_counts = np.bincount(
        positions, weights=np.concatenate(counts_of_first_owners), minlength=len(pairs)
    )
    clients, other_clients = np.divmod(pairs, num_clients)
    return clients, other_clients, common_counts.astype(int)


def _counts_by_sample(hashes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each sample's number, each of its owners in ascending order, and how often this owner has it."""
    num_clients = len(hashes)
    large_clients = [client for client in range(num_clients) if len(hashes[client]) >= MIN_SAMPLES]
    if not large_clients:
        nothing = np.empty(0, dtype=int)
        return nothing, nothing, nothing

    hashes_by_client = [hashes[client] for client in large_clients]
    owner_of_row = np.repeat(large_clients, list(map(len, hashes_by_client)))
    _, sample_of_row = np.unique(np.concatenate(hashes_by_client), return_inverse=True)
    # A sample and its owner are one number, so that equal rows can be counted.
    keys, counts = np.unique(sample_of_row * num_clients + owner_of_row, return_counts=True)
    samples, owners = np.divmod(keys, num_clients)
    return samples, owners, counts


def _share_repeated(samples: np.ndarray) -> float:
    num_copies = len(samples) - len(np.unique(samples))
    return num_copies / max(len(samples), 1)


def _chance_of_equality(samples: np.ndarray) -> float:
    _, counts = np.unique(samples, return_counts=True)
    num_equal_pairs = (counts * (counts - 1) // 2).sum()
    num_pairs = len(samples) * (len(samples) - 1) // 2
    return float(num_equal_pairs) / max(num_pairs, 1)
