"""Two processes, each with its own rounds, agree on the value of all of them: every metric of ``flsv.metrics``."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from testing.metric_cases import METRIC_CASES
from torchmetrics import Metric

from flsv.testing.checks import equal
from flsv.testing.metric import results_of
from flsv.testing.rounds import HALF, ROUND_INDICES

pytestmark = pytest.mark.slow

#: Metrics that refuse to be merged: they need all rounds in one process.
NOT_MERGED = ("CosineGradientShapley", "OneRoundShapley")
ALL_ROUNDS = ROUND_INDICES
ROUNDS_OF_PROCESS = [ROUND_INDICES[:HALF], ROUND_INDICES[HALF:]]


MERGED = [name for name in METRIC_CASES if name not in NOT_MERGED]


def results_of_metric(metric: Metric) -> dict[str, Any]:
    metric.compute()  # keeps its value, since no metric computes within the context
    with metric.sync_context():
        return results_of(metric)


def run_process(rank: int, folder: str):
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    # They meet in a file: a store that the first process serves is gone when that one leaves, and the other may hang.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name in NOT_MERGED:
        metric = METRIC_CASES[name].updated(ALL_ROUNDS[:1])
        with pytest.raises(ValueError, match="needs all rounds in one"):
            metric.compute()

    results = {}
    for name in MERGED:
        case = METRIC_CASES[name]
        results[name] = results_of_metric(case.updated(ROUNDS_OF_PROCESS[rank]))
        # Process 0 has no rounds: as after a start, or with more processes than clients.
        metric_if_one_is_idle = case.updated(ALL_ROUNDS if rank == 1 else [])
        results[f"{name}, one idle"] = results_of_metric(metric_if_one_is_idle)

    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results_by_process(tmp_path_factory):
    if not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    folder = tmp_path_factory.mktemp("processes")
    mp.start_processes(
        run_process,
        args=(str(folder),),
        nprocs=2,
        start_method="fork",
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.by_turn
@pytest.mark.parametrize("name", MERGED)
def test_metric_merged_over_two_processes_equals_that_of_one_process(results_by_process, name):
    expected = METRIC_CASES[name].results()
    assert expected["value"].isfinite().any()

    for result in results_by_process:
        assert equal(result[f"{name}, one idle"], expected, rtol=1e-4)
        # ShadowShapley's intervals are of the spread over the last rounds, of which a process has a part.
        merged = {**result[name], "half_width": expected["half_width"]}
        assert equal(merged, expected, rtol=1e-4)
