"""RankGroup: communication of ranks over Gloo, and of models over NCCL between graphics cards."""
# The group is not torch's default one, so that no other code finds it and shards data or reduces gradients over it. If
# a process dies, the others notice the closed connection at their next exchange with it.

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, rendezvous
from torch.serialization import default_restore_location
from torch.utils._pytree import tree_map_only

from flsv.core import ALONE, Ranks
from flsv.utilities.errors import ConfigurationError

#: Linux's prctl option by which a process gets a signal when its parent ends.
_PR_SET_PDEATHSIG = 1
#: Seconds within which NCCL must copy models between cards. Ranks that are late are waited for before that, over Gloo.
NCCL_TIMEOUT = 600.0
#: The environment variable with which a script gives its process id to the ranks that it starts.
PARENT = "FLSV_RANKS_PARENT"


def started_by_script() -> bool:
    """Return whether the script of rank 0 has started this process as another rank."""
    return PARENT in os.environ and int(os.environ.get("LOCAL_RANK", 0)) > 0


def end_with_parent() -> None:
    """End this process when the script or torchrun agent that started it ends."""
    started = "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("LOCAL_RANK", 0)) > 0
    if started and sys.platform == "linux":  # elsewhere the process ends at its next exchange
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if started and os.environ.get(PARENT, "") not in ("", str(os.getppid())):
        raise SystemExit("the script that has started this rank has ended already.")


class RankGroup(Ranks):
    """Communication between ranks in several processes, over Gloo."""

    # Rank 0 serves `store`, at which the ranks have met. Without `direct` tensors are copied to the CPU for an
    # exchange.

    def __init__(self, group: Any, device: torch.device, store: Any = None, direct: Any = None) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group, self._device, self._store, self.direct = group, device, store, direct

    def all_gather(self, value: Any, about: str) -> list[Any]:
        return [self.broadcast(rank, value, about) for rank in range(self.size)]

    def broadcast(self, source: int, value: Any, about: str) -> Any:
        data = _packed((about, value)) if source == self.rank else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self.broadcast_rows([length], [source], about)
        data = data if source == self.rank else data.new_empty(int(length))
        self.broadcast_rows([data], [source], about)
        if source == self.rank:
            return value
        theirs, found = torch.load(io.BytesIO(data.numpy().data), map_location=self._restored, weights_only=False)
        if theirs != about:
            self.abort("ranks are out of step")
            raise RuntimeError(
                f"ranks are out of step: rank {source} is at {theirs!r}, rank {self.rank} at {about!r}. Something that "
                "all do alike was done by some only, such as a checkpoint saved under `if is_global_zero`, or depends "
                "on a rank's own clock or random numbers."
            )
        return found

    def broadcast_rows(self, matrix: Tensor | Sequence[Tensor], owners: Sequence[int], about: str) -> None:
        if self.aborted:
            raise RuntimeError(f"rank {self.rank} of {self.size} has given up, and cannot exchange {about}.")
        direct = self.direct if all(row.device == self._device for row in matrix) else None
        there = [row if direct is not None else row.cpu() for row in matrix]  # no copies if the rows are on the CPU
        try:
            if direct is not None:  # which would wait for a rank that is gone, where Gloo notices
                self._group.barrier().wait()
            group = self._group if direct is None else direct
            for work in [group.broadcast(row, owner) for row, owner in zip(there, owners)]:
                work.wait()
        except RuntimeError as error:
            self.abort(f"another rank is gone ({about})")
            raise RuntimeError(
                f"rank {self.rank} of {self.size} cannot go on ({about}): another rank is gone, or does not come; its "
                f"message says more ({error}). Start again from the last checkpoint, on any number of ranks."
            ) from error
        for row, sent, owner in zip(matrix, there, owners):
            if sent is not row and owner != self.rank:
                row.copy_(sent)

    def abort(self, why: str) -> None:
        if not self.aborted:
            self.aborted = True
            print(f"rank {self.rank} of {self.size} gives up: {why}.", file=sys.stderr, flush=True)
            self._group = self.direct = None  # its connections are closed: the others notice

    def _restored(self, storage: Any, place: str) -> Any:
        return default_restore_location(storage, place if place == "cpu" else str(self._device))


def _packed(value: Any) -> Tensor:
    """Serialize a value with ``torch.save`` into a uint8 tensor."""
    file = io.BytesIO()
    # Clones: saving a view would save all of its base tensor.
    torch.save(tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


@cache
def meet(
    rank: int, size: int, device: torch.device, start_timeout: float = 600.0, timeout: float = 7 * 86400.0
) -> RankGroup:
    """Connect this process with the other ranks at MASTER_ADDR and MASTER_PORT, once."""
    patience = timedelta(seconds=start_timeout)
    try:
        # torchrun's store outlives restarts: the prefix keeps entries of an earlier attempt from being read.
        attempt = f"flsv/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        store = PrefixStore(attempt, next(rendezvous("env://", rank, size, timeout=patience))[0])
        group = ProcessGroupGloo(store, rank, size, patience)
    except RuntimeError as error:
        raise ConfigurationError(
            f"rank {rank} of {size} has not met the others within {start_timeout:g} s: {error}. MASTER_ADDR and "
            f"MASTER_PORT ({os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}) must be an address of rank 0's "
            f"host that all others reach, and a free port there; start {size} processes."
        ) from error
    group._set_default_timeout(timedelta(seconds=timeout))
    ranks = RankGroup(group, device, store)
    cards = ranks.all_gather(card_of(device), "the graphics cards")
    if cards_of_their_own(cards):
        ranks.direct = nccl_group(store, rank, size)
    return ranks


def card_of(device: torch.device) -> str | None:
    """Return a graphics card's id, unique among hosts, or None without NCCL."""
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def cards_of_their_own(cards: Sequence[str | None]) -> bool:
    """Return whether each rank has its own graphics card, as NCCL requires.

    Example:
        >>> cards_of_their_own(["a", "b"]), cards_of_their_own(["a", "a"]), cards_of_their_own(["a", None])
        (True, False, False)
    """
    return len({*cards} - {None}) == len(cards)


def nccl_group(store: Any, rank: int, size: int) -> Any:
    """Return an NCCL process group of all ranks."""
    from torch.distributed import ProcessGroupNCCL  # not in every build of torch

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=NCCL_TIMEOUT)
    return ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)


def ranks_of_environment() -> Ranks:
    """Return the launcher's process group, for work without a Trainer.

    The launcher is ``torchrun``, or another program that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. An example
    of such work is :class:`flsv.retraining.RetrainedUtility`.

    Example:
        >>> ranks_of_environment().size  # outside of torchrun
        1
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return ALONE
    end_with_parent()
    return meet(int(os.environ["RANK"]), size, torch.device("cpu"))
