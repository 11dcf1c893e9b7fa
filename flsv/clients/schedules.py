"""Each client's own place in step-wise learning-rate schedules, and how many optimizer steps it takes in the whole fit.

The configuration says it, with manual optimization, too: a scheduler with ``interval="step"`` is the client's, one with
``interval="epoch"`` the federation's.

A schedule such as a linear decay is given its length when it is made, by ``trainer.estimated_stepping_batches`` in
``configure_optimizers``. Here that number is one client's: the steps of the rounds that it takes part in, so that its
schedule ends where it would end if the module were trained on this client's data alone, for as many epochs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.types import LRSchedulerTypeTuple
from torch import Tensor
from torch.optim import Optimizer

from flsv._lightning.patches import configured
from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.round import FederationState
from flsv.sampling import ClientSampler
from flsv.seeding import generator_for

_CONFIGURE = "configure_optimizers"


class LocalSteps:
    """Counts each client's optimizer steps.

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
        asked: whether ``configure_optimizers`` has asked, so that its schedules are different ones for clients with
            different numbers of steps.
    """

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
        self._client: int | None = None
        self._known: dict[int, float] = {}
        self._rounds: list[list[int]] | None = None
        self.asked = self._warned = False

    def of(self, client: int) -> float:
        """One client's steps; infinite where there is no last round."""
        if client not in self._known:
            self._known[client] = self._count(client)
        return self._known[client]

    def most(self) -> float:
        """The steps of the client that takes the most: for schedules that are no client's."""
        return max(self.of(client) for client in range(self._data.num_clients))

    def enter(self, client: int | None) -> None:
        """From now on, :meth:`answer` is this client's; None: the largest."""
        self._client = client

    @property
    def configuring(self) -> bool:
        """Whether ``configure_optimizers`` runs."""
        return self._trainer.lightning_module._current_fx_name == _CONFIGURE

    def length(self) -> TrainLength:
        """What stands for the train dataloader in ``configure_optimizers``: one client's batches in a round; the
        largest number where no client trains."""
        return TrainLength(int(self._answer(self._batches, "the number of training batches")))

    def answer(self) -> float:
        """What ``trainer.estimated_stepping_batches`` is."""
        return self._answer(self.of, "estimated_stepping_batches")

    def _answer(self, count: Callable[[int], float], name: str) -> float:
        self.asked = self.asked or self.configuring
        if self._client is not None:
            return count(self._client)
        counts = list(map(count, range(self._data.num_clients)))
        hook = self._trainer.lightning_module._current_fx_name
        if hook in ("setup", "configure_model") and min(counts) != max(counts) and not self._warned:
            self._warned = True
            warnings.warn(
                f"{name} was read in {hook}, where no client trains: it is that of the client with the most, "
                f"{max(counts):g}, and others have as few as {min(counts):g}. A schedule that is to end with every "
                f"client's last step must read it in {_CONFIGURE}.",
                stacklevel=2,
            )
        return max(counts)

    def _count(self, client: int) -> float:
        trainer = self._trainer
        if trainer.max_epochs in (None, -1):
            return math.inf
        batches = self._batches(client)
        windows = next((c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)), None)  # type: ignore[attr-defined]

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
            rounds, clients = max(self._trainer.max_epochs, 1), self._data.num_clients
            try:
                cohorts = [self._cohort(index) for index in range(rounds)]
            except _Asks:
                cohorts = [list(range(clients))] * rounds
            self._rounds = [[index for index, cohort in enumerate(cohorts) if i in cohort] for i in range(clients)]
        return self._rounds[client]

    def _cohort(self, round_index: int) -> list[int]:
        kind: Any = type(self._sampler)
        more = ("begin", "end_round", "state_dict", "choose")
        if kind.saved or any(getattr(kind, name) is not getattr(ClientSampler, name) for name in more):
            raise _Asks  # it goes by more than the round and the seed
        draw = generator_for(self._state.seed, "cohort", round_index)
        return self._sampler.sample(self._data.num_clients, _Unknown(), draw, round_index).tolist()


