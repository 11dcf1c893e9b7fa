"""UploadKeeper: base class of personalizers in which clients use each other's last uploads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from flsv.core import Client, NoAnswer, Round, run_protocol
from flsv.core.strategy import Federation
from flsv.personalization.base import Personalizer
from flsv.utilities.errors import ConfigurationError


class UploadKeeper(Personalizer):
    """Base of those who keep every client's last upload: a client outside the cohort counts with it, as it was."""

    saved: ClassVar[Sequence[str]] = ("_uploads",)

    def __init__(self) -> None:
        self._uploads: dict[int, Tensor] = {}

    def begin(self, federation: Federation) -> None:
        self._uploads = {}

    def resume(self, federation: Federation) -> None:
        device = federation.global_vector.device
        self._uploads = {client: upload.to(device) for client, upload in self._uploads.items()}

    def take(self, round: Round, part: Callable[[Tensor], Tensor] = lambda vector: vector) -> dict[int, Tensor]:
        """Keep the cohort's models, or a part of each. Returns the uploads of before."""
        before = dict(self._uploads)
        # Clones row by row: a view would keep, and save, the whole cohort's models for as long as one is not replaced.
        self._uploads.update(
            {i: part(vector).clone() for i, vector in zip(round.client_ids.tolist(), round.client_vectors)}
        )
        return before

    def judge_all(
        self, values: Tensor, round: Round, judge: Callable[[Client], tuple[list[int], Tensor | None]], before: Any
    ) -> Tensor:
        """What every client of the cohort finds its own and the others' models to be worth.

        Args:
            values: ``[k, n]``, which is filled in.
            round: the round.
            judge: asks a client: whom it has looked at, and :func:`judged`.
            before: the uploads of before the round, to which those of a client go back that has not said.
        """
        assert round.clients is not None
        ids = round.client_ids.tolist()
        for row, (client, (others, worth)) in enumerate(zip(ids, run_protocol(round.clients, judge))):
            if worth is not None:
                values[row, [client, *others]] = worth.to(values)
                continue
            del self._uploads[client]
            if client in before:
                self._uploads[client] = before[client]
        return values


def judged(
    client: Client, question: Callable[..., Tensor], others: Sequence[Tensor], *args: Any, **kwargs: Any
) -> Tensor | None:
    """What a client finds its own and the others' models to be worth, ``[1 + len(others)]``; None, and a warning, where
    it is at a site of its own and did not say.

    For a personalizer such a client is as one that was not drawn: it has judged nobody, and what it goes on from stays.
    """
    try:
        values = client.ask(question, others, *args, **kwargs)
        if not isinstance(values, Tensor) or values.shape != (1 + len(others),):
            raise NoAnswer(f"client {client.id} judged {1 + len(others)} models by {type(values).__name__} {values}.")
    except NoAnswer as why:
        client.take_back()
        warnings.warn(f"{why} It goes on from what it had before this round.", stacklevel=2)
        return None
    return values


def check_validation(strategy: Personalizer, federation: Federation) -> None:
    """Raise ConfigurationError where a client has no validation samples to evaluate models on."""
    empty = (federation.split_sizes["val"] == 0).nonzero().flatten().tolist()
    if empty:
        raise ConfigurationError(
            f"{strategy!r} evaluates models on every client's own validation samples; clients {empty} have none. Set "
            "FederatedDataModule(splits=Splits(client_val=0.2)), or a larger one."
        )
