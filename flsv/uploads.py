"""Upload transformations: changes that a client makes to its update before it sends it, such as attacks and privacy.

**Compression with error feedback** (Seide et al., Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD
and other Gradient Compression Schemes", ICML 2019, Algorithm 2): a client adds to its update d the error e, the sum of
all parts that it has not sent so far. It sends the compression C of the result, and stores the rest as the new error:

    p = d + e,   sends C(p),   e <- p - C(p)

The papers compress the gradient of every step. Here the update of a round is compressed, and a client that does not
take part keeps its e. Buffers (BatchNorm's statistics) are averages, not steps, and are sent uncompressed.

Tier: provisional.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.core import State, Traffic
from flsv.core.parameter_space import ParameterSpace
from flsv.utilities.declared import ValidatedArguments
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for

__all__ = [
    "Compression",
    "JointUpload",
    "PrivateUpload",
    "TopK",
    "Upload",
    "UploadContext",
    "check_uploads",
    "sanitize_report",
    "upload",
]


@dataclass(frozen=True)
class UploadContext:
    """Context of an upload transformation: the client, the round, and the state that the client stores.

    Args:
        client: the client's id.
        num_clients: number of clients of the federation.
        num_parameters: number of leading elements of the update that are parameters. The rest are buffers.
        round_index: the round, from 0.
        seed: the run's seed.
        state: tensors by name that the client keeps between rounds. Upload transformations may change them.
        position: index of the transformation in the loop's list ``uploads``.
        start_sent: whether the server itself sent the model that the client started from.
        start: the model ``[P]`` from which the client started its training. None if it is not known.
        secret: key of the noise that protects the client, which only the client knows. It differs between the server's
            messages and between the client's stored states. If empty, as in a simulation, the noise is drawn from
            ``seed``.
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
    secret: bytes = field(default=b"", repr=False)


_PLACE_OF_PRIVACY = 1  # see Upload.place


class Upload(ValidatedArguments, ABC):
    """Base class of upload transformations, which change a client's update before it is sent.

    After a client's training, :meth:`apply` of each of the loop's ``uploads`` is called at the client, one after the
    other.

    Attributes:
        reference: the model that is subtracted from the trained model to get the update: ``"start"``, the one from
            which the client started, or ``"global"``, the global model, which all clients know.
    """

    reference: Literal["start", "global"] = "start"
    #: Rank in the list of uploads: attacks (0), privacy (1), compression (2), which also compresses the noise, and
    #: collusion (3), since colluders see the updates that would be sent.
    place: ClassVar[int] = 2

    @abstractmethod
    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        """Return the update that is sent instead of ``update [P]``. It is a new tensor, or ``update`` itself if
        unchanged.
        """

    def traffic(self, previous: Traffic, sent: Tensor, context: UploadContext) -> Traffic:
        """Return the size of the update ``sent [P]`` in transmission. By default ``previous``.

        Args:
            previous: the update's size before this transformation.
            sent: the result of :meth:`apply`.
            context: the client and the round.
        """
        return previous

    def report(self, name: str, value: float, context: UploadContext) -> float:
        """Return the number that the client reports instead of the true ``value``. By default ``value``.

        Args:
            name: name of the number: ``"loss"`` is the training loss, ``"score"`` the score of a model on the client's
                validation samples, and ``"gain"`` the difference of two such scores.
            value: the true number.
            context: the client and the round.
        """
        return value

    def check(self, space: ParameterSpace) -> None:
        """Check, before training, that the transformation works with the module's vectors, which ``space`` describes.

        Raises:
            ConfigurationError: it does not, for example because noise would be added to BatchNorm's statistics.
        """


class PrivateUpload(Upload):
    """Base class of the noise of differential privacy, which everything that leaves a client must have.

    Attributes:
        noise_multiplier: the noise's standard deviation divided by the update's largest norm. 0 adds none.
        delta: the probability that epsilon does not hold, in (0, 1).
        max_epsilon: the largest epsilon of a client. None: no limit.
    """

    place = 1
    noise_multiplier: float
    delta: float
    max_epsilon: float | None

    @abstractmethod
    def epsilon(self, rounds: int) -> float:
        """Compute the privacy loss epsilon of a client that has taken part in ``rounds`` rounds."""

    @abstractmethod
    def affordable_rounds(self) -> int | None:
        """Return in how many rounds a client may take part before its epsilon exceeds ``max_epsilon``. None without a
        limit.
        """


