"""CohortLoader and LocalSteps: the batches that clients train on, and the numbers of their batches and optimizer steps.

``configure_optimizers`` reads the length of a schedule, such as a linear decay, from
``trainer.estimated_stepping_batches``. In flsv this is the number of steps of one client in all rounds that it takes
part in, so that the client's schedule ends with its last step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from flsv._lightning.patches import CONFIGURE, PatchedAttributes, answering, callbacks_of
from flsv.configuration.federation_config import LocalWork
from flsv.core import FederationState
from flsv.data import FederatedDataModule
from flsv.data.groups import client_called
from flsv.sampling import ClientSampler
from flsv.utilities.seeding import generator_for, isolated_rngs, seed_global_rngs, shuffle_stream

#: Function that trains on the batches that the cohort's loader yields at present. Its argument is True if these are the
#: round's last batches.
Run = Callable[[bool], None]


@dataclass(frozen=True)
class ClientBatches:
    """One client's batches of a round."""

    client: int
    lengths: list[int]
    epochs: range

    @property
    def batches(self) -> int:
        return sum(self.lengths)


class CohortLoader(Iterable[Any]):
    """Train dataloader of one round, which yields the batches of one client after the other.

    ``lengths(client, batches, round_index)`` returns the number of batches of each of a client's local epochs, given
    the number ``batches`` in its loader. The default is a single epoch."""

    def __init__(
        self,
        data: FederatedDataModule,
        cohort: Sequence[int],
        *,
        seed: int,
        round_index: int,
        lengths: Callable[[int, int, int], list[int]] = lambda client, batches, round_index: [
            batches
        ],
    ) -> None:
        self.round_index, self._seed = round_index, seed
        self._data = data
        self._epochs: list[tuple[int, Any, int, int]] = []
        self.visits = []
        for client in cohort:
            first = len(self._epochs)
            given = lengths(client, len(data.client_loader(client, "train")), round_index)
            for epoch, batches in enumerate(given):
                stream = shuffle_stream(seed, round_index, client, epoch)
                self._epochs.append(
                    (client, data.client_loader(client, "train", generator=stream), batches, epoch)
                )
            self.visits.append(ClientBatches(client, given, range(first, len(self._epochs))))
        self._present = range(len(self._epochs))

    def train(self, visit: ClientBatches, run: Run) -> None:
        """Call ``run`` for each local epoch of a client. Meanwhile this loader yields only the client's batches."""
        everything = self._present
        try:
            for place in visit.epochs:
                self._present = range(place, place + 1)
                run(place == everything[-1])
        finally:
            self._present = everything

    def __len__(self) -> int:
        return sum(self._epochs[place][2] for place in self._present)

    def __iter__(self) -> Iterator[Any]:
        for place in self._present:
            client, loader, batches, epoch = self._epochs[place]
            # Augmentation of a first batch draws from a stream of its own: in one batched model the random state is
            # then another client's.
            with isolated_rngs(self._seed, "first batch", self.round_index, client, epoch):
                iterator = iter(loader)
                first = list(islice(iterator, 1))
            if epoch == 0:
                # Transfer hooks, which may augment the batch, run before the client begins.
                seed_global_rngs(self._seed, "transfer", self.round_index, client)
            given = 0
            for batch in chain(first, islice(iterator, batches - 1)):
                given += 1
                yield batch
            if given < batches:  # the next client's first batches would be counted as this client's
                raise RuntimeError(
                    f"{client_called(client, self._data.client_names)} gave {given} of {batches} batches in round "
                    f"{self.round_index + 1}: its data set raised StopIteration, or is shorter than its length."
                )


