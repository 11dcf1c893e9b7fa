"""Asks an accelerator how much memory is free."""

from __future__ import annotations

from typing import Any

import torch


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; None where it cannot tell.

    Example:
        >>> free_memory(torch.device("meta")) is None
        True
    """
    backend: Any = getattr(torch, device.type, None)
    if not hasattr(backend, "mem_get_info"):
        return None
    free, _ = backend.mem_get_info(device)
    # Blocks that torch holds but does not use can be had, too.
    return free + backend.memory_reserved(device) - backend.memory_allocated(device)
