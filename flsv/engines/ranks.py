"""FederatedStrategy: Lightning's strategy for clients on several processes (ranks), and their communication.

Ranks communicate over Gloo, through the host's memory. The process group is not torch's default one, so that no other
code shards data or reduces gradients over it. If a process dies, the others detect the closed connection at their next
exchange with it.

Tier: provisional.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pkgutil import resolve_name
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroupGloo, rendezvous
from torch.serialization import default_restore_location
from torch.utils._pytree import tree_map_only

from flsv._lightning.patches import callbacks_of
from flsv._lightning.private import SubprocessLauncher
from flsv.configuration.identity import Identity
from flsv.core import ALONE, Ranks
from flsv.games.module_copies import named_tensors
from flsv.utilities.declared import Count, Positive, checked
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.formats import version_settings
from flsv.utilities.stop_signals import stop_if_signaled

__all__ = ["FederatedStrategy", "started_by_script"]

#: Linux's prctl option that sends a process a signal when its parent ends.
_PR_SET_PDEATHSIG = 1
#: Environment variable in which a script passes its process id to the ranks that it starts.
PARENT_VARIABLE = "FLSV_RANKS_PARENT"
#: Default of the time for which ranks wait for each other.
WEEK_SECONDS = 7 * 86400.0


def started_by_script() -> bool:
    """Return whether the script of rank 0 has started this process as a further rank."""
    return PARENT_VARIABLE in os.environ and int(os.environ.get("LOCAL_RANK", 0)) > 0


def end_with_parent() -> None:
    """End this process when the script or torchrun agent that started it ends."""
    started = "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("LOCAL_RANK", 0)) > 0
    if started and sys.platform == "linux":  # elsewhere the process ends at its next exchange
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(PARENT_VARIABLE, "")
    has_another_parent = parent not in ("", str(os.getppid()))
    if started and has_another_parent:
        raise SystemExit("The script that started this rank has already ended.")


class RankGroup(Ranks):
    """Communication between ranks in several processes, over Gloo."""

    def __init__(self, group: Any, device: torch.device, store: Any = None) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        self._device = device
        self._store = store  # rank 0 serves the store, through which the ranks have connected

    def all_gather(self, value: Any, exchange_name: str) -> list[Any]:
        return [self.broadcast(rank, value, exchange_name) for rank in range(self.size)]

    def broadcast(self, source: int, value: Any, exchange_name: str) -> Any:
        is_sender = source == self.rank
        if is_sender:
            data = _packed((exchange_name, value))  # uint8, [length]
        else:
            data = torch.empty(0, dtype=torch.uint8)
        # The receivers need the length before the bytes. A broadcast overwrites their tensors.
        length = torch.tensor([len(data)])
        self.broadcast_rows([length], [source], exchange_name)
        if not is_sender:
            data = data.new_empty(int(length))
        self.broadcast_rows([data], [source], exchange_name)
        if is_sender:
            return value

        received_bytes = io.BytesIO(data.numpy().data)
        sent_name, received = torch.load(
            received_bytes, map_location=self._restore_on_device, weights_only=False
        )
        self._check_step(source, sent_name, exchange_name)
        return received

    def _check_step(self, source: int, sent_name: str, exchange_name: str) -> None:
        """Raise RuntimeError unless this rank and the rank ``source`` are at the same exchange."""
        if sent_name != exchange_name:
            self.abort("ranks are out of step")
            raise RuntimeError(
                f"ranks are out of step: rank {source} is at {sent_name!r}, rank {self.rank} at {exchange_name!r}. "
                "Some ranks have run code that all ranks must run, such as a checkpoint saved under `if "
                "is_global_zero`, or the code depends on a rank's own clock or random numbers."
            )

    def broadcast_rows(
        self, matrix: Tensor | Sequence[Tensor], owners: Sequence[int], exchange_name: str
    ) -> None:
        if self.aborted:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} has stopped communicating, so it cannot exchange {exchange_name}."
            )
        cpu_rows = [row.cpu() for row in matrix]  # no copies if the rows are on the CPU
        try:
            # All broadcasts run at once. Each writes the owner's row into that of the other ranks.
            broadcasts = list(map(self._group.broadcast, cpu_rows, owners))
            for broadcast in broadcasts:
                broadcast.wait()
        except RuntimeError as error:
            stop_if_signaled()  # whoever stops all ranks has stopped the other one first
            self.abort(f"another rank has ended ({exchange_name})")
            raise RuntimeError(
                f"rank {self.rank} of {self.size} cannot continue ({exchange_name}): another rank has ended or does "
                f"not reply ({error}). That rank's own message has the reason. Resume from the last checkpoint, on any "
                "number of ranks."
            ) from error
        for row, cpu_row, owner in zip(matrix, cpu_rows, owners):
            if cpu_row is not row and owner != self.rank:
                row.copy_(cpu_row)

    def abort(self, why: str) -> None:
        if not self.aborted:
            self.aborted = True
            print(f"rank {self.rank} of {self.size} stops: {why}.", file=sys.stderr, flush=True)
            self._group = None  # this closes its connections, which the other ranks detect

    def _restore_on_device(self, storage: Any, location: str) -> Any:
        return default_restore_location(
            storage, location if location == "cpu" else str(self._device)
        )


def _packed(value: Any) -> Tensor:
    file = io.BytesIO()
    # Tensors are cloned, since torch.save would save the whole base tensor of a view.
    torch.save(tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


@cache
def meet(
    rank: int,
    size: int,
    device: torch.device,
    start_timeout: float = 600.0,
    timeout: float = WEEK_SECONDS,
) -> RankGroup:
    """Connect this process with the other ranks at MASTER_ADDR and MASTER_PORT, once."""
    meeting_timeout = timedelta(seconds=start_timeout)
    try:
        # torchrun's store is not cleared by restarts. The prefix separates the keys of this attempt from earlier ones.
        prefix = f"flsv/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        shared_store, _, _ = next(rendezvous("env://", rank, size, timeout=meeting_timeout))
        store = PrefixStore(prefix, shared_store)
        group = ProcessGroupGloo(store, rank, size, meeting_timeout)
    except RuntimeError as error:
        raise ConfigurationError(
            f"rank {rank} of {size} has not connected to the others within {start_timeout:g} s: {error}. MASTER_ADDR "
            f"and MASTER_PORT ({os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}) must be an address of rank 0's "
            f"host that all others can reach, and a free port there. Start {size} processes."
        ) from error
    group._set_default_timeout(timedelta(seconds=timeout))
    return RankGroup(group, device, store)


@checked
class FederatedStrategy(ParallelStrategy):
    """Strategy that spreads each cohort's clients over processes. Use it as ``Trainer(strategy="federated",
    devices=4)``.

    ``devices``, ``num_nodes`` and the start of processes (by the script itself, ``torchrun`` or SLURM) are as for DDP.
    Within a round every rank (process) runs the ordinary training loop on its own clients. After their training the
    ranks exchange the updates, and each rank computes the same server step. On CPUs, results are bitwise those of one
    process with as many threads (``docs/scaling.md``).

    Lightning and torchmetrics see a single process (``world_size`` is 1), since a client trains alone. The ranks'
    process group is not torch's default process group.

    Args:
        threads: the number of torch's intra-op threads in every rank.
        timeout: the time in seconds that a rank waits for the others at the end of a round. The ranks detect a process
            that has died at once, but an unreachable host only after this time.
        **kwargs: arguments of Lightning's ``ParallelStrategy``.

    Attributes:
        ranks: the processes, a single one until the Trainer starts.
        within_round: whether the ranks train their own clients now, without exchanges.
        federation: whether a FederatedLoop runs on this strategy. :meth:`agree` sets it.

    Example:
        >>> FederatedStrategy(threads=2).strategy_name
        'federated'
    """

    strategy_name = "federated"
    ranks: Ranks = ALONE

    def __init__(self, threads: Count = 1, timeout: Positive = WEEK_SECONDS, **kwargs: Any) -> None:
        end_with_parent()
        super().__init__(**kwargs)
        self._num_threads = threads
        self._timeout = timeout
        self.num_nodes = 1
        self.within_round = False
        self.federation = False

    @property
    def federated_engine(self) -> Any:
        """Return the engine that trains a loop's clients on these processes, or None if there is one process."""
        if self.ranks.size == 1:
            return None
        return resolve_name("flsv.engines.several_ranks:SeveralRanks")

    def agree(self, trainer: L.Trainer, identity: Identity, seed: int, *, engine: Any) -> int:
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
        self.federation = True
        if self.ranks.size == 1:
            return seed

        has_timer = any(isinstance(callback, Timer) for callback in callbacks_of(trainer))
        if engine != "sequential" or has_timer:
            raise ConfigurationError(
                f"on {self.ranks.size} ranks, FederatedLoop(engine=...) would not use the ranks, and max_time (a "
                "Timer) would stop a rank within a round by its own clock. Remove the option, and set max_epochs."
            )
        settings = {**version_settings(), **identity.settings}
        _check_alike(self.ranks, replace(identity, settings=settings))
        return self.ranks.broadcast(0, seed, "the seed")

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[self.local_rank]  # type: ignore[index]  # set by the accelerator connector

    @property
    def world_size(self) -> int:
        return 1  # so that Lightning reduces nothing

    @property
    def _size(self) -> int:
        return self.num_nodes * len(self.parallel_devices or ())

    def _configure_launcher(self) -> None:
        environment: Any = self.cluster_environment
        if self._size <= 1:
            return
        if not environment.creates_processes_externally:
            # The ranks that this process starts inherit the variable.
            os.environ[PARENT_VARIABLE] = str(os.getpid())
        ranks_per_node = self._size // self.num_nodes
        self._launcher = SubprocessLauncher(environment, ranks_per_node, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        environment: Any = self.cluster_environment
        ranks_per_node = self._size // self.num_nodes
        environment.set_global_rank(self.node_rank * ranks_per_node + self.local_rank)
        environment.set_world_size(self._size)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # a function's attribute
        if self._size > 1:
            torch.set_num_threads(self._num_threads)
            os.environ |= {
                "MASTER_ADDR": environment.main_address,
                "MASTER_PORT": str(environment.main_port),
            }
            self.ranks = meet(self.global_rank, self._size, self.root_device, timeout=self._timeout)

    def setup(self, trainer: L.Trainer) -> None:
        if self.ranks.size > 1 and trainer.state.fn == "fit" and not self.federation:
            raise ConfigurationError(
                'strategy="federated" needs a FederatedLoop among the trainer\'s callbacks, without which every rank '
                'would train on all data. Add one, or use strategy="ddp".'
            )
        super().setup(trainer)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)  # type: ignore[union-attr]  # set by then

    # Within a round ranks do not communicate. Between rounds all ranks do the same work, with rank 0's paths.

    def barrier(self, name: str | None = None) -> None:
        if not (self.within_round or self.ranks.aborted):
            self.ranks.all_gather(None, f"barrier {name or ''}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.within_round or self.ranks.aborted:
            return obj
        return self.ranks.broadcast(src, obj, "broadcast")

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint on rank 0 and broadcast it to the other hosts."""
        checkpoint: dict[str, Any] = {}
        if self.ranks.rank == 0:
            checkpoint = super().load_checkpoint(*args, **kwargs)
        # Reading the checkpoint has converted the module on rank 0, so the other ranks convert theirs, too.
        self.precision_plugin.convert_module(self.lightning_module)  # type: ignore[arg-type]  # set by then
        return self.ranks.broadcast(0, checkpoint, "checkpoint")

    def on_exception(self, exception: BaseException) -> None:
        self.ranks.abort(repr(exception))
        super().on_exception(exception)


def share_weights(module: nn.Module, ranks: Ranks) -> None:
    """Copy rank 0's weights to the modules of all ranks."""
    tensors = named_tensors(module)
    shapes = {
        f"the module's {name}": f"{tuple(tensor.shape)}, {tensor.dtype}"
        for name, tensor in tensors.items()
    }
    _check_alike(ranks, Identity(shapes, {}))
    initial_weights = ranks.broadcast(0, tensors, "initial weights")
    for name, tensor_of_rank_0 in initial_weights.items():
        tensors[name].data.copy_(tensor_of_rank_0)


def _check_alike(ranks: Ranks, identity: Identity) -> None:
    """Raise ConfigurationError if another rank has other settings or data than this rank."""
    identities = ranks.all_gather(identity.plain(), "the federation")
    for rank, plain_identity in enumerate(identities):
        identity_of_rank = Identity(**plain_identity)
        # With a place for each rank's value of a setting.
        template = f"is {{}} on rank {ranks.rank} and {{}} on rank {rank}"
        differences = identity.other_settings(identity_of_rank, template)
        if differences:
            raise ConfigurationError(
                f"{'; '.join(differences)}. Start all ranks with the same configuration."
            )
        owners = identity.owners_of_other_samples(identity_of_rank)
        if owners:
            raise ConfigurationError(
                f"ranks {ranks.rank} and {rank} have different data: the samples or labels of {owners} differ. All "
                "ranks need the same data. If the source splits at random, call seed_everything before the data "
                "module is made."
            )
