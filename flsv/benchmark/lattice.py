"""The federations of the benchmark, trained for all coalitions side by side, see :mod:`flsv.loop.side_by_side`."""

from __future__ import annotations

import lightning as L
from torch import Tensor

from flsv.benchmark.federation import Federation, quiet
from flsv.filters import OutlierFilter
from flsv.games.retraining import RetrainedUtility
from flsv.loop import FederatedLoop
from flsv.loop.side_by_side import NotSideBySide, SideBySideUtility
from flsv.report.folder import Reporting
from flsv.sampling import FixedCohort
from flsv.seeding import isolated_rngs


def train_coalitions(federation: Federation, masks: Tensor, seed: int, compare: bool = False) -> Tensor:
    """Train a federation of each coalition's members, by FedAvg with their samples as weights.

    Args:
        federation: whose clients.
        masks: bool ``[K, n]``, row by row who is in the coalition; a row without anybody is the untrained model.
        seed: of the initial weights, which all coalitions share, and of the clients' batches.
        compare: train the coalition of all by itself, too, and compare.

    Returns:
        Float64 ``[K]``, the federation's own performance (more is better).

    Raises:
        ConfigurationError: a module that cannot be trained as rows of a batched one; by itself, the coalition of all
            comes to another model.
    """

    def trainer(cohort: FixedCohort) -> L.Trainer:
        loop = FederatedLoop(
            sampler=cohort,
            uploads=[*federation.attackers()],
            filters=[OutlierFilter(threshold=None)],
            local_epochs=federation.local_epochs,
            seed=seed,
            reporting=Reporting(table=False, figures=0, files=False),
        )
        return federation.trainer(loop)

    # What the loop's own seed gives: with the same seed it starts from the same weights.
    with isolated_rngs(seed, "benchmark"), quiet():
        alone = RetrainedUtility(
            trainer,
            federation.module(),
            federation.datamodule(),
            federation.performance,
            max_clients=masks.shape[1],
            mode=federation.mode,
        )
        try:
            return SideBySideUtility(alone, seed, compare)(masks)
        except NotSideBySide as error:
            raise error.__cause__ or error from None
