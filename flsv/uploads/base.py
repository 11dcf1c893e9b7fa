"""Upload: base class of changes to a client's update before it is sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flsv.core import State, Traffic
from flsv.core.parameter_space import ParameterSpace
from flsv.utilities.declared import ValidatedArguments
from flsv.utilities.errors import ConfigurationError


@dataclass(frozen=True)
class UploadContext:
    """Client, round and stored state in which an upload works.

    Args:
        client: the client's id.
        num_clients: number of clients of the federation.
        num_parameters: number of leading entries of the update that are parameters. The rest are buffers.
        round_index: the round, from 0.
        seed: the run's seed.
        state: tensors by name that the client keeps between rounds. Uploads may change them.
        position: index of the upload in the loop's list of uploads.
        start_sent: whether the server itself sent the model that the client started from.
        start: the model ``[P]`` from which the client started its training. None if it is not known.
        secret: key of the noise that protects the client, which only the client knows. Every message of the server and
            every stored state of the client has another key. If empty, as in a simulation, the noise follows from
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


class Upload(ValidatedArguments, ABC):
    """Base class of changes to an update before it is sent. They are attacks, noise and compression.

    After a client's training, :meth:`apply` of each of the loop's uploads is called at the client, one after the other.

    Attributes:
        reference: the model that is subtracted from the trained model to get the update: the client's ``"start"``
            point, or the ``"global"`` model, which all clients know.
    """

    reference: Literal["start", "global"] = "start"
    #: Rank in the list of uploads. Attacks (0) come first; then privacy (1), before compression, so that the noise is
    #: compressed, too; then all others (2); then collusion (3), since colluders see the updates that would be sent.
    place: ClassVar[int] = 2

    @abstractmethod
    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        """Return the update that is sent instead of ``update [P]``: a new tensor, or ``update`` itself if unchanged."""

    def traffic(self, before: Traffic, sent: Tensor, context: UploadContext) -> Traffic:
        """Return the size of the update ``sent [P]`` in transmission. By default ``before``.

        Args:
            before: the update's size before this upload.
            sent: the result of :meth:`apply`.
            context: the client and the round.
        """
        return before

    def tell(self, name: str, value: float, context: UploadContext) -> float:
        """Return the number that the client reports instead of the true ``value``. By default ``value``.

        Args:
            name: name of the number: ``"loss"``, the training loss. ``"score"`` or ``"gain"``, the score or the gain in
                score of a model on the client's validation samples.
            value: the true number.
            context: the client and the round.
        """
        return value

    def check(self, space: ParameterSpace) -> None:
        """Check, before training, that the upload works with the vectors of the module, which ``space`` describes.

        Raises:
            ConfigurationError: it does not, for example because noise would be added to BatchNorm's statistics.
        """


def check_order(uploads: Sequence[Upload]) -> None:
    """Check that ``uploads`` are in the order attacks, privacy, compression, collusion.

    Raises:
        ConfigurationError: the order is another one, or privacy occurs twice.
    """
    places = [each.place for each in uploads]
    if places != sorted(places) or places.count(1) > 1:
        raise ConfigurationError(
            f"uploads={list(uploads)}: expected attacks first, then one GaussianPrivacy, then compression, then "
            "collusion. "
            "Epsilon does not hold for noise that is added before an attack or after compression."
        )


def upload(
    uploads: Sequence[Upload], vector: Tensor, start: Tensor, global_vector: Tensor, context: UploadContext
) -> tuple[Tensor, Traffic]:
    """Compute the model that a client sends, after all uploads.

    Args:
        uploads: the changes to the client's update, in this order.
        vector: the trained model ``[P]``. It is returned itself if no upload changes the update.
        start: the client's start point ``[P]``.
        global_vector: the global model ``[P]`` at the start of the round.
        context: the client and the round.

    Returns:
        The model ``[P]`` that the server receives, and its size in transmission.
    """
    traffic = Traffic(vector.numel(), float(vector.numel() * vector.element_size()))
    context, position = replace(context, start=start), 0
    for reference, group in groupby(uploads, key=lambda each: each.reference):
        origin = start if reference == "start" else global_vector
        update = sent = vector - origin
        for each in group:
            at = replace(context, position=position)
            sent = each.apply(sent, at)
            traffic = each.traffic(traffic, sent, at)
            position += 1
        if sent is not update:  # without a change the model stays the same to the bit
            vector = torch.add(origin, sent)
    return vector, traffic


def sanitize_report(uploads: Sequence[Upload], context: UploadContext, name: str, value: float) -> float:
    """Return the number that a client reports, after all uploads' :meth:`Upload.tell`.

    Example:
        >>> sanitize_report([], UploadContext(0, 2, num_parameters=2, round_index=0), "loss", 2.3)
        2.3
    """
    for position, each in enumerate(uploads):
        value = each.tell(name, value, replace(context, position=position))
    return value
