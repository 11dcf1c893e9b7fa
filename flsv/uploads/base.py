"""Upload: changes a client's update before it is sent; and compression, with error feedback.

What is sent: the k largest entries (Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP
2017), or all of them in a few bits (Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding", NeurIPS 2017).

Error feedback (Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML 2019, Algorithm 2): a client adds to its update d what it has not sent so far, e, and keeps
what it does not send now:

    p = d + e,   sends C(p),   e <- p - C(p)

Where the papers, which compress every step's gradient, are silent: here it is a round's update, and a client outside
the cohort keeps its e. Buffers (BatchNorm's statistics) are averages, no steps, and are sent whole.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor
from torch.nn.functional import pad

from flsv.core import State, Traffic
from flsv.core.parameter_space import ParameterSpace
from flsv.utilities.declared import Count, Declared
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for


@dataclass(frozen=True)
class UploadContext:
    """Which client sends an update, and in which round.

    Args:
        client: the client's number.
        num_clients: clients of the federation.
        num_parameters: how many leading entries of the update are parameters; the rest are buffers.
        round_index: the round, from 0.
        seed: the run's.
        state: what the client keeps between rounds.
        position: of the upload among all of them.
        start_sent: whether the server sent the model that the client started from, and so knows it.
        start: ``[P]``, what the client started from; None where nobody says.
    """

    client: int
    num_clients: int
    num_parameters: int
    round_index: int
    seed: int = 0
    state: State = field(default_factory=dict)
    position: int = 0
    start_sent: bool = True
    start: Tensor | None = None

    def at(self, position: int) -> UploadContext:
        """The same for another upload."""
        return replace(self, position=position)


class Upload(Declared, ABC):
    """Base class: an attack, noise, compression.

    Attributes:
        reference: what the update is the step away from: the client's own ``"start"``, or the ``"global"`` model, which
            everybody knows.
    """

    reference: Literal["start", "global"] = "start"
    #: Where it stands in a list: attacks (0), which keep to the clipping; privacy (1), whose noise is in whatever is
    #: compressed; all else (2); colluders (3), who look at what all the others are about to send.
    place: ClassVar[int] = 2

    @abstractmethod
    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        """The update that leaves instead of ``update [P]``: a new tensor, or ``update`` itself if unchanged."""

    def traffic(self, before: Traffic, sent: Tensor, context: UploadContext) -> Traffic:
        """The size of ``sent [P]`` as it is transmitted.

        Args:
            before: how large it was before this upload; by default it stays so.
            sent: what :meth:`apply` gave.
            context: who sends it.
        """
        return before

    def tell(self, name: str, value: float, context: UploadContext) -> float:
        """The number that the client reports instead of the true one, about its training or about a model.

        Args:
            name: ``"loss"``, of its training; ``"score"`` and ``"gain"``, of a model on its validation samples.
            value: what it has found out.
            context: who says it.
        """
        return value

    def check(self, space: ParameterSpace) -> None:
        """Before training, whether it can be done with this module's vectors.

        Raises:
            ConfigurationError: it cannot.
        """


def check_order(uploads: Sequence[Upload]) -> None:
    """Check the order of uploads: attacks, privacy, compression, collusion.

    Raises:
        ConfigurationError: an attack behind privacy, or privacy behind compression; privacy twice.
    """
    places = [each.place for each in uploads]
    if places != sorted(places) or places.count(1) > 1:
        raise ConfigurationError(
            f"uploads={list(uploads)}: expected attacks first, then one GaussianPrivacy, then compression, then "
            "collusion. "
            "Noise that is added before an attack, or to what is compressed already, is not what its epsilon says."
        )


def upload(
    uploads: Sequence[Upload], vector: Tensor, start: Tensor, global_vector: Tensor, context: UploadContext
) -> tuple[Tensor, Traffic]:
    """A client's model as it leaves the client.

    Args:
        uploads: what happens to its update, in this order.
        vector: ``[P]``, what it has trained; returned itself where nothing happens.
        start: ``[P]``, what it started from.
        global_vector: ``[P]``, the global model at the start of the round.
        context: who it is.

    Returns:
        ``[P]``, and how large it is on its way.
    """
    traffic = Traffic(vector.numel(), float(vector.numel() * vector.element_size()))
    context, position = replace(context, start=start), 0
    for reference, group in groupby(uploads, key=lambda each: each.reference):
        origin = start if reference == "start" else global_vector
        update = sent = vector - origin
        for each in group:
            at = context.at(position)
            sent = each.apply(sent, at)
            traffic = each.traffic(traffic, sent, at)
            position += 1
        if sent is not update:  # whom nothing concerns stays as it is to the bit
            vector = torch.add(origin, sent)
    return vector, traffic


def sanitize_report(uploads: Sequence[Upload], context: UploadContext, name: str, value: float) -> float:
    """The number that a client reports after all uploads, see :meth:`Upload.tell`.

    Example:
        >>> sanitize_report([], UploadContext(0, 2, num_parameters=2, round_index=0), "loss", 2.3)
        2.3
    """
    for position, each in enumerate(uploads):
        value = each.tell(name, value, context.at(position))
    return value


#: Of an index among the parameters.
INDEX_BYTES = 4


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


class TopK(Compression):
    """The k = ceil(share N) entries of the largest magnitude, over all layers: k values and k indices of 4 bytes.

    Args:
        share: in (0, 1]; above 1/2 it is more than the whole update.
        error_feedback: see :class:`Compression`; without it the small entries never arrive.

    Raises:
        ConfigurationError: a share out of range.

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


