"""Evaluates models one after the other, or under ``torch.func.vmap`` in chunks that fit the device's memory."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor
from torch.func import functional_call, vmap
from torchmetrics import Metric

from flsv._lightning.evaluation import free_memory
from flsv.games.replica import Build, Replica, checked_logits, metric_value, private_metric
from flsv.games.scores import ScoreSums, ValidationBatches, score_batch, update_by_logits


def run_serial(replica: Replica, build: Build, count: int, batches: ValidationBatches, sums: ScoreSums) -> None:
    """One model after the other."""
    for index in range(count):
        replica.load(build, index)
        sums.correct[index], losses = replica.score(batches)
        sums.losses[index] = torch.stack(losses)
        if replica.metric is not None:
            sums.custom[index] = metric_value(replica.metric)


# What the first chunk has, from which the memory of a model is measured.
_PROBE = 2
_LARGEST = 1024
_SHARE_OF_FREE = 0.7


class DeviceMemory:
    """The free memory of a device; here a device that does not report it."""

    #: The chunk where nothing is known.
    default_chunk = 16

    def free(self) -> int | None:
        """Bytes that can still be had."""
        return None

    def start(self) -> None:
        """Watch the peak from here on (torch's own statistic of it starts anew)."""

    def peak(self) -> int:
        """The most bytes used since ``start``, beyond those used then."""
        return 0

    def release(self) -> None:
        """Give cached blocks back, after an allocation failed."""


class CudaMemory(DeviceMemory):
    """A CUDA device's memory, by torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int | None:
        return free_memory(self._device)

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def release(self) -> None:
        torch.cuda.empty_cache()


class NotMapped(Exception):
    """vmap failed on the module's forward; ``args[0]`` is the error."""


class VmapRunner:
    """Evaluates models in chunks.

    The first chunk is small, and what it takes decides how many models fit. A chunk that does not fit after all is
    halved and run again, and later ones are no larger.

    Args:
        replica: gives the module, the space, the context and the metric.
        chunk: models at once; None: by memory.
        memory: the device's.

    Attributes:
        chunk: models at once from now on, None until it is known.
        proven: whether a chunk has come through, so that an error is not the module's inability to be mapped.
    """

    def __init__(self, replica: Replica, chunk: int | None, memory: DeviceMemory | None = None) -> None:
        self.chunk, self.proven = chunk, False
        self._replica = replica
        device = replica.vector.device
        self._memory = memory or (CudaMemory(device) if device.type == "cuda" else DeviceMemory())
        self._metrics: list[Metric] = []
        own = (*replica.module.named_parameters(), *replica.module.named_buffers())
        self._dtypes = {name: tensor.dtype for name, tensor in own}

    def run(self, build: Build, count: int, batches: ValidationBatches, sums: ScoreSums) -> None:
        start = 0
        while start < count:
            measure = self.chunk is None
            stop = min(start + (self.chunk or _PROBE), count)
            if self._fits(build, range(start, stop), batches, sums, measure):
                start, self.proven = stop, True
            else:
                # By now the failed chunk's tensors are gone: an exception keeps them alive while it is handled.
                self._memory.release()
                self.chunk = max(1, (stop - start) // 2)

    def _fits(self, build: Build, rows: range, batches: ValidationBatches, sums: ScoreSums, measure: bool) -> bool:
        if measure:
            self._memory.start()
        try:
            self._run_chunk(build, rows, batches, sums)
        except RuntimeError as error:
            if not _out_of_memory(error) or len(rows) == 1:
                raise
            return False
        if measure:
            self.chunk = self._chunk_for(self._memory.peak() / len(rows))
        return True

    def _chunk_for(self, bytes_per_model: float) -> int:
        free = self._memory.free()
        if free is None:
            return self._memory.default_chunk
        fitting = int(_SHARE_OF_FREE * free / max(bytes_per_model, 1))
        # A power of two, so that a little more or less free memory does not change the chunk, and with it the rounding.
        return 1 << max(0, min(fitting, _LARGEST).bit_length() - 1)

    def _run_chunk(self, build: Build, rows: range, batches: ValidationBatches, sums: ScoreSums) -> None:
        replica, classes = self._replica, len(batches.support)
        vectors = torch.empty(len(rows), replica.space.size, dtype=replica.space.dtype, device=replica.vector.device)
        for row, index in enumerate(rows):
            build(index, vectors[row])
        state = {n: t.to(self._dtypes[n]) for n, t in replica.space.unflatten(vectors).items()}
        metrics = self._metrics_for(len(rows))
        correct = torch.zeros_like(sums.correct[: len(rows)])
        for position in range(len(batches)):
            x, y = batches[position]
            logits = self._forward(state, x)
            checked_logits(logits[0], y, classes)
            hits, losses = score_batch(logits, y)
            correct += hits
            sums.losses[rows.start : rows.stop, position] = losses
            for metric, own in zip(metrics, logits):
                update_by_logits(metric, own, y)
        sums.correct[rows.start : rows.stop] = correct
        for metric, index in zip(metrics, rows):
            sums.custom[index] = metric_value(metric)

    def _forward(self, state: dict[str, Tensor], x: Any) -> Tensor:
        """Logits ``[c, B, M]``."""
        try:
            with self._replica.context():
                return vmap(lambda own: functional_call(self._replica.module, own, (x,)))(state)
        except Exception as error:
            if self.proven or _out_of_memory(error):
                raise
            raise NotMapped(error) from error

    def _metrics_for(self, models: int) -> list[Metric]:
        if self._replica.metric is None:
            return []
        while len(self._metrics) < models:
            self._metrics.append(private_metric(self._replica.metric))
        for metric in self._metrics:
            metric.reset()
        return self._metrics[:models]


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or is_oom_error(error)
