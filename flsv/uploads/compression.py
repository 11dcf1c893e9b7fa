"""Compression of updates.

**Error feedback** (Seide et al., Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD
and other Gradient Compression Schemes", ICML 2019, Algorithm 2): a client adds to its update d the error e, the sum of
all parts that it has not sent so far. It sends the compression C of the result, and stores the rest as the new error:

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

    After a client's training :meth:`compress` replaces its update by a compressed one, and :meth:`size` returns its
    size in bytes. Subclasses override both. If a loop has several compressions, the size is that of the last. The
    server adds the compressed update to the model that it sent. So compression raises an error if clients continue
    from models of their own (Standalone, FedFomo, PFedSV) or choose their initial model (IFCA).

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
    def size(self, num_parameters: int, parameter_bytes: int) -> Traffic:
        """Return the traffic, in numbers and in bytes, that one compressed update takes.

        Args:
            num_parameters: N, the number of parameters.
            parameter_bytes: number of bytes of one parameter without compression.
        """

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        self._check_start(context)
        # The position separates the errors of two compressions of one client.
        error_name = f"upload.{context.position}.error"
        parameters = update[: context.num_parameters]
        buffers = update[context.num_parameters :]
        if self.error_feedback and error_name in context.state:
            parameters = parameters + context.state[error_name]
        generator = generator_for(
            context.seed,
            "compression",
            context.position,
            context.round_index,
            context.client,
        )
        compressed = self.compress(parameters, generator)
        if self.error_feedback:
            context.state[error_name] = parameters - compressed
        return torch.cat([compressed, buffers])

    def _check_start(self, context: UploadContext) -> None:
        if not context.start_sent:
            raise ConfigurationError(
                f"{self!r} compresses the difference between a client's model and the model that the server sent, but "
                f"client {context.client} started from a model that the server did not send. Remove the compression, "
                "or use a personalizer whose models the server sends."
            )

    def traffic(self, previous: Traffic, sent: Tensor, context: UploadContext) -> Traffic:
        buffers = len(sent) - context.num_parameters
        uncompressed = Traffic(buffers, float(buffers * sent.element_size()))
        return self.size(context.num_parameters, sent.element_size()) + uncompressed


#: Number of bytes of an element's index.
INDEX_BYTES = 4


class TopK(Compression):
    """Compression to the k = ceil(share N) elements of largest magnitude among all N parameters.

    An element is sent as its value and an index of 4 bytes.

    Args:
        share: the share of elements that are sent, in (0, 1]. Above 1/2 they take more bytes than the whole update.
        error_feedback: whether a client adds the part that it did not send to the update of its next round, see
            :class:`flsv.uploads.Compression`. Without it small elements are never sent.

    Raises:
        ConfigurationError: the share is out of range.

    Example:
        >>> TopK(share=0.5).compress(torch.tensor([1.0, -3.0, 2.0, 0.0]), torch.Generator())
        tensor([ 0., -3.,  2.,  0.])
        >>> TopK(share=0.5).size(num_parameters=4, parameter_bytes=4)
        Traffic(numbers=4, bytes=16.0)
    """

    def __init__(
        self, share: Annotated[float, Gt(0), Le(1)] = 0.05, error_feedback: bool = True
    ) -> None:
        super().__init__(error_feedback)
        self.share = share

    def compress(self, update: Tensor, generator: torch.Generator) -> Tensor:
        count = self._num_sent(len(update))
        largest = update.abs().topk(count, sorted=False).indices
        return torch.zeros_like(update).index_copy_(0, largest, update[largest])

    def size(self, num_parameters: int, parameter_bytes: int) -> Traffic:
        count = self._num_sent(num_parameters)
        return Traffic(2 * count, float(count * (parameter_bytes + INDEX_BYTES)))

    def _num_sent(self, num_parameters: int) -> int:
        return math.ceil(self.share * num_parameters)
