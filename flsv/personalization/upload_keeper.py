"""UploadKeeper: base class of personalizers that store clients' models, and let clients value each other's models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from flsv.core import Client, NoResponse, Round, map_clients
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
        """Store ``part`` of the models of the round's clients. Return the models that were stored before."""
        previous_uploads = dict(self._uploads)
        # Rows are cloned: a view would hold the memory of the whole cohort until its last row is replaced.
        for client, vector in zip(on_host(round.client_ids), round.client_vectors):
            self._uploads[client] = part(vector).clone()
        return previous_uploads

    def collect_values(
        self,
        values: Tensor,
        round: Round,
        request_values: Callable[[Client], tuple[list[int], Tensor | None]],
        previous_uploads: Any,
    ) -> Tensor:
        """Write into ``values`` how each client of the round values its own and other clients' models.
        ``request_values`` requests these values from one client. The stored model of a client that does not respond is
        restored from ``previous_uploads``.
        """
        assert round.clients is not None
        ids = on_host(round.client_ids)
        # Each response has the client's peers, and the values of its own model and of theirs.
        responses = map_clients(round.clients, request_values)
        for client, row, (peers, values_of_models) in zip(ids, values, responses):
            if values_of_models is not None:
                columns = [client, *peers]
                row[columns] = values_of_models.to(values)  # `row` is a view of `values`
            else:  # the client did not respond, so its model of this round is dropped
                del self._uploads[client]
                if client in previous_uploads:
                    self._uploads[client] = previous_uploads[client]
        return values


def request_model_values(
    client: Client,
    compute: Callable[..., Tensor],
    models: Sequence[Tensor],
    *args: Any,
    **kwargs: Any,
) -> Tensor | None:
    """Request from a client the values of its own model and of others' ``models``, which it computes by ``compute``.
    None if it does not respond.
    """
    try:
        return client.request(compute, models, *args, **kwargs)
    except NoResponse as error:
        warnings.warn(
            f"{error} The client continues from the model that it had before this round.",
            stacklevel=2,
        )
        return None


def check_validation(strategy: Personalizer, federation: FederationInfo) -> None:
    """Check that each client has validation samples, on which ``strategy`` evaluates models."""
    has_no_samples = federation.split_sizes["val"] == 0
    clients_without_val = has_no_samples.nonzero().flatten().tolist()
    if clients_without_val:
        raise ConfigurationError(
            f"{strategy!r} evaluates models on every client's own validation samples, but clients "
            f"{clients_without_val} have none. Set FederatedDataModule(splits=Splits(client_val=0.2)), or a larger "
            "share."
        )
