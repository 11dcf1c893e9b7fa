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
from itertools import chain, islice
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader, default_collate

from flsv._lightning.patches import CONFIGURE_HOOK, PatchedAttributes, callbacks_of
from flsv._lightning.private import hook_of
from flsv.core import FederationState
from flsv.core.state import LocalWork
from flsv.data import FederatedDataModule
from flsv.data.groups import client_called
from flsv.data.labels import rows_of_batch
from flsv.data.streams import Stream
from flsv.sampling import ClientSampler
from flsv.utilities.errors import listed
from flsv.utilities.seeding import generator_for, isolated_rngs, seed_global_rngs, shuffle_stream


@dataclass(frozen=True, eq=False)
class LocalEpoch:
    """A client's local epoch ``index``: the first ``num_batches`` of ``loader``."""

    client: int
    index: int
    loader: Any
    num_batches: int


@dataclass(frozen=True)
class ClientBatches:
    """One client's batches of a round."""

    client: int
    epochs: list[LocalEpoch]

    @property
    def lengths(self) -> list[int]:
        """Return the number of batches of each local epoch."""
        return [epoch.num_batches for epoch in self.epochs]

    @property
    def num_batches(self) -> int:
        return sum(self.lengths)


def one_epoch(client: int, num_batches: int, round_index: int) -> list[int]:
    return [num_batches]