class JointUpload(Upload):
    """Base class of upload transformations that compute the updates of several clients together, such as collusion.

    They need all updates of the cohort in one place (one process, or ranks), after the whole cohort has trained, and
    updates that all start from the global model.
    """

    place = 3

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        """Return ``update`` itself, which :meth:`sent` replaces when the whole cohort has trained."""
        return update

    @abstractmethod
    def sent(
        self, cohort: Sequence[int], updates: Tensor, num_clients: int, round_index: int
    ) -> dict[int, Tensor]:
        """Compute the updates that clients of a cohort send in place of their own.

        Args:
            cohort: the ids of the round's k clients.
            updates: the clients' updates ``[k, P]``, after all other upload transformations.
            num_clients: number of clients of the federation.
            round_index: the round, from 0.

        Returns:
            ``{client: update}``, updates ``[P]`` of some of the clients.
        """


def check_uploads(uploads: Sequence[Upload], personalizer: object) -> None:
    """Check that ``uploads`` are in the order attacks, privacy, compression, collusion, and work with a personalizer.

    Raises:
        ConfigurationError: the order is wrong, privacy occurs twice or is not a :class:`PrivateUpload`, or clients
            that do not start from the global model would collude.
    """
    for transformation in uploads:
        if isinstance(transformation, JointUpload) and personalizer is not None:
            raise ConfigurationError(
                f"FederatedLoop(uploads=[{transformation!r}], personalizer={personalizer!r}): a collusion needs "
                "updates that all start from the global model. Remove one of the two."
            )
        is_placed_as_privacy = transformation.place == _PLACE_OF_PRIVACY
        if is_placed_as_privacy and not isinstance(transformation, PrivateUpload):
            raise ConfigurationError(
                f"{transformation!r} has place = {_PLACE_OF_PRIVACY}, which is for differential privacy. Derive its "
                f"class from flsv.uploads.PrivateUpload, or set place = {Upload.place}."
            )
    places = [transformation.place for transformation in uploads]
    num_private_uploads = places.count(_PLACE_OF_PRIVACY)
    if places != sorted(places) or num_private_uploads > 1:
        raise ConfigurationError(
            f"uploads={list(uploads)}: expected attacks first, then one GaussianPrivacy, then compression, then "
            "collusion. Epsilon does not hold if noise is added before an attack or after compression."
        )


def upload(
    uploads: Sequence[Upload],
    vector: Tensor,
    initial_model: Tensor,
    global_vector: Tensor,
    context: UploadContext,
) -> tuple[Tensor, Traffic]:
    """Apply all upload transformations to the model that a client has trained.

    Args:
        uploads: the transformations of the client's update, in this order.
        vector: the trained model ``[P]``. It is returned itself if no transformation changes the update.
        initial_model: the model ``[P]`` from which the client started.
        global_vector: the global model ``[P]`` at the start of the round.
        context: the client and the round.

    Returns:
        The model ``[P]`` that the server receives, and its size in transmission.
    """
    num_elements = vector.numel()
    traffic = Traffic(num_elements, float(num_elements * vector.element_size()))
    context = replace(context, start=initial_model)
    position = 0
    for reference, group in groupby(uploads, key=attrgetter("reference")):
        # Transformations of one group change the same difference, from the model that they refer to.
        origin = initial_model if reference == "start" else global_vector
        update = vector - origin
        sent = update
        for transformation in group:
            context = replace(context, position=position)
            sent = transformation.apply(sent, context)
            traffic = transformation.traffic(traffic, sent, context)
            position += 1
        if sent is not update:  # an unchanged model stays bitwise identical
            vector = torch.add(origin, sent)
    return vector, traffic


def sanitize_report(
    uploads: Sequence[Upload], context: UploadContext, name: str, value: float
) -> float:
    """Return the number that a client reports instead of ``value``, by :meth:`Upload.report` of all ``uploads``.

    Example:
        >>> sanitize_report([], UploadContext(0, 2, num_parameters=2, round_index=0), "loss", 2.3)
        2.3
    """
    for position, transformation in enumerate(uploads):
        context = replace(context, position=position)
        value = transformation.report(name, value, context)
    return value


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
        if not context.start_sent:
            raise ConfigurationError(
                f"{self!r} compresses the difference between a client's model and the model that the server sent, but "
                f"client {context.client} started from a model that the server did not send. Remove the compression, "
                "or use a personalizer whose models the server sends."
            )
        # The position separates the errors of two compressions of one client.
        error_name = f"upload.{context.position}.error"
        parameters = update[: context.num_parameters]
        buffers = update[context.num_parameters :]
        if self.error_feedback and error_name in context.state:
            parameters = parameters + context.state[error_name]
        generator_path = ("compression", context.position, context.round_index, context.client)
        generator = generator_for(context.seed, *generator_path)
        compressed = self.compress(parameters, generator)
        if self.error_feedback:
            context.state[error_name] = parameters - compressed
        return torch.cat([compressed, buffers])

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
