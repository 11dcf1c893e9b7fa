"""What is known of a CUDA device's memory."""

from __future__ import annotations

import torch

from flsv._lightning.evaluation import free_memory


class CudaMemory:
    """A CUDA device's memory, by torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int | None:
        """Bytes that can still be had."""
        return free_memory(self._device)

    def start(self) -> None:
        """Watch the peak from here on (torch's own statistic of it starts anew)."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """The most bytes used since ``start``, beyond those used then."""
        return torch.cuda.max_memory_allocated(self._device) - self._before