class CohortLoader(Iterable[Any]):
    """Train dataloader of one round, which yields the batches of one client after the other.

    Args:
        data: the clients' data.
        cohort: the ids of the round's clients.
        seed: the run's seed.
        round_index: the round's number, from 0.
        lengths: ``lengths(client, num_batches, round_index)`` returns the number of batches of each of a client's local
            epochs, given the number in its loader.
        is_idle: whether no client trains, and the training on the batches is discarded.

    Attributes:
        batches_of_clients: the batches of each client that trains, in the cohort's order.
        epochs: the local epochs of all clients.
        left_out: ``{client: (rows, samples)}`` of the clients in whose batches ``collate_fn`` has left samples out.
    """

    def __init__(
        self,
        data: FederatedDataModule,
        cohort: Sequence[int],
        *,
        seed: int,
        round_index: int,
        lengths: Callable[[int, int, int], list[int]] = one_epoch,
        is_idle: bool = False,
    ) -> None:
        self.round_index = round_index
        self._seed = seed
        self._data = data
        self.left_out: dict[int, tuple[int, int]] = {}  # (rows, samples) by client
        batches_of_cohort = [self._batches_of_client(client, lengths) for client in cohort]
        self.batches_of_clients = [] if is_idle else batches_of_cohort
        self.epochs: list[LocalEpoch] = []
        for client_batches in batches_of_cohort:
            self.epochs += client_batches.epochs
        self._epochs_to_yield = self.epochs

    def _batches_of_client(
        self, client: int, lengths: Callable[[int, int, int], list[int]]
    ) -> ClientBatches:
        loader = self._make_loader(client, index=0)
        epochs = []
        for index, num_batches in enumerate(lengths(client, len(loader), self.round_index)):
            if index > 0:
                loader = self._make_loader(client, index)
            epochs.append(LocalEpoch(client, index, loader, num_batches=num_batches))
        return ClientBatches(client, epochs)

    def _make_loader(self, client: int, index: int) -> Any:
        stream = shuffle_stream(self._seed, self.round_index, client, index)
        return self._data.client_loader(client, "train", generator=stream)

    def select(self, epoch: LocalEpoch | None) -> None:
        """Yield the batches of one local epoch from now on, or with None those of all."""
        self._epochs_to_yield = self.epochs if epoch is None else [epoch]

    def __len__(self) -> int:
        return sum(epoch.num_batches for epoch in self._epochs_to_yield)

    def __iter__(self) -> Iterator[Any]:
        for epoch in self._epochs_to_yield:
            num_yielded = 0
            batches = self._batches_of(epoch)
            if _may_leave_out_samples(epoch.loader):
                batches = self._note_left_out_samples(epoch, batches)
            for batch in batches:
                num_yielded += 1
                yield batch
            if num_yielded < epoch.num_batches:
                # The next client's first batches would be counted as this client's.
                raise RuntimeError(
                    f"{client_called(epoch.client, self._data.client_names)} has only {num_yielded} of the expected "
                    f"{epoch.num_batches} batches in round {self.round_index + 1}. Either its data set raised "
                    "StopIteration, or it has fewer samples than its __len__ returns."
                )

    def _note_left_out_samples(self, epoch: LocalEpoch, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and store their number of rows if it is less than that of their samples."""
        loader = epoch.loader
        # A sampler may draw fewer samples than the client has, and the last batch may be smaller.
        num_samples = min(epoch.num_batches * loader.batch_size, len(loader.sampler))
        num_rows = 0
        for batch_number, batch in enumerate(batches, start=1):
            rows_in_batch = rows_of_batch(batch)
            if rows_in_batch is None:  # its form does not tell
                rows_in_batch = loader.batch_size
            num_rows += rows_in_batch
            # Code after this loop would not run, since nobody asks for more than the epoch's last batch.
            if batch_number == epoch.num_batches and num_rows < num_samples:
                self.left_out[epoch.client] = (num_rows, num_samples)
            yield batch

    def warn_of_left_out(self, named_clients: set[int]) -> None:
        """Warn of clients that have trained with fewer rows than samples, except ``named_clients``, and add them."""
        descriptions = []
        for client, (rows, samples) in self.left_out.items():
            if client not in named_clients:
                name = client_called(client, self._data.client_names)
                descriptions.append(f"{name} has trained with {rows} of {samples} samples")
        named_clients.update(self.left_out)
        if descriptions:
            warnings.warn(
                f"collate_fn leaves samples out, but the clients' weights count all of them: {listed(descriptions)} in "
                "a local epoch. Remove the others from the data sets, for example with torch.utils.data.Subset.",
                stacklevel=2,
            )

    def _batches_of(self, epoch: LocalEpoch) -> Iterator[Any]:
        dataset = getattr(epoch.loader, "dataset", None)
        if isinstance(dataset, Stream):
            dataset.set_epoch(self.round_index)

        # The first batch is read before the client begins. If clients train as one batched model, the global random
        # state is another client's at that time, so the batch's augmentation has a separate random state.
        with isolated_rngs(self._seed, "first batch", self.round_index, epoch.client, epoch.index):
            batches = iter(epoch.loader)
            first_batches = list(islice(batches, 1))  # one, or none of an empty loader
        # Then Lightning's transfer hooks run on it, which may augment it, too.
        if epoch.index == 0:
            seed_global_rngs(self._seed, "transfer", self.round_index, epoch.client)
        further_batches = islice(batches, epoch.num_batches - 1)
        return chain(first_batches, further_batches)


def _may_leave_out_samples(loader: Any) -> bool:
    """Return whether a loader of samples with numbers has a ``collate_fn`` of the user's."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, Stream):
        return False
    return loader.collate_fn is not default_collate


class LocalSteps:
    """Numbers of optimizer steps and batches of each client, which the trainer reports while the client trains.

    Attributes:
        state: the federation's state, at a site what it knows of it.
        client: the client that trains now, or None.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        sampler: ClientSampler,
        state: FederationState,
        work_by_client: Mapping[int, LocalWork],
        limit_train_batches: float,
    ) -> None:
        self._trainer = trainer
        self._data = data
        self._sampler = sampler
        self.state = state
        self.work_by_client = work_by_client
        self._limit_train_batches = limit_train_batches
        self.client: int | None = None
        self._steps_by_client: dict[int, float] = {}
        self._cohorts: list[Sequence[int]] | None = None
        self._shown_loaders: dict[int | None, DataLoader[Any]] = {}
        self.length_was_read = False

    def num_steps(self, client: int) -> float:
        """Return a client's number of optimizer steps in the whole fit, perhaps infinite."""
        if client not in self._steps_by_client:
            self._steps_by_client[client] = self._count_steps(client)
        return self._steps_by_client[client]

    def lengths_of(self, client: int) -> tuple[float, int]:
        """Return a client's numbers of optimizer steps in the whole fit and of batches in a round."""
        return self.num_steps(client), self._count_batches(client)

    def largest_lengths(self) -> tuple[float, int]:
        """Return the largest numbers of steps and batches of any client, which the trainer reports between clients."""
        lengths = [self.lengths_of(client) for client in self._clients_to_train()]
        numbers_of_steps, numbers_of_batches = zip(*lengths)
        return max(numbers_of_steps), max(numbers_of_batches)

    def show_loader_in_data(self) -> PatchedAttributes:
        """Make data modules return the present client's loader. Undo it by ``restore`` of the result."""
        if not isinstance(self._data, FederatedDataModule):  # at a site
            return PatchedAttributes()
        data_modules: list[Any] = [self._data]
        if self._data.users_module is not None:
            data_modules.append(self._data.users_module)
        return PatchedAttributes(
            [(module, "train_dataloader", self.shown_loader) for module in data_modules]
        )

    def num_steps_of_fit(self) -> float:
        """Return the present client's number of optimizer steps in the whole fit, or the largest."""
        return self._count_of_present_client(self.num_steps, name="estimated_stepping_batches")

    def num_batches(self) -> int:
        """Return the present client's number of batches in a round, or the largest."""
        num_batches = self._count_of_present_client(
            self._count_batches, "the number of training batches"
        )
        return int(num_batches)

    def shown_loader(self) -> DataLoader[Any]:
        """Return a loader of the present client's samples, or of all clients' samples if no client trains."""
        client = self.client
        is_configuring = hook_of(self._trainer.lightning_module) == CONFIGURE_HOOK
        if is_configuring:
            self.length_was_read = True
            if client is None:  # the fit's schedule is made for the client with the most batches
                client = max(self._clients_to_train(), key=self._count_batches)
        return self.loader_of(client)

    def loader_of(self, client: int | None) -> DataLoader[Any]:
        """Return a loader of one client's samples, or of all clients' if None. The loader is made once."""
        if client not in self._shown_loaders:
            clients = None if client is None else [client]
            self._shown_loaders[client] = self._data.shown_loader(
                clients, lambda: int(self._trainer.num_training_batches)
            )
        return self._shown_loaders[client]

    def _count_of_present_client(self, count: Callable[[int], float], name: str) -> float:
        """Return ``count(client)`` for the client that trains now, or between clients the largest count."""
        hook = hook_of(self._trainer.lightning_module)
        if hook == CONFIGURE_HOOK:
            self.length_was_read = True  # so each client gets schedules of its own
        if self.client is not None:
            return count(self.client)

        counts = [count(client) for client in self._clients_to_train()]
        largest = max(counts)
        smallest = min(counts)
        # These hooks are not called again for each client, as configure_optimizers is.
        if hook in ("setup", "configure_model") and smallest != largest:
            warnings.warn(
                f"{name} was read in {hook}, before any client trains. The returned value is the largest of all "
                f"clients, {largest:g}. The smallest is {smallest:g}. For a schedule that ends with every client's "
                f"last step, read it in {CONFIGURE_HOOK}.",
                stacklevel=2,
            )
        return largest

    def _clients_to_train(self) -> list[int]:
        """Return all clients, or in a coalition its members."""
        return list(getattr(self._data, "members", self.work_by_client))  # a site has one client

    def _count_steps(self, client: int) -> float:
        if self._trainer.max_epochs in (None, -1):
            return math.inf
        if self._cohorts is None:
            assert self._trainer.max_epochs is not None
            num_rounds = max(self._trainer.max_epochs, 1)
            self._cohorts = [self._expected_cohort(index) for index in range(num_rounds)]

        loader_length = len(self._data.client_loader(client, "train"))
        num_steps = 0
        for round_index, cohort in enumerate(self._cohorts):
            if client in cohort:
                lengths = self.lengths(client, loader_length, round_index)
                num_steps += self.steps_in_round(lengths, round_index)
        return num_steps

    def steps_in_round(self, lengths: Sequence[int], round_index: int) -> int:
        """Return the number of optimizer steps in a round, given the ``lengths`` (batches) of its local epochs."""
        window = self._window(round_index)
        return sum(math.ceil(length / window) for length in lengths)

    def lengths(self, client: int, batches: int, round_index: int) -> list[int]:
        """Return the number of batches of each local epoch of a client in a round, given the ``batches`` in its
        loader."""
        epoch_length = _limit_batches(batches, self._limit_train_batches)
        return self.work_by_client[client].epoch_lengths(epoch_length, self._window(round_index))

    def _window(self, round_index: int) -> int:
        window = self._trainer.accumulate_grad_batches
        for callback in callbacks_of(self._trainer):
            if isinstance(callback, GradientAccumulationScheduler):
                window = callback.get_accumulate_grad_batches(round_index)
        return window

    def _count_batches(self, client: int) -> int:
        loader_length = len(self._data.client_loader(client, "train"))
        return sum(self.lengths(client, loader_length, self.state.round_index))

    def _expected_cohort(self, round_index: int) -> Sequence[int]:
        """Return the cohort of a round, or all clients if it is not known in advance."""
        num_clients = self._data.num_clients
        sampler_class: Any = type(self._sampler)
        saves_state = bool(sampler_class.saved)
        reads_metric = self._sampler.metric is not None
        depends_on_earlier_rounds = saves_state or reads_metric
        for method in ("begin", "end_round", "state_dict", "choose"):
            if getattr(sampler_class, method) is not getattr(ClientSampler, method):
                depends_on_earlier_rounds = True
        if depends_on_earlier_rounds:
            return range(num_clients)  # any client may be drawn
        generator = generator_for(self.state.seed, "cohort", round_index)
        # The sampler reads no contributions, so none are passed.
        return self._sampler.sample(num_clients, {}, generator, round_index).tolist()


def _limit_batches(length: int, limit: float) -> int:
    """Return the number of batches of an epoch under ``limit_train_batches``."""
    if isinstance(limit, int):
        return min(length, limit)
    return max(1, int(length * limit))
