"""ClientMatrix: a cohort's models, and what is worked out from them without a second matrix.

A cohort of k models of P entries is the largest thing that the server holds. Whatever needs the clients' *updates*
d_i = x_i - (client i's start) walks over the matrix in blocks of columns of a fixed size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flsv.functional.divergences import distances

#: Bytes of a block, of which some exist at a time. On a CPU blocks stay in its cache: larger ones are memory that the
#: system hands out anew, up to six times as slow (``tools/bench_memory.py``). On a GPU a block is a launch of a kernel.
BLOCK_BYTES, CPU_BLOCK_BYTES = 2**24, 2**20
#: Entries of one client's update that are worked out at a time, where every client has a start of its own.
LEAST_PIECE = 2**12


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
