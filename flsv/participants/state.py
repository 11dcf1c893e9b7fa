"""State that clients keep between rounds: tensors by name, saved with the run, seen by nobody else."""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping
from typing import Any

from torch import Tensor

State = MutableMapping[str, Tensor]


class Prefixed(MutableMapping[str, Tensor]):
    """The entries of a state whose names begin with a prefix, without it.

    Example:
        >>> import torch
        >>> state = {"module.weight": torch.tensor(1.0), "visits": torch.tensor(2)}
        >>> dict(Prefixed(state, "module."))
        {'weight': tensor(1.)}
    """

    def __init__(self, state: State, prefix: str) -> None:
        self._state, self._prefix = state, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._state[self._prefix + name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._state[self._prefix + name] = value

    def __delitem__(self, name: str) -> None:
        del self._state[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return iter([name[len(self._prefix) :] for name in self._state if name.startswith(self._prefix)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ClientStates:
    """The clients' states within a fit.

    What is written within a round counts from :meth:`commit` on: an interrupted round leaves no trace, and a checkpoint
    holds what was there between two rounds.

    Example:
        >>> import torch
        >>> states = ClientStates()
        >>> states.of(3)["visits"] = torch.tensor(1)
        >>> states.discard()
        >>> states.of(3)
        {}
        >>> states.of(3)["visits"] = torch.tensor(1)
        >>> states.commit()
        >>> states.state_dict()
        {3: {'visits': tensor(1)}}
    """

    def __init__(self) -> None:
        self._committed: dict[int, dict[str, Tensor]] = {}
        self._open: dict[int, dict[str, Tensor]] = {}

    def of(self, client: int) -> State:
        """The client's own state, to read and to write."""
        if client not in self._open:
            # Clones, so that a tensor that is changed in place within a round that fails is not changed.
            self._open[client] = {name: value.clone() for name, value in self._committed.get(client, {}).items()}
        return self._open[client]

    def peek(self, client: int) -> State:
        """The same to read only, without a copy."""
        return self._open.get(client, self._committed.get(client, {}))

    def commit(self) -> None:
        """The round is complete."""
        self._committed.update({client: state for client, state in self._open.items() if state})
        for client in [client for client, state in self._open.items() if not state]:
            self._committed.pop(client, None)
        self._open = {}

    def discard(self, client: int | None = None) -> None:
        """The round is not; or, with a client, it is as if that one had not taken part in it."""
        if client is None:
            self._open = {}
        else:
            self._open.pop(client, None)

    def clients(self) -> set[int]:
        """Those who keep something."""
        return {client for client, state in self._committed.items() if state}

    def keep(self, clients: Collection[int]) -> None:
        """Forget what all others keep: it is kept elsewhere."""
        self._committed = {client: state for client, state in self._committed.items() if client in clients}

    def state_dict(self) -> dict[int, dict[str, Tensor]]:
        return {client: dict(state) for client, state in self._committed.items()}

    def load_state_dict(self, state: dict[int, Any]) -> None:
        self._committed, self._open = {client: dict(tensors) for client, tensors in state.items()}, {}

    def to(self, device: Any) -> None:
        """Move everybody's tensors."""
        self._committed = {
            client: {name: value.to(device) for name, value in state.items()}
            for client, state in self._committed.items()
        }
