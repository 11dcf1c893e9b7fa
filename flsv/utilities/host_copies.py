"""Functions that copy small tensors to the CPU, and remember their numbers."""
# A copy from an accelerator waits until all pending work there is done, so numbers that came from the host are
# remembered instead of copied back.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

#: The numbers of tensors that have been copied, by tensor.
_NUMBERS_BY_TENSOR: Any = WeakIdKeyDictionary()


def to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy small tensors to the CPU in a single transfer."""
    detached = [tensor.detach() for tensor in tensors]
    device_tensors = [tensor for tensor in detached if tensor.device.type != "cpu"]
    if not device_tensors:
        return detached
    flat_tensors = [tensor.flatten().double() for tensor in device_tensors]
    sizes = [tensor.numel() for tensor in device_tensors]
    all_on_host = torch.cat(flat_tensors).cpu()  # one transfer
    parts_on_host = iter(all_on_host.split(sizes))

    host_tensors = []
    for tensor in detached:
        if tensor.device.type == "cpu":
            host_tensors.append(tensor)
        else:
            part = next(parts_on_host).view(tensor.shape)
            host_tensors.append(part.to(tensor.dtype))
    return host_tensors


def copied(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy small tensors to the CPU, and remember their numbers for :func:`on_host`."""
    originals = list(tensors)
    copies = to_host(originals)
    for original, copy in zip(originals, copies):
        _NUMBERS_BY_TENSOR[original] = copy.tolist()
    return copies


def from_host(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Copy numbers to a device, as a tensor ``[k]``, and remember them for :func:`on_host`."""
    host_tensor = torch.tensor(numbers)
    device_tensor = host_tensor.to(device)
    _NUMBERS_BY_TENSOR[device_tensor] = host_tensor.tolist()
    return device_tensor


def on_host(tensor: Tensor) -> list[Any]:
    """Return the numbers in a tensor ``[k]``, without a transfer if they are remembered."""
    numbers = _NUMBERS_BY_TENSOR.get(tensor)
    if numbers is None:
        return tensor.tolist()
    return list(numbers)
