"""TopK: compression of an update to its k largest entries.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.core import Traffic
from flsv.uploads.compression import Compression

#: Number of bytes of an entry's index.
INDEX_BYTES = 4


class TopK(Compression):
    """Compression to the k = ceil(share N) entries of largest magnitude among all N parameters.

    An entry is sent as its value and an index of 4 bytes.

    Args:
        share: the share of entries that are sent, in (0, 1]; above 1/2 they take more bytes than the whole update.
        error_feedback: whether a client adds the part that it did not send to the update of its next round, see
            :class:`flsv.uploads.Compression`; without it small entries are never sent.

    Raises:
        ConfigurationError: the share is out of range.

    Example:
        >>> TopK(share=0.5).compress(torch.tensor([1.0, -3.0, 2.0, 0.0]), torch.Generator())
        tensor([ 0., -3.,  2.,  0.])
        >>> TopK(share=0.5).size(entries=4, entry_bytes=4)
        Traffic(numbers=4, bytes=16.0)
    """

    def __init__(self, share: Annotated[float, Gt(0), Le(1)] = 0.05, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        self.share = share

    def compress(self, update: Tensor, generator: torch.Generator) -> Tensor:
        largest = update.abs().topk(self._kept(len(update)), sorted=False).indices
        return torch.zeros_like(update).index_copy_(0, largest, update[largest])

    def size(self, entries: int, entry_bytes: int) -> Traffic:
        kept = self._kept(entries)
        return Traffic(2 * kept, float(kept * (entry_bytes + INDEX_BYTES)))

    def _kept(self, entries: int) -> int:
        return math.ceil(self.share * entries)
