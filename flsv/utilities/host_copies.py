"""Functions that copy small tensors to the CPU, and remember their numbers."""
# A copy from an accelerator waits until all pending work there is done, so numbers that came from the host are
# remembered instead of copied back.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_KNOWN: Any = WeakIdKeyDictionary()


def to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy small tensors to the CPU in a single transfer."""
    known = [tensor.detach() for tensor in tensors]
    there = [tensor for tensor in known if tensor.device.type != "cpu"]
    if not there:
        return known
    numbers = torch.cat([tensor.flatten().double() for tensor in there]).cpu()
    parts = iter(numbers.split([tensor.numel() for tensor in there]))
    return [
        tensor if tensor.device.type == "cpu" else next(parts).view(tensor.shape).to(tensor.dtype)
        for tensor in known
    ]


def copied(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy small tensors to the CPU, and remember their numbers for :func:`on_host`."""
    there = list(tensors)
    here = to_host(there)
    _KNOWN.update(zip(there, (tensor.tolist() for tensor in here)))
    return here


def from_host(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Copy numbers to a device, as a tensor ``[k]``, and remember them for :func:`on_host`."""
    here = torch.tensor(numbers)
    there = here.to(device)
    _KNOWN[there] = here.tolist()
    return there


def on_host(tensor: Tensor) -> list[Any]:
    """Return the numbers in a tensor ``[k]``, without a transfer if they are remembered."""
    known = _KNOWN.get(tensor)
    return tensor.tolist() if known is None else list(known)
