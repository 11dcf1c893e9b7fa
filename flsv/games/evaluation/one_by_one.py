"""Evaluates models one at a time: on the calling thread, or on several threads with a replica each.

On the CPU a module per thread with a single intra-op thread each beats both intra-op threading of one model (small
layers do not fill several cores) and ``vmap`` (batched weights turn convolutions into slow grouped ones).

Convolutional networks are run in the channels-last memory layout where they work in it: pooling has vectorised kernels
for this layout only. Measured on one core, LeNet5 takes 0.7 of its time, ShapFed's CNN
0.4 and ResNet-18 all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from flsv.games.evaluation.batches import ValidationBatches
from flsv.games.evaluation.replica import Build, Replica, metric_value
from flsv.games.evaluation.scores import ScoreSums

# With fewer models than this per thread, models are cut into groups of batches, so that all threads end together.
_MODELS_PER_THREAD = 8


def run_serial(replica: Replica, build: Build, count: int, batches: ValidationBatches, sums: ScoreSums) -> None:
    """On the calling thread, with torch's own intra-op threads or on the replica's accelerator."""
    for index in range(count):
        replica.load(build, index)
        sums.correct[index], losses = replica.score(batches, range(len(batches)))
        sums.losses[index] = torch.stack(losses)
        if replica.metric is not None:
            sums.custom[index] = metric_value(replica.metric)


def run_threads(
    replicas: Sequence[Replica], build: Build, count: int, batches: ValidationBatches, sums: ScoreSums
) -> None:
    """On one new thread per replica. What a model scores does not depend on the number of threads."""
    groups = _groups(count, len(replicas), len(batches), whole=replicas[0].metric is not None)
    tasks: SimpleQueue[tuple[int, range]] = SimpleQueue()
    for index in range(count):
        for group in groups:
            tasks.put((index, group))
    workers = min(len(replicas), tasks.qsize())
    lock, started = threading.Lock(), threading.Barrier(workers + 1)

    @torch.no_grad()
    def work(replica: Replica) -> None:
        _use_one_thread()
        started.wait()
        loaded = None
        while True:
            try:
                index, group = tasks.get_nowait()
            except Empty:
                return
            if index != loaded:
                replica.load(build, index)
                loaded = index
            correct, losses = replica.score(batches, group)
            with lock:
                sums.correct[index] += correct
                sums.losses[index, group.start : group.stop] = torch.stack(losses)
                if replica.metric is not None:
                    sums.custom[index] = metric_value(replica.metric)

    before = torch.get_num_threads()
    # A context of Lightning's may set the process' default dtype and put it back: entered here, too, it is entered
    # first and left last, whatever order the threads come in.
    with replicas[0].context(), ThreadPoolExecutor(workers) as pool:
        try:
            futures = [pool.submit(work, replica) for replica in replicas[:workers]]
            started.wait()
            _give_back(before)
            for future in futures:
                future.result()
        finally:
            # After an error or an interrupt the other threads stop at their next task, or do not start.
            started.abort()
            while not tasks.empty():
                try:
                    tasks.get_nowait()
                except Empty:
                    break


def _groups(models: int, threads: int, batches: int, whole: bool) -> list[range]:
    """The batches in groups: one, if there are models enough to keep every thread busy, else several."""
    wanted = -(-_MODELS_PER_THREAD * threads // max(models, 1))
    groups = 1 if whole or threads == 1 else max(1, min(batches, wanted))
    edges = [batches * group // groups for group in range(groups + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _use_one_thread() -> None:
    """This thread's operators run on this thread.

    With OpenMP the number of threads belongs to the calling thread; torch also notes it for threads to come, which
    :func:`_give_back` undoes. Other builds have one pool for all threads: there it is left alone.
    """
    if torch.backends.openmp.is_available():
        # A thread takes the noted number when it first asks for it. It must do so now, not after _give_back.
        torch.get_num_threads()
        torch.set_num_threads(1)


def _give_back(threads: int) -> None:
    """Threads to come get as many as the calling thread has; threads that exist keep their number."""
    if torch.backends.openmp.is_available():
        torch.set_num_threads(threads)


def in_channels_last(replica: Replica, batches: ValidationBatches) -> Replica | None:
    """A twin of the replica in this layout, if its network is convolutional and works in it; else None.

    Networks that flatten with ``view`` do not: they expect the default layout.
    """
    x, y = batches[0]
    convolutional = any(parameter.ndim == 4 for parameter in replica.module.parameters())
    if not convolutional or not isinstance(x, Tensor) or x.ndim != 4:
        return None
    x, y, classes = x[:2], y[:2], len(batches.support)
    twin = replica.twin()
    twin.module.to(memory_format=torch.channels_last)
    try:
        found = twin.logits(x.contiguous(memory_format=torch.channels_last), y, classes)
    except RuntimeError:
        return None
    same = torch.allclose(found, replica.logits(x, y, classes), rtol=1e-2, atol=1e-3, equal_nan=True)
    return twin if same else None
