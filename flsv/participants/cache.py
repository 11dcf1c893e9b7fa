"""What a client keeps for itself between two questions: features, per-sample values, pictures.

The server may send a client a key to keep something under. Like the client's data, what lies there opens inside a
question only, which guards against mistakes, not against malice (see ``flsv.participants``). It is not saved with the
run: what cannot be worked out again belongs into :attr:`flsv.participants.LocalData.state`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from flsv.participants import LocalData

_memories: WeakKeyDictionary[LocalData, dict[Any, Any]] = WeakKeyDictionary()


def memory(local: LocalData) -> dict[Any, Any]:
    """The participant's own, for as long as it lives.

    Raises:
        PermissionError: outside of a question to this client.

    Example:
        >>> import torch
        >>> from flsv.participants import Client
        >>> count = torch.tensor([1, 1])
        >>> client = Client(0, LocalData("client 0", lambda split: [], count, count))
        >>> client.ask(lambda local: memory(local).update(secret=3))
        >>> client.ask(lambda local: memory(local)["secret"] + 1)
        4
    """
    _ = local.class_counts  # refuses whoever is not answering
    return _memories.setdefault(local, {})