def limited(length: int, limit: float) -> int:
    """Batches of a local epoch of ``length`` under Lightning's ``limit_train_batches``."""
    return min(length, limit) if isinstance(limit, int) else max(1, int(length * limit))


class TrainLength:
    """A stand-in for the train dataloader that only has a length: of a client's batches in a round."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("a round's batches are known from the start of the fit on; here they can be counted only.")


class _Asks(Exception):
    """A sampler wants to know what nobody can know yet."""


class _Unknown(dict[str, Any]):
    """The contributions of rounds to come."""

    def get(self, *_: Any) -> NoReturn:
        raise _Asks

    __getitem__ = __contains__ = __iter__ = __len__ = items = values = keys = get  # type: ignore[assignment]


#: Options of a parameter group that schedulers write: torch's and timm's.
SCHEDULED = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "lr_scale", "weight_decay"}
    | {"momentum", "base_momentum", "max_momentum", "betas"}
)
_NEVER = 2**62


class Schedules:
    """The schedulers of a fit, each set to the position of the client that trains.

    Between two clients, and between rounds, they are the federation's: as ``configure_optimizers`` gave them, but for
    the steps that it takes itself.

    Args:
        trainer: with its optimizers set up.
        steps: how many every client takes; None: as if it had not been asked.

    Raises:
        ConfigurationError: one optimizer has a client's and a federation's scheduler; the module keeps a scheduler
            that it does not return from ``configure_optimizers``, or steps the federation's while a client trains.
    """

    def __init__(self, trainer: L.Trainer, steps: LocalSteps | None = None) -> None:
        self._trainer, self._steps = trainer, steps
        self._manual = not trainer.lightning_module.automatic_optimization
        configs = trainer.lr_scheduler_configs
        tracked = [c for c in configs if c.interval == "step"]
        self.all: list[Any] = [config.scheduler for config in configs]
        self._places = [configs.index(config) for config in tracked]
        self._schedulers: list[Any] = [config.scheduler for config in tracked]
        self._frequencies = [(c, c.frequency) for c in tracked if not self._manual and c.frequency > 1]
        self._check(trainer)
        self._families: dict[float, _Family] = {}
        self._own = [vars(scheduler) for scheduler in self._schedulers]
        self._federations: list[Any] | None = None
        self._of_rounds = [c.scheduler for c in configs if self._manual and c.interval != "step"]
        self._begun: list[Any] = []

    def is_federations(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's learning rate follows the rounds, by a scheduler that is told to.

        Lightning steps it just before the last client's last batch ends.
        """
        # As they are now: StochasticWeightAveraging brings its own when its time comes.
        known = {id(scheduler) for scheduler in self._schedulers}
        by_round = [
            config.scheduler for config in self._trainer.lr_scheduler_configs if id(config.scheduler) not in known
        ]
        return any(scheduler.optimizer is optimizer for scheduler in by_round)

    def load(self, client: int, states: dict[int, Any] | None) -> None:
        """Put the schedulers where the client has left them; at their beginning where it comes for the first time."""
        self._begun = [deepcopy(scheduler.state_dict()) for scheduler in self._of_rounds]
        if not self._schedulers:
            return
        self._federations = self.states()
        if (family := self._family(client)) is not None:
            family.enter(self._schedulers)
        for i, state in (states or {}).items():
            self._schedulers[i].load_state_dict(deepcopy(state))

    def begin_batch(self, position: int) -> None:
        """Before a client's batch, counted from 0: a scheduler of ``frequency=k`` steps after every k-th of its own."""
        for config, frequency in self._frequencies:
            config.frequency = 1 if (position + 1) % frequency == 0 else _NEVER

    def leave(self) -> dict[int, Any]:
        """The states of the client's own schedulers; all of them are the federation's again."""
        self._check_owner()
        if self._federations is None:
            return {}
        now = self.states()
        for scheduler, own, state in zip(self._schedulers, self._own, self._federations):
            scheduler.__dict__ = own
            scheduler.load_state_dict(deepcopy(state))
        for config, frequency in self._frequencies:
            config.frequency = frequency
        self._federations = None
        return dict(enumerate(now))

    def states(self) -> list[Any]:
        """Copies, in the order of the tracked schedulers."""
        return [deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]

    def rewind(self, saved: list[Any]) -> None:
        """Put the federation's states into those of a checkpoint that is saved while a client trains."""
        for place, state in zip(self._places, self._federations or []):
            saved[place] = deepcopy(state)

    def _family(self, client: int) -> _Family | None:
        """The schedulers that ``configure_optimizers`` gives for a client with so many steps; None: those that are
        there, or their like."""
        if self._steps is None or not self._steps.asked:
            return None
        number = self._steps.of(client)
        if number == self._steps.most():
            return None
        if number not in self._families:
            self._families[number] = _Family(self._trainer, self._places)
        return self._families[number]

    def _check(self, trainer: L.Trainer) -> None:
        for scheduler in self._schedulers:
            if self.is_federations(scheduler.optimizer):
                raise ConfigurationError(
                    "one optimizer has a scheduler that steps per batch and one that steps per round: the learning "
                    "rate would belong to the client and to the federation at once. Chain them in one scheduler "
                    "(torch.optim.lr_scheduler.SequentialLR or ChainedScheduler)."
                )
        known = {id(part) for scheduler in self.all for part in _parts(scheduler)}
        for name, layer in trainer.lightning_module.named_modules():
            for attribute, value in vars(layer).items():
                if isinstance(value, LRSchedulerTypeTuple) and id(value) not in known:
                    raise ConfigurationError(
                        f"{f'{name}.{attribute}' if name else attribute} is a learning-rate scheduler that "
                        "configure_optimizers does not return: its state would pass from client to client. Return it, "
                        "and get it by self.lr_schedulers()."
                    )

    def _check_owner(self) -> None:
        begun, self._begun = self._begun, []
        for scheduler, state in zip(self._of_rounds, begun):
            if not same(scheduler.state_dict(), state):
                raise ConfigurationError(
                    f"{type(scheduler).__name__} is stepped while a client trains, and its interval is a round's: it "
                    "would pass from client to client. Return it with {'scheduler': ..., 'interval': 'step'}, or step "
                    "it in on_train_epoch_end only."
                )


