"""Base class of personalizers in which clients use the models that other clients uploaded last."""

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
    """Base class of personalizers that store each client's last upload."""

    saved: ClassVar[Sequence[str]] = ("_uploads",)

    def __init__(self) -> None:
        self._uploads: dict[int, Tensor] = {}

    def begin(self, federation: FederationInfo) -> None:
        self._uploads = {}

    def resume(self, federation: FederationInfo) -> None:
        device = federation.global_vector.device
        self._uploads = {client: upload.to(device) for client, upload in self._uploads.items()}

    def store_uploads(
        self, round: Round, part: Callable[[Tensor], Tensor] = lambda vector: vector
    ) -> dict[int, Tensor]:
        """Store the models of the round's clients."""
        before = dict(self._uploads)
        # Clones row by row: a view would hold the memory of the whole cohort until its last row is replaced.
        self._uploads.update(
            {i: part(vector).clone() for i, vector in zip(on_host(round.client_ids), round.client_vectors)}
        )
        return before

    def judge_all(
        self, values: Tensor, round: Round, judge: Callable[[Client], tuple[list[int], Tensor | None]], before: Any
    ) -> Tensor:
        """Ask every client of the round for the values of its own and of other clients' models."""
        assert round.clients is not None
        ids = on_host(round.client_ids)
        for row, (client, (others, worth)) in enumerate(zip(ids, map_clients(round.clients, judge))):
            if worth is not None:
                values[row, [client, *others]] = worth.to(values)
                continue
            del self._uploads[client]
            if client in before:
                self._uploads[client] = before[client]
        return values


def ask_model_values(
    client: Client, question: Callable[..., Tensor], others: Sequence[Tensor], *args: Any, **kwargs: Any
) -> Tensor | None:
    """Ask a client for the values of its own and of other clients' models."""
    try:
        values = client.ask(question, others, *args, **kwargs)
        if not isinstance(values, Tensor) or values.shape != (1 + len(others),):
            raise NoAnswer(f"client {client.id} judged {1 + len(others)} models by {type(values).__name__} {values}.")
    except NoAnswer as why:
        client.take_back()
        warnings.warn(f"{why} It continues from the model that it had before this round.", stacklevel=2)
        return None
    return values


def check_validation(strategy: Personalizer, federation: FederationInfo) -> None:
    """Check that each client has validation samples, on which ``strategy`` evaluates models."""
    empty = (federation.split_sizes["val"] == 0).nonzero().flatten().tolist()
    if empty:
        raise ConfigurationError(
            f"{strategy!r} evaluates models on every client's own validation samples; clients {empty} have none. Set "
            "FederatedDataModule(splits=Splits(client_val=0.2)), or a larger one."
        )
