"""LocalSteps: the number of optimizer steps that each client takes in the whole fit.

``configure_optimizers`` reads the length of a schedule, such as a linear decay, from
``trainer.estimated_stepping_batches``. In flsv this is the number of steps of one client in all rounds that it takes
part in, so that the client's schedule ends with its last step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from flsv._lightning.patches import CONFIGURE, PatchedAttributes, answering, callbacks_of
from flsv.configuration.federation_config import LocalWork
from flsv.core import FederationState
from flsv.data import FederatedDataModule
from flsv.sampling import ClientSampler
from flsv.utilities.seeding import generator_for


class LocalSteps:
    """What tells Lightning how many optimizer steps and batches the client has."""

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
        self._known: dict[int, float] = {}
        self._rounds: list[list[int]] | None = None
        self.length_was_read = False
        self.last_batch: bool | None = None

    def of(self, client: int) -> float:
        """Return a client's number of optimizer steps in the whole fit, which may be infinite."""
        if client not in self._known:
            self._known[client] = self._count(client)
        return self._known[client]

    def most(self) -> float:
        """Return the largest number of steps of any client, for schedules of no client."""
        return max(self.of(client) for client in range(self._data.num_clients))

    def tell_steps(self) -> PatchedAttributes:
        """Let the trainer tell the client's steps in the whole fit, and its last batch of a round, until restored."""
        steps = partial(self._answer, self.of, "estimated_stepping_batches")
        answers: dict[str, Callable[[], Any]] = {"estimated_stepping_batches": steps}
        answers["is_last_batch"] = lambda: self.last_batch
        return PatchedAttributes([answering(self._trainer, answers)])

    def tell_batches(self) -> PatchedAttributes:
        """Let the trainer tell the client's batches of a round where it has no train dataloader, until restored."""

        def length() -> range:
            return range(int(self._answer(self._batches, "the number of training batches")))

        answers = {"train_dataloader": length, "num_training_batches": lambda: len(length())}
        changes: list[tuple[Any, str, Any]] = [answering(self._trainer, answers)]
        changes.append((self._trainer.fit_loop, "setup_data", lambda: None))
        if isinstance(self._data, FederatedDataModule):
            changes.append((self._data, "round_loader", length))
        return PatchedAttributes(changes)

    def _answer(self, count: Callable[[int], float], name: str) -> float:
        """Return ``count`` of the present client, or its largest value between clients."""
        hook = self._trainer.lightning_module._current_fx_name
        self.length_was_read = self.length_was_read or hook == CONFIGURE
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
        if self._trainer.max_epochs in (None, -1):
            return math.inf
        length = len(self._data.client_loader(client, "train"))
        rounds = self._rounds_of(client)
        return sum(self.in_round(self.lengths(client, length, index), index) for index in rounds)

    def in_round(self, lengths: Sequence[int], round_index: int) -> int:
        """Return the number of optimizer steps in a round of passes of ``lengths`` batches, if each window of batches
        takes one."""
        window = self._window(round_index)
        return sum(math.ceil(length / window) for length in lengths)

    def lengths(self, client: int, batches: int, round_index: int) -> list[int]:
        """Return the number of batches of each of a client's passes in a round, if its loader has ``batches``."""
        return self.work[client].lengths(limited(batches, self._limit), self._window(round_index))

    def _window(self, round_index: int) -> int:
        window = self._trainer.accumulate_grad_batches
        for callback in callbacks_of(self._trainer):
            if isinstance(callback, GradientAccumulationScheduler):
                window = callback.get_accumulate_grad_batches(round_index)
        return window

    def _batches(self, client: int) -> int:
        return sum(self.lengths(client, len(self._data.client_loader(client, "train")), self._state.round_index))

    def _rounds_of(self, client: int) -> list[int]:
        if self._rounds is None:
            assert self._trainer.max_epochs is not None
            cohorts = list(map(self._cohort, range(max(self._trainer.max_epochs, 1))))
            self._rounds = [
                [index for index, cohort in enumerate(cohorts) if i in cohort] for i in range(self._data.num_clients)
            ]
        return self._rounds[client]

    def _cohort(self, round_index: int) -> Sequence[int]:
        """Return the cohort of a round, or all clients if it cannot be known in advance."""
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
