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
#: the system allocates larger blocks again each time, which is up to six times as slow. A few blocks exist at a time.
BLOCK_BYTES = 2**24
CPU_BLOCK_BYTES = 2**20
#: A matrix that would take more than this fraction of the machine's memory is stored in a file.
MAX_SHARE_OF_MEMORY = 0.25
#: File with the memory limit of a container, on Linux.
CONTAINER_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")
#: The smallest number of elements of a client's update to compute at a time, if clients have different start points.
MIN_PIECE_ENTRIES = 2**12


def empty_rows(
    count: int,
    like: Tensor,
    folder: str | Path = "",
) -> Tensor:
    """Allocate an uninitialized tensor ``[count, P]`` like the model ``like [P]``. If memory does not suffice, it is a
    memory-mapped file in ``folder``."""
    if like.device.type != "cpu" or not hasattr(os, "posix_fallocate"):
        return like.new_empty(count, like.numel())
    num_bytes = count * like.numel() * like.element_size()
    if num_bytes <= MAX_SHARE_OF_MEMORY * memory_bytes():
        return like.new_empty(count, like.numel())
    return _rows_in_file(count, like, folder)


def _rows_in_file(
    count: int,
    like: Tensor,
    folder: str | Path,
) -> Tensor:
    """Allocate a tensor ``[count, P]`` like ``like [P]`` in a file that is deleted with it."""
    num_entries = count * like.numel()
    folder_of_file = None
    if os.path.isdir(folder):
        folder_of_file = folder

    with tempfile.NamedTemporaryFile(dir=folder_of_file, prefix=".flsv-cohort-") as file:
        # Allocate all blocks now: writing into a sparse file on a full disk would kill the process by a signal.
        num_bytes = num_entries * like.element_size()
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        entries = torch.from_file(file.name, shared=True, size=num_entries, dtype=like.dtype)
        return entries.view(count, -1)


def copied_rows(matrix: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return a copy of the rows ``rows`` of ``matrix``, by default of all rows."""
    if rows is None:
        rows = torch.arange(len(matrix))
    file_name = None  # of a matrix in ordinary memory
    if matrix.device.type == "cpu":
        file_name = matrix.untyped_storage().filename
    if file_name is None:
        return matrix[rows.to(matrix.device)]

    folder = Path(file_name).parent
    copy = empty_rows(len(rows), matrix[0], folder)
    for copied_row, row_index in zip(copy, rows.tolist()):
        copied_row.copy_(matrix[row_index])
    return copy


def memory_bytes() -> int:
    """Return how many bytes of memory this process may use."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not CONTAINER_LIMIT_FILE.is_file():
        return machine_bytes
    limit = CONTAINER_LIMIT_FILE.read_text(encoding="utf-8").strip()
    if not limit.isdecimal():  # "max": there is no limit
        return machine_bytes
    return min(machine_bytes, int(limit))


def common_model(starts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the tensor that all ``starts`` are identical to. None: they differ, are unknown, or there are none."""
    if len(starts) == 0:
        return None
    initial_model = starts[0]
    if any(model is not initial_model for model in starts):
        return None
    return initial_model


class ClientMatrix:
    """The models of a cohort, and the models that training started from. A client's *update* is the difference.

    Args:
        rows: ``[k, P]``, the clients' models.
        starts: for each of the k clients the model ``[P]`` that it started from, the same tensor object for all that
            started from the global model.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> matrix = ClientMatrix(x, [torch.ones(2)] * 2)
        >>> matrix.norms(), matrix.combine(torch.tensor([0.5, 0.5]))
        (tensor([1.0000, 3.6056], dtype=torch.float64), tensor([1., 2.]))
        >>> matrix.gram().tolist()
        [[1.0, 3.0], [3.0, 13.0]]
    """

    def __init__(self, rows: Tensor, starts: Sequence[Tensor]) -> None:
        self.rows = rows
        self.starts = starts
        self._common_start = common_model(starts)
        self._block_bytes = self._suitable_block_bytes()

    def _suitable_block_bytes(self) -> int:
        is_on_cpu = self.rows.device.type == "cpu"
        block_bytes = CPU_BLOCK_BYTES if is_on_cpu else BLOCK_BYTES
        processes_row_by_row = self._common_start is None
        if processes_row_by_row:
            # Each row's part of a block is large enough for a separate call.
            bytes_per_column = len(self.rows) * self.rows.element_size()
            block_bytes = max(block_bytes, MIN_PIECE_ENTRIES * bytes_per_column)
        return block_bytes

    def first_columns(self, end: int) -> ClientMatrix:
        """Return a view of each vector's first ``end`` elements, such as its parameters."""
        rows = self.rows[:, :end]
        initial_models = [model[:end] for model in self.starts]
        matrix = ClientMatrix(rows, initial_models)
        matrix._block_bytes = self._block_bytes
        # The constructor compares models by identity, and each slice is a new object.
        if self._common_start is None:
            matrix._common_start = None
        else:
            matrix._common_start = self._common_start[:end]
        return matrix

    def __len__(self) -> int:
        return len(self.rows)

    def blocks(self, end: int | None = None) -> Iterator[slice]:
        """Yield slices of about ``block_bytes`` that cover the vectors' elements up to ``end``."""
        if end is None:
            end = self.rows.shape[1]
        column_bytes = len(self) * self.rows.element_size()
        width = max(1, self._block_bytes // max(1, column_bytes))
        for begin in range(0, end, width):
            yield slice(begin, min(begin + width, end))

    def updates(self, columns: slice) -> Tensor:
        """Compute a slice of the k clients' updates, ``[k, width of the slice]``."""
        if self._common_start is not None:
            return self.rows[:, columns] - self._common_start[columns]
        updates = [
            row[columns] - initial_model[columns]
            for row, initial_model in zip(self.rows, self.starts)
        ]
        return torch.stack(updates)

    def update(self, client: int) -> Tensor:
        """Compute the update ``[P]`` of the client in row ``client``, a new tensor."""
        return self.rows[client] - self.starts[client]

    def combine(self, weights: Tensor) -> Tensor:
        """Compute the sum of the k updates, weighted by ``weights [k]``."""
        weights = weights.to(self.rows)
        combined = self.rows.new_empty(self.rows.shape[1])
        for block in self.blocks():
            updates = self.updates(block)  # [k, b]
            torch.mv(updates.T, weights, out=combined[block])
        return combined

    def dot(self, vector: Tensor) -> Tensor:
        """Compute the inner product of ``vector`` with as many leading elements of each update, float64 ``[k]``."""
        device = self.rows.device
        products = torch.zeros(len(self), dtype=torch.float64, device=device)
        for block in self.blocks(len(vector)):
            updates = self.updates(block).double()
            products += updates @ vector[block].double()
        return products

    def norms(self) -> Tensor:
        """Compute the updates' Euclidean norms, float64 ``[k]``."""
        # `distances` scales before it squares, so that nothing overflows.
        if self._common_start is not None:
            return distances(self.rows, self._common_start)
        norms = [
            distances(row[None], initial_model)
            for row, initial_model in zip(self.rows, self.starts)
        ]
        return torch.cat(norms)

    def gram(self) -> Tensor:
        """Compute all inner products of two updates, float64 ``[k, k]``."""
        size = len(self)
        gram = torch.zeros(size, size, dtype=torch.float64, device=self.rows.device)
        for block in self.blocks():
            updates = self.updates(block).double()
            gram += updates @ updates.T
        return gram
