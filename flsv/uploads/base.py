"""Upload transformations, which change a client's update before it sends it: what they have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flsv.core import State, Traffic
from flsv.core.parameter_space import ParameterSpace
from flsv.utilities.declared import ValidatedArguments
from flsv.utilities.errors import ConfigurationError


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
