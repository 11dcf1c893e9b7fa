"""Two processes, each with its own rounds, agree on the value of all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flsv.metrics import (
    ClassSpecificShapley,
    CumulativeShapley,
    DecayedShapley,
    PartialFederatedShapley,
    SurrogateFederatedShapley,
)

ROUNDS = [([0, 1, 2], 1), ([1, 3], 2), ([0, 2, 3], 3), ([0, 1], 4)]


def metrics() -> dict[str, torch.nn.Module]:
    return {
        "cssv": ClassSpecificShapley(num_clients=4, num_classes=3, momentum=0.6),
        "partial": PartialFederatedShapley(num_clients=4, estimator="exact", momentum=0.5),
        "ssv": SurrogateFederatedShapley(num_clients=4, estimator="exact"),
        "sum": CumulativeShapley(num_clients=4, estimator="exact"),
        "decayed": DecayedShapley(num_clients=4, decay=0.7),
    }


def feed(metric: torch.nn.Module, ids: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    clients = torch.tensor(ids)
    if isinstance(metric, ClassSpecificShapley):
        heads = torch.randn(len(ids), 3, 5, generator=generator)
        metric.update(clients, heads, heads.mean(0))
    else:
        worth = torch.randn(len(ids), generator=generator)
        index = (seed - 1,) if isinstance(metric, DecayedShapley) else ()
        metric.update(clients, *index, lambda masks: masks.float() @ worth)


def process(rank: int, folder: str) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    # They meet in a file: a store that the first process serves is gone when that one leaves, and the other may hang.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    values = {}
    for name, metric in metrics().items():
        for ids, seed in ROUNDS[2 * rank : 2 * rank + 2]:
            feed(metric, ids, seed)
        values[name] = metric.compute()
    torch.save(values, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes(tmp_path: Path) -> None:
    mp.spawn(process, args=(str(tmp_path),), nprocs=2)
    alone = metrics()
    for metric in alone.values():
        for ids, seed in ROUNDS:
            feed(metric, ids, seed)
    for rank in range(2):
        values = torch.load(tmp_path / f"{rank}.pt")
        for name, metric in alone.items():
            torch.testing.assert_close(
                values[name], metric.compute(), equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