class Quantized(Compression):
    """Encodes each entry as a signed integer of ``bits`` bits, times its bucket's scale.

    The scale is the bucket's largest magnitude over L = 2^(bits-1) - 1, as in QSGD's experiments (its theory has the
    Euclidean norm). With l = p / scale the whole number is floor(l + u), u uniform in [0, 1): right on average; or,
    deterministic, u = 1/2: the nearest.

    Args:
        bits: 2 to 8.
        bucket: consecutive entries that share a scale.
        stochastic: round at random, without bias.
        error_feedback: see :class:`Compression`.

    Raises:
        ConfigurationError: an argument out of range.

    Example:
        >>> coarse = Quantized(bits=3, bucket=2, stochastic=False)  # L = 3
        >>> coarse.compress(torch.tensor([3.0, 0.9, -6.0, 1.1]), torch.Generator())
        tensor([ 3.,  1., -6.,  2.])
        >>> coarse.size(entries=4, entry_bytes=4)
        Traffic(numbers=6, bytes=10.0)
    """

    def __init__(
        self,
        bits: Annotated[int, Ge(2), Le(8)] = 8,
        bucket: Count = 512,
        stochastic: bool = True,
        error_feedback: bool = True,
    ) -> None:
        super().__init__(error_feedback)
        self.bits = bits
        self.bucket = bucket
        self.stochastic = stochastic

    def compress(self, update: Tensor, generator: torch.Generator) -> Tensor:
        entries, levels = len(update), 2 ** (self.bits - 1) - 1
        buckets = pad(update, (0, -entries % self.bucket)).view(-1, self.bucket)
        scale = buckets.abs().amax(1, keepdim=True) / levels
        steps = buckets / torch.where(scale == 0, 1, scale)
        if self.stochastic:
            steps += torch.rand(steps.shape, generator=generator, dtype=steps.dtype).to(steps.device)
        else:
            steps += 0.5
        return (steps.floor_().clamp_(-levels, levels) * scale).flatten()[:entries]

    def size(self, entries: int, entry_bytes: int) -> Traffic:
        scales = math.ceil(entries / self.bucket)
        return Traffic(entries + scales, float(math.ceil(entries * self.bits / 8) + scales * entry_bytes))
