"""How many optimizer steps each client takes in the whole fit.

A schedule such as a linear decay is given its length when it is made, by ``trainer.estimated_stepping_batches`` in
``configure_optimizers``. Here that number is one client's: the steps of the rounds that it takes part in, so that its
schedule ends where it would end if the module were trained on this client's data alone, for as many epochs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from flsv._lightning.patches import CONFIGURE, callbacks_of
from flsv.core import FederationState
from flsv.data import FederatedDataModule
from flsv.sampling import ClientSampler
from flsv.training.slots import Slot
from flsv.utilities.seeding import generator_for


class LocalSteps(Slot):
    """Counts each client's optimizer steps. As a slot it says whose are told.

    Whom a sampler draws follows from the run's seed, so that the rounds of every client are known in advance. Of a
    sampler that goes by what the clients contribute they are not: then a client's schedule is made for all rounds.

    Args:
        trainer: with its module.
        data: dealt out.
        sampler: draws the cohorts.
        state: has the run's seed, and the number of clients.
        local_epochs: passes over a client's data per round.
        limit: Lightning's ``limit_train_batches``, per client and local epoch.

    Attributes:
        limit: as given.
        client: whose steps and batches are told; None: the largest numbers.
        begun: whether the first cohort's batches are there: from then on only ``configure_optimizers`` is told a
            client's number of them.
        last_batch: whether the client in training is at its last batch; None between turns.
        asked: whether ``configure_optimizers`` has asked, so that its schedules are different ones for clients with
            different numbers of steps.
    """

    name = "steps"

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        sampler: ClientSampler,
        state: FederationState,
        local_epochs: int,
        limit: float,
    ) -> None:
        self._trainer, self._data, self._sampler, self._state = trainer, data, sampler, state
        self._local_epochs, self.limit = local_epochs, limit
        self.client: int | None = None
        self._known: dict[int, float] = {}
        self._rounds: list[list[int]] | None = None
        self.asked = False
        self.begun, self.last_batch = False, None  # type: bool, bool | None

    def enter(self, client: int, kept: Any) -> None:
        self.client = client

    def begin_batch(self, position: int, batches: int) -> None:
        self.last_batch = position + 1 == batches

    def leave(self) -> None:
        self.client = self.last_batch = None

    def of(self, client: int) -> float:
        """One client's steps; infinite where there is no last round."""
        if client not in self._known:
            self._known[client] = self._count(client)
        return self._known[client]

    def most(self) -> float:
        """The steps of the client that takes the most: for schedules that are no client's."""
        return max(self.of(client) for client in range(self._data.num_clients))

    def length(self) -> range:
        """What stands for the train dataloader in ``configure_optimizers``: as long as one client's batches in a round,
        or as the largest number where no client trains."""
        return range(int(self._answer(self._batches, "the number of training batches")))

    def answer(self) -> float:
        """What ``trainer.estimated_stepping_batches`` is."""
        return self._answer(self.of, "estimated_stepping_batches")

    def _answer(self, count: Callable[[int], float], name: str) -> float:
        hook = self._trainer.lightning_module._current_fx_name
        self.asked = self.asked or hook == CONFIGURE
        if self.client is not None:
            return count(self.client)
        counts = list(map(count, range(self._data.num_clients)))
        if hook in ("setup", "configure_model") and min(counts) != max(counts):
            warnings.warn(
                f"{name} was read in {hook}, where no client trains: it is that of the client with the most, "
                f"{max(counts):g}, and others have as few as {min(counts):g}. A schedule that is to end with every "
                f"client's last step must read it in {CONFIGURE}.",
                stacklevel=2,
            )
        return max(counts)

    def _count(self, client: int) -> float:
        trainer = self._trainer
        if trainer.max_epochs in (None, -1):
            return math.inf
        batches = self._batches(client)
        windows = next((c for c in callbacks_of(trainer) if isinstance(c, GradientAccumulationScheduler)), None)

        def steps(round_index: int) -> int:
            window = trainer.accumulate_grad_batches
            if windows is not None:
                window = windows.get_accumulate_grad_batches(round_index)
            return math.ceil(batches / window)

        return sum(map(steps, self._rounds_of(client)))

    def _batches(self, client: int) -> int:
        return limited(len(self._data.client_loader(client, "train")), self.limit) * self._local_epochs

    def _rounds_of(self, client: int) -> list[int]:
        if self._rounds is None:
            assert self._trainer.max_epochs is not None
            cohorts = list(map(self._cohort, range(max(self._trainer.max_epochs, 1))))
            self._rounds = [
                [index for index, cohort in enumerate(cohorts) if i in cohort] for i in range(self._data.num_clients)
            ]
        return self._rounds[client]

    def _cohort(self, round_index: int) -> Sequence[int]:
        """Whom the sampler draws; everybody where it goes by more than the round and the seed."""
        kind: Any = type(self._sampler)
        more = ("begin", "end_round", "state_dict", "choose")
        known = any(getattr(kind, name) is not getattr(ClientSampler, name) for name in more)
        if known or kind.saved or self._sampler.metric is not None:
            return range(self._data.num_clients)
        draw = generator_for(self._state.seed, "cohort", round_index)
        return self._sampler.sample(self._data.num_clients, {}, draw, round_index).tolist()


def limited(length: int, limit: float) -> int:
    """Batches of a local epoch of ``length`` under Lightning's ``limit_train_batches``."""
    return min(length, limit) if isinstance(limit, int) else max(1, int(length * limit))
