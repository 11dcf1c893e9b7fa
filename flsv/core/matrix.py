"""ClientMatrix: norms, products and sums of a cohort's updates, computed without a second matrix."""
# The cohort's [k, P] models are the server's largest tensor. Computations on the updates therefore process it in blocks
# of columns of a fixed size.

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flsv.functional.distances import distances

#: Bytes of a block on a GPU, where each block costs a kernel launch, and on a CPU, where a block should fit the cache:
#: the system allocates larger blocks anew each time, which is up to six times as slow. A few blocks exist at a time.
BLOCK_BYTES, CPU_BLOCK_BYTES = 2**24, 2**20
#: A matrix that would take more than this fraction of the machine's memory is stored in a file.
LARGE = 0.25
#: File with the memory limit of a container, on Linux.
GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
#: The fewest entries of one client's update to compute at a time, if each client has its own start point.
LEAST_PIECE = 2**12


def empty_rows(count: int, like: Tensor, folder: str | Path = "") -> Tensor:
    """Allocate an uninitialized tensor ``[count, P]`` like the model ``like [P]``. If memory does not suffice, it is a
    memory-mapped file in ``folder``."""
    size = count * like.numel() * like.element_size()
    if (
        like.device.type != "cpu"
        or not hasattr(os, "posix_fallocate")
        or size <= LARGE * memory_bytes()
    ):
        return like.new_empty(count, like.numel())
    with tempfile.NamedTemporaryFile(
        dir=folder if os.path.isdir(folder) else None, prefix=".flsv-cohort-"
    ) as file:
        # Allocate all blocks now: writing into a sparse file on a full disk would kill the process by a signal.
        os.posix_fallocate(file.fileno(), 0, size)
        return torch.from_file(
            file.name, shared=True, size=count * like.numel(), dtype=like.dtype
        ).view(count, -1)


def copied_rows(matrix: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return a copy of the rows ``rows`` of ``matrix``, by default of all."""
    rows = torch.arange(len(matrix)) if rows is None else rows
    place = matrix.untyped_storage().filename if matrix.device.type == "cpu" else None
    if place is None:
        return matrix[rows.to(matrix.device)]
    copy = empty_rows(len(rows), matrix[0], Path(place).parent)
    for row, which in zip(copy, rows.tolist()):
        row.copy_(matrix[which])
    return copy


def memory_bytes() -> int:
    """Return how many bytes of memory this process may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    if GROUP_LIMIT.is_file() and (said := GROUP_LIMIT.read_text().strip()).isdecimal():
        limits.append(int(said))
    return min(limits)


class ClientMatrix:
    """The models of a cohort, and the models that training started from. A client's *update* is the difference.

    Args:
        rows: ``[k, P]``, the clients' models.
        starts: for each of the k clients the model ``[P]`` that it started from, the same tensor object for all that
            started from the global model.
        block_bytes: the size of a block of columns. None for one that suits the device.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> matrix = ClientMatrix(x, [torch.ones(2)] * 2)
        >>> matrix.norms(), matrix.combine(torch.tensor([0.5, 0.5]))
        (tensor([1.0000, 3.6056], dtype=torch.float64), tensor([1., 2.]))
        >>> matrix.gram().tolist()
        [[1.0, 3.0], [3.0, 13.0]]
    """

    def __init__(
        self, rows: Tensor, starts: Sequence[Tensor], block_bytes: int | None = None
    ) -> None:
        self.rows, self.starts = rows, starts
        first = starts[0] if len(starts) else None
        self._common = first if all(start is first for start in starts) else None
        if block_bytes is None:
            block_bytes = CPU_BLOCK_BYTES if rows.device.type == "cpu" else BLOCK_BYTES
            if (
                self._common is None
            ):  # rows are processed one by one, in pieces large enough for one call
                block_bytes = max(block_bytes, len(rows) * rows.element_size() * LEAST_PIECE)
        self._block_bytes = block_bytes

    def until(self, end: int) -> ClientMatrix:
        """Return a view of each vector's first ``end`` entries, such as its parameters."""
        part = ClientMatrix(
            self.rows[:, :end], [start[:end] for start in self.starts], self._block_bytes
        )
        part._common = None if self._common is None else self._common[:end]
        return part

    def __len__(self) -> int:
        return len(self.rows)

    def blocks(self, end: int | None = None) -> Iterator[slice]:
        """Yield slices of about ``block_bytes`` that cover the vectors' entries up to ``end``."""
        end = self.rows.shape[1] if end is None else end
        width = max(1, self._block_bytes // max(1, len(self) * self.rows.element_size()))
        return (slice(begin, min(begin + width, end)) for begin in range(0, end, width))

    def updates(self, columns: slice) -> Tensor:
        """Compute a slice of the k clients' updates, ``[k, width of the slice]``."""
        if self._common is not None:
            return self.rows[:, columns] - self._common[columns]
        return torch.stack(
            [row[columns] - start[columns] for row, start in zip(self.rows, self.starts)]
        )

    def update(self, client: int) -> Tensor:
        """Compute the update ``[P]`` of the client in row ``client``, a new tensor."""
        return self.rows[client] - self.starts[client]

    def combine(self, weights: Tensor, end: int | None = None) -> Tensor:
        """Compute the sum of the k updates, weighted by ``weights [k]``, over the first ``end`` entries."""
        end = self.rows.shape[1] if end is None else end
        result = self.rows.new_empty(end)
        for block in self.blocks(end):
            torch.mv(self.updates(block).T, weights.to(self.rows), out=result[block])
        return result

    def dot(self, vector: Tensor) -> Tensor:
        """Compute the inner product of ``vector`` with as many leading entries of each update, float64 ``[k]``."""
        result = torch.zeros(len(self), dtype=torch.float64, device=self.rows.device)
        for block in self.blocks(len(vector)):
            result += self.updates(block).double() @ vector[block].double()
        return result

    def norms(self, end: int | None = None) -> Tensor:
        """Compute the updates' Euclidean norms over the first ``end`` entries, float64 ``[k]``."""
        # No square overflows.
        if self._common is not None:
            return distances(self.rows[:, :end], self._common[:end])
        return torch.cat(
            [distances(row[None, :end], start[:end]) for row, start in zip(self.rows, self.starts)]
        )

    def gram(self, end: int | None = None) -> Tensor:
        """Compute all inner products of two updates over the first ``end`` entries, float64 ``[k, k]``."""
        result = torch.zeros(len(self), len(self), dtype=torch.float64, device=self.rows.device)
        for block in self.blocks(end):
            part = self.updates(block).double()
            result += part @ part.T
        return result
