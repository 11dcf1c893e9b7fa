"""UploadKeeper: base class of personalizers that store what clients have sent, and let clients value each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from flsv.core import Client, NoAnswer, Round, map_clients
from flsv.core.strategy import FederationInfo
from flsv.personalization.base import Personalizer
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.host_copies import on_host


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
