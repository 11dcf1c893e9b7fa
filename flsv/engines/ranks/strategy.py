"""FederatedStrategy: Lightning's strategy for clients on several processes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from flsv._lightning.patches import callbacks_of
from flsv.configuration.identity import Identity, versions
from flsv.core import ALONE, Ranks
from flsv.engines.ranks.group import PARENT, end_with_parent, meet
from flsv.utilities.declared import Count, Positive, checked
from flsv.utilities.errors import ConfigurationError


@checked
class FederatedStrategy(ParallelStrategy):
    """Strategy that spreads each cohort's clients over processes. Use it as ``Trainer(strategy="federated",
    devices=4)``.

    ``devices`` and ``num_nodes`` have the same meaning as for DDP, and processes are started as for DDP: by the script
    itself, by ``torchrun``, or by SLURM. Within a round every rank (process) runs the ordinary training loop on its own
    clients. After the training of all clients the ranks exchange the updates, and each rank computes the same server
    step. On CPUs, results equal the results of one process to the bit if it uses as many threads (``docs/scaling.md``).

    Lightning and torchmetrics see a single process (``world_size`` is 1), since a client trains alone. The ranks'
    process group is not torch's default process group.

    Args:
        threads: the number of torch's intra-op threads in every rank.
        timeout: the time in seconds that a rank waits for the others at the end of a round. A process that died is
            noticed at once, an unreachable host only after this time.
        **kwargs: arguments of Lightning's ``ParallelStrategy``.

    Attributes:
        ranks: the processes, a single one until the Trainer starts.
        within_round: whether the ranks train their own clients now, without exchanges.
        federation: whether a FederatedLoop runs on this strategy. The loop sets it.

    Example:
        >>> FederatedStrategy(threads=2).strategy_name
        'federated'
    """

    strategy_name = "federated"

    def __init__(self, threads: Count = 1, timeout: Positive = 7 * 86400.0, **kwargs: Any) -> None:
        end_with_parent()
        super().__init__(**kwargs)
        self._threads, self._timeout = threads, timeout
        self.num_nodes = 1
        self.ranks: Ranks = ALONE
        self.within_round = False
        self.federation = False

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[self.local_rank]  # type: ignore[index]  # set by the accelerator connector

    @property
    def world_size(self) -> int:
        return 1  # Lightning must not reduce anything

    @property
    def _size(self) -> int:
        return self.num_nodes * len(self.parallel_devices or ())

    def _configure_launcher(self) -> None:
        environment: Any = self.cluster_environment
        if self._size > 1:
            if not environment.creates_processes_externally:
                os.environ[PARENT] = str(os.getpid())  # the ranks that it starts inherit it
            self._launcher = _SubprocessScriptLauncher(environment, self._size // self.num_nodes, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        environment: Any = self.cluster_environment
        environment.set_global_rank(self.node_rank * (self._size // self.num_nodes) + self.local_rank)
        environment.set_world_size(self._size)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # a function's attribute
        if self._size > 1:
            torch.set_num_threads(self._threads)
            os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
            self.ranks = meet(self.global_rank, self._size, self.root_device, timeout=self._timeout)

    def setup(self, trainer: L.Trainer) -> None:
        if self.ranks.size > 1 and trainer.state.fn == "fit" and not self.federation:
            raise ConfigurationError(
                'the trainer has no FederatedLoop among its callbacks, and with strategy="federated" every rank would '
                'train on all data. Add one, or use strategy="ddp".'
            )
        super().setup(trainer)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)  # type: ignore[union-attr]  # set by then

    # Within a round ranks exchange nothing. Between rounds all ranks do the same work, with rank 0's paths.

    def barrier(self, name: str | None = None) -> None:
        if not (self.within_round or self.ranks.aborted):
            self.ranks.all_gather(None, f"barrier {name or ''}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self.within_round or self.ranks.aborted else self.ranks.broadcast(src, obj, "broadcast")

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint on rank 0 and broadcast it to the other hosts."""
        found = super().load_checkpoint(*args, **kwargs) if self.ranks.rank == 0 else {}
        # On rank 0, reading the checkpoint has done this.
        self.precision_plugin.convert_module(self.lightning_module)  # type: ignore[arg-type]  # set by then
        return self.ranks.broadcast(0, found, "checkpoint")

    def on_exception(self, exception: BaseException) -> None:
        self.ranks.abort(repr(exception))
        super().on_exception(exception)


def ranks_of(trainer: L.Trainer) -> Ranks:
    """Return the group of the processes that a trainer runs on."""
    return getattr(trainer.strategy, "ranks", ALONE)


def share_weights(module: nn.Module, ranks: Ranks) -> None:
    """Copy rank 0's weights to the modules of all ranks."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    shapes = {f"the module's {name}": f"{tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in tensors.items()}
    _check_alike(ranks, Identity(shapes, {}))
    for name, first in ranks.broadcast(0, tensors, "initial weights").items():
        tensors[name].data.copy_(first)


def agree(trainer: L.Trainer, identity: Identity, seed: int, engine: Any = "sequential") -> int:
    """Check that all ranks have the same federation, and return one seed for all ranks.

    Args:
        trainer: the trainer, on any number of processes.
        identity: a description of the data and settings of this rank's federation.
        seed: this rank's seed. Without a seed from the user, ranks have different seeds.
        engine: the loop's ``engine``.

    Returns:
        The seed of rank 0.

    Raises:
        ConfigurationError: ranks differ in data or settings, or a setting does not work on several ranks.
    """
    strategy = trainer.strategy
    if isinstance(strategy, FederatedStrategy):
        strategy.federation = True
    ranks = ranks_of(trainer)
    if ranks.size == 1:
        return seed
    callbacks: Any = callbacks_of(trainer)
    if engine != "sequential" or any(isinstance(callback, Timer) for callback in callbacks):
        raise ConfigurationError(
            f"on {ranks.size} ranks, FederatedLoop(engine=...) would run the clients elsewhere, and max_time (a Timer) "
            "would stop one rank in the middle of a round, by its own clock. Leave it out, and say max_epochs."
        )
    _check_alike(ranks, replace(identity, settings={**versions(), **identity.settings}))
    return ranks.broadcast(0, seed, "the seed")


def _check_alike(ranks: Ranks, mine: Identity) -> None:
    """Refuse settings or data of another rank that differ from this rank's."""
    for rank, told in enumerate(ranks.all_gather(mine.plain(), "the federation")):
        theirs = Identity(**told)
        if differ := mine.other_settings(theirs, f"is {{}} on rank {ranks.rank} and {{}} on rank {rank}"):
            raise ConfigurationError(f"{'; '.join(differ)}. Start all ranks with the same configuration.")
        if who := mine.other_holders(theirs):
            raise ConfigurationError(
                f"ranks {ranks.rank} and {rank} have dealt out other data: {who} hold other samples or labels. All "
                "need the same data, and a source that splits at random a seed: seed_everything before the data module."
            )


StrategyRegistry.register("federated", FederatedStrategy, "the clients of a federation on several processes")
