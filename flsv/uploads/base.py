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
    """Sender and round of an update.

    Args:
        client: the client's number.
        num_clients: number of clients of the federation.
        num_parameters: number of leading entries of the update that are parameters; the rest are buffers.
        round_index: the round, from 0.
        seed: the run's seed.
        state: the client's memory between rounds.
        position: index of the upload in the list of uploads.
        start_sent: whether the server sent the client's start point, and so knows it.
        start: the client's start point ``[P]``; None if unknown.
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
        """Return the same context for the upload at another position."""
        return replace(self, position=position)


class Upload(ValidatedArguments, ABC):
    """Base class of changes to an update before it is sent: attacks, noise, compression.

    Attributes:
        reference: model that the update is measured from: the client's own ``"start"``, or the ``"global"`` model,
            which all clients know.
    """

    reference: Literal["start", "global"] = "start"
    #: Rank in a list: attacks (0), before clipping; privacy (1), before compression, so that this includes the noise;
    #: all others (2); collusion (3), last, since colluders see the updates that are about to be sent.
    place: ClassVar[int] = 2

    @abstractmethod
    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        """Return the update that is sent instead of ``update [P]``: a new tensor, or ``update`` itself if unchanged."""

    def traffic(self, before: Traffic, sent: Tensor, context: UploadContext) -> Traffic:
        """Return the size of ``sent [P]`` as it is transmitted; by default ``before``.

        Args:
            before: its size before this upload.
            sent: result of :meth:`apply`.
            context: sender and round.
        """
        return before

    def tell(self, name: str, value: float, context: UploadContext) -> float:
        """Return the number that the client reports instead of the true ``value``; by default the true one.

        Args:
            name: ``"loss"``: of its training; ``"score"`` and ``"gain"``: of a model on its validation samples.
            value: the true number.
            context: sender and round.
        """
        return value

    def check(self, space: ParameterSpace) -> None:
        """Check, before training, that the upload works with this module's vectors.

        Raises:
            ConfigurationError: it does not.
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
            "Epsilon does not hold for noise that is added before an attack or after compression."
        )


def upload(
    uploads: Sequence[Upload], vector: Tensor, start: Tensor, global_vector: Tensor, context: UploadContext
) -> tuple[Tensor, Traffic]:
    """Compute a client's model as it leaves the client.

    Args:
        uploads: changes to its update, in this order.
        vector: the trained model ``[P]``; returned itself if no upload changes the update.
        start: the client's start point ``[P]``.
        global_vector: the global model ``[P]`` at the start of the round.
        context: sender and round.

    Returns:
        The model ``[P]``, and its size in transmission.
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
        if sent is not update:  # without a change the model stays the same to the bit
            vector = torch.add(origin, sent)
    return vector, traffic


def sanitize_report(uploads: Sequence[Upload], context: UploadContext, name: str, value: float) -> float:
    """Return the number that a client reports after all uploads, see :meth:`Upload.tell`.

    Example:
        >>> sanitize_report([], UploadContext(0, 2, num_parameters=2, round_index=0), "loss", 2.3)
        2.3
    """
    for position, each in enumerate(uploads):
        value = each.tell(name, value, context.at(position))
    return value
