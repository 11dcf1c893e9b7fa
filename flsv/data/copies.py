"""Copies of samples: equal samples of two clients, or of one, found by hashes of what a data set holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from flsv.data.loaders import tensors_of
from flsv.utilities.plain_values import digest, is_plain

if TYPE_CHECKING:
    from flsv.data.federation_view import FederationView

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
_ROWS_AT_ONCE = 1024  # samples that are hashed at a time


@dataclass(frozen=True)
class Copies:
    """Samples of a client that another client has, too, or that the client has twice."""

    client: int
    #: None: the client has them twice.
    other_client: int | None
    count: int
    num_samples: int
    #: The share of the client's samples that is more than usual.
    excess: float

    @property
    def strength(self) -> float:
        """How strong the doubt is, beyond 1."""
        return STRONG_DOUBT * self.excess / MAX_SHARE_OF_COPIES

    def text(self, client_names: Sequence[str]) -> str:
        """Return what is told of the client's samples."""
        part = f"{self.count} of {self.num_samples}"
        if self.other_client is None:
            return f"{part} are there twice"
        return f"{part} are samples of {client_names[self.other_client]}, too"


def copies_in(data: FederationView) -> list[Copies]:
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
    shares_twice = [_share_twice(samples) for samples in hashes]
    chances = [_chance_of_equality(samples) for samples in hashes]
    copies: list[Copies] = []
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
    return sorted(copies, key=lambda found: -found.excess)


def _twice(
    client: int,
    samples: np.ndarray,
    shares_twice: Sequence[float],
    chances: Sequence[float],
) -> Iterator[Copies]:
    """Find a client's samples that it has twice, beyond the share that other clients have twice."""
    usual_share = 0.0
    if len(shares_twice) > 1:
        usual_share = float(np.median([*shares_twice[:client], *shares_twice[client + 1 :]]))
        # The more samples of few values a client has, the more of them are equal by chance.
        usual_chance = float(np.median([*chances[:client], *chances[client + 1 :]]))
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
    return 1 - len(np.unique(samples)) / max(len(samples), 1)


def _chance_of_equality(samples: np.ndarray) -> float:
    """Return the share of pairs of samples that are equal."""
    _, counts = np.unique(samples, return_counts=True)
    num_equal_pairs = (counts * (counts - 1) // 2).sum()
    num_pairs = len(samples) * (len(samples) - 1) // 2
    return float(num_equal_pairs) / max(num_pairs, 1)


# ---- hashes of samples


def hash_samples(dataset: Dataset[Any], indices: Tensor, key: bytes = b"") -> np.ndarray | None:
    """Hash each sample of a data set at ``indices``, uint64 ``[n]``. With a ``key`` only who has it can compare them.

    None is returned for a data set that does not hold its samples, but reads or makes them one by one.
    """
    if type(dataset) is Subset:
        outer_indices = torch.as_tensor(dataset.indices, dtype=torch.long)
        return hash_samples(dataset.dataset, outer_indices[indices], key)
    if type(dataset) is ConcatDataset:
        return _hash_parts(dataset, indices, key)

    columns = _columns_of(dataset)
    if not columns:
        return None
    if len(indices) == 0:
        return np.empty(0, dtype=np.uint64)
    hashes = []
    for rows in indices.split(_ROWS_AT_ONCE):
        bytes_by_column = [_bytes_of_rows(column, rows) for column in columns]
        for parts in zip(*bytes_by_column):
            sample_hash = blake2b(key=key, digest_size=8)
            for part in parts:
                sample_hash.update(part)
            hashes.append(sample_hash.digest())
    return np.frombuffer(b"".join(hashes), dtype=np.uint64)


def _hash_parts(
    dataset: ConcatDataset[Any],
    indices: Tensor,
    key: bytes,
) -> np.ndarray | None:
    hashes = np.empty(len(indices), dtype=np.uint64)
    first_index = 0
    for part in dataset.datasets:
        length = len(part)  # type: ignore[arg-type]  # torch's ConcatDataset asks it, too
        is_in_part = (indices >= first_index) & (indices < first_index + length)
        hashes_of_part = hash_samples(part, indices[is_in_part] - first_index, key)
        if hashes_of_part is None:
            return None
        hashes[is_in_part.numpy()] = hashes_of_part
        first_index += length
    return hashes


def _columns_of(dataset: Any) -> list[Any]:
    """Return what a data set holds of its samples, each of its length. Empty if that may be labels only."""
    tensors, rows = tensors_of(dataset)
    if tensors is not None and rows is None:
        return list(tensors)
    files = _files_of(dataset)
    if files:
        return [files]
    if isinstance(dataset, list | tuple):
        return [dataset] if is_plain(dataset) else []

    columns = []
    for _, value in sorted(getattr(dataset, "__dict__", {}).items()):
        values = [value]
        if isinstance(value, list | tuple) and len(value) != len(dataset):
            values = list(value)  # such as a TensorDataset's tensors
        columns += [column for column in values if _is_column(column, len(dataset))]
    has_inputs = any(isinstance(column, list | tuple) or column.ndim > 1 for column in columns)
    return columns if has_inputs else []


def _files_of(dataset: Any) -> list[Path]:
    from torchvision.datasets import DatasetFolder

    if not isinstance(dataset, DatasetFolder):
        return []
    return [Path(path) for path, _ in dataset.samples]


def _is_column(value: Any, length: int) -> bool:
    if isinstance(value, np.memmap):
        return False  # it may be larger than the memory
    if isinstance(value, Tensor):
        return value.shape[:1] == (length,) and value.layout == torch.strided
    if isinstance(value, np.ndarray):
        return value.shape[:1] == (length,) and value.dtype.kind in "biufc"
    return isinstance(value, list | tuple) and len(value) == length and is_plain(value)


def _bytes_of_rows(column: Any, rows: Tensor) -> list[bytes]:
    """Return the bytes of a column's entries at ``rows``."""
    if isinstance(column, list | tuple):
        return [_bytes_of_entry(column[index]) for index in rows.tolist()]
    if isinstance(column, np.ndarray):
        entries = column[rows.numpy()]
        return [entry.tobytes() for entry in entries]
    tensor = column[rows.to(column.device)].detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat_entries = tensor.reshape(len(rows), -1).contiguous()
    return [entry.tobytes() for entry in flat_entries.view(torch.uint8).numpy()]


def _bytes_of_entry(entry: Any) -> bytes:
    if isinstance(entry, Path):
        return entry.read_bytes()
    return digest([entry])
