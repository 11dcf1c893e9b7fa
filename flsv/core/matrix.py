"""ClientMatrix: a cohort's models, and what is worked out from them without a second matrix.

A cohort of k models of P entries is the largest thing that the server holds. Whatever needs the clients' *updates*
d_i = x_i - (client i's start) walks over the matrix in blocks of columns of a fixed size.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flsv.functional.distances import distances

#: Bytes of a block, of which some exist at a time. On a CPU blocks stay in its cache: larger ones are memory that the
#: system hands out anew, up to six times as slow. On a GPU a block is a launch of a kernel.
BLOCK_BYTES, CPU_BLOCK_BYTES = 2**24, 2**20
#: The part of the machine's memory from which on a matrix lies in a file.
LARGE = 0.25
#: A container's limit, under Linux.
GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
#: Entries of one client's update that are worked out at a time, where every client has a start of its own.
LEAST_PIECE = 2**12


def empty_rows(count: int, like: Tensor, folder: str | Path = "") -> Tensor:
    """``[count, P]``, unwritten, for as many models like ``like [P]``.

    On a CPU under Linux, rows that would take more than a quarter of the machine's memory lie in a mapped file, which
    has no name and is gone when they are, however the process ends. The system keeps of it in memory what there is
    room for; numbers are the same to the bit.

    Args:
        count: of the rows.
        like: of their length, type and device.
        folder: of the file, on a disk; one that is not there (or is on another machine): the system's temporary one.

    Raises:
        OSError: the disk has no room for it.

    Example:
        >>> empty_rows(3, torch.zeros(2)).shape
        torch.Size([3, 2])
    """
    size = count * like.numel() * like.element_size()
    if like.device.type != "cpu" or not hasattr(os, "posix_fallocate") or size <= LARGE * memory_bytes():
        return like.new_empty(count, like.numel())
    with tempfile.NamedTemporaryFile(dir=folder if os.path.isdir(folder) else None, prefix=".flsv-cohort-") as file:
        # Of a file with holes a full disk is found out by a signal that kills the process.
        os.posix_fallocate(file.fileno(), 0, size)
        return torch.from_file(file.name, shared=True, size=count * like.numel(), dtype=like.dtype).view(count, -1)


def copied_rows(matrix: Tensor, rows: Tensor | None = None) -> Tensor:
    """A copy of these rows (integers) of a matrix, or of all of them; in a file where it lies in one."""
    rows = torch.arange(len(matrix)) if rows is None else rows
    place = matrix.untyped_storage().filename if matrix.device.type == "cpu" else None
    if place is None:
        return matrix[rows.to(matrix.device)]
    copy = empty_rows(len(rows), matrix[0], Path(place).parent)
    for row, which in zip(copy, rows.tolist()):
        row.copy_(matrix[which])
    return copy


def memory_bytes() -> int:
    """What this process may use: the machine's memory, or what its control group leaves it of that."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    if GROUP_LIMIT.is_file() and (said := GROUP_LIMIT.read_text().strip()).isdecimal():
        limits.append(int(said))
    return min(limits)


class ClientMatrix:
    """The models ``[k, P]`` of a cohort and their start points.

    Args:
        rows: ``[k, P]``.
        starts: of every client the vector ``[P]`` that it started from; one and the same for those that started from
            the global model.
        block_bytes: of the blocks; None: what suits the device.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> matrix = ClientMatrix(x, [torch.ones(2)] * 2)
        >>> matrix.norms(), matrix.combine(torch.tensor([0.5, 0.5]))
        (tensor([1.0000, 3.6056], dtype=torch.float64), tensor([1., 2.]))
        >>> matrix.gram().tolist()
        [[1.0, 3.0], [3.0, 13.0]]
    """

    def __init__(self, rows: Tensor, starts: Sequence[Tensor], block_bytes: int | None = None) -> None:
        self.rows, self.starts = rows, starts
        first = starts[0] if len(starts) else None
        self._common = first if all(start is first for start in starts) else None
        if block_bytes is None:
            block_bytes = CPU_BLOCK_BYTES if rows.device.type == "cpu" else BLOCK_BYTES
            if self._common is None:  # rows are taken one by one, each in pieces that are worth a call
                block_bytes = max(block_bytes, len(rows) * rows.element_size() * LEAST_PIECE)
        self._block_bytes = block_bytes

    def until(self, end: int) -> ClientMatrix:
        """The first ``end`` columns, such as the parameters without the buffers: a view."""
        part = ClientMatrix(self.rows[:, :end], [start[:end] for start in self.starts], self._block_bytes)
        part._common = None if self._common is None else self._common[:end]
        return part

    def __len__(self) -> int:
        return len(self.rows)

    def blocks(self, end: int | None = None) -> Iterator[slice]:
        """Slices of columns, up to ``end``, of a fixed number of bytes."""
        end = self.rows.shape[1] if end is None else end
        width = max(1, self._block_bytes // max(1, len(self) * self.rows.element_size()))
        return (slice(begin, min(begin + width, end)) for begin in range(0, end, width))

    def updates(self, columns: slice) -> Tensor:
        """``[k, width]``: the clients' updates in these columns, a new tensor."""
        if self._common is not None:
            return self.rows[:, columns] - self._common[columns]
        return torch.stack([row[columns] - start[columns] for row, start in zip(self.rows, self.starts)])

    def update(self, client: int) -> Tensor:
        """``[P]``: the update in one row, a new tensor."""
        return self.rows[client] - self.starts[client]

    def combine(self, weights: Tensor, end: int | None = None) -> Tensor:
        """``[end]``: the updates' weighted sum, sum_i weights_i d_i."""
        end = self.rows.shape[1] if end is None else end
        result = self.rows.new_empty(end)
        for block in self.blocks(end):
            torch.mv(self.updates(block).T, weights.to(self.rows), out=result[block])
        return result

    def dot(self, vector: Tensor) -> Tensor:
        """float64 ``[k]``: every update's product with a vector ``[end]``."""
        result = torch.zeros(len(self), dtype=torch.float64, device=self.rows.device)
        for block in self.blocks(len(vector)):
            result += self.updates(block).double() @ vector[block].double()
        return result

    def norms(self, end: int | None = None) -> Tensor:
        """float64 ``[k]``: Euclidean norms of the updates, over the first ``end`` entries. They cannot overflow."""
        if self._common is not None:
            return distances(self.rows[:, :end], self._common[:end])
        return torch.cat([distances(row[None, :end], start[:end]) for row, start in zip(self.rows, self.starts)])

    def gram(self, end: int | None = None) -> Tensor:
        """float64 ``[k, k]``: products of the updates with each other."""
        result = torch.zeros(len(self), len(self), dtype=torch.float64, device=self.rows.device)
        for block in self.blocks(end):
            part = self.updates(block).double()
            result += part @ part.T
        return result
