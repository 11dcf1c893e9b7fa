"""Evaluates models in chunks that fit the device's memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch.utilities.memory import is_oom_error

from flsv._lightning.evaluation import free_memory

# What the first chunk has, from which the memory of a model is measured.
_PROBE = 2
# Where nothing is known of the memory.
_DEFAULT = 16
_LARGEST = 1024
_SHARE_OF_FREE = 0.7


class CudaMemory:
    """A CUDA device's memory, by torch's caching allocator; of another device nothing is known."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0

    def free(self) -> int | None:
        """Bytes that can still be had; None where the device does not report them."""
        return free_memory(self._device) if self._device.type == "cuda" else None

    def start(self) -> None:
        """Watch the peak from here on (torch's own statistic of it starts anew)."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """The most bytes used since ``start``, beyond those used then."""
        return torch.cuda.max_memory_allocated(self._device) - self._before if self._device.type == "cuda" else 0

    def release(self) -> None:
        """Give cached blocks back, after an allocation failed."""
        torch.cuda.empty_cache()


class Chunks:
    """How many models are evaluated at once.

    The first chunk is small, and what it takes decides how many models fit. A chunk that does not fit after all is
    halved and run again, and later ones are no larger.

    Args:
        size: models at once; None: by memory.
        memory: the device's.

    Attributes:
        size: models at once from now on, None until it is known.

    Example:
        >>> Chunks(2, CudaMemory(torch.device("cpu"))).run(5, print)
        range(0, 2)
        range(2, 4)
        range(4, 5)
    """

    def __init__(self, size: int | None, memory: CudaMemory) -> None:
        self.size, self._memory = size, memory

    def run(self, count: int, evaluate: Callable[[range], None]) -> None:
        """Have ``count`` models evaluated, the range of one chunk after the other."""
        start = 0
        while start < count:
            rows = range(start, min(start + (self.size or _PROBE), count))
            if self._fits(evaluate, rows):
                start = rows.stop
            else:
                # By now the failed chunk's tensors are gone: an exception keeps them alive while it is handled.
                self._memory.release()
                self.size = max(1, len(rows) // 2)

    def _fits(self, evaluate: Callable[[range], None], rows: range) -> bool:
        if self.size is None:
            self._memory.start()
        try:
            evaluate(rows)
        except RuntimeError as error:
            if not is_oom_error(error) or len(rows) == 1:
                raise
            return False
        if self.size is None:
            self.size = self._fitting(self._memory.peak() / len(rows))
        return True

    def _fitting(self, bytes_per_model: float) -> int:
        free = self._memory.free()
        if free is None:
            return _DEFAULT
        fitting = int(_SHARE_OF_FREE * free / max(bytes_per_model, 1))
        # A power of two, so that a little more or less free memory does not change the chunk, and with it the rounding.
        return 1 << max(0, min(fitting, _LARGEST).bit_length() - 1)
