"""AfterTheRun: trains coalitions when a run has ended, and completes the values of the metrics that wait for them.

It also trains by a fit one of the coalitions that were rows of one batched model, which proves the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv._lightning.rounding import rounding_of
from flsv.data import FederatedDataModule
from flsv.engines.ranks import ranks_of
from flsv.games.performance import CLASSIFICATION, ModelScore
from flsv.metrics.shadow import ShadowShapley
from flsv.retraining.coalition_fit import CoalitionFailed, Curves, FitOrder, FitResult
from flsv.retraining.forked_fits import ForkedFits
from flsv.retraining.kept_beginning import KeptBeginning
from flsv.retraining.proof import difference
from flsv.retraining.whole_fits import COALITIONS, Unproved, WholeFits, called, trained_again


def measures_of(metrics: Iterable[ShadowShapley]) -> dict[str, str | ModelScore]:
    """Return the performances by which models are measured for some metrics, by the performances' names.

    For a classifier these are all performances of its outputs, since ``flsv retrain`` shows shares by each of them."""
    measures = {called(metric.measured_by): metric.measured_by for metric in metrics}
    classes = {} if measures.keys().isdisjoint(CLASSIFICATION) else {name: name for name in CLASSIFICATION}
    return measures | classes


def row_disproved(forks: ForkedFits, order: FitOrder, row: Tensor, steps: float) -> str | None:
    """Train a coalition that is a row by a fit too, and compare the two models.

    Args:
        forks: the fits of coalitions.
        order: the coalition, and the round after which the models are compared.
        row: ``[P]``, the row's model after this round.
        steps: the difference of equal models that the precision allows, see :func:`flsv.retraining.proof.difference`.

    Returns:
        The reason why the row is wrong; None: it is right.
    """
    names = f"the federation of clients {list(order.members)} alone"
    ((_, found),) = forks.train([order])
    if isinstance(found, CoalitionFailed):
        return f"{names} has failed ({found})"
    again = partial(trained_again, forks, order)
    share = difference(found.last, row.cpu(), found.start, again, steps)
    if share is None:
        return None
    return f"{names} comes to a model that lies {100 * share:.2g} % of its way from that of the row"


class AfterTheRun:
    """The training of coalitions after a run, each by a fit of its own, for the metrics that wait for it.

    Args:
        metrics: the metrics that wait, by name, of which at least one has a round to value.
        masks: bool ``[K, n]``, the members of the coalitions, the empty and the full coalition first.
        beginning: the fit's beginning, from which coalitions are trained.
        initial: the module's ``state_dict`` before the first round.
    """

    def __init__(
        self,
        metrics: Mapping[str, ShadowShapley],
        masks: Tensor,
        beginning: KeptBeginning,
        initial: dict[str, Any],
    ) -> None:
        self._metrics, self._masks, self._beginning, self._initial = dict(metrics), masks, beginning, initial
        self._rounds = sorted({index for metric in metrics.values() for index in metric.valued.tolist()})

    def train(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        seed: int,
        folder: Path | None,
        settings: Mapping[str, str],
        resumed: bool,
        run: tuple[Tensor, int],
    ) -> dict[int, dict[str, Tensor]]:
        """Train the coalitions and complete the metrics' values.

        Args:
            trainer: the fit's trainer, after the last round.
            data: the data module, with its samples assigned to clients.
            seed: the run's seed.
            folder: the run's folder, into which the coalitions' utilities are written; None: they are not written.
            settings: the settings that these utilities depend on.
            resumed: whether utilities that are in the folder already belong to this run.
            run: ``[P]``, the run's model after its last round, and the index of that round.

        Returns:
            ``{round: {metric: values}}``, the metrics' values after each round; empty if a training has failed, which a
            warning reports.
        """
        path = None if folder is None else folder / COALITIONS
        measures = measures_of(self._metrics.values())
        way = self._beginning.fits(trainer.lightning_module, data, measures)
        of_run = data.num_samples, seed, self._initial
        proof = ranks_of(trainer), run, rounding_of(trainer).steps
        fits = WholeFits(way, *of_run, measures, self._rounds, *proof, path, settings, resumed)
        try:
            curves = fits(self._masks[2:])
        except CoalitionFailed as error:  # the federation itself is trained
            rank_zero_warn(f"{', '.join(self._metrics)}: there are no values. {error}{self._remedy(error)}")
            return {}
        assert fits.everybody is not None
        return self._complete(curves, fits.everybody, run[1])

    def _complete(self, curves: Sequence[Curves], everybody: FitResult, last: int) -> dict[int, dict[str, Tensor]]:
        """Complete the metrics' values from the coalitions' utilities.

        Args:
            curves: each coalition's utilities after the rounds, without the empty and the full coalition.
            everybody: the result of the coalition of all clients.
            last: the index of the run's last round.
        """
        found: dict[int, dict[str, Tensor]] = {index: {} for index in self._rounds}
        for name, metric in self._metrics.items():
            valued = metric.valued.tolist()
            by = called(metric.measured_by)
            averaged = valued[-1] == last and not torch.equal(everybody.last, everybody.delivered)
            if averaged or metric.ends.isnan().all():
                metric.deliver(everybody.before[by], everybody.curves[by][-1])
            utilities = torch.stack([curve[by] for curve in curves], 1)[[self._rounds.index(index) for index in valued]]
            for index, values in metric.complete(self._masks, utilities).items():
                found[index][name] = values
        return found

    def _remedy(self, error: CoalitionFailed) -> str:
        """Return what to do where coalitions would not be trained as the run was, for a message."""
        if not isinstance(error, Unproved):
            return ""
        if self._beginning.forks is not None:
            return (
                ": training depends on something that neither its seed nor the state of this process at the beginning "
                "sets, as the time, a file that it writes or a generator of its own does. Seed it, and train again."
            )
        return (
            f": coalitions were trained by copies of the Trainer and the module, since {self._beginning.no_fork}, and "
            "a copy is bound to something of the original. Value the run by flsv retrain, or give flsv.retrain a "
            "function that makes the module."
        )
