"""RankGroup: communication between ranks, over a process group of their own."""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, GatherOptions

from flsv.engines.ranks.heartbeat import Gone, Heartbeat
from flsv.participants import Ranks


class RankGroup(Ranks):
    """Communication of ranks in several processes.

    The group is not torch's default one: nobody else's code finds it, and synchronises behind our back.

    Args:
        rank: this process's number.
        size: how many there are.
        group: a Gloo process group.
        heartbeat: knows who is gone.
        device: of this rank's tensors.
        fast: a NCCL process group for what lies on CUDA devices; None: it goes through the CPU.
    """

    def __init__(
        self, rank: int, size: int, group: Any, heartbeat: Heartbeat, device: torch.device, fast: Any = None
    ) -> None:
        self.rank, self.size, self.heartbeat = rank, size, heartbeat
        self._group, self._device, self._fast = group, device, fast
        #: Rank 0's is the server of all others: it has to last.
        self.store: Any = None

    def everybody(self, value: Any, about: str) -> list[Any]:
        self._meet(about)
        mine = _packed((about, value), about)
        lengths = torch.zeros(self.size, dtype=torch.long)
        lengths[self.rank] = len(mine)
        self._wait([self._group.allreduce([lengths])], about)
        parts = [mine if r == self.rank else torch.empty(n, dtype=torch.uint8) for r, n in enumerate(lengths.tolist())]
        self._wait([self._broadcast(self._group, part, r) for r, part in enumerate(parts)], about)
        return [value if r == self.rank else self._unpacked(part, r, about) for r, part in enumerate(parts)]

    def from_rank(self, source: int, value: Any, about: str) -> Any:
        self._meet(about)
        mine = _packed((about, value), about) if source == self.rank else None
        length = torch.tensor([0 if mine is None else len(mine)])
        self._wait([self._broadcast(self._group, length, source)], about)
        part = torch.empty(int(length), dtype=torch.uint8) if mine is None else mine
        self._wait([self._broadcast(self._group, part, source)], about)
        return value if mine is not None else self._unpacked(part, source, about)

    def at_first(self, value: Any, about: str) -> list[Any] | None:
        self._meet(about)
        mine = _packed((about, value), about)
        lengths = torch.zeros(self.size, dtype=torch.long)
        lengths[self.rank] = len(mine)
        self._wait([self._group.allreduce([lengths])], about)
        # Of one length, as Gloo gathers; and not by send and recv, of which nobody can tell whether they are done.
        sent = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        sent[: len(mine)] = mine
        options = GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(sent) for _ in range(self.size)] if self.rank == 0 else []
        self._wait([self._group.gather([parts] if parts else [], [sent], options)], about)
        if self.rank:
            return None
        ends = lengths.tolist()
        return [value, *(self._unpacked(parts[r][: ends[r]], r, about) for r in range(1, self.size))]

    def blocks(self, block: Tensor, rows: Sequence[int], about: str) -> Iterator[Tensor]:
        for rank, count in enumerate(rows):
            mine = rank == self.rank
            part = block if mine else block.new_empty(count, block.shape[1])
            if count:
                part = part.contiguous()
                self._spread([part], [rank], about)
            yield part

    def rows(self, matrix: Tensor, owners: Sequence[int], about: str) -> None:
        self._spread(list(matrix), owners, about)

    def _spread(self, tensors: Sequence[Tensor], owners: Sequence[int], about: str) -> None:
        """Contiguous tensors, each from its owner, in place."""
        if self._fast is not None or all(tensor.device.type == "cpu" for tensor in tensors):
            group = self._group if self._fast is None else self._fast
            self._wait([self._broadcast(group, tensor, owner) for tensor, owner in zip(tensors, owners)], about)
            return
        for tensor, owner in zip(tensors, owners):
            there = tensor.cpu()
            self._wait([self._broadcast(self._group, there, owner)], about)
            if owner != self.rank:
                tensor.copy_(there)

    def give_up(self, why: str) -> None:
        if not self.given_up:
            self.given_up = True
            self.heartbeat.fail(f"rank {self.rank} has given up: {why}")

    def _broadcast(self, group: Any, tensor: Tensor, source: int) -> Any:
        options = BroadcastOptions()
        options.rootRank = source
        return group.broadcast([tensor], options)

    def _meet(self, about: str) -> None:
        """Before anything is exchanged."""
        if self.given_up:
            raise Gone(f"rank {self.rank} of {self.size} has given up, and cannot exchange {about}.")

    def _wait(self, works: Sequence[Any], about: str) -> None:
        try:
            for work in works:
                # The first milliseconds awake, or every exchange would last as long as a nap.
                began = time.monotonic()
                while not work.is_completed():
                    self.heartbeat.check()
                    waited = time.monotonic() - began
                    time.sleep(0 if waited < 0.002 else min(0.005, waited / 10))
                work.wait()
        except Gone as error:
            self._stop(str(error), about, error)
        except RuntimeError as error:
            self.heartbeat.wait_for_failure(3.0)
            who = f"ranks {sorted(self.heartbeat.left)} are done and have left" if self.heartbeat.left else str(error)
            self._stop(self.heartbeat.failure or who, about, error)

    def _stop(self, why: str, about: str, error: BaseException) -> NoReturn:
        raise Gone(
            f"rank {self.rank} of {self.size} cannot go on ({about}): {why}. Its own message says more. Start the run "
            "again from its last checkpoint, on any number of ranks: the round that was interrupted is run again."
        ) from error

    def _unpacked(self, part: Tensor, source: int, about: str) -> Any:
        theirs, value = pickle.loads(part.numpy().data)
        if theirs != about:
            raise RuntimeError(
                f"ranks are out of step: rank {source} is at {theirs!r}, rank {self.rank} at {about!r}. Something that "
                "all ranks do alike was done by some only, such as a checkpoint saved under `if is_global_zero`, or a "
                "decision that depends on a rank's own clock or random numbers."
            )
        return value


def _packed(value: Any, about: str) -> Tensor:
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(f"{about} cannot be sent to other ranks: {error}.") from error
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


class _Pickler(pickle.Pickler):
    """Tensors by their entries alone: a view's own pickle takes all of what it is a view of along."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
            return NotImplemented
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(data.data), value.dtype, tuple(value.shape), value.device.type)


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    return tensor if kind == "cpu" else tensor.to(torch.device(kind, _current(kind)))


def _current(kind: str) -> int:
    module: Any = getattr(torch, kind)
    return int(module.current_device())