class LocalSteps:
    """Object that tells Lightning a client's numbers of optimizer steps and batches."""

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        sampler: ClientSampler,
        state: FederationState,
        work: Mapping[int, LocalWork],
        limit: float,
    ) -> None:
        self._trainer, self._data, self._sampler, self._state = trainer, data, sampler, state
        self.work, self._limit = work, limit
        self.client: int | None = None
        self._steps_by_client: dict[int, float] = {}
        self._rounds: list[list[int]] | None = None
        self.length_was_read = False
        self.last_batch: bool | None = None
        # Lightning's number of steps at the round's start, and at that of the client whose batch is trained on.
        self.steps_before_round = 0
        self.steps_before_client = 0
        self.is_in_batch = False

    def of(self, client: int) -> float:
        """Return a client's number of optimizer steps in the whole fit, perhaps infinite."""
        if client not in self._steps_by_client:
            self._steps_by_client[client] = self._count(client)
        return self._steps_by_client[client]

    def most(self) -> float:
        """Return the largest number of steps of any client, for use outside of clients' training."""
        return max(map(self.of, self.work))

    def tell_steps(self) -> PatchedAttributes:
        """Make the trainer report the present client's number of steps and last batch. Undo it by ``restore`` of the
        result."""
        steps = partial(self._answer, self.of, "estimated_stepping_batches")
        answers: dict[str, Callable[[], Any]] = {"estimated_stepping_batches": steps}
        answers["is_last_batch"] = lambda: self.last_batch
        answers["global_step"] = self._global_step
        return PatchedAttributes([answering(self._trainer, answers)])

    def tell_batches(self) -> PatchedAttributes:
        """Make a trainer without train dataloader report the present client's batches. Undo it by ``restore`` of the
        result."""

        def length() -> range:
            return range(int(self._answer(self._batches, "the number of training batches")))

        answers = {"train_dataloader": length, "num_training_batches": lambda: len(length())}
        changes: list[tuple[Any, str, Any]] = [answering(self._trainer, answers)]
        changes.append((self._trainer.fit_loop, "setup_data", lambda: None))
        if isinstance(self._data, FederatedDataModule):
            changes.append((self._data, "round_loader", length))
        return PatchedAttributes(changes)

    def steps_so_far(self) -> int:
        """Return the number of steps of all clients of this process, as Lightning counts them."""
        lightnings: Any = L.Trainer.global_step
        return int(lightnings.fget(self._trainer))

    def _global_step(self) -> int | None:
        """Return the steps of earlier rounds and those of the client in this one, while it trains on a batch."""
        if self.client is None or not self.is_in_batch:
            return None
        steps_of_client = self.steps_so_far() - self.steps_before_client
        return self.steps_before_round + steps_of_client

    def _answer(self, count: Callable[[int], float], name: str) -> float:
        """Return ``count(client)`` for the client that trains now, or between clients the largest count."""
        hook = self._trainer.lightning_module._current_fx_name
        self.length_was_read = self.length_was_read or hook == CONFIGURE
        if self.client is not None:
            return count(self.client)
        counts = list(map(count, self.work))
        if hook in ("setup", "configure_model") and min(counts) != max(counts):
            warnings.warn(
                f"{name} was read in {hook}, where no client trains: it is that of the client with the most, "
                f"{max(counts):g}, and others have as few as {min(counts):g}. A schedule that is to end with every "
                f"client's last step must read it in {CONFIGURE}.",
                stacklevel=2,
            )
        return max(counts)

    def _count(self, client: int) -> float:
        if self._trainer.max_epochs in (None, -1):
            return math.inf
        length = len(self._data.client_loader(client, "train"))
        rounds = self._rounds_of(client)
        return sum(self.in_round(self.lengths(client, length, index), index) for index in rounds)

    def in_round(self, lengths: Sequence[int], round_index: int) -> int:
        """Return the number of optimizer steps in a round, given the ``lengths`` (batches) of its local epochs."""
        window = self._window(round_index)
        return sum(math.ceil(length / window) for length in lengths)

    def lengths(self, client: int, batches: int, round_index: int) -> list[int]:
        """Return the number of batches of each local epoch of a client in a round, given the ``batches`` in its
        loader."""
        return self.work[client].lengths(limited(batches, self._limit), self._window(round_index))

    def _window(self, round_index: int) -> int:
        window = self._trainer.accumulate_grad_batches
        for callback in callbacks_of(self._trainer):
            if isinstance(callback, GradientAccumulationScheduler):
                window = callback.get_accumulate_grad_batches(round_index)
        return window

    def _batches(self, client: int) -> int:
        return sum(
            self.lengths(
                client, len(self._data.client_loader(client, "train")), self._state.round_index
            )
        )

    def _rounds_of(self, client: int) -> list[int]:
        if self._rounds is None:
            assert self._trainer.max_epochs is not None
            cohorts = list(map(self._cohort, range(max(self._trainer.max_epochs, 1))))
            self._rounds = [
                [index for index, cohort in enumerate(cohorts) if i in cohort]
                for i in range(self._data.num_clients)
            ]
        return self._rounds[client]

    def _cohort(self, round_index: int) -> Sequence[int]:
        """Return the cohort of a round, or all clients if it is not known in advance."""
        kind: Any = type(self._sampler)
        more = ("begin", "end_round", "state_dict", "choose")
        known = any(getattr(kind, name) is not getattr(ClientSampler, name) for name in more)
        if known or kind.saved or self._sampler.metric is not None:
            return range(self._data.num_clients)
        draw = generator_for(self._state.seed, "cohort", round_index)
        return self._sampler.sample(self._data.num_clients, {}, draw, round_index).tolist()


def limited(length: int, limit: float) -> int:
    """Return the number of batches of an epoch under ``limit_train_batches``."""
    return min(length, limit) if isinstance(limit, int) else max(1, int(length * limit))
