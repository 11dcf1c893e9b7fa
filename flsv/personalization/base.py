"""Personalizer: chooses each client's start point of the next round."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from flsv.core import Client, ClientUpdate, FederationState, Instruction, LocalData, NoAnswer, Round, run_protocol
from flsv.core.strategy import Contributions, Federation, Strategy
from flsv.utilities.errors import ConfigurationError

#: Where a client keeps a model of its own in its state.
OWN_MODEL = "own_model"


Starts = Mapping[int, Tensor]
"""Client id to the model ``[P]`` that it starts from."""


@dataclass(frozen=True)
class Personalized:
    """The result of personalization.

    Args:
        starts: client id to ``[P]``, the models that the server will send to the clients whose start point changes.
        peer_values: ``[k, n]``, what every client of the round found every client's model to be worth to it; NaN for
            those that it did not look at. None where clients do not judge each other.
    """

    starts: Starts = field(default_factory=dict)
    peer_values: Tensor | None = None


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


class Personalizer(Strategy):
    """Base class. A client without a model of its own starts from the global model.

    A client's start point is either the server's to send (:meth:`personalize` returns it) or the client's own to keep
    (in ``local.state[OWN_MODEL]``): then :meth:`start` sends None.

    Attributes:
        gives_peer_values: whether :meth:`personalize` tells what clients find each other to be worth.
        collaborates: False where clients would send nothing: what the server sees of them is the simulation's, and does
            not count as crossing.
    """

    gives_peer_values = False
    collaborates = True

    def start(self, client: int, state: FederationState) -> Tensor | None:
        """At the server: the model that a client is sent to start from, at the beginning of each round that it takes
        part in and when the clients' own models are evaluated. It must not change the personalizer's state.

        Returns:
            ``[P]``; None: the client goes on from what it has. By default what :meth:`personalize` gave it last, else
            the global model.
        """
        return state.starts.get(client, state.model())

    def receive(self, local: LocalData, instruction: Instruction) -> Tensor:
        """At the client: the model ``[P]`` that it starts from. By default the received one, else the one that it has
        kept."""
        return local.state[OWN_MODEL] if instruction.start is None else instruction.start

    def own(self, local: LocalData, instruction: Instruction) -> Tensor:
        """At the client: the model ``[P]`` that it uses, and is tested with. By default the one that it starts from."""
        return self.receive(local, instruction)

    def used(self, client: int, state: FederationState) -> Tensor | None:
        """At the server: the model ``[P]`` that a client uses, as far as the server knows it; None: only the client has
        it. By default the one that it starts from."""
        return self.start(client, state)

    def keep(self, local: LocalData) -> None:
        """At the client, after its training: save its next start point in its state, if that stays at the client."""

    def started(self, update: ClientUpdate) -> Tensor | None:
        """At the server: where a client that was sent no start point has started from; None: it has to be asked."""
        return None

    @abstractmethod
    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts | Personalized:
        """At the server: the clients' next start points.

        Args:
            round: the round, after aggregation.
            contributions: the metrics' values, this round's included.
            models: the start points held so far, client id to ``[P]``.

        Returns:
            Client id to ``[P]``, for the clients whose start point changes, usually those of the round; or
            :class:`Personalized`, with what clients found each other to be worth.
        """


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


def check_validation(strategy: Personalizer, federation: Federation) -> None:
    """Raise ConfigurationError where a client has no validation samples to evaluate models on."""
    empty = (federation.split_sizes["val"] == 0).nonzero().flatten().tolist()
    if empty:
        raise ConfigurationError(
            f"{strategy!r} evaluates models on every client's own validation samples; clients {empty} have none. Set "
            "FederatedDataModule(splits=Splits(client_val=0.2)), or a larger one."
        )


class Standalone(Personalizer):
    """Each client continues from its own model, as if it were alone: the baseline for collaboration.

    A client's first round, whenever it comes, starts from the run's initial model. The global model is the aggregate of
    models that know nothing of each other, and says nothing; look at the clients' own accuracies
    (``ClientEvaluation(every=...)``).

    Example:
        >>> Standalone()
        Standalone()
    """

    collaborates = False
    saved = ("_initial", "_visited")

    def __init__(self) -> None:
        self._initial: Tensor | None = None
        self._visited: list[int] = []

    def begin(self, federation: Federation) -> None:
        self._initial, self._visited = federation.global_vector.clone(), []

    def start(self, client: int, state: FederationState) -> Tensor | None:
        assert self._initial is not None
        return None if client in self._visited else self._initial.to(state.model())

    def keep(self, local: LocalData) -> None:
        assert local.model is not None
        local.state[OWN_MODEL] = local.model.clone()

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        self._visited = sorted({*self._visited, *round.client_ids.tolist()})
        return {}
