"""Compression of updates with error feedback: the base class, and TopK.

Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019, Algorithm 2): a client adds to its update d the error e, the sum of all parts that it
has not sent so far. It sends the compression C of the result, and stores the rest as the new error:

    p = d + e,   sends C(p),   e <- p - C(p)

The papers compress the gradient of every step. Here the update of a round is compressed, and a client that does not
take part keeps its e. Buffers (BatchNorm's statistics) are averages, not steps, and are sent uncompressed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.core import Traffic
from flsv.uploads.base import Upload, UploadContext
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for


class Compression(Upload):
    """Base class of compression methods.

    After a client's training :meth:`compress` replaces its update by a compressed one, and :meth:`size` gives the bytes
    that this takes. Subclasses override both. If a loop has several compressions, the size is the last one's. The
    server adds the compressed update to the model that it sent. So compression is refused if clients continue from
    models of their own (Standalone, FedFomo, PFedSV) or choose their start model (IFCA).

    Args:
        error_feedback: whether a client stores the part of an update that it did not send, one number per parameter,
            and adds it to its next update.
    """

    def __init__(self, error_feedback: bool = True) -> None:
        self.error_feedback = error_feedback

    @abstractmethod
    def compress(self, update: Tensor, generator: torch.Generator) -> Tensor:
        """Compress an update. Return it as the server decodes it, a new tensor ``[N]``.

        Args:
            update: the update of the N parameters, ``[N]``, without buffers. Not to be changed in place.
            generator: CPU generator that depends on the run's seed, the round and the client.
        """

    @abstractmethod
    def size(self, entries: int, entry_bytes: int) -> Traffic:
        """Return the traffic, in numbers and in bytes, that one compressed update takes.

        Args:
            entries: N, the number of parameters.
            entry_bytes: number of bytes of one parameter without compression.
        """

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        if not context.start_sent:
            raise ConfigurationError(
                f"{self!r} compresses a client's step away from the model that the server sent it, and client "
                f"{context.client} started from one that the server did not send. Leave the compression out, or use "
                "a personalizer whose models the server knows."
            )
        # With the position, two compressions of one client have errors of their own.
        name = f"upload.{context.position}.error"
        wanted = update[: context.num_parameters]
        if self.error_feedback and name in context.state:
            wanted = wanted + context.state[name]
        path = ("compression", context.position, context.round_index, context.client)
        sent = self.compress(wanted, generator_for(context.seed, *path))
        if self.error_feedback:
            context.state[name] = wanted - sent
        return torch.cat([sent, update[context.num_parameters :]])

    def traffic(self, before: Traffic, sent: Tensor, context: UploadContext) -> Traffic:
        buffers = len(sent) - context.num_parameters
        whole = Traffic(buffers, float(buffers * sent.element_size()))
        return self.size(context.num_parameters, sent.element_size()) + whole


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
