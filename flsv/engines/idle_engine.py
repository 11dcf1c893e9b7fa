"""IdleEngine: base class of engines that train outside of Lightning's loop, batched or at sites."""

from __future__ import annotations

from typing import Any

from flsv.engines.engine import Engine
from flsv.training.client_batches import CohortLoader

#: Loader of length 1, since Lightning ends a fit whose loader is empty. It is not read.
_NO_BATCHES = range(1)


class IdleEngine(Engine):
    """Base class of engines that train outside of Lightning's loop, which runs once a round without a batch."""

    def loader(self) -> Any:
        return _NO_BATCHES

    def _batches(self) -> CohortLoader:
        return self._load([])

    def finish_epoch(self) -> None:
        self.loop.train_epoch(is_idle=True)
        super().finish_epoch()
