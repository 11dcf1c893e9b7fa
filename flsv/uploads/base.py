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
from flsv.utilities.declared import Declared
from flsv.utilities.errors import ConfigurationError


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
