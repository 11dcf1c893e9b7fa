"""Base class of personalizers, the rules that choose the model from which each client starts the next round."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from flsv.core import (
    Client,
    ClientUpdate,
    FederationState,
    Instruction,
    LocalData,
    NoAnswer,
    Round,
    map_clients,
)
from flsv.core.strategy import Contributions, FederationInfo, Strategy
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.host_copies import on_host

#: Key of a client's own model in ``local.state``.
OWN_MODEL = "own_model"

Starts = Mapping[int, Tensor]
"""``{client id: model}``, the parameters ``[P]`` of the model from which each client starts."""


@dataclass(frozen=True)
class Personalized:
    """Result of :meth:`Personalizer.personalize` if clients also value each other's models.

    Args:
        starts: ``{client id: model}``, the start point ``[P]`` that the server will send, for clients whose start point
            changes.
        peer_values: ``[k, n]``. Entry (i, j) is the value that the i-th of the round's k clients gives the model of
            client j, NaN if it did not evaluate this model. None if clients do not evaluate each other's models.
    """

    starts: Starts = field(default_factory=dict)
    peer_values: Tensor | None = None


class Personalizer(Strategy):
    """Base class of personalizers, which choose each client's start point.

    A start point is the model from which a client trains in a round. It is either computed at the server by
    :meth:`personalize`, which is called at the end of each round, and sent to the client, or the client itself stores
    it in ``local.state[OWN_MODEL]``, and :meth:`start` returns None. A client that has neither starts from the global
    model.

    Attributes:
        gives_peer_values: whether :meth:`personalize` returns ``peer_values``.
        collaborates: False if real clients would send nothing. The updates then exist only in the simulation and do not
            count as traffic.
    """

    gives_peer_values = False
    collaborates = True

    def start(self, client: int, state: FederationState) -> Tensor | None:
        """Return, at the server, the start point to send to a client.

        It is called at the beginning of each round in which the client takes part, and when the clients' own models are
        evaluated. It must not change the personalizer's state.

        Returns:
            The start point ``[P]``, by default the last one that :meth:`personalize` computed for the client, or the
            global model if there is none. None if the client continues from its own model.
        """
        return state.starts.get(client, state.model())

    def receive(self, local: LocalData, instruction: Instruction) -> Tensor:
        """Return, at the client, its start point ``[P]``. By default the model in ``instruction`` or, if there is none,
        the model that the client itself stores."""
        if instruction.start is None:
            return local.state[OWN_MODEL]
        return instruction.start

    def own(self, local: LocalData, instruction: Instruction) -> Tensor:
        """Return, at the client, the model ``[P]`` with which it predicts and is tested. By default its start point."""
        return self.receive(local, instruction)

    def used(self, client: int, state: FederationState) -> Tensor | None:
        """Return, at the server, the model ``[P]`` with which a client predicts and is tested. By default its start
        point.

        Returns:
            The model ``[P]``. None if only the client has it.
        """
        return self.start(client, state)

    def keep(self, local: LocalData) -> None:
        """Store, at the client after training, its next start point in ``local.state``. By default nothing is
        stored."""

    def started(self, update: ClientUpdate) -> Tensor | None:
        """Return the start point ``[P]`` of a client to which the server sent none. None if only the client knows
        it. Called at the server when the client's ``update`` has arrived."""
        return None

    @abstractmethod
    def personalize(
        self, round: Round, contributions: Contributions, models: Starts
    ) -> Starts | Personalized:
        """Compute, at the server, the clients' next start points.

        Args:
            round: the round, after aggregation.
            contributions: the metrics' values, including this round.
            models: ``{client id: model}``, the start points ``[P]`` that earlier calls returned.

        Returns:
            ``{client id: model}``, the next start points ``[P]`` of the clients whose start point changes, usually the
            clients of the round, or a :class:`Personalized`, which also has peer values.
        """


class UploadKeeper(Personalizer):
    """Base class of personalizers that store the last model that each client sent."""

    saved: ClassVar[Sequence[str]] = ("_uploads",)

    def __init__(self) -> None:
        self._uploads: dict[int, Tensor] = {}

    def begin(self, federation: FederationInfo) -> None:
        self._uploads = {}

    def resume(self, federation: FederationInfo) -> None:
        device = federation.global_vector.device
        uploads = {}
        for client, upload in self._uploads.items():
            uploads[client] = upload.to(device)
        self._uploads = uploads

    def store_uploads(
        self, round: Round, part: Callable[[Tensor], Tensor] = lambda vector: vector
    ) -> dict[int, Tensor]:
        """Store ``part`` of the models of the round's clients. Return what was stored before."""
        previous_uploads = dict(self._uploads)
        # Clones row by row: a view would hold the memory of the whole cohort until its last row is replaced.
        for client, vector in zip(on_host(round.client_ids), round.client_vectors):
            self._uploads[client] = part(vector).clone()
        return previous_uploads

    def collect_values(
        self,
        values: Tensor,
        round: Round,
        judge: Callable[[Client], tuple[list[int], Tensor | None]],
        previous_uploads: Any,
    ) -> Tensor:
        """Write into ``values`` how each client of the round values its own and other clients' models.
        ``judge`` requests these values from one client. The stored model of a client that does not reply is
        restored from ``previous_uploads``.
        """
        assert round.clients is not None
        ids = on_host(round.client_ids)
        # Of each client its peers, and the values of its own model and theirs.
        answers = map_clients(round.clients, judge)
        for client, row_of_values, (peers, model_values) in zip(ids, values, answers):
            if model_values is not None:
                columns = [client, *peers]
                row_of_values[columns] = model_values.to(values)  # changes `values`
            else:  # no answer: undo what has been stored of the client in this round
                del self._uploads[client]
                if client in previous_uploads:
                    self._uploads[client] = previous_uploads[client]
        return values


def ask_model_values(
    client: Client,
    question: Callable[..., Tensor],
    models: Sequence[Tensor],
    *args: Any,
    **kwargs: Any,
) -> Tensor | None:
    """Request from a client the values of its own model and of others' ``models``, which it computes by ``question``.
    None if it does not reply.
    """
    try:
        return client.ask(question, models, *args, **kwargs)
    except NoAnswer as error:
        client.take_back()
        warnings.warn(
            f"{error} It continues from the model that it had before this round.", stacklevel=2
        )
        return None


def check_validation(strategy: Personalizer, federation: FederationInfo) -> None:
    """Check that each client has validation samples, on which ``strategy`` evaluates models."""
    has_no_samples = federation.split_sizes["val"] == 0
    clients_without_val = has_no_samples.nonzero().flatten().tolist()
    if clients_without_val:
        raise ConfigurationError(
            f"{strategy!r} evaluates models on every client's own validation samples; clients {clients_without_val} "
            "have none. Set FederatedDataModule(splits=Splits(client_val=0.2)), or a larger one."
        )