class _Family:
    """Schedulers made for another number of steps. They write into the parameter groups of the ones in use."""

    def __init__(self, trainer: L.Trainer, places: list[int]) -> None:
        self._optimizers, schedulers = configured(trainer)
        self._used = trainer.optimizers
        kinds = [type(config.scheduler) for config in trainer.lr_scheduler_configs]
        if [type(scheduler) for scheduler in schedulers] != kinds or len(self._optimizers) != len(self._used):
            raise ConfigurationError(
                "configure_optimizers asks the trainer how long the training is, and gives other optimizers or "
                "schedulers for a client with fewer steps: it must give the same ones, of another length."
            )
        self._groups = [
            [{k: deepcopy(v) for k, v in group.items() if k in SCHEDULED} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        self._schedulers = [schedulers[place] for place in places]
        self._fresh = [deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns of a schedule before a step

    def enter(self, schedulers: list[Any]) -> None:
        """Become these schedulers: whoever holds one of them holds this one."""
        for optimizer, used, fresh in zip(self._optimizers, self._used, self._groups):
            optimizer.param_groups = used.param_groups
            for group, options in zip(used.param_groups, fresh):
                put(group, options)
        for scheduler, mine, fresh_state in zip(schedulers, self._schedulers, self._fresh):
            mine.load_state_dict(deepcopy(fresh_state))
            optimizer = scheduler.optimizer
            scheduler.__dict__ = vars(mine)
            scheduler.optimizer = optimizer


def put(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Write options into a parameter group; a tensor stays the object that it is."""
    for name, value in options.items():
        present = group.get(name)
        if isinstance(present, Tensor) and isinstance(value, Tensor) and present.shape == value.shape:
            if present is not value:
                with torch.no_grad():
                    present.copy_(value)
        else:
            group[name] = deepcopy(value)


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _parts(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for value in vars(scheduler).values():
        for part in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(part, LRSchedulerTypeTuple):
                yield from _parts(part)
