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
    """Information for an upload, which changes an update before it is sent: the sender, the round, the stored state.

    Args:
        client: the client's id.
        num_clients: number of clients of the federation.
        num_parameters: number of leading entries of the update that are parameters; the rest are buffers.
        round_index: the round, from 0.
        seed: the run's seed.
        state: state of the client that is stored between rounds.
        position: index of the upload in the loop's list of uploads.
        start_sent: whether the server itself sent the model that the client started from.
        start: the model ``[P]`` from which the client started its training; None if it is not known.
        secret: a key that only the client knows, another for every message of the server and every state that the
            client goes on from, of which noise that protects the client is drawn; empty: such noise follows from
            ``seed``, as in a simulation.
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

    def at(self, position: int) -> UploadContext:
        """Return a copy of the context with another ``position``."""
        return replace(self, position=position)


class Upload(ValidatedArguments, ABC):
    """Base class of changes to an update before it is sent: attacks, noise, compression.

    Attributes:
        reference: model that the update is measured from: the client's own ``"start"``, or the ``"global"`` model,
            which all clients know.
    """

    reference: Literal["start", "global"] = "start"
    #: Rank in the list of uploads: attacks (0) come before clipping; privacy (1) before compression, so that the noise
    #: is compressed too; all others (2); collusion (3) last, since colluders see the updates that are about to be sent.
    place: ClassVar[int] = 2

    @abstractmethod
    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        """Return the update that is sent instead of ``update [P]``: a new tensor, or ``update`` itself if unchanged."""

    def traffic(self, before: Traffic, sent: Tensor, context: UploadContext) -> Traffic:
        """Return the size of the update ``sent [P]`` in transmission; by default ``before``.

        Args:
            before: the update's size before this upload.
            sent: the result of :meth:`apply`.
            context: the update's sender and round.
        """
        return before

    def tell(self, name: str, value: float, context: UploadContext) -> float:
        """Return the number that the client reports instead of the true ``value``; by default ``value``.

        Args:
            name: name of the number: ``"loss"``, the training loss; ``"score"`` or ``"gain"``, of a model on the
                client's validation samples.
            value: the true number.
            context: the update's sender and round.
        """
        return value

    def check(self, space: ParameterSpace) -> None:
        """Check, before training, that the upload works with the vectors of the module, which ``space`` describes.

        Raises:
            ConfigurationError: the upload does not work with them.
        """


def check_order(uploads: Sequence[Upload]) -> None:
    """Raise unless ``uploads`` are in the order attacks, privacy, compression, collusion.

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
        vector: the trained model ``[P]``; returned itself if no upload changes the update.
        start: the client's start point ``[P]``.
        global_vector: the global model ``[P]`` at the start of the round.
        context: the update's sender and round.

    Returns:
        The model ``[P]`` that the server receives, and its size in transmission.
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
    """Return the number that a client reports instead of the true ``value``, after all uploads, see
    :meth:`Upload.tell`.

    Example:
        >>> sanitize_report([], UploadContext(0, 2, num_parameters=2, round_index=0), "loss", 2.3)
        2.3
    """
    for position, each in enumerate(uploads):
        value = each.tell(name, value, context.at(position))
    return value
