"""Compression: base class of compressed updates, with error feedback.

Error feedback (Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019, Algorithm 2): a client adds to its update d what it has not sent so far, e, and keeps
what it does not send now:

    p = d + e,   sends C(p),   e <- p - C(p)

Where the papers, which compress every step's gradient, are silent: here it is a round's update, and a client outside
the cohort keeps its e. Buffers (BatchNorm's statistics) are averages, no steps, and are sent whole.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from flsv.core import Traffic
from flsv.uploads.base import Upload, UploadContext
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for


class Compression(Upload):
    """Base class. Subclasses override :meth:`compress` and :meth:`size`.

    What is compressed is the step away from the model that the server sent, which the server can add it to; it cannot
    where clients go on from models of their own (Standalone, FedFomo, PFedSV) or choose one (IFCA). Of several
    compressions the last one says how much is sent.

    Args:
        error_feedback: keep what is not sent; a vector of parameters at every client.
    """

    def __init__(self, error_feedback: bool = True) -> None:
        self.error_feedback = error_feedback

    @abstractmethod
    def compress(self, update: Tensor, generator: torch.Generator) -> Tensor:
        """The update that the server decodes from the compressed ``update [N]``, parameters only: a new tensor.

        Args:
            update: not to be changed.
            generator: CPU generator that depends on the run's seed, the round and the client.
        """

    @abstractmethod
    def size(self, entries: int, entry_bytes: int) -> Traffic:
        """The size as transmitted.

        Args:
            entries: N.
            entry_bytes: of an entry that is not compressed.
        """

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        if not context.start_sent:
            raise ConfigurationError(
                f"{self!r} compresses a client's step away from the model that the server sent it, and client "
                f"{context.client} started from one that the server did not send. Leave the compression out, or use "
                "a personalizer whose models the server knows."
            )
        # The position tells two compressions of one client apart.
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
