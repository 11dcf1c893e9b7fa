"""How many optimizer steps each client takes in the whole fit.

A schedule such as a linear decay is given its length when it is made, by ``trainer.estimated_stepping_batches`` in
``configure_optimizers``. Here that number is one client's, of all rounds: its schedule is that of the module
trained on this client's data alone, for as many epochs. A client that is not in every round does not come to its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from flsv.data import FederatedDataModule


class LocalSteps:
    """Counts each client's optimizer steps.

    Args:
        trainer: with its module.
        data: dealt out.
        local_epochs: passes over a client's data per round.
        limit: Lightning's ``limit_train_batches``, per client and local epoch.

    Attributes:
        limit: as given.
        client: whose steps and batches are told; None: the largest numbers.
        begun: whether the first cohort's batches are there: from then on only ``configure_optimizers`` is told a
            client's number of them.
        last_batch: whether the client in training is at its last batch; None between rounds.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        local_epochs: int,
        limit: float,
    ) -> None:
        self._trainer, self._data = trainer, data
        self._local_epochs, self.limit = local_epochs, limit
        self.client: int | None = None
        self._known: dict[int, float] = {}
        self.begun, self.last_batch = False, None  # type: bool, bool | None

    def of(self, client: int) -> float:
        """One client's steps; infinite where there is no last round."""
        if client not in self._known:
            self._known[client] = self._count(client)
        return self._known[client]

    def most(self) -> float:
        """The steps of the client that takes the most: for schedules that are no client's."""
        return max(self.of(client) for client in range(self._data.num_clients))

    def length(self) -> TrainLength:
        """What stands for the train dataloader in ``configure_optimizers``: one client's batches in a round; the
        largest number where no client trains."""
        return TrainLength(int(self._answer(self._batches)))

    def answer(self) -> float:
        """What ``trainer.estimated_stepping_batches`` is."""
        return self._answer(self.of)

    def _answer(self, count: Callable[[int], float]) -> float:
        clients = range(self._data.num_clients) if self.client is None else [self.client]
        return max(map(count, clients))

    def _count(self, client: int) -> float:
        trainer = self._trainer
        if trainer.max_epochs is None or trainer.max_epochs < 0:
            return math.inf
        batches = self._batches(client)
        windows = next((c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)), None)  # type: ignore[attr-defined]

        def steps(round_index: int) -> int:
            window = trainer.accumulate_grad_batches
            if windows is not None:
                window = windows.get_accumulate_grad_batches(round_index)
            return math.ceil(batches / window)

        return sum(map(steps, range(max(trainer.max_epochs, 1))))

    def _batches(self, client: int) -> int:
        return limited(len(self._data.client_loader(client, "train")), self.limit) * self._local_epochs


def limited(length: int, limit: float) -> int:
    """Batches of a local epoch of ``length`` under Lightning's ``limit_train_batches``."""
    return min(length, limit) if isinstance(limit, int) else max(1, int(length * limit))


class TrainLength:
    """A stand-in for the train dataloader that only has a length: of a client's batches in a round."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return self._batches
